"""Tables as commands print them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH = 200
"""Width of a table where there is no terminal to ask: nobody wants a file's lines cut at 80."""


def table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], words: int | None = None) -> Table:
    """Return a table of plain text; its first `words` columns (all where None) are aligned left, figures right."""
    made = Table(title=title or None, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for place, heading in enumerate(headings):
        named = place == 0 if words is None else place < words
        justify: Literal["left", "right"] = "left" if words is None or named else "right"
        made.add_column(Text(heading), justify=justify, overflow="fold", no_wrap=named and len(headings) > 1)
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def console() -> Console:
    """Return a console on the terminal, or one `_WIDTH` wide without a terminal."""
    found = Console(highlight=False, emoji=False)
    return found if found.is_terminal else Console(highlight=False, emoji=False, width=_WIDTH)
