"""Decoding and resizing of images into one array of 8 or 16 bits a channel."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch.nn import functional as F

from rayfed.data import dicom, tiff
from rayfed.errors import DataError

_GREY = ("1", "L", "LA")
_DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
"""Pillow's modes of more than 8 bits a channel, which a conversion to 8 would clip."""
_TURNED, _SIDEWAYS = range(2, 9), range(5, 9)
"""EXIF orientations that turn or mirror an image, and those that exchange height and width."""
_PNG, _DEPTH = b"\x89PNG\r\n\x1a\n", 24
"""First bytes of a PNG, and where the bits of a channel stand in it; 16 bits in colour are 8 to Pillow."""


class Encoded(NamedTuple):
    """One image as an encoded file (PNG, JPEG, ...)."""

    where: str
    """Name of the file, and the row within it, for errors."""
    data: bytes | Path
    """The encoded bytes, or the file that is nothing but them."""


class Kind(NamedTuple):
    """Channels and depth of a decoded image."""

    channels: int
    depth: np.dtype
    """uint8 or uint16."""


class Extent(NamedTuple):
    """Size of an image in pixels, as it is read."""

    height: int
    width: int
    turned: bool
    """Whether its EXIF orientation turns or mirrors what the file stores."""


def resize(images: np.ndarray, size: int | None) -> np.ndarray:
    """Resize images (N, C, H, W) to height = width = `size`, bilinear with antialias; None keeps their size."""
    if size is None or images.shape[2:] == (size, size):
        return images
    if images.dtype == np.uint8:
        return F.interpolate(torch.from_numpy(images), size=(size, size), mode="bilinear", antialias=True).numpy()
    levels = torch.from_numpy(images.astype(np.float32))
    resized = F.interpolate(levels, size=(size, size), mode="bilinear", antialias=True)
    return resized.round_().clamp_(0, np.iinfo(images.dtype).max).numpy().astype(images.dtype)


def decode(images: Sequence[Encoded], size: int | None) -> np.ndarray:
    """Decode images into one (N, C, H, W) array, at height = width = `size` if that is given.

    It is uint16 if one of them has more than 8 bits a channel, and white is 65535; otherwise uint8. All are grey
    (C = 1) if every one of them is; grey ones among RGB are RGB (C = 3), and any other number of channels is that of
    all. They are turned as their EXIF orientation says, transparency is dropped, and of an animation the first picture
    is taken. Raises `DataError` for bytes that are no image, for sizes that differ without `size`, and for channels
    that differ.
    """
    arrays = [resize(_decode(image), size) for image in images]
    channels = max(array.shape[1] for array in arrays)
    for image, array in zip(images, arrays, strict=True):
        if array.shape[2:] != arrays[0].shape[2:]:
            raise DataError(
                f"images differ in size: {images[0].where} is {_extent(arrays[0])}, {image.where} is "
                f"{_extent(array)} (height x width); set `data.size: {min(arrays[0].shape[2:])}` to resize all of them"
            )
        if array.shape[1] != channels and (array.shape[1], channels) != (1, 3):
            raise DataError(f"images differ in channels: {image.where} has {array.shape[1]}, another has {channels}")
    depth = max(array.dtype for array in arrays)
    together = np.empty((len(arrays), channels, *arrays[0].shape[2:]), depth)
    for target, array in zip(together, arrays, strict=True):
        target[:] = deepened(array[0], depth)  # grey is repeated over the three channels
    return together


def deepened(images: np.ndarray, depth: np.dtype) -> np.ndarray:
    """Return 8-bit images at another depth with the same white; others unchanged."""
    return images if images.dtype == depth else images.astype(depth) * 257


def kind(image: Encoded) -> Kind:
    """Return channels and depth of an image, from its header if possible; raises `DataError`."""
    with named(image):
        content = content_of(image)
        if (found := _other(content)) is not None:
            return Kind(len(found), found.dtype)
        with Image.open(BytesIO(content)) as picture:
            return Kind(1 if picture.mode in _GREY else 3, np.dtype(np.uint8))


def extent(image: Encoded) -> Extent:
    """Return an image's size, from its header if possible; raises `DataError`."""
    with named(image):
        content = content_of(image)
        if (found := _other(content)) is not None:
            return Extent(found.shape[1], found.shape[2], turned=False)
        with Image.open(BytesIO(content)) as picture:
            orientation = picture.getexif().get(ExifTags.Base.Orientation, 1)
            height, width = picture.size if orientation in _SIDEWAYS else picture.size[::-1]
            return Extent(height, width, orientation in _TURNED)


def _decode(image: Encoded) -> np.ndarray:
    """Decode an image into (1, C, H, W) uint8 or uint16."""
    with named(image):
        content = content_of(image)
        found = _other(content)
        return np.ascontiguousarray(_pillow(content) if found is None else found)[None]


def content_of(image: Encoded) -> bytes:
    """Return an image's encoded bytes."""
    return image.data if isinstance(image.data, bytes) else image.data.read_bytes()


def _other(content: bytes) -> np.ndarray | None:
    """Return an image (C, H, W) in a format that Pillow does not read; None for other formats."""
    if dicom.is_dicom(content):
        return dicom.decode(content)
    if content.startswith(tiff.MAGIC):
        return tiff.decode(content)
    if content.startswith(_PNG) and content[_DEPTH : _DEPTH + 1] == b"\x10":
        return _png_of_16_bits(content)
    return None


def _png_of_16_bits(content: bytes) -> np.ndarray:
    """Decode a PNG of 16 bits a channel into (1 or 3, H, W), which Pillow reduces to 8 for colours."""
    with Image.open(BytesIO(content)) as picture:
        if picture.mode in _DEEP:
            return np.array(ImageOps.exif_transpose(picture)).astype(np.uint16)[None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is to move to another package
        from torchvision.io import ImageReadMode, decode_png

        stored = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        pixels: np.ndarray = decode_png(stored, ImageReadMode.UNCHANGED, apply_exif_orientation=True).numpy()
    return pixels[: len(pixels) - (len(pixels) % 2 == 0)]  # two and four channels have one of transparency


def _pillow(content: bytes) -> np.ndarray:
    """Decode an image of 8 bits into (1 or 3, H, W)."""
    with Image.open(BytesIO(content)) as picture:
        if picture.mode in _DEEP:
            raise ValueError(f"it has more than 8 bits a channel (mode {picture.mode}): save it as PNG or TIFF")
        pixels = np.array(ImageOps.exif_transpose(picture).convert("L" if picture.mode in _GREY else "RGB"))
        if picture.has_transparency_data and _has_one_colour(pixels) and not _has_one_opacity(picture):
            raise DataError(
                "all its pixels have one colour, and its shape is in its transparency, which is not read: save it on "
                "a background"
            )
    return np.atleast_3d(pixels).transpose(2, 0, 1)


def _has_one_colour(pixels: np.ndarray) -> bool:
    return bool((pixels == pixels[:1, :1]).all())


def _has_one_opacity(picture: Image.Image) -> bool:
    low, high = picture.convert("RGBA").getchannel("A").getextrema()
    return low == high


@contextmanager
def named(image: Encoded) -> Iterator[None]:
    """Raise `DataError` with the image's name for any error of its decoder."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{image.where}: {error}") from error
    except UnidentifiedImageError as error:  # its own words name an object in memory
        raise DataError(f"{image.where} is no image: expected a whole PNG, JPEG, TIFF, DICOM or similar one") from error
    except Exception as error:  # decoders raise whatever broken bytes lead them to
        raise DataError(
            f"{image.where} cannot be decoded: {error}; expected a whole PNG, JPEG, TIFF, DICOM or similar image"
        ) from error


def _extent(array: np.ndarray) -> str:
    return f"{array.shape[2]}x{array.shape[3]}"
