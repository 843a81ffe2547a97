"""Conversion of the Python API's arguments (scenarios, runs, models), and the display of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from rayfed import registry
from rayfed import scenario as scenarios
from rayfed.core.shipped import scenario_path
from rayfed.report.terminal.console import console
from rayfed.report.terminal.run import RunView
from rayfed.results.loading import Results
from rayfed.runs import scenario_loading
from rayfed.scenario import Scenario
from rayfed.simulation.progress import AuditProgress

Source = str | PathLike[str] | Mapping[str, Any] | Scenario


def read_source(source: Source, changes: Sequence[str]) -> Scenario:
    """Return the checked scenario for a file, the name of a scenario of rayfed, a mapping, or a `Scenario` object.

    Raises `ScenarioError` for an invalid scenario.
    """
    if isinstance(source, str | PathLike):
        return scenario_loading.load_scenario_file(scenario_path(Path(source)), changes, lambda line: None)
    registry.search(str(Path.cwd()))
    document = source.model_dump(mode="json") if isinstance(source, Scenario) else deepcopy(dict(source))
    document = scenarios.with_changes(document, list(changes))
    scenarios.find_inputs(document, [Path.cwd()])
    return scenarios.check_scenario(document, "the scenario")


def get_address(run: str | PathLike[str] | Results | None) -> str | None:
    """Return the path or URL of a run, given as a path, a URL or a `Results` object; None for None."""
    return None if run is None else run.url if isinstance(run, Results) else fspath(run)


@contextmanager
def open_view(show: bool, brief: bool = False) -> Iterator[Any]:
    """Open the terminal view of a run's progress if `show` is true, else no display."""
    if not show:
        yield AuditProgress()
        return
    view = RunView(console(), brief=brief, bar=False)
    try:
        yield view
    finally:
        view.close()
