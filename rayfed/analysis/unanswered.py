"""Detection of attacks that diverged or failed, whose poor results are no evidence for a defence.

Their reconstructions may still show a leak. A poor reconstruction, however, shows only that the attack failed, so such
results are marked in tables and excluded from paired comparisons.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rayfed.evidence.rows import Row

BROKEN = "‡"
"""Mark of a value that includes attacks that diverged or failed."""
MEANING = f"{BROKEN}: the attack diverged or failed on some updates, so the value is no evidence for the defence"
"""Explanation of the mark; the settings and counts follow it."""


def unanswered(row: Row, closed: Collection[str]) -> bool:
    """Return whether the attack in a row diverged or failed; `closed` are the titles of closed-form attacks."""
    return row["status"] == "failed" or (row["status"] == "diverged" and row["attack"] not in closed)


def counted(rows: Iterable[Row], closed: Collection[str]) -> tuple[int, int]:
    """Return the number of updates on which attacks diverged or failed, and the number of attacked updates."""
    met = {tuple(row.get(name) for name in ("arm", "attack", "round", "victim", "repeat")): row for row in rows}
    return sum(unanswered(row, closed) for row in met.values()), len(met)


def of_so_many(broken: int, met: int) -> str:
    """Format the number of failed and the number of attacked updates: `3 of 5`."""
    return f"{broken} of {met}"
