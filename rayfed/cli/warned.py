"""Filter that shows each warning of other packages once, although models are built several times."""

from __future__ import annotations

import sys
import warnings
from typing import TextIO


def warn_once() -> None:
    """Install a filter that shows each warning once, also after `catch_warnings` resets Python's own filter."""
    shown: set[tuple[str, type[Warning], str, int]] = set()
    usual = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        key = str(message), category, filename, lineno
        if key not in shown:
            shown.add(key)
            usual(message, category, filename, lineno, file or sys.stderr, line)

    warnings.showwarning = show
