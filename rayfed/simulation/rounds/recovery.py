"""Recovery of a round, which is rerun if the server dies or a value is lost with a machine."""

from __future__ import annotations

from collections.abc import Callable

from rayfed.errors import ResourceError
from rayfed.simulation.executors.base import Lost
from rayfed.simulation.rounds.federation import Federation
from rayfed.simulation.tables import RoundTables

RETRIES = 3
"""Number of times that a round is rerun."""


def rerun_until_complete(federation: Federation, round: int, play: Callable[[], RoundTables]) -> RoundTables:
    """Run a round, and rerun the round if the server or a value is lost.

    Raises `ResourceError` after `RETRIES` reruns.
    """
    for failures in range(RETRIES + 1):
        try:
            if not federation.served:  # otherwise it is known to run, because the last round has its values
                federation.executor.check_server()
            return play()
        except Lost as error:
            if failures == RETRIES:
                raise ResourceError(
                    f"round {round + 1} failed {RETRIES + 1} times in a row: {error}; check whether a machine runs out "
                    f"of memory. Finished rounds are kept, and `rayfed resume` continues after them"
                ) from error
            federation.progress.note(f"round {round + 1} is rerun: {error}")
            federation.restart_server()
    raise AssertionError("a round ends or raises")
