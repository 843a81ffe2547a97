"""Snapshots of all wording, one text file for each surface; `python -m tests.wording` rewrites them.

Other tests assert states, reasons and values only. Change a sentence, rewrite the snapshots and read their diff.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.wording import sentences, surfaces
from tests.wording.runs import Case, make_cases

FOLDER = Path(__file__).parent
SURFACES: dict[str, Callable[[Sequence[Case]], str]] = {
    "sentences": lambda cases: sentences.render(),
    "terminal": surfaces.terminal,
    "progress": lambda cases: surfaces.progress(),
    "page": surfaces.page,
    "statement": surfaces.statement,
    "gate": surfaces.gate,
    "tables": surfaces.tables,
    "sweep": lambda cases: surfaces.sweep(),
}
"""Name of each snapshot, and the function that makes its text from the runs."""


def path_of(surface: str) -> Path:
    """Return the file of a snapshot."""
    return FOLDER / f"{surface}.txt"


def render(surface: str) -> str:
    """Return the present text of a surface."""
    with TemporaryDirectory() as folder:
        text = SURFACES[surface](make_cases(folder))
        return surfaces.mask(text, folder)


def rewrite() -> None:
    """Write all snapshots."""
    for surface in SURFACES:
        path_of(surface).write_text(render(surface), encoding="utf-8")
