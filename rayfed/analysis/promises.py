"""Comparison of epsilons: only of one delta, unit of privacy, relation of neighbours and adversary."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed.analysis.settings import Setting
from rayfed.analysis.summary import Row
from rayfed.privacy.printing import at_most


def mixed(settings: Sequence[Setting]) -> str | None:
    """Say which kinds of guarantee the settings' epsilons are of; None where it is one, or there is none.

    A smaller epsilon with another delta, for samples instead of clients, for neighbours that differ in another way or
    against who sees less is no better promise.
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
    delta = row.get("delta")
    told = [None if delta is None else f"delta {at_most(delta)}"]
    told += [row.get(f"epsilon_{name}") for name in ("unit", "adjacency", "against")]
    return ", ".join(part for part in told if part)
