"""Conversion of tables of older runs to the present columns: the only place that interprets their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from rayfed.core.reasons import CHANNELS, Reason
from rayfed.metrics.renamed import NAMES

OUTCOMES = NAMES | {
    "answer": "result",
    "why": "reason",
    "closest": "max_similarity",
    "closest_guess": "baseline_similarity",
    "unanswered": "without_result",
}
"""Present names by former names of the columns of `outcomes.parquet`."""
MESSAGES = {
    "the update is encrypted: ": Reason.ENCRYPTED,
    "the update is masked: ": Reason.MASKED,
    "the defences could not be run on gradients of one's own": Reason.DECLARATION_NOT_TESTED,
    "the attack could not run the defences' code on its own gradients": Reason.DECLARATION_NOT_TESTED,
    "these attacks do not use all that the defences' code tells": Reason.UNDECLARED,
    "these attacks use only a part of the defences' code": Reason.UNDECLARED,
    "buffers that clients return are as many numbers as the samples have, and were not solved for them": (
        Reason.BUFFERS_NOT_SOLVED
    ),
    "the returned buffers could determine the samples": Reason.BUFFERS_NOT_SOLVED,
}
"""Reasons by parts of the messages of older runs, which had no column `reason`."""
REASONS = {"code_not_run": Reason.DECLARATION_NOT_TESTED, "code_partly_used": Reason.UNDECLARED}
"""Present reasons by former ones."""
DOUBTS = {
    "the search did not converge: no reconstruction has the observed gradient": Reason.NOT_CONVERGED,
    "no attack found a sample that has this gradient": Reason.NOT_CONVERGED,
    "the search converged to another sample with the observed gradient": Reason.FEW_SAMPLES_FIT,
    "an attack found another sample that has this gradient": Reason.FEW_SAMPLES_FIT,
    "no reconstruction could be compared with the update": Reason.NOT_COMPARED,
    "could be compared with the update, so nothing shows": Reason.NOT_COMPARED,
    "the adaptive attacks did not converge": Reason.ADAPTIVE_NOT_CONVERGED,
    "no attacker with the code found a sample": Reason.ADAPTIVE_NOT_CONVERGED,
    "no reconstruction of an adaptive attack could be compared with the update": Reason.ADAPTIVE_NOT_COMPARED,
    "an attacker with the code could be compared": Reason.ADAPTIVE_NOT_COMPARED,
    "no adaptive attack (knowledge: [defence, code]) returned a result for every sample": Reason.NO_ADAPTIVE_ATTACK,
    "had this defence's code (knowledge: [defence, code])": Reason.NO_ADAPTIVE_ATTACK,
    "no adaptive attack that was run here succeeds without a defence": Reason.NO_ADAPTIVE_ATTACK_WORKS,
    "no attack that had this defence's code succeeded without a defence": Reason.NO_ADAPTIVE_ATTACK_WORKS,
}
"""Reasons by parts of the column `reason` of older outcomes, which had no column `doubt`."""
_AUDITED = (
    "given labels",
    "blind",
    "informed",
    "informed, with labels",
    "non-adaptive",
    "adaptive",
    "adaptive, with labels",
)
"""Last parts of the titles of attacks in audits and replays, which had no column `family`."""


def with_present_names(table: pa.Table, names: Mapping[str, str] = NAMES) -> pa.Table:
    """Return a table of an older run with the present columns."""
    there = set(table.column_names)
    table = table.rename_columns([n if names.get(n, n) in there else names[n] for n in table.column_names])
    if "knowledge" in there and pa.types.is_string(table.schema.field("knowledge").type):
        table = _replaced(table, "knowledge", pa.list_(pa.string()), map(_split, table["knowledge"].to_pylist()))
    if "message" in there and "reason" not in there:
        statuses = table["status"].to_pylist() if "status" in there else [None] * len(table)
        reasons = map(_reason, table["message"].to_pylist(), statuses)
        table = table.append_column("reason", pa.array(reasons, pa.string()))
    for name in {"reason", "doubt"} & set(table.column_names):
        values = table[name].to_pylist()
        if not REASONS.keys().isdisjoint(values):
            table = _replaced(table, name, pa.string(), [REASONS.get(value, value) for value in values])
    if {"victim", "batch_size", "status"} <= there and "family" not in there:
        families = map(_family, table["attack"].to_pylist(), table["batch_size"].to_pylist())
        table = table.append_column("family", pa.array(families, pa.string()))
    if {"result", "verdict", "reason"} <= {*table.column_names} and "doubt" not in there:
        table = table.append_column("doubt", pa.array(map(_doubt, table["reason"].to_pylist()), pa.string()))
    return table


def _replaced(table: pa.Table, name: str, type: pa.DataType, values: Any) -> pa.Table:
    column = pa.array(list(values), type)
    return table.set_column(table.column_names.index(name), name, column)


def _split(knowledge: str | None) -> Sequence[str] | None:
    return None if knowledge is None else [name for name in knowledge.split(",") if name]


def _reason(message: str | None, status: str | None) -> Reason | None:
    """Return the reason in a message; channels are reasons only of attacks that did not apply, in the first words."""
    message = message or ""
    for text, reason in MESSAGES.items():
        if reason in CHANNELS and status == "not applicable" and message.startswith(text):
            return reason
        if reason not in CHANNELS and text in message:
            return reason
    return None


def _doubt(text: str | None) -> Reason | None:
    """Return the first reason in the column `reason` of older outcomes."""
    found = (reason for part, reason in DOUBTS.items() if part in (text or ""))
    return next(found, None) or _reason(text, None)


def _family(title: str, batch_size: int | None) -> str | None:
    """Return the method of an audit's attack from its title, such as `dlg batch 4, adaptive`; None for other titles."""
    for attacker in _AUDITED:
        end = f" batch {batch_size}, {attacker}"
        if title.endswith(end):
            return title.removesuffix(end)
    return None
