"""Table of verdicts in the report and the statement: one row for each arm, in the same words as on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayfed.evidence.rows import Row, distortions
from rayfed.evidence.training import ArmSummary
from rayfed.evidence.verdicts import RunEvidence
from rayfed.report.text.findings import PARTS
from rayfed.report.text.formats import NONE
from rayfed.report.text.guarantees import epsilons
from rayfed.report.text.leakage import LIMITS, STATES, caveats, leading_value_text, leakage_title, legend, reasons
from rayfed.report.text.training import QUALITIES, find_quality, quality_text
from rayfed.report.text.verdicts import guess, inferences_text
from rayfed.store.finding import Finding, State


@dataclass(frozen=True)
class VerdictRow:
    """Cells of one arm in the table of verdicts, without the arm's name."""

    arm: str
    state: State
    cells: Sequence[str]


@dataclass(frozen=True)
class VerdictTable:
    """Table of verdicts on the arms of a run, with explanations below the table."""

    title: str
    headings: Sequence[str]
    """Headings of the cells, without that of the arm."""
    rows: Sequence[VerdictRow]
    reasons: Sequence[str]
    """Why arms are inconclusive or not measured, and limits of other verdicts."""
    judged: bool
    """Whether the first column has the verdicts."""
    legend: Sequence[str]
    """Meaning of the words and units, the baseline, and limits of all verdicts."""


def verdict_table(
    evidence: RunEvidence, arms: Sequence[ArmSummary], privacy: Sequence[Row], weights: str
) -> VerdictTable:
    """Return the table of verdicts of a run; `weights` describes the attacked weights."""
    criterion, attacks, rows = evidence.criterion, evidence.attacks, evidence.rows
    judged = bool(attacks) or not all(verdict.only_inferences for verdict in evidence.verdicts)
    columns = _columns(evidence, arms, privacy, judged)
    lines = []
    for verdict in evidence.verdicts:
        cells = [cells.get(verdict.arm) or NONE for cells in columns.values()]
        lines.append(VerdictRow(verdict.arm, verdict.state, cells))
    sizes = len({row["batch_size"] for row in attacks}) > 1
    texts = [*reasons(rows, criterion, sizes), *caveats(rows, criterion, sizes)]
    explanations = legend(rows, attacks, criterion) if attacks else []
    if any(verdict.inferences for verdict in evidence.verdicts):
        explanations.append("Inference: maximum over the attacks. Intervals, chance and control are listed below.")
    if attacks:
        explanations.append(guess(evidence.scenario, attacks))
    return VerdictTable(
        title=leakage_title(attacks, weights) if attacks else "",
        headings=list(columns),
        rows=lines,
        reasons=texts if judged else [],
        judged=judged,
        legend=[*explanations, LIMITS],
    )


def _columns(
    evidence: RunEvidence, arms: Sequence[ArmSummary], privacy: Sequence[Row], judged: bool
) -> dict[str, Mapping[str, str]]:
    """Return the cells of each column by arm, for columns with a value."""
    columns: dict[str, Mapping[str, str]] = _attack_columns(evidence) if judged else {}
    columns["Inference"] = {each.arm: inferences_text(each) for each in evidence.verdicts if each.inferences}
    quality = find_quality(arms)
    if quality:
        columns[QUALITIES[quality]] = {arm.name: quality_text(arm, quality) for arm in arms}
    else:
        changes = distortions(evidence.attacks)
        columns["Distortion"] = {arm: f"{distortion:.3f}" for arm, distortion in changes.items()}
    columns["Epsilon"] = epsilons(privacy)
    return {heading: cells for heading, cells in columns.items() if set(cells.values()) - {"", NONE}}


def _attack_columns(evidence: RunEvidence) -> dict[str, Mapping[str, str]]:
    """Return the columns on reconstructions and labels; figures are those of the batch size with the worst state."""
    criterion, sizes = evidence.criterion, sorted({row["batch_size"] for row in evidence.attacks})
    unit = "Max PSNR (dB)" if criterion.modality == "pixels" else f"Max share of {PARTS[criterion.modality]}"
    at = f", batch size {sizes[0]}" if len(sizes) == 1 else ""
    by_arm: dict[str, list[Finding]] = {}
    for row in evidence.rows:
        by_arm.setdefault(row.arm, []).append(row)
    worst = {arm: _worst(rows) for arm, rows in by_arm.items()}
    labels = {arm: [row.labels.share for row in rows if row.labels] for arm, rows in by_arm.items()}
    return {
        "Verdict": {arm: STATES[row.state] for arm, row in worst.items()},
        f"{criterion.noun.capitalize()}s reconstructed{at}": {
            arm: _leaked(rows, len(sizes) > 1) for arm, rows in by_arm.items()
        },
        unit: {arm: leading_value_text(row.best, criterion) for arm, row in worst.items()},
        "Baseline": {arm: leading_value_text(row.baseline, criterion) for arm, row in worst.items()},
        "Labels recovered": {arm: f"{100 * max(shares):.0f} %" for arm, shares in labels.items() if shares},
    }


def _worst(rows: Sequence[Finding]) -> Finding:
    """Return the row with the worst state, and among these the one with the maximum of the leading metric."""
    return min(rows, key=lambda row: (list(State).index(row.state), -(row.best or 0.0)))


def _leaked(rows: Sequence[Finding], several: bool) -> str:
    """Return the number of samples that leaked, for each batch size; no number if no attack was run."""
    counts = []
    for row in rows:
        if row.samples:
            batch = f" at batch size {row.batch}" if several else ""
            not_run = bool(row.not_run) and row.best is None
            counts.append(f"not run{batch}" if not_run else f"{row.leaked} of {row.samples}{batch}")
    return ", ".join(counts)
