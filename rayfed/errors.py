"""Define the exceptions that carry messages for the user.

Modules that only an error needs are imported in functions, because `import rayfed` imports this module.

The message of a `UserError` says what is wrong, where, and how to fix it. The command line prints it without a
traceback and exits with code 2. Any other exception is a bug in rayfed and gives exit code 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from signal import Signals
from typing import Any, ClassVar


class UserError(Exception):
    """An error that the user can fix, for example in a scenario or a file."""


class ScenarioError(UserError):
    """An invalid scenario, with the list of all problems found in the scenario.

    `problems` are pairs of a field's path (keys and indices) and a message. Empty if the file is not valid YAML.
    """

    def __init__(self, message: str, problems: Sequence[tuple[tuple[Any, ...], str]] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class DataError(UserError):
    """A data set that is missing, truncated or mislabelled. The message names the file."""


class ResourceError(UserError):
    """A request for actors that the cluster cannot satisfy."""


class NotPortable(ResourceError):
    """A process without the scenario's instruction set (`resources`). The command line then restarts itself."""


class RunError(UserError):
    """A run folder that cannot be written, read or resumed."""


class LeaseError(RunError):
    """A run folder that another driver writes to, because it is still alive or has taken over the run."""


class ClientError(UserError):
    """A failure of a client. The message names the client, the round, the arm and the reason."""


class OverdueError(UserError):
    """A call that took longer than `resources.timeout`. The called process may still be running."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(
            f"{what} took longer than resources.timeout ({seconds:g} s): increase the timeout, or fix code that hangs. "
            f"Finished rounds are kept: continue with `rayfed resume`"
        )


class ProtectionError(UserError):
    """An encrypted update that cannot be added or decrypted: it was modified, or has wrong keys or parameters.

    Raised before the server's step: the round is not applied, and the run can be resumed.
    """


class Killed(KeyboardInterrupt):
    """A signal that ends the process, such as SIGTERM. Code that handles Ctrl-C also handles it."""

    came: ClassVar[int | None] = None
    """Number of the received signal. Libraries that were waiting may raise a plain `KeyboardInterrupt` instead."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"killed by {Signals(signal).name}")
        self.signal = signal


class MissingExtraError(UserError):
    """A package of an extra of rayfed that is not installed."""

    def __init__(self, extra: str, user: str, package: str) -> None:
        super().__init__(f"{user} needs {package}, which is not installed: pip install 'rayfed[{extra}]'")
        self.extra = extra


def require_extra(extra: str, user: str, *modules: str) -> None:
    """Import optional modules, and raise `MissingExtraError` if one of them is missing.

    `user` is the command, the field or the file that needs the modules, and `extra` is the extra with their packages.
    """
    for module in modules:
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            raise MissingExtraError(extra, user, error.name or module) from error


def describe_error(error: BaseException) -> str:
    """Describe an error in one line: type, message, file and line number. For a `UserError`, only the message."""
    import traceback

    said = " ".join(plain(str(error)).split())
    if isinstance(error, UserError):
        return said
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {said}{place}"


@contextmanager
def noting_errors(note: Callable[[str], object]) -> Iterator[None]:
    """Pass an error of the block to `note` instead of raising it, so that a failed metric or report ends no run.

    A `SystemExit` of the user's code counts as an error. `BrokenPipeError`, `LeaseError` and `BdbQuit` are raised.
    """
    from bdb import BdbQuit

    try:
        yield
    except (BrokenPipeError, LeaseError, BdbQuit):
        raise
    except (Exception, SystemExit) as error:
        note(describe_error(error))


_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Escape sequences of terminals, and control characters except tabs and line ends."""


def plain(message: str) -> str:
    """Return a library's message without terminal colours and control characters."""
    return _CONTROL.sub("", message)


def nearest(name: str, valid: Iterable[str]) -> str:
    """Suggest a valid name for a wrong one: `did you mean 'sigma'? (valid: clip, sigma)`, or `valid are clip, sigma`.

    Initials are understood: `bce` suggests `binary_cross_entropy`.
    """
    from difflib import get_close_matches

    names = sorted(valid)
    initials = [one for one in names if len(name) > 1 and "".join(word[:1] for word in one.split("_")) == name.lower()]
    close = initials or get_close_matches(name, names, n=1, cutoff=0.6)
    known = ", ".join(names) or "none"
    return f"did you mean '{close[0]}'? (valid: {known})" if close else f"valid are {known}"
