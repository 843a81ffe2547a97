"""Findings: a paper's figures with our values of the same quantities, estimated over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from rayfed.evidence.settings import MeanEstimate, estimate_mean
from rayfed.reproductions.reading import Figure, Group
from rayfed.reproductions.records import SizeRecord, Value

Points = tuple[tuple[float, float], ...]
_GRID = 21
"""Number of equally spaced places at which two curves are compared."""


@dataclass(frozen=True)
class Finding:
    """One figure of the paper with our values of the same quantity."""

    label: str
    printed: float
    """The figure as the paper prints it."""
    paper: float
    """The paper's figure, divided by that of the reference if the group is relative."""
    by_seed: Mapping[int, float] = field(default_factory=dict)
    """Seed -> our value. Equal seeds of two figures have the same weights and attacked clients."""
    curves: Mapping[int, Points] = field(default_factory=dict)
    """Seed -> points of our curve, sorted by x; empty if the figure is a number."""
    also: float | None = None
    """Our mean in true arithmetic, if the measure is in a convention of the paper."""

    @property
    def ours(self) -> MeanEstimate | None:
        """Return our estimate; None for a curve, and if nothing was measured."""
        return estimate_mean([self.by_seed[seed] for seed in sorted(self.by_seed)])

    @property
    def measured(self) -> bool:
        """Return whether any seed has a value."""
        return bool(self.by_seed or self.curves)


def make_findings(group: Group, record: SizeRecord) -> list[Finding]:
    """Return the findings of a group: each value of the paper with our values in a record."""
    if group.relative_to is not None:
        return _make_ratios(group, group.relative_to, record)
    make = _make_number if group.along is None else _make_curve
    return [make(group, figure, record) for figure in group.figures]


def _make_ratios(group: Group, reference: str, record: SizeRecord) -> list[Finding]:
    """Return the figures divided by the reference, in the paper and here."""
    [base] = [figure for figure in group.figures if figure.label == reference]
    ours_of_base = _numbers(group, base, record)
    findings = []
    for figure in group.figures:
        ratios = {}
        for seed, value in _numbers(group, figure, record).items():
            if ours_of_base.get(seed):
                ratios[seed] = value / ours_of_base[seed]
        paper = figure.paper / base.paper
        findings.append(Finding(figure.label, figure.paper, paper, ratios))
    return findings


def _make_curve(group: Group, figure: Figure, record: SizeRecord) -> Finding:
    curves = {}
    for seed, value in _values(record, group, figure).items():
        if not isinstance(value, float):
            curves[seed] = value
    return Finding(figure.label, figure.paper, figure.paper, curves=curves)


def _make_number(group: Group, figure: Figure, record: SizeRecord) -> Finding:
    by_seed = _numbers(group, figure, record)
    also = None
    if group.true_measure is not None:
        true = [seed.true_values.get(group.key, {}).get(figure.label) for seed in record.seeds.values()]
        known = [value for value in true if isinstance(value, float)]
        also = fmean(known) if known else None
    return Finding(figure.label, figure.paper, figure.paper, by_seed, also=also)


def _values(record: SizeRecord, group: Group, figure: Figure) -> dict[int, Value]:
    """Return a figure's recorded value of each seed that has one."""
    values = {}
    for seed, one in record.seeds.items():
        value = one.values.get(group.key, {}).get(figure.label)
        if value is not None:
            values[seed] = value
    return values


def _numbers(group: Group, figure: Figure, record: SizeRecord) -> dict[int, float]:
    values = _values(record, group, figure)
    return {seed: value for seed, value in values.items() if isinstance(value, float)}


def gaps(low: Finding, high: Finding) -> list[float]:
    """Return our differences of two figures, by the seeds that both have; those of curves are means at equal x."""
    differences: list[float] = []
    for seed in sorted(low.by_seed.keys() & high.by_seed.keys()):
        differences.append(high.by_seed[seed] - low.by_seed[seed])
    for seed in sorted(low.curves.keys() & high.curves.keys()):
        gap = curve_gap(low.curves[seed], high.curves[seed])
        if gap is not None:
            differences.append(gap)
    return differences


def curve_gap(low: Points, high: Points) -> float | None:
    """Return the mean difference of two curves over the x that both have; None if they share no x."""
    left, right = max(low[0][0], high[0][0]), min(low[-1][0], high[-1][0])
    if left > right:
        return None
    grid = _grid(left, right, _GRID)
    return fmean([value_at(high, x) - value_at(low, x) for x in grid])


def _grid(left: float, right: float, count: int) -> list[float]:
    step = (right - left) / (count - 1)
    return [min(left + step * place, right) for place in range(count)]


def value_at(points: Points, x: float) -> float:
    """Return a curve's y at an x within it, linear between its points."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1 and x0 < x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return fmean(y for place, y in points if place == x)


def tabulate_curves(findings: list[Finding], count: int = 5) -> tuple[list[float], list[list[MeanEstimate | None]]]:
    """Return equally spaced x that all seeds of all curves share, and each curve's estimates there.

    Both are empty if the curves share no x.
    """
    curves = [points for finding in findings for points in finding.curves.values()]
    left = max((points[0][0] for points in curves), default=1.0)
    right = min((points[-1][0] for points in curves), default=0.0)
    if left > right:
        return [], [[] for _ in findings]
    grid = _grid(left, right, count)
    estimates = []
    for finding in findings:
        column = []
        for x in grid:
            column.append(estimate_mean([value_at(points, x) for points in finding.curves.values()]))
        estimates.append(column)
    return grid, estimates
