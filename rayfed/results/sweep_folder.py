"""Folder of a sweep: the scenario, `outcomes.parquet`, and a run folder for every trial under `trials/`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayfed.errors import RunError
from rayfed.evidence.outcomes import outcomes_table
from rayfed.report.text.outcomes import with_reason_texts
from rayfed.store.folder import SCENARIO, RunFolder, check_table, complete_table
from rayfed.store.renamed import OUTCOMES, with_present_names

OUTCOMES_FILE = "outcomes.parquet"
TRIALS = "trials"
_RUN = re.compile(rf"{TRIALS}/\d{{4,}}-\d+", re.ASCII)
_TRIAL = re.compile(r"\d+(-\d+)?", re.ASCII)
_ALWAYS = ("trial", "repeat", "status", "arm")
"""Columns without nulls."""


@dataclass(frozen=True)
class SweepFolder:
    """Folder of one sweep, whose files are read and written by a `RunFolder`."""

    files: RunFolder

    @classmethod
    def open(cls, path: str) -> SweepFolder:
        """Open the sweep at a local path or fsspec URL. Raises `RunError` if there is no sweep."""
        folder = RunFolder.open(path)
        if not is_sweep(folder):
            raise RunError(f"'{path}' is a run, not a sweep: its {SCENARIO} has no `sweep`")
        return cls(folder)

    @property
    def url(self) -> str:
        """Return the address of the folder: a path or a URL."""
        return self.files.url

    @property
    def scenario(self) -> dict[str, Any]:
        """Return the scenario with all defaults, including the section `sweep`."""
        return self.files.read_mapping(SCENARIO)

    @property
    def fields(self) -> list[str]:
        """Return the paths of the swept fields, which are columns of the outcomes, in the scenario's order."""
        return list(self.scenario["sweep"]["fields"])

    def trial(self, run: str) -> RunFolder:
        """Return the run folder of a trial, named as in the column `run` of the outcomes.

        Raises `RunError` for an invalid name, which might be a path outside the folder.
        """
        if not _RUN.fullmatch(run):
            raise RunError(
                f"'{run}' in {self.url}/{OUTCOMES_FILE} is not a trial of a sweep: the file is damaged or not from "
                "rayfed; restore it from a copy"
            )
        return replace(self.files, root=f"{self.files.root}/{run}")

    def trial_names(self) -> list[str]:
        """Return the names of the trials that have a run folder, finished or not."""
        return self.files.folders(TRIALS)

    def outcomes(self) -> pa.Table:
        """Return one row for every ended trial, arm and attack, in the order of the trials.

        The table is empty until the first trial has ended.
        """
        if not self.files.exists(OUTCOMES_FILE):
            return outcomes_table([], self.fields, trials=True)
        try:
            table = pq.read_table(BytesIO(self.files.read_bytes(OUTCOMES_FILE)))
            return _doubted(self._as_written(with_present_names(table, OUTCOMES)))
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise RunError(
                f"cannot read '{self.url}/{OUTCOMES_FILE}': {error}; restore the file from a copy"
            ) from error

    def _as_written(self, found: pa.Table) -> pa.Table:
        """Return the columns of `write_outcomes`, with the types of swept fields from the file."""
        columns, swept = [], self.fields  # reads the scenario's file once
        expected = outcomes_table([], swept, trials=True).schema
        found = complete_table(found, pa.schema([field for field in expected if field.name not in swept]))
        for field in expected:
            own = found.schema.field(field.name).type if field.name in swept else field.type
            if field.name in swept and not (pa.types.is_primitive(own) or pa.types.is_string(own)):
                raise ValueError(f"column '{field.name}' is {own}")
            columns.append(pa.field(field.name, own, nullable=field.name not in _ALWAYS))
        known = check_table(found.select([field.name for field in columns]).cast(pa.schema(columns)))
        for trial in known["trial"].unique().to_pylist():
            if not _TRIAL.fullmatch(trial):
                raise ValueError(f"'{trial}' is not a trial of a sweep")
        return known

    def write_outcomes(self, rows: Sequence[dict[str, Any]]) -> None:
        """Replace the table of outcomes by the given rows."""
        buffer = BytesIO()
        table = outcomes_table(with_reason_texts(rows), self.fields, trials=True)
        pq.write_table(table, buffer, compression="zstd")
        self.files.write_bytes(OUTCOMES_FILE, buffer.getvalue())


def _doubted(known: pa.Table) -> pa.Table:
    """Return outcomes with "not reconstructed" replaced by "inconclusive" for defended arms without adaptive attacks.

    Outcomes of earlier versions may have such verdicts.
    """
    rows = known.select(["trial", "arm", "defences", "verdict", "explains"]).to_pylist()
    borne = {(row["trial"], row["arm"]) for row in rows if row["explains"]}

    def today(row: dict[str, Any]) -> str | None:
        held = row["verdict"] == "not reconstructed" and row["defences"]
        return "inconclusive" if held and (row["trial"], row["arm"]) not in borne else row["verdict"]

    place = known.schema.get_field_index("verdict")
    return known.set_column(place, known.schema.field(place), pa.array(map(today, rows), pa.string()))


def is_sweep(folder: RunFolder) -> bool:
    """Return whether a folder contains a sweep instead of a run."""
    return bool(folder.read_mapping(SCENARIO).get("sweep"))
