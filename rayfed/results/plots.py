"""The report's charts as inline SVG: drawn by matplotlib's object API, coloured by the page's own style sheet.

Every colour that matplotlib writes is replaced by a CSS variable, so one drawing serves light and dark pages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from io import StringIO
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rayfed.results.summary import PSNR_CEILING, Arm, LabelMix, Leak, Row, measured

SERIES = 8
"""Colours before they repeat; after that the dashes change (see `dash`)."""
CLASSES = 10
"""Classes with a colour of their own in the label mix; further ones are drawn together."""
MOST_CLIENTS = 60
"""Clients that the label mix shows."""
MOST_MODELS = 30
"""Models and validators that the map of scores shows."""
_DASHES = ("", "5 2", "1.5 1.5", "6 2 1.5 2")
_MARKERS = "osD^vP*X"
_INK, _GRID, _SURFACE = "#010203", "#040506", "#070809"
_COLOURS = {
    _INK: "--muted",
    _GRID: "--line",
    _SURFACE: "--surface",
    **{f"#a0a0{i:02x}": f"--series-{i}" for i in range(SERIES)},
    **{f"#b0b0{i:02x}": f"--class-{i}" for i in range(CLASSES + 1)},
}
"""Placeholder written into the SVG -> the style sheet's variable."""
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rayfed",
    "font.size": 9.5,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
}


def dash(index: int) -> str:
    """The SVG dash pattern of the arm at this index; empty for a solid line."""
    return _DASHES[index // SERIES % len(_DASHES)]


def curve(rounds: Sequence[Row], arms: Sequence[Arm], column: str, label: str, as_share: bool = False) -> str | None:
    """One column of the rounds' table by round, a line an arm; None where it holds no value."""
    points = [
        [(row["round"], row[column]) for row in rounds if row["arm"] == arm.name and measured(row[column])]
        for arm in arms
    ]
    if not any(points):
        return None
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(3.6, 2.6)
        for index, series in enumerate(points):
            xs, ys = zip(*sorted(series), strict=True) if series else ((), ())
            marker = "o" if len(xs) <= 15 else ""
            axes.plot(xs, ys, color=_series(index), dashes=_dashes(index), linewidth=2, marker=marker, markersize=4.5)
        axes.set_xlabel("round")
        axes.set_title(label, loc="left", fontsize=10, fontweight="bold")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.margins(x=0.03)
        if as_share:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        return _svg(figure, f"{label} by round, one line an arm")


def trade_off(leaks: Sequence[Leak], arms: Sequence[Arm]) -> str | None:
    """Accuracy against mean PSNR, a point for every arm and attack; None where no point has both."""
    accuracy = {arm.name: arm.accuracy for arm in arms}
    order = [arm.name for arm in arms]
    points = [(leak, leak.psnr, height) for leak in leaks if leak.psnr and (height := accuracy[leak.arm]) is not None]
    if not points:
        return None
    attacks = list(dict.fromkeys(leak.attack for leak, _, _ in points))
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(4.6, 3.3)
        for leak, psnr, height in points:
            marker = _MARKERS[attacks.index(leak.attack) % len(_MARKERS)]
            colour = _series(order.index(leak.arm))
            axes.errorbar(psnr.mean, height, xerr=psnr.sd, color=colour, linewidth=1, alpha=0.55)
            axes.plot(psnr.mean, height, marker, color=colour, markersize=9, markeredgecolor=_SURFACE)
        for index, attack in enumerate(attacks):
            axes.plot([], [], _MARKERS[index % len(_MARKERS)], color=_INK, label=_clean(attack))
        axes.legend(
            loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, frameon=False, fontsize=9, handletextpad=0.1
        )
        axes.set_xlabel("mean PSNR of the reconstructions (dB)   leaks more →")
        axes.set_ylabel("test accuracy")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        axes.margins(0.12, 0.2)
        return _svg(figure, "Test accuracy against mean PSNR, one point an arm and attack; upper left is best")


def every_image(attacks: Sequence[Row], leaks: Sequence[Leak], arms: Sequence[Arm], most: int = 200) -> str | None:
    """The PSNR of every reconstruction, a row for every arm and attack; of more than `most`, evenly spaced ranks."""
    order = [arm.name for arm in arms]
    known = [leak for leak in leaks if leak.psnr]
    if not known:
        return None
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(4.6, 1.0 + 0.34 * max(len(known), 4))
        for place, leak in enumerate(known):
            mine = (row for row in attacks if (row["arm"], row["attack"]) == (leak.arm, leak.attack))
            values = sorted(min(row["psnr"], PSNR_CEILING) for row in mine if measured(row["psnr"]))
            shown = (
                values if len(values) <= most else [values[i * (len(values) - 1) // (most - 1)] for i in range(most)]
            )
            heights = [place + 0.11 * (i % 3 - 1) for i in range(len(shown))]
            axes.plot(
                shown, heights, "o", color=_series(order.index(leak.arm)), markersize=5, alpha=0.6, markeredgewidth=0
            )
            axes.plot([median(values)] * 2, [place - 0.32, place + 0.32], color=_INK, linewidth=1.6)
        names = [_clean(f"{_short(leak.arm)} · {_short(leak.attack)}") for leak in known]
        axes.set_yticks(range(len(known)), names)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("PSNR (dB)   leaks more →")
        return _svg(figure, "PSNR of every reconstructed image by arm and attack")


def label_bars(mix: LabelMix) -> str:
    """Stacked bars: how many samples of each class every client holds."""
    clients = mix.clients[:MOST_CLIENTS]
    layers = drawn_classes(mix)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(9.4, 2.9)
        base = [0] * len(clients)
        for index, (_, counts) in enumerate(layers):
            heights = counts[: len(clients)]
            axes.bar(range(len(clients)), heights, 0.82, base, color=_class(index), edgecolor=_SURFACE, linewidth=0.6)
            base = [low + height for low, height in zip(base, heights, strict=True)]
        axes.set_xticks(range(len(clients)), [str(client) for client in clients])
        if len(clients) > 30:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("client")
        axes.set_title("Training samples", loc="left", fontsize=10, fontweight="bold")
        axes.grid(axis="x", visible=False)
        axes.margins(x=0.01)
        return _svg(figure, "Training samples of each client by class, stacked")


def drawn_classes(mix: LabelMix) -> list[tuple[str, list[int]]]:
    """(class, samples by client) as drawn: past `CLASSES` of them, the largest by name and the others together."""
    layers = list(zip(mix.classes.values(), mix.counts, strict=True))
    if len(layers) <= CLASSES:
        return layers
    large = sorted(layers, key=lambda layer: sum(layer[1]), reverse=True)[:CLASSES]
    kept = {name for name, _ in large}
    rest = [counts for name, counts in layers if name not in kept]
    return [*large, (f"{len(rest)} other classes", [sum(column) for column in zip(*rest, strict=True)])]


def weight_lines(rows: Sequence[Row]) -> str:
    """The weights of one arm's clients by round, a line each; the first `CLASSES` have a colour of their own."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(4.6, 3.3)
        for index, client in enumerate(sorted({row["client"] for row in rows})):
            xs, ys = zip(*((row["round"], row["weight"]) for row in rows if row["client"] == client), strict=True)
            axes.plot(xs, ys, "o-", color=_class(min(index, CLASSES)), linewidth=1.6, markersize=3.5)
        axes.set_xlabel("round")
        axes.set_ylabel("weight")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.margins(x=0.03)
        return _svg(figure, "Weight of every client by round")


def score_map(rows: Sequence[Row]) -> str:
    """The accuracy of every model, a row each, with every validator, a column each, in one round of one arm."""
    clients = sorted({row["model"] for row in rows})[:MOST_MODELS]
    places = {client: place for place, client in enumerate(clients)}
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(4.6, 3.8)
        for row in rows:
            if row["model"] in places and row["validator"] in places:
                x, y, share = places[row["validator"]], places[row["model"]], row["accuracy"]
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=_series(0), alpha=share))
                if len(clients) <= 12:
                    ink = _SURFACE if share > 0.5 else _INK
                    axes.text(x, y, f"{100 * share:.0f}", ha="center", va="center", color=ink, fontsize=8)
        names = [str(client) for client in clients]
        axes.set_xticks(range(len(clients)), names)
        axes.set_yticks(range(len(clients)), names)
        axes.set_xlim(-0.5, len(clients) - 0.5)
        axes.set_ylim(len(clients) - 0.5, -0.5)
        axes.grid(visible=False)
        axes.set_xlabel("on the held-out samples of client")
        axes.set_ylabel("model of client")
        return _svg(figure, "Accuracy of every client's model on every client's held-out samples")


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _series(index: int) -> str:
    return f"#a0a0{index % SERIES:02x}"


def _class(index: int) -> str:
    return f"#b0b0{index:02x}"


def _dashes(index: int) -> Any:
    return tuple(float(length) for length in dash(index).split()) or (None, None)


def _short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _clean(text: str) -> str:
    """A name that matplotlib shall not read as a formula."""
    return text.replace("$", r"\$")


def _svg(figure: Figure, description: str) -> str:
    """The figure as an SVG element for an HTML page, with a description for those who do not see it."""
    buffer = StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = (
        re.sub(r'\s(?:xmlns(?::xlink)?|width|height|version)="[^"]*"', "", text.partition(">")[0])
        + text[text.index(">") :]
    )
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    for placeholder, variable in _COLOURS.items():
        text = text.replace(placeholder, f"var({variable})")
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1)
