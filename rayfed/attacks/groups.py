"""Group observations that form one batched problem, so that they are attacked together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import torch

from rayfed.attacks.base import NotApplicable, Reconstruction, not_applicable
from rayfed.update import LocalTraining, Named, Observation

Group = Callable[[Sequence[Observation], Sequence[torch.Generator]], list[Reconstruction]]
"""An attack on observations with equal buffers, batch size, local training and type of labels."""


def in_groups(
    attack: Group, observations: Sequence[Observation], generators: Sequence[torch.Generator]
) -> list[Reconstruction]:
    """Attack each group of observations that form one batched problem; return results in observation order.

    If the attack raises `NotApplicable`, all results of the group have that status and message.
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
    """Return the index of equal buffers in `known`; append new buffers.

    Buffers differ between victims if the attacker knows the clients' keys.
    """
    for place, others in enumerate(known):
        if all(torch.equal(tensor, others[name]) for name, tensor in buffers.items()):
            return place
    known.append(buffers)
    return len(known) - 1
