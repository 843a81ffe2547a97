"""Table of text of paired differences, and its notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rayfed.errors import UserError, nearest
from rayfed.evidence.paired import SIGNIFICANCE, PairedDifference, min_wilcoxon
from rayfed.report.text.figures import FAILED, UNPROVEN, heading
from rayfed.report.text.formats import NONE, format_count
from rayfed.report.text.tables import Grid

NO_PAIRS = "not compared as pairs: no attack was run on two common victims or seeds of two arms"
_ROUNDING = 1e-9
"""Maximum difference that counts as rounding error, relative to the larger end of its interval."""
_HEADINGS = ["arm", "attack", "measure", "pairs", "difference", "95 % interval", "p (t)", "p (Wilcoxon)"]


def paired_grid(
    differences: Sequence[PairedDifference], measures: Mapping[str, str | None] | None = None
) -> Grid | None:
    """Return the paired differences as a text table with notes; None if no difference has two pairs.

    `measures` maps names to headings, None for the default heading. Default: all measures. Raises `UserError` for an
    unknown measure.
    """
    if not any(one.pairs + one.excluded > 1 for one in differences):
        return None
    if measures is not None:
        known = list(dict.fromkeys(one.measure for one in differences))
        for name in measures:
            if name not in known:
                raise UserError(f"no measure of the pairs is called '{name}': {nearest(name, known)}")
        differences = [one for one in differences if one.measure in measures]
    rows = [_row(one, (measures or {}).get(one.measure)) for one in differences]
    return Grid(_HEADINGS, 3, rows, " ".join(_notes(differences)))


def _row(one: PairedDifference, title: str | None) -> list[str]:
    interval = NONE if one.low is None else f"{one.low:+.3g} to {one.high:+.3g}"
    pairs = f"{one.pairs}{FAILED} of {one.pairs + one.excluded}" if one.excluded else str(one.pairs)
    p_values = [NONE if p is None else f"{p:.2g}" for p in (one.t_holm, one.wilcoxon_holm)]
    return [
        one.arm,
        one.attack or NONE,
        title or heading(one.measure),
        pairs,
        _difference_text(one),
        interval,
        *p_values,
    ]


def _difference_text(one: PairedDifference) -> str:
    mark = UNPROVEN if one.unproven else ""
    if one.difference is None:
        return f"{NONE}{mark}"
    largest = max(abs(one.low or 0.0), abs(one.high or 0.0))
    if abs(one.difference) <= _ROUNDING * largest:
        return f"0{mark}"
    return f"{one.difference:+.4g}{mark}"


def few_pairs_text(pairs: int, arms: int) -> str | None:
    """Return a sentence if Wilcoxon's p value, corrected over the arms, cannot be below 5 %, otherwise None."""
    minimum = min_wilcoxon(pairs, arms)
    if minimum < SIGNIFICANCE:
        return None
    return (
        f"Wilcoxon's p value cannot be below 5 % with {format_count(pairs, 'pair')} and {format_count(arms, 'arm')}: "
        f"its minimum is {minimum:.2g}"
    )


def _notes(differences: Sequence[PairedDifference]) -> list[str]:
    """Return the notes on the differences: measure, unit of pairing, and tests that cannot reach significance."""
    references = " or ".join(dict.fromkeys(f"'{one.reference}'" for one in differences))
    units = dict.fromkeys(one.unit for one in differences)
    same = " or ".join(f"{unit}s" for unit in units)
    notes = [f"Mean over pairs of the arm minus {references}, on the same {same}."]
    if "victim" in units:
        notes.append(
            "Victims of one run share its weights and seed, so the interval covers other clients of this training run "
            "only."
        )
    if any(one.excluded for one in differences):
        notes.append(f"{FAILED}: pairs are excluded if the attack diverged or failed in one of the two arms.")
    if any(one.unproven for one in differences):
        notes.append(
            f"{UNPROVEN}: no evidence of protection, because the verdict on one of the two arms is inconclusive or not "
            "measured in some repeat, or an attacker with more knowledge reconstructed less."
        )
    notes.append(
        "Both p values are two-sided and corrected over the arms of an attack and measure (Holm); the intervals are "
        "not corrected."
    )
    notes += _notes_on_few_pairs(differences)
    unpaired = dict.fromkeys(f"'{one.arm}'" for one in differences if not one.pairs and not one.excluded)
    if unpaired:
        notes.append(f"Not compared as pairs, because they have no pair with the reference: {', '.join(unpaired)}.")
    return notes


def _notes_on_few_pairs(differences: Sequence[PairedDifference]) -> list[str]:
    pairs_by_family: dict[tuple[str | None, str], list[int]] = {}
    for one in differences:
        if one.wilcoxon is not None:
            pairs_by_family.setdefault((one.attack, one.measure), []).append(one.pairs)
    sizes = sorted({(max(pairs), len(pairs)) for pairs in pairs_by_family.values()})
    texts = [few_pairs_text(pairs, arms) for pairs, arms in sizes]
    return [f"{text}." for text in texts if text]
