"""Charts as inline SVG: drawn by matplotlib's object API, coloured by the page's own style sheet.

Every colour that matplotlib writes is replaced by a CSS variable, so one drawing serves light and dark pages.
"""

from __future__ import annotations

import re
from html import escape
from io import StringIO
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

SERIES = 8
"""Number of colours before they repeat; after that the dashes change (see `dash`)."""
CLASSES = 10
"""Number of classes with a colour of their own in the label mix; further ones are drawn together."""
INK, GRID, SURFACE = "#010203", "#040506", "#070809"
"""Placeholders for the page's colours, as those that `series` and `class_colour` give."""
_DASHES = ("", "5 2", "1.5 1.5", "6 2 1.5 2")
_COLOURS = {
    INK: "--muted",
    GRID: "--line",
    SURFACE: "--surface",
    **{f"#a0a0{i:02x}": f"--series-{i}" for i in range(SERIES)},
    **{f"#b0b0{i:02x}": f"--class-{i}" for i in range(CLASSES + 1)},
}
"""Variables of the style sheet by the placeholder that is written into the SVG."""
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rayfed",
    "font.size": 9.5,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
}


def dash(index: int) -> str:
    """Return the SVG dash pattern of the arm at this index; empty for a solid line."""
    return _DASHES[index // SERIES % len(_DASHES)]


def figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty chart, with its size in inches."""
    drawn = Figure(figsize=(width, height), layout="constrained")
    return drawn, drawn.add_subplot()


def series(index: int) -> str:
    """Return the colour of the arm at this index."""
    return f"#a0a0{index % SERIES:02x}"


def class_colour(index: int) -> str:
    """Return the colour of the class, or client, at this index."""
    return f"#b0b0{index:02x}"


def dashes(index: int) -> Any:
    """Return `dash` as matplotlib takes it."""
    return tuple(float(length) for length in dash(index).split()) or (None, None)


def short(name: str, most: int = 18) -> str:
    """Return a name that fits beside an axis."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def clean(text: str) -> str:
    """Return a name that matplotlib does not read as a formula."""
    return text.replace("$", r"\$")


def svg(drawn: Figure, description: str) -> str:
    """Return the figure as an SVG element for an HTML page, with a description for those who do not see it."""
    buffer = StringIO()
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
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1)
