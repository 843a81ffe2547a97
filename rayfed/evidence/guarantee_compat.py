"""Check that proved bounds are comparable: equal unit, adjacency, adversary and, for epsilons, delta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rayfed.evidence.rows import Row
from rayfed.evidence.settings import Setting
from rayfed.metrics.measures import MEASURES
from rayfed.privacy.printing import format_upper


class GuaranteeKind(NamedTuple):
    """Conditions of a guarantee. Bounds can be compared only if these are equal."""

    delta: float | None
    """Delta of an epsilon; None for other bounds."""
    unit: str | None
    adjacency: str | None
    against: str | None
    """Attackers against which the guarantee holds."""

    def __str__(self) -> str:
        delta = None if self.delta is None else f"delta {format_upper(self.delta)}"
        return ", ".join(filter(None, [delta, self.unit, self.adjacency, self.against]))


def mixed_guarantees(settings: Sequence[Setting], measure: str) -> dict[GuaranteeKind, list[Setting]]:
    """Return the kinds of guarantee of a proved measure, with one setting for each arm and set of swept values.

    Empty if all guarantees are of one kind, or if the measure is not proved.
    """
    if not MEASURES[measure].proved:
        return {}
    kinds: dict[GuaranteeKind, dict[tuple[str, str, str], Setting]] = {}
    for one in settings:
        if measure in one.measures:
            for row in one.rows:
                kinds.setdefault(_kind(row, measure), {}).setdefault(one.identity, one)
    if len(kinds) < 2:
        return {}
    return {kind: list(found.values()) for kind, found in kinds.items()}


def list_kinds(kinds: Mapping[GuaranteeKind, Sequence[Setting]]) -> str:
    """Return the kinds with the titles of their settings: `a: delta 1e-05, sample; b: delta 1e-06, sample`."""
    parts = []
    for kind, settings in kinds.items():
        titles = ", ".join(one.title for one in settings)
        parts.append(f"{titles}: {kind}")
    return "; ".join(parts)


def _kind(row: Row, measure: str) -> GuaranteeKind:
    delta = row.get("delta") if measure == "epsilon" else None
    return GuaranteeKind(delta, row.get("epsilon_unit"), row.get("epsilon_adjacency"), row.get("epsilon_against"))
