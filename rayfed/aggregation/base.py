"""Base classes of aggregation rules, which reduce many updates to one step of the server.

A rule is a fold, so updates are reduced where they are computed, and the server holds only a few partial results.
`partial` reduces one cohort's updates to a partial result (on a client actor). `merge` joins two of them (on the
server). The order is always that of the same tree, so the result does not depend on the order of arrival. `combine`
computes the step from the last partial result. A rule that needs more information is an `InteractiveAggregation`, which
sends questions to the clients of a round before `combine`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar

import torch

from rayfed.core.questions import Memory, RoundSession
from rayfed.update import Mixtures, Named, Update

Sent = TypeVar("Sent")
"""Message of one client: its `Update`, or a channel's protected form of it."""
Partial = TypeVar("Partial")
"""Partial result: the messages of one or several cohorts, reduced."""
Total = TypeVar("Total")
"""Input of the step: the last partial result, or the session of a round that sent questions to clients."""


class Aggregation(Generic[Sent, Partial, Total]):
    """Base class of aggregation rules, which combine the updates of a round into one step of the server."""

    validates: ClassVar[bool] = False
    """Whether clients must hold out samples from training for evaluation."""
    asynchronous: ClassVar[bool] = False
    """Whether updates are added in the order in which they arrive in virtual time, computed from older weights."""
    gathers: ClassVar[bool] = False
    """Whether a partial result contains all updates, so that its size grows with their number."""
    reveals: ClassVar[str | None] = None
    """Information that clients give the server in addition to their updates, in words; no defence of the update covers
    it."""

    def check(self, clients: int) -> None:
        """Raise `UserError` if the rule is undefined for the given number of clients, the smallest of any round."""

    def partial(self, sent: Iterable[Sent]) -> Partial:
        """Reduce the updates of one cohort (clients of one call) to a picklable partial result."""
        raise NotImplementedError

    def merge(self, left: Partial, right: Partial) -> Partial:
        """Merge the partial results of two groups of cohorts, in the order of the cohorts."""
        raise NotImplementedError

    def combine(self, total: Total, generator: torch.Generator) -> tuple[Named, Named]:
        """Return the step for the server optimiser (same sign as a gradient), and the averaged float buffers.

        `generator` is the server's only source of randomness.
        """
        raise NotImplementedError

    def idle(self, weights: Named, generator: torch.Generator) -> Named:
        """Return the step of the server after a round without clients: zeros by default."""
        return {name: torch.zeros_like(w) for name, w in weights.items()}


AnyAggregation: TypeAlias = Aggregation[Any, Any, Any]
"""Aggregation with any types of messages and results."""


class Member(Protocol):
    """Protocol of a client that replies to the server's questions."""

    @property
    def client(self) -> int:
        """Return the client's number."""

    @property
    def round(self) -> int:
        """Return the number of the round that the question is about."""

    def evaluate(
        self, update: Named, buffers: Named, split: Literal["validation", "train"] = "validation"
    ) -> tuple[float, float]:
        """Return a model's mean loss and accuracy on the client's own samples. The model is given by an update.

        For a mean of updates, this is the mean of their models.
        """


class InteractiveAggregation(Aggregation[Sent, Partial, Total]):
    """Base of the rules that send questions to clients; `combine` receives the round's session."""

    def begin_round(self, clients: Sequence[int], memory: Memory) -> RoundSession:
        """Begin a round with the given clients, and return the server's session for the round.

        `memory` is the rule's state after the previous round, initially empty.
        """
        raise NotImplementedError

    def answer(self, payload: Any, member: Member) -> Any:
        """Return a client's reply to a question of the server. Called on a client actor."""
        raise NotImplementedError

    def mixtures(self, updates: Sequence[Update]) -> Mixtures | None:
        """Return the models that clients receive for scoring, given a round's updates; None if no models are scored.

        Only attacks call this method.
        """
        return None
