"""Rows that one round adds to a run's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rayfed.core.questions import Tables
from rayfed.errors import UserError, nearest

Row = dict[str, Any]
Rows = list[Row]
OF_RULES = ("weights", "scores", "secure_sums")
"""Tables to which an aggregation rule may add its own rows (`rayfed.aggregation.base`)."""


class VictimRows(NamedTuple):
    """Table rows with the scores of one victim of an attack, without the columns that identify the attack call."""

    rows: Rows
    """Rows of the table `attacks` or `inferences`."""
    images: Sequence[dict[str, Any]] = ()
    """Rows of the table `images`, if samples are images."""
    texts: Sequence[dict[str, Any]] = ()
    """Rows of the table `texts`, if samples are texts or records."""
    snapshots: Sequence[dict[str, Any]] = ()
    failures: Sequence[tuple[str, str]] = ()
    """Metrics and images that could not be computed, with the reasons."""


@dataclass
class RoundTables:
    """Rows that one round adds to each table of a run."""

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
        """Add an aggregation rule's rows to the tables, each with the columns of `key`.

        Raises `UserError` for a table that is not in `OF_RULES`.
        """
        for table, rows in tables.items():
            if table not in OF_RULES:
                known = nearest(table, OF_RULES)
                raise UserError(
                    f"the aggregation returns rows for table '{table}', to which rules cannot add rows: {known}"
                )
            getattr(self, table).extend(key | row for row in rows)
