"""Names of arms in tables, and the arms that fields of a scenario belong to."""

from __future__ import annotations

from collections.abc import Iterable

from rayfed.store.schemas import VERSUS

Pair = tuple[str, str]
"""Arm of a scenario and its opponent (poisoning attack), which is empty without opponents."""


def name_arm(defences: Iterable[str]) -> str:
    """Return the name of the only arm of a scenario without `arms`."""
    return "+".join(defences) or "none"


def name_pairs(arms: Iterable[str], opponents: Iterable[str]) -> list[tuple[str, Pair]]:
    """Return the name in tables of every arm with every opponent, each with its pair."""
    opponents = list(opponents)
    if not opponents:
        return [(arm, (arm, "")) for arm in arms]
    return [(f"{arm}{VERSUS}{opponent}", (arm, opponent)) for arm in arms for opponent in opponents]


def find_owner(path: str, arms: Iterable[str]) -> tuple[str | None, str]:
    """Return the arm that a field belongs to (None: all arms), and the field's path within the arm."""
    for arm in sorted(arms, key=len, reverse=True):  # `a.b` before `a`
        if path.startswith(f"arms.{arm}."):
            return arm, path.removeprefix(f"arms.{arm}.")
    return None, path
