"""Chart of leakage against utility or cost, with error bars: the report's interactive plot as a figure for papers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rayfed.evidence.figures import SHOWN
from rayfed.evidence.pareto import compute_front
from rayfed.evidence.settings import MeanEstimate, Setting, describes_attacks
from rayfed.metrics.known import METRICS
from rayfed.metrics.measures import MEASURES
from rayfed.report.html.explorer import Explorer
from rayfed.report.html.svg import INK, MARKERS, Chart, panels, series
from rayfed.report.text.figures import cell_text, heading

_FILLS = ("full", "none", "left", "right", "top", "bottom")
"""Fill styles of symbols, by attack."""
_NARROWEST = 2.0
"""Minimum width in inches of a panel with error bars."""


@dataclass(frozen=True)
class _TradeOff:
    """Points of a trade-off chart, one panel per measure of leakage."""

    arms: Sequence[str]
    """All arms, in the order of their colours."""
    attacks: Sequence[str]
    """All attacks, in the order of their fill styles."""
    y: str
    """Measure of utility or cost."""
    panels: Mapping[str, Sequence[Setting]]
    """Settings by measure of leakage."""
    fronts: Mapping[str, Sequence[Setting]]
    """Pareto-optimal settings by measure of leakage."""

    @property
    def points(self) -> list[tuple[Setting, str]]:
        """Return pairs (setting, measure of leakage)."""
        return [(one, x) for x, settings in self.panels.items() for one in settings]

    @property
    def drawn(self) -> set[str]:
        """Return the arms that have a point."""
        return {one.arm for one, _ in self.points}

    def draw(self, figure: Figure) -> None:
        """Draw all panels."""
        for axes, x in zip(panels(figure, len(self.panels), _NARROWEST), self.panels, strict=True):
            xs = [one.measures[x].mean for one in self.fronts[x]]
            ys = [one.measures[self.y].mean for one in self.fronts[x]]
            steps = "steps-pre" if MEASURES[x].higher_is_better else "steps-post"
            axes.plot(xs, ys, ":", color=INK, linewidth=1, drawstyle=steps)
            for one in self.panels[x]:
                self._draw_point(axes, one, x)
            _label(axes, x, self.y)

    def _draw_point(self, axes: Axes, one: Setting, x: str) -> None:
        index, attack = self.arms.index(one.arm), self.attacks.index(one.attack) if one.attack else 0
        across, up = one.measures[x], one.measures[self.y]
        axes.errorbar(
            across.mean,
            up.mean,
            xerr=_bars(across),
            yerr=_bars(up),
            color=series(index),
            marker=MARKERS[index % len(MARKERS)],
            fillstyle=_FILLS[attack % len(_FILLS)],
            markersize=4 + 3 * attack,  # larger than earlier attacks, so that equal results stay visible
            zorder=3 - 0.01 * attack,
            elinewidth=0.9,
            capsize=2,
            alpha=1 if _proves(one, x) else 0.35,
        )

    def legend(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the symbols of arms and, if there are several, of attacks."""
        entries: list[tuple[str, dict[str, Any]]] = []
        for index, arm in enumerate(self.arms):
            if arm in self.drawn:
                marker = MARKERS[index % len(MARKERS)]
                entries.append((arm, {"color": series(index), "marker": marker, "linestyle": ""}))
        if len(self.attacks) > 1:
            for index, attack in enumerate(self.attacks):
                style = {"color": INK, "marker": "o", "linestyle": "", "fillstyle": _FILLS[index % len(_FILLS)]}
                entries.append((attack, {**style, "markersize": min(4 + 3 * index, 7)}))
        return entries

    def note(self) -> str:
        """Return why points are faint, and which arms have no point."""
        reasons, notes = [], []
        if any(one.useless for one, _ in self.points):
            reasons.append("accuracy of chance")
        if any(_attacks_fail(one, x) for one, x in self.points):
            reasons.append("no evidence of protection")
        if reasons:
            notes.append(f"faint: {', or '.join(reasons)}")
        absent = [arm for arm in self.arms if arm not in self.drawn]
        if absent:
            notes.append(f"not drawn: {', '.join(absent)}")
        return "; ".join(notes)

    def description(self) -> str:
        """Return the text alternative."""
        barred = any(one.measures[name].interval for one, x in self.points for name in (x, self.y))
        return f"Leakage and {MEASURES[self.y].title}{', with 95 % intervals' if barred else ''}"


def trade_off(explorer: Explorer, arms: Sequence[str]) -> Chart | None:
    """Return a trade-off chart, one panel per measure of leakage that differs; None if the report has no plot.

    `arms` are all arms in the order of their colours. The line is the Pareto front.
    """
    y = explorer.y
    if explorer.x is None or y is None:
        return None
    shown = _panels(explorer, explorer.x, y)
    fronts = {x: compute_front(settings, x, y).best for x, settings in shown.items()}
    found = _TradeOff(arms, explorer.attacks, y, shown, fronts)
    return Chart(
        name="trade_off",
        description=found.description(),
        size=(3.4 * len(shown), 2.7),
        draw=found.draw,
        rows=[_row(one, x, y, one in fronts[x]) for one, x in found.points],
        legend=found.legend(),
        panels=len(shown),
        narrowest=_NARROWEST,
        legend_note=found.note(),
    )


def _panels(explorer: Explorer, x: str, y: str) -> dict[str, list[Setting]]:
    """Return the settings of each panel: the first measure of leakage with values, and others whose values differ."""
    more = [name for name in explorer.leakages if name in SHOWN and name in METRICS and name != x]
    settings = [entry.setting for entry in explorer.entries if entry.status == "finished"]
    found: dict[str, list[Setting]] = {}
    first = True
    for name in (x, *more):
        known = [one for one in settings if {name, y} <= one.measures.keys()]
        if (first and known) or _differ(name, known):
            found[name] = known
        first = first and not known
    return found


def _differ(measure: str, settings: Sequence[Setting]) -> bool:
    """Return whether a measure has more than one printed value."""
    return len({cell_text(measure, one.measures[measure]) for one in settings}) > 1


def _bars(value: MeanEstimate) -> list[list[float]] | None:
    if value.interval is None:
        return None
    low, high = value.interval
    return [[value.mean - low], [high - value.mean]]


def _label(axes: Axes, x: str, y: str) -> None:
    """Label the axes, with the direction of more leakage."""
    axes.set_xlabel(f"{heading(x)}  {'← leaks more' if MEASURES[x].higher_is_better else 'leaks more →'}")
    axes.set_ylabel(heading(y))
    axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    for axis, name in ((axes.xaxis, x), (axes.yaxis, y)):
        if MEASURES[name].share:
            axis.set_major_formatter(PercentFormatter(1.0, decimals=None))


def _row(one: Setting, x: str, y: str, best: bool) -> dict[str, Any]:
    """Return a point as a row, with its intervals, whether it is on the front, and whether it counts (`_proves`)."""
    row: dict[str, Any] = {"arm": one.arm, "attack": one.attack, **one.fields}
    for axis, name in (("x", x), ("y", y)):
        found = one.measures[name]
        low, high = found.interval or (None, None)
        row |= {axis: name, f"{axis}_mean": found.mean, f"{axis}_low": low, f"{axis}_high": high, f"{axis}_n": found.n}
        row[f"{axis}_over"] = found.over
    return {**row, "on_front": best, "compared": _proves(one, x)}


def _proves(one: Setting, x: str) -> bool:
    """Return whether a point counts: accuracy above chance, and attacks that work here and without a defence."""
    return not one.useless and not _attacks_fail(one, x)


def _attacks_fail(one: Setting, x: str) -> bool:
    """Return whether low leakage is no evidence, because the attacks are not shown to work."""
    return one.doubted(x) or bool(describes_attacks(x) and one.unanswered[0])
