"""Charts for the report of a sweep: measures as functions of each swept field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter
from matplotlib.transforms import ScaledTranslation

from rayfed.evidence.settings import Setting
from rayfed.metrics.measures import MEASURES
from rayfed.report.html.plots import FEWEST
from rayfed.report.html.svg import SERIES, Chart, clean, dash, dashes, series, short

WIDE = 30
"""Minimum ratio of the largest to the smallest value of a field for a logarithmic axis."""
_BAR = 0.36
"""Length in inches of the line at a mean, if there are too few values to join; long enough to show dashes."""


@dataclass(frozen=True)
class Curve:
    """Chart of the measures of one arm as functions of one swept field."""

    arm: str
    chart: Chart
    """A panel per measure."""
    attacks: list[tuple[str, str]]
    """Legend: (attack, dash pattern)."""


def plot_curves(settings: Sequence[Setting], measures: Sequence[str], colours: Sequence[str]) -> list[Curve]:
    """Return a chart for each arm and swept field with at least two values; `colours` lists all arms in order."""
    found = []
    for arm in dict.fromkeys(one.arm for one in settings):
        for path in dict.fromkeys(path for one in settings if one.arm == arm for path in one.fields):
            mine = [one for one in settings if one.arm == arm and path in one.fields]
            if len({repr(one.fields[path]) for one in mine}) > 1:
                found.append(_curve(arm, path, mine, measures, colours.index(arm)))
    return found


@dataclass(frozen=True)
class _Line:
    """Values of one measure under one attack."""

    measure: str
    attack: int
    """Number of the attack."""
    points: Sequence[tuple[float, float, list[float]]]
    """(position on the axis, mean, values of all trials) for each value of the field."""

    def rows(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yield the position on the axis and the data of each trial."""
        for x, mean, values in self.points:
            for value in values:
                yield x, {"measure": self.measure, "mean": mean, "value": value}


def _curve(arm: str, path: str, settings: Sequence[Setting], measures: Sequence[str], index: int) -> Curve:
    attacks = list(dict.fromkeys(one.attack for one in settings))
    values = [one.fields[path] for one in settings]
    places = _places(values)
    lines = {}
    for name in measures:
        if any(name in one.measures for one in settings):
            lines[name] = list(_lines(name, attacks, settings, path, places))

    def draw(drawn: Figure) -> None:
        for row, name in enumerate(lines):
            axes = drawn.add_subplot(len(lines), 1, row + 1)
            for line in lines[name]:
                _draw_line(drawn, axes, line, series(index))
            _label(axes, name, values, row == len(lines) - 1)
        drawn.supxlabel(clean(path.rpartition(".")[2]))

    titles = " and ".join(MEASURES[name].title for name in lines)
    value_at = {places[repr(value)]: value for value in values}
    rows = []
    for line in chain(*lines.values()):
        fixed = {"arm": arm, "attack": attacks[line.attack]}
        rows += [{**fixed, path: value_at[x], **row} for x, row in line.rows()]
    legend: list[tuple[str, dict[str, Any]]] = []
    keys = []
    for number, attack in enumerate(attacks):
        name = attack or "no attack"
        legend.append((name, {"color": series(index), "dashes": dashes(SERIES * number)}))
        keys.append((name, dash(SERIES * number)))
    size = (3.4, 0.6 + 1.75 * max(len(lines), 1))
    chart = Chart(f"field-{arm}-{path}", f"{titles} by {path} in arm {arm}", size, draw, rows, legend)
    return Curve(arm, chart, keys)


def _lines(
    name: str, attacks: Sequence[str | None], settings: Sequence[Setting], path: str, places: dict[str, float]
) -> Iterator[_Line]:
    """Yield the line of each attack."""
    # The accuracy of an arm does not depend on the attack: one line.
    for number, attack in enumerate(attacks if MEASURES[name].kind == "leakage" else attacks[:1]):
        own = [one for one in settings if one.attack == attack and name in one.measures]
        yield _Line(name, number, list(_line(own, path, name, places)))


def _draw_line(drawn: Figure, axes: Axes, line: _Line, colour: str) -> None:
    """Plot the values of all trials, and a line through their means or, for few values, a bar at each mean."""
    for x, _, values in line.points:
        axes.plot([x] * len(values), values, "o", color=colour, markersize=5, alpha=0.6, mew=0)
    style: Any = {"color": colour, "linewidth": 2, "dashes": dashes(line.attack * SERIES)}
    if len(line.points) >= FEWEST:
        axes.plot([x for x, *_ in line.points], [mean for _, mean, _ in line.points], **style)
        return
    for x, mean, _ in line.points:
        at = ScaledTranslation(x, mean, axes.transData)  # type: ignore[arg-type]  # any transform is accepted
        axes.plot([-_BAR / 2, _BAR / 2], [0, 0], transform=drawn.dpi_scale_trans + at, clip_on=False, **style)


def _line(
    settings: Sequence[Setting], path: str, name: str, places: dict[str, float]
) -> Iterator[tuple[float, float, list[float]]]:
    """Yield (position on the axis, mean, values of all trials) for each value of the field."""
    groups: dict[float, list[float]] = {}
    for one in settings:
        values = [float(row[name]) for row in one.rows if row.get(name) is not None]
        groups.setdefault(places[repr(one.fields[path])], []).extend(values)
    for x, values in sorted(groups.items()):
        yield x, fmean(values), values


def _places(values: Sequence[Any]) -> dict[str, float]:
    """Return the position of each value: its own value for numbers, otherwise its index."""
    if _numeric(values):
        return {repr(value): float(value) for value in values}
    return {name: float(place) for place, name in enumerate(dict.fromkeys(map(repr, values)))}


def _numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _label(axes: Axes, name: str, values: Sequence[Any], lowest: bool) -> None:
    """Label the axes, with ticks at the values of the field."""
    unit = MEASURES[name].unit
    axes.set_title(f"{MEASURES[name].title}{f' ({unit})' if unit else ''}")
    if _numeric(values):
        low, high = min(values), max(values)
        if low > 0 and high / low > WIDE:
            axes.set_xscale("log")
        ticks = sorted(set(values))
        if len(ticks) <= 6:
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.xaxis.set_minor_locator(NullLocator())
    else:
        names = list(dict.fromkeys(map(str, values)))
        axes.set_xticks(range(len(names)), [clean(short(text, 12)) for text in names])
    if not lowest:
        axes.tick_params(labelbottom=False)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    if MEASURES[name].share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.margins(0.06, 0.12)
