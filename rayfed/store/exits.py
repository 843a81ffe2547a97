"""Exit state of a run or sweep: the word in status.json for how it ended, and advice on it."""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Mapping
from typing import Any, Literal

from rayfed.errors import Killed, LeaseError
from rayfed.store.files import Files
from rayfed.store.lease import has_died

Exit = Literal["running", "finished", "failed", "interrupted", "killed", "fenced"]
"""`interrupted` by Ctrl-C or a sweep's scheduler; `killed` by a signal, or without a word; `fenced` by another driver,
who has taken the run over and whose status the folder has: so this word is only said, never written."""

RunKind = Literal["training", "attack"]
"""Kind of a run; only training can be resumed."""


def exit_of(error: BaseException) -> Exit:
    """Return the exit state of a run that this exception has ended."""
    if isinstance(error, LeaseError):
        return "fenced"
    if isinstance(error, Killed):
        return "killed"
    return "interrupted" if isinstance(error, KeyboardInterrupt | BdbQuit | SystemExit) else "failed"


def said(error: BaseException) -> str:
    """Return what ended a run that did not fail, in words: a signal, or an interruption."""
    return str(error) if isinstance(error, Killed) else exit_of(error)


def status(files: Files) -> dict[str, Any]:
    """Return a run's or sweep's status.json, empty without one; if its driver has died, the state is `killed`."""
    found = files.read_mapping("status.json") if files.exists("status.json") else {}
    return found | {"state": "killed"} if found.get("state") == "running" and has_died(files) else found


def over(found: Mapping[str, Any]) -> bool:
    """Return whether a run of this status has played all its rounds, so that its tables are whole.

    A scheduler may stop it as the last is over, which is after what it measured was compared with what is proved. Of
    one that failed, died or still runs that is not known.
    """
    played = 0 < found.get("rounds", 0) == found.get("rounds_done")
    return found.get("state") == "finished" or (played and found.get("state") == "interrupted")


def advice(state: str, kind: str | None, run: str = "RUN") -> str:
    """Return advice on a run or sweep in this state; `run` is its name in commands."""
    again = f"`rayfed resume {run}` goes on after what is complete"
    if kind == "attack":
        again = "give the command again, for it cannot be resumed"
    return {
        "running": f"wait for its end; if its driver is gone, {again}",
        "finished": "nothing is left to do: read report.html",
        "failed": f"fix what the error says; {again}",
        "interrupted": again,
        "killed": again,
        "fenced": "another driver has taken the run over: leave it to that one",
    }.get(state, "")
