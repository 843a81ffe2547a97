"""The command `sweep`, which plays many runs of one scenario."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from rayfed.cli.common import (
    Address,
    Debug,
    Executor,
    ExecutorName,
    Out,
    Quiet,
    ScenarioFile,
    Set,
    errors_for_people,
    load,
    ray_beside,
    sweep_execution,
)
from rayfed.errors import UserError

commands = typer.Typer()


@commands.command()
def sweep(
    scenario: ScenarioFile,
    changes: Set = None,
    out: Out = None,
    executor: Executor = ExecutorName.RAY,
    address: Address = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Play every trial that a scenario's `sweep` stands for, side by side; `rayfed launch` does the same."""
    with ray_beside(executor, address, scenario, changes), errors_for_people(debug, resumable=True):
        loaded = load(scenario, changes)
        if loaded.sweep is None:
            raise UserError(f"{scenario} has no `sweep`: say there which fields vary, as docs/sweeps.md shows")
        play(loaded, out, sweep_execution(executor, address), quiet)


def play(scenario: Any, out: str | None, execution: Any, quiet: bool) -> Any:
    """Play a new sweep, show its progress, and return its folder."""
    from rayfed.engine import sweeps

    return _watched(quiet, lambda view: sweeps.sweep(scenario, out, execution, view))


def resume(path: str, failed: bool, execution: Any, quiet: bool) -> None:
    """Play the missing trials of a sweep and show its progress."""
    from rayfed.engine import sweeps

    _watched(quiet, lambda view: sweeps.resume(path, failed, execution, view))


def _watched(quiet: bool, play: Callable[[Any], Any]) -> Any:
    from rich.console import Console

    from rayfed.report.sweep import write_sweep_report
    from rayfed.report.terminal_sweep import SweepView

    view = SweepView(Console(), quiet)
    try:
        folder = play(view)
        view.finished(folder.outcomes().to_pylist(), folder.fields, write_sweep_report(folder))
        return folder
    finally:
        view.close()
