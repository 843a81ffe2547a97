"""Decoding and resizing of images into one uint8 array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from rayfed.errors import DataError

_GREY = ("1", "L", "LA")
_DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
"""Pillow's modes of more than 8 bits a channel, which a conversion to 8 would clip."""


class Encoded(NamedTuple):
    """One image as a file holds it (PNG, JPEG, ...)."""

    where: str
    """Name of the file, and the row within it, for errors."""
    data: bytes | Path
    """The encoded bytes, or the file that is nothing but them."""


def resize(images: np.ndarray, size: int | None) -> np.ndarray:
    """Resize images (N, C, H, W) uint8 to height = width = `size`, bilinear with antialias; None keeps their size."""
    if size is None or images.shape[2:] == (size, size):
        return images
    return F.interpolate(torch.from_numpy(images), size=(size, size), mode="bilinear", antialias=True).numpy()


def decode(images: Sequence[Encoded], size: int | None) -> np.ndarray:
    """Decode images into one (N, C, H, W) uint8 array, at height = width = `size` if that is given.

    All are grey (C = 1) if every one of them is; otherwise all are RGB (C = 3). Transparency is dropped.
    Raises `DataError` for bytes that are no image, for more than 8 bits a channel, and for sizes that differ
    without `size`.
    """
    arrays = [resize(_decode(image), size) for image in images]
    for image, array in zip(images, arrays, strict=True):
        if array.shape[2:] != arrays[0].shape[2:]:
            raise DataError(
                f"images differ in size: {images[0].where} is {_extent(arrays[0])}, {image.where} is "
                f"{_extent(array)} (height x width); set `size` to resize all of them"
            )
    channels = max(array.shape[1] for array in arrays)
    together = np.empty((len(arrays), channels, *arrays[0].shape[2:]), np.uint8)
    for target, array in zip(together, arrays, strict=True):
        target[:] = array[0]  # grey is repeated over the three channels
    return together


def is_grey(image: Encoded) -> bool:
    """Return whether `decode` takes an image for grey, from its header alone; raises `DataError` without one."""
    with _opened(image) as picture:
        return picture.mode in _GREY


def _decode(image: Encoded) -> np.ndarray:
    """Decode an image into (1, 1 or 3, H, W) uint8."""
    with _opened(image) as picture:
        if picture.mode in _DEEP:
            raise ValueError(f"it has more than 8 bits a channel (mode {picture.mode})")
        pixels = np.array(picture.convert("L" if picture.mode in _GREY else "RGB"))
    return np.ascontiguousarray(np.atleast_3d(pixels).transpose(2, 0, 1))[None]


@contextmanager
def _opened(image: Encoded) -> Iterator[Image.Image]:
    try:
        with Image.open(BytesIO(image.data) if isinstance(image.data, bytes) else image.data) as picture:
            yield picture
    except Exception as error:  # Pillow's decoders raise whatever broken bytes lead them to
        raise DataError(
            f"{image.where} cannot be decoded: {error}; expected a whole 8-bit PNG, JPEG or similar image"
        ) from error


def _extent(array: np.ndarray) -> str:
    return f"{array.shape[2]}x{array.shape[3]}"
