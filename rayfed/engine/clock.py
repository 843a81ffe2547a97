"""Virtual time: how long a round would take on the clients' devices, and which clients would take part.

The driver owns it, for it alone knows what all clients of a round have sent. Nothing that is timed goes into it, so its
figures follow neither the speed of the machine nor the executor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any

import numpy as np

from rayfed.client.devices import devices, fails
from rayfed.engine.inputs import Inputs
from rayfed.engine.tables import Rows
from rayfed.engine.work import Work, counted
from rayfed.scenario import ResolvedArm, Scenario
from rayfed.scenario.system import System

LATE, SURPLUS = "was late", "was not waited for"
LOST, SMALL = "dropped out", "had too little memory"
SENT = ("ok", LATE, SURPLUS)
"""What becomes of a client whose update reaches the server, which may look at it even where it does not add it."""
DROPPED = (LATE, SURPLUS, LOST, SMALL)
"""What becomes of a client that virtual time leaves out of a round: no failure of the run."""


@dataclass(frozen=True)
class Closing:
    """Result of a round in virtual time: its end, and each client's status."""

    seconds: float
    """Seconds from its start."""
    admitted: frozenset[int]
    """Clients whose updates are added."""
    idle: float | None
    """Mean seconds that they waited for its end; None where there is nobody."""


@dataclass(frozen=True)
class Clock:
    """Virtual clock of a run."""

    scenario: Scenario
    system: System
    samples: np.ndarray
    """(clients,) int64, samples of each client."""
    work: Mapping[str, Work]
    """Work of the clients by arm."""

    @classmethod
    def of(cls, inputs: Inputs) -> Clock | None:
        """Return the clock of a run whose scenario has `federation.system`, else None."""
        system = inputs.scenario.federation.system
        return cls(inputs.scenario, system, inputs.parts.sizes, counted(inputs)) if system else None

    def begin(self, arm: ResolvedArm, round: int, clients: Sequence[int], received: int) -> RoundClock:
        """Return the clock of a round of an arm whose clients each receive this many bytes."""
        work, training = self.work[arm.name], arm.training
        ready, lost, links = {}, {}, {}
        for client, device in zip(clients, devices(self.scenario, clients), strict=True):
            samples = int(self.samples[client])
            if work.memory(samples, training) > device.memory:
                lost[client] = SMALL
            elif fails(self.scenario, round, client, device):
                lost[client] = LOST
            else:
                flops = work.flops(samples, training, round)
                trained = device.latency + received / device.down + flops / device.speed
                ready[client], links[client] = trained, (device.latency, device.up)
        goal = self.scenario.clients_per_round if self.system.selects else len(clients)
        return RoundClock(ready, links, lost, min(goal, len(clients)), self.system.deadline, self.system.selects)

    def since(self, ended: float, round: int, seconds: float) -> float:
        """Return the seconds between the end of the previous round and the end of one that took this long.

        Both count from the start of the first round; a round may have waited for its hour.
        """
        return seconds if self.system.every is None else round * self.system.every + seconds - ended


@dataclass(frozen=True)
class RoundClock:
    """Virtual time of one round of one arm."""

    ready: Mapping[int, float]
    """Seconds after which a client has its update, by client; without those that are lost."""
    links: Mapping[int, tuple[float, float]]
    """Latency (s) and bytes a second to the server, by client."""
    lost: Mapping[int, str]
    """Why clients send nothing, by client."""
    goal: int
    """Number of updates that the round waits for."""
    deadline: float | None
    waits: bool
    """Whether who is in the round is known only when all have answered."""

    def arrival(self, client: int, sent_bytes: int) -> float:
        """Return the arrival time, in seconds, of a client's update of this many bytes."""
        latency, bandwidth = self.links[client]
        return self.ready[client] + latency + sent_bytes / bandwidth

    def late(self, arrival: float) -> bool:
        """Return whether an update that arrives then is too late."""
        return self.deadline is not None and arrival > self.deadline

    def close(self, arrivals: Mapping[int, float]) -> Closing:
        """Return the end of a round whose updates arrive after these seconds, by client."""
        order = sorted((seconds, client) for client, seconds in arrivals.items() if not self.late(seconds))
        order = order[: self.goal] if self.waits else order
        last = order[-1][0] if order else 0.0
        seconds = last if len(order) == self.goal or self.deadline is None else self.deadline
        idle = fmean(seconds - arrival for arrival, _ in order) if order else None
        return Closing(seconds, frozenset(client for _, client in order), idle)

    def note(self, rows: Rows, arrivals: Mapping[int, float], closing: Closing) -> dict[str, Any]:
        """Write each client's arrival and status into its row, and return the round's columns of virtual time."""
        for row in rows:
            client = row["client"]
            row["simulated_seconds"] = arrivals.get(client)
            if row["status"] == "ok" and client not in closing.admitted:
                row["status"] = LATE if self.late(arrivals.get(client, inf)) else SURPLUS
        dropped = sum(row["status"] in DROPPED for row in rows)
        return {"simulated_seconds": closing.seconds, "idle": closing.idle, "dropped": dropped}
