"""Turn exits of the user's code into errors, so that no command ends as if it had measured something.

A module that calls `sys.exit(0)` would otherwise end `rayfed audit --fail-above 15` with exit code 0.
"""

from __future__ import annotations

import traceback
from contextlib import ContextDecorator
from pathlib import Path

from rayfed.errors import UserError

_OURS = tuple(str(Path(__file__).resolve().parents[depth] / name) for depth, name in ((0, ""), (1, "actors")))
_PARSERS = ("argparse", "optparse", "getopt", "click", "typer", "absl", "fire", "docopt", "hydra", "jsonargparse")
"""Packages that end the process when the command line is not theirs."""


class exits_refused(ContextDecorator):
    """Turn a `SystemExit` into a `UserError` that names the file that raised it; also a decorator of functions."""

    def __enter__(self) -> None:
        """Do nothing: only the end matters."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Raise a `UserError` in place of a `SystemExit`."""
        if not isinstance(error, SystemExit):
            return
        if isinstance(error.__context__, BrokenPipeError):  # rich exits if the reader of the output is gone
            raise error.__context__
        raise UserError(describe_exit(error)) from error


def describe_exit(error: BaseException) -> str:
    """Return a message on an exit: the user's file and line, and what to change there."""
    frames = [
        (
            frame.f_code.co_filename,
            line,
            str(frame.f_globals.get("__name__", "")).partition(".")[0],
            frame.f_code.co_name,
        )
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [(file, line, name) for file, line, package, name in frames if not _belongs_to_others(file, package)]
    place = f"{Path(own[-1][0]).name}, line {own[-1][1]}" if own else "a module that it imports"
    imported = any(name == "<module>" for _, _, name in own)
    fix = 'move that under `if __name__ == "__main__":`' if imported else "raise an error instead"
    if any(package in _PARSERS for _, _, package, _ in frames):
        return f"your code ends the process ({place}): it parses the command line, which is rayfed's here; {fix}"
    return f"your code ends the process ({place}), by sys.exit or exit, so nothing was measured; {fix}"


def _belongs_to_others(file: str, package: str) -> bool:
    """Return whether a file is rayfed's, a library's, or a frame without a file."""
    ours = package in ("rayfed", "actors") and str(Path(file).resolve()).startswith(_OURS)
    return ours or package in _PARSERS or file.startswith("<frozen") or "site-packages" in Path(file).parts
