"""Conversion of tables of older runs to the present names of columns and messages."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from rayfed import hidden
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
    "the update is encrypted: there is a ciphertext and no gradient to look at": hidden.ENCRYPTED,
    "the update is masked: without the other clients' shares it is uniform noise, and no gradient": hidden.MASKED,
    "the defences could not be run on gradients of one's own": hidden.UNREHEARSED,
    "these attacks do not use all that the defences' code tells": hidden.UNUSED,
    "buffers that clients return are as many numbers as the samples have, and were not solved for them": (
        hidden.UNSOLVED
    ),
}
"""Present messages by former messages, of those that the analysis recognises."""


def with_present_names(table: pa.Table, names: Mapping[str, str] = NAMES) -> pa.Table:
    """Return a table of an older run with the present column names and messages."""
    there = set(table.column_names)
    new = [name if names.get(name, name) in there else names[name] for name in table.column_names]
    table = table.rename_columns(new)
    if "message" not in there:
        return table
    messages = table["message"]
    for former, message in MESSAGES.items():
        messages = pc.replace_substring(messages, former, message)
    return table.set_column(new.index("message"), table.schema.field("message"), messages)
