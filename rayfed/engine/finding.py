"""Loading of scenarios, and search paths for their modules and those of earlier runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rayfed import registry
from rayfed.errors import UserError
from rayfed.files import find_in
from rayfed.scenario import Scenario, dotted_paths
from rayfed.scenario import load as load_scenario
from rayfed.scenario.components import named
from rayfed.store.folder import SCENARIO, RunFolder


def load(path: Path, changes: Sequence[str], remark: Callable[[str], None]) -> Scenario:
    """Load a scenario file; relative paths are resolved in its folder or the current folder."""
    search_beside(path)
    return load_scenario(path, list(changes), remark)


def search_beside(path: Path) -> None:
    """Make modules in a file's folder and in the working directory importable by dotted paths."""
    registry.search(str(Path.cwd()))
    registry.search(str(path.resolve().parent))


def dotted(name: str) -> str:
    """Return the dotted path of `FILE.py:Name` and make the file importable; return other names unchanged."""
    match = registry.FILE_PATH.fullmatch(name)
    if match is None:
        return name
    path = find_in([Path.cwd()], match["file"])
    if not path.is_file():
        raise UserError(f"'{name}': file {path} not found")
    return registry.dotted(path, match["name"])


def loss_section(value: Any) -> dict[str, Any]:
    """Return a scenario's section `loss` for a name or a mapping; raises `UserError` for anything else."""
    value = named(value)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise UserError(f"loss: found '{value}'; give a name, or {{name: NAME, FIELD: VALUE}}")
    return {**value, "name": dotted(value["name"])}


def search_where(run: str) -> None:
    """Make a run's modules importable, from the working directory and from the run's search path.

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
