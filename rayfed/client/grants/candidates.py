"""Candidates for membership."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rayfed.client.grants.base import Grant
from rayfed.registry import component

if TYPE_CHECKING:
    import numpy as np

    from rayfed.client.visit import ObservedClient, Truth
    from rayfed.update import Update

MOST_CANDIDATES = 500
"""Most candidates that a membership attack is asked about; one half are members."""


@component
class Candidates(Grant):
    """Images and labels of which half were trained on by the victim and half are of the test split, shuffled.

    As many as are behind the update, 500 at most; which is which stays where scores are made.
    """

    describe: ClassVar[str] = "candidates for membership"
    fills: ClassVar[tuple[str, ...]] = ("candidates",)

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        """Return the candidates: inputs (M, *shape) and labels (M,)."""
        import torch

        members, others, order = (torch.from_numpy(part) for part in self._drawn(observed, truth))
        members, order = members.to(truth.labels.device), order.to(truth.labels.device)
        inputs, labels = observed.runtime.test_data(others.numpy())
        shuffled = (
            torch.cat([truth.inputs[members], inputs])[order],
            torch.cat([truth.labels[members], labels])[order],
        )
        return {"candidates": shuffled}

    def hides(self, observed: ObservedClient, truth: Truth) -> Truth:
        """Return the truth with which of the candidates are members."""
        import torch

        members, _, order = self._drawn(observed, truth)
        return truth.replace(members=torch.from_numpy(order).to(truth.labels.device) < len(members))

    def _drawn(self, observed: ObservedClient, truth: Truth) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw the members' rows in the truth, the others' in the test split, and the order of both together."""
        from rayfed import seeds

        runtime, rows = observed.runtime, len(observed.runtime.data.test_labels)
        count = min(len(truth.labels), rows, MOST_CANDIDATES // 2)
        draw = seeds.numpy_generator(runtime.scenario.seed, "candidates", observed.round, observed.client)
        members = draw.choice(len(truth.labels), count, replace=False)
        return members, draw.choice(rows, count, replace=False), draw.permutation(2 * count)
