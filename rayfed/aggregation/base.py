"""The contract of an aggregation: how many updates become one step of the server.

It is written as a fold, so that updates are reduced where they are made and the server never holds more than a few
partial results: `partial` turns one cohort's updates into a partial result (on a client actor), `merge` joins
two of them (on the server, always in the same tree order, so the result does not depend on what arrived first), and
`combine` turns the last one into the step. A rule that needs more than that is an `InteractiveAggregation`: it puts
questions to the clients of a round in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar

import torch

from rayfed.questions import Memory, RoundSession
from rayfed.update import Mixtures, Named, Update

Sent = TypeVar("Sent")
"""Message of one client: its `Update`, or what a channel makes of it."""
Partial = TypeVar("Partial")
"""Partial result: what one cohort's messages are reduced to, and those of all cohorts."""
Total = TypeVar("Total")
"""Source of the step: the last partial result, or the session of a round in which clients were asked."""


class Aggregation(Generic[Sent, Partial, Total]):
    """Base of every aggregation rule."""

    validates: ClassVar[bool] = False
    """Whether clients must hold samples out of training, on which they evaluate."""
    asynchronous: ClassVar[bool] = False
    """Whether updates are added in the order in which they arrive in virtual time, computed from older weights."""
    gathers: ClassVar[bool] = False
    """Whether a partial result has every update as it is, so that two of them joined are as large as both."""
    reveals: ClassVar[str | None] = None
    """Information that clients give the server beside their updates, in words; no defence of the update covers it."""

    def check(self, clients: int) -> None:
        """Raise `UserError` if the rule is undefined for this number of clients, the fewest of any round."""

    def partial(self, sent: Iterable[Sent]) -> Partial:
        """Reduce the updates of one cohort to a partial result, which must be picklable."""
        raise NotImplementedError

    def merge(self, left: Partial, right: Partial) -> Partial:
        """Join two partial results; the order of the arguments is the order of the cohorts."""
        raise NotImplementedError

    def combine(self, total: Total, generator: torch.Generator) -> tuple[Named, Named]:
        """Return the step that the server optimiser takes (same sign as a gradient), and the averaged float buffers.

        `generator` is the server's only source of randomness.
        """
        raise NotImplementedError

    def idle(self, weights: Named, generator: torch.Generator) -> Named:
        """Return the step after a round without clients: zeros."""
        return {name: torch.zeros_like(w) for name, w in weights.items()}


AnyAggregation: TypeAlias = Aggregation[Any, Any, Any]
"""Any aggregation, where it does not matter what it adds up."""


class Member(Protocol):
    """Protocol of a client that answers questions."""

    @property
    def client(self) -> int:
        """Number of the client."""

    @property
    def round(self) -> int:
        """Number of the round that the question is about."""

    def evaluate(
        self, update: Named, buffers: Named, split: Literal["validation", "train"] = "validation"
    ) -> tuple[float, float]:
        """Return mean loss and accuracy, on the client's own samples, of the model that sent this update.

        Where the update is a mean of updates, the model is the mean of those that sent them.
        """


class InteractiveAggregation(Aggregation[Sent, Partial, Total]):
    """Base of the rules that ask clients questions; `combine` takes the round's session."""

    def begin_round(self, clients: Sequence[int], memory: Memory) -> RoundSession:
        """Begin a round with these clients, and return the server's session.

        `memory` is the rule's state after the round before, empty at first.
        """
        raise NotImplementedError

    def answer(self, payload: Any, member: Member) -> Any:
        """Return a client's answer to a question; runs on a client actor."""
        raise NotImplementedError

    def mixtures(self, updates: Sequence[Update]) -> Mixtures | None:
        """Return the models that clients are sent to score, given a round's updates; None for none.

        For attackers alone.
        """
        return None
