"""Warnings of other packages, each shown once: a model is built several times, and would warn as often."""

from __future__ import annotations

import sys
import warnings
from typing import TextIO


def warn_once() -> None:
    """Have Python show a warning once, where every `catch_warnings` makes it forget which ones it has shown."""
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
