"""Errors of images saved as 8-bit files, in the arithmetic of papers whose figures differ from the true PSNR.

Source: Ren 2023 (thesis), which has three conventions:

- table 3.11: PSNR of 8-bit images (`psnr_8bit`);
- tables 3.4 and 3.16: the squares of the differences overflow in 8 bits (`psnr_overflow`). The evaluation code is not
  published. This convention is inferred from the tables: a failed image has 27.9 dB on CIFAR, their lowest figure;
- table 5.6: the root of the mean squared error takes the place of the error (`psnr_root`, `root_mse`), as in the
  authors' published `evaluation_metrics.py`.

A mean over images in one convention does not give the mean in another, so each image is scored in all of them.
"""

from __future__ import annotations

from math import inf, log10
from typing import TYPE_CHECKING

from rayfed.metrics.base import Metric
from rayfed.metrics.images import PSNR_CEILING

if TYPE_CHECKING:
    from torch import Tensor

_PEAK = 255
_ROOT_CEILING = PSNR_CEILING / 2 + 10 * log10(_PEAK)
"""`psnr_root` (dB) of the mean squared error at which `psnr` reaches its ceiling."""


def psnr_8bit(a: Tensor, b: Tensor) -> Tensor:
    """Return the PSNR (dB) of truncated 8-bit images: (N, C, H, W) in [0, 1] twice to (N,) float64."""
    return _psnr(_squares(a, b).mean(1))


def psnr_overflow(a: Tensor, b: Tensor) -> Tensor:
    """Return the PSNR (dB) of truncated 8-bit images whose squared differences are taken modulo 256, (N,) float64."""
    return _psnr(_squares(a, b).remainder(_PEAK + 1).mean(1))


def psnr_root(a: Tensor, b: Tensor) -> Tensor:
    """Return the PSNR (dB) of truncated 8-bit images computed from `root_mse`, (N,) float64."""
    return _psnr(root_mse(a, b))


def root_mse(a: Tensor, b: Tensor) -> Tensor:
    """Return the root of the mean squared error of truncated 8-bit images, 0 to 255, (N,) float64."""
    return _squares(a, b).mean(1).sqrt()


def _squares(a: Tensor, b: Tensor) -> Tensor:
    """Return the squared differences of pixels as 8-bit files have them, (N, C*H*W) float64."""
    first, second = ((image.float().clamp(0, 1) * _PEAK).floor().double() for image in (a, b))
    return (first - second).square().flatten(1)


def _psnr(error: Tensor) -> Tensor:
    """Return the PSNR (dB) of an error on the scale of 0 to 255."""
    return 10 * (_PEAK**2 / error).log10()


PSNR_8BIT = Metric(
    name="psnr_8bit",
    description="peak signal-to-noise ratio of the images truncated to 8 bits (dB); infinite for equal files",
    title="PSNR, 8 bits",
    function=psnr_8bit,
    higher_is_closer=True,
    unit="dB",
    ceiling=PSNR_CEILING,
    tables=(),
    outcome=False,
)
PSNR_OVERFLOW = Metric(
    name="psnr_overflow",
    description="PSNR of the images truncated to 8 bits, with squared differences modulo 256 (dB): tables 3.4 and 3.16 "
    "of Ren's thesis, as inferred. A failed image has about 28 dB, so this is no measure of leakage",
    title="PSNR, overflow",
    function=psnr_overflow,
    higher_is_closer=True,
    unit="dB",
    ceiling=PSNR_CEILING,
    tables=(),
    outcome=False,
    success=None,
)
PSNR_ROOT = Metric(
    name="psnr_root",
    description="PSNR of the images truncated to 8 bits, computed from the root of the mean squared error (dB): table "
    "5.6 of Ren's thesis. A failed image has about 27 dB, so this is no measure of leakage",
    title="PSNR, root",
    function=psnr_root,
    higher_is_closer=True,
    unit="dB",
    ceiling=_ROOT_CEILING,
    tables=(),
    outcome=False,
    success=None,
)
ROOT_MSE = Metric(
    name="root_mse",
    description="root of the mean squared error of the images truncated to 8 bits, 0 to 255; called MSE in table 5.6 "
    "of Ren's thesis",
    title="Root of MSE",
    function=root_mse,
    higher_is_closer=False,
    format="error",
    bounds=(0.0, inf),
    tables=(),
    outcome=False,
    success=None,
)
