"""Backstop for exit codes: a process whose command has not returned never ends with exit code 0."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn

UNRETURNED = 1
"""Exit code of a process that ends by itself before its command has returned."""
_working = False


def begin() -> None:
    """Note that a command works."""
    global _working
    _working = True


def end() -> None:
    """Note that the command has returned."""
    global _working
    _working = False


def exit_code_of(code: object) -> object:
    """Return the exit code for a process that asks for `code`: not 0 while a command works."""
    return UNRETURNED if _working and not code else code


def guard_os_exit() -> None:
    """Make `os._exit(0)`, which skips all handlers, end this process with another code while a command works."""
    leave: Callable[[int], NoReturn] = os._exit
    process = os.getpid()

    def guarded(status: int) -> NoReturn:
        if os.getpid() == process and _working and not status:
            os.write(2, b"error: your code ended the process by os._exit(0) before the command was done\n")
            leave(UNRETURNED)
        leave(status)

    os._exit = guarded
