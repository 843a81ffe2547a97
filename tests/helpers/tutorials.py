"""Run a tutorial: write its files, run its commands and Python code in order, and compare their output.

Only blocks with a language are used:

- a block with `title="FILE"` is written to FILE, and with `title="FILE (added)"` appended to it;
- `bash` is run by `bash -e`, and `python` without a title in one namespace per page;
- `text` is the output of the block before it: lines in order, with `...` for omitted lines.
"""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY

BLOCK = re.compile(r"^```(\w+)(?: title=\"(.+?)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"[-−+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
VOLATILE = re.compile(
    r"\S*/(?=runs/|my_images)"  # folder of runs and images
    r"|(?<=Results: )\S*/"  # folder of one run
    r"|(?<=-)\d{8}-\d{6}"  # start time of a run
    r"|\b\d+\.\d\d(?=\s+[\d,]+(?:\s|$))"  # seconds of a round, before its bytes
    r"|─+"  # rule of a table
    r"|[\d.]+ (?:s of training|s|min|clients/s)\b|[\d.]+ times as long|\d+:\d\d left|\bdone\b"  # speed
)
PROGRESS = re.compile(r"\d:\d\d left|time left|\b(?:trial|attack|observation) \d+ of \d+")
"""Lines that are printed only if work takes long. Pages show them only as lines of rounds."""
ROUND = re.compile(r"\s*\d+/\d+ ")
"""Start of a line on a round."""
CLOSE = 0.1
"""Relative tolerance of numbers, because rounding differs between processors and searches amplify it."""


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    language: str
    title: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page that have a language."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        language, title, inside = found.groups()
        yield Block(language, title or "", inside, text.count("\n", 0, found.start()) + 1)


def play(page: Path, folder: Path) -> Iterator[tuple[Block, str]]:
    """Run a page's blocks in a folder, and yield each block of output with the real output."""
    printed, names = "", dict[str, Any](__name__="__tutorial__")
    for block in blocks(page):
        if block.title:
            name, added, _ = block.title.partition(" (added)")
            with (folder / name).open("a" if added else "w") as file:
                file.write("\n" * bool(added) + block.text)
        elif block.language == "bash":
            printed = _shell(block, folder)
        elif block.language == "python":
            with redirect_stdout(io.StringIO()) as caught:
                exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
            printed = caught.getvalue()
        elif block.language == "text":
            yield block, printed


def _shell(block: Block, folder: Path) -> str:
    """Return the output of commands. Fails if one of them fails."""
    command = f'rayfed() {{ "{sys.executable}" -m rayfed "$@"; }}\n{block.text}'
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    here = str(Path(sys.executable).parent)  # the commands of this environment
    commands = os.pathsep.join([here, os.environ["PATH"]])
    environment = os.environ | {"COLUMNS": "200", "PATH": commands, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, f"line {block.line}:\n{block.text}\n{done.stdout}"
    return done.stdout


def differences(told: str, printed: str) -> str | None:
    """Return a message on the first line of a page that was not printed at its place. None if all were."""
    lines, place, skipped = [line.rstrip() for line in printed.splitlines() if _lasting(line)], 0, False
    for line in filter(str.strip, told.splitlines()):
        if line.strip() == "...":
            skipped = True
            continue
        until = len(lines) if skipped else place + 1
        found = next((at for at in range(place, min(until, len(lines))) if alike(line, lines[at])), None)
        if found is None:
            here = "\n".join(lines[place:until])
            return f"expected from the page:\n  {line.strip()}\nprinted:\n{here or '  nothing'}"
        place, skipped = found + 1, False
    return None


def alike(told: str, printed: str) -> bool:
    """Return whether two lines have the same words and close numbers, except for times, speeds and folders."""
    told, printed = VOLATILE.sub("", told), VOLATILE.sub("", printed)
    if NUMBER.sub("#", told).split() != NUMBER.sub("#", printed).split():
        return False
    return all(
        math.isclose(_number(one), _number(other), rel_tol=CLOSE)
        for one, other in zip(NUMBER.findall(told), NUMBER.findall(printed), strict=True)
    )


def _lasting(line: str) -> bool:
    return bool(line.strip()) and (bool(ROUND.match(line)) or not PROGRESS.search(line))


def _number(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-"))
