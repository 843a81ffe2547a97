"""Decoding and resizing of images into one array with 8 or 16 bits per channel."""

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
from rayfed.errors import DataError, UserError

_GREY = ("1", "L", "LA")
_DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
"""Pillow's modes with more than 8 bits per channel, which a conversion to 8 bits would clip."""
_TURNED, _SIDEWAYS = range(2, 9), range(5, 9)
"""EXIF orientations that rotate or mirror an image, and orientations that exchange height and width."""
_PNG, _DEPTH = b"\x89PNG\r\n\x1a\n", 24
"""First bytes of a PNG, and offset of the bits per channel; Pillow reduces 16-bit colours to 8 bits."""


class Encoded(NamedTuple):
    """Encoded image: bytes or a file in PNG, JPEG or another format."""

    where: str
    """Name of the file, and the row within it, for errors."""
    data: bytes | Path
    """Encoded bytes, or the path of the image file."""


class PixelFormat(NamedTuple):
    """Number of channels and number type of a decoded image."""

    channels: int
    depth: np.dtype
    """uint8 or uint16."""


class Extent(NamedTuple):
    """Size of an image in pixels, after the EXIF orientation is applied."""

    height: int
    width: int
    turned: bool
    """Whether its EXIF orientation rotates or mirrors the stored image."""


def resize(images: np.ndarray, size: int | None) -> np.ndarray:
    """Resize images (N, C, H, W) to height = width = `size`, bilinear with antialias; None keeps the size."""
    if size is None or images.shape[2:] == (size, size):
        return images
    if images.dtype == np.uint8:
        return F.interpolate(torch.from_numpy(images), size=(size, size), mode="bilinear", antialias=True).numpy()
    levels = torch.from_numpy(images.astype(np.float32))
    resized = F.interpolate(levels, size=(size, size), mode="bilinear", antialias=True)
    return resized.round_().clamp_(0, np.iinfo(images.dtype).max).numpy().astype(images.dtype)


def decode_images(images: Sequence[Encoded], size: int | None) -> np.ndarray:
    """Decode images into one (N, C, H, W) array, resized to height = width = `size` if given.

    The type is uint16 (white is 65535) if an image has more than 8 bits per channel, else uint8. The result is grey
    (C = 1) if all images are grey. Grey images among RGB images become RGB (C = 3). Otherwise all images need the same
    number of channels. The EXIF orientation is applied, transparency is dropped, and the first frame of an animation is
    used. Raises `DataError` for invalid images, for different sizes without `size`, and for different channels.
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
            raise DataError(
                f"images differ in channels: {image.where} has {array.shape[1]}, but another image has {channels}; "
                "convert all images to the same number of channels"
            )
    depth = max(array.dtype for array in arrays)
    together = np.empty((len(arrays), channels, *arrays[0].shape[2:]), depth)
    for target, array in zip(together, arrays, strict=True):
        target[:] = convert_depth(array[0], depth)  # broadcasts grey over three channels
    return together


def convert_depth(images: np.ndarray, depth: np.dtype) -> np.ndarray:
    """Convert 8-bit images to the number type `depth`, scaled so that white stays white.

    Images that have that type are returned unchanged.
    """
    return images if images.dtype == depth else images.astype(depth) * 257


def read_pixel_format(image: Encoded) -> PixelFormat:
    """Return the number of channels and the number type of an image, from the file's header if possible.

    Raises `DataError` for an invalid image.
    """
    with name_errors(image):
        content = read_content(image)
        if (found := _other(content)) is not None:
            return PixelFormat(len(found), found.dtype)
        with Image.open(BytesIO(content)) as picture:
            return PixelFormat(1 if picture.mode in _GREY else 3, np.dtype(np.uint8))


def read_extent(image: Encoded) -> Extent:
    """Return an image's size in pixels, from the file's header if possible; raise `DataError` for an invalid image."""
    with name_errors(image):
        content = read_content(image)
        if (found := _other(content)) is not None:
            return Extent(found.shape[1], found.shape[2], turned=False)
        with Image.open(BytesIO(content)) as picture:
            orientation = picture.getexif().get(ExifTags.Base.Orientation, 1)
            height, width = picture.size if orientation in _SIDEWAYS else picture.size[::-1]
            return Extent(height, width, orientation in _TURNED)


def _decode(image: Encoded) -> np.ndarray:
    """Decode an image into (1, C, H, W) uint8 or uint16."""
    with name_errors(image):
        content = read_content(image)
        found = _other(content)
        return np.ascontiguousarray(_pillow(content) if found is None else found)[None]


def read_content(image: Encoded) -> bytes:
    """Return the encoded bytes of an image."""
    return image.data if isinstance(image.data, bytes) else image.data.read_bytes()


def _other(content: bytes) -> np.ndarray | None:
    """Return an image (C, H, W) in a format that Pillow does not read; None for other formats."""
    if dicom.is_dicom(content):
        return dicom.decode_dicom(content)
    if content.startswith(tiff.MAGIC):
        return tiff.decode_tiff(content)
    if content.startswith(_PNG) and content[_DEPTH : _DEPTH + 1] == b"\x10":
        return _png_of_16_bits(content)
    return None


def _png_of_16_bits(content: bytes) -> np.ndarray:
    """Decode a PNG with 16 bits per channel into (1 or 3, H, W), as Pillow reduces colours to 8 bits."""
    with Image.open(BytesIO(content)) as picture:
        if picture.mode in _DEEP:
            return np.array(ImageOps.exif_transpose(picture)).astype(np.uint16)[None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision warns that it will move to another package
        from torchvision.io import ImageReadMode, decode_png

        stored = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        pixels: np.ndarray = decode_png(stored, ImageReadMode.UNCHANGED, apply_exif_orientation=True).numpy()
    return pixels[: len(pixels) - (len(pixels) % 2 == 0)]  # with two or four channels, the last is transparency


def _pillow(content: bytes) -> np.ndarray:
    """Decode an 8-bit image into (1 or 3, H, W)."""
    with Image.open(BytesIO(content)) as picture:
        if picture.mode in _DEEP:
            raise ValueError(
                f"the image has more than 8 bits per channel (mode {picture.mode}): save it as PNG or TIFF"
            )
        pixels = np.array(ImageOps.exif_transpose(picture).convert("L" if picture.mode in _GREY else "RGB"))
        if picture.has_transparency_data and _has_one_colour(pixels) and not _has_one_opacity(picture):
            raise DataError(
                "all pixels have the same colour, because the content is in the transparency, which is ignored: save "
                "the image with a background"
            )
    return np.atleast_3d(pixels).transpose(2, 0, 1)


def _has_one_colour(pixels: np.ndarray) -> bool:
    return bool((pixels == pixels[:1, :1]).all())


def _has_one_opacity(picture: Image.Image) -> bool:
    low, high = picture.convert("RGBA").getchannel("A").getextrema()
    return low == high


@contextmanager
def name_errors(image: Encoded) -> Iterator[None]:
    """Convert any error of an image decoder in the block to `DataError` with the image's name."""
    try:
        yield
    except UserError as error:
        raise DataError(f"{image.where}: {error}") from error
    except UnidentifiedImageError as error:  # Pillow's own message does not name the file
        raise DataError(
            f"{image.where} is not an image: expected a complete PNG, JPEG, TIFF, DICOM or similar image"
        ) from error
    except Exception as error:  # decoders can raise any exception for broken bytes
        raise DataError(
            f"{image.where} cannot be decoded: {error}; expected a complete PNG, JPEG, TIFF, DICOM or similar image"
        ) from error


def _extent(array: np.ndarray) -> str:
    return f"{array.shape[2]}x{array.shape[3]}"
