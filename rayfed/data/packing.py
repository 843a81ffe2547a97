"""Writer of the files that `rayfed.data.mapped` opens, a few images at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import numpy as np
import pyarrow as pa

from rayfed.data.base import Dataset, Source, Split, check_labels, in_memory
from rayfed.data.images import Encoded, Kind, decode, deepened, kind, resize
from rayfed.data.mapped import Layout
from rayfed.errors import DataError
from rayfed.samples import held

_BATCH = 8 << 20
"""Bytes of pixels in memory at a time, about."""


def pack(source: Source, path: Path, progress: Callable[[int, int], None]) -> Layout:
    """Write a data set's file; `progress` receives the numbers of written and of all samples.

    Images in files of their own are decoded as they are written, those of other data sets are read as these read them.
    Raises `DataError` for what the source raises it, for words, and where the file cannot be written.
    """
    train, test, classes = _splits(source)
    if train.labels.dtype.kind == "f":
        raise DataError("a packed file holds classes, not numbers: use the data set as it is")
    count = len(train.labels) + len(test.labels)
    check_labels("train", train.labels, len(classes))
    check_labels("test", test.labels, len(classes))
    common = _common(split.images for split in (train, test))
    first = next(_batches(train, source.size, common, 1))[0]
    layout = Layout(first.shape[1:], len(train.labels), classes, uuid4().hex, 8 * common.depth.itemsize)
    temporary, done = path.with_name(f".{path.name}.tmp"), 0
    try:
        with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, layout.schema()) as writer:
            for split in (train, test):
                for images, labels in _batches(split, source.size, common, _rows(layout)):
                    if images.shape[1:] != layout.shape:
                        raise DataError(
                            f"images differ in shape: {images.shape[1:]} and {layout.shape}; set `data.size`"
                        )
                    pixels = pa.FixedSizeBinaryArray.from_buffers(
                        layout.schema().field("image").type, len(images), [None, pa.py_buffer(images)]
                    )
                    writer.write_batch(pa.record_batch([pixels, pa.array(labels)], schema=layout.schema()))
                    done += len(labels)
                    progress(done, count)
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error}; is the disk full or read-only?") from error
    finally:
        temporary.unlink(missing_ok=True)
    return layout


def _splits(source: Source) -> tuple[Split, Split, tuple[str, ...]]:
    if held(source) != "pixels":
        raise DataError(f"a packed file holds images, and these are {held(source)}: use the data set as it is")
    if type(source).load is Source.load:
        return source.chosen()
    data: Dataset = source.load()
    if data.has_words:
        raise DataError("a packed file holds classes, not words: use the data set as it is")
    if data.has_places:
        raise DataError("a packed file holds a class for each image, not masks: use the data set as it is")
    train, test = in_memory(data.train_images), in_memory(data.test_images)
    return Split(train, data.train_labels), Split(test, data.test_labels), data.classes


def _common(splits: Iterable[np.ndarray | Sequence[Encoded]]) -> Kind:
    """Return the kind (channels, depth) to which images of several kinds are converted."""
    found: set[Kind] = set()
    for images in splits:
        found |= {Kind(images.shape[1], images.dtype)} if isinstance(images, np.ndarray) else set(map(kind, images))
    return Kind(max(one.channels for one in found), max(one.depth for one in found))


def _rows(layout: Layout) -> int:
    return max(1, _BATCH // layout.row_bytes)


def _batches(split: Split, size: int | None, common: Kind, rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield images (n, C, H, W) of one kind with labels (n,), this many at a time."""
    for low in range(0, len(split.labels), rows):
        some = split.images[low : low + rows]
        images = resize(some, size) if isinstance(some, np.ndarray) else decode(some, size)
        if (images.shape[1], common.channels) == (1, 3):
            images = np.repeat(images, 3, axis=1)
        yield np.ascontiguousarray(deepened(images, common.depth)), split.labels[low : low + rows]
