"""Mark and legend of values that include attacks that diverged or failed."""

from __future__ import annotations

FAILED = "‡"
"""Mark of a value that includes attacks that diverged or failed."""
FAILED_LEGEND = f"{FAILED}: the attack diverged or failed on some updates, so the value is no evidence for the defence"
"""Explanation of the mark; the settings and counts follow it."""


def count_text(failed: int, attacked: int) -> str:
    """Return the number of failed and the number of attacked updates: `3 of 5`."""
    return f"{failed} of {attacked}"
