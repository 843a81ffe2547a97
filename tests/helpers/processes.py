"""Run code in a process of its own."""

from __future__ import annotations

import subprocess

from tests.helpers import faults


def user_namespaces() -> bool:
    return subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode == 0


def in_own_process(code: str, *arguments: str) -> str:
    """What a script prints that has a Ray of its own, of which nothing is left afterwards."""
    command = faults.Command(["-c", code, *arguments], {})
    try:
        assert command.wait(240) == 0, command.said()[-3000:]
    finally:
        command.process.kill()
        command.left()
    command.output.seek(0)
    return command.output.read()
