"""Executors by name: the local executor, and executors that installed packages provide.

A package provides the executor NAME by entry points of the group `rayfed.executor.NAME`: `execution`,
`sweep_execution` and `starting`, with the signatures of this module. Therefore this module does not import Ray.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from rayfed.errors import UserError, nearest

if TYPE_CHECKING:
    from rayfed.runs.sweeps import SweepExecution
    from rayfed.simulation.executors.base import Execution


_GROUP = "rayfed.executor."


def execution(name: str, address: str | None = None) -> Execution:
    """Return the function that opens executor `name` for runs. Raises `UserError` if `address` cannot be used."""
    if _is_local(name, address):
        from rayfed.simulation.executors.local import local

        return local
    found: Execution = load_entry_point(name, "execution")(address)
    return found


def sweep_execution(name: str, address: str | None = None) -> SweepExecution:
    """Return the function that runs sweeps on executor `name`. Raises `UserError` if `address` cannot be used."""
    if _is_local(name, address):
        from rayfed.runs.local_sweep import local_sweep

        return local_sweep
    found: SweepExecution = load_entry_point(name, "sweep_execution")(address)
    return found


def start_in_background(name: str) -> AbstractContextManager[None]:
    """Return a context manager that starts an executor's processes in the background."""
    found: AbstractContextManager[None] = load_entry_point(name, "starting")()
    return found


def load_entry_point(executor: str, what: str) -> Any:
    """Return an object that an installed package provides for an executor, by the name of its entry point (`what`).

    Raises `UserError` if no package provides it, or several do.
    """
    found = list(entry_points(group=_GROUP + executor, name=what))
    if len(found) == 1:
        return found[0].load()
    if found:
        raise UserError(
            f"executor: {len(found)} installed packages provide '{executor}' ({what}): uninstall all of them except one"
        )
    names = {"ray", "local"} | {
        group.removeprefix(_GROUP) for group in entry_points().groups if group.startswith(_GROUP)
    }
    if executor not in names:
        raise UserError(f"executor: unknown executor '{executor}': {nearest(executor, names)}")
    again = "reinstall rayfed (`pip install .` in its checkout), or " if executor == "ray" else ""
    raise UserError(f"executor: no installed package provides '{executor}' ({what}): {again}use --executor local")


def _is_local(name: str, address: str | None) -> bool:
    if name == "local" and address:
        raise UserError("--executor local runs in this process, not on a cluster: remove --address or --executor")
    return name == "local"
