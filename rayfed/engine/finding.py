"""Search paths for scenarios, their modules, and the modules of earlier runs."""

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
    """Load a scenario file; its relative names are resolved beside it or in the current folder."""
    search_beside(path)
    return load_scenario(path, list(changes), remark)


def search_beside(path: Path) -> None:
    """Make modules beside a file, or in the working directory, importable by dotted paths."""
    registry.search(str(Path.cwd()))
    registry.search(str(path.resolve().parent))


def dotted(name: str) -> str:
    """Return the dotted path of `FILE.py:Name` and make the file importable; other names unchanged."""
    match = registry.FILE_PATH.fullmatch(name)
    if match is None:
        return name
    path = find_in([Path.cwd()], match["file"])
    if not path.is_file():
        raise UserError(f"there is no file {path}, named by '{name}'")
    return registry.dotted(path, match["name"])


def loss_section(value: Any) -> dict[str, Any]:
    """Return a scenario's section `loss` for a name or a mapping; raises `UserError` for anything else."""
    value = named(value)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise UserError(f"loss: found '{value}'; give a name, or {{name: NAME, FIELD: VALUE}}")
    return {**value, "name": dotted(value["name"])}


def search_where(run: str) -> None:
    """Make modules importable from where the run found them, or from the working directory.

    A run may come from somebody else: its places are searched last, so that none of their modules takes the place of
    another, and only where its scenario has dotted paths. What lies in the run folder itself is not code.
    """
    registry.search(str(Path.cwd()))
    folder = RunFolder.open(run)
    # a run that never got a cluster has no environment
    if dotted_paths(folder.read_text(SCENARIO)) and folder.exists("environment.json"):
        for place in folder.read_mapping("environment.json").get("search_path", []):
            if Path(place).is_absolute() and not Path(place).resolve().is_relative_to(Path(folder.root).resolve()):
                registry.search(place, last=True)
