"""Verdicts on reproductions: agreement with a paper's values and with the order of the values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import hypot
from typing import Literal

from rayfed.evidence.settings import Estimate, estimate
from rayfed.reproductions.measuring import Finding
from rayfed.reproductions.reading import Group

Verdict = Literal["agrees", "same order but different size", "undecided", "contradicts", "not comparable here"]
VERDICTS: tuple[Verdict, ...] = (
    "agrees",
    "same order but different size",
    "undecided",
    "contradicts",
    "not comparable here",
)
MEANING: dict[Verdict, str] = {
    "agrees": "every figure of the paper is within the tolerance of our mean, or within our 95 % interval if its half "
    "width is at most two tolerances; if the paper gives only an order, our order is the same",
    "same order but different size": "some figures differ, but all pairs that differ by more than the tolerance in the "
    "paper have the same order here",
    "undecided": "the order of some of these pairs is not significant over our seeds, and no pair is significantly "
    "reversed",
    "contradicts": "some pair is significantly reversed (zero is outside the 95 % interval of the difference), or a "
    "figure differs and the paper has no order",
    "not comparable here": "not measured, for the stated reason",
}


@dataclass(frozen=True)
class Judgement:
    """Verdict on one group of a paper's values, with findings and reasons."""

    group: Group
    findings: list[Finding]
    verdict: Verdict
    because: str
    """Pairs or figures that decided the verdict, as text; empty if all agree."""


def judge(group: Group, findings: list[Finding]) -> Judgement:
    """Return the verdict on a group of values from its findings, by the rules in `MEANING`."""
    known = [finding for finding in findings if finding.ours is not None]
    missing = [f"{finding.label}: {finding.why}" for finding in findings if finding.ours is None]
    if not known:
        return Judgement(group, findings, "not comparable here", "; ".join(missing))
    if not group.ranked and all(agrees(finding, group.tolerance) for finding in known) and not missing:
        return Judgement(group, findings, "agrees", "")
    apart = 0.0 if group.ranked else group.tolerance
    pairs = [
        (a, b) if a.paper < b.paper else (b, a) for a, b in combinations(known, 2) if abs(a.paper - b.paper) > apart
    ]
    reversed_ = [f"{a.label} is above {b.label}" for a, b in pairs if _order(a, b) < 0]
    unsure = [f"{a.label} and {b.label} do not differ significantly" for a, b in pairs if _order(a, b) == 0]
    if reversed_:
        return Judgement(group, findings, "contradicts", "; ".join(reversed_ + missing))
    if unsure or missing:
        return Judgement(group, findings, "undecided", "; ".join(unsure + missing))
    if not pairs and group.ranked:
        return Judgement(group, findings, "not comparable here", "only one figure was measured")
    if not pairs:
        return Judgement(group, findings, *_without_order(known, group.tolerance))
    return Judgement(group, findings, "agrees" if group.ranked else "same order but different size", "")


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the least favourable verdict of the groups; "not comparable here" without groups."""
    compared = [verdict for verdict in verdicts if verdict != "not comparable here"]
    return max(compared, key=VERDICTS.index, default="not comparable here")


def agrees(finding: Finding, tolerance: float) -> bool:
    """Return whether our value agrees with the paper's value by the rules in `MEANING`."""
    assert finding.ours is not None
    off, half = abs(finding.ours.mean - finding.paper), _half(finding.ours)
    return off <= tolerance or (off <= half and half <= 2 * tolerance)


def _order(low: Finding, high: Finding) -> int:
    """Return the order of two findings: 1 if the first is below the second, -1 if above, 0 if undecided.

    It is undecided if zero is in the 95 % interval of the difference, or if there is one seed only. If both findings
    have at least two seeds in common, differences are paired by seed.
    """
    assert low.ours is not None
    assert high.ours is not None
    gaps = [high.by_seed[seed] - low.by_seed[seed] for seed in sorted(low.by_seed.keys() & high.by_seed.keys())]
    paired = estimate(gaps) if len(gaps) > 1 else None
    if not paired and min(low.ours.n, high.ours.n) < 2:
        return 0
    gap = paired.mean if paired else high.ours.mean - low.ours.mean
    half = _half(paired) if paired else hypot(_half(low.ours), _half(high.ours))
    return 0 if abs(gap) <= half else 1 if gap > 0 else -1


def _without_order(known: Sequence[Finding], tolerance: float) -> tuple[Verdict, str]:
    """Return verdict and reasons for figures without an order in the paper.

    A figure is undecided if its interval contains the paper's value, or if it has no interval.
    """
    off = [finding for finding in known if not agrees(finding, tolerance)]
    sure = [f for f in off if f.ours is not None and f.ours.n > 1 and abs(f.ours.mean - f.paper) > _half(f.ours)]
    said = "; ".join(f"{finding.label} differs" for finding in sure or off)
    return ("contradicts" if sure else "undecided"), said


def _half(estimate: Estimate) -> float:
    """Return half the width of the 95 % interval; 0 for a single seed."""
    return 0.0 if estimate.high is None else estimate.high - estimate.mean
