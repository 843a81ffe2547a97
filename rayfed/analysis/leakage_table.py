"""Rows of the table of leakage, one per arm and batch size, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rayfed.analysis.verdicts import criterion_of, run_findings
from rayfed.evidence.arms import arm_names
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.findings import Finding, State
from rayfed.evidence.rows import Row


@dataclass(frozen=True)
class LeakageRow:
    """Leakage of one arm at one batch size, from the best attack on each sample."""

    arm: str
    batch_size: int | None
    """None for an arm that no attack was run against."""
    state: State
    leaked: int
    """Samples that leaked, of `samples`."""
    samples: int
    mean: float | None
    """Mean of the leading metric over samples, of the best reconstruction of each; None without reconstructions."""
    best: float | None
    """Maximum of the leading metric."""
    baseline: float | None
    """Leading metric of the best guess without the update, for the sample of `best`; None if it is not known."""
    labels: float | None
    """Share of labels recovered; None if no attack recovered labels, or all were given them."""
    majority: float | None
    """Share of labels recovered by the best guess without the update; None without labels."""
    finding: Finding | None
    """Finding from which the values are taken; None for an arm that no attack was run against."""


def leakage_rows(scenario: Mapping[str, Any], attacks: Sequence[Row], finished: bool = True) -> list[LeakageRow]:
    """Return the rows of the table of leakage, sorted by the scenario's arms and then by batch size."""
    criterion, arms = criterion_of(scenario, attacks), arm_names(scenario, attacks)
    found = {arm: [_unattacked(arm)] for arm in arms}
    for finding in run_findings(scenario, attacks, finished):
        found[finding.arm] = [row for row in found[finding.arm] if row.finding]
        found[finding.arm].append(_row(finding, attacks, criterion))
    return [row for rows in found.values() for row in rows]


def _unattacked(arm: str) -> LeakageRow:
    return LeakageRow(arm, None, State.NOT_MEASURED, 0, 0, None, None, None, None, None, None)


def _row(finding: Finding, attacks: Sequence[Row], criterion: Criterion) -> LeakageRow:
    best: dict[tuple[Any, ...], float] = {}
    for row in attacks:
        value = criterion.nearness(row)
        if (row["arm"], row["batch_size"]) == (finding.arm, finding.batch) and value is not None:
            sample = row["round"], row["victim"], row["sample"]
            best[sample] = max(value, best.get(sample, value))
    labels = finding.labels
    return LeakageRow(
        arm=finding.arm,
        batch_size=finding.batch,
        state=finding.state,
        leaked=finding.leaked,
        samples=finding.samples,
        mean=fmean(best.values()) if best else None,
        best=finding.best,
        baseline=_baseline(finding, criterion),
        labels=labels.share if labels else None,
        majority=labels.guesses.best if labels else None,
        finding=finding,
    )


def _baseline(finding: Finding, criterion: Criterion) -> float | None:
    if finding.best is None or finding.gain is None:
        return None
    baseline = finding.best - finding.gain
    return baseline if criterion.modality == "pixels" else max(baseline, 0.0)
