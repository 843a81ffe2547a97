"""Verdicts on reproductions: agreement with a paper's figures, their order and their differences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from math import ceil, sqrt
from statistics import stdev

from rayfed.evidence.settings import CONFIDENCE, MeanEstimate, estimate_mean
from rayfed.reproductions.findings import Finding, gaps
from rayfed.reproductions.kinds import Attacker, Comparison, Direction
from rayfed.reproductions.reading import Group

_MOST_SEEDS = 10_000
"""Largest number of seeds that is worth naming."""


class Verdict(StrEnum):
    """Verdict on a group of figures or on a whole claim, from the best to the worst."""

    REPRODUCED = "reproduced"
    """All figures agree, or the whole order or all differences if only these are compared."""
    BETTER = "better"
    """Each figure agrees or is better than the paper's, and no order is reversed."""
    SAME_ORDER = "same_order"
    """Some figures differ, and all figures that differ in the paper have the same order here."""
    UNDECIDED = "undecided"
    """More seeds are needed."""
    CONTRADICTED = "contradicted"
    """A figure, an order or a difference is not the paper's, beyond chance."""
    NOT_MEASURED = "not_measured"


class FigureState(StrEnum):
    """State of one figure compared with the paper's."""

    AGREES = "agrees"
    """Within the tolerance of our mean, or within our 95 % interval of at most two tolerances to each side."""
    BETTER = "better"
    WORSE = "worse"
    DIFFERS = "differs"
    """Differs beyond chance, and no direction is better."""
    UNDECIDED = "undecided"
    MISSING = "missing"


class PairState(StrEnum):
    """State of the difference between two figures, the first of which is lower in the paper."""

    AGREES = "agrees"
    """The difference is that of the paper, within the tolerance. Only if differences are compared."""
    KEPT = "kept"
    """Same order, beyond chance."""
    REVERSED = "reversed"
    """Reversed order, beyond chance."""
    ABSENT = "absent"
    """The interval of the difference is within the tolerance: the paper's difference is absent."""
    DIFFERS = "differs"
    """The paper has next to no difference, and there is one here, beyond chance."""
    NO_OVERLAP = "no_overlap"
    """The two curves have no common range."""
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class FigureJudgement:
    """State of one figure."""

    label: str
    state: FigureState
    seeds: int | None = None
    """Number of seeds that would decide an undecided figure; None if it is decided or cannot be estimated."""


@dataclass(frozen=True)
class PairJudgement:
    """State of the difference between two figures."""

    low: str
    """Label of the figure that is lower in the paper."""
    high: str
    paper: float
    """Difference in the paper."""
    gap: MeanEstimate | None
    """Our difference, the high figure minus the low one, paired by seed; None without a common seed."""
    state: PairState
    seeds: int | None = None
    """Number of seeds that would decide an undecided pair; None if it is decided or cannot be estimated."""


@dataclass(frozen=True)
class Judgement:
    """Verdict on one group of a paper's figures, with its reasons."""

    group: Group
    findings: Sequence[Finding]
    verdict: Verdict
    figures: Sequence[FigureJudgement]
    """State of each figure; empty if figures are not compared."""
    pairs: Sequence[PairJudgement]
    """State of each compared pair."""

    @property
    def seeds(self) -> int | None:
        """Return the number of seeds that would decide the undecided parts; None if it cannot be estimated."""
        undecided: list[FigureJudgement | PairJudgement] = [p for p in self.pairs if p.state is PairState.UNDECIDED]
        if not self.pairs:
            undecided = [figure for figure in self.figures if figure.state is FigureState.UNDECIDED]
        needed = [one.seeds for one in undecided]
        known = [seeds for seeds in needed if seeds is not None]
        return max(known) if known and len(known) == len(needed) else None


def judge(group: Group, findings: Sequence[Finding]) -> Judgement:
    """Return the verdict on a group of figures from its findings."""
    measured = [finding for finding in findings if finding.measured]
    figures: list[FigureJudgement] = []
    if group.compare is Comparison.VALUES:
        figures = [judge_figure(finding, group.tolerance, group.direction) for finding in findings]
    pairs = [_judge_pair(group, *pair) for pair in _pairs(group, measured)]
    if not measured:
        verdict = Verdict.NOT_MEASURED
    elif group.compare is Comparison.VALUES:
        verdict = _judge_values(figures, pairs)
    elif not pairs:
        verdict = Verdict.NOT_MEASURED
    else:
        verdict = _judge_pairs(group.compare, pairs, complete=len(measured) == len(findings))
    return Judgement(group, findings, verdict, figures, pairs)


@dataclass(frozen=True)
class Whole:
    """Verdict on all groups of one attacker."""

    verdict: Verdict
    """The worst verdict of the measured groups."""
    seeds: int | None = None
    """Number of seeds that would decide the undecided groups; None if there are none or it cannot be estimated."""


def overall(judgements: Iterable[Judgement], attacker: Attacker = Attacker.PAPER) -> Whole | None:
    """Return the verdict on the groups of an attacker; None without such a group.

    Groups without an attacker count as the paper's.
    """
    own = [one for one in judgements if (one.group.attacker or Attacker.PAPER) is attacker]
    compared = [one.verdict for one in own if one.verdict is not Verdict.NOT_MEASURED]
    if not compared:
        return Whole(Verdict.NOT_MEASURED) if own else None
    order = list(Verdict)
    undecided = [one.seeds for one in own if one.verdict is Verdict.UNDECIDED]
    known = [seeds for seeds in undecided if seeds is not None]
    complete = known and len(known) == len(undecided)
    return Whole(max(compared, key=order.index), max(known) if complete else None)


def judge_figure(finding: Finding, tolerance: float, better: Direction | None) -> FigureJudgement:
    """Return the state of one figure."""
    ours = finding.ours
    if ours is None:
        return FigureJudgement(finding.label, FigureState.MISSING)
    off = ours.mean - finding.paper
    half = _half(ours)
    if abs(off) <= tolerance or (abs(off) <= half and half <= 2 * tolerance):
        return FigureJudgement(finding.label, FigureState.AGREES)
    if ours.n < 2 or abs(off) <= half:
        seeds = seeds_to_decide(list(finding.by_seed.values()), max(abs(off), 2 * tolerance))
        return FigureJudgement(finding.label, FigureState.UNDECIDED, seeds)
    if better is None:
        return FigureJudgement(finding.label, FigureState.DIFFERS)
    above = better is Direction.HIGHER
    return FigureJudgement(finding.label, FigureState.BETTER if (off > 0) is above else FigureState.WORSE)


def seeds_to_decide(values: Sequence[float], half: float) -> int | None:
    """Return the smallest n with t(n - 1) s / sqrt(n) <= half. s is the standard deviation of the values.

    t is the 97.5 % quantile of Student's distribution, so that the 95 % interval reaches `half` to each side. None if
    there are fewer than two values, `half` is 0, or more than 10,000 seeds are needed.
    """
    from scipy.stats import t  # slow import (about 1 s)

    if len(values) < 2 or half <= 0:
        return None
    quantile = (1 + CONFIDENCE) / 2
    deviation = stdev(values)
    n = max(2, ceil((1.959 * deviation / half) ** 2))
    while n <= _MOST_SEEDS and float(t.ppf(quantile, n - 1)) * deviation / sqrt(n) > half:
        n += 1
    return n if n <= _MOST_SEEDS else None


def _pairs(group: Group, measured: Sequence[Finding]) -> list[tuple[Finding, Finding]]:
    """Return the compared pairs, each with the figure first that is lower in the paper."""
    ordered = [(a, b) if a.paper <= b.paper else (b, a) for a, b in combinations(measured, 2)]
    if group.compare is Comparison.DIFFERENCES:
        return ordered
    apart = 0.0 if group.compare is Comparison.ORDER else group.tolerance
    return [(low, high) for low, high in ordered if high.paper - low.paper > apart]


def _judge_pair(group: Group, low: Finding, high: Finding) -> PairJudgement:
    paper = high.paper - low.paper
    values = gaps(low, high)
    gap = estimate_mean(values)
    if gap is None:
        state = PairState.NO_OVERLAP if low.curves else PairState.UNDECIDED
        return PairJudgement(low.label, high.label, paper, None, state)
    if group.compare is Comparison.DIFFERENCES:
        state, target = _compare_gap(gap, paper, group.tolerance)
    else:
        state, target = _order_gap(gap, 0.0 if group.compare is Comparison.ORDER else group.tolerance)
    seeds = seeds_to_decide(values, target) if state is PairState.UNDECIDED else None
    return PairJudgement(low.label, high.label, paper, gap, state, seeds)


def _order_gap(gap: MeanEstimate, tolerance: float) -> tuple[PairState, float]:
    """Return the state of a difference that is positive in the paper, and the half interval that would decide it.

    An interval within the tolerance has no difference as large as the paper's, unless it is beyond zero on the right
    side. So an interval decides if it is as narrow as the difference, or as the rest of the tolerance.
    """
    half, off = _half(gap), abs(gap.mean)
    target = max(off, tolerance - off)
    if gap.n < 2:
        return PairState.UNDECIDED, target
    if gap.mean > half:
        return PairState.KEPT, target
    if tolerance and off + half <= tolerance:
        return PairState.ABSENT, target
    return (PairState.REVERSED if -gap.mean > half else PairState.UNDECIDED), target


def _compare_gap(gap: MeanEstimate, paper: float, tolerance: float) -> tuple[PairState, float]:
    """Return the state of a difference compared with the paper's, and the half interval that would decide it."""
    half, off = _half(gap), abs(gap.mean - paper)
    target = max(off, 2 * tolerance)
    if gap.n < 2 or half > target:
        return PairState.UNDECIDED, target
    if half <= 2 * tolerance and off <= max(tolerance, half):
        return PairState.AGREES, target
    if paper <= tolerance:
        return PairState.DIFFERS, target
    return _order_gap(gap, tolerance)


def _judge_values(figures: Sequence[FigureJudgement], pairs: Sequence[PairJudgement]) -> Verdict:
    states = {figure.label: figure.state for figure in figures}
    if set(states.values()) == {FigureState.AGREES}:
        return Verdict.REPRODUCED
    good = {label for label, state in states.items() if state in (FigureState.AGREES, FigureState.BETTER)}
    # Figures that are all at least as good as the paper's may have no room left for a difference.
    saturated = [pair for pair in pairs if pair.state is PairState.ABSENT and {pair.low, pair.high} <= good]
    decisive = [pair for pair in pairs if pair not in saturated]
    if any(pair.state in (PairState.REVERSED, PairState.ABSENT) for pair in decisive):
        return Verdict.CONTRADICTED
    if not pairs and {FigureState.WORSE, FigureState.DIFFERS} & set(states.values()):
        return Verdict.CONTRADICTED
    if FigureState.MISSING in states.values() or any(pair.state is PairState.UNDECIDED for pair in decisive):
        return Verdict.UNDECIDED
    if not pairs and FigureState.UNDECIDED in states.values():
        return Verdict.UNDECIDED
    return Verdict.BETTER if len(good) == len(figures) else Verdict.SAME_ORDER


def _judge_pairs(compare: Comparison, pairs: Sequence[PairJudgement], complete: bool) -> Verdict:
    states = {pair.state for pair in pairs}
    if states & {PairState.REVERSED, PairState.ABSENT, PairState.DIFFERS}:
        return Verdict.CONTRADICTED
    if not complete or states & {PairState.UNDECIDED, PairState.NO_OVERLAP}:
        return Verdict.UNDECIDED
    if compare is Comparison.ORDER or states == {PairState.AGREES}:
        return Verdict.REPRODUCED
    return Verdict.SAME_ORDER


def _half(value: MeanEstimate) -> float:
    """Return half the width of the 95 % interval; 0 for a single seed."""
    return 0.0 if value.high is None else value.high - value.mean
