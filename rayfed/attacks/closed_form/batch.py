"""Reconstruct a batch and its labels from a linear layer's inputs and the loss's derivatives at its outputs."""

from __future__ import annotations

from dataclasses import replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from rayfed.attacks.base import NotApplicable, Reconstruction
from rayfed.attacks.closed_form.answer import answer
from rayfed.attacks.closed_form.equations import solve
from rayfed.attacks.closed_form.layers import Layer, front
from rayfed.attacks.closed_form.lines import best_points
from rayfed.attacks.closed_form.probe import Probe
from rayfed.update import Observation

_NO_SCALE = (
    "linear layer '{}' has no bias, so the attack finds the scale of the layer's inputs by trying all labels, but "
    "numeric labels cannot be enumerated; grant the labels with `knowledge: [labels]`"
)


def samples_behind(
    probe: Probe, observation: Observation, layer: Layer, inputs: Tensor, slopes: Tensor
) -> Reconstruction:
    """Reconstruct samples from a layer's inputs (n, F [+ 1]) and output gradients (n, O), up to one scale per sample.

    With a bias, the last input is 1, which gives the scale. Without one, the scale is chosen so that the model's slopes
    match. Each sample gets the class that its slopes fit best. Samples repeat if there are fewer than the batch has.
    """
    shape = (len(inputs), *probe.shape)
    affine, _ = front(probe, layer)

    def solved(target: Tensor) -> Tensor:
        samples: Tensor = solve(lambda x: layer.features(probe, x), target.to(probe.dtype), shape, affine).samples
        return samples

    if layer.bias is not None:
        scales = inputs[:, -1:]
        images = solved(inputs[:, :-1] / scales)
        return _labelled(probe, observation, layer, images, slopes * scales)
    lengths = inputs.norm(dim=1, keepdim=True)
    inputs, slopes = inputs / lengths, slopes * lengths
    origins = solved(torch.zeros_like(inputs))

    guesses = _guesses(probe, observation)
    if guesses is None:
        raise NotApplicable(_NO_SCALE.format(layer.weight))

    def miss(images: Tensor, scales: Tensor) -> Tensor:
        return _misses(probe, observation, layer, images, slopes / scales[:, None], guesses).amin(1)

    images, found = best_points(origins, solved(inputs) - origins, miss)
    return _labelled(probe, observation, layer, images, slopes / found[:, None])


def _guesses(probe: Probe, observation: Observation) -> Tensor | None:
    """Return the candidate labels (R,) or (R, ...) of a sample: given labels, all possible labels, or None."""
    if (observation.has_numbers or observation.has_places) and observation.labels is not None:
        return observation.labels.cpu()
    return probe.hypotheses(observation.classes)


def _misses(
    probe: Probe, observation: Observation, layer: Layer, images: Tensor, slopes: Tensor, guesses: Tensor
) -> Tensor:
    """Return the relative distance of each sample's slopes (n, O) from the model's own for each guess, (n, R)."""
    with torch.no_grad():
        outputs = probe.run(images.to(probe.dtype))[0][layer.use].output.flatten(1)
    labels = guesses[:, None].expand(-1, len(images), *guesses.shape[1:])
    own = probe.slopes(layer.use, outputs, labels).double() / observation.batch_size
    if layer.bias is not None:  # ignore the scale, as the loss may be a sum
        along = (own * slopes[:, None]).sum(2, keepdim=True) / own.square().sum(2, keepdim=True)
        own = along.clamp(min=0) * own
    misses: Tensor = (own - slopes[:, None]).norm(dim=2) / slopes.norm(dim=1, keepdim=True)
    return misses


def _labelled(probe: Probe, observation: Observation, layer: Layer, images: Tensor, slopes: Tensor) -> Reconstruction:
    """Return the reconstruction of images (n, *shape), each with the label (of the given ones, if any) that fits best.

    Numeric labels that cannot be enumerated are fitted to the whole gradient.
    """
    order, guesses = torch.arange(observation.batch_size) % len(images), _guesses(probe, observation)
    if guesses is None:
        return answer(probe, observation, images[order.to(images.device)], aligned=True)
    misses = _misses(probe, observation, layer, images.clamp(0, 1), slopes, guesses).nan_to_num(torch.inf).cpu()
    if observation.labels is None:
        observation = replace(observation, labels=guesses[misses.argmin(1)[order]])
    else:
        apart = misses[order]
        if not (observation.has_numbers or observation.has_places):
            apart = apart[:, observation.labels.cpu()]
        costs = apart.clamp(max=1e9)
        rows, columns = linear_sum_assignment(costs.numpy())
        order = order[torch.from_numpy(rows[columns.argsort()])]
    return answer(probe, observation, images[order.to(images.device)], aligned=True)
