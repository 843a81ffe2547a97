"""Results are values: no code inspects a sentence, a label or a display name to find out what they mean."""

from __future__ import annotations

import ast

from tests.conftest import REPOSITORY

ROOMS = ("rayfed/evidence", "rayfed/results", "rayfed/report")
INSPECTIONS = {
    "partition", "rpartition", "split", "rsplit", "startswith", "endswith", "removeprefix", "removesuffix", "fullmatch",
    "match",
}  # fmt: skip
"""Methods that inspect a text."""
ALLOWED: dict[str, int] = {
    "rayfed/results/sweep_folder.py": 2,
    "rayfed/evidence/arms.py": 2,
    "rayfed/evidence/batch_sizes.py": 1,
    "rayfed/evidence/paired.py": 1,
    "rayfed/evidence/recommend.py": 1,
    "rayfed/evidence/settings.py": 1,
    "rayfed/report/statement/about.py": 1,
    "rayfed/report/export/tables.py": 1,
    "rayfed/report/export/figures.py": 1,
    "rayfed/report/export/redaction.py": 3,
    "rayfed/report/samples.py": 1,
    "rayfed/report/export/share.py": 4,
    "rayfed/report/html/svg.py": 2,
    "rayfed/report/html/sweep.py": 1,
    "rayfed/report/html/sweep_plots.py": 1,
    "rayfed/report/terminal/sweep.py": 2,
    "rayfed/report/text/tables.py": 1,
}
"""Inspections that are left: of the user's input, paths of fields, files and HTML. Numbers may only decrease."""


def inspections(path: str) -> list[int]:
    """Return the lines of a file that inspect a text, except methods of registries."""
    tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in INSPECTIONS
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "registry")
    ]


def test_no_text_is_inspected() -> None:
    files = [str(path.relative_to(REPOSITORY)) for room in ROOMS for path in (REPOSITORY / room).rglob("*.py")]
    found = {path: len(lines) for path in files if (lines := inspections(path))}
    assert found == ALLOWED
