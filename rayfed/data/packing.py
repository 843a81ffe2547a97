"""Writer of packed data set files (read by `rayfed.data.mapped`), which processes a few images at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import numpy as np
import pyarrow as pa

from rayfed.data.base import Dataset, Source, StoredSplit, check_labels, load_in_memory
from rayfed.data.images import Encoded, PixelFormat, convert_depth, decode_images, read_pixel_format, resize
from rayfed.data.mapped import PackedLayout
from rayfed.errors import DataError
from rayfed.samples import dataset_modality

_BATCH = 8 << 20
"""Approximate number of bytes of pixels in memory at a time."""


def pack_dataset(source: Source, path: Path, progress: Callable[[int, int], None]) -> PackedLayout:
    """Write a data set to a packed file for memory-mapping.

    `progress` receives the number of written samples and the total. Image files are decoded in batches; other data sets
    are loaded into memory first. Raises `DataError` if the source cannot be read, if its labels are not classes of
    whole images, or if the file cannot be written.
    """
    train, test, classes = _splits(source)
    if train.labels.dtype.kind == "f":
        raise DataError(
            "data with numeric labels cannot be packed, because a packed file contains classes: use the original data "
            "set"
        )
    count = len(train.labels) + len(test.labels)
    check_labels("train", train.labels, len(classes))
    check_labels("test", test.labels, len(classes))
    common = _common(split.images for split in (train, test))
    first = next(_batches(train, source.size, common, 1))[0]
    layout = PackedLayout(first.shape[1:], len(train.labels), classes, uuid4().hex, 8 * common.depth.itemsize)
    temporary, done = path.with_name(f".{path.name}.tmp"), 0
    try:
        with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, layout.schema()) as writer:
            for split in (train, test):
                for images, labels in _batches(split, source.size, common, _rows(layout)):
                    if images.shape[1:] != layout.shape:
                        raise DataError(
                            f"images differ in shape: {images.shape[1:]} and {layout.shape}; set `data.size` to resize "
                            "them"
                        )
                    pixels = pa.FixedSizeBinaryArray.from_buffers(
                        layout.schema().field("image").type, len(images), [None, pa.py_buffer(images)]
                    )
                    writer.write_batch(pa.record_batch([pixels, pa.array(labels)], schema=layout.schema()))
                    done += len(labels)
                    progress(done, count)
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error}; check whether the disk is full or read-only") from error
    finally:
        temporary.unlink(missing_ok=True)
    return layout


def _splits(source: Source) -> tuple[StoredSplit, StoredSplit, tuple[str, ...]]:
    if dataset_modality(source) != "pixels":
        raise DataError(
            f"only images can be packed, but this data set contains {dataset_modality(source)}: use the original "
            "data set"
        )
    if type(source).load is Source.load:
        return source.chosen()
    data: Dataset = source.load()
    if data.has_words:
        raise DataError(
            "images of words cannot be packed, because a packed file contains classes: use the original data set"
        )
    if data.has_places:
        raise DataError(
            "images with masks cannot be packed, because a packed file contains one class per image: use the original "
            "data set"
        )
    train, test = load_in_memory(data.train_images), load_in_memory(data.test_images)
    return StoredSplit(train, data.train_labels), StoredSplit(test, data.test_labels), data.classes


def _common(splits: Iterable[np.ndarray | Sequence[Encoded]]) -> PixelFormat:
    """Return the kind (channels, depth) to which images of several kinds are converted."""
    found: set[PixelFormat] = set()
    for images in splits:
        found |= (
            {PixelFormat(images.shape[1], images.dtype)}
            if isinstance(images, np.ndarray)
            else set(map(read_pixel_format, images))
        )
    return PixelFormat(max(one.channels for one in found), max(one.depth for one in found))


def _rows(layout: PackedLayout) -> int:
    return max(1, _BATCH // layout.row_bytes)


def _batches(
    split: StoredSplit, size: int | None, common: PixelFormat, rows: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield batches of images (n, C, H, W) of one kind with labels (n,), with at most `rows` images."""
    for low in range(0, len(split.labels), rows):
        some = split.images[low : low + rows]
        images = resize(some, size) if isinstance(some, np.ndarray) else decode_images(some, size)
        if (images.shape[1], common.channels) == (1, 3):
            images = np.repeat(images, 3, axis=1)
        yield np.ascontiguousarray(convert_depth(images, common.depth)), split.labels[low : low + rows]
