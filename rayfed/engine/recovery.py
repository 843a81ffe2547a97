"""What becomes of a round whose server dies, or that loses a value with a machine: it is played again."""

from __future__ import annotations

from collections.abc import Callable

from rayfed.engine.executor import Lost
from rayfed.engine.federation import Federation
from rayfed.engine.tables import RoundTables

RETRIES = 3
"""Times that a round is played again."""


def until_played(federation: Federation, round: int, play: Callable[[], RoundTables]) -> RoundTables:
    """What `play` returns, from the last finished round on; raises `Lost` where it gets lost again and again."""
    for failures in range(RETRIES + 1):
        try:
            federation.executor.check_server()
            return play()
        except Lost as error:
            if failures == RETRIES:
                raise
            federation.progress.note(f"{error.what} in round {round} and the round is played again ({error})")
            federation.restart_server()
    raise AssertionError("a round ends or raises")
