"""Chart of success rates: the share of images that reach a threshold, over all thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

from rayfed.evidence.rows import Row
from rayfed.evidence.success import CURVE_METRICS, SuccessCurve, group_by_attack, success_curve, success_table
from rayfed.metrics.base import Metric
from rayfed.metrics.known import METRICS
from rayfed.report.html.svg import DASHES, INK, SERIES, Chart, dash, dashes, line, panels, series


@dataclass(frozen=True)
class Success:
    """Chart of the attacks' success rates in a run."""

    chart: Chart
    """A panel per metric, with a line per arm and attack."""
    attacks: list[tuple[str, str]]
    """Legend: (attack, dash pattern)."""
    others: int
    """Number of attacks with worse reconstructions that are not drawn."""


def success_rates(attacks: Sequence[Row], arms: Sequence[str], thresholds: Mapping[str, float]) -> Success | None:
    """Return the chart of success rates for rows of `attacks`; None if no image has a score.

    `thresholds` are those of the probability of reconstruction success (PoRS).
    """
    found = _success_curves(attacks)
    if not found:
        return None
    names, others = _closest(next(iter(found.items())))
    for metric, every in found.items():
        found[metric] = [one for one in every if one.group.attack in names]

    def draw(drawn: Figure) -> None:
        for axes, (metric, curves) in zip(panels(drawn, len(found)), found.items(), strict=True):
            for each in curves:
                style = dashes(SERIES * names.index(each.group.attack))
                colour = series(arms.index(each.group.arm))
                axes.step(*_stairs(each, curves), where="pre", color=colour, dashes=style, linewidth=1.8)
            if metric in thresholds:
                axes.axvline(thresholds[metric], color=INK, linewidth=1)
            _label(axes, METRICS[metric])

    legend = [(arm, line(index)) for index, arm in enumerate(arms)]
    if len(names) > 1:
        legend += [(name, {"color": INK, "dashes": dashes(SERIES * place)}) for place, name in enumerate(names)]
    rows = success_table(chain(*found.values())).to_pylist()
    titles = ", ".join(METRICS[metric].table_heading for metric in found)
    words = f"Share of attacked images that reach a threshold of {titles}"
    chart = Chart("success_rates", words, (3.1 * len(found), 2.7), draw, rows, legend, len(found))
    return Success(chart, [(name, dash(SERIES * place)) for place, name in enumerate(names)], others)


def _success_curves(attacks: Sequence[Row]) -> dict[str, list[SuccessCurve]]:
    """Return the curve of each attack on each arm, by metric with a score."""
    groups = group_by_attack(attacks)
    found: dict[str, list[SuccessCurve]] = {}
    for metric in CURVE_METRICS:
        for group in groups:
            curve = success_curve(group, metric)
            if curve:
                found.setdefault(metric, []).append(curve)
    return found


def _closest(curves: tuple[str, Sequence[SuccessCurve]]) -> tuple[list[str], int]:
    """Return the attacks with the best reconstructions, one per dash pattern, and the number of other attacks."""
    metric, every = curves
    sign = 1 if METRICS[metric].higher_is_closer else -1
    reached: dict[str, float] = {}
    for one in every:
        nearest = sign * one.thresholds[-1]
        reached[one.group.attack] = max(nearest, reached.get(one.group.attack, nearest))
    first = sorted(reached, key=lambda name: -reached[name])[:DASHES]
    return [name for name in reached if name in first], len(reached) - len(first)


def _stairs(one: SuccessCurve, curves: Sequence[SuccessCurve]) -> tuple[list[float], list[float]]:
    """Return a curve from the least to the most strict threshold of its chart."""
    ends = [_shown(one.metric, each.thresholds[end]) for each in curves for end in (0, -1)]
    metric = METRICS[one.metric]
    easiest, hardest = (min(ends), max(ends)) if metric.higher_is_closer else (max(ends), min(ends))
    thresholds = [_shown(one.metric, threshold) for threshold in one.thresholds]
    seen = thresholds.index(thresholds[-1]) + 1
    last = one.shares[seen - 1] if thresholds[-1] == hardest else 0.0
    easiest = metric.chart[0] if metric.chart and easiest == hardest else easiest
    return [easiest, *thresholds[:seen], hardest], [one.shares[0], *one.shares[:seen], last]


def _shown(metric: str, threshold: float) -> float:
    """Return the position of a threshold in a chart."""
    chart = METRICS[metric].chart
    return (min if METRICS[metric].higher_is_closer else max)(threshold, chart[1] if chart else threshold)


def _label(axes: Axes, metric: Metric) -> None:
    """Label the axes, with stricter thresholds to the right for every metric."""
    if metric.format == "error":
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(numticks=4))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if not metric.higher_is_closer:
        axes.invert_xaxis()
    unit = f" ({metric.unit})" if metric.unit else ""
    axes.set_xlabel(f"{'at least' if metric.higher_is_closer else 'at most'}{unit}")
    axes.set_title(metric.table_heading)
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
