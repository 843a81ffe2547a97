"""Text on guarantees: proved bounds that cannot be compared."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed.evidence.guarantee_compat import list_kinds, mixed_guarantees
from rayfed.evidence.settings import Setting

_BOUNDS = {"epsilon": "epsilons", "rero": "bounds on reconstruction"}


def mixed_guarantees_text(settings: Sequence[Setting], measure: str) -> str:
    """Return the different kinds of guarantee of a measure, with their settings; empty if they can be compared."""
    kinds = mixed_guarantees(settings, measure)
    if not kinds:
        return ""
    return f"the {_BOUNDS[measure]} are of different kinds and cannot be compared ({list_kinds(kinds)})"
