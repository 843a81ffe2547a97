"""Chart of leakage against utility or cost, with error bars: the report's interactive plot as a figure for papers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rayfed.evidence.figures import SHOWN
from rayfed.evidence.pareto import front
from rayfed.evidence.settings import Estimate, Setting, of_attacks
from rayfed.metrics.known import METRICS
from rayfed.metrics.measures import MEASURES
from rayfed.report.explorer import Explorer
from rayfed.report.svg import INK, MARKERS, Chart, panels, series
from rayfed.report.text.figures import cell_text, heading

_FILLS = ("full", "none", "left", "right", "top", "bottom")
"""Fill styles of symbols, by attack."""
_NARROWEST = 2.0
"""Minimum width in inches of a panel with error bars."""


def trade_off(explorer: Explorer, arms: Sequence[str]) -> Chart | None:
    """Return a trade-off chart, one panel per measure of leakage that differs; None if the report has no plot.

    `arms` are all arms in the order of their colours. The line is the Pareto front.
    """
    y = explorer.y
    if explorer.x is None or y is None:
        return None
    more = [name for name in explorer.leakages if name in SHOWN and name in METRICS and name != explorer.x]
    found = [entry.setting for entry in explorer.entries if entry.status == "finished"]
    shown = {x: [one for one in found if {x, y} <= one.measures.keys()] for x in (explorer.x, *more)}
    first = next((x for x, settings in shown.items() if settings), None)
    shown = {x: settings for x, settings in shown.items() if x == first or _differ(x, settings)}
    best = {x: front(settings, x, y).best for x, settings in shown.items()}
    attacks = explorer.attacks

    def draw(drawn: Figure) -> None:
        for axes, (x, settings) in zip(panels(drawn, len(shown), _NARROWEST), shown.items(), strict=True):
            xs, ys = ([one.measures[name].mean for one in best[x]] for name in (x, y))
            steps = "steps-pre" if MEASURES[x].higher_is_better else "steps-post"
            axes.plot(xs, ys, ":", color=INK, linewidth=1, drawstyle=steps)
            for one in settings:
                index, attack = arms.index(one.arm), attacks.index(one.attack) if one.attack else 0
                across, up = one.measures[x], one.measures[y]
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
            _label(axes, x, y)

    there = {one.arm for settings in shown.values() for one in settings}
    legend: list[tuple[str, dict[str, Any]]] = [
        (arm, {"color": series(i), "marker": MARKERS[i % len(MARKERS)], "linestyle": ""})
        for i, arm in enumerate(arms)
        if arm in there
    ]
    if len(attacks) > 1:
        legend += [
            (
                attack,
                {
                    "color": INK,
                    "marker": "o",
                    "linestyle": "",
                    "fillstyle": _FILLS[i % len(_FILLS)],
                    "markersize": min(4 + 3 * i, 7),
                },
            )
            for i, attack in enumerate(attacks)
        ]
    faint = [(one, x) for x, settings in shown.items() for one in settings if not _proves(one, x)]
    why = ["accuracy of chance"] * any(one.useless for one, _ in faint)
    why += ["no evidence of protection"] * any(_worked_not(one, x) for one, x in faint)
    absent = [arm for arm in arms if arm not in there]
    notes = [f"faint: {', or '.join(why)}"] * bool(faint) + [f"not drawn: {', '.join(absent)}"] * bool(absent)
    rows = [_row(one, x, y, one in best[x]) for x, settings in shown.items() for one in settings]
    barred = any(one.measures[name].interval for x, settings in shown.items() for one in settings for name in (x, y))
    words = f"Leakage and {MEASURES[y].title}" + ", with 95 % intervals" * barred
    return Chart(
        "trade_off", words, (3.4 * len(shown), 2.7), draw, rows, legend, len(shown), _NARROWEST, "; ".join(notes)
    )


def _differ(measure: str, settings: Sequence[Setting]) -> bool:
    """Return whether a measure has more than one printed value."""
    return len({cell_text(measure, one.measures[measure]) for one in settings}) > 1


def _bars(value: Estimate) -> list[list[float]] | None:
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
    return not one.useless and not _worked_not(one, x)


def _worked_not(one: Setting, x: str) -> bool:
    """Return whether low leakage is no evidence, because the attacks are not shown to work."""
    return one.doubted(x) or bool(of_attacks(x) and one.unanswered[0])
