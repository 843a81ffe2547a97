"""Secure aggregation: updates under masks that vanish in their sum, whoever drops out on the way.

Sources: Bonawitz et al. 2017, 'Practical secure aggregation for privacy-preserving machine learning', figure 4; Bell et
al. 2020, 'Secure single-server aggregation with (poly)logarithmic overhead', section 3, for the sparse graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rayfed.crypto.packing import FixedPoint
from rayfed.protections.base import Protection
from rayfed.registry import component

Phase = Literal["advertise", "share", "mask", "confirm", "reveal"]
PHASES: tuple[Phase, ...] = ("advertise", "share", "mask", "confirm", "reveal")

Count = Annotated[int, Field(ge=0)]


@component
class Dropouts:
    """How many clients of a round drop out before they speak in a phase; they do not come back in that round."""

    advertise: Count = 0
    share: Count = 0
    mask: Count = 0
    confirm: Count = 0
    reveal: Count = 0

    def until(self, phase: Phase) -> int:
        """How many have gone when those who are left speak in this phase."""
        return sum(getattr(self, each) for each in PHASES[: PHASES.index(phase) + 1])


@component
class SecureAggregation(Protection):
    """Updates as integers under pairwise masks and one of the client's own: the server learns the sum, and no client's.

    No key is shared by all, and a client answers nothing that contradicts what it was asked before in the round. With n
    clients around one (itself and its neighbours), a server that lies does not get both secrets of a client as long as
    fewer than 2 * threshold - n of them collude with it and it passes on clients' own keys: it could replace them, for
    nobody vouches for them. Where fewer than `threshold` are left of some client and its neighbours, the round is not
    applied.
    """

    threshold: Annotated[int, Field(ge=2)] | None = None
    """Who must stay, of a client and its neighbours, for the sum to be opened: more than half of them; null: more than
    two thirds."""
    neighbours: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    """Clients with whom each one has common masks; null: all others of the round."""
    bits: Annotated[int, Field(ge=2, le=32)] = 32
    """Of one value; half a step, clip / (2^bits - 2), is lost at most. What is sent has 64 whatever this says."""
    dropouts: Dropouts = Dropouts()
    """Clients that drop out in every round, to show what becomes of it: how many before which phase, drawn from the
    seed."""

    @model_validator(mode="after")
    def _connected(self) -> Self:
        # Who has lost all neighbours on one side of the ring has half of them and itself left: the round ends there.
        if self.neighbours and self.threshold and self.threshold < self.neighbours // 2 + 2:
            raise ValueError(
                f"threshold: with {self.neighbours} neighbours take {self.neighbours // 2 + 2} or more: drop-outs may "
                f"cut the graph otherwise, and the server would learn the sum of each part"
            )
        return self

    @property
    def code(self) -> FixedPoint:
        """How values become integers."""
        return FixedPoint(self.bits)

    def exact(self, step: float) -> SecureAggregation:
        """The same for parameters that are whole multiples of `step`, up to 2^24 of them, which it leaves exact."""
        return replace(self, bits=32, clip=step * FixedPoint(32).most)

    def around(self, clients: int) -> int:
        """A client and its neighbours in a round of so many clients."""
        return min(self.neighbours or clients, clients - 1) + 1

    def needed(self, clients: int) -> int:
        """How many of these must stay."""
        return self.threshold or 2 * self.around(clients) // 3 + 1

    def withstands(self, clients: int, colluders: int) -> bool:
        """Whether an honest but curious server, with so many of a round's clients, learns only the sum of the others.

        Colluders must be fewer than the threshold, which opens a client's secrets. And the others must be connected by
        masks, else each part of them shows its sum: a ring with k neighbours takes the loss of any k - 1 (Harary 1962).
        """
        lost = colluders + self.dropouts.until("mask")
        connected = self.around(clients) == clients or lost < self.around(clients) - 1
        return colluders < self.needed(clients) and connected
