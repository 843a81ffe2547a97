"""Updates in flight in virtual time: when clients start, and which update reaches the server next.

Under an asynchronous rule a round is one step of the server. As many clients are given its weights as updates make a
step: the first when the step before is made, each other one when an update arrives. All of them are known before
the first has begun, so they train side by side; only their times are played one after another.

A run keeps the weights on which updates on the way were made, not the updates: where one is lost with a process, or the
run was resumed, it is made again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rayfed.engine.clock import RoundClock
from rayfed.engine.executor import Ref
from rayfed.engine.tables import Row, Rows


@dataclass(frozen=True)
class Flight:
    """One update in flight."""

    client: int
    round: int
    """Round on whose weights it was made."""
    arrival: float
    """Seconds after the start of the run."""
    seconds: float
    """Seconds since the client was sent the weights."""
    row: Row
    """Row of the table `clients`."""

    @property
    def key(self) -> tuple[int, int]:
        """Identifier of the update within its arm."""
        return self.round, self.client


@dataclass
class Flights:
    """Updates in flight of one arm during one round."""

    number: int
    clock: RoundClock
    count: int
    """Number of updates of a step."""
    began: float
    """Seconds after the start of the run when the step before was made."""
    flying: list[Flight]
    """On their way; when the round is over, those that are left."""
    held: dict[tuple[int, int], Ref]
    """Updates by their names, as far as this process has them."""
    landed: list[Flight] = field(default_factory=list)
    """Arrived in this round, in this order."""
    _ready: dict[int, Row] = field(default_factory=dict)

    @classmethod
    def of(
        cls, number: int, clock: RoundClock, count: int, saved: Mapping[str, Any], held: Mapping[Any, Ref]
    ) -> Flights:
        """Return the flights of an arm at the start of a round, from its saved state."""
        flying = [Flight(**one) for one in saved.get("flying", ())]
        return cls(number, clock, count, saved.get("ended", 0.0), flying, dict(held))

    def made(self, rows: Rows, update: Ref) -> None:
        """Record the update, and its row, of a client that starts in this round."""
        [row] = rows
        self._ready[row["client"]] = row
        self.held[self.number, row["client"]] = update

    def fly(self, clients: Sequence[int]) -> None:
        """Start these clients in order, and advance until enough updates for a step have arrived."""
        waiting, free = iter(clients), {flight.client: flight.arrival for flight in self.flying}
        air = [(flight.arrival, flight.round, flight.client, flight) for flight in self.flying]
        heapq.heapify(air)
        first = len(clients) - (self.count - 1)  # all tasks in flight, or who follows on the last to arrive
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
        """Start a client, now or when its device is free again."""
        row = self._ready[client]
        begun = max(now, free.get(client, now))
        arrival = begun + self.clock.arrival(client, row["sent_bytes"])
        free[client] = arrival
        flight = Flight(client, self.number, arrival, arrival - now, row)
        heapq.heappush(air, (arrival, self.number, client, flight))

    @property
    def rows(self) -> Rows:
        """Rows of the table `clients` for the updates that have arrived."""
        return [
            one.row | {"round": self.number, "simulated_seconds": one.seconds, "staleness": self.number - one.round}
            for one in self.landed
        ]

    @property
    def columns(self) -> Row:
        """Columns of the round's row on waiting and dropped devices."""
        return {"simulated_seconds": self.landed[-1].arrival - self.began, "idle": None, "dropped": 0}

    def missing(self) -> Iterator[Flight]:
        """Yield the arrived flights whose updates this process must compute again."""
        return (one for one in self.landed if one.key not in self.held)

    @property
    def kept(self) -> list[dict[str, Any]]:
        """State of the remaining flights for a checkpoint."""
        return [asdict(one) for one in self.flying]

    @property
    def left(self) -> dict[tuple[int, int], Ref]:
        """Updates of the remaining flights, if this process has them."""
        return {one.key: self.held[one.key] for one in self.flying if one.key in self.held}
