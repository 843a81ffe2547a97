"""What must not be in any file of the repository."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.conftest import REPOSITORY

CONFLICT = re.compile(rb"^(?:<{7}|>{7}|\|{7})(?: .*)?$|^={7}$", re.MULTILINE)
"""The lines that git leaves between two versions. A heading of a Markdown file that is underlined by exactly seven
signs would look the same: write `# Heading`."""


def files(root: Path) -> list[Path]:
    """The files that git tracks; where there is no git, as in an sdist, all but hidden ones."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        listed = ""
    tracked = [root / name for name in listed.split("\0") if name]
    found = tracked or [path for path in root.rglob("*") if not _hidden(path.relative_to(root))]
    return [path for path in found if path.is_file()]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def conflicts(root: Path) -> list[str]:
    """`FILE:LINE: MARKER` of every conflict marker."""
    found = []
    for path in files(root):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        for marker in CONFLICT.finditer(content):
            line = content.count(b"\n", 0, marker.start()) + 1
            found.append(f"{path.relative_to(root)}:{line}: {marker[0].decode(errors='replace')}")
    return found


def test_no_file_has_conflict_markers() -> None:
    found = conflicts(REPOSITORY)
    assert not found, "conflicts that nobody has resolved:\n" + "\n".join(found)


def test_conflict_markers_are_found_without_git(tmp_path: Path) -> None:
    markers = [sign * 7 + name for sign, name in (("<", " HEAD"), ("|", " base"), ("=", ""), (">", " theirs"))]
    (tmp_path / "page.md").write_bytes("\r\n".join(["# Page", *markers, ""]).encode())
    (tmp_path / "heading.md").write_text("A heading\n=========\n")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "left.md").write_text(markers[0])
    assert conflicts(tmp_path) == [f"page.md:{line}: {marker}" for line, marker in enumerate(markers, 2)]
