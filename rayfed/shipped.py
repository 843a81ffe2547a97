"""Scenarios and reproductions that come with rayfed, in the installed package or beside it in a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rayfed.errors import UserError, nearest


def shipped(kind: Literal["scenarios", "reproductions"]) -> Path:
    """Return the folder of rayfed's own scenarios or reproductions."""
    package = Path(__file__).parent
    inside = package / "shipped" / kind
    return inside if inside.is_dir() else package.parent / kind


def scenario_names() -> list[str]:
    """Return the names of the scenarios that come with rayfed."""
    return sorted(path.stem for path in shipped("scenarios").glob("*.yaml"))


def shipped_scenario(name: str) -> Path:
    """Return the file of a scenario that comes with rayfed; raises `UserError` for a name that none has."""
    known = scenario_names()
    if name not in known:
        raise UserError(f"no scenario that comes with rayfed is called '{name}': {nearest(name, known)}")
    return shipped("scenarios") / f"{name}.yaml"


def scenario_path(source: Path) -> Path:
    """Return a scenario's file by path or, if no such file exists, by the name of one that comes with rayfed."""
    if source.is_file() or str(source) not in scenario_names():
        return source  # its reader says what is wrong
    return shipped_scenario(str(source))
