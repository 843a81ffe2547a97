"""Recovery: a round whose server dies, or that loses a value with a machine, is played again."""

from __future__ import annotations

from collections.abc import Callable

from rayfed.engine.executor import Lost
from rayfed.engine.federation import Federation
from rayfed.engine.tables import RoundTables

RETRIES = 3
"""Number of times that a round is played again."""


def until_played(federation: Federation, round: int, play: Callable[[], RoundTables]) -> RoundTables:
    """Play a round, again from the last finished one where it is lost; raises `Lost` after `RETRIES` times."""
    for failures in range(RETRIES + 1):
        try:
            federation.executor.check_server()
            return play()
        except Lost as error:
            if failures == RETRIES:
                raise
            federation.progress.note(f"round {round} is played again: {error}")
            federation.restart_server()
    raise AssertionError("a round ends or raises")
