"""Declarations of metrics that use networks from files (`lpips`, `noise`), without importing PyTorch."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING

from rayfed.metrics.base import Metric

if TYPE_CHECKING:
    from rayfed.metrics.lpips import Lpips, Net
    from rayfed.metrics.noise import NoiseRatio


def _lpips(net: Net, weights: str | None) -> Lpips:
    from rayfed.metrics.lpips import Lpips

    return Lpips(net, weights)


def _noise_ratio(evaluator: str | None) -> NoiseRatio:
    from rayfed.metrics.noise import NoiseRatio

    return NoiseRatio(evaluator)


LPIPS_ALEX = Metric(
    name="lpips_alex",
    description="LPIPS distance, AlexNet features; 0 for an exact copy",
    title="LPIPS (AlexNet)",
    short="LPIPS",
    function=partial(_lpips, "alex"),
    bounds=(0.0, inf),
    needs=("lpips_weights",),
    higher_is_closer=False,
    tables=("settings",),
)
LPIPS_VGG = Metric(
    name="lpips_vgg",
    description="LPIPS distance, VGG16 features; 0 for an exact copy",
    title="LPIPS (VGG)",
    function=partial(_lpips, "vgg"),
    bounds=(0.0, inf),
    needs=("lpips_weights",),
    higher_is_closer=False,
    tables=(),
)
NOISE_RATIO = Metric(
    name="noise_ratio",
    description="share of noise in the reconstruction, estimated by an evaluation network, 0..1",
    title="noise ratio",
    function=_noise_ratio,
    bounds=(0.0, 1.0),
    needs=("evaluator",),
    higher_is_closer=False,
    tables=(),
    success="threshold",
)
