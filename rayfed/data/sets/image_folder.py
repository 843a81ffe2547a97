"""Users' images in one folder per class, as in torchvision's ImageFolder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rayfed.core.files import local_path
from rayfed.data.base import Source, StoredSplit, hold_out_fifth
from rayfed.data.files import ENDINGS, is_image, is_left_by_tools, notes_on_files
from rayfed.data.images import Encoded
from rayfed.errors import DataError
from rayfed.registry import component

_TESTS = ("test", "val", "valid", "validation")


@component
class ImageFolder(Source):
    """Images (PNG, JPEG, TIFF, DICOM, ...) in `root/train/CLASS/*` and `root/test/CLASS/*`, or in `root/CLASS/*`.

    Without `test`, the test split may be named `val`, `valid` or `validation`. Without splits, a stratified fifth is
    the test split. Files made by systems and tools, empty files and files other than images are ignored; a note counts
    ignored files that look like samples.
    """

    root: Path
    """Folder of the classes or of `train` and `test`; `~` and environment variables are expanded."""

    def read(self) -> tuple[StoredSplit, StoredSplit, tuple[str, ...]]:
        """Read the images class by class, in alphabetical order of classes and file names."""
        root = local_path(self.root)
        if not root.is_dir():
            raise DataError(f"{root} is not a folder; expected a folder with CLASS/*.png (or .jpg, ...)")
        train = root / "train"
        names = _TESTS if train.is_dir() else _TESTS[:1]  # without a training split `valid` may be a class
        test = next((root / name for name in names if (root / name).is_dir()), root / "test")
        if not train.is_dir() and not test.is_dir():
            classes = _classes(root)
            return *hold_out_fifth(_split(root, classes), str(root)), classes
        for folder, other in ((train, test), (test, train)):
            if not folder.is_dir():
                raise DataError(
                    f"{folder} is missing, but {other} exists; provide both folders, or put the class folders directly "
                    f"into {root}"
                )
        classes = _classes(train)
        return _split(train, classes), _split(test, classes), classes

    def notes(self) -> Iterator[str]:
        """Yield notes on unused files in the folder."""
        train, test, _ = self.read()
        used = [image.data for split in (train, test) for image in split.images if isinstance(image, Encoded)]
        return notes_on_files(local_path(self.root), {path for path in used if isinstance(path, Path)})


def _classes(folder: Path) -> tuple[str, ...]:
    folders = [path for path in folder.iterdir() if path.is_dir() and not is_left_by_tools(path)]
    if not folders:
        raise DataError(f"{folder} has no class folder; expected {folder}/CLASS/*.png (or .jpg, ...)")
    return tuple(sorted(path.name for path in folders))


def _split(folder: Path, classes: tuple[str, ...]) -> StoredSplit:
    unknown = sorted(set(_classes(folder)) - set(classes))
    if unknown:
        raise DataError(f"{folder / unknown[0]} is not a class of the training split; expected {', '.join(classes)}")
    images: list[Encoded] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        paths = sorted(path for path in (folder / name).glob("*") if path.is_file() and is_image(path))
        if not paths:
            raise _without_images(folder / name)
        images += [Encoded(str(path), path) for path in paths]
        labels += [label] * len(paths)
    return StoredSplit(images, np.array(labels, dtype=np.int64))


def _without_images(folder: Path) -> DataError:
    """Return the error for a class folder without images, with the first image below it or its first file."""
    below = next((path for path in sorted(folder.rglob("*")) if path.is_file() and is_image(path)), None)
    other = next((path for path in sorted(folder.iterdir()) if path.is_file()), None)
    has = (
        f"; move images out of the subfolders, such as {below}" if below else f"; the folder has {other}" * bool(other)
    )
    return DataError(f"{folder} has no image; expected files with an extension {', '.join(sorted(ENDINGS))}{has}")
