"""Handlers of signals that end the process: a run writes its status and report first, as after Ctrl-C."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn

from rayfed.errors import Killed

_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has no SIGHUP


def end_on_signals() -> None:
    """Install handlers that raise `Killed` for SIGTERM and SIGHUP, except for ignored signals (`nohup`)."""
    for number in _ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


def end_at_once() -> None:
    """Restore the default handlers of SIGTERM and SIGHUP, because nothing is left to write after a command."""
    for number in _ENDING:
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Raise `Killed` once, because a closing terminal sends SIGHUP twice."""
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)
    Killed.came = number
    raise Killed(number)
