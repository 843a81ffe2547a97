"""Check that proved bounds are comparable: equal unit, adjacency, adversary and, for epsilons, delta."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed.analysis.settings import Setting
from rayfed.evidence.rows import Row
from rayfed.metrics.measures import MEASURES
from rayfed.privacy.printing import at_most

_CALLED = {"epsilon": "epsilons", "rero": "bounds on reconstruction"}


def mixed(settings: Sequence[Setting], measure: str) -> str | None:
    """Return a text on a measure's different kinds of guarantee; None if all are of one kind or not proved.

    Epsilons with another delta, unit, adjacency or adversary cannot be compared.
    """
    kinds: dict[str, list[str]] = {}
    for each in settings:
        if MEASURES[measure].proved and measure in each.measures:
            for row in each.rows:
                kinds.setdefault(_kind(row, measure), []).append(each.title)
    if len(kinds) < 2:
        return None
    named = "; ".join(f"{', '.join(dict.fromkeys(titles))}: {kind}" for kind, titles in kinds.items())
    return f"the {_CALLED[measure]} are of different kinds and cannot be compared ({named})"


def _kind(row: Row, measure: str) -> str:
    delta = row.get("delta") if measure == "epsilon" else None
    told = [None if delta is None else f"delta {at_most(delta)}"]
    told += [row.get(f"epsilon_{name}") for name in ("unit", "adjacency", "against")]
    return ", ".join(part for part in told if part)
