"""Bayesian knowledge increment (BP_KI) of a reconstruction, computed without the true image.

Source: Gu et al. 2021, "Federated Deep Learning with Bayesian Privacy", definition 3 and appendix A.4. BP_KI is the
Kullback-Leibler divergence between no knowledge (pixels uniform over k bins) and the histogram of the reconstruction.
The paper does not state k, the base of the logarithm, or a rule for empty bins, which make definition 3 infinite.
Ten bins, base 10 and a floor of 1e-10 reproduce its figures best (`docs/findings/split-models.md`). Appendix A.4 scales
images to (0, 1). Here attacks clamp reconstructions to [0, 1]; scaling each image to its own range is another reading.
The paper's other measure, BP_MSE, is `rayfed.metrics.images.mse`.
"""

from __future__ import annotations

from math import log, log10, sqrt
from typing import TYPE_CHECKING

from rayfed.metrics.base import Metric

if TYPE_CHECKING:
    from torch import Tensor

_BINS = 10
_FLOOR = 1e-10
"""Number added to the share of every bin."""


def knowledge_increment(true: Tensor, guess: Tensor) -> Tensor:
    """Return the Bayesian knowledge increment (BP_KI) of images `guess` (N, C, H, W) in [0, 1], (N,) float64.

    It is KL(prior || posterior) to base 10: 0 if all bins hold equally many pixels, 8 for an image of one value. `true`
    is ignored.
    """
    shares = _shares(guess) + _FLOOR
    return -(shares / shares.sum(1, keepdim=True) * _BINS).log10().mean(1)


def posterior_knowledge(true: Tensor, guess: Tensor) -> Tensor:
    """Return KL(posterior || prior) to base 10 without a floor, (N,). An image of one value has the maximum, 1."""
    shares = _shares(guess)
    divergence: Tensor = shares.xlogy(shares * _BINS).sum(1) / log(10)
    return divergence


def compute_least_error(mean: float, variance: float, increment: float) -> float:
    """Return the minimum expected squared error per pixel of an image independent of the true one, given its BP_KI.

    `mean` and `variance` are those of the true pixels. A BP_KI of `increment` or less forces pixels into every bin,
    also those far from the mean. The best histogram has shares proportional to 1 / (d^2 + t), where d is the distance
    of a bin from the mean and t the Lagrange multiplier of the shares' sum.

    >>> from rayfed.metrics.bayesian import compute_least_error
    >>> round(compute_least_error(0.1307, 0.0949, 0.16), 2)
    0.15
    """
    apart = [max(low / _BINS - mean, mean - (low + 1) / _BINS, 0) ** 2 for low in range(_BINS)]

    def best_shares(multiplier: float) -> list[float]:
        parts = [1 / (distance + multiplier) for distance in apart]
        return [part / sum(parts) for part in parts]

    low, high = 1e-12, 1e6
    for _ in range(200):
        middle = sqrt(low * high)
        reached = -sum(log10(share * _BINS) for share in best_shares(middle)) / _BINS
        low, high = (middle, high) if reached > increment else (low, middle)
    return variance + sum(share * distance for share, distance in zip(best_shares(high), apart, strict=True))


def _shares(images: Tensor) -> Tensor:
    """Return the share of an image's values in each bin, over all channels: (N, C, H, W) to (N, k) float64."""
    from torch.nn import functional as F  # declaring a metric must not import PyTorch

    places = (images.double().flatten(1) * _BINS).long().clamp(0, _BINS - 1)
    return F.one_hot(places, _BINS).double().mean(1)


BP_KI = Metric(
    name="bp_ki",
    description="BP_KI, KL(uniform || histogram of the reconstruction), 10 bins, base 10, 0..8",
    title="BP_KI",
    function=knowledge_increment,
    bounds=(0.0, 8.0),
    higher_is_closer=True,
    tables=(),
    success=None,
)
BP_KI_POSTERIOR = Metric(
    name="bp_ki_posterior",
    description="BP_KI in the other direction, KL(histogram || uniform), 0..1",
    title="BP_KI (posterior)",
    function=posterior_knowledge,
    higher_is_closer=True,
    tables=(),
    outcome=False,
    success=None,
)
