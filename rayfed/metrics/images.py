"""Pixel and structure metrics between pairs of images.

Source of SSIM: Wang et al. 2004, "Image quality assessment: from error visibility to structural similarity", in
scikit-image's definition (uniform window of 7).
"""

from __future__ import annotations

import torch
from torch import Tensor


def mse(a: Tensor, b: Tensor) -> Tensor:
    """Mean squared error of each pair: (N, C, H, W) twice to (N,) float64."""
    return (a.double() - b.double()).square().flatten(1).mean(1)


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Peak signal-to-noise ratio with peak 1, in dB: (N, C, H, W) twice to (N,); infinite for equal images."""
    return -10 * mse(a, b).log10()


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Structural similarity of each pair, at most 1: (N, C, H, W) twice to (N,) float64.

    Images under 7 pixels are seen through the largest odd window that fits; under 3 pixels scikit-image refuses.
    """
    from skimage.metrics import structural_similarity  # half a second and 20 MB of every client's actor

    side = min(a.shape[-2:])
    window = max(3, min(7, side - 1 + side % 2))
    pairs = zip(a.double().cpu().numpy(), b.double().cpu().numpy(), strict=True)
    values = [structural_similarity(x, y, win_size=window, data_range=1, channel_axis=0) for x, y in pairs]
    return torch.tensor(values, dtype=torch.float64, device=a.device)
