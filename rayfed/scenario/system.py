"""The section `federation.system`: clients' devices and networks, and rounds in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, FiniteFloat

from rayfed.scenario.components import Section

Positive = Annotated[FiniteFloat, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
HOUR = 3600.0
"""Seconds of an hour."""


class DeviceClass(Section):
    """A class of devices, with the median of each property."""

    share: Positive = 1.0
    """Share of the clients that have such a device; shares are divided by their sum."""
    compute: Positive = 1.0
    """Speed in training, in multiples of `reference`."""
    memory: Positive | None = None
    """Memory for training (MB): a client whose work needs more drops out of every round. Null: enough."""
    down: Positive | None = None
    """Bandwidth from the server (Mbit/s); null: as if it took no time."""
    up: Positive | None = None
    """Bandwidth to the server (Mbit/s); null: as if it took no time."""
    latency: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Seconds before the first byte of a message arrives, in each direction."""
    available: Probability | list[Probability] = 1.0
    """Share of these devices that are there to be drawn: one number, or 24 of them, one for each hour of the day."""
    failure: Probability = 0.0
    """Probability that a drawn device drops out of a round, and sends nothing."""

    @property
    def by_hour(self) -> tuple[float, ...]:
        """Share of these devices that are available, for each hour of the day."""
        return tuple(self.available) if isinstance(self.available, list) else (self.available,) * 24


class System(Section):
    """Devices of the clients, and virtual time, the duration of rounds on them.

    A client's time is latency and transfer of what it is sent, the counted work of its training (FLOPs) over its
    device's speed, and latency and transfer of what it sends. None of it is timed: how fast the machines that simulate
    it are, and how many, does not matter.
    """

    reference: Positive = 1e10
    """Speed of a device of `compute: 1` (FLOP/s in training), as you have measured it or a source states it."""
    devices: Annotated[dict[str, DeviceClass], Field(min_length=1)] = {"device": DeviceClass()}
    """Classes of devices, by a name. Each client's is drawn from the seed, by its number."""
    file: Path | None = None
    """A Parquet file of devices in place of `devices`, one a row: the columns `compute`, `memory`, `down`, `up`,
    `latency`, `available` and `failure`, as in a class; those that are missing have the class's defaults. With as many
    rows as clients row i is client i's, otherwise each client draws a row."""
    compute_spread: Annotated[float, Field(ge=0, le=5)] = 0.0
    """Spread of the speed within a class or about a row: the standard deviation of its natural logarithm, which is
    normal."""
    network_spread: Annotated[float, Field(ge=0, le=5)] = 0.0
    """The same of bandwidth; a device has one such factor for both directions."""
    deadline: Positive | None = None
    """Seconds after which a round ends: what arrives later is dropped, by the server, which has it all the same. Null:
    a round waits for all of its clients."""
    over_selection: Annotated[FiniteFloat, Field(ge=1, le=100)] = 1.0
    """More clients than needed: so many times `clients_per_round` are drawn, and the round ends when
    `clients_per_round` have answered; the others are dropped."""
    every: Positive | None = None
    """Seconds from the start of one round to that of the next, no shorter than the deadline; it says which hour of the
    day a round begins in. Null: at once."""
    concurrency: Annotated[int, Field(ge=1)] | None = None
    """Tasks in flight under an asynchronous rule (`fedbuff`, `fedasync`), which steps on every `clients_per_round`
    updates that arrive; when one arrives the next task is given out. A device that is drawn while it has a task does
    the new one afterwards, so that fewer devices than this are at work where clients are few. Null:
    `clients_per_round`."""
    start_hour: Annotated[float, Field(ge=0, lt=24)] = 0.0
    """Hour of the day in which the first round begins."""

    @property
    def selects(self) -> bool:
        """Whether response times influence who is in a round."""
        return self.over_selection > 1

    @property
    def drops(self) -> bool:
        """Whether drawn clients may be left out of a round, for slowness or failure."""
        return self.selects or self.deadline is not None

    @property
    def draws_from_some(self) -> bool:
        """Whether clients are drawn only from those available when a round begins."""
        some = self.file is not None or any(min(one.by_hour) < 1 for one in self.devices.values())
        return some and self.every is not None

    def hour(self, round: int) -> float:
        """Return the hour, from the start of the first day, at which a round begins."""
        return self.start_hour + round * (self.every or 0) / HOUR
