"""Text of the progress of an audit."""

from __future__ import annotations

from collections.abc import Mapping

from rayfed.report.text.formats import format_duration


def pass_text(evaluations: int, seconds: Mapping[bool, float], following: int | None, best: Mapping[str, str]) -> str:
    """Return a line on a finished pass, the next one (`following` evaluations), and the best result of each arm.

    `seconds` are those of the searches (True) and the closed forms (False) of the pass.
    """
    closed_forms, searches = seconds[False], seconds[True]
    parts = [f"closed forms {format_duration(closed_forms)}"] if closed_forms else []
    if searches:
        parts.append(f"searches of {evaluations:,} evaluations {format_duration(searches)}")
    if searches and following:
        parts.append(f"the next pass takes about {format_duration(searches * following / evaluations)}")
    return f"Pass finished: {', '.join(parts)}. Best so far: {best_text(best)}"


def best_text(best: Mapping[str, str]) -> str:
    """Return the best result of each arm with a result (arm -> value as text)."""
    return ", ".join(f"{arm} {value}" for arm, value in best.items()) or "no result"


def applies_text(attack: str, message: str | None) -> str:
    """Return whether an attack applies; `message` is the reason why it does not, or None."""
    return f"  {attack}: applies" if message is None else f"  {attack}: does not apply ({message})"
