"""Exit state of a run or sweep, as written to status.json, and advice on what to do next."""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from rayfed.errors import Killed, LeaseError

if TYPE_CHECKING:
    from rayfed.store.files import Files

Exit = Literal["running", "finished", "failed", "interrupted", "killed", "fenced"]
"""`interrupted`: stopped by Ctrl-C or a sweep's scheduler; `killed`: ended by a signal or without a message; `fenced`:
taken over by another driver, which writes the status from then on, so `fenced` is printed but never written."""

RunKind = Literal["training", "attack"]
"""Kind of a run; only training can be resumed."""


def classify_exit(error: BaseException) -> Exit:
    """Return the exit state of a run that ended with an exception."""
    if isinstance(error, LeaseError):
        return "fenced"
    if isinstance(error, Killed):
        return "killed"
    return "interrupted" if isinstance(error, KeyboardInterrupt | BdbQuit | SystemExit) else "failed"


def describe_interruption(error: BaseException) -> str:
    """Return the description of the signal or interruption that ended a run."""
    return str(error) if isinstance(error, Killed) else classify_exit(error)


def read_status(files: Files) -> dict[str, Any]:
    """Return the content of a run's or sweep's status.json; empty without this file.

    The state is `killed` if the driver has died, also if later drivers could not continue.
    """
    from rayfed.store.lease import has_no_driver  # imports fsspec, which `rayfed --help` does not need

    found = _written_status(files)
    if found.get("state") != "running" or not has_no_driver(files):
        return found
    found = _written_status(files)  # the driver may have ended since
    return found | {"state": "killed"} if found.get("state") == "running" else found


def _written_status(files: Files) -> dict[str, Any]:
    return files.read_mapping("status.json") if files.exists("status.json") else {}


def is_complete(found: Mapping[str, Any]) -> bool:
    """Return whether a run with a given status has completed all rounds, so that the run's tables are complete.

    A scheduler may interrupt a run after its last round, when measurements and proved bounds were already compared. For
    runs that failed, died or are still running, this is unknown.
    """
    played = 0 < found.get("rounds", 0) == found.get("rounds_done")
    return found.get("state") == "finished" or (played and found.get("state") == "interrupted")


def advise_on_state(state: str, kind: str | None, run: str = "RUN") -> str:
    """Return advice on how to continue after a run or sweep in a given state; `run` is the run's name in commands."""
    again = f"`rayfed resume {run}` continues after the last complete round"
    if kind == "attack":
        again = "run the command again, because attacks cannot be resumed"
    return {
        "running": f"wait until the run ends; if its driver has died, {again}",
        "finished": "nothing to do: read report.html",
        "failed": f"fix the error; {again}",
        "interrupted": again,
        "killed": again,
        "fenced": "another driver has taken over the run: let that driver finish",
    }.get(state, "")
