"""Coordinate-wise median (Yin 2018, 'Byzantine-robust distributed learning', definition 1)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rayfed.aggregation.base import Aggregation
from rayfed.catalogue import component
from rayfed.update import Named, Update


@component
class Median(Aggregation):
    """The median of every coordinate over a round's clients, each counted once.

    Source: Yin et al. 2018, definition 1. It needs every update at the server, so the server's memory grows with the
    clients of a round. With an even number of clients it is the mean of the two middle values.
    """

    def partial(self, updates: Iterable[Update]) -> list[tuple[Named, Named]]:
        """The cohort's updates as they are."""
        return [(update.tensors, update.buffers) for update in updates]

    def merge(self, left: list[tuple[Named, Named]], right: list[tuple[Named, Named]]) -> list[tuple[Named, Named]]:
        """Both lists, in order."""
        return left + right

    def combine(self, total: list[tuple[Named, Named]], generator: torch.Generator) -> tuple[Named, Named]:
        """The median of every parameter and buffer coordinate."""
        updates, buffers = zip(*total, strict=True)
        return _median(updates), _median(buffers)


def _median(tensors: tuple[Named, ...]) -> Named:
    return {name: _middle(torch.stack([t[name] for t in tensors])) for name in tensors[0]}


def _middle(stacked: Tensor) -> Tensor:
    ordered = stacked.sort(dim=0).values  # not torch.quantile, which refuses large tensors
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
