"""Aggregation over a secure channel: the rule weighs clients and computes the step from the channel's sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from rayfed.aggregation.base import AnyAggregation, InteractiveAggregation, Member, Partial, Sent, Total
from rayfed.aggregation.weighted_sum import WeightedSum, WeightedSumRule
from rayfed.errors import UserError
from rayfed.protections.base import Protection
from rayfed.protections.channel import ClientRound, SecureChannel
from rayfed.questions import Memory, RoundSession
from rayfed.update import Named, Sealed, Update


@dataclass(frozen=True)
class OverChannel(InteractiveAggregation[Sent, Partial, Total]):
    """Base of aggregations that apply a rule to updates sent over a secure channel."""

    rule: AnyAggregation
    channel: SecureChannel[Any, Any]

    def weight(self, update: Update) -> int:
        """Return the factor of a client's update in the sum."""
        raise NotImplementedError

    def caveat(self) -> str | None:
        """Return in words which information about others clients still see; None if they see only sums."""
        return None

    def check(self, clients: int) -> None:
        """Raise `UserError` if the rule or the channel is undefined for this number of clients."""
        self.rule.check(clients)
        self.channel.check(clients)

    def at_clients(self, round: ClientRound) -> Self:
        """Return a copy with the secrets that the clients of a round share."""
        return replace(self, channel=self.channel.at_clients(round))

    def protect(self, update: Update) -> Sent:
        """Return the protected form of a client's update, with its size as `sent_bytes`."""
        raise NotImplementedError

    def observed(self, update: Update) -> Sealed | None:
        """Return the server's view of one client's update; None if it sees the update itself."""
        return self.channel.observed(update, self.weight(update))

    def idle(self, weights: Named, generator: torch.Generator) -> Named:
        """Return the rule's step after a round without clients."""
        return self.rule.idle(weights, generator)


@dataclass(frozen=True)
class SumOverChannel(OverChannel[Any, Any, RoundSession]):
    """Aggregation of any weighted-sum rule over any channel."""

    rule: WeightedSumRule

    @classmethod
    def of(cls, rule: AnyAggregation, protection: Protection, clients: int, samples: int) -> SumOverChannel:
        """Return the rule over a protection's channel, for rounds of at most this many clients and samples.

        Raises `UserError` for a rule that is not a weighted sum, and for parameters that cannot represent such a sum.
        """
        if not isinstance(rule, WeightedSumRule) or type(rule).partial is not WeightedSumRule.partial:
            raise UserError(
                f"with a protection the server can only add updates, which is not enough for {type(rule).__name__}: "
                f"use a WeightedSumRule, such as fedavg, or fedboosting, or remove the protection"
            )
        return cls(rule, protection.summing(clients, rule.heaviest(clients, samples), rule.step))

    def weight(self, update: Update) -> int:
        """Return the rule's weight of the client."""
        return self.rule.weight(update)

    def protect(self, update: Update) -> Any:
        """Return the update with its weight in the channel's protected form."""
        return self.channel.protect(update, self.weight(update))

    def partial(self, sent: Iterable[Any]) -> Any:
        """Return the channel's sum over one cohort."""
        return self.channel.partial(sent)

    def merge(self, left: Any, right: Any) -> Any:
        """Add two partial sums of protected updates with the channel."""
        return self.channel.merge(left, right)

    def begin_round(self, clients: Sequence[int], memory: Memory) -> RoundSession:
        """Begin the channel's session that opens the sum."""
        return self.channel.begin_round(clients)

    def answer(self, payload: Any, member: Member) -> Any:
        """Return a client's reply to the channel's session."""
        return self.channel.answer(payload, member.client, member.round)

    def combine(self, total: RoundSession, generator: torch.Generator) -> tuple[Named, Named]:
        """Return the rule's step from the opened sum."""
        tensors, buffers, weight = self.channel.opened(total)
        return self.rule.combine(WeightedSum(tensors, buffers, float(weight)), generator)
