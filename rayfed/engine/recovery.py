"""Recovery: a round is played again if its server dies or a value is lost with a machine."""

from __future__ import annotations

from collections.abc import Callable

from rayfed.engine.executor import Lost
from rayfed.engine.federation import Federation
from rayfed.engine.tables import RoundTables
from rayfed.errors import ResourceError

RETRIES = 3
"""Number of times that a round is played again."""


def until_played(federation: Federation, round: int, play: Callable[[], RoundTables]) -> RoundTables:
    """Play a round, starting again from the last finished round after each loss.

    Raises `ResourceError` after `RETRIES` times.
    """
    for failures in range(RETRIES + 1):
        try:
            if not federation.served:  # else it has answered in the last round, and clients need not wait for it
                federation.executor.check_server()
            return play()
        except Lost as error:
            if failures == RETRIES:
                raise ResourceError(
                    f"round {round + 1} was lost {RETRIES + 1} times, one after another: {error}; does a machine "
                    f"lack memory? Complete rounds are kept and `rayfed resume` goes on from there"
                ) from error
            federation.progress.note(f"round {round + 1} is played again: {error}")
            federation.restart_server()
    raise AssertionError("a round ends or raises")
