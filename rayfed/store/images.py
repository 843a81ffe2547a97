"""PNG encoding of images for tables and the report."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from torch import Tensor


def encode_png(image: Tensor) -> bytes:
    """Encode an image as PNG, rounded to 8 bits per channel.

    `image` is (1, H, W) grey or (3, H, W) RGB, in [0, 1]. Images with another number of channels become one grey
    picture with the channels side by side. Values outside [0, 1] are clamped, NaN becomes 0. Raises `ValueError` for
    any other shape.
    """
    import torch  # imported here because readers of tables do not need it

    if image.ndim != 3 or not image.shape[0]:
        raise ValueError(f"an image has shape (C, H, W), not {tuple(image.shape)}")
    if image.shape[0] != 3:
        image = torch.cat(tuple(image), dim=-1)[None]
    levels = (image.detach().float().nan_to_num(nan=0.0).clamp(0, 1) * 255).round().to("cpu", torch.uint8)
    pixels = levels[0] if image.shape[0] == 1 else levels.permute(1, 2, 0)
    buffer = BytesIO()
    Image.fromarray(pixels.contiguous().numpy()).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def decode_png(data: bytes) -> np.ndarray:
    """Decode a PNG written by `encode_png` to an array (H, W, C) uint8."""
    pixels = np.array(Image.open(BytesIO(data)))
    return pixels[..., None] if pixels.ndim == 2 else pixels
