"""Arrow schemas of a run's tables, derived from the classes of their rows (`rayfed.store.rows`).

Explicit schemas keep the type of a column that has only nulls, so the files of one table can always be concatenated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from rayfed.metrics.known import METRICS
from rayfed.metrics.measures import MEASURES
from rayfed.privacy.tradeoff import PRIORS
from rayfed.store import rows
from rayfed.store.finding import Finding
from rayfed.store.typed import schema_from


def _value(name: str, type: pa.DataType, description: str) -> pa.Field:
    """Return the field of a nullable column; null means not measured or not applicable."""
    return pa.field(name, type, nullable=True, metadata={"description": description})


ANSWERED = "ok", "diverged"
"""Statuses with which attacks return a result."""
INAPPLICABLE = "not applicable"
"""Status of an attack that does not apply to an update; in outcomes, result of one that applies to no update."""
UNPLAYED = "not played"
"""Status of attacks that were not run because the time budget was too small."""
WANT_OF_TIME = "not enough time"
"""Start of the message of an attack that was not run; the time that the attack needs may follow."""
VERSUS = " vs "
"""Separator between an arm and its opponent (poisoning attack) in the column `arm`."""
METRIC_FIELDS = [
    _value(metric.name, pa.float64(), metric.description)
    for metric in sorted(METRICS.values(), key=lambda metric: metric.compares != "labels")
]
"""Columns of the metrics; metrics with one value per batch come first."""
RERO_FIELDS = [
    _value(
        f"rero_{one_in}",
        pa.float64(),
        f"bound on reconstruction robustness (ReRo), 0..1: maximum success of a guess with prior 1/{one_in}; also the "
        "maximum true positive rate of membership inference at that false positive rate",
    )
    for one_in in PRIORS
]
"""Columns of the proved bounds, one for each prior."""


def _schema_with(row_type: type, fields: Sequence[pa.Field], after: str) -> pa.Schema:
    """Return the schema of a table with further columns after the column `after`."""
    own = list(schema_from(row_type))
    place = 1 + [each.name for each in own].index(after)
    return pa.schema([*own[:place], *fields, *own[place:]])


TABLES: dict[str, pa.Schema] = {
    "rounds": schema_from(rows.RoundRow),
    "clients": schema_from(rows.ClientRow),
    "attacks": _schema_with(rows.AttackRow, METRIC_FIELDS, after="target_baseline"),
    "inferences": schema_from(rows.InferenceRow),
    "verdicts": schema_from(Finding),
    "private": schema_from(rows.PrivateLayerRow),
    "weights": schema_from(rows.WeightRow),
    "scores": schema_from(rows.ScoreRow),
    "secure_sums": schema_from(rows.SecureSumRow),
    "traces": schema_from(rows.TraceRow),
    "images": schema_from(rows.ImageRow),
    "texts": schema_from(rows.TextRow),
    "snapshots": schema_from(rows.SnapshotRow),
    "privacy": _schema_with(rows.PrivacyRow, RERO_FIELDS, after="conversion"),
    "proved": schema_from(rows.ProvedRow),
    "partition": schema_from(rows.PartitionRow),
}
"""Schema of each table by its name. Tables without a column `round` have one part, number 0; others one per round."""

TRIAL_FIELDS = [
    _value("trial", pa.string(), "name of the trial; its run is in the sweep's folder `trials`"),
    _value("repeat", pa.int32(), "number of the repeat, from 0; each repeats the same values with the next seed"),
    _value("seed", pa.int64(), "seed of the trial"),
    _value("status", pa.string(), "'finished', 'stopped' (by the scheduler) or 'failed'"),
    _value("error", pa.string(), "why the trial failed; null if the trial did not fail"),
    _value("run", pa.string(), "the trial's run folder, relative to the sweep's"),
]
"""Columns of the outcomes that describe a trial of a sweep."""
OUTCOME_FIELDS = [
    _value("arm", pa.string(), "name of the arm in the scenario"),
    _value("attack", pa.string(), "the attack's name in the scenario; null if no attack was run against the arm"),
    _value("defences", pa.string(), "the arm's defences with their parameters"),
    _value("rounds", pa.int32(), "number of rounds of the arm"),
    _value("state", pa.string(), "state of the run: 'finished', or why it is not finished"),
    _value("images", pa.int32(), "number of samples from which the leakage is computed"),
    _value("batch_size", pa.int32(), "samples in an attacked update"),
    _value("observes", pa.string(), "input of the attack: 'gradient', 'update' or 'shown'"),
    _value("knowledge", pa.list_(pa.string()), "grants of the threat model; empty for none"),
    _value("delta", pa.float64(), "delta of the guarantee"),
    _value("epsilon_unit", pa.string(), "unit of protection of the guarantee: 'sample' or 'client'"),
    _value("epsilon_adjacency", pa.string(), "adjacency of neighbouring data sets, and the protected object"),
    _value("epsilon_against", pa.string(), "attackers against which the guarantee holds"),
    _value(
        "result",
        pa.string(),
        "result of the attack on the arm, before the comparison with an arm without a defence; or 'not applicable'",
    ),
    _value(
        "doubt",
        pa.string(),
        "why the result or verdict is 'inconclusive' or 'not measured': a value of `Reason` in `rayfed.core.reasons`; "
        "null for another reason",
    ),
    _value("reason", pa.string(), "why the result or verdict is 'inconclusive' or 'not measured', as text"),
    _value("max_similarity", pa.float64(), "maximum PSNR (dB) or share of parts of the reconstructions"),
    _value(
        "baseline_similarity",
        pa.float64(),
        "PSNR (dB) or share of parts of the best guess (baseline) at the same sample",
    ),
    _value(
        "explains",
        pa.bool_(),
        "whether an attacker with the defence's code found, for each sample, a reconstruction that explains the update",
    ),
    _value("verdict", pa.string(), "verdict over all attacks on this arm, by the criteria of the audit"),
    _value(
        "inferred_low", pa.float64(), "lower end of the 95 % interval of `inferred`, over a run's candidates or victims"
    ),
    _value("attacked", pa.int64(), "number of updates attacked"),
    _value("without_result", pa.int64(), "number of attacked updates on which the attack diverged or failed"),
    _value(
        "baseline_accuracy",
        pa.float64(),
        "test accuracy of always predicting the majority class, 0..1: 95 % of test sets of this size have less",
    ),
    _value("train_seconds_half", pa.float64(), "half of the 95 % interval of the training time, over the rounds (s)"),
    *(pa.field(name, pa.float64()) for name in MEASURES),
]

OUTCOME_COLUMNS = tuple(field.name for field in [*TRIAL_FIELDS, *OUTCOME_FIELDS])
"""All columns of the outcomes except swept fields."""

_IMAGE = ("arm", "round", "attack", "victim", "repeat", "sample")


def image_key(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that identify an image in a row of `attacks`, `images` or `snapshots`."""
    return {column: row[column] for column in _IMAGE}
