"""Metrics of pixel errors and structural similarity for pairs of images.

Source of SSIM: Wang et al. 2004, "Image quality assessment: from error visibility to structural similarity", equation
13, in scikit-image's definition: a uniform window of 7 pixels, sample variances, no padding, the mean over channels.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from rayfed.errors import UserError
from rayfed.metrics.base import Metric

if TYPE_CHECKING:
    from torch import Tensor

_SMALLEST_WINDOW = 3
_C1, _C2 = 0.01**2, 0.03**2
"""Constants of SSIM for pixels in [0, 1], after Wang et al. 2004, section III.B."""
PSNR_CEILING = 100.0
"""PSNR (dB) of a mean squared error of 1e-10, which is far below 8-bit rounding. Higher values count as equal to it."""


def mse(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean squared error of each pair of images: (N, C, H, W) twice to (N,) float64."""
    return (a.double() - b.double()).square().flatten(1).mean(1)


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio with peak 1, in dB: (N, C, H, W) twice to (N,), inf for equal images."""
    return -10 * mse(a, b).log10()


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Return the structural similarity of each pair of images, at most 1: (N, C, H, W) twice to (N,) float64.

    Images with a side under 7 pixels use the largest odd window that fits. Raises `UserError` for images with a side
    under 3 pixels.
    """
    from torch.nn.functional import avg_pool2d  # `rayfed list metrics` needs no PyTorch

    side = min(a.shape[-2:])
    if side < _SMALLEST_WINDOW:
        raise UserError(
            f"SSIM needs images of at least 3 x 3 pixels, found {a.shape[-2]} x {a.shape[-1]}; remove `ssim`"
        )
    window = min(7, side - 1 + side % 2)
    a, b = a.double(), b.double()
    mean_a, mean_b, square_a, square_b, product = (
        avg_pool2d(values, window, stride=1) for values in (a, b, a * a, b * b, a * b)
    )
    unbiased = window**2 / (window**2 - 1)
    variances = unbiased * (square_a - mean_a**2 + square_b - mean_b**2)
    covariance = unbiased * (product - mean_a * mean_b)
    luminance = (2 * mean_a * mean_b + _C1) / (mean_a**2 + mean_b**2 + _C1)
    structure = (2 * covariance + _C2) / (variances + _C2)
    return (luminance * structure).flatten(1).mean(1)


MSE = Metric(
    name="mse",
    description="mean squared error of pixels in [0, 1]",
    title="BP_MSE",
    heading="MSE",
    function=mse,
    higher_is_closer=False,
    modalities=("pixels", "records"),
    format="error",
    bounds=(0.0, inf),
    tables=(),
    default_of=("pixels", "records"),
    chart=(1.0, 1e-6),
)
PSNR = Metric(
    name="psnr",
    description="peak signal-to-noise ratio, peak 1 (dB); infinite for an exact copy",
    title="PSNR",
    function=psnr,
    higher_is_closer=True,
    modalities=("pixels", "records"),
    unit="dB",
    ceiling=PSNR_CEILING,
    worst_in_tables=True,
    default_of=("pixels", "records"),
    leads=True,
    threshold=15.0,
    chart=(0.0, 60.0),
)
SSIM = Metric(
    name="ssim",
    description="structural similarity, at most 1",
    title="SSIM",
    function=ssim,
    bounds=(-1.0, 1.0),
    higher_is_closer=True,
    default_of=("pixels",),
)
