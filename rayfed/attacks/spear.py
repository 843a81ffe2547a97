"""SPEAR: recover a whole batch in closed form from a linear layer before an activation flat in places, as ReLU.

The gradient of z_i = W h_i + b over N samples is dL/d[W b] = D^T [H 1]: D, the slopes of the loss in z, has an exact
zero wherever the activation is flat, as a ReLU is below 0. Of a factorisation L R of rank N, D^T = L Q and
[H 1] = Q^-1 R, for one Q: its columns q are those for which L q has many zeros, which nearly no other vector has. A
plane with normal q holds all rows of L at which one sample's slope is 0: it is found as one through many points.

Where the model's slope is 0 exactly for z below a threshold, as before a ReLU, a plane's zeros have to be the units
that one sample keeps below it: a linear classifier has to separate them from the others. The same tells where to look:
the gradient's rows, over the bias's, are mixtures of samples, and the units that such a mixture keeps below the
threshold are nearly those of a sample.

Sources: Dimitrov et al. 2024, "SPEAR: Exact Gradient Inversion of Batches in Federated Learning", sections 3 and 4
(factorisation, planes through N - 1 random rows, choice of N of them); Tsakiris and Vidal 2018, "Dual Principal
Component Pursuit", section 4 (planes through many of the rows by reweighted least squares, which replace most of the
sampling); the separation and the guides are our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.closed_form.answer import nothing_found, studied
from rayfed.attacks.closed_form.batch import samples_behind
from rayfed.attacks.closed_form.factors import Factors, factorise, outputs_of
from rayfed.attacks.closed_form.layers import Layer, front, linear_layers
from rayfed.attacks.closed_form.planes import Sides, planes
from rayfed.attacks.closed_form.probe import Probe
from rayfed.models.build import is_stochastic
from rayfed.registry import component
from rayfed.update import Observation

_NO_LAYER = "no linear layer whose gradient is sent sees each sample as one vector that determines the sample"
_NO_ZEROS = "nothing behind the linear layer '{}' is flat: its slopes have no zeros to look for"
_TOO_FEW = "the gradient of '{}' has too few zeros to tell the batch's samples apart"
_CONSISTENT = 1e-3
"""Distance of the found batch's gradient from the observed one at which the search ends."""


@component
class Spear:
    """Factorises the weight gradient of a linear layer into the batch's slopes, which have zeros, and its inputs.

    Exact for batches smaller than the layer's inputs and outputs, as long as every sample has enough zeros of its own;
    labels are found with the images, from each sample's slopes. A layer without bias is scaled to fit the model.
    """

    place_labels: ClassVar[str] = "unneeded"

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """One reconstruction for each observation (see `Attack`)."""
        find = partial(_reconstruction, random=is_stochastic(model))
        return studied(find, observations, model, generators)


def _reconstruction(
    probed: Probe, observation: Observation, generator: torch.Generator, random: bool
) -> Reconstruction:
    reason = _NO_LAYER
    for layer in linear_layers(probed, observation.update):
        affine, size = front(probed, layer)
        if not affine and (size < prod(probed.shape) or layer.bias is None):
            continue
        slopes, outputs = _slopes_of_own(probed, layer)
        if not random and (slopes != 0).all():
            reason = _NO_ZEROS.format(layer.weight)
            continue
        threshold = outputs[slopes == 0].max() if (slopes == 0).any() else outputs.min()
        one_sided = bool((outputs[slopes != 0] >= threshold).all()) and bool((slopes == 0).any())
        return _batch(probed, observation, layer, float(threshold) if one_sided else None, generator)
    return not_applicable(observation, reason, inherent=True)


def _slopes_of_own(probed: Probe, layer: Layer) -> tuple[Tensor, Tensor]:
    """Return the slopes of the loss in a layer's outputs, and the outputs, at samples of the attacker's own."""
    uses, _, logits = probed.run(probed.samples(16, seed=2))
    output = uses[layer.use].output
    loss = probed.loss(logits, probed.blank(len(logits)).to(logits.device), "sum")
    (slopes,) = torch.autograd.grad(loss, output, materialize_grads=True)
    return slopes.flatten(1), output.detach().flatten(1)


def _batch(
    probed: Probe, observation: Observation, layer: Layer, threshold: float | None, generator: torch.Generator
) -> Reconstruction:
    factors = factorise(layer, observation)
    if isinstance(factors, str):
        return nothing_found(observation, factors)
    sides = None if threshold is None else _sides(probed, observation, layer, factors, threshold)
    best = nothing_found(observation, _TOO_FEW.format(layer.weight))
    for normals in planes(factors.left, factors.noise, sides, generator):
        if len(normals) == len(factors.values):
            inputs = torch.linalg.solve(normals.T, factors.values[:, None] * factors.right)
            result = samples_behind(probed, observation, layer, inputs, normals @ factors.left.T)
            best = result if best.status != "ok" or result.loss < best.loss else best
            if result.loss < _CONSISTENT:
                break
    return best


def _sides(probed: Probe, observation: Observation, layer: Layer, factors: Factors, threshold: float) -> Sides | None:
    """Return which units a sample keeps below the threshold, as a function of its coordinates in the inputs' span."""
    outputs = outputs_of(probed, layer, factors)
    guides, one = factors.guides(layer.bias is not None)
    if outputs is None or not len(guides) or (layer.bias is None and abs(threshold) > 1e-2):
        return None
    if layer.bias is None:
        return Sides(outputs, guides, False, None)
    given = observation.labels
    guesses = probed.hypotheses(observation.classes) if given is None else given.unique(dim=0).cpu()

    def slopes(vectors: Tensor) -> Tensor:
        assert guesses is not None
        labels = guesses[:, None].expand(-1, len(vectors), *guesses.shape[1:])
        return probed.slopes(layer.use, (vectors / (vectors @ one)) @ outputs.T, labels).double()

    return Sides(outputs - threshold * one.T, guides, True, None if guesses is None else slopes)
