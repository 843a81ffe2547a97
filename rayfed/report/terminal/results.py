"""Tables that the terminal prints at the end of a run: leakage, attacks, cost, inference, robustness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rayfed.evidence.attack_results import InferenceResult
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.robustness import OpponentResult, RobustnessMatrix
from rayfed.evidence.rows import group_rows, is_measured, labels_given
from rayfed.evidence.training import ArmSummary
from rayfed.report.text.formats import NONE, format_duration, format_share
from rayfed.report.text.leakage import STATES, leading_value_text
from rayfed.report.text.membership import auc_text
from rayfed.report.text.reasons import ATTACKERS
from rayfed.report.text.training import find_quality, quality_text
from rayfed.store.finding import Finding

STYLES = {"leaks": "red", "inconclusive": "yellow", "not measured": "yellow"}
"""Colour of a verdict."""


def make_empty_table(*columns: str, left: int = 1) -> Table:
    """Return an empty terminal table: the first columns are aligned to the left, the remaining columns to the right."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for place, column in enumerate(columns):
        made.add_column(column, justify="left" if place < left else "right", no_wrap=True)
    return made


def leakage_table(rows: Sequence[Finding], criterion: Criterion) -> Table:
    """Return the table of leakage: a verdict and values for each arm and batch size."""
    batches = len({row.batch for row in rows} - {None}) > 1
    unit = "PSNR" if criterion.modality == "pixels" else "share"
    labels = any(row.labels is not None for row in rows)
    columns = ["arm", "verdict", "batch", f"{criterion.noun}s", f"{unit} mean", "max", "baseline", "labels"]
    shown = [True, True, batches, True, True, True, True, labels]
    made = make_empty_table(*compress(columns, shown), left=2)
    for row in rows:
        cells: list[str | Text] = [
            Text(row.arm),
            Text(STATES[row.state], STYLES.get(row.state, "")),
            str(row.batch or NONE),
            f"{row.leaked}/{row.samples}" if row.samples else NONE,
            *(leading_value_text(value, criterion) for value in (row.mean, row.best, row.baseline)),
            NONE if row.labels is None else f"{100 * row.labels.share:.0f} %",
        ]
        made.add_row(*compress(cells, shown))
    return made


def attacks_table(attacks: Sequence[Mapping[str, Any]], criterion: Criterion) -> Table | None:
    """Return the table of attacks, one row per attack and arm; None if there is only one attack."""
    groups = group_rows(attacks, "attack", "arm")
    if len({attack for attack, _ in groups}) < 2:
        return None
    unit = "PSNR" if criterion.modality == "pixels" else "share"
    made = make_empty_table("attack", "arm", "results", f"{unit} mean", "max", "labels", left=2)
    for (attack, arm), rows in groups.items():
        values = [value for row in rows if (value := criterion.nearness(row)) is not None]
        labels = [row["label_accuracy"] for row in rows if is_measured(row.get("label_accuracy"))]
        recovered = f"{100 * fmean(labels):.0f} %" if labels else NONE
        results = sum(row["status"] == "ok" for row in rows)
        made.add_row(
            Text(attack),
            Text(arm),
            f"{results}/{len(rows)}",
            leading_value_text(fmean(values) if values else None, criterion),
            leading_value_text(max(values, default=None), criterion),
            "given" if labels_given(rows[0]) else recovered,
        )
    return made


def cost_table(arms: Sequence[ArmSummary], privacy: Mapping[str, str]) -> Table | None:
    """Return the table of each arm's cost relative to the first arm; None if nothing was trained."""
    known = [arm for arm in arms if arm.rounds]
    if not known:
        return None
    quality = find_quality(known)
    simulated = any(arm.simulated for arm in known)
    columns = [quality] if quality else []
    columns += ["train s/round", "upload kB/round"]
    if simulated:
        columns.append("simulated time")
    if privacy:
        columns.append("epsilon")
    made = make_empty_table("arm", *columns)
    for arm in known:
        cells = [quality_text(arm, quality, width=7)] if quality else []
        cells.append(f"{arm.actor_seconds.mean:.2f}" if arm.actor_seconds else NONE)
        cells.append(f"{arm.bytes_up / arm.rounds / 1000:,.0f}")
        if simulated:
            cells.append(format_duration(arm.simulated.seconds) if arm.simulated else NONE)
        if privacy:
            cells.append(privacy.get(arm.name, NONE))
        made.add_row(Text(arm.name), *cells)
    return made


def attackers_table(found: Sequence[Finding], distortions: Mapping[str, float], criterion: Criterion) -> Table:
    """Return an audit's table of attackers: the maximum of the leading metric per knowledge of the attacker."""
    unit = "PSNR" if criterion.modality == "pixels" else "share"
    made = make_empty_table("arm", "batch", "distortion", *(f"{unit} {name}" for name in ATTACKERS.values()))
    for finding in found:
        distortion = distortions.get(finding.arm)
        closest = dict(finding.closest)
        values = (leading_value_text(closest.get(knowledge), criterion) for knowledge in ATTACKERS)
        made.add_row(
            Text(finding.arm), str(finding.batch), NONE if distortion is None else f"{distortion:.3f}", *values
        )
    return made


def inference_table(claims: Sequence[InferenceResult]) -> Table:
    """Return the table of inference attacks, one row per attack and arm, with chance level and control."""
    made = make_empty_table("arm", "attack", "measure", "value", "chance", "control", left=3)
    for claim in claims:
        value, chance, control = (_mean(spread) for spread in (claim.value, claim.chance, claim.control))
        measure = claim.metric.replace("_", " ")
        if claim.roc:
            measure, value = "AUC", auc_text(claim.roc.auc)
            control = NONE if claim.roc.control is None else f"{claim.roc.control.value:.3f}"
        made.add_row(Text(claim.arm), Text(claim.attack), measure, value, chance, control)
    return made


def _mean(spread: Any) -> str:
    return NONE if spread is None else f"{spread.mean:.2f}"


def robustness_table(found: RobustnessMatrix) -> Table:
    """Return the table of each arm's accuracy and backdoor success rate under each poisoning opponent."""
    made = make_empty_table("arm", *found.opponents)
    for arm in found.arms:
        made.add_row(Text(arm), *(_robustness_cell(found.results.get((arm, name))) for name in found.opponents))
    return made


def _robustness_cell(result: OpponentResult | None) -> str:
    if result is None:
        return NONE
    return format_share(result.accuracy) + ("" if result.backdoor is None else f", {format_share(result.backdoor)}")
