"""Which epsilons can be compared: those of one delta, one unit of privacy and one relation of neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed.privacy.printing import at_most
from rayfed.results.settings import Setting
from rayfed.results.summary import Row


def mixed(settings: Sequence[Setting]) -> str | None:
    """Which kinds of guarantee the epsilons of some settings are of, in words; None where it is one, or there is none.

    A smaller epsilon with another delta, for samples instead of clients, or for neighbours that differ in another way,
    is no better promise.
    """
    kinds: dict[str, list[str]] = {}
    for each in settings:
        if "epsilon" in each.measures:
            for row in each.rows:
                kinds.setdefault(_kind(row), []).append(each.title)
    if len(kinds) < 2:
        return None
    named = "; ".join(f"{', '.join(dict.fromkeys(titles))}: {kind}" for kind, titles in kinds.items())
    return f"the epsilons are not of one kind and cannot be compared ({named})"


def _kind(row: Row) -> str:
    delta, unit, adjacency = (row.get(name) for name in ("delta", "epsilon_unit", "epsilon_adjacency"))
    told = [f"delta {at_most(delta)}" if delta is not None else None, f"one {unit}" if unit else None, adjacency]
    return ", ".join(part for part in told if part)
