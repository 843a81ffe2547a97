"""What callers from Python may give for a scenario, a run, a model, and how a run is shown to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from rich.console import Console

from rayfed import registry
from rayfed import scenario as scenarios
from rayfed.analysis.loading import Results
from rayfed.engine import finding
from rayfed.engine.progress import AuditProgress
from rayfed.report.terminal_run import RunView
from rayfed.scenario import Scenario
from rayfed.shipped import scenario_path

Source = str | PathLike[str] | Mapping[str, Any] | Scenario


def scenario_of(source: Source, changes: Sequence[str]) -> Scenario:
    """Return a scenario of a file, of a name that comes with rayfed, of a mapping like a file's contents, or as it is.

    Raises `ScenarioError` for what is none.
    """
    if isinstance(source, str | PathLike):
        return finding.load(scenario_path(Path(source)), changes, lambda line: None)
    registry.search(str(Path.cwd()))
    document = source.model_dump(mode="json") if isinstance(source, Scenario) else dict(source)
    document = scenarios.with_changes(document, list(changes))
    scenarios.find_inputs(document, [Path.cwd()])
    return scenarios.check(document, "the scenario")


def address_of(run: str | PathLike[str] | Results | None) -> str | None:
    """Return the path or URL of a run, however it is given; None for none."""
    return None if run is None else run.url if isinstance(run, Results) else fspath(run)


def name_of(model: Any) -> str:
    """Return a model's name: the dotted path of a class, and a name as it is."""
    return f"{model.__module__}:{model.__qualname__}" if isinstance(model, type) else str(model)


@contextmanager
def shown(show: bool, brief: bool = False) -> Iterator[Any]:
    """Open what is told as a run goes on: the terminal's view where one asks for it, else nothing."""
    if not show:
        yield AuditProgress()
        return
    view = RunView(Console(), brief=brief, bar=False)
    try:
        yield view
    finally:
        view.close()
