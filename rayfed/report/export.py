"""Tables for papers and other programs: CSV with every row, LaTeX and Markdown with means and intervals."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import TYPE_CHECKING

import pyarrow as pa

from rayfed.analysis.figures import Grid, grid
from rayfed.analysis.formats import NONE
from rayfed.analysis.loading import OUTCOMES, Results
from rayfed.errors import UserError, nearest
from rayfed.privacy.printing import at_most

if TYPE_CHECKING:
    from pandas import DataFrame

FORMATS = ("csv", "latex", "markdown")
"""Formats of a table; `rayfed.report.share` copies a folder."""


def export(results: Results, format: str, table: str = OUTCOMES) -> str:
    """Return a table of a run or sweep as text.

    CSV has a table's rows as they are, save that text which a spreadsheet would take for a formula has an apostrophe
    before it. LaTeX (for the package booktabs) and Markdown have the outcomes by setting, with
    the mean and half the 95 % interval over repeats, and other tables as they are. Columns of images are left out.
    Raises `UserError` for an unknown format or table.
    """
    if format not in FORMATS:
        raise UserError(f"cannot export as '{format}': {nearest(format, (*FORMATS, 'folder'))}")
    if format == "csv":
        return str(_in_every_text(_plain(results.table(table)), _no_formula).to_csv(index=False))
    if table == OUTCOMES:
        return _settings(grid(results.settings()), format)
    frame = _bounds_written(_plain(results.table(table)))
    if format == "markdown":
        return str(_in_every_text(frame, _markdown).to_markdown(index=False)) + "\n"
    return str(frame.to_latex(index=False, escape=True, na_rep="--", float_format="%.4g"))


def _settings(found: Grid, format: str) -> str:
    from pandas import DataFrame

    frame = DataFrame(found.rows, columns=found.headings)
    if format == "markdown":
        aligned = ["left"] * found.words + ["right"] * (len(found.headings) - found.words)
        frame = _in_every_text(frame, _markdown)
        return f"{frame.to_markdown(index=False, colalign=aligned, disable_numparse=True)}\n\n{found.note}\n"
    columns = "l" * found.words + "r" * (len(found.headings) - found.words)
    caption = found.note.replace("%", r"\%")
    text = frame.to_latex(index=False, escape=True, column_format=columns, caption=caption)
    return str(text).replace("±", r"$\pm$").replace(NONE, "--").replace("≥", r"$\ge$")  # for any engine and font


def _in_every_text(frame: DataFrame, change: Callable[[str], str]) -> DataFrame:
    """Return a frame with every text in it changed, headings among them."""
    changed = frame.map(lambda value: change(value) if isinstance(value, str) else value)
    changed.columns = [change(heading) for heading in frame.columns]
    return changed


def _bounds_written(frame: DataFrame) -> DataFrame:
    """Return a frame whose upper bounds are text already, so that nothing rounds them down."""
    bounds = [name for name in ("epsilon", "delta") if name in frame.columns]
    written = {name: [None if isnan(value) else at_most(value, 4) for value in frame[name]] for name in bounds}
    return frame.assign(**written)


def _no_formula(text: str) -> str:
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _markdown(text: str) -> str:
    """Return text as one cell of Markdown, without HTML."""
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").splitlines())


def _plain(table: pa.Table) -> DataFrame:
    return table.select([field.name for field in table.schema if not pa.types.is_binary(field.type)]).to_pandas()
