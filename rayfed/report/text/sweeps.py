"""Text on a sweep: verdicts on its settings, trials that are not finished, and the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayfed.evidence.criteria import Criterion, infer_modality
from rayfed.evidence.rows import Row, is_measured
from rayfed.evidence.settings import Setting, describes_attacks, group_by_values, worst_verdict
from rayfed.metrics.measures import MEASURES, extreme_of
from rayfed.report.text.formats import format_count, format_measure
from rayfed.report.text.guarantees import limits_text, weakest_guarantees_text
from rayfed.report.text.outcomes import outcome_reasons
from rayfed.report.text.settings import NOTHING_LEAKS
from rayfed.report.text.summary import SummaryEntry, best_reconstruction
from rayfed.store.finding import State

_MAX_SETTINGS = 8
"""Maximum number of settings that a sentence names."""


def sweep_summary(
    settings: Sequence[Setting],
    worst: tuple[str, Row] | None,
    criterion: Criterion,
    classes: Mapping[int, str] | None,
    arms: Sequence[str],
) -> list[SummaryEntry]:
    """Return the summary of a sweep; `worst` is the setting and the row of `attacks` with the best reconstruction."""
    entries = []
    if worst:
        title, row = worst
        entries += best_reconstruction(row, criterion, f"under the setting {title}", classes)
    ranges = [_ranges_text(arm, [one for one in settings if one.arm == arm]) for arm in arms]
    known = [text for text in ranges if text][:_MAX_SETTINGS]
    if known:
        entries.append(SummaryEntry("Accuracy, leakage and time over the settings", known))
    guarantees = weakest_guarantees_text(settings)
    limits = limits_text(bool(guarantees), criterion.modality == "pixels")
    return [*entries, SummaryEntry("Guarantees", [*guarantees, limits])]


def sweep_verdicts(settings: Sequence[Setting]) -> list[tuple[State, str]]:
    """Return pairs (state, sentence): one per kind of verdict on the attacked settings of a sweep.

    The worst verdict over all attacks and repeats counts for a setting. If a verdict is not known, the sentence has
    the reason.
    """
    titles: dict[State, list[str]] = {}
    reasons: dict[State, dict[str, None]] = {}
    for group in group_by_values(settings):
        state = worst_verdict(group)
        if state is None:
            continue
        rows = [row for one in group if one.attack for row in one.rows]
        titles.setdefault(state, []).append(group[0].title + _figures(rows, state) + _in_some(rows, state))
        texts = outcome_reasons(rows, state)
        if state == State.INCONCLUSIVE and not texts:
            texts = [NOTHING_LEAKS]
        reasons.setdefault(state, {}).update(dict.fromkeys(texts))
    total = sum(map(len, titles.values()))
    verdicts = []
    for state in State:
        if state in titles:
            sentence = f"{len(titles[state])} of {total}: {_first(titles[state])}"
            if reasons[state]:
                sentence += f" ({'; '.join(list(reasons[state])[:_MAX_SETTINGS])})"
            verdicts.append((state, sentence))
    return verdicts


def _first(names: Sequence[str]) -> str:
    """Return the first names of a list, and whether there are more."""
    more = ["..."] if len(names) > _MAX_SETTINGS else []
    return "; ".join([*names[:_MAX_SETTINGS], *more])


def _figures(rows: Sequence[Row], state: State) -> str:
    """Return the best reconstruction of a verdict, with its attack and the baseline; empty if it is not known."""
    own = [row for row in rows if row.get("result") == state] if state == State.LEAKS else rows
    known = [row for row in own if is_measured(row.get("max_similarity"))]
    if not known:
        return ""
    row, criterion = (
        max(known, key=lambda row: row["max_similarity"]),
        Criterion.from_modality(infer_modality(rows), None),
    )
    baseline = ""
    if row["baseline_similarity"] is not None:
        baseline = f", baseline {criterion.written(row['baseline_similarity'])}"
    return f" ({criterion.written(row['max_similarity'])} by {row['attack']}{baseline})"


def _in_some(rows: Sequence[Row], state: State) -> str:
    """Return the number of repeats with this verdict, and the verdicts of the others; empty if all agree."""
    repeats: dict[State, set[Any]] = {one: set() for one in State}
    for row in rows:
        if row.get("verdict"):
            repeats[State(row["verdict"])].add(row.get("repeat"))
    total, own = len({row.get("repeat") for row in rows}), repeats[state]
    if len(own) == total:
        return ""
    others = ", ".join(f"{one} in {len(found - own)}" for one, found in repeats.items() if found - own)
    return f" (in {len(own)} of {total} repeats; {others})"


def unfinished_trials_text(status: Mapping[str, Any]) -> str:
    """Return a sentence on the trials of a sweep that did not finish, with their settings; empty if all did."""
    left = status.get("trials", 0) - status.get("trials_done", 0)
    if left <= 0:
        return ""
    names = status.get("unplayed") or []  # earlier versions and Optuna sweeps do not list them
    settings = f": {_first(names)}" if names else ""
    return f"{left} of {status['trials']} trials {'is' if left == 1 else 'are'} not finished{settings}"


def _ranges_text(arm: str, settings: Sequence[Setting]) -> str:
    """Return the range of each measure over the settings of one arm; empty if no measure is known."""
    parts = []
    for name in ("test_accuracy", extreme_of("psnr"), "train_seconds"):
        known = [one for one in settings if name in one.measures]
        if known:
            parts.append(f"{MEASURES[name].title} {_range_text(name, known)}{_meaning_text(name, known)}")
    count = len({repr(one.fields) for one in settings})
    return f"{arm}, {format_count(count, 'setting')}: {', '.join(parts)}." if parts else ""


def _meaning_text(name: str, settings: Sequence[Setting]) -> str:
    """Return in brackets whether a range is over means of seeds, and over attacks."""
    parts = []
    if any(one.measures[name].n > 1 for one in settings):
        parts.append("means over seeds")
    if describes_attacks(name) and len({one.attack for one in settings}) > 1:
        parts.append("of each attack")
    return f" ({' '.join(parts)})" if parts else ""


def _range_text(name: str, settings: Sequence[Setting]) -> str:
    values = [one.measures[name].mean for one in settings]
    low, high = format_measure(name, min(values)), format_measure(name, max(values))
    return low if low == high else f"{low} to {high}"
