"""The contract of a partition, and what all partitions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from rayfed.data.base import stratified
from rayfed.errors import UserError


@runtime_checkable
class Partition(Protocol):
    """A frozen dataclass whose fields are the scenario's parameters."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """For each client the indices (n,) int64 of its samples, in random order.

        `labels` is (N,) int64. Every sample goes to exactly one client and every client gets at least one; `rng`
        is the only source of randomness. Raises `UserError` where there are too few samples.
        """
        ...


def require(samples: int, clients: int, each: int, what: str) -> None:
    """Raise `UserError` unless there are `each` samples for every client; `what` says why so many."""
    if samples < clients * each:
        raise UserError(
            f"cannot deal {samples} samples to {clients} clients: {what} needs at least {clients * each}; "
            f"use fewer clients or more samples"
        )


def hold_out(part: np.ndarray, labels: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """One client's indices (n,) as those that it trains on and those that it only validates on, at least one of each;
    each class gives its share. `labels` are those of all samples. Raises `UserError` for too few.
    """
    count = max(1, round(share * len(part)))
    if count >= len(part):
        raise UserError(
            f"federation.validation: {share:g} of a client's {len(part)} samples leaves none to train on; "
            f"use fewer clients, a smaller share, or a partition that gives each client more"
        )
    chosen = stratified(labels[part], count)
    return np.delete(part, chosen), part[chosen]


def label_mix(labels: np.ndarray, parts: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """How many samples of each class each client has: (clients, classes) int64."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])
