"""Ensure that a process whose command has not returned never ends with exit code 0."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

UNRETURNED = 2
"""Exit code of a process that the user's code ends before the command has returned."""
_working = False


def begin_command() -> None:
    """Record that a command is running."""
    global _working
    _working = True


def end_command() -> None:
    """Record that the command has returned."""
    global _working
    _working = False


def choose_exit_code(code: object) -> object:
    """Return the exit code of a process that requests `code`: 2 instead of 0 while a command is running."""
    return UNRETURNED if _working and not code else code


def guard_os_exit() -> None:
    """Replace `os._exit` so that `os._exit(0)` ends with exit code 2 while a command is running."""
    leave: Callable[[int], NoReturn] = os._exit
    process = os.getpid()

    def guarded(status: int) -> NoReturn:
        if os.getpid() == process and _working and not status:
            caller = sys._getframe(1)
            place = f"{Path(caller.f_code.co_filename).name}, line {caller.f_lineno}"
            os.write(2, f"error: your code ends the process with os._exit ({place}): remove the call\n".encode())
            leave(UNRETURNED)
        leave(status)

    os._exit = guarded
