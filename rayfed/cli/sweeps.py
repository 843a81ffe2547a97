"""Run and resume sweeps for the commands, with printed progress and a report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from shlex import quote
from typing import Any

from rayfed.cli.common import ExecutorName
from rayfed.report.terminal.console import console


def run_in_terminal(scenario: Any, out: str | None, executor: ExecutorName, address: str | None, quiet: bool) -> Any:
    """Run a new sweep, show the progress of the sweep, and return the sweep's folder."""
    from rayfed.runs import sweeps
    from rayfed.runs.executors import sweep_execution

    execution = sweep_execution(executor, address)
    return _watched(quiet, executor, lambda view: sweeps.sweep(scenario, out, execution, view))


def resume_in_terminal(path: str, failed: bool, executor: ExecutorName, address: str | None, quiet: bool) -> None:
    """Run the missing trials of a sweep (with `failed`, also failed trials), and show the progress."""
    from rayfed.runs import sweeps
    from rayfed.runs.executors import sweep_execution

    execution = sweep_execution(executor, address)
    _watched(quiet, executor, lambda view: sweeps.resume(path, failed, execution, view))


def _watched(quiet: bool, executor: ExecutorName, run: Callable[[Any], Any]) -> Any:
    from rayfed.report.html.sweep import try_sweep_report, write_sweep_report
    from rayfed.report.terminal.sweep import SweepView
    from rayfed.results.sweep_folder import SweepFolder

    view = SweepView(console(), quiet, bar=executor is ExecutorName.RAY)  # a bar would hide a debugger's prompt
    try:
        folder = run(view)
        view.finished(folder.outcomes().to_pylist(), folder.fields, try_sweep_report(folder, view.note))
        return folder
    except KeyboardInterrupt as error:
        if view.folder:
            error.add_note(quote(view.folder.url))  # the argument of `rayfed resume`
            view.close()
            with suppress(Exception, KeyboardInterrupt):  # report the interruption, not an error of the report
                page = write_sweep_report(SweepFolder.open(view.folder.url))
                view.note(f"{page} has the results so far")
                view.warn()
        raise
    finally:
        view.close()
