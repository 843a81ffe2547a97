"""Tables for papers and other programs: CSV with every row, LaTeX and Markdown with means and intervals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isnan
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rayfed.analysis.figures import OUTDONE, PARTLY, UNPROVEN, USELESS, Grid, grid
from rayfed.analysis.formats import NONE
from rayfed.analysis.loading import OUTCOMES, PAIRED, Results
from rayfed.analysis.paired import NO_PAIRS, paired_grid, paired_table
from rayfed.analysis.summary import Row
from rayfed.analysis.unanswered import BROKEN
from rayfed.errors import UserError, nearest
from rayfed.privacy.printing import at_least, at_most
from rayfed.report.caption import label, played
from rayfed.store.schemas import TABLES

if TYPE_CHECKING:
    from pandas import DataFrame

FORMATS = ("csv", "latex", "markdown")
"""Formats of a table; `rayfed.report.share` copies a folder."""


def export(
    results: Results,
    format: str,
    table: str = OUTCOMES,
    columns: Mapping[str, str | None] | None = None,
    against: str | None = None,
) -> str:
    """Return a table of a run or sweep as text.

    CSV has a table's rows as they are, save that text which a spreadsheet would take for a formula has an apostrophe
    before it. LaTeX (for the packages booktabs and graphicx) and Markdown have the outcomes by setting, with
    the mean and half the 95 % interval over repeats or, of a run, over its victims, and other tables as they are.
    `columns` of these are headings by name (`rayfed.analysis.figures.grid`), of differences their measures; the best
    figures are bold. The table of differences is to the arm `against`, by default the first. Columns of images are left
    out.
    Raises `UserError` for an unknown format, table, column or arm, and for what does not go together.
    """
    if format not in FORMATS:
        raise UserError(f"cannot export as '{format}': {nearest(format, (*FORMATS, 'folder'))}")
    if columns is not None and (format == "csv" or table not in (OUTCOMES, PAIRED)):
        raise UserError("columns can be chosen of the outcomes and pairs as latex or markdown; other tables have all")
    if against is not None and table != PAIRED:
        raise UserError("an arm that others are set against goes with the table of differences: --table paired")
    if table == PAIRED and format == "csv":
        return _csv(_plain(paired_table(results.paired(against))))
    if table == PAIRED:
        found = paired_grid(results.paired(against), columns)
        if found is None:
            raise UserError(f"'{results.url}' is {NO_PAIRS}")
        return _settings(_told(found, results.unfinished), format, results.scenario, table)
    if format == "csv":
        return _csv(_plain(results.table(table)))
    if table == OUTCOMES:
        found = _told(grid(results.with_intervals(), columns), results.unfinished)
        return _settings(found, format, results.scenario, own=list((columns or {}).values()))
    frame = _bounds_written(_plain(results.table(table)), table)
    if format == "markdown":
        frame = _in_every_text(frame, markdown_cell).astype(object)
        return str(frame.where(frame.notna(), None).to_markdown(index=False, missingval=NONE)) + "\n"
    text = frame.to_latex(index=False, escape=True, na_rep="--", float_format="%.4g")
    return _floating(text, _latex(played(results.scenario)), label(results.scenario, table))


def _told(found: Grid, sentence: str) -> Grid:
    """Return a table whose note has a sentence, if there is one that it does not have yet."""
    return replace(found, note=f"{found.note} {sentence}.".strip()) if sentence not in found.note else found


def as_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV, with every column that one of them has."""
    from pandas import DataFrame

    return _csv(DataFrame([dict(row) for row in rows]))


def _csv(frame: DataFrame) -> str:
    return str(_in_every_text(frame, _no_formula).to_csv(index=False))


def _settings(
    found: Grid, format: str, scenario: Mapping[str, Any], table: str = "", own: Sequence[str | None] = ()
) -> str:
    """Return a table of text; headings that are the user's `own` may hold LaTeX or Markdown."""
    from pandas import DataFrame

    escaped, bold = (markdown_cell, "**{}**") if format == "markdown" else (_latex, r"\textbf{{{}}}")
    rows = [[escaped(text) for text in cells] for cells in found.rows]
    for row, place in found.best:
        rows[row][place] = bold.format(rows[row][place])
    note = f"{found.note} Bold: the best value for those who protect data." if found.best else found.note
    figures = len(found.headings) - found.words
    headings = [heading if heading in own else escaped(heading) for heading in found.headings]
    frame = DataFrame(rows, columns=headings)
    if format == "markdown":
        aligned = ["left"] * found.words + ["right"] * figures
        return f"{frame.to_markdown(index=False, colalign=aligned, disable_numparse=True)}\n\n{note}\n"
    columns = "l" * found.words + "r" * figures
    return _floating(
        frame.to_latex(index=False, escape=False, column_format=columns),
        _latex(f"{played(scenario)} {note}".strip()),
        label(scenario, table),
    )


def _floating(tabular: str, caption: str, label: str) -> str:
    """Return a LaTeX table as a float that no column of text is too narrow for.

    It is shrunk to the width that there is where it needs more, and goes over both columns of a document where one
    would make it unreadable.
    """
    lines = tabular.splitlines()
    longest = max(len(re.sub(r"\\[a-z]+|[\\{}$&]", "", line)) for line in lines)
    float_ = "table*" if longest > _COLUMN else "table"
    return "\n".join(
        [
            r"% needs \usepackage{booktabs,graphicx}",
            rf"\begin{{{float_}}}",
            r"\centering",
            r"\setlength{\belowcaptionskip}{1ex}",
            rf"\caption{{{caption}}}",
            rf"\label{{{label}}}",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            *lines[:-1],
            f"{lines[-1]}}}",
            rf"\end{{{float_}}}",
            "",
        ]
    )


_COLUMN = 75
"""Letters in a row of a table which, shrunk, can still be read in one column of two."""
_LATEX = str.maketrans(
    {
        **{sign: rf"\{sign}" for sign in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "≥": r"$\ge$",
        "<": r"$<$",
        ">": r"$>$",
        NONE: "--",
        UNPROVEN: r"$^\dagger$",
        PARTLY: r"$^\P$",
        OUTDONE: r"$^\|$",
        BROKEN: r"$^\ddagger$",
        USELESS: r"$^\S$",
        "\n": " ",
    }
)
"""What LaTeX would take for commands, and signs that not every engine and font has."""


def _latex(text: str) -> str:
    """Return text for LaTeX; a number keeps its sign as a minus."""
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", text.translate(_LATEX))


def _in_every_text(frame: DataFrame, change: Callable[[str], str]) -> DataFrame:
    """Return a frame with every text in it changed, headings among them."""
    changed = frame.map(lambda value: change(value) if isinstance(value, str) else value)
    changed.columns = [change(heading) for heading in frame.columns]
    return changed


def _bounds_written(frame: DataFrame, table: str) -> DataFrame:
    """Return a frame whose bounds are text already, so that nothing rounds them to the side where they do not hold.

    All real numbers of the tables of what is proved are upper bounds, but the chance that one of them is about.
    """
    if table not in ("privacy", "proved"):
        return frame
    bounds = [field.name for field in TABLES[table] if pa.types.is_floating(field.type)]
    rounded = {name: at_least if name == "chance" else at_most for name in bounds}
    return frame.assign(
        **{name: [None if isnan(value) else to(value) for value in frame[name]] for name, to in rounded.items()}
    )


def _no_formula(text: str) -> str:
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def markdown_cell(text: str) -> str:
    """Return text as one cell of Markdown, without HTML."""
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").splitlines())


def _plain(table: pa.Table) -> DataFrame:
    """Return a table without images, and with lists of entries as JSON."""
    fields = [field for field in table.schema if not pa.types.is_binary(field.type)]
    entries = [f.name for f in fields if pa.types.is_list(f.type) and pa.types.is_struct(f.type.value_type)]
    frame = table.select([field.name for field in fields if field.name not in entries]).to_pandas()
    for name in entries:
        told = [None if value is None else json.dumps(value) for value in table[name].to_pylist()]
        frame.insert([field.name for field in fields].index(name), name, told)
    return frame
