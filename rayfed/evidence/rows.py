"""Values of single rows of the tables `attacks` and `outcomes`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from math import isfinite, isnan
from typing import Any, TypeGuard

Row = Mapping[str, Any]
Sample = tuple[Any, ...]
"""Key of an attacked sample, equal in all arms: round, victim, and index in the victim's batch. The index is None for
inferences, which are about a victim."""


class Knowledge(StrEnum):
    """Grants on which verdicts depend; users may define others."""

    DEFENCE = "defence"
    CODE = "code"
    LABELS = "labels"


def is_measured(value: float | None) -> TypeGuard[float]:
    """Return whether a value is a number: not None and not NaN."""
    return value is not None and not isnan(value)


def get_sample_key(row: Row) -> Sample:
    """Return the key of the row's sample, or of its victim in a row of `inferences`."""
    return row.get("round"), row["victim"], row.get("sample")


def knowledge_in(row: Row) -> tuple[str, ...]:
    """Return the grants of the row's attacker; empty for none."""
    return tuple(row.get("knowledge") or ())


def labels_given(row: Row) -> bool:
    """Return whether the attacker in a row of `attacks` was given the labels, so that the attack recovers none."""
    return Knowledge.LABELS in knowledge_in(row)


def code_given(row: Row) -> bool:
    """Return whether the attacker in a row of `attacks` knows the code of the defences."""
    return Knowledge.CODE in knowledge_in(row)


def get_attack_label(row: Row) -> str:
    """Return the family of the row's attack, or its title without one: the name of the attack in results."""
    label: str = row.get("family") or row["attack"]
    return label


def group_rows(rows: Iterable[Row], *columns: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows grouped by their values of some columns, in the order of the table."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


def total_seconds(rows: Iterable[Row]) -> float | None:
    """Return the total time of the attacks in rows of one arm; None if no time was recorded."""
    seconds: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if is_measured(row.get("seconds")):  # of the whole batch, repeated in the row of each sample
            seconds[row["attack"], row["round"], row["victim"], row["repeat"]] = row["seconds"]
    return sum(seconds.values()) if seconds else None


def distortions(attacks: Sequence[Row]) -> dict[str, float]:
    """Return each arm's mean relative distance between defended and true gradient, smallest distance first."""
    arms: dict[str, list[float]] = {}
    for row in attacks:
        if row["distortion"] is not None and isfinite(row["distortion"]):
            arms.setdefault(row["arm"], []).append(row["distortion"])
    means = {arm: sum(values) / len(values) for arm, values in arms.items()}
    return dict(sorted(means.items(), key=lambda item: item[1]))
