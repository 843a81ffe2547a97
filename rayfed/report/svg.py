"""Charts, and how they become inline SVG that is coloured by the page's own style sheet.

A chart is drawn by matplotlib's object API in the style of the page, or in that of a paper (`rayfed.report.paper`).
Every colour that matplotlib writes is replaced by a CSS variable, so one drawing serves light and dark pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from math import ceil
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rayfed.analysis.summary import Row

SERIES = 10
"""Number of colours before they repeat; after that the dashes change (see `dash`)."""
CLASSES = 10
"""Number of classes with a colour of their own in the label mix; further ones are drawn together."""
MARKERS = "os^Dv*XPph"
"""Symbols of arms, or of attacks, where colours alone would not do."""
INK, SURFACE = f"C{SERIES + CLASSES + 1}", f"C{SERIES + CLASSES + 2}"
"""Colours of text and ground; like those that `series` and `class_colour` give, places in the style's cycle."""
_DASHES = ("", "5 2", "1.5 1.5", "6 2 1.5 2")
DASHES = len(_DASHES)
"""Number of dashes before they repeat."""
_INK, _GRID, _SURFACE = "#010203", "#040506", "#070809"
_COLOURS = {
    **{f"#a0a0{i:02x}": f"--series-{i}" for i in range(SERIES)},
    **{f"#b0b0{i:02x}": f"--class-{i}" for i in range(CLASSES + 1)},
    _INK: "--muted",
    _SURFACE: "--surface",
    _GRID: "--line",
}
"""Variables of the style sheet by the placeholder that is written into the SVG."""
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rayfed",
    "font.size": 9.5,
    "axes.prop_cycle": cycler(color=list(_COLOURS)),
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
    "figure.labelsize": "medium",
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
}


def dash(index: int) -> str:
    """Return the SVG dash pattern of the arm at this index; empty for a solid line."""
    return _DASHES[index // SERIES % len(_DASHES)]


@dataclass(frozen=True)
class Chart:
    """One chart, to be drawn in any style and size."""

    name: str
    """Name of its files."""
    description: str
    """What it shows, for those who do not see it."""
    size: tuple[float, float]
    """Width and height on the page, in inches."""
    draw: Callable[[Figure], None]
    """Draws it on an empty figure."""
    rows: Sequence[Row]
    """What is drawn."""
    legend: Sequence[tuple[str, dict[str, Any]]] = ()
    """(name, how its line looks) each; a page has its own legends."""
    panels: int = 1
    """Number of drawings side by side."""
    narrowest: float = 1.5
    """Least width of one of them, in inches."""
    legend_note: str = ""
    """What stands over the legend of a paper's figure."""


def panels(drawn: Figure, count: int, narrowest: float = 1.5) -> list[Axes]:
    """Return so many axes side by side, in several rows where they would be narrower than so many inches."""
    across = side_by_side(float(drawn.get_figwidth()), count, narrowest)
    return [drawn.add_subplot(ceil(count / across), across, place + 1) for place in range(count)]


def side_by_side(width: float, count: int, narrowest: float) -> int:
    """Return how many panels of at least so many inches fit into one row of a figure of this width."""
    return max(1, min(count, int(width // narrowest)))


def line(index: int) -> dict[str, Any]:
    """Return how the line of the arm at this index looks in a legend."""
    return {"color": series(index), "dashes": dashes(index), "marker": MARKERS[index % len(MARKERS)]}


def series(index: int) -> str:
    """Return the colour of the arm at this index."""
    return f"C{index % SERIES}"


def class_colour(index: int) -> str:
    """Return the colour of the class, or client, at this index."""
    return f"C{SERIES + index}"


def dashes(index: int) -> Any:
    """Return `dash` as matplotlib takes it."""
    return tuple(float(length) for length in dash(index).split()) or (None, None)


def short(name: str, most: int = 18) -> str:
    """Return a name that fits beside an axis."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def clean(text: str) -> str:
    """Return a name that matplotlib does not read as a formula."""
    return text.replace("$", r"\$")


def svg(chart: Chart) -> str:
    """Return a chart as an SVG element for an HTML page, with a description for those who do not see it."""
    buffer = StringIO()
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=chart.size, layout="constrained")
        chart.draw(drawn)
        drawn.savefig(buffer, format="svg", metadata={"Date": None})
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
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(chart.description)}"', 1)
