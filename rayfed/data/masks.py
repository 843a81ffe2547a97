"""Decoding and resizing of masks: images whose pixels are class numbers."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.nn import functional as F

from rayfed.core.objective import NO_TARGET
from rayfed.data.images import Encoded, name_errors, read_content, read_extent
from rayfed.errors import DataError

UNCOUNTED = 255
"""Value of ignored pixels, as in Pascal VOC."""
_MODES = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L", "I;16N")
"""Pillow's modes with one whole number per pixel; for palettes, the index is the class."""
_LOSSY = ("JPEG", "MPO")
_DEPTH, _COLOUR = 24, 25
"""Offsets of the bits per channel and of the colour type (0: grey) in a PNG."""


def decode_masks(masks: Sequence[Encoded], images: Sequence[Encoded], size: int | None) -> tuple[np.ndarray, int]:
    """Decode masks into (N, H, W) int64 classes, and count the images that their EXIF orientation turns.

    Pixels of 255 become `NO_TARGET`. Masks are resized to height = width = `size`, if given, by the nearest pixel.
    Raises `DataError`, naming the file, for a mask that is in colour, lossy or invalid, or whose size differs from its
    image.
    """
    found, turned = [], 0
    for mask, image in zip(masks, images, strict=True):
        classes, of = _decode(mask), read_extent(image)
        if classes.shape != (of.height, of.width):
            turn = " after its EXIF orientation is applied" if of.turned else ""
            raise DataError(
                f"mask {mask.where} is {_extent(classes)}, but image {image.where} is {of.height}x"
                f"{of.width}{turn} (height x width): save the mask at the size of the image (to resize both, use "
                "`data.size`)"
            )
        found.append(_resized(classes, size))
        turned += of.turned
    for mask, classes in zip(masks, found, strict=True):
        if classes.shape != found[0].shape:
            raise DataError(
                f"masks differ in size: {masks[0].where} is {_extent(found[0])}, {mask.where} is {_extent(classes)} "
                f"(height x width); set `data.size` to resize all masks and images"
            )
    return np.stack(found), turned


def _extent(classes: np.ndarray) -> str:
    return f"{classes.shape[0]}x{classes.shape[1]}"


def _decode(mask: Encoded) -> np.ndarray:
    """Return the classes (H, W) int64 of a mask's pixels."""
    with name_errors(mask), Image.open(BytesIO(read_content(mask))) as picture:
        if picture.format in _LOSSY:
            raise DataError("the mask is a JPEG, whose compression changes class numbers: save masks as PNG")
        if picture.mode not in _MODES:
            raise DataError(
                f"the mask is in colour (mode {picture.mode}), but needs one class number per pixel: save the mask as "
                "a greyscale PNG of class numbers, or as a PNG with a palette"
            )
        header = read_content(mask)[: _COLOUR + 1]
        if picture.format == "PNG" and header[_DEPTH] in (2, 4) and header[_COLOUR] == 0:
            raise DataError(
                f"the mask is a grey PNG with {header[_DEPTH]} bits, which is read as grey levels, not as class "
                "numbers: save the mask with 8 bits, or with a palette"
            )
        classes = np.array(ImageOps.exif_transpose(picture)).astype(np.int64)
    return np.where(classes == UNCOUNTED, NO_TARGET, classes)


def _resized(classes: np.ndarray, size: int | None) -> np.ndarray:
    """Return classes (H, W) resized to height = width = `size` by the nearest pixel centre."""
    if size is None or classes.shape == (size, size):
        return classes
    levels = torch.from_numpy(classes)[None, None].double()  # exact for class numbers
    resized: np.ndarray = F.interpolate(levels, (size, size), mode="nearest-exact")[0, 0].long().numpy()
    return resized
