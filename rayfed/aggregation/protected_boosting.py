"""FedBoosting on updates that the server cannot read: it multiplies and adds ciphertexts by the weights that it finds.

Source: Ren's thesis, algorithms 2 and 3 and equations 4.4 and 4.5. What clients score they have to open, so encryption
hides nothing from them: each update as it is, or, with `fusion`, a mixture of all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from typing import Any, ClassVar

import torch

from rayfed.aggregation.base import Member, Memory, Question
from rayfed.aggregation.fedavg import scaled
from rayfed.aggregation.fedboosting import Ballot, Candidate, FedBoosting, Judgement, as_shown
from rayfed.aggregation.protected import Sealing
from rayfed.crypto.packing import apportion
from rayfed.crypto.sealing import Load
from rayfed.errors import ProtectionError, UserError
from rayfed.protections.base import Encryption
from rayfed.update import Named, Sealed, Shown, Update

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
    def of(cls, rule: FedBoosting, protection: Encryption, clients: int) -> ProtectedBoosting:
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
        return {
            model: self.sealer.weighted([total.updates[client] for client in pieces], list(pieces.values()))
            for model, pieces in self._pieces(total.updates).items()
        }

    def seen(self, updates: Sequence[Update]) -> Shown:
        """The same, opened."""
        total, mixtures = self.partial(map(self.sends, updates)), self._pieces([update.client for update in updates])
        shares = {model: {c: Fraction(n, sum(mix.values())) for c, n in mix.items()} for model, mix in mixtures.items()}
        return as_shown(self._opened(self.shown(total), updates[0].round), shares)

    def answer(self, payload: Sealed | Mapping[int, Sealed], member: Member) -> Opened | Judgement:
        """The weighted sum in the clear, never one client's update; or the client's scores of all models.

        Raises `ProtectionError` for mixtures that are not the rule's, and for a sum of less than all pieces. How these
        are dealt the server finds, from what it is told, and may name as it likes.
        """
        if isinstance(payload, Sealed):
            self._check_sum(payload)
            return self._mean(payload, member.round)
        self.check_present(payload)
        if {model: _factors(sealed) for model, sealed in payload.items()} != self._pieces(payload):
            raise ProtectionError("the server asks to score other mixtures than the rule's: they are not opened")
        return self.rule.answer(self._opened(payload, member.round), member)

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

    def _check_sum(self, payload: Sealed) -> None:
        pieces = _factors(payload)
        if not set(pieces) <= set(self.clients) or sum(pieces.values()) != self.sealer.load.units:
            raise ProtectionError(
                f"the server asks for a sum of {sum(pieces.values())} of {self.sealer.load.units} pieces, or of others "
                f"than the round's clients: it is not opened"
            )

    def _opened(self, shown: Mapping[int, Sealed], round: int) -> dict[int, Opened]:
        """What is to be scored; a single update only where nothing is fused."""
        return {model: self._mean(sealed, round, alone=self.rule.fusion is None) for model, sealed in shown.items()}

    def _mean(self, payload: Sealed, round: int, alone: bool = False) -> Opened:
        tensors, buffers, weight = self.opened(payload, round, alone)
        return scaled(tensors, 1 / weight), scaled(buffers, 1 / weight)

    def _pieces(self, clients: Collection[int]) -> dict[int, dict[int, int]]:
        """Model -> client -> by how many pieces its update is multiplied in what stands for the model."""
        units, mixtures = self.sealer.load.units, self.rule.mixtures(clients)
        return {model: {client: int(share * units) for client, share in mix.items()} for model, mix in mixtures.items()}

    @staticmethod
    def _alone(candidate: SealedCandidate) -> SealedBallot:
        client = candidate.update.shares[0].client
        return SealedBallot({client: candidate.update}, Ballot({client: Candidate({}, {}, candidate.loss)}))

    def _weighted(self, updates: Mapping[int, Sealed], weights: Mapping[int, float]) -> Sealed:
        """Equation 4.4, the weights dealt in pieces by largest remainders."""
        pieces = apportion([weights[client] for client in updates], self.sealer.load.units)
        return self.sealer.weighted(list(updates.values()), pieces)


def _factors(sealed: Sealed) -> dict[int, int]:
    """By client, what the server has multiplied its update by."""
    return {share.client: share.after for share in sealed.shares}
