"""Executors by name: this process's own, and those that installed packages bring.

A package brings the executor NAME by entry points of the group `rayfed.executor.NAME`: `execution` and
`sweep_execution` as they are here, `starting`, and what else its own users call. So nothing here imports Ray.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from rayfed.errors import UserError, nearest

if TYPE_CHECKING:
    from rayfed.engine.executor import Execution
    from rayfed.engine.sweeps import SweepExecution


_GROUP = "rayfed.executor."


def execution(name: str, address: str | None = None) -> Execution:
    """Return the execution that plays runs; raises `UserError` if a cluster is named that it would not use."""
    if _is_local(name, address):
        from rayfed.engine.local import local

        return local
    found: Execution = brought(name, "execution")(address)
    return found


def sweep_execution(name: str, address: str | None = None) -> SweepExecution:
    """Return the execution that plays sweeps; raises `UserError` if a cluster is named that it would not use."""
    if _is_local(name, address):
        from rayfed.engine.local_sweep import local_sweep

        return local_sweep
    found: SweepExecution = brought(name, "sweep_execution")(address)
    return found


def starting(name: str) -> AbstractContextManager[None]:
    """Return a context that starts what an executor needs on this machine while its block imports and reads."""
    found: AbstractContextManager[None] = brought(name, "starting")()
    return found


def brought(executor: str, what: str) -> Any:
    """Return what an installed package brings to an executor; raises `UserError` where none, or several, bring it."""
    found = list(entry_points(group=_GROUP + executor, name=what))
    if len(found) == 1:
        return found[0].load()
    if found:
        raise UserError(f"executor: {len(found)} installed packages bring '{executor}' ({what}): keep one of them")
    names = {"ray", "local"} | {
        group.removeprefix(_GROUP) for group in entry_points().groups if group.startswith(_GROUP)
    }
    if executor not in names:
        raise UserError(f"executor: there is none called '{executor}': {nearest(executor, names)}")
    again = "install rayfed again (`pip install .` in its checkout), or " if executor == "ray" else ""
    raise UserError(f"executor: no installed package brings '{executor}' ({what}): {again}take --executor local")


def _is_local(name: str, address: str | None) -> bool:
    if name == "local" and address:
        raise UserError("--executor local plays in this process, not on a cluster: leave --address or --executor out")
    return name == "local"
