"""Decoding and resizing of masks: images whose pixels are the numbers of classes."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.nn import functional as F

from rayfed.data.images import Encoded, content_of, extent, named
from rayfed.errors import DataError
from rayfed.objective import NO_TARGET

UNCOUNTED = 255
"""Value of pixels that count in no loss, as in Pascal VOC."""
_MODES = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L", "I;16N")
"""Pillow's modes of one whole number a pixel; of a palette it is the number that counts, not the colour."""
_LOSSY = ("JPEG", "MPO")
_DEPTH, _COLOUR = 24, 25
"""Where a PNG says how many bits a channel has, and of what kind its colours are: 0 for grey."""


def decode_masks(masks: Sequence[Encoded], images: Sequence[Encoded], size: int | None) -> tuple[np.ndarray, int]:
    """Decode the masks of images into one (N, H, W) int64 array of classes, `NO_TARGET` where a mask has 255.

    They are resized to height = width = `size`, if that is given, as images are, but by the nearest pixel. Returned
    beside them is how many images are turned by their EXIF orientation as they are read. Raises `DataError`, naming
    the file, for a mask that is in colour, lossy, no image, or of another size than its image.
    """
    found, turned = [], 0
    for mask, image in zip(masks, images, strict=True):
        classes, of = _decode(mask), extent(image)
        if classes.shape != (of.height, of.width):
            turn = ", as its EXIF orientation turns it" if of.turned else ""
            raise DataError(
                f"{mask.where} is {_extent(classes)}, and its image {image.where} is {of.height}x"
                f"{of.width}{turn} (height x width): save the mask at the image's own size; `data.size` resizes both"
            )
        found.append(_resized(classes, size))
        turned += of.turned
    for mask, classes in zip(masks, found, strict=True):
        if classes.shape != found[0].shape:
            raise DataError(
                f"masks differ in size: {masks[0].where} is {_extent(found[0])}, {mask.where} is {_extent(classes)} "
                f"(height x width); set `data.size` to resize all of them with their images"
            )
    return np.stack(found), turned


def _extent(classes: np.ndarray) -> str:
    return f"{classes.shape[0]}x{classes.shape[1]}"


def _decode(mask: Encoded) -> np.ndarray:
    """Return the classes (H, W) int64 of a mask's pixels."""
    with named(mask), Image.open(BytesIO(content_of(mask))) as picture:
        if picture.format in _LOSSY:
            raise DataError("it is a JPEG, which changes the numbers of classes: save masks as PNG")
        if picture.mode not in _MODES:
            raise DataError(
                f"a mask has one number for each pixel, its class, and this is in colour (mode {picture.mode}): save "
                f"it as a greyscale PNG of the classes' numbers, or one with a palette"
            )
        header = content_of(mask)[: _COLOUR + 1]
        if picture.format == "PNG" and header[_DEPTH] in (2, 4) and header[_COLOUR] == 0:
            raise DataError(
                f"it is a grey PNG of {header[_DEPTH]} bits, which is read as grey levels and not as the numbers of "
                f"classes: save it with 8 bits, or with a palette"
            )
        classes = np.array(ImageOps.exif_transpose(picture)).astype(np.int64)
    return np.where(classes == UNCOUNTED, NO_TARGET, classes)


def _resized(classes: np.ndarray, size: int | None) -> np.ndarray:
    """Return classes (H, W) at height = width = `size`, each pixel's that of the nearest one's centre."""
    if size is None or classes.shape == (size, size):
        return classes
    levels = torch.from_numpy(classes)[None, None].double()  # exact, for whole numbers of this size
    resized: np.ndarray = F.interpolate(levels, (size, size), mode="nearest-exact")[0, 0].long().numpy()
    return resized
