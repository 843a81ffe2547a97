"""Label skew: each client's class proportions are sampled from a Dirichlet distribution.

Source: Hsu, Qi and Brown, arXiv:1909.06335, section 3; also Refiner, appendix D, with concentration 1.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from rayfed.data.partitions.base import require_samples
from rayfed.registry import component


@component
class Dirichlet:
    """Equally many samples per client, with class proportions q ~ Dir(alpha * K * p).

    K is the number of classes, and p are the class proportions of the data. For K balanced classes this is Dir(alpha,
    ..., alpha), the symmetric distribution of Refiner; the alpha of Hsu et al. is K times this one. Each sample is used
    once, so a class can run out. Its last samples are then divided at random among the clients that need it, and these
    clients take their other samples from the remaining classes, in the proportions of q.
    """

    by_label: ClassVar[bool] = True

    alpha: Annotated[float, Field(gt=0)]
    """Concentration per class: near 0, a client has mostly one class; above about 100, all clients have the class
    proportions of the data."""
    min_samples: Annotated[int, Field(ge=1)] = 1
    """Minimum number of samples per client; raises an error if there are fewer."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the indices of each client's samples (see `Partition.split`)."""
        require_samples(len(labels), clients, self.min_samples, f"{self.min_samples} per client")
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

    All clients sample simultaneously, so no client is restricted to leftover classes. Every pass except the last uses
    up a class, so there are at most K passes.
    """
    dealt = np.zeros(mixes.shape, np.int64)
    while (missing := sizes - dealt.sum(axis=1)).any():
        left = counts - dealt.sum(axis=0)
        weights = mixes * (left > 0)
        weights[weights.sum(axis=1) == 0] = left  # all classes of this client are used up
        asked = rng.multinomial(missing, weights / weights.sum(axis=1, keepdims=True))
        for k in np.flatnonzero(asked.sum(axis=0) > left):
            asked[:, k] = rng.multivariate_hypergeometric(asked[:, k], left[k])
        dealt += asked
    return dealt
