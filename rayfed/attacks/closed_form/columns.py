"""Columns attack: recover a linear layer's input from the columns of its gradient if rows or signs were changed.

A sample's gradient at `W h + b` is d h^T, so column i is h_i times the bias gradient. A shuffle of a column's values
preserves the column's sum and length. Random signs, rotated or rescaled rows and proportional noise preserve only the
length. So h_i is the column's sum divided by the bias gradient's, or, if that gives no valid sample, the ratio of the
lengths. If all sent values have one size, the number of values per column estimates h_i: a larger h_i moves more values
over the threshold.

Source: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.closed_form.answer import answer, labelled, nothing_found, studied
from rayfed.attacks.closed_form.equations import solve
from rayfed.attacks.closed_form.layers import Layer, front, linear_layers
from rayfed.attacks.closed_form.probe import Probe
from rayfed.registry import component
from rayfed.update import Observation

_NO_LAYER = "no linear layer in the update has an input that is affine in the sample and never negative"
_SEVERAL = "the attack needs a batch of one sample, because the columns of a gradient are summed over the batch"
_SAME = 1e-3
"""Relative difference up to which values have the same size."""
_SLACK = 0.01
"""Distance by which rounding may move an entry out of [0, 1]."""


@component
class Columns:
    """Reconstruct a single sample from the sums and lengths of the columns of a linear layer's gradient.

    Works against defences that change rows or signs but preserve the sizes of columns. If the bias gradient does not
    give the scale, the largest entry is set to 1.
    """

    place_labels: ClassVar[str] = "unneeded"

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`)."""
        return studied(_reconstruction, observations, model, generators)


def _reconstruction(probed: Probe, observation: Observation, _: torch.Generator) -> Reconstruction:
    if observation.batch_size > 1:
        return not_applicable(observation, _SEVERAL, inherent=True)
    return labelled(_of_one, probed, observation)


def _of_one(probed: Probe, observation: Observation) -> Reconstruction:
    for layer in linear_layers(probed, observation.update):
        affine, size = front(probed, layer)
        if affine and size >= prod(probed.shape) and _never_negative(probed, layer):
            return _read(probed, observation, layer)
    return not_applicable(observation, _NO_LAYER, inherent=True)


def _never_negative(probed: Probe, layer: Layer) -> bool:
    """Return whether a layer's input is never negative for samples in [0, 1], as lengths lose the sign."""
    ends = torch.stack([torch.zeros(probed.shape), torch.ones(probed.shape)]).to(probed.device, probed.dtype)
    seen = torch.cat([layer.features(probed, part).detach() for part in (ends, probed.samples(16, seed=3))])
    return bool((seen >= 0).all())


def _read(probed: Probe, observation: Observation, layer: Layer) -> Reconstruction:
    weight = layer.matrix(observation.gradient).nan_to_num(0, 0, 0)
    bias = layer.vector(observation.gradient)
    lengths = weight.norm(dim=0)
    if not lengths.any():
        return nothing_found(observation, f"the gradient of '{layer.weight}' has no finite non-zero entry")
    sizes, counts = weight.abs()[weight != 0], (weight != 0).sum(0).to(weight)
    of_one_size = counts.amin() < counts.amax() and sizes.max() - sizes.min() <= _SAME * sizes.max()
    largest = counts if of_one_size else lengths
    scaled: list[Tensor] = []
    if bias is not None:
        bias = bias.nan_to_num(0, 0, 0)
        scaled = [lengths / bias.norm()]
        if bias.sum().abs() > _SAME * bias.norm():  # a head's bias gradient sums to 0
            scaled.insert(0, weight.sum(0) / bias.sum())
    shape = (1, *observation.sample.shape)
    for entered in scaled:
        if entered.isfinite().all():
            images = _solved(probed, layer, entered, shape)
            if ((images >= -_SLACK) & (images <= 1 + _SLACK)).all():
                return answer(probed, observation, images, aligned=True)
    return answer(probed, observation, _solved(probed, layer, largest / largest.max(), shape), aligned=True)


def _solved(probed: Probe, layer: Layer, features: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the sample (1, *shape) that gives a layer the input `features` (F,)."""
    target = features.to(probed.device, probed.dtype)[None]
    return solve(lambda x: layer.features(probed, x), target, shape, affine=True).samples
