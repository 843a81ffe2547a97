"""Label skew: each client's class proportions are drawn from a Dirichlet distribution.

Hsu, Qi and Brown, arXiv:1909.06335, section 3; the same in appendix D of Refiner with concentration 1.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from rayfed.data.partitions.base import require
from rayfed.registry import component


@component
class Dirichlet:
    """Clients with equally many samples and mixes q ~ Dir(alpha * K * p), p the data's own mix of K classes.

    With balanced classes that is Dir(alpha, ..., alpha), the symmetric distribution of Refiner; the alpha of
    Hsu et al. is K times this one. As a sample is dealt only once, a class can run out: those who drew it share
    what there is by lot, and draw the rest from the classes that are left, still in the proportions of their q.
    """

    by_label: ClassVar[bool] = True

    alpha: Annotated[float, Field(gt=0)]
    """Concentration for each class: near 0 a client has one class for the most part, above about 100 it has the
    data's own mix."""
    min_samples: Annotated[int, Field(ge=1)] = 1
    """Refuse the split if a client's equal share of the samples is smaller than this."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the clients' indices, see `Partition.split`."""
        require(len(labels), clients, self.min_samples, f"{self.min_samples} a client")
        order = rng.permutation(len(labels))
        present, counts = np.unique(labels, return_counts=True)
        mixes = rng.dirichlet(self.alpha * len(present) * counts / len(labels), size=clients)
        sizes = np.array([len(share) for share in np.array_split(order, clients)])
        dealt = _deal(mixes, sizes, counts, rng)
        piles = [order[labels[order] == label] for label in present]
        hands = [np.split(pile, np.cumsum(n)[:-1]) for pile, n in zip(piles, dealt.T, strict=True)]
        return [rng.permutation(np.concatenate(hand)) for hand in zip(*hands, strict=True)]


def _deal(mixes: np.ndarray, sizes: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return each client's number of samples by class, (clients, K); rows sum to `sizes`, columns to `counts`.

    All clients draw at once, so none is the last one that gets what nobody wanted. Every pass but the last one
    uses up a class: there are at most K.
    """
    dealt = np.zeros(mixes.shape, np.int64)
    while (missing := sizes - dealt.sum(axis=1)).any():
        left = counts - dealt.sum(axis=0)
        weights = mixes * (left > 0)
        weights[weights.sum(axis=1) == 0] = left  # all that this client's mix holds is used up
        asked = rng.multinomial(missing, weights / weights.sum(axis=1, keepdims=True))
        for k in np.flatnonzero(asked.sum(axis=0) > left):
            asked[:, k] = rng.multivariate_hypergeometric(asked[:, k], left[k])
        dealt += asked
    return dealt
