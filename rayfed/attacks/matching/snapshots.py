"""Store snapshots of reconstructions during an attack, which the report shows as image strips."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_SHOWN = 4
"""Number of images per observation in a snapshot, limited so that memory does not grow with the batch."""


class Snapshots:
    """Snapshots of P problems' best images at iterations 0, 10, 100, 1000 and so on.

    A snapshot is the result that the attack would return if it ended there. Snapshots copy tensors and compute nothing.
    """

    def __init__(self, images: Callable[[Tensor], Tensor], steps: int = 1) -> None:
        """Store `images`, a function from points (P, D) to (P, N, C, H, W), and the number of `steps` per iteration."""
        self._images, self._steps = images, steps
        self._next = 0
        self._taken: list[tuple[int, Tensor]] = []

    def note(self, step: int, points: Tensor) -> None:
        """Copy the best points (P, D) after a step, if a snapshot is due at this step."""
        if step != self._next * self._steps:
            return
        with torch.no_grad():
            self._taken.append((self._next, self._images(points)[:, :_SHOWN].clamp(0, 1).float().cpu()))
        self._next = max(10, 10 * self._next)

    def until(self, iterations: int, images: Tensor, row: int) -> tuple[tuple[int, Tensor], ...]:
        """Return the snapshots of problem `row` before `iterations`, and `images` (N, C, H, W) as the last snapshot."""
        before = [(iteration, taken[row]) for iteration, taken in self._taken if iteration < iterations]
        return (*before, (iterations, images[:_SHOWN]))
