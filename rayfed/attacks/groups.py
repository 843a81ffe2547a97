"""Observations that make one batched problem, attacked together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import torch

from rayfed.attacks.base import NotApplicable, Reconstruction, not_applicable
from rayfed.update import LocalTraining, Named, Observation

Group = Callable[[Sequence[Observation], Sequence[torch.Generator]], list[Reconstruction]]
"""An attack on observations of equal buffers, batch size and local training, whose labels are all of a kind."""


def in_groups(
    attack: Group, observations: Sequence[Observation], generators: Sequence[torch.Generator]
) -> list[Reconstruction]:
    """Attack observations that make one batched problem together; return the results in the observations' order.

    Where the attack raises `NotApplicable`, its message stands in the group's results.
    """
    members: dict[tuple[int, LocalTraining, torch.dtype | None, int], list[int]] = defaultdict(list)
    kinds: list[Named] = []
    for index, observation in enumerate(observations):
        kind = _kind(observation.buffers, kinds)
        labels = None if observation.labels is None else observation.labels.dtype
        members[observation.batch_size, observation.local, labels, kind].append(index)
    found: dict[int, Reconstruction] = {}
    for group in members.values():
        began = perf_counter()
        try:
            results = attack([observations[i] for i in group], [generators[i] for i in group])
        except NotApplicable as reason:
            results = [not_applicable(observations[i], str(reason), reason.inherent) for i in group]
        seconds = (perf_counter() - began) / len(group)
        found |= {i: replace(result, seconds=seconds) for i, result in zip(group, results, strict=True)}
    return [found[index] for index in range(len(observations))]


def _kind(buffers: Named, known: list[Named]) -> int:
    """Return the index of these buffers among the known ones, by value, to which they are added where new.

    Who is given clients' keys meets another model at every victim.
    """
    for place, others in enumerate(known):
        if all(torch.equal(tensor, others[name]) for name, tensor in buffers.items()):
            return place
    known.append(buffers)
    return len(known) - 1
