"""Text on measurements that are compared with proved bounds."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed.evidence.proved_bounds import BoundComparison
from rayfed.evidence.rows import Row
from rayfed.privacy.printing import format_share_bound
from rayfed.privacy.tradeoff import PRIORS

BOUNDS = (*(f"Prior 1/{prior:,}" for prior in PRIORS), "TPR at 0.1 % FPR", "Membership advantage (TPR − FPR)")
"""Headings of the proved bounds on guesses and on membership inference."""


def bound_rows(privacy: Sequence[Row]) -> list[list[str]]:
    """Return arm, defence, protected unit and `BOUNDS` of each row of `privacy` with bounds."""
    rows = []
    for row in privacy:
        if row.get("advantage") is None:
            continue
        guesses = [row[f"rero_{prior}"] for prior in PRIORS]
        tpr = row["rero_1000"]  # the same point of the trade-off curve
        replaced = ", or another one in its place" if "replace-one" in row["adjacency"] else ""
        bounds = [format_share_bound(bound) for bound in (*guesses, tpr, row["advantage"])]
        rows.append([row["arm"], row["defence"], f"one {row['unit']}{replaced}", *bounds])
    return rows


def measure_text(one: BoundComparison) -> str:
    """Return the quantity that is compared with a bound."""
    if one.rate is None:
        return "samples identified"
    return f"members identified at {100 * one.rate:g} % false positive rate"


def comparison_text(one: BoundComparison) -> str:
    """Return a measurement with its interval, its bound and its control."""
    return (
        f"{one.attack} on {one.arm}: {measure_text(one)}: {one.hits:,} of {one.count:,}, {100 * one.share.value:.2f} % "
        f"(interval from {100 * one.share.low:.2f} %); proved bound {format_share_bound(one.bound)}; control "
        f"{100 * one.chance.value:.2f} % (interval to {100 * one.chance.high:.2f} %)"
    )


def exceeded_text(url: str, comparisons: Sequence[BoundComparison]) -> str:
    """Return the error for the measurements of the run at `url` that exceed a proved bound."""
    return (
        f"measurements in {url} exceed a proved bound: {'; '.join(map(comparison_text, comparisons))}. The noise, the "
        "account or the attacker's knowledge is wrong: do not trust the guarantees of this run"
    )


def uncovered_text(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a sentence on the pairs (arm, attack) without a proved bound; empty without pairs."""
    if not pairs:
        return ""
    attacks = ", ".join(f"{attack} on {arm}" for arm, attack in pairs)
    return (
        f"No proved bound for {attacks}: the epsilon of the arm does not cover everything that the attack observes, or "
        "is too large for a bound."
    )
