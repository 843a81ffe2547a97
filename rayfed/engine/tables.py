"""Rows that one round adds to a run's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rayfed.errors import UserError, nearest
from rayfed.questions import Tables

Row = dict[str, Any]
Rows = list[Row]
OF_RULES = ("weights", "scores", "secure_sums")
"""Tables in which an aggregation rule may leave rows of its own (`rayfed.aggregation.base`)."""


class Scored(NamedTuple):
    """Rows of one scored victim by table, without the columns of the call."""

    rows: Rows
    """Rows for the table of attacks, or of inferences."""
    images: Sequence[dict[str, Any]] = ()
    """Rows for the table of images, of samples that are pictures."""
    texts: Sequence[dict[str, Any]] = ()
    """Rows for the table of texts, of samples that are none."""
    snapshots: Sequence[dict[str, Any]] = ()
    failures: Sequence[tuple[str, str]] = ()
    """Names of metrics, pictures and figures that could not be computed, with the reasons."""


@dataclass
class RoundTables:
    """One round's rows, by table."""

    rounds: Rows = field(default_factory=list)
    clients: Rows = field(default_factory=list)
    attacks: Rows = field(default_factory=list)
    traces: Rows = field(default_factory=list)
    images: Rows = field(default_factory=list)
    texts: Rows = field(default_factory=list)
    snapshots: Rows = field(default_factory=list)
    inferences: Rows = field(default_factory=list)
    private: Rows = field(default_factory=list)
    weights: Rows = field(default_factory=list)
    scores: Rows = field(default_factory=list)
    secure_sums: Rows = field(default_factory=list)

    def add(self, key: Row, tables: Tables) -> None:
        """Add a rule's own rows with the columns of `key`; raises `UserError` for a table not in `OF_RULES`."""
        for table, rows in tables.items():
            if table not in OF_RULES:
                known = nearest(table, OF_RULES)
                raise UserError(f"the aggregation leaves rows in a table '{table}', which is not for rules: {known}")
            getattr(self, table).extend(key | row for row in rows)
