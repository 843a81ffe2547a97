"""Exceptions with messages for the user: what is wrong, where, and what to do.

A `UserError` says what is wrong, where, and what to do; the command line prints it without a traceback and
ends with exit code 2. Anything else is a defect of ours: exit code 1.
"""

from __future__ import annotations

import re
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from signal import Signals
from typing import Any, ClassVar


class UserError(Exception):
    """Error that the user can fix, in a scenario, a file or a resource request."""


class ScenarioError(UserError):
    """An inconsistent scenario; carries every problem found, not only the first.

    `problems` are the places of fields, as keys and indices, and what is wrong there; none where it is no document.
    """

    def __init__(self, message: str, problems: Sequence[tuple[tuple[Any, ...], str]] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class DataError(UserError):
    """A data set that is missing, truncated or mislabelled; names the file and what was expected."""


class ResourceError(UserError):
    """A request for actors that the cluster cannot satisfy."""


class NotPortable(ResourceError):
    """A process whose instruction set is not fixed as the scenario asks; the command line restarts itself."""


class RunError(UserError):
    """A run folder that cannot be written, read or resumed."""


class LeaseError(RunError):
    """A run folder in which another driver writes: it is alive, or has taken this one's run over."""


class ClientError(UserError):
    """A client's work that failed; names client, round, arm and reason, or what its round lacks without it."""


class OverdueError(UserError):
    """A call that took longer than `resources.timeout`; its process may still hang."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(
            f"{what} took longer than resources.timeout allows ({seconds:g} s): raise it, or fix what hangs; complete "
            f"rounds are kept and `rayfed resume` goes on from there"
        )


class ProtectionError(UserError):
    """An encrypted update that cannot be added or opened: tampered with, truncated, of other keys or parameters.

    It is raised before the server's step: the round is not applied, and the run can be resumed.
    """


class Killed(KeyboardInterrupt):
    """A signal that ends the process, such as SIGTERM; code that handles Ctrl-C handles it alike."""

    came: ClassVar[int | None] = None
    """Number of the signal that has come, for libraries that raise a plain `KeyboardInterrupt` where they waited."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"killed by {Signals(signal).name}")
        self.signal = signal


@contextmanager
def needing(package: str, extra: str, what: str) -> Iterator[None]:
    """Turn a failed import of an optional package into a `DataError` that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise DataError(f"{what} needs {package}, which is not installed: pip install 'rayfed[{extra}]'") from error


def describe_error(error: BaseException) -> str:
    """Return in one line which error was raised, and where; a `UserError` describes itself."""
    said = " ".join(plain(str(error)).split())
    if isinstance(error, UserError):
        return said
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {said}{place}"


@contextmanager
def noting_errors(note: Callable[[str], object]) -> Iterator[None]:
    """Pass an error in the block to `note` instead of raising it: metrics and reports must not end a run.

    A `SystemExit` of the user's code counts as an error. A closed output, another driver of the run folder and a
    debugger that was left still end the run.
    """
    try:
        yield
    except (BrokenPipeError, LeaseError, BdbQuit):
        raise
    except (Exception, SystemExit) as error:
        note(describe_error(error))


_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Escape sequences of terminals, and control characters but tabs and the ends of lines."""


def plain(message: str) -> str:
    """Return a message without the colours and control characters that libraries add."""
    return _CONTROL.sub("", message)


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return which names are valid: `did you mean 'sigma'? (valid: clip, sigma)`, or `valid are clip, sigma`.

    The initials of a name mean it, too: `bce` is `binary_cross_entropy`.
    """
    names = sorted(valid)
    initials = [one for one in names if len(name) > 1 and "".join(word[:1] for word in one.split("_")) == name.lower()]
    close = initials or get_close_matches(name, names, n=1, cutoff=0.6)
    known = ", ".join(names) or "none"
    return f"did you mean '{close[0]}'? (valid: {known})" if close else f"valid are {known}"
