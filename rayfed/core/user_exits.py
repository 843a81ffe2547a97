"""Convert exits of the user's code to errors, so that no command succeeds without a measurement.

Otherwise, a module that calls `sys.exit(0)` would end `rayfed audit --fail-above 15` with exit code 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ContextDecorator
from pathlib import Path
from types import FrameType

from rayfed.errors import UserError

_OURS = tuple(str(Path(__file__).resolve().parents[depth] / name) for depth, name in ((1, ""), (2, "actors")))
_PARSERS = ("argparse", "optparse", "getopt", "click", "typer", "absl", "fire", "docopt", "hydra", "jsonargparse")
"""Packages that parse the command line and end the process if they do not know an option."""


class exits_refused(ContextDecorator):
    """Context manager and decorator that raises a `UserError` with the user's file instead of a `SystemExit`."""

    def __enter__(self) -> None:
        """Start the block without an action."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Raise `UserError` instead of a `SystemExit`, or instead of a `StopIteration`, which generators would hide."""
        if isinstance(error, StopIteration) and (own := _own_frames(error)):
            raise UserError(f"your code raises StopIteration ({_place(own)}): {error}; raise another error") from error
        if not isinstance(error, SystemExit):
            return
        if isinstance(error.__context__, BrokenPipeError):  # rich exits if the output is closed
            raise error.__context__
        raise UserError(describe_exit(error)) from error


def describe_exit(error: BaseException) -> str:
    """Return an error message for an exit of the user's code, with the file, the line and the fix."""
    from traceback import walk_tb

    own = _own_frames(error)
    imported = any(frame.f_code.co_name == "<module>" for frame, _ in own)
    fix = 'move it under `if __name__ == "__main__":`' if imported else "raise an error instead"
    packages = {_package(frame) for frame, _ in walk_tb(error.__traceback__)}
    if packages.intersection(_PARSERS):
        return f"your code ends the process ({_place(own)}), because the code parses rayfed's command line; {fix}"
    return f"your code ends the process ({_place(own)}) with sys.exit or exit, so nothing was measured; {fix}"


def _own_frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return the frames of the user's code in an error's traceback, with their line numbers."""
    from traceback import walk_tb

    return [(frame, line) for frame, line in walk_tb(error.__traceback__) if not _belongs_to_others(frame)]


def _place(own: Sequence[tuple[FrameType, int]]) -> str:
    if not own:
        return "in a module that your code imports"
    frame, line = own[-1]
    return f"{Path(frame.f_code.co_filename).name}, line {line}"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _belongs_to_others(frame: FrameType) -> bool:
    """Return whether a frame belongs to rayfed, to a library, or to no file."""
    file, package = frame.f_code.co_filename, _package(frame)
    ours = package in ("rayfed", "actors") and str(Path(file).resolve()).startswith(_OURS)
    return ours or package in _PARSERS or file.startswith("<frozen") or "site-packages" in Path(file).parts
