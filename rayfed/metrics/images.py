"""Metrics of pixel errors and structural similarity for pairs of images.

Source of SSIM: Wang et al. 2004, "Image quality assessment: from error visibility to structural similarity", in
scikit-image's definition (uniform window of 7).
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from rayfed.errors import UserError
from rayfed.metrics.base import Metric

if TYPE_CHECKING:
    from torch import Tensor

_SMALLEST_WINDOW = 3
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
    from skimage.metrics import structural_similarity  # 0.5 s and 20 MB in every client's actor

    side = min(a.shape[-2:])
    if side < _SMALLEST_WINDOW:
        raise UserError(
            f"SSIM needs images of at least 3 x 3 pixels, found {a.shape[-2]} x {a.shape[-1]}; remove `ssim`"
        )
    window = min(7, side - 1 + side % 2)
    pairs = zip(a.double().cpu().numpy(), b.double().cpu().numpy(), strict=True)
    values = [structural_similarity(x, y, win_size=window, data_range=1, channel_axis=0) for x, y in pairs]
    return a.double().new_tensor(values)


def wasserstein(a: Tensor, b: Tensor) -> Tensor:
    """Return the Wasserstein-1 distance between the pixel values of each pair of images: (N, C, H, W) twice to (N,).

    The mean over the channels. For two sets of equal size, this is the mean distance of the sorted values.
    """
    first, second = (images.double().flatten(2).sort(2).values for images in (a, b))
    return (first - second).abs().flatten(1).mean(1)


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
WASSERSTEIN = Metric(
    name="wasserstein",
    description="Wasserstein-1 distance between the pixel values of the two images, mean over channels, 0..1; 0 for "
    "equal histograms, wherever the pixels are",
    title="Wasserstein",
    function=wasserstein,
    higher_is_closer=False,
    format="error",
    bounds=(0.0, 1.0),
    tables=(),
    success=None,
)
