"""Text on leakage: title, legend and values of its tables, and reasons and limits of its verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil, pow

from rayfed.core.reasons import Reason
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.methods import FEWEST
from rayfed.evidence.rows import Row, code_given, get_attack_label, labels_given
from rayfed.report.text.findings import part_text
from rayfed.report.text.formats import NONE, format_count, format_mean_psnr, format_share
from rayfed.report.text.reasons import (
    CODE_OF_USER,
    NO_ATTACK_YET,
    NOTHING_REBUILT,
    REASONS,
    doubt_text,
    hidden_text,
    no_results_text,
    not_run_text,
    overtaken_text,
    pending_text,
)
from rayfed.store.finding import Finding, State

SLIGHT = 3.0
"""Decibels above the baseline (3 dB halve the squared error) below which a leak is reported with the difference."""
STATES = {
    "leaks": "LEAKS",
    "not reconstructed": "not reconstructed",
    "inconclusive": "inconclusive",
    "not measured": "NOT MEASURED",
    "nothing to attack": "nothing to attack",
}
"""Verdict of a state, as the table prints it."""
LIMITS = "The verdicts hold for these attacks, their knowledge and budget. They do not show that an arm is safe."
"""Limits of all verdicts."""
_OBSERVED = {"gradient": "one gradient", "update": "the update of a round", "shown": "the update as clients see it"}


def leakage_title(attacks: Sequence[Row], weights: str) -> str:
    """Return the title of the table of leakage: attacks, attackers, observation and batch size, if equal in all rows.

    `weights` are those that were attacked.
    """
    names = list(dict.fromkeys(get_attack_label(row) for row in attacks))
    parts = [", ".join(names) if len(names) <= 2 else f"best of {len(names)} attacks", _attackers(attacks)]
    views = {row["observes"] for row in attacks} - {None}
    if len(views) == 1:
        view = views.pop()
        text = _OBSERVED.get(view, view)
        parts.append(f"{text} of {weights}" if view == "gradient" else text)
    sizes = {row["batch_size"] for row in attacks}
    if len(sizes) == 1:
        parts.append(f"batch size {sizes.pop()}")
    return f"Leakage: {', '.join(parts)}"


def _attackers(attacks: Sequence[Row]) -> str:
    adaptive = {code_given(row) for row in attacks}
    if len(adaptive) > 1:
        return "non-adaptive and adaptive attackers"
    return "adaptive attacker" if adaptive == {True} else "non-adaptive attacker"


def legend(rows: Sequence[Finding], attacks: Sequence[Row], criterion: Criterion) -> list[str]:
    """Return lines that explain the words in the table of leakage."""
    states = {row.state for row in rows}
    lines = [leak_text(criterion)]
    if State.NOT_RECONSTRUCTED in states:
        lines.append(_not_reconstructed_text(rows, attacks, criterion))
    if states & {State.INCONCLUSIVE, State.NOT_MEASURED}:
        lines.append("Inconclusive, not measured: the run does not show whether the arm leaks.")
    unit = "PSNR in dB, higher is closer" if criterion.modality == "pixels" else "Shares recovered"
    return [*lines, f"{unit}. {_labels_text(rows, attacks)}".strip()]


def leak_text(criterion: Criterion) -> str:
    """Return the definition of a leak."""
    return (
        f"LEAKS: a reconstruction reaches {criterion.written(criterion.threshold)}, beats the baseline (best guess "
        f"without the update) and identifies its {criterion.noun}."
    )


def _not_reconstructed_text(rows: Sequence[Finding], attacks: Sequence[Row], criterion: Criterion) -> str:
    """Return the scope of the verdict, with the share of samples that may leak in spite of it."""
    samples = min(row.samples for row in rows if row.state == State.NOT_RECONSTRUCTED)
    most = max((row["iterations"] for row in attacks if row.get("iterations")), default=0)
    budget = f" within {most:,} iterations" if most else ""
    share = ceil(100 * largest_share(samples))
    return (
        f"Not reconstructed: 0 of {format_count(samples, criterion.noun)}{budget}, so at most {share} % of such "
        f"{criterion.noun}s (95 % confidence). Only epsilon is a guarantee."
    )


def largest_share(samples: int) -> float:
    """Return the largest share of leaking samples, 0..1, at which none of some samples leaks with probability 5 %."""
    return 1 - pow(0.05, 1 / samples)


def _labels_text(rows: Sequence[Finding], attacks: Sequence[Row]) -> str:
    majority = {row.labels.best_guess for row in rows if row.labels and row.labels.best_guess}
    if not majority:
        return "Labels were given to the attackers." if any(map(labels_given, attacks)) else ""
    shares = " to ".join(f"{100 * share:.0f} %" for share in dict.fromkeys((min(majority), max(majority))))
    return f"Labels: share recovered (best guess: {shares})."


def reasons(rows: Sequence[Finding], criterion: Criterion, sizes: bool = False) -> list[str]:
    """Return why arms are inconclusive, not measured or leak only in part; arms with one reason share a line.

    `sizes` adds the batch size to an arm if the reason does not hold for all its batch sizes.
    """
    return _join_arms([(row, reason) for row in rows for reason in verdict_reasons_text(row, criterion)], rows, sizes)


def caveats(rows: Sequence[Finding], criterion: Criterion, sizes: bool = False) -> list[str]:
    """Return limits of the verdicts that the table of leakage does not show; `sizes` as in `reasons`."""
    return _join_arms([(row, caveat) for row in rows for caveat in _caveats_text(row, criterion)], rows, sizes)


def _join_arms(texts: Iterable[tuple[Finding, str]], rows: Sequence[Finding], sizes: bool) -> list[str]:
    """Return one line per text, with the arms that have it."""
    cells = Counter(row.arm for row in rows)
    batches: dict[str, dict[str, list[int]]] = {}
    for row, text in texts:
        batches.setdefault(text, {}).setdefault(row.arm, []).append(row.batch)
    lines = []
    for text, by_arm in batches.items():
        names = []
        for arm, own in by_arm.items():
            some = sizes and len(own) < cells[arm]
            names.append(f"{arm} at batch size {', '.join(map(str, own))}" if some else arm)
        lines.append(f"{', '.join(names)}: {text}")
    return lines


def _caveats_text(finding: Finding, criterion: Criterion) -> list[str]:
    """Return the limits of the verdict on one arm and batch size."""
    found, noun = [], criterion.noun
    if finding.state == State.LEAKS:
        if criterion.modality == "pixels" and finding.most is not None and finding.most < SLIGHT:
            found.append(f"no reconstruction is more than {finding.most:.1f} dB above the baseline")
        if finding.alike:
            found.append(f"{finding.alike} more reach the threshold, but a public {noun} is as close")
        if finding.reason == Reason.TOKENS_IN_ANOTHER_ORDER:
            found.append(REASONS[Reason.TOKENS_IN_ANOTHER_ORDER])
    elif finding.state == State.NOT_RECONSTRUCTED and finding.shown not in (None, finding.samples):
        found.append(
            f"without a defence only {finding.shown} of {finding.samples} {noun}s leak, so nothing is known about the "
            "other samples"
        )
    labels = finding.labels
    if labels and labels.share > labels.best_guess and labels.by_chance:
        found.append("the labels may have been recovered by chance")
    if finding.targets is not None:
        median = "" if finding.guessed is None else f" (median: {finding.guessed:.2g})"
        found.append(f"targets recovered with a mean error of {finding.targets:.2g}{median}, in the model's scale")
    return found


def verdict_reasons_text(finding: Finding, criterion: Criterion) -> list[str]:
    """Return the reasons and limits of the verdict on one arm and batch size; empty if there are none."""
    if finding.batch is None:
        return [NO_ATTACK_YET if finding.unfinished else NOTHING_REBUILT]
    found = []
    if finding.not_run:
        found.append(f"not run for lack of time: {', '.join(map(not_run_text, finding.not_run))}")
    if finding.state == State.NOTHING_TO_ATTACK:
        return hidden_text(finding)
    if finding.state == State.LEAKS:
        if finding.leaked < finding.samples and (parts := part_text(finding, criterion)):
            found.append(parts)
        return found
    return found + _open_questions(finding, criterion, bool(found))


def _open_questions(finding: Finding, criterion: Criterion, explained: bool) -> list[str]:
    """Return why a finding without a leak does not decide, and its limits; `explained` if a reason is known already."""
    found = []
    if finding.pending_attacks:
        found.append(f"no result from {', '.join(map(pending_text, finding.pending_attacks))}")
    found += [f"no result: {reason}" for reason in no_results_text(finding)]
    if finding.doubt and finding.state in (State.INCONCLUSIVE, State.NOT_MEASURED):
        found.append(doubt_text(finding.doubt))
    if finding.state == State.NOT_MEASURED and not found and not explained:
        found.append("no attack returned a result")
    if finding.short_searches:
        found.append(f"{', '.join(finding.short_searches)}: at most {FEWEST} evaluations")
    if finding.code_of_user:
        found.append(CODE_OF_USER)
    return [*found, overtaken_text(finding.overtaken)] if finding.overtaken else found


def leading_value_text(value: float | None, criterion: Criterion) -> str:
    """Format a value of the leading metric; `>100` for a PSNR at its ceiling."""
    if value is None:
        return NONE
    return format_mean_psnr(value).replace("≥", ">") if criterion.modality == "pixels" else format_share(value)
