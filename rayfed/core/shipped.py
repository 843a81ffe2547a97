"""Find the scenarios and reproductions that come with rayfed, in the installed package or in a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rayfed.errors import UserError, nearest


def find_shipped(kind: Literal["scenarios", "reproductions"]) -> Path:
    """Return the folder of the scenarios or reproductions that come with rayfed."""
    package = Path(__file__).parent.parent
    inside = package / "shipped" / kind
    return inside if inside.is_dir() else package.parent / kind


def scenario_names() -> list[str]:
    """Return the names of the scenarios that come with rayfed."""
    return sorted(path.stem for path in find_shipped("scenarios").glob("*.yaml"))


def shipped_scenario(name: str) -> Path:
    """Return the file of a scenario that comes with rayfed. Raises `UserError` for an unknown name."""
    known = scenario_names()
    if name not in known:
        raise UserError(f"no scenario '{name}' comes with rayfed: {nearest(name, known)}")
    return find_shipped("scenarios") / f"{name}.yaml"


def scenario_path(source: Path) -> Path:
    """Return a scenario's file: `source` if such a file exists, or else the scenario of that name in rayfed."""
    if source.is_file() or str(source) not in scenario_names():
        return source  # reading it raises the error
    return shipped_scenario(str(source))
