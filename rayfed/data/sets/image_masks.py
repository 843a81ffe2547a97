"""Users' images with masks (one class per pixel), in two folders or in two columns of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import Field

from rayfed.core.files import local_path
from rayfed.core.objective import NO_TARGET
from rayfed.data.base import Dataset, StoredSplit, hold_out_fifth, limit_split
from rayfed.data.files import is_image, is_sample, notes_on_files
from rayfed.data.images import Encoded, decode_images
from rayfed.data.kinds import is_parquet
from rayfed.data.masks import UNCOUNTED, decode_masks
from rayfed.data.sets.parquet import parquet_files, read_columns, read_schema
from rayfed.errors import DataError, nearest
from rayfed.registry import component

IMAGES, MASKS = "images", "masks"
"""Folders of a split."""
MASK_COLUMNS = ("mask", "masks", "annotation", "segmentation")
"""Names (lower case) of the column of masks, in order of preference."""
_TESTS = ("test", "val", "valid", "validation")
_MOST_CLASSES = 1000
"""Maximum number of classes; larger numbers in a mask are object numbers or damaged."""

_TURNED = (
    "{} images are rotated or mirrored by their EXIF orientation, and masks by their own, if any: check that the masks "
    "match the rotated images"
)


class _Pair(NamedTuple):
    image: Encoded
    mask: Encoded


@component
class ImageMasks:
    """Images with one class per pixel, for segmentation: `root/images/NAME.png` with `root/masks/NAME.png`.

    Both folders may be in folders of splits, such as `root/train/images`. Alternatively, `root` is a Parquet file with
    encoded images in one column and masks in another one, named `mask` or similar. A mask contains a class number per
    pixel, as grey level or palette index, and 255 for ignored pixels. Without a test split every fifth image is held
    out.
    """

    has_masks: ClassVar[bool] = True
    """Whether all samples have one class per pixel, which determines the default loss."""

    root: Path
    """Folder with `images` and `masks`, or with splits `train` and `test` (or `val`, `valid`, `validation`) that
    contain them; or a Parquet file, or a folder of *.parquet files. `~` and environment variables are expanded."""
    test: Path | None = None
    """Test split: a folder with `images` and `masks`, or Parquet. Default: the test split in `root`."""
    classes: Annotated[list[str], Field(min_length=2)] | None = None
    """Names of the classes, ordered by class number from 0. Default: all numbers up to the maximum in the masks."""
    image_column: str = "image"
    """Column of the images, for Parquet."""
    mask_column: str | None = None
    """Column of the masks, for Parquet. Default: `mask`, `annotation` or similar."""
    size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Height and width in pixels, to which images (bilinear with antialias) and masks (nearest pixel) are resized.
    Default: original size."""
    train_samples: Annotated[int, Field(ge=1)] | None = None
    """Number of training samples to use, a deterministic evenly spaced subset. Default: all."""
    test_samples: Annotated[int, Field(ge=1)] | None = None
    """Number of test samples to use, a deterministic evenly spaced subset. Default: all."""

    def load(self) -> Dataset:
        """Load images and masks into memory; raise `DataError` for missing, broken or mismatched files.

        Raises `DataError` for an image without a mask, and for masks that do not match their images or the classes.
        """
        train, test = self._pairs()
        pictures, files = ([pair[part] for pair in (*train, *test)] for part in (0, 1))
        images = decode_images(pictures, self.size)
        masks, turned = decode_masks(files, pictures, self.size)
        classes, count = self._named(files, masks, len(train)), len(train)
        remarks = (*self._notes(), *((_TURNED.format(turned),) if turned else ()))
        return Dataset(
            images[:count], masks[:count], images[count:], masks[count:], classes, remarks=remarks, has_places=True
        )

    def _notes(self) -> Iterator[str]:
        """Yield notes on the files that are not used."""
        for place in filter(_is_split, self._places(local_path(self.root))):
            used = {file.data for pair in _in_folders(place) for file in pair}
            yield from notes_on_files(place, {path for path in used if isinstance(path, Path)})

    def _pairs(self) -> tuple[list[_Pair], list[_Pair]]:
        """Return the selected images and masks of both splits."""
        root = local_path(self.root)
        parts = [self._read(path) for path in self._places(root)]
        splits = [StoredSplit(np.arange(len(part)), np.zeros(len(part), np.int64)) for part in parts]
        halves = splits if len(splits) > 1 else hold_out_fifth(splits[0], str(root))
        asked = ("train_samples", self.train_samples), ("test_samples", self.test_samples)
        chosen = [limit_split(samples, half, field) for (field, samples), half in zip(asked, halves, strict=True)]
        train, test = (
            [part[int(row)] for row in np.asarray(half.images)]
            for part, half in zip((parts[0], parts[-1]), chosen, strict=True)
        )
        return train, test

    def _places(self, root: Path) -> list[Path]:
        """Return the paths of the training split and, if there is one, of the test split."""
        if self.test is not None:
            return [root / "train" if (root / "train" / IMAGES).is_dir() else root, local_path(self.test)]
        if not (root / "train").is_dir():
            return [root]
        test = next((root / name for name in _TESTS if (root / name).is_dir()), None)
        return [root / "train"] if test is None else [root / "train", test]

    def _read(self, place: Path) -> list[_Pair]:
        if _is_split(place):
            return _in_folders(place)
        if place.is_file() or any(is_sample(file, place) for file in place.glob("*.parquet")):
            return [pair for path in parquet_files(place) for pair in self._in_columns(path)]
        raise DataError(
            f"{place} has no images with masks: expected {place / IMAGES}/NAME.png and {place / MASKS}/NAME.png, or "
            f"Parquet with the columns image and mask"
        )

    def _in_columns(self, path: Path) -> list[_Pair]:
        mask = self.mask_column or mask_column(path)
        for column, field in ((self.image_column, "image_column"), (mask, "mask_column")):
            known = _names(path)
            if column is None or column not in known:
                missing = f"no column '{column}'" if column else f"no column named {MASK_COLUMNS[0]} or similar"
                near = nearest(column, known) if column else f"the columns are {', '.join(known)}"
                raise DataError(f"{path} has {missing}: set `data.{field}` to the column's name; {near}")
        assert mask is not None
        images, masks = read_columns(path, (self.image_column, mask))
        return [
            _Pair(image, own._replace(where=f"{own.where}, '{mask}'")) for image, own in zip(images, masks, strict=True)
        ]

    def _named(self, files: Sequence[Encoded], masks: np.ndarray, trained: int) -> tuple[str, ...]:
        """Return the names of the classes; raises `DataError` for unknown classes in a mask, and for a single class."""
        largest = masks[:trained].max(initial=0)
        if largest >= _MOST_CLASSES and self.classes is None:
            file = files[int(masks[:trained].reshape(trained, -1).max(1).argmax())]
            raise DataError(f"{file.where} has class {largest}: expected class numbers from 0, below {_MOST_CLASSES}")
        if largest < 1:
            void = (masks[:trained] == NO_TARGET).any()
            why = f" and {UNCOUNTED}, which is ignored: write objects as 1" if void else ""
            raise DataError(f"the training masks in {self.root} have only class 0{why}")
        count = len(self.classes) if self.classes else int(largest) + 1
        outside = (masks >= count).reshape(len(masks), -1).any(1)
        if outside.any():
            first = int(outside.argmax())
            row, column = np.argwhere(masks[first] >= count)[0]
            raise DataError(
                f"{files[first].where} has class {masks[first, row, column]} at row {row}, column {column} (from 0), "
                f"but there are {count} classes: expected 0 to {count - 1}, or {UNCOUNTED} for ignored pixels; name "
                f"all classes with `data.classes`"
            )
        return tuple(self.classes or map(str, range(count)))


def _is_split(folder: Path) -> bool:
    """Return whether a folder directly contains the folders of images and masks."""
    return (folder / IMAGES).is_dir() and (folder / MASKS).is_dir()


def is_given(path: Path) -> bool:
    """Return whether a user's folder or file is a data set of images with masks."""
    if path.is_dir():
        files = sorted(file for file in path.glob("*.parquet") if is_sample(file, path))
        return _is_split(path) or _is_split(path / "train") or any(map(is_given, files[:1]))
    return (path.suffix == ".parquet" or is_parquet(path)) and path.is_file() and _holds_masks(path)


def _holds_masks(path: Path) -> bool:
    """Return whether a Parquet file has a column of encoded masks and no column `label`."""
    column = mask_column(path)
    if column is None or "label" in map(str.lower, _names(path)):
        return False
    kind = read_schema(path).field(column).type
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_struct(kind))


def mask_column(path: Path) -> str | None:
    """Return the name of the column of masks in a Parquet file, by typical names; None without such a column."""
    known = {name.lower(): name for name in reversed(_names(path))}
    return next((known[name] for name in MASK_COLUMNS if name in known), None)


def _names(path: Path) -> list[str]:
    try:
        names: list[str] = read_schema(path).names
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; expected a complete Parquet file") from error
    return names


def _in_folders(place: Path) -> list[_Pair]:
    images, masks = _by_name(place / IMAGES), _by_name(place / MASKS)
    for name, image in images.items():
        if name not in masks:
            raise DataError(
                f"{image} has no mask: expected {place / MASKS / name}.png; add the mask, or remove the image "
                f"({sum(name not in masks for name in images)} of {len(images)} images have none)"
            )
    return [_Pair(*(Encoded(str(path), path) for path in (image, masks[name]))) for name, image in images.items()]


def _by_name(folder: Path) -> dict[str, Path]:
    """Return a folder's images by name without extension, sorted; raises `DataError` for none and for duplicates."""
    found: dict[str, Path] = {}
    for path in sorted(path for path in folder.iterdir() if path.is_file() and is_image(path)):
        if path.stem in found:
            raise DataError(
                f"{found[path.stem]} and {path} have the same name, so their mask is ambiguous: rename one of the files"
            )
        found[path.stem] = path
    if not found:
        raise DataError(f"{folder} has no image; expected files such as {folder}/NAME.png")
    return found
