"""Turn exits of the user's code into errors, so that no command ends as if it had measured something.

A module that calls `sys.exit(0)` would otherwise end `rayfed audit --fail-above 15` with exit code 0.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import ContextDecorator
from pathlib import Path
from types import FrameType

from rayfed.errors import UserError

_OURS = tuple(str(Path(__file__).resolve().parents[depth] / name) for depth, name in ((0, ""), (1, "actors")))
_PARSERS = ("argparse", "optparse", "getopt", "click", "typer", "absl", "fire", "docopt", "hydra", "jsonargparse")
"""Packages that end the process when the command line is not theirs."""


class exits_refused(ContextDecorator):
    """Turn a `SystemExit` into a `UserError` that names the file that raised it; also a decorator of functions."""

    def __enter__(self) -> None:
        """Do nothing: only the end matters."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Raise a `UserError` in place of a `SystemExit`, and of a `StopIteration`, which generators cannot pass on."""
        if isinstance(error, StopIteration) and (own := _own_frames(error)):
            raise UserError(f"your code raises StopIteration ({_place(own)}): {error}") from error
        if not isinstance(error, SystemExit):
            return
        if isinstance(error.__context__, BrokenPipeError):  # rich exits if the reader of the output is gone
            raise error.__context__
        raise UserError(describe_exit(error)) from error


def describe_exit(error: BaseException) -> str:
    """Return a message on an exit: the user's file and line, and what to change there."""
    own = _own_frames(error)
    imported = any(frame.f_code.co_name == "<module>" for frame, _ in own)
    fix = 'move that under `if __name__ == "__main__":`' if imported else "raise an error instead"
    packages = {_package(frame) for frame, _ in traceback.walk_tb(error.__traceback__)}
    if packages.intersection(_PARSERS):
        return f"your code ends the process ({_place(own)}): it parses the command line, which is rayfed's here; {fix}"
    return f"your code ends the process ({_place(own)}), by sys.exit or exit, so nothing was measured; {fix}"


def _own_frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return the frames of the user's code on the way to an error, with their lines."""
    return [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if not _belongs_to_others(frame)]


def _place(own: Sequence[tuple[FrameType, int]]) -> str:
    if not own:
        return "a module that it imports"
    frame, line = own[-1]
    return f"{Path(frame.f_code.co_filename).name}, line {line}"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _belongs_to_others(frame: FrameType) -> bool:
    """Return whether a frame is of rayfed's code, of a library's, or without a file."""
    file, package = frame.f_code.co_filename, _package(frame)
    ours = package in ("rayfed", "actors") and str(Path(file).resolve()).startswith(_OURS)
    return ours or package in _PARSERS or file.startswith("<frozen") or "site-packages" in Path(file).parts
