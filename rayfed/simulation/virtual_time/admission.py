"""Selection of the updates that the server adds to a round, based on their arrival in virtual time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayfed.simulation.client.failures import Failed
from rayfed.simulation.client.runtime import CohortReport
from rayfed.simulation.executors.stragglers import Cohort, Portion, Result
from rayfed.simulation.tables import Rows
from rayfed.simulation.virtual_time.clock import Closing, RoundClock


@dataclass
class Admission:
    """Admission of one round's updates by their arrival times; arms without a virtual clock admit all updates."""

    clocks: Mapping[str, RoundClock]
    """Clocks by arm; empty if the scenario has no `federation.system`."""
    arrivals: dict[str, dict[int, float]] = field(default_factory=dict)
    """Arm -> client -> arrival of its update, in seconds."""

    def left(self, work: Sequence[Portion]) -> tuple[list[Portion], list[Cohort]]:
        """Separate the work of clients that take part in a round from that of clients that virtual time excludes."""
        timed = [c for portion in work for c in portion if c.arm.name in self.clocks]
        lost = [cohort for cohort in timed if cohort.clients[0] in self.clocks[cohort.arm.name].lost]
        return [portion for portion in work if portion[0] not in lost], lost

    def results(self, results: Iterator[Result], work: Sequence[Portion], lost: Sequence[Cohort]) -> Iterator[Result]:
        """Yield the results of client work as they arrive, without the updates of late or surplus clients.

        If admission depends on all arrivals, results are yielded after the last one.
        """
        self.arrivals = {arm: {} for arm in self.clocks}
        for cohort in lost:
            [client] = cohort.clients
            gone = Failed(client, self.clocks[cohort.arm.name].lost[client], "")
            yield Result([cohort.without([gone])], CohortReport([], 0.0), _nothing(cohort))
        waiting: dict[str, list[Result]] = {arm: [] for arm in self.clocks}
        expected = {arm: sum(portion[0].arm.name == arm for portion in work) for arm in self.clocks}
        for result in results:
            arm = result.portion[0].arm.name
            if (clock := self.clocks.get(arm)) is None:
                yield result
                continue
            sent = {row["client"]: row["sent_bytes"] for row in result.report.rows if row["status"] == "ok"}
            arrived = {client: clock.arrival(client, size) for client, size in sent.items()}
            self.arrivals[arm] |= arrived
            if not clock.waits:
                late = any(clock.late(seconds) for seconds in arrived.values())
                yield _dropped(result) if late else result
                continue
            waiting[arm].append(result)
            if len(waiting[arm]) == expected[arm]:
                admitted = clock.close(self.arrivals[arm]).admitted
                for one in waiting.pop(arm):
                    yield one if admitted.issuperset(one.portion[0].clients) else _dropped(one)

    def close(self, arm: str, rows: Rows) -> dict[str, Any]:
        """Set the status of an arm's clients in `rows`, and return the round's columns of virtual time."""
        if (clock := self.clocks.get(arm)) is None:
            return {}
        closing: Closing = clock.close(self.arrivals[arm])
        return clock.note(rows, self.arrivals[arm], closing)


def _dropped(result: Result) -> Result:
    """Return the result of a cohort whose update is not added."""
    return Result(result.portion, result.report, _nothing(result.portion[0]))


def _nothing(cohort: Cohort) -> dict[tuple[int, int], None]:
    """Return a placeholder in the server's tree for a cohort without an update."""
    return {(0, cohort.index): None}
