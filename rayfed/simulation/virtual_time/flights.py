"""Updates in flight in virtual time: when clients start, and which update reaches the server next.

Under an asynchronous rule a round is one step of the server. In each round as many clients start as updates make a
step: the first one after the previous step, each other one when an update arrives. All clients are known in advance.
Therefore they train concurrently, and only their virtual times are simulated in order.

A checkpoint has the weights from which updates in flight were computed, not the updates. After a resume, or if an
update is lost with a process, it is computed again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rayfed.simulation.executors.base import Ref
from rayfed.simulation.tables import Row, Rows
from rayfed.simulation.virtual_time.clock import RoundClock


@dataclass(frozen=True)
class Flight:
    """One update in flight: computed by a client, but not yet arrived at the server."""

    client: int
    round: int
    """Round whose weights the client received."""
    arrival: float
    """Arrival at the server, in seconds after the start of the run."""
    seconds: float
    """Seconds between sending the weights and the arrival of the update."""
    row: Row
    """Row of the table `clients`."""

    @property
    def key(self) -> tuple[int, int]:
        """Return the identifier of the update within an arm: (round, client)."""
        return self.round, self.client


@dataclass
class InFlightUpdates:
    """Updates in flight of one arm during one round."""

    number: int
    clock: RoundClock
    count: int
    """Number of updates per step."""
    began: float
    """Time of the previous step, in seconds after the start of the run."""
    flying: list[Flight]
    """Updates in flight; after the round, the remaining ones."""
    held: dict[tuple[int, int], Ref]
    """(Round, client) -> update, if this process has it."""
    landed: list[Flight] = field(default_factory=list)
    """Updates that arrived in this round, in order of arrival."""
    _ready: dict[int, Row] = field(default_factory=dict)

    @classmethod
    def from_state(
        cls, number: int, clock: RoundClock, count: int, saved: Mapping[str, Any], held: Mapping[Any, Ref]
    ) -> InFlightUpdates:
        """Return the updates in flight of an arm at the start of a round, from the arm's saved state."""
        flying = [Flight(**one) for one in saved.get("flying", ())]
        return cls(number, clock, count, saved.get("ended", 0.0), flying, dict(held))

    def add(self, rows: Rows, update: Ref) -> None:
        """Record the update and the row of a client that starts in this round."""
        [row] = rows
        self._ready[row["client"]] = row
        self.held[self.number, row["client"]] = update

    def advance(self, clients: Sequence[int]) -> None:
        """Start `clients` in order, and advance virtual time until enough updates for a server step have arrived."""
        waiting, free = iter(clients), {flight.client: flight.arrival for flight in self.flying}
        air = [(flight.arrival, flight.round, flight.client, flight) for flight in self.flying]
        heapq.heapify(air)
        first = len(clients) - (self.count - 1)  # in the first round all tasks, later one after the previous step
        for client in (next(waiting) for _ in range(first)):
            self._start(client, self.began, free, air)
        while True:
            *_, flight = heapq.heappop(air)
            self.landed.append(flight)
            if len(self.landed) == self.count:
                break
            self._start(next(waiting), flight.arrival, free, air)
        self.flying = sorted((flight for *_, flight in air), key=lambda one: one.key)

    def _start(self, client: int, now: float, free: dict[int, float], air: list[Any]) -> None:
        """Start a client now, or as soon as its device is free."""
        row = self._ready[client]
        begun = max(now, free.get(client, now))
        arrival = begun + self.clock.arrival(client, row["sent_bytes"])
        free[client] = arrival
        flight = Flight(client, self.number, arrival, arrival - now, row)
        heapq.heappush(air, (arrival, self.number, client, flight))

    @property
    def rows(self) -> Rows:
        """Return the rows of the table `clients` for the updates that have arrived."""
        return [
            one.row | {"round": self.number, "simulated_seconds": one.seconds, "staleness": self.number - one.round}
            for one in self.landed
        ]

    @property
    def columns(self) -> Row:
        """Return the round's columns of virtual time: seconds, waiting and dropped devices."""
        return {"simulated_seconds": self.landed[-1].arrival - self.began, "idle": None, "dropped": 0}

    def missing(self) -> Iterator[Flight]:
        """Yield the arrived updates that must be computed again, because this process does not have them."""
        return (one for one in self.landed if one.key not in self.held)

    @property
    def kept(self) -> list[dict[str, Any]]:
        """Return the state, as stored in a checkpoint, of the updates that are still in flight."""
        return [asdict(one) for one in self.flying]

    @property
    def left(self) -> dict[tuple[int, int], Ref]:
        """Return the updates that are still in flight and that this process has, by (round, client)."""
        return {one.key: self.held[one.key] for one in self.flying if one.key in self.held}
