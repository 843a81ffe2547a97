"""Writer of the evidence statement: HTML for A4 paper and Markdown, with the same sections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rayfed.errors import UserError
from rayfed.report.export.redaction import redact as redacted_copy
from rayfed.report.export.tables import markdown_cell
from rayfed.report.html.page import make_environment, make_policy
from rayfed.report.html.unscored import TABLE
from rayfed.report.statement.about import read_about
from rayfed.report.statement.content import Block, Statement, StatementPicture, StatementTable
from rayfed.results.loading import Run
from rayfed.results.sweep_folder import is_sweep
from rayfed.store.folder import RunFolder
from rayfed.version import __version__


def write_statement(folder: RunFolder, about: Path | None = None, redacted: bool = False) -> list[str]:
    """Write `statement.html` and `statement.md` into a run's folder, and return the paths or URLs of the files.

    `about` is a file with the user's entries; a copy is kept in the folder. If `redacted`, the files are
    `statement-redacted.html` and `.md`, without samples, labels, messages and file names. Raises `UserError` for a
    sweep and for unknown entries, `RunError` for an unreadable table.
    """
    if is_sweep(folder):
        raise UserError(f"{folder.url} is a sweep; give one run, such as a folder below its trials/")
    answers = read_about(folder, about)
    if not redacted:
        return _write(Statement(folder, answers, folder), "statement")
    with redacted_copy(Run(folder)) as copy:
        return _write(Statement(copy, answers, folder, redacted=True), "statement-redacted")


def check_scored(path: str) -> None:
    """Raise `UserError` if the folder at `path` has only unscored reconstructions, without recorded originals."""
    if RunFolder.at(path).exists(TABLE):
        raise UserError(
            f"{path}: NOT MEASURED, because the originals were not recorded and no reconstruction has a score. Record "
            f"again with truth=True, on data that may be stored, and replay the recording"
        )


def _write(statement: Statement, name: str) -> list[str]:
    pages = {f"{name}.html": as_html(statement), f"{name}.md": as_markdown(statement)}
    for file, text in pages.items():
        statement.original.write_text(file, text)
    return [f"{statement.original.url}/{file}" for file in pages]


def as_html(statement: Statement) -> str:
    """Return a statement as one self-contained HTML file without scripts."""
    contents = {"statement": statement, "version": __version__, "policy": make_policy([])}
    return make_environment().get_template("statement.html.j2").render(contents)


def as_markdown(statement: Statement) -> str:
    """Return a statement as Markdown."""
    lines = [f"# Statement on leakage: {markdown_cell(statement.title)}", *statement.lead]
    for number, section in enumerate(statement.sections, 1):
        lines += [f"## {number}. {section.title}", *([f"*{section.answers}*"] if section.answers else [])]
        lines += ["\n".join(_lines(block)) for block in section.blocks]
    return "\n\n".join([*lines, f"Made by rayfed {__version__}."]) + "\n"


def _lines(block: Block) -> Iterator[str]:
    if isinstance(block, str):
        yield markdown_cell(block)
    elif isinstance(block, StatementTable):
        for row in (block.headings, ["---"] * len(block.headings), *block.rows):
            yield f"| {' | '.join(markdown_cell(cell) for cell in row)} |"
    elif isinstance(block, StatementPicture):
        shown = {"true": block.true, "reconstructed": block.reconstructed}
        for name, sample in shown.items():
            if sample is None:
                yield f"- {name}: not shown"
            else:
                yield f"- {name}: " + (f"![{name}]({sample})" if block.is_image else markdown_cell(sample))
        yield f"- {block.caption}"
    else:
        yield from (f"- {markdown_cell(point)}" for point in block)
