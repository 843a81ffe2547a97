"""Figures for papers: the charts of the report as PDF and SVG, each with its data as CSV.

PDFs embed TrueType fonts, and SVGs keep text as text. The colours are those of Okabe and Ito 2008, "Color Universal
Design", which are safe for colour-blind readers. Arms also differ in symbols, and stacked classes go from dark to
light. The same run gives the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rayfed.errors import UserError
from rayfed.evidence.arms import arm_names
from rayfed.evidence.proved_bounds import compare_bounds, nontrivial_comparisons
from rayfed.metrics.measures import MEASURES
from rayfed.report.export.tables import as_csv
from rayfed.report.html import plots
from rayfed.report.html.explorer import PREFERRED, explore
from rayfed.report.html.run_data import RunData
from rayfed.report.html.run_training import training_charts, vote_charts
from rayfed.report.html.success_plots import success_rates
from rayfed.report.html.svg import CLASSES, MARKERS, SERIES, STYLE, Chart, clean, side_by_side
from rayfed.report.html.sweep_plots import plot_curves
from rayfed.report.html.trade_off import trade_off
from rayfed.results.loading import Results, Run

WIDTHS = {"": 3.17, "-wide": 6.48}
"""Width in inches by suffix of the file name: one and two columns of LaTeX's article class."""
_OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_FURTHER = ("#882255", "#888888")
"""Colours of the ninth and tenth arm: wine of Tol's muted scheme, and grey."""
_INK, _GRID = "#222222", "#dddddd"
_CYCLE = [
    *_OKABE_ITO,
    *_FURTHER,
    *(matplotlib.colors.to_hex(matplotlib.colormaps["viridis"](place / CLASSES)) for place in range(CLASSES + 1)),
    _INK,
    "#ffffff",
]
PAPER: Any = STYLE | {
    "pdf.fonttype": 42,
    "font.family": "DejaVu Sans",  # part of matplotlib, so the same on every machine
    "font.size": 7.5,
    "axes.prop_cycle": cycler(color=_CYCLE),
    "axes.titlesize": 8,
    "axes.spines.left": True,
    "axes.linewidth": 0.6,
    "grid.color": _GRID,
    "grid.linewidth": 0.5,
    "axes.edgecolor": _INK,
    **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color"), _INK),
}
"""Style of figures; other settings are those of the page."""


def write_figures(results: Results, out: str) -> list[str]:
    """Write the charts of a run or sweep into a folder and return the names of the charts.

    Raises `UserError` if there is nothing to draw, or if the folder cannot be written.
    """
    found = run_charts(results) if isinstance(results, Run) else sweep_charts(results)
    if not found:
        raise UserError(f"'{results.url}' has nothing to draw: no round is complete, and no attack has a result")
    names = []
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        for chart in found:
            name = re.sub(r"[^\w.-]+", "-", chart.name)
            Path(out, f"{name}.csv").write_text(as_csv(chart.rows), encoding="utf-8")
            for ending, width in WIDTHS.items():
                save_figure(chart, width, Path(out, f"{name}{ending}"))
            names.append(name)
    except OSError as error:
        raise UserError(f"cannot write figures to {out}: {error}") from error
    return names


def run_charts(run: Run) -> list[Chart]:
    """Return the charts of a run for a paper; the trade-off has intervals over the attacked clients."""
    data = RunData(run.folder)
    success = success_rates(data.attacks, data.names, data.thresholds)
    compared = nontrivial_comparisons(compare_bounds(data.proved, data.attacks, data.inferences))
    found = [
        trade_off(explore(run.with_intervals()), data.names),
        success.chart if success else None,
        *training_charts(data.rounds, data.arms),
        plots.every_image(data.attacks, data.leaks, data.arms),
        plots.plot_label_bars(data.mix) if data.mix else None,
        plots.plot_proved_bounds(data.proved, compared),
    ]
    for vote in vote_charts(data):
        found += [vote.weights, vote.scores]
    return [chart for chart in found if chart]


def sweep_charts(sweep: Results) -> list[Chart]:
    """Return the charts of a sweep for a paper."""
    settings, fields = sweep.settings(), sweep.fields
    wanted = [name for name in sweep.scenario["sweep"].get("objectives") or PREFERRED if name in MEASURES]
    explorer = explore(settings, (), fields, [*wanted, *PREFERRED])
    arms = arm_names(sweep.scenario, [row for one in settings for row in one.rows])
    chart = trade_off(explorer, arms)
    axes = [name for name in (explorer.x, explorer.y) if name]
    return [*([chart] if chart else []), *(curve.chart for curve in plot_curves(settings, axes, arms))]


def save_figure(chart: Chart, width: float, path: Path) -> None:
    """Write a chart as PDF and SVG with the given width in inches, without timestamps."""
    legend = chart.legend if len(chart.legend) > 1 else []
    longest = max((len(name) for name, _ in legend), default=0)
    columns = max(1, min(len(legend), int(width / (0.3 + 0.055 * longest))))
    with matplotlib.rc_context(PAPER):
        height = _height(chart, width) + 0.16 * (ceil(len(legend) / columns) + bool(chart.legend_note))
        drawn = Figure(figsize=(width, height), layout="constrained")
        chart.draw(drawn)
        _mark(drawn)
        if legend:
            looks = [Line2D([], [], **{"linewidth": 1.2, "markersize": 4, **look}) for _, look in legend]
            labels = [clean(name) for name, _ in legend]
            drawn.legend(
                looks,
                labels,
                loc="outside lower center",
                ncols=columns,
                frameon=False,
                fontsize=7,
                title=chart.legend_note or None,
                title_fontsize=7,
                handlelength=1.2,
                handletextpad=0.4,
                columnspacing=1,
            )
        drawn.savefig(path.with_name(f"{path.name}.svg"), metadata={"Date": None, "Title": chart.description})
        times = {"CreationDate": None, "ModDate": None}
        drawn.savefig(path.with_name(f"{path.name}.pdf"), metadata={**times, "Title": chart.description})


def _height(chart: Chart, width: float) -> float:
    if chart.panels == 1:
        return 0.75 * chart.size[1]
    across = side_by_side(width, chart.panels, chart.narrowest)
    return (1.75 if across > 1 else 1.5) * ceil(chart.panels / across)


def _mark(drawn: Figure) -> None:
    """Set the symbol of each arm's lines, and line widths for print."""
    lines: Sequence[Line2D] = [line for axes in drawn.axes for line in axes.lines]
    for line in lines:
        line.set_linewidth(min(line.get_linewidth(), 1.2))
        colour = re.fullmatch(r"C(\d+)", str(line.get_color()))
        if colour is None or int(colour[1]) >= SERIES:
            continue
        index = int(colour[1])
        if line.get_marker() == "o" and line.get_fillstyle() == "full":
            line.set_marker(MARKERS[index])
            line.set_markersize(min(line.get_markersize(), 4))
        elif line.get_drawstyle() != "default":
            line.set(marker=MARKERS[index], markersize=3, markevery=(0.02 * index, 0.25))
