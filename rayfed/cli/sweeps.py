"""Sweeps as commands play them: with their progress, and the report at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def play(scenario: Any, out: str | None, execution: Any, quiet: bool, bar: bool) -> Any:
    """Play a new sweep, show its progress, and return its folder; `bar`: unless a debugger may prompt there."""
    from rayfed.engine import sweeps

    return _watched(quiet, bar, lambda view: sweeps.sweep(scenario, out, execution, view))


def resume(path: str, failed: bool, execution: Any, quiet: bool, bar: bool) -> None:
    """Play the missing trials of a sweep and show its progress, as `play` does."""
    from rayfed.engine import sweeps

    _watched(quiet, bar, lambda view: sweeps.resume(path, failed, execution, view))


def _watched(quiet: bool, bar: bool, play: Callable[[Any], Any]) -> Any:
    from rich.console import Console

    from rayfed.report.sweep import write_sweep_report
    from rayfed.report.terminal_sweep import SweepView

    view = SweepView(Console(), quiet, bar)
    try:
        folder = play(view)
        view.finished(folder.outcomes().to_pylist(), folder.fields, write_sweep_report(folder))
        return folder
    finally:
        view.close()
