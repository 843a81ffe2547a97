"""Check that proved bounds are comparable: equal unit, adjacency, adversary and, for epsilons, delta."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed.analysis.settings import Setting
from rayfed.evidence.rows import Row
from rayfed.metrics.measures import MEASURES
from rayfed.privacy.printing import at_most

_Kind = tuple[float | None, str | None, str | None, str | None]
"""Delta, unit, adjacency and adversary of a guarantee."""
_CALLED = {"epsilon": "epsilons", "rero": "bounds on reconstruction"}


def mixed(settings: Sequence[Setting], measure: str) -> str | None:
    """Return a text on a measure's different kinds of guarantee; None if all are of one kind or not proved.

    Epsilons with another delta, unit, adjacency or adversary cannot be compared.
    """
    kinds: dict[_Kind, list[str]] = {}
    for each in settings:
        if MEASURES[measure].proved and measure in each.measures:
            for row in each.rows:
                kinds.setdefault(_kind(row, measure), []).append(each.title)
    if len(kinds) < 2:
        return None
    named = "; ".join(f"{', '.join(dict.fromkeys(titles))}: {_name(kind)}" for kind, titles in kinds.items())
    return f"the {_CALLED[measure]} are of different kinds and cannot be compared ({named})"


def _kind(row: Row, measure: str) -> _Kind:
    delta = row.get("delta") if measure == "epsilon" else None
    return delta, row.get("epsilon_unit"), row.get("epsilon_adjacency"), row.get("epsilon_against")


def _name(kind: _Kind) -> str:
    delta, *conditions = kind
    return ", ".join(filter(None, [None if delta is None else f"delta {at_most(delta)}", *conditions]))
