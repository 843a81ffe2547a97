"""Observations that make one batched problem, attacked together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import torch

from rayfed.attacks.base import Reconstruction
from rayfed.update import LocalTraining, Observation

Group = Callable[[Sequence[Observation], Sequence[torch.Generator]], list[Reconstruction]]
"""An attack on observations of one batch size and local training, whose labels are all known or all unknown."""


def in_groups(
    attack: Group, observations: Sequence[Observation], generators: Sequence[torch.Generator]
) -> list[Reconstruction]:
    """Attack observations that make one batched problem together; the results in the order of the observations."""
    members: dict[tuple[int, LocalTraining, bool], list[int]] = defaultdict(list)
    for index, observation in enumerate(observations):
        members[observation.batch_size, observation.local, observation.labels is None].append(index)
    found: dict[int, Reconstruction] = {}
    for group in members.values():
        began = perf_counter()
        results = attack([observations[i] for i in group], [generators[i] for i in group])
        seconds = (perf_counter() - began) / len(group)
        found |= {i: replace(result, seconds=seconds) for i, result in zip(group, results, strict=True)}
    return [found[index] for index in range(len(observations))]
