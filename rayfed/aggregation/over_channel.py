"""Aggregation over a secure channel: the rule weighs clients and computes the step from the channel's sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from rayfed.aggregation.base import AnyAggregation, InteractiveAggregation, Member, Partial, Sent, Total
from rayfed.aggregation.weighted_sum import WeightedSum, WeightedSumRule
from rayfed.core.questions import Memory, RoundSession
from rayfed.errors import UserError
from rayfed.protections.base import Protection
from rayfed.protections.channel import ClientRound, SecureChannel
from rayfed.update import Named, Sealed, Update


@dataclass(frozen=True)
class OverChannel(InteractiveAggregation[Sent, Partial, Total]):
    """Base of aggregations that apply a rule to updates sent over a secure channel."""

    rule: AnyAggregation
    channel: SecureChannel[Any, Any]

    def weight(self, update: Update) -> int:
        """Return the integer weight of a client's update in the sum."""
        raise NotImplementedError

    def caveat(self) -> str | None:
        """Return, in words, what clients see of other clients' updates; None if clients see only sums."""
        return None

    def check(self, clients: int) -> None:
        """Raise `UserError` if the rule or the channel does not support the given number of clients per round."""
        self.rule.check(clients)
        self.channel.check(clients)

    def at_clients(self, round: ClientRound) -> Self:
        """Return the clients' copy of the aggregation, with the secrets that the clients of a round share."""
        return replace(self, channel=self.channel.at_clients(round))

    def protect(self, update: Update) -> Sent:
        """Return the protected (encrypted or masked) form of a client's update, with its size as `sent_bytes`."""
        raise NotImplementedError

    def observed(self, update: Update) -> Sealed | None:
        """Return the server's view of one client's update, for attacks; None if the server sees the update itself."""
        return self.channel.observed(update, self.weight(update))

    def idle(self, weights: Named, generator: torch.Generator) -> Named:
        """Return the step of the server after a round without clients, as the rule defines it."""
        return self.rule.idle(weights, generator)


@dataclass(frozen=True)
class SumOverChannel(OverChannel[Any, Any, RoundSession]):
    """Aggregation by any weighted-sum rule over any secure channel."""

    rule: WeightedSumRule

    @classmethod
    def of(cls, rule: AnyAggregation, protection: Protection, clients: int, samples: int) -> SumOverChannel:
        """Return a rule over a protection's channel, for rounds of at most `clients` clients and `samples` samples.

        Raises `UserError` for a rule that is not a weighted sum, and for parameters that cannot represent such a sum.
        """
        if not isinstance(rule, WeightedSumRule) or type(rule).partial is not WeightedSumRule.partial:
            raise UserError(
                f"with a protection the server can only add updates, which is not enough for {type(rule).__name__}: "
                f"use a WeightedSumRule, such as fedavg, or fedboosting, or remove the protection"
            )
        return cls(rule, protection.summing(clients, rule.heaviest(clients, samples), rule.step))

    def weight(self, update: Update) -> int:
        """Return the weight that the rule gives to a client's update."""
        return self.rule.weight(update)

    def protect(self, update: Update) -> Any:
        """Return a client's update and weight in the channel's protected (encrypted or masked) form."""
        return self.channel.protect(update, self.weight(update))

    def partial(self, sent: Iterable[Any]) -> Any:
        """Return the sum of the protected updates of one cohort of clients."""
        return self.channel.partial(sent)

    def merge(self, left: Any, right: Any) -> Any:
        """Add two partial sums of protected updates."""
        return self.channel.merge(left, right)

    def begin_round(self, clients: Sequence[int], memory: Memory) -> RoundSession:
        """Begin a round, and return the channel's session in which the sum is decrypted or unmasked."""
        return self.channel.begin_round(clients)

    def answer(self, payload: Any, member: Member) -> Any:
        """Return a client's reply to a question of the channel's session."""
        return self.channel.answer(payload, member.client, member.round)

    def combine(self, total: RoundSession, generator: torch.Generator) -> tuple[Named, Named]:
        """Return the rule's step and buffers, computed from the decrypted or unmasked sum."""
        tensors, buffers, weight = self.channel.opened(total)
        return self.rule.combine(WeightedSum(tensors, buffers, float(weight)), generator)
