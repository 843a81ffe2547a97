"""Entries attack: recover a sample entry by entry by trying all values that an entry may have.

Some models encode a sample as levels, bits or table rows before their first linear layer. Their gradient has no slope
in the sample, so gradient descent cannot follow it. But the layer's input follows from its gradient, as in `analytic`,
and each number of that input depends on few entries of the sample. The attack finds these dependencies by changing
entries one by one. An entry is then the value that reproduces the numbers that depend on it and on no unknown entry.
It works for encodings per pixel (thermometer, sine, table), encodings per token (bits, number, vector), and sequences
in which each position sees only earlier ones.

Source: none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.closed_form.answer import answer, labelled, studied
from rayfed.attacks.closed_form.layers import Layer, front, linear_layers
from rayfed.attacks.closed_form.probe import Probe
from rayfed.attacks.closed_form.rows import least_squares
from rayfed.registry import component
from rayfed.samples import MODALITIES, Modality
from rayfed.update import Observation

_NO_LAYER = "no linear layer with a bias in the update receives one vector per sample that is not affine in the sample"
_MIXED = "every input value of '{}' depends on several entries of the sample, so no entry can be recovered separately"
_TOO_LARGE = "'{}' has too many inputs and a sample too many entries to test which input depends on which entry"
_SEVERAL = "the attack needs a batch of one sample, because a layer's gradient is summed over the batch"
_LEVELS = 256
"""Number of values tried for an entry in [0, 1], as in 8-bit images."""
_MOST = 2**24
"""Maximum of a sample's entries times a layer's inputs for which dependencies are tested."""
_HALVES = 32
"""Random halves of the entries that are changed first, to test quickly whether any number depends on one entry only."""
_DEPENDS = 1e-6
"""Minimum relative change of a number that depends on a changed entry."""
_ALIKE = 1e-9
"""Difference, as a share of the mean miss, up to which values count as the same level."""


@component
class Entries:
    """Recover each entry of a single sample from a linear layer's input by trying all values.

    Works for operations without a gradient, such as rounding or table look-up.
    """

    takes: ClassVar[tuple[Modality, ...]] = MODALITIES
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
    reason, inherent = _NO_LAYER, True
    for layer in linear_layers(probed, observation.update):
        if layer.bias is None or _is_affine(probed, observation, layer):
            continue
        if layer.width * prod(probed.shape) > _MOST:
            reason, inherent = _TOO_LARGE.format(layer.weight), False
            continue
        depends = probed.once(("depends", layer), partial(_dependence, probed, layer))
        order = _order(depends)
        if not order:
            reason = _MIXED.format(layer.weight) if inherent else reason
            continue
        read = least_squares(layer, observation).to(probed.device, probed.dtype)
        return answer(probed, observation, _looked_up(probed, observation, layer, depends, order, read), aligned=True)
    return not_applicable(observation, reason, inherent=inherent)


def _is_affine(probed: Probe, observation: Observation, layer: Layer) -> bool:
    """Return whether a layer's input is affine in a numeric sample, so that `analytic` solves it directly."""
    return observation.sample.modality != "tokens" and front(probed, layer)[0]


def _features(probed: Probe, layer: Layer) -> Callable[[Tensor], Tensor]:
    """Return the function from samples (N, *shape) to a layer's inputs (N, F), without a graph."""
    return lambda samples: layer.features(probed, samples).detach()


def _dependence(probed: Probe, layer: Layer) -> Tensor:
    """Return a mask (D, F) of which of a layer's F inputs depend on which of a sample's D entries.

    Return all False if no input depends on exactly one entry, because then there is no entry to start with.
    """
    function = _features(probed, layer)
    pairs = [tuple(probed.samples(1, seed=2 * seed + side).flatten(1) for side in (0, 1)) for seed in range(4)]
    if pairs[0][0].is_floating_point():  # the ends pass every threshold
        pairs.append((torch.zeros_like(pairs[0][0]), torch.ones_like(pairs[0][0])))
    seen = [function(one.view(1, *probed.shape)) for one, _ in pairs]

    def moved(entries: Tensor) -> Tensor:
        """Return a mask (n, F) of the inputs that change if the entries in a mask (n, D) change."""
        found = list[Tensor]()
        for (one, other), here in zip(pairs, seen, strict=True):
            there = function(torch.where(entries, other, one).view(-1, *probed.shape))
            found.append((there - here).abs() > _DEPENDS * here.abs().clamp(min=_DEPENDS))
        return torch.stack(found).any(0)

    draw, device = torch.Generator().manual_seed(0), pairs[0][0].device
    halves = (torch.rand(_HALVES, prod(probed.shape), generator=draw) < 0.5).to(device)
    changed = moved(halves)
    if changed.any() and not _one_in_all(halves, changed[:, changed.any(0)]):
        return torch.zeros(halves.shape[1], changed.shape[1], dtype=torch.bool, device=device)
    numbers = torch.arange(halves.shape[1], device=device)
    return torch.cat([moved(some[:, None] == numbers) for some in numbers.split(_LEVELS)])


def _one_in_all(halves: Tensor, changed: Tensor) -> bool:
    """Return whether some input, in `changed` (H, F), changes exactly if `halves` (H, D) contains one certain entry."""
    shared = changed.T.float() @ halves.float()
    return bool(((shared == changed.sum(0)[:, None]) & (shared == halves.sum(0))).any())


def _order(depends: Tensor) -> list[tuple[int, Tensor]]:
    """Return an order of entries, each with a mask (F,) of the inputs that depend on it and on no later entry.

    Entries that affect no input are omitted. Return an empty list if there is no such order.
    """
    open_entries = depends.any(1)
    order: list[tuple[int, Tensor]] = []
    while open_entries.any():
        alone = depends & (depends[open_entries].sum(0) == 1) & open_entries[:, None]
        ready = alone.any(1).nonzero().flatten().tolist()
        if not ready:
            return []
        order += [(entry, alone[entry]) for entry in ready]
        open_entries[ready] = False
    return order


def _looked_up(
    probed: Probe,
    observation: Observation,
    layer: Layer,
    depends: Tensor,
    order: Sequence[tuple[int, Tensor]],
    read: Tensor,
) -> Tensor:
    """Return the sample (1, *shape) that gives the layer the inputs `read` (F,)."""
    function, blank = _features(probed, layer), observation.sample.blank(1).flatten()
    if blank.is_floating_point():
        values = torch.linspace(0, 1, _LEVELS, dtype=probed.dtype, device=probed.device)
        found = torch.full((len(blank),), 0.5, dtype=probed.dtype, device=probed.device)
    else:
        values = torch.arange(observation.sample.largest + 1, device=probed.device)
        found = blank.to(probed.device)
    if (depends.sum(0) <= 1).all():  # all entries at once: no number depends on two
        tried = values[:, None].expand(-1, len(found)).reshape(-1, *probed.shape)
        misses = (torch.cat([function(part) for part in tried.split(_LEVELS)]) - read).square()
        nearest = _nearest(values, misses @ depends.T.to(misses))
        return torch.where(depends.any(1), nearest, found).view(1, *probed.shape)
    for entry, numbers in order:
        tried = found.repeat(len(values), 1)
        tried[:, entry] = values
        seen = torch.cat([function(part.view(-1, *probed.shape)) for part in tried.split(_LEVELS)])
        found[entry] = _nearest(values, (seen - read)[:, numbers].square().sum(1, keepdim=True))[0]
    return found.view(1, *probed.shape)


def _nearest(values: Tensor, misses: Tensor) -> Tensor:
    """Return the value with the smallest of `misses` (V, D) for each entry (D,); for numbers, the mean of ties."""
    least = misses.argmin(0)
    if not values.is_floating_point():
        return values[least]
    alike = (misses <= misses.gather(0, least[None])[0] + _ALIKE * misses.mean(0)).to(values)
    return (alike * values[:, None]).sum(0) / alike.sum(0)
