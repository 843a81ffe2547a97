"""SPEAR: recover a batch in closed form from a linear layer before a piecewise flat activation such as ReLU.

The gradient of z_i = W h_i + b over N samples is dL/d[W b] = D^T [H 1]. D holds the derivatives of the loss with
respect to z. It is exactly zero wherever the activation is flat, as ReLU is below 0. For a factorisation L R of rank N,
D^T = L Q and [H 1] = Q^-1 R for one Q. Its columns q are the vectors for which L q has many zeros, and almost no other
vector has many. A plane with normal q contains all rows of L at which one sample's derivative is 0, so the search looks
for planes through many rows.

Before a ReLU, the derivative is exactly 0 for z below a threshold. The zeros of a plane are then the units that one
sample keeps below it. A linear classifier must separate these units from the others. This also guides the search: the
gradient's rows divided by the bias gradient are mixtures of samples. The units that such a mixture keeps below the
threshold are nearly those of a sample.

Sources: Dimitrov et al. 2024, "SPEAR: Exact Gradient Inversion of Batches in Federated Learning", sections 3 and 4
(factorisation, planes through N - 1 random rows, choice of N of them); Tsakiris and Vidal 2018, "Dual Principal
Component Pursuit", section 4 (planes through many of the rows by reweighted least squares, which replace most of the
sampling). The separation and the guides are ours.
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

_NO_LAYER = "no linear layer in the update receives each sample as one vector that determines the sample"
_NO_ZEROS = "no activation after the linear layer '{}' is flat, so the derivatives have no zeros to search for"
_TOO_FEW = "the gradient of '{}' has too few zeros to separate the batch's samples"
_CONSISTENT = 1e-3
"""Distance of the reconstructed batch's gradient from the observed one at which the search ends."""


@component
class Spear:
    """Reconstruct a batch by factorising a linear layer's weight gradient into sparse derivatives and inputs.

    Exact for batches smaller than the layer's inputs and outputs if every sample has enough zeros that no other sample
    has. Labels are recovered from each sample's derivatives. A layer without bias is scaled to fit the model.
    """

    place_labels: ClassVar[str] = "unneeded"

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`)."""
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
    """Return a layer's outputs, and the derivatives of the loss in them, at samples that the attacker makes."""
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
    """Return the test of which units a sample keeps below the threshold, or None if the layer's outputs are unknown."""
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
