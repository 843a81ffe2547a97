"""Statistical evidence that an attack recovered more parts of a sample than chance explains.

It is Hoeffding's bound on a sum of independent hits with known mean probability (Hoeffding 1963, theorem 1).
"""

from __future__ import annotations

from math import inf, log


def evidence(found: float, by_chance: float, independent: float) -> float:
    """Return a lower bound, in nats, on minus the log-probability of recovering as many parts by chance.

    `found` is the recovered share of `independent` parts, and `by_chance` the share expected by chance, both in [0, 1].
    """
    return independent * divergence(found, by_chance)


def divergence(share: float, by_chance: float) -> float:
    """Return the KL divergence, in nats, between Bernoulli distributions with success rates `share` and `by_chance`."""
    pairs = (share, by_chance), (1 - share, 1 - by_chance)
    return sum(p * log(p / q) if q else inf for p, q in pairs if p)
