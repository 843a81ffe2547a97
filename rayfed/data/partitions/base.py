"""Protocol of partitions, and common functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, overload, runtime_checkable

import numpy as np

from rayfed.data.base import choose_stratified
from rayfed.errors import UserError


@runtime_checkable
class Partition(Protocol):
    """Partition of samples among clients, as a frozen dataclass whose fields are the scenario's parameters."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Sequence[np.ndarray]:
        """Return the indices of each client's samples, (n,) int64 each, without repetition, in random order.

        `labels` is (N,) int64. Every sample belongs to exactly one client, unless documented otherwise, and every
        client has at least one; `rng` is the only source of randomness. Raises `UserError` for too few samples.
        """
        ...


@dataclass(frozen=True, eq=False)
class Parts(Sequence[np.ndarray]):
    """Indices of all clients' samples in two flat arrays, which actors can memory-map for any number of clients."""

    indices: np.ndarray
    """Indices of samples, (N,) int64, grouped by client."""
    ends: np.ndarray
    """Ends of the clients' indices, (clients,) int64."""

    @classmethod
    def from_indices(cls, parts: Iterable[np.ndarray]) -> Parts:
        """Build a `Parts` object from a sequence with one array of sample indices per client."""
        if isinstance(parts, Parts):
            return parts
        every = [np.empty(0, np.int64), *parts]
        return cls(np.concatenate(every), np.cumsum([len(part) for part in every[1:]], dtype=np.int64))

    @property
    def sizes(self) -> np.ndarray:
        """Return the number of samples of each client, (clients,) int64."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, client: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, client: slice) -> Sequence[np.ndarray]: ...
    def __getitem__(self, client: int | slice) -> np.ndarray | Sequence[np.ndarray]:
        """Return one client's indices as a view, or a list of them for a slice."""
        if isinstance(client, slice):
            return [self[c] for c in range(*client.indices(len(self)))]
        end = self.ends[client]
        before = range(len(self))[client] - 1
        return self.indices[self.ends[before] if before >= 0 else 0 : end]


def require_samples(samples: int, clients: int, each: int, what: str) -> None:
    """Raise `UserError` if there are fewer than `each` samples per client.

    `what` describes the requirement in the error.
    """
    if samples < clients * each:
        raise UserError(
            f"cannot partition {samples} samples among {clients} clients: {what} needs at least {clients * each}; "
            f"use fewer clients or more samples"
        )


def hold_out(part: np.ndarray, labels: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Split one client's sample indices (n,) into training indices and validation indices.

    Both have at least one sample, stratified by class. `labels` are the labels of all samples. Raises `UserError` for
    too few samples.
    """
    count = max(1, round(share * len(part)))
    if count >= len(part):
        raise UserError(
            f"federation.validation: a share of {share:g} of a client's {len(part)} samples leaves no training sample; "
            f"use fewer clients, a smaller share, or a partition with more samples per client"
        )
    chosen = choose_stratified(labels[part], count)
    return np.delete(part, chosen), part[chosen]


def count_labels(labels: np.ndarray, parts: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """Return the number of samples that each client has of each class, (clients, classes) int64."""
    every = Parts.from_indices(parts)
    owners = np.repeat(np.arange(len(every)), every.sizes)
    held = np.bincount(owners * classes + labels[every.indices], minlength=len(every) * classes)
    return held.reshape(len(every), classes)
