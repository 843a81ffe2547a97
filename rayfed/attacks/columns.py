"""Attack that recovers a linear layer's input from the columns of its gradient, where rows or signs say nothing.

A sample's gradient at `W h + b` is d h^T, so column i is h_i times that of the bias. Of a column its sum and its length
outlive a shuffle of its values, and the length random signs too, a rotation of the rows, factors of the rows, and noise
in proportion. So h_i is the column's sum over the bias's, or, where that makes no sample, its length over the bias's.
Where all values that were sent are of one size, how many a column has tells how large h_i is: the larger, the more of
its values passed a threshold.

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

_NO_LAYER = "no linear layer whose gradient is sent sees numbers of each sample that are affine in it and never below 0"
_SEVERAL = "columns of several samples' gradients add up"
_SAME = 1e-3
"""Relative difference up to which values are of one size."""
_SLACK = 0.01
"""How far rounding may carry an entry out of [0, 1]."""


@component
class Columns:
    """Reads a single sample off the sums and lengths of the columns of a linear layer's gradient.

    For defences that change rows or signs and leave the columns' sizes. Where their scale is not known, by a bias's
    that makes no sample, the largest entry is 1.
    """

    place_labels: ClassVar[str] = "unneeded"

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """One reconstruction for each observation (see `Attack`)."""
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
    """Return whether what enters a layer is at least 0 for samples in [0, 1]: signs are lost in a length."""
    ends = torch.stack([torch.zeros(probed.shape), torch.ones(probed.shape)]).to(probed.device, probed.dtype)
    seen = torch.cat([layer.features(probed, part).detach() for part in (ends, probed.samples(16, seed=3))])
    return bool((seen >= 0).all())


def _read(probed: Probe, observation: Observation, layer: Layer) -> Reconstruction:
    weight = layer.matrix(observation.gradient).nan_to_num(0, 0, 0)
    bias = layer.vector(observation.gradient)
    lengths = weight.norm(dim=0)
    if not lengths.any():
        return nothing_found(observation, f"no entry of the gradient of '{layer.weight}' is finite and not 0")
    sizes, counts = weight.abs()[weight != 0], (weight != 0).sum(0).to(weight)
    of_one_size = counts.amin() < counts.amax() and sizes.max() - sizes.min() <= _SAME * sizes.max()
    largest = counts if of_one_size else lengths
    scaled: list[Tensor] = []
    if bias is not None:
        bias = bias.nan_to_num(0, 0, 0)
        scaled = [lengths / bias.norm()]
        if bias.sum().abs() > _SAME * bias.norm():  # that of a head's biases is 0
            scaled.insert(0, weight.sum(0) / bias.sum())
    shape = (1, *observation.sample.shape)
    for entered in scaled:
        if entered.isfinite().all():
            images = _solved(probed, layer, entered, shape)
            if ((images >= -_SLACK) & (images <= 1 + _SLACK)).all():
                return answer(probed, observation, images, aligned=True)
    return answer(probed, observation, _solved(probed, layer, largest / largest.max(), shape), aligned=True)


def _solved(probed: Probe, layer: Layer, features: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the sample (1, *shape) behind what enters a layer, (F,)."""
    target = features.to(probed.device, probed.dtype)[None]
    return solve(lambda x: layer.features(probed, x), target, shape, affine=True).samples
