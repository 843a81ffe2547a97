"""A rule over a secure channel: the rule weighs clients and makes the step of a sum, the channel does the rest."""

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
from rayfed.update import Encrypted, Masked, Named, Update


@dataclass(frozen=True)
class OverChannel(InteractiveAggregation[Sent, Partial, Total]):
    """Base of what makes of a rule the same on what a channel carries."""

    rule: AnyAggregation
    channel: SecureChannel[Any, Any]

    def weight(self, update: Update) -> int:
        """By what a client's update is multiplied before it is added."""
        raise NotImplementedError

    def caveat(self) -> str | None:
        """What clients see of one another in spite of the channel, in words; None where they see sums alone."""
        return None

    def check(self, clients: int) -> None:
        """As the rule and the channel have it."""
        self.rule.check(clients)
        self.channel.check(clients)

    def at_clients(self, round: ClientRound) -> Self:
        """The same with what clients of a round know."""
        return replace(self, channel=self.channel.at_clients(round))

    def protect(self, update: Update) -> Sent:
        """What a client sends of its update, with its size as `sent_bytes`."""
        raise NotImplementedError

    def observed(self, update: Update) -> Encrypted | Masked | None:
        """What a server that looks at one client has in place of its update; None: the update."""
        return self.channel.observed(update, self.weight(update))

    def idle(self, weights: Named, generator: torch.Generator) -> Named:
        """As the rule has it."""
        return self.rule.idle(weights, generator)


@dataclass(frozen=True)
class SumOverChannel(OverChannel[Any, Any, RoundSession]):
    """Any weighted sum over any channel."""

    rule: WeightedSumRule

    @classmethod
    def of(cls, rule: AnyAggregation, protection: Protection, clients: int, samples: int) -> SumOverChannel:
        """The rule under a protection, where a round has so many clients and samples at most.

        Raises `UserError` for a rule that is no weighted sum, and for parameters without room for one.
        """
        if not isinstance(rule, WeightedSumRule) or type(rule).partial is not WeightedSumRule.partial:
            raise UserError(
                f"a protection lets the server add updates and nothing else, which is not enough for "
                f"{type(rule).__name__}: use fedavg or fedboosting, or leave the protection out"
            )
        return cls(rule, protection.summing(clients, rule.heaviest(clients, samples), rule.step))

    def weight(self, update: Update) -> int:
        """As the rule weighs it."""
        return self.rule.weight(update)

    def protect(self, update: Update) -> Any:
        """The update with its weight."""
        return self.channel.protect(update, self.weight(update))

    def partial(self, sent: Iterable[Any]) -> Any:
        """As the channel adds."""
        return self.channel.partial(sent)

    def merge(self, left: Any, right: Any) -> Any:
        """As the channel adds."""
        return self.channel.merge(left, right)

    def begin_round(self, clients: Sequence[int], memory: Memory) -> RoundSession:
        """What the channel goes through to open the sum."""
        return self.channel.begin_round(clients)

    def answer(self, payload: Any, member: Member) -> Any:
        """What a client of the channel answers."""
        return self.channel.answer(payload, member.client, member.round)

    def combine(self, total: RoundSession, generator: torch.Generator) -> tuple[Named, Named]:
        """What the rule makes of the opened sum."""
        tensors, buffers, weight = self.channel.opened(total)
        return self.rule.combine(WeightedSum(tensors, buffers, float(weight)), generator)
