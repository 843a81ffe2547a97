"""Text of the column `reason` of outcomes: why the result of an attack is inconclusive or not measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rayfed.core.reasons import Reason
from rayfed.evidence.outcomes import FINDINGS
from rayfed.evidence.rows import Row
from rayfed.report.text.reasons import REASONS, doubt_text, no_results_text, not_run_text
from rayfed.store.finding import Finding, State
from rayfed.store.schemas import WANT_OF_TIME


def with_reason_texts(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rows of outcomes with the column `reason`."""
    return [{**row, "reason": outcome_reason_text(row) or None} for row in rows]


def outcome_reason_text(row: Row) -> str:
    """Return the reason of a row of outcomes; empty if the row has none.

    Rows of a table have the text. Other rows have the findings that explain the result, or the reason.
    """
    if row.get("reason"):
        return str(row["reason"])
    if row.get(FINDINGS):
        return _findings_text(row[FINDINGS])
    return REASONS[Reason(row["doubt"])] if row.get("doubt") else ""


def outcome_reasons(rows: Iterable[Row], state: str) -> list[str]:
    """Return the distinct reasons of rows with this result or verdict.

    A row that is not reconstructed may have a reason: it explains an inconclusive verdict, not the result.
    """
    found: dict[str, None] = {}
    for row in rows:
        explained = {row.get("result"), row.get("verdict")} - {State.NOT_RECONSTRUCTED}
        if state in explained and (text := outcome_reason_text(row)):
            found[text] = None
    return list(found)


def _findings_text(findings: Sequence[Finding]) -> str:
    reasons = []
    for one in findings:
        if one.doubt:
            reasons.append(doubt_text(one.doubt))
        reasons += no_results_text(one)
    for one in findings:
        reasons += [f"{WANT_OF_TIME}: {not_run_text(attack)}" for attack in one.not_run]
    return "; ".join(dict.fromkeys(reasons))
