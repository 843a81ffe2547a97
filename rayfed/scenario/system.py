"""The section `federation.system`: devices and networks of the clients, and rounds in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, FiniteFloat

from rayfed.scenario.components import Section

Positive = Annotated[FiniteFloat, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
HOUR = 3600.0
"""Seconds per hour."""


class DeviceClass(Section):
    """A class of devices, described by the medians of its properties."""

    share: Positive = 1.0
    """Share of the clients with such a device, relative to the sum of all shares. Default: 1."""
    compute: Positive = 1.0
    """Training speed, in multiples of `reference`. Default: 1."""
    memory: Positive | None = None
    """Memory for training, in MB. A client that needs more drops out of every round. Default: null, unlimited."""
    down: Positive | None = None
    """Bandwidth from the server, in Mbit/s. Default: null, unlimited."""
    up: Positive | None = None
    """Bandwidth to the server, in Mbit/s. Default: null, unlimited."""
    latency: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Latency of a message in each direction, in seconds. Default: 0."""
    available: Probability | list[Probability] = 1.0
    """Share of these devices that are available for a round: one number, or 24, one per hour of the day. Default: 1."""
    failure: Probability = 0.0
    """Probability that a sampled device drops out of a round and sends no update. Default: 0."""

    @property
    def by_hour(self) -> tuple[float, ...]:
        """Return the share of the class's devices that are available, for each of the 24 hours of the day."""
        return tuple(self.available) if isinstance(self.available, list) else (self.available,) * 24


class System(Section):
    """Devices of the clients, and the virtual time of rounds on them.

    A client's time in a round is the sum of download, training and upload. Training takes the counted FLOPs divided by
    the device's speed. Nothing is measured, so results do not depend on the machines that run the simulation.
    """

    reference: Positive = 1e10
    """Training speed of a device with `compute: 1`, in FLOP/s. Default: 1e10."""
    devices: Annotated[dict[str, DeviceClass], Field(min_length=1)] = {"device": DeviceClass()}
    """Device classes by name. Each client's class is sampled from the seed and the client's number."""
    file: Path | None = None
    """Parquet file with one device per row, instead of `devices`. Columns: `compute`, `memory`, `down`, `up`,
    `latency`, `available` and `failure`, with the same defaults as in `devices`. If there are as many rows as clients,
    row i is client i; otherwise each client samples a row."""
    compute_spread: Annotated[float, Field(ge=0, le=5)] = 0.0
    """Spread of the speed within a class or around a row: the standard deviation of a log-normal factor. Default:
    0."""
    network_spread: Annotated[float, Field(ge=0, le=5)] = 0.0
    """Spread of the bandwidth, as `compute_spread`, with the same factor in both directions. Default: 0."""
    deadline: Positive | None = None
    """Duration of a round, in seconds. The server drops updates that arrive later, although it receives them. Default:
    null, a round waits for all clients."""
    over_selection: Annotated[FiniteFloat, Field(ge=1, le=100)] = 1.0
    """Over-selection factor: sample this times `clients_per_round` clients, and end the round after
    `clients_per_round` updates. The remaining clients are dropped. Default: 1, none."""
    every: Positive | None = None
    """Time from the start of one round to the start of the next, in seconds; at least `deadline`. It determines the
    hour of the day in which a round starts. Default: null, no pause between rounds."""
    concurrency: Annotated[int, Field(ge=1)] | None = None
    """Number of concurrent tasks with an asynchronous rule (`fedbuff`, `fedasync`), which takes a step after every
    `clients_per_round` updates. A new task starts when an update arrives, on a busy device after its current task.
    Default: `clients_per_round`."""
    start_hour: Annotated[float, Field(ge=0, lt=24)] = 0.0
    """Hour of the day at which the first round starts. Default: 0."""

    @property
    def selects(self) -> bool:
        """Return whether response times determine which clients are in a round."""
        return self.over_selection > 1

    @property
    def drops(self) -> bool:
        """Return whether slow or failed clients may be dropped from a round."""
        return self.selects or self.deadline is not None

    @property
    def draws_from_some(self) -> bool:
        """Return whether clients are sampled only from the clients that are available at the start of a round."""
        some = self.file is not None or any(min(one.by_hour) < 1 for one in self.devices.values())
        return some and self.every is not None

    def hour(self, round: int) -> float:
        """Return the start time of a round, in hours since the start of the first day."""
        return self.start_hour + round * (self.every or 0) / HOUR
