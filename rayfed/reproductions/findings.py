"""Findings: a paper's figures with our values of the same quantities, estimated over seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from rayfed.evidence.settings import Estimate, estimate
from rayfed.reproductions.reading import Convention, Figure, Group
from rayfed.reproductions.records import SizeRecord, Value

Points = tuple[tuple[float, float], ...]
_PEAK = 255.0
_SHIFT = 48.130803608679074
"""20 log10(255) dB: difference between the PSNR of pixels in 0 to 255 and in 0 to 1 for the same error."""
_TRUE: dict[Convention, Callable[[float], float]] = {
    "root_psnr": lambda printed: 2 * printed - _SHIFT,
    "root_mse": lambda printed: (printed / _PEAK) ** 2,
}
"""Convention -> conversion of the printed value to the true measure."""
_PRINTED: dict[Convention, Callable[[float], float]] = {
    "root_psnr": lambda true: (true + _SHIFT) / 2,
    "root_mse": lambda true: _PEAK * true**0.5,
}
_GRID = 21
"""Number of equally spaced places at which two curves are compared."""


@dataclass(frozen=True)
class Finding:
    """One figure of the paper with our values of the same quantity."""

    label: str
    printed: float
    """The figure as the paper prints it."""
    paper: float
    """The paper's figure in our measure: converted from its convention, and divided if the group is relative."""
    by_seed: Mapping[int, float] = field(default_factory=dict)
    """Seed -> our value. Equal seeds of two figures have the same weights and attacked clients."""
    curves: Mapping[int, Points] = field(default_factory=dict)
    """Seed -> points of our curve, sorted by x; empty if the figure is a number."""
    also: float | None = None
    """Our mean in the other arithmetic: the paper's, or the true one if the paper's is compared."""

    @property
    def ours(self) -> Estimate | None:
        """Return our estimate; None for a curve, and if nothing was measured."""
        return estimate([self.by_seed[seed] for seed in sorted(self.by_seed)])

    @property
    def measured(self) -> bool:
        """Return whether any seed has a value."""
        return bool(self.by_seed or self.curves)


def make_findings(group: Group, record: SizeRecord) -> list[Finding]:
    """Return the findings of a group: each value of the paper with our values in a record."""
    values = {figure.label: _values(group, figure, record) for figure in group.figures}
    reference = next((figure for figure in group.figures if figure.label == group.relative_to), None)
    if reference is None:
        return [_finding(group, figure, values[figure.label], record) for figure in group.figures]
    below = _scalars(values[reference.label])
    findings = []
    for figure in group.figures:
        ratios = {s: v / below[s] for s, v in _scalars(values[figure.label]).items() if below.get(s)}
        true = _to_true(group)
        findings.append(Finding(figure.label, figure.paper, true(figure.paper) / true(reference.paper), ratios))
    return findings


def _finding(group: Group, figure: Figure, values: Mapping[int, Value], record: SizeRecord) -> Finding:
    if group.along is not None:
        curves = {seed: value for seed, value in values.items() if not isinstance(value, float)}
        return Finding(figure.label, figure.paper, figure.paper, curves=curves)
    by_seed = _scalars(values)
    also = None
    if group.convention and by_seed:
        also = _PRINTED[group.convention](fmean(by_seed.values()))
    if group.true_measure is not None:
        true = [seed.true_values.get(group.key, {}).get(figure.label) for seed in record.seeds.values()]
        ours = estimate([value for value in true if isinstance(value, float)])
        also = None if ours is None else ours.mean
    return Finding(figure.label, figure.paper, _to_true(group)(figure.paper), by_seed, also=also)


def _to_true(group: Group) -> Callable[[float], float]:
    return _TRUE[group.convention] if group.convention else float


def _values(group: Group, figure: Figure, record: SizeRecord) -> dict[int, Value]:
    by_seed = {seed: one.values.get(group.key, {}).get(figure.label) for seed, one in record.seeds.items()}
    return {seed: value for seed, value in by_seed.items() if value is not None}


def _scalars(values: Mapping[int, Value]) -> dict[int, float]:
    return {seed: value for seed, value in values.items() if isinstance(value, float)}


def gaps(low: Finding, high: Finding) -> list[float]:
    """Return our differences of two figures, by the seeds that both have; those of curves are means at equal x."""
    if low.curves or high.curves:
        seeds = sorted(low.curves.keys() & high.curves.keys())
        both = [curve_gap(low.curves[seed], high.curves[seed]) for seed in seeds]
        return [gap for gap in both if gap is not None]
    return [high.by_seed[seed] - low.by_seed[seed] for seed in sorted(low.by_seed.keys() & high.by_seed.keys())]


def curve_gap(low: Points, high: Points) -> float | None:
    """Return the mean difference of two curves over the x that both have; None if they share no x."""
    left, right = max(low[0][0], high[0][0]), min(low[-1][0], high[-1][0])
    if left > right:
        return None
    grid = _grid(left, right, _GRID)
    return fmean(value_at(high, x) - value_at(low, x) for x in grid)


def _grid(left: float, right: float, count: int) -> list[float]:
    step = (right - left) / (count - 1)
    return [min(left + step * place, right) for place in range(count)]


def value_at(points: Points, x: float) -> float:
    """Return a curve's y at an x within it, linear between its points."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1 and x0 < x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return fmean(y for place, y in points if place == x)


def tabulate_curves(findings: list[Finding], count: int = 5) -> tuple[list[float], list[list[Estimate | None]]]:
    """Return equally spaced x that all seeds of all curves share, and each curve's estimates there.

    Both are empty if the curves share no x.
    """
    curves = [points for finding in findings for points in finding.curves.values()]
    left = max((points[0][0] for points in curves), default=1.0)
    right = min((points[-1][0] for points in curves), default=0.0)
    if left > right:
        return [], [[] for _ in findings]
    grid = _grid(left, right, count)
    return grid, [
        [estimate([value_at(points, x) for points in finding.curves.values()]) for x in grid] for finding in findings
    ]
