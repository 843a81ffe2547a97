"""Decoding of DICOM images with modality rescale, window and inversion, as viewers show them.

Source: DICOM PS3.3 2024, C.11.1 (modality LUT), C.11.2.1.2 (window centre and width) and C.7.6.3.1.2 (photometric
interpretation).
"""

from __future__ import annotations

import warnings
from io import BytesIO
from typing import Any

import numpy as np

from rayfed.errors import DataError, require_extra

_WHITE = 65535


def is_dicom(content: bytes) -> bool:
    """Return whether a file's content starts like a DICOM file: any 128 bytes, then `DICM`."""
    return content[128:132] == b"DICM"


def decode_dicom(content: bytes) -> np.ndarray:
    """Decode a DICOM image into (C, H, W): grey as uint16, from black 0 to white 65535; RGB as stored.

    Grey levels use the file's first window. Without a window, black and white are the minimum and maximum of the stored
    bits, so that images of one scanner stay comparable. Raises `DataError` for files without pixels, with several
    frames, or with look-up tables instead of a window, and `MissingExtraError` if pydicom is missing.
    """
    require_extra("medical", "a DICOM file", "pydicom")
    import pydicom
    from pydicom.pixels.processing import apply_color_lut, apply_modality_lut

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings on tags other than the image
        found = pydicom.dcmread(BytesIO(content))
        if "PixelData" not in found:
            raise DataError("the DICOM file has no pixels: expected an image, found another kind of object")
        if (frames := int(found.get("NumberOfFrames") or 1)) > 1:
            raise DataError(f"the DICOM file has {frames} frames: save each sample as a separate file")
        stored = found.pixel_array
        if found.PhotometricInterpretation == "PALETTE COLOR":
            stored = apply_color_lut(stored, found)
            return _colour(stored, 8 * stored.itemsize)
        if found.SamplesPerPixel == 3:
            return _colour(stored, int(found.BitsStored))
        windowed = found.get("WindowCenter") is not None
        if "ModalityLUTSequence" in found or ("VOILUTSequence" in found and not windowed):
            raise DataError("the grey levels use a look-up table: save the image with a window, or without both")
        values = apply_modality_lut(stored, found).astype(np.float64)
        black, white = _window(found) if windowed else _range(found)
    share: np.ndarray = ((values - black) / (white - black)).clip(0, 1)
    if found.PhotometricInterpretation == "MONOCHROME1":
        share = 1 - share
    levels: np.ndarray = np.rint(share * _WHITE).astype(np.uint16)
    return levels[None]


def _colour(pixels: np.ndarray, bits: int) -> np.ndarray:
    """Return a colour image (H, W, 3) as (3, H, W)."""
    if bits not in (8, 16):
        raise DataError(f"the colours have {bits} bits: expected 8 or 16; save the image with 8 or 16 bits")
    channels_first: np.ndarray = pixels.transpose(2, 0, 1).astype(np.uint8 if bits == 8 else np.uint16)
    return channels_first


def _window(found: Any) -> tuple[float, float]:
    """Return the values shown as black and as white by the first window."""
    centre, width = (float(np.atleast_1d(found[name].value)[0]) for name in ("WindowCenter", "WindowWidth"))
    function = found.get("VOILUTFunction", "LINEAR")
    if function not in ("LINEAR", "LINEAR_EXACT"):
        raise DataError(f"the window (VOI LUT function) is {function}: expected a linear window")
    if function == "LINEAR":  # the standard shifts this window by half a value
        centre, width = centre - 0.5, max(width - 1, 1e-6)
    return centre - width / 2, centre + width / 2


def _range(found: Any) -> tuple[float, float]:
    """Return the smallest and largest value that the stored bits can represent, after the rescale."""
    bits = int(found.BitsStored)
    low = -(2 ** (bits - 1)) if found.PixelRepresentation else 0
    slope, intercept = float(found.get("RescaleSlope", 1)), float(found.get("RescaleIntercept", 0))
    return low * slope + intercept, (low + 2**bits - 1) * slope + intercept
