"""How unlikely it is that as many parts of a sample are found by chance.

It is the bound on a sum of independent hits whose mean probability is known (Hoeffding 1963, theorem 1).
"""

from __future__ import annotations

from math import inf, log


def evidence(found: float, by_chance: float, independent: float) -> float:
    """Return the least that is minus the logarithm of the probability of as many hits by chance.

    `found` is the share of `independent` parts that are found, and `by_chance` the share by chance, both in [0, 1].
    """
    return independent * divergence(found, by_chance)


def divergence(share: float, by_chance: float) -> float:
    """Return the divergence (nats) of hits of this probability from those of another, both in [0, 1]."""
    pairs = (share, by_chance), (1 - share, 1 - by_chance)
    return sum(p * log(p / q) if q else inf for p, q in pairs if p)
