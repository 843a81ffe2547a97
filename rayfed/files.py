"""Files of the user's: where a path leads as it is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def local_path(path: str | Path) -> Path:
    """Return a path as a scenario writes it, with `~` and environment variables expanded."""
    return Path(os.path.expanduser(os.path.expandvars(path)))


def exists(path: Path) -> bool:
    """Return whether something is at a path, which may be one that no file can have."""
    return os.path.exists(path)  # `Path.exists` raises where a name is too long


def find_in(folders: Sequence[Path], path: str | Path) -> Path:
    """Return where a path leads: in the first of these folders that has it, in the first of all where none has."""
    places = [folder / local_path(path) for folder in folders]
    return next((place for place in places if exists(place)), places[0]).resolve()
