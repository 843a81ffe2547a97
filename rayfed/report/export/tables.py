"""Tables for papers and other programs: CSV with every row, LaTeX and Markdown with means and intervals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isnan
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rayfed.errors import UserError, nearest, require_extra
from rayfed.evidence.paired import paired_table
from rayfed.evidence.rows import Row
from rayfed.privacy.printing import format_lower, format_upper
from rayfed.report.text.captions import label, scenario_caption
from rayfed.report.text.figures import FAILED, OUTDONE, PARTLY, UNPROVEN, USELESS
from rayfed.report.text.formats import NONE
from rayfed.report.text.paired import NO_PAIRS, paired_grid
from rayfed.report.text.tables import Grid, grid
from rayfed.results.loading import OUTCOMES, PAIRED, Results
from rayfed.store.schemas import TABLES

if TYPE_CHECKING:
    from pandas import DataFrame

FORMATS = ("csv", "latex", "markdown")
"""Formats of a table; `rayfed.report.export.share` copies a folder."""


def export_table(
    results: Results,
    format: str,
    table: str = OUTCOMES,
    columns: Mapping[str, str | None] | None = None,
    against: str | None = None,
) -> str:
    """Return a table of a run or sweep as text.

    CSV has the rows of the table. Text that a spreadsheet would read as a formula gets a leading apostrophe. LaTeX
    (packages booktabs and graphicx) and Markdown have the outcomes by setting, with the mean and half the 95 % interval
    over repeats (of a run: over victims), and other tables unchanged. The best values are bold. `columns` has the
    headings of these columns by name (`rayfed.report.text.tables.grid`), or of the measures of the differences.
    Differences are to the arm `against`, by default the first. Columns of images are left out.

    Raises `UserError` for an unknown format, table, column or arm, and for options that exclude each other.
    """
    if format not in FORMATS:
        raise UserError(f"cannot export as '{format}': {nearest(format, (*FORMATS, 'folder'))}")
    require_extra("export", f"--format {format}", "pandas")
    if format == "markdown":
        require_extra("export", "--format markdown", "tabulate")
    if columns is not None and (format == "csv" or table not in (OUTCOMES, PAIRED)):
        raise UserError("--columns needs the table of outcomes or of differences, as latex or markdown")
    if against is not None and table != PAIRED:
        raise UserError("--against needs the table of differences: add --table paired")
    if table == PAIRED and format == "csv":
        return _csv(_plain(paired_table(results.paired(against))))
    if table == PAIRED:
        found = paired_grid(results.paired(against), columns)
        if found is None:
            raise UserError(f"'{results.url}' is {NO_PAIRS}")
        return _settings(_with_note(found, results.unfinished), format, results.scenario, table)
    if format == "csv":
        return _csv(_plain(results.table(table)))
    if table == OUTCOMES:
        found = _with_note(grid(results.with_intervals(), columns), results.unfinished)
        return _settings(found, format, results.scenario, own=list((columns or {}).values()))
    frame = _bounds_written(_plain(results.table(table)), table)
    if format == "markdown":
        frame = _in_every_text(frame, markdown_cell).astype(object)
        return str(frame.where(frame.notna(), None).to_markdown(index=False, missingval=NONE)) + "\n"
    text = frame.to_latex(index=False, escape=True, na_rep="--", float_format="%.4g")
    return _floating(text, _latex(scenario_caption(results.scenario)), label(results.scenario, table))


def _with_note(found: Grid, sentence: str) -> Grid:
    """Return a table with a sentence added to its note, unless the note has it."""
    return replace(found, note=f"{found.note} {sentence}.".strip()) if sentence not in found.note else found


def as_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV text, with the union of the rows' columns."""
    require_extra("export", "--figures", "pandas")
    from pandas import DataFrame

    return _csv(DataFrame([dict(row) for row in rows]))


def _csv(frame: DataFrame) -> str:
    return str(_in_every_text(frame, _no_formula).to_csv(index=False))


def _settings(
    found: Grid, format: str, scenario: Mapping[str, Any], table: str = "", own: Sequence[str | None] = ()
) -> str:
    """Return a table as text; headings in `own` are the user's and may have LaTeX or Markdown."""
    from pandas import DataFrame

    escaped, bold = (markdown_cell, "**{}**") if format == "markdown" else (_latex, r"\textbf{{{}}}")
    rows = [[escaped(text) for text in cells] for cells in found.rows]
    for row, place in found.best:
        rows[row][place] = bold.format(rows[row][place])
    note = f"{found.note} Bold: the best value for data protection." if found.best else found.note
    figures = len(found.headings) - found.words
    headings = [heading if heading in own else escaped(heading) for heading in found.headings]
    frame = DataFrame(rows, columns=headings)
    if format == "markdown":
        aligned = ["left"] * found.words + ["right"] * figures
        return f"{frame.to_markdown(index=False, colalign=aligned, disable_numparse=True)}\n\n{note}\n"
    columns = "l" * found.words + "r" * figures
    return _floating(
        frame.to_latex(index=False, escape=False, column_format=columns),
        _latex(f"{scenario_caption(scenario)} {note}".strip()),
        label(scenario, table),
    )


def _floating(tabular: str, caption: str, label: str) -> str:
    """Return a LaTeX table as a float that fits the text width.

    A wide table is scaled down. If it would be unreadable in one column, it spans both columns.
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
"""Maximum number of characters of a row that is readable in one of two columns."""
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
        FAILED: r"$^\ddagger$",
        USELESS: r"$^\S$",
        "\n": " ",
    }
)
"""Characters that LaTeX reads as commands, and signs that some engines or fonts lack."""


def _latex(text: str) -> str:
    """Return text escaped for LaTeX, with minus signs of numbers."""
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", text.translate(_LATEX))


def _in_every_text(frame: DataFrame, change: Callable[[str], str]) -> DataFrame:
    """Return a frame with `change` applied to all texts, including headings."""
    changed = frame.map(lambda value: change(value) if isinstance(value, str) else value)
    changed.columns = [change(heading) for heading in frame.columns]
    return changed


def _bounds_written(frame: DataFrame, table: str) -> DataFrame:
    """Return a frame with bounds as text, rounded to the side on which they hold.

    All floats of the tables `privacy` and `proved` are upper bounds, except `chance`.
    """
    if table not in ("privacy", "proved"):
        return frame
    bounds = [field.name for field in TABLES[table] if pa.types.is_floating(field.type)]
    rounded = {name: format_lower if name == "chance" else format_upper for name in bounds}
    return frame.assign(
        **{name: [None if isnan(value) else to(value) for value in frame[name]] for name, to in rounded.items()}
    )


def _no_formula(text: str) -> str:
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def markdown_cell(text: str) -> str:
    """Escape a text for one cell of a Markdown table."""
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").splitlines())


def _plain(table: pa.Table) -> DataFrame:
    """Return a table without binary columns, and with lists and structs as JSON."""
    fields = [field for field in table.schema if not pa.types.is_binary(field.type)]
    entries = [field.name for field in fields if pa.types.is_nested(field.type)]
    frame = table.select([field.name for field in fields if field.name not in entries]).to_pandas()
    for name in entries:
        texts = [None if value is None else json.dumps(value) for value in table[name].to_pylist()]
        frame.insert([field.name for field in fields].index(name), name, texts)
    return frame
