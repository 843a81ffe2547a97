"""Console on which the commands and the Python API print."""

from __future__ import annotations

import os

from rich.console import Console

_WIDTH = 200
"""Width of tables if the output is not a terminal, so that lines in files are not cut at 80 columns."""


def console() -> Console:
    """Return a console for the terminal or notebook; otherwise with the width `COLUMNS` or `_WIDTH`."""
    found = Console(highlight=False, emoji=False)
    if found.is_terminal or found.is_jupyter or os.environ.get("COLUMNS", "").isdigit():
        return found
    return Console(highlight=False, emoji=False, width=_WIDTH)
