"""Executions by name: on Ray, or in this process without importing Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rayfed.errors import UserError, nearest

if TYPE_CHECKING:
    from rayfed.engine.executor import Execution
    from rayfed.engine.sweeps import SweepExecution

Name = Literal["ray", "local"]


def execution(name: str, address: str | None = None) -> Execution:
    """Return the execution that plays runs; raises `UserError` if a cluster is named that it would not use."""
    if _is_ray(name, address):
        from actors.executor import on_ray

        return on_ray(address)
    from rayfed.engine.local import local

    return local


def sweep_execution(name: str, address: str | None = None) -> SweepExecution:
    """Return the execution that plays sweeps; raises `UserError` if a cluster is named that it would not use."""
    if _is_ray(name, address):
        from actors.sweep import on_tune

        return on_tune(address)
    from rayfed.engine.local_sweep import local_sweep

    return local_sweep


def _is_ray(name: str, address: str | None) -> bool:
    if name not in ("ray", "local"):
        raise UserError(f"executor: there is none called '{name}': {nearest(name, ('ray', 'local'))}")
    if name == "local" and address:
        raise UserError("--executor local plays in this process, not on a cluster: leave --address or --executor out")
    return name == "ray"
