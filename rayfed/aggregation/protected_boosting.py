"""FedBoosting on updates that the server cannot read: it multiplies and adds ciphertexts by the weights that it finds.

Source: Ren's thesis, algorithms 2 and 3 and equations 4.4 and 4.5. What clients score they have to open, so encryption
hides nothing from them: each update as it is, or, with `fusion`, a mixture of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar

import torch

from rayfed.aggregation.base import Member, Memory, Question
from rayfed.aggregation.fedavg import scaled
from rayfed.aggregation.fedboosting import Ballot, Candidate, FedBoosting, Judgement
from rayfed.aggregation.protected import Sealing
from rayfed.crypto.packing import apportion
from rayfed.crypto.sealing import Load
from rayfed.errors import UserError
from rayfed.protections.base import Protection
from rayfed.update import Named, Sealed, Update

Opened = tuple[Named, Named]
"""A mean of updates, and of their buffers."""


@dataclass(frozen=True)
class SealedCandidate:
    """What one client sends."""

    update: Sealed
    loss: float
    """Its training loss, in plain: the server weighs by it."""

    @property
    def sent_bytes(self) -> int:
        """Bytes on the wire of what is sealed."""
        return self.update.sent_bytes


@dataclass(frozen=True)
class SealedBallot:
    """A round's candidates, and what has become of them."""

    updates: dict[int, Sealed]
    ballot: Ballot
    """As the plain rule has it, but for the candidates' values."""
    opened: Opened | None = None
    """Their weighted sum."""


@dataclass(frozen=True)
class ProtectedBoosting(Sealing):
    """FedBoosting on sealed updates."""

    rule: FedBoosting

    validates: ClassVar[bool] = FedBoosting.validates
    reveals: ClassVar[str | None] = FedBoosting.reveals

    @classmethod
    def of(cls, rule: FedBoosting, protection: Protection, clients: int) -> ProtectedBoosting:
        """The rule under a protection, where a round has so many clients at most.

        Raises `UserError` for parameters without room for its sums, and for more clients than can be fused in so few
        pieces.
        """
        pieces = protection.pieces_of_weight
        if not all(int(share * pieces) for share in rule.mixtures(range(clients))[0].values()):
            raise UserError(
                f"fedboosting: fusion {rule.fusion} leaves the {clients - 1} others of a round less than one of "
                f"{pieces} pieces each, so that models would not be fused: raise the protection's pieces_of_weight"
            )
        return cls(rule, protection.sealer(Load(clients, pieces, multiplied=True)))

    def caveat(self) -> str | None:
        """Updates, or what they can be worked out from."""
        if self.rule.fusion is None:
            return "shows every client all others' updates in plain, to be scored: only the server does not see them"
        return "shows every client mixtures of all updates: fusion adds no noise, so that each can be worked out"

    def sealed(self, update: Update) -> Sealed:
        """The update sealed; how it weighs is not its client's to say."""
        return self.sealer.seal(self._own_keys, update, weight=1)

    def sends(self, update: Update) -> SealedCandidate:
        """The update sealed and the training loss."""
        return SealedCandidate(self.sealed(update), update.loss)

    def partial(self, updates: Iterable[SealedCandidate]) -> SealedBallot:
        """The cohort's, as they are."""
        return reduce(self.merge, (self._alone(candidate) for candidate in updates))

    def merge(self, left: SealedBallot, right: SealedBallot) -> SealedBallot:
        """All of both."""
        return SealedBallot(left.updates | right.updates, self.rule.merge(left.ballot, right.ballot))

    def recall(self, total: SealedBallot, memory: Memory) -> SealedBallot:
        """As the rule has it."""
        return replace(total, ballot=self.rule.recall(total.ballot, memory))

    def asks(self, total: SealedBallot) -> Question | None:
        """Every client about all models, then one for the weighted sum."""
        if not total.ballot.judgements:
            return Question(self.shown(total))
        return None if total.opened else Question(self._weighted(total.updates, total.ballot.weights), of="one")

    def shown(self, total: SealedBallot) -> dict[int, Sealed]:
        """What stands for each client's model when it is scored (equation 4.5, rounded down as there)."""
        pieces = self.sealer.load.units
        return {
            model: self.sealer.weighted([total.updates[c] for c in mix], [int(s * pieces) for s in mix.values()])
            for model, mix in self.rule.mixtures(total.updates).items()
        }

    def answer(self, payload: Sealed | Mapping[int, Sealed], member: Member) -> Opened | Judgement:
        """The weighted sum in the clear, never one client's update; or the client's scores of all models."""
        if isinstance(payload, Sealed):
            return self.mean(payload, member.round)
        alone = self.rule.fusion is None
        return self.rule.answer({m: self.mean(shown, member.round, alone) for m, shown in payload.items()}, member)

    def mean(self, payload: Sealed, round: int, alone: bool = False) -> Opened:
        """The mean that a sealed sum of this round holds; of a single update only where `alone`."""
        tensors, buffers, weight = self.opened(payload, round, alone)
        return scaled(tensors, 1 / weight), scaled(buffers, 1 / weight)

    def hears(self, total: SealedBallot, answers: Mapping[int, Any]) -> SealedBallot:
        """The ballot decided, or its sum."""
        if not total.ballot.judgements:
            return replace(total, ballot=self.rule.hears(total.ballot, answers))
        [opened] = answers.values()
        return replace(total, opened=opened)

    def combine(self, total: SealedBallot, generator: torch.Generator) -> Opened:
        """What the client opened."""
        assert total.opened is not None
        return total.opened

    def memory(self, total: SealedBallot) -> Memory:
        """As the rule has it."""
        return self.rule.memory(total.ballot)

    def rows(self, total: SealedBallot) -> dict[str, list[dict[str, Any]]]:
        """As the rule has them."""
        return self.rule.rows(total.ballot)

    @staticmethod
    def _alone(candidate: SealedCandidate) -> SealedBallot:
        client = candidate.update.shares[0].client
        return SealedBallot({client: candidate.update}, Ballot({client: Candidate({}, {}, candidate.loss)}))

    def _weighted(self, updates: Mapping[int, Sealed], weights: Mapping[int, float]) -> Sealed:
        """Equation 4.4, the weights dealt in pieces by largest remainders."""
        pieces = apportion([weights[client] for client in updates], self.sealer.load.units)
        return self.sealer.weighted(list(updates.values()), pieces)
