"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_WORDS = 30
"""Maximum width of words that are never wrapped."""

_Kind = Literal["name", "figure", "word"]


@dataclass(frozen=True)
class _Column:
    heading: str
    cells: Sequence[str]
    kind: _Kind

    @property
    def least(self) -> int:
        """Return the minimum width of the column without broken names and numbers."""
        longest = max(map(cell_len, self.cells), default=0)
        if self.kind == "word":
            return max(cell_len(self.heading), min(longest, _WORDS))
        return max([longest, *map(cell_len, self.heading.split())])

    @property
    def most(self) -> int:
        """Return the minimum width of the column without any line break."""
        return max(map(cell_len, [self.heading, *self.cells]))


@dataclass(frozen=True)
class TerminalTable:
    """Table for the terminal. A table that is too wide is split into several tables that all begin with the names.

    If the names leave no room for another column, rows are numbered, and tables begin with the numbers.
    """

    title: str
    names: Sequence[_Column]
    others: Sequence[_Column]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the tables, each with as many columns as fit into the width of the console."""
        first, others, room = [*self.names], [*self.others], options.max_width
        if any(_width([*first, one]) > room for one in others):
            rows = range(1, len(first[0].cells) + 1)
            first, others = [_Column("#", [*map(str, rows)], "figure")], [*first, *others]
        groups = [first]
        for one in others:
            if groups[-1] is not first and _width([*groups[-1], one]) > room:
                groups.append(first)
            groups[-1] = [*groups[-1], one]
        for place, columns in enumerate(groups):
            yield _drawn(self.title if place == 0 else "", columns, room)


def make_terminal_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], words: int | None = None
) -> TerminalTable:
    """Return a table for the terminal with `words` columns of names, followed by columns of numbers.

    If `words` is None, the first column has names and the other columns have words.
    """
    names = 1 if words is None else words
    kind: _Kind = "word" if words is None else "figure"
    cells = zip(*rows, strict=True) if rows else [()] * len(headings)
    columns = [
        _Column(heading, own, "name" if place < names else kind)
        for place, (heading, own) in enumerate(zip(headings, cells, strict=True))
    ]
    return TerminalTable(title, columns[:names], columns[names:])


def _width(columns: Sequence[_Column]) -> int:
    """Return the minimum width of a table, including its spaces and edges."""
    return sum(column.least + 2 for column in columns) + 1


def _drawn(title: str, columns: Sequence[_Column], room: int) -> Table:
    """Return a table in its minimum width, plus the remaining room for columns that need it."""
    made = Table(title=title or None, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    left, widths = room - _width(columns), dict[int, int]()
    for place, column in sorted(enumerate(columns), key=lambda each: each[1].most - each[1].least):
        more = min(column.most - column.least, max(0, left // (len(columns) - len(widths))))
        widths[place], left = column.least + more, left - more
    widths[len(columns) - 1] += min(0, left)  # a name longer than the line is broken
    for place, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if column.kind == "figure" else "left"
        made.add_column(Text(column.heading), justify=justify, overflow="fold", width=widths[place])
    for row in zip(*(column.cells for column in columns), strict=True):
        made.add_row(*map(Text, row))
    return made
