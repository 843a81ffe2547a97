"""Decoding of TIFF images with any number of channels, 8 or 16 bits each, by Pillow or tifffile.

Source: Adobe, "TIFF Revision 6.0" (1992): PhotometricInterpretation, ExtraSamples, Orientation. tifffile is used if
Pillow would lose information: a fourth channel other than transparency, the lower byte of 16-bit colours, or pages
after the first. Pillow also ignores WhiteIsZero for 16-bit grey.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from rayfed.errors import DataError, require_extra

MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
"""First bytes of a TIFF file; the last two are for BigTIFF (files above 4 GiB)."""
_BITS, _PHOTOMETRIC, _ORIENTATION, _EXTRA_SAMPLES = 258, 262, 274, 338
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB = 0, 1, 2
_TRANSPARENCY = (1, 2)


def decode_tiff(content: bytes) -> np.ndarray:
    """Decode a TIFF image into (C, H, W), uint8 or (above 8 bits per channel) uint16, with white as the maximum.

    Grey pages of one size become the channels of one image. Raises `DataError` for other kinds of files, and if
    tifffile is needed but missing.
    """
    found = _simple(content)
    return _general(content) if found is None else found


def _simple(content: bytes) -> np.ndarray | None:
    """Decode an image that Pillow can read; None for others."""
    try:
        picture: Any = Image.open(BytesIO(content))
    except UnidentifiedImageError:
        return None
    with picture:
        tags = picture.tag_v2
        bits, others = max(tags.get(_BITS, (1,))), tags.get(_EXTRA_SAMPLES, ())
        if picture.n_frames > 1 or not {*others} <= {*_TRANSPARENCY}:
            return None
        if picture.mode.startswith("I;16"):
            return _levels(np.array(picture)[None], bits, tags[_PHOTOMETRIC])
        if bits > 8 or picture.mode in ("I", "F"):
            return None
        pixels = np.array(ImageOps.exif_transpose(picture).convert("L" if picture.mode in ("1", "L", "LA") else "RGB"))
    return np.atleast_3d(pixels).transpose(2, 0, 1)


def _general(content: bytes) -> np.ndarray:
    require_extra("medical", "a TIFF with several pages or channels, or with 16-bit colours", "tifffile")
    from tifffile import TiffFile

    with TiffFile(BytesIO(content)) as file:
        if len(file.series) > 1:
            raise DataError("the pages of the TIFF differ in size or kind: save one page, or pages of equal size")
        series, page = file.series[0], file.series[0].keyframe
        axes, pixels = series.axes, series.asarray()
    if page.photometric not in (_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB) or pixels.dtype not in (np.uint8, np.uint16):
        named = getattr(page.photometric, "name", page.photometric)
        raise DataError(f"the TIFF's values are {pixels.dtype}, {named}: expected unsigned 8 or 16 bits, grey or RGB")
    channels = [place for place, axis in enumerate(axes) if axis not in "YX"]
    if len(channels) > 1:
        raise DataError(
            f"the TIFF has the axes {axes}: expected height, width and at most one axis of channels or pages"
        )
    pixels = np.moveaxis(pixels, channels[0], 0) if channels else pixels[None]
    if page.extrasamples and page.extrasamples[-1] in _TRANSPARENCY and "S" in axes:
        pixels = pixels[:-1]
    orientation = page.tags.valueof(_ORIENTATION, default=1)
    return _levels(_turned(pixels, int(orientation)), page.bitspersample, int(page.photometric))


def _levels(pixels: np.ndarray, bits: int, photometric: int) -> np.ndarray:
    """Return values with this number of bits, scaled to 8 or 16 bits."""
    depth, white, largest = (np.uint8, 255, 2**bits - 1) if bits <= 8 else (np.uint16, 65535, 2**bits - 1)
    values: np.ndarray = largest - pixels if photometric == _WHITE_IS_ZERO else pixels
    scaled: np.ndarray = values if largest == white else np.rint(values / largest * white)
    return scaled.astype(depth)


def _turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Return an image (C, H, W) with its orientation tag applied."""
    if orientation >= 5:
        pixels = pixels.swapaxes(1, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[:, ::-1]
    return pixels[:, :, ::-1] if orientation in (2, 3, 6, 7) else pixels
