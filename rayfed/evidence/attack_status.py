"""Detection of attacks that diverged or failed, whose poor results are no evidence for a defence.

Their reconstructions may still show a leak. A poor reconstruction, however, shows only that the attack failed, so such
results are marked in tables and excluded from paired comparisons.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rayfed.evidence.rows import Row


def has_failed(row: Row, closed: Collection[str]) -> bool:
    """Return whether the attack in a row diverged or failed; `closed` are the titles of closed-form attacks."""
    return row["status"] == "failed" or (row["status"] == "diverged" and row["attack"] not in closed)


def count_failed(rows: Iterable[Row], closed: Collection[str]) -> tuple[int, int]:
    """Return the number of updates on which attacks diverged or failed, and the number of attacked updates."""
    updates = {tuple(row.get(name) for name in ("arm", "attack", "round", "victim", "repeat")): row for row in rows}
    return sum(has_failed(row, closed) for row in updates.values()), len(updates)
