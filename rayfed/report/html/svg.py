"""Charts as inline SVG, with colours from the style sheet of the page.

Charts are drawn with matplotlib in the style of the page, or of a paper (`rayfed.report.export.figures`). In SVG each
colour is replaced by a CSS variable, so that one drawing works in light and dark mode.
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
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rayfed.evidence.rows import Row

SERIES = 10
"""Number of colours; further arms repeat them with other dashes (see `dash`)."""
CLASSES = 10
"""Number of classes with their own colour in the chart of labels; further ones are merged."""
MARKERS = "os^Dv*XPph"
"""Symbols of arms or attacks, in addition to colours."""
INK, SURFACE = f"C{SERIES + CLASSES + 1}", f"C{SERIES + CLASSES + 2}"
"""Colours of text and background, as positions in the colour cycle like those of `series` and `class_colour`."""
_DASHES = ("", "5 2", "1.5 1.5", "6 2 1.5 2")
DASHES = len(_DASHES)
"""Number of dash patterns."""
_INK, _GRID, _SURFACE = "#010203", "#040506", "#070809"
_COLOURS = {
    **{f"#a0a0{i:02x}": f"--series-{i}" for i in range(SERIES)},
    **{f"#b0b0{i:02x}": f"--class-{i}" for i in range(CLASSES + 1)},
    _INK: "--muted",
    _SURFACE: "--surface",
    _GRID: "--line",
}
"""CSS variables by their placeholder colour in the SVG."""
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
    """Return the SVG dash pattern of the arm at `index`; empty for a solid line."""
    return _DASHES[index // SERIES % len(_DASHES)]


@dataclass(frozen=True)
class Chart:
    """Chart that can be drawn in any style and size."""

    name: str
    """Name of the files."""
    description: str
    """Text alternative."""
    size: tuple[float, float]
    """Width and height on the page, in inches."""
    draw: Callable[[Figure], None]
    """Draw the chart on an empty figure."""
    rows: Sequence[Row]
    """Data of the chart."""
    legend: Sequence[tuple[str, dict[str, Any]]] = ()
    """Entries (name, line style), for figures of papers only."""
    panels: int = 1
    """Number of panels side by side."""
    narrowest: float = 1.5
    """Minimum width of a panel in inches."""
    legend_note: str = ""
    """Title of the legend in a figure of a paper."""


def panels(drawn: Figure, count: int, narrowest: float = 1.5) -> list[Axes]:
    """Return `count` axes side by side, in several rows if an axes would be narrower than `narrowest` inches."""
    across = side_by_side(float(drawn.get_figwidth()), count, narrowest)
    return [drawn.add_subplot(ceil(count / across), across, place + 1) for place in range(count)]


def side_by_side(width: float, count: int, narrowest: float) -> int:
    """Return the number of panels of at least `narrowest` inches that fit into `width` inches."""
    return max(1, min(count, int(width // narrowest)))


def line(index: int) -> dict[str, Any]:
    """Return the legend's line style for the arm at `index`."""
    return {"color": series(index), "dashes": dashes(index), "marker": MARKERS[index % len(MARKERS)]}


def series(index: int) -> str:
    """Return the colour of the arm at `index`."""
    return f"C{index % SERIES}"


def class_colour(index: int) -> str:
    """Return the colour of the class or client at `index`."""
    return f"C{SERIES + index}"


def dashes(index: int) -> Any:
    """Return the dash pattern of the arm at `index` in matplotlib's format."""
    return tuple(float(length) for length in dash(index).split()) or (None, None)


def short(name: str, most: int = 18) -> str:
    """Return a name, shortened to at most `most` characters."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def clean(text: str) -> str:
    """Escape `$` in a name, so that matplotlib does not parse a formula."""
    return text.replace("$", r"\$")


def svg(chart: Chart) -> Markup:
    """Return a chart as an SVG element with a text alternative."""
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
    return Markup(text.replace("<svg", f'<svg role="img" aria-label="{escape(chart.description)}"', 1))
