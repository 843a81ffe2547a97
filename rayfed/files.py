"""Files of the user's: where a path leads as it is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def local_path(path: str | Path) -> Path:
    """Return a path as a scenario writes it, with `~` and environment variables expanded."""
    return Path(os.path.expandvars(path)).expanduser()


def find_in(folders: Sequence[Path], path: str | Path) -> Path:
    """Return where a path leads: in the first of these folders that has it, in the first of all where none has."""
    places = [folder / local_path(path) for folder in folders]
    return next((place for place in places if place.exists()), places[0]).resolve()
