"""Hugging Face data sets on disk, read without the package `datasets`.

Two layouts are supported. Folders from `save_to_disk` contain Arrow files and a `state.json`, in one folder per split
if there is a `dataset_dict.json`. Downloaded repositories of the hub contain Parquet files named after their splits,
such as `data/train-00000-of-00001.parquet`, or in folders named after their splits.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rayfed.core.documents import read_json
from rayfed.core.files import local_path
from rayfed.data.base import Source, StoredSplit
from rayfed.data.files import is_sample
from rayfed.data.sets.parquet import as_columns, read_parquet
from rayfed.errors import DataError
from rayfed.registry import component

TESTS = ("test", "validation", "valid", "val", "dev")
"""Names of the test split, in order of preference."""
_SHARD = re.compile(r"(.+?)-\d+(-of-\d+)?")


@component
class HuggingFaceImages(Source):
    """Images of a Hugging Face data set on disk: a folder from `save_to_disk`, or a downloaded repository."""

    root: Path
    """Folder of the data set; `~` and environment variables are expanded."""
    train: str = "train"
    """Name of the training split; ignored if the data set has only one split."""
    test: str | None = None
    """Name of the test split. Default: `test`, `validation` or similar, else a stratified fifth of `train`."""
    image_column: str | None = None
    """Column of the images. Default: the only column of images."""
    label_column: str | None = None
    """Column of the classes. Default: the class column in the metadata, else `label` or similar."""

    def read(self) -> tuple[StoredSplit, StoredSplit, tuple[str, ...]]:
        """Read the train split, the test split and the class names, in stored order."""
        root = local_path(self.root)
        found = list_splits(root)
        known = ", ".join(found) or "none"
        name = self.train if self.train in found or len(found) != 1 else next(iter(found))
        for asked in (name, self.test):
            if asked is not None and asked not in found:
                raise DataError(f"{root} has no split '{asked}' in Parquet or Arrow files; choose from {known}")
        test = self.test or next((other for other in TESTS if other in found and other != name), None)
        files = found[name], [] if test is None else found[test]
        return read_parquet(*files, as_columns(self.image_column), as_columns(self.label_column))


def list_splits(root: Path) -> dict[str, list[Path]]:
    """Return the files of each split of a Hugging Face data set; empty if the folder is not such a data set."""
    if (root / "dataset_dict.json").is_file():
        written = _said(root / "dataset_dict.json", "splits")
        return {str(name): _saved(root / str(name)) for name in written}
    if (root / "state.json").is_file():
        return {"train": _saved(root)}
    found: dict[str, list[Path]] = {}
    for path in sorted(path for path in root.rglob("*.parquet") if is_sample(path, root)):
        shard = _SHARD.fullmatch(path.stem)
        name = shard[1] if shard else path.parent.name if path.stem.isdecimal() else path.stem
        found.setdefault(name, []).append(path)
    if not {"train", *TESTS} & found.keys():
        return {}
    for name, paths in found.items():
        if len(folders := dict.fromkeys(str(path.parent) for path in paths)) > 1:
            raise DataError(
                f"{root} has the split '{name}' in several folders: give one of these folders: {', '.join(folders)}"
            )
    return found


def _saved(folder: Path) -> list[Path]:
    """Return the files of one split, in their order."""
    state = folder / "state.json"
    if not state.is_file():
        raise DataError(f"{state} is missing; expected a folder from `save_to_disk`: copy the whole folder")
    written: list[Any] = _said(state, "_data_files")
    try:
        names = [str(one["filename"]) for one in written]
    except (KeyError, TypeError) as error:
        raise DataError(f"{state} lists no files in `_data_files`; download the data set again") from error
    if escaping := [name for name in names if Path(name).name != name]:
        raise DataError(
            f"{state} refers to '{escaping[0]}', which is not a file in the same folder; download the data set again"
        )
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise DataError(f"{folder / missing[0]}, which {state} refers to, is missing; copy the whole folder")
    return [folder / name for name in names]


def _said(path: Path, key: str) -> list[Any]:
    try:
        written = read_json(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} cannot be read: {error!r}; expected a JSON file with a list `{key}`; download the data set again"
        ) from error
    if not isinstance(written, list):
        raise DataError(f"{path}: `{key}` is not a list; download the data set again")
    return written
