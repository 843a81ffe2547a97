"""Snapshots of attacks on their way to a reconstruction, for the strips of images in the report."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_SHOWN = 4
"""Number of an observation's images in a snapshot: a strip is looked at, and memory must not grow with the batch."""


class Snapshots:
    """Snapshots of P problems of one call at iterations 0, 10, 100, 1000 and so on: a few copies, no arithmetic.

    A snapshot is what the attack would return if it ended there.
    """

    def __init__(self, images: Callable[[Tensor], Tensor], steps: int = 1) -> None:
        """Take the function `images` from points (P, D) to (P, N, C, H, W) and the optimiser's `steps` an iteration."""
        self._images, self._steps = images, steps
        self._next = 0
        self._taken: list[tuple[int, Tensor]] = []

    def note(self, step: int, points: Tensor) -> None:
        """Note the best points (P, D) after a step: they are copied where it is time, else not looked at."""
        if step != self._next * self._steps:
            return
        with torch.no_grad():
            self._taken.append((self._next, self._images(points)[:, :_SHOWN].clamp(0, 1).float().cpu()))
        self._next = max(10, 10 * self._next)

    def until(self, iterations: int, images: Tensor, row: int) -> tuple[tuple[int, Tensor], ...]:
        """Return the snapshots of problem `row`, the last of them `images` (N, C, H, W), after so many iterations."""
        before = [(iteration, taken[row]) for iteration, taken in self._taken if iteration < iterations]
        return (*before, (iterations, images[:_SHOWN]))
