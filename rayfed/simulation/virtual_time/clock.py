"""Virtual time: the duration of a round on the clients' devices, and the clients that take part.

The driver computes it, because only the driver knows the updates of all clients. It depends only on counted work and
bytes, not on the speed of the machine or on the executor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any

import numpy as np

from rayfed.scenario import ResolvedArm, Scenario
from rayfed.scenario.system import System
from rayfed.simulation.client.devices import devices, fails
from rayfed.simulation.inputs import Inputs
from rayfed.simulation.tables import Rows
from rayfed.simulation.virtual_time.work import Work, count_work

LATE, SURPLUS = "was late", "was not waited for"
LOST, SMALL = "dropped out", "had too little memory"
SENT = ("ok", LATE, SURPLUS)
"""Statuses of clients whose update reaches the server. The server may observe it without adding it."""
DROPPED = (LATE, SURPLUS, LOST, SMALL)
"""Statuses of clients that virtual time excludes from a round. They are not failures of the run."""


@dataclass(frozen=True)
class Closing:
    """Result of a round in virtual time: the end of the round, and the clients whose updates are admitted."""

    seconds: float
    """Seconds from the start of the round."""
    admitted: frozenset[int]
    """Clients whose updates are added."""
    idle: float | None
    """Mean seconds that admitted clients waited for the end; None without admitted clients."""


@dataclass(frozen=True)
class Clock:
    """Virtual clock of a run: simulates how long clients take on their devices."""

    scenario: Scenario
    system: System
    samples: np.ndarray
    """(clients,) int64, samples of each client."""
    work: Mapping[str, Work]
    """Work of the clients by arm."""

    @classmethod
    def from_inputs(cls, inputs: Inputs) -> Clock | None:
        """Return the virtual clock of a run, or None if the scenario has no section `federation.system`."""
        system = inputs.scenario.federation.system
        return cls(inputs.scenario, system, inputs.parts.sizes, count_work(inputs)) if system else None

    def begin(self, arm: ResolvedArm, round: int, clients: Sequence[int], received: int) -> RoundClock:
        """Return the virtual time of a round of one arm, in which each client receives `received` bytes."""
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
        """Return the seconds from the end of the previous round (`ended`) to the end of a round that takes `seconds`.

        `ended` counts from the start of the run. With `system.every`, rounds start at fixed times.
        """
        return seconds if self.system.every is None else round * self.system.every + seconds - ended


@dataclass(frozen=True)
class RoundClock:
    """Virtual time of one round of one arm: when updates arrive, and which clients drop out."""

    ready: Mapping[int, float]
    """Client -> seconds after which its update is ready, without the clients in `lost`."""
    links: Mapping[int, tuple[float, float]]
    """Client -> latency in seconds and bytes per second to the server."""
    lost: Mapping[int, str]
    """Client -> reason why it sends no update."""
    goal: int
    """Number of updates that the round waits for."""
    deadline: float | None
    waits: bool
    """Whether the admitted clients are known only after all updates have arrived."""

    def arrival(self, client: int, sent_bytes: int) -> float:
        """Return the time, in seconds, at which a client's update of `sent_bytes` bytes arrives at the server."""
        latency, bandwidth = self.links[client]
        return self.ready[client] + latency + sent_bytes / bandwidth

    def late(self, arrival: float) -> bool:
        """Return whether an update that arrives after `arrival` seconds misses the deadline."""
        return self.deadline is not None and arrival > self.deadline

    def close(self, arrivals: Mapping[int, float]) -> Closing:
        """Return the end of the round and the admitted clients, given each update's arrival time in seconds."""
        order = sorted((seconds, client) for client, seconds in arrivals.items() if not self.late(seconds))
        order = order[: self.goal] if self.waits else order
        last = order[-1][0] if order else 0.0
        seconds = last if len(order) == self.goal or self.deadline is None else self.deadline
        idle = fmean(seconds - arrival for arrival, _ in order) if order else None
        return Closing(seconds, frozenset(client for _, client in order), idle)

    def note(self, rows: Rows, arrivals: Mapping[int, float], closing: Closing) -> dict[str, Any]:
        """Set each client's arrival time and status in `rows`, and return the round's columns of virtual time."""
        for row in rows:
            client = row["client"]
            row["simulated_seconds"] = arrivals.get(client)
            if row["status"] == "ok" and client not in closing.admitted:
                row["status"] = LATE if self.late(arrivals.get(client, inf)) else SURPLUS
        dropped = sum(row["status"] in DROPPED for row in rows)
        return {"simulated_seconds": closing.seconds, "idle": closing.idle, "dropped": dropped}
