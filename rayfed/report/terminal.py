"""Console that commands and the Python API print on."""

from __future__ import annotations

import os

from rich.console import Console

_WIDTH = 200
"""Width of a table where there is no terminal to ask: nobody wants a file's lines cut at 80."""


def console() -> Console:
    """Return a console on the terminal or in the notebook, or one `COLUMNS` or `_WIDTH` wide where there is neither."""
    found = Console(highlight=False, emoji=False)
    if found.is_terminal or found.is_jupyter or os.environ.get("COLUMNS", "").isdigit():
        return found
    return Console(highlight=False, emoji=False, width=_WIDTH)
