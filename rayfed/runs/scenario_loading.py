"""Loading of scenarios, and search paths for the user's modules that scenarios and earlier runs name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rayfed import registry
from rayfed.core.files import find_in
from rayfed.errors import UserError
from rayfed.scenario import Scenario, dotted_paths
from rayfed.scenario import load as load_scenario
from rayfed.scenario.components import expand_component
from rayfed.store.folder import SCENARIO, RunFolder


def load_scenario_file(path: Path, changes: Sequence[str], remark: Callable[[str], None]) -> Scenario:
    """Load a scenario file; relative paths are resolved in the file's folder or the current folder."""
    search_beside(path)
    return load_scenario(path, list(changes), remark)


def search_beside(path: Path) -> None:
    """Make modules in the folder of a file and in the working directory importable by dotted paths."""
    registry.search(str(Path.cwd()))
    registry.search(str(path.resolve().parent))


def to_dotted_path(name: str) -> str:
    """Convert a name of the form `FILE.py:Name` to a dotted path, and make the file importable; keep other names."""
    match = registry.FILE_PATH.fullmatch(name)
    if match is None:
        return name
    path = find_in([Path.cwd()], match["file"])
    if not path.is_file():
        raise UserError(f"'{name}': file {path} not found")
    return registry.dotted(path, match["name"])


def loss_section(value: Any) -> dict[str, Any]:
    """Return the scenario section `loss` for a name or a mapping. Raises `UserError` for any other value."""
    value = expand_component(value)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise UserError(f"loss: found '{value}'; give a name, or {{name: NAME, FIELD: VALUE}}")
    return {**value, "name": to_dotted_path(value["name"])}


def search_where(run: str) -> None:
    """Make the user's modules that a run names importable, from the working directory and the run's search path.

    The run may come from another user. Therefore its search path comes last, is used only if the scenario has dotted
    paths, and never includes the run folder.
    """
    registry.search(str(Path.cwd()))
    folder = RunFolder.open(run)
    # a run that failed before its start has no environment.json
    if dotted_paths(folder.read_text(SCENARIO)) and folder.exists("environment.json"):
        for place in folder.read_mapping("environment.json").get("search_path", []):
            if Path(place).is_absolute() and not Path(place).resolve().is_relative_to(Path(folder.root).resolve()):
                registry.search(place, last=True)
