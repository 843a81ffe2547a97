"""FedBoosting on encrypted updates: the server multiplies ciphertexts by the clients' weights and adds the products.

It needs a channel that can do both. It is a class separate from `FedBoosting` because its messages differ: weights are
whole pieces, one client decrypts the step, and clients check everything that they are asked to decrypt.

Source: Ren's thesis, algorithms 2 and 3 and equations 4.4 and 4.5. Clients decrypt the models that they score, so
encryption hides nothing from them. They see each update, or with `fusion` a mixture of all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Self

import torch

from rayfed.aggregation.base import Member
from rayfed.aggregation.fedboosting import (
    Candidate,
    Candidates,
    Evaluation,
    FedBoosting,
    RoundScores,
    Score,
    Tensors,
    as_mixtures,
)
from rayfed.aggregation.over_channel import OverChannel
from rayfed.aggregation.weighted_sum import scaled
from rayfed.core.questions import Memory, Question
from rayfed.crypto.packing import apportion
from rayfed.errors import ProtectionError, UserError
from rayfed.protections.base import Protection
from rayfed.protections.encrypted import EncryptedChannel, Open
from rayfed.update import Encrypted, Mixtures, Update


@dataclass(frozen=True)
class EncryptedCandidate(Candidate[Encrypted]):
    """One client's encrypted update with the client's training loss."""

    @property
    def sent_bytes(self) -> int:
        """Return the size of the message's encrypted part in bytes."""
        return self.model.sent_bytes


@dataclass(frozen=True, kw_only=True)
class EncryptedScores(RoundScores[Encrypted]):
    """Session (the server's state) of a round with encrypted updates, which only clients can decrypt."""

    over: BoostingOverChannel
    opened: Tensors | None = None
    """The decrypted weighted sum of the updates."""

    def request(self) -> Question | None:
        """Return the next question: first all clients score all models, then one client decrypts the weighted sum."""
        if not self.evaluations or self.opened:
            return super().request()
        pieces = apportion([self.weights[client] for client in self.candidates], self.over.pieces)  # equation 4.4
        updates = [candidate.model for candidate in self.candidates.values()]
        return Question(Open(self.over.channel.encryptor.weighted(updates, pieces)), of="one")

    def receive(self, answers: Mapping[int, Any]) -> Self:
        """Return the session after the clients' replies: with the computed weights, or with the decrypted sum."""
        if not self.evaluations:
            return super().receive(answers)
        [opened] = answers.values()
        return replace(self, opened=opened)


@dataclass(frozen=True)
class BoostingOverChannel(OverChannel[EncryptedCandidate, Candidates[Encrypted], EncryptedScores]):
    """FedBoosting over any secure channel whose ciphertexts the server can add and multiply."""

    rule: FedBoosting
    channel: EncryptedChannel

    @classmethod
    def of(cls, rule: FedBoosting, protection: Protection, clients: int) -> BoostingOverChannel:
        """Return the rule FedBoosting over a protection's channel, for rounds of at most `clients` clients.

        Raises `UserError` for parameters without room for the sums, and if there are too few pieces to fuse that many
        clients.
        """
        channel = protection.mixing(clients)
        pieces = channel.encryptor.load.units
        if not all(int(share * pieces) for share in rule.shares(range(clients))[0].values()):
            raise UserError(
                f"fedboosting: with fusion {rule.fusion}, each of the {clients - 1} other clients of a round gets less "
                f"than one of {pieces} pieces, so models would not be fused: increase the protection's pieces_of_weight"
            )
        return cls(rule, channel)

    @property
    def pieces(self) -> int:
        """Return the number of pieces (whole units of weight) into which the server divides the total weight."""
        return self.channel.encryptor.load.units

    def caveat(self) -> str | None:
        """Return, in words, how much of the other clients' updates every client sees."""
        if self.rule.fusion is None:
            return "hides the updates only from the server: every client decrypts all of them to score them"
        return "shows every client mixtures of all updates: fusion adds no noise, so each update can be computed"

    def weight(self, update: Update) -> int:
        """Return 1, because the server applies the weights after encryption."""
        return 1

    def protect(self, update: Update) -> EncryptedCandidate:
        """Return a client's encrypted update with the client's training loss."""
        return EncryptedCandidate(update.client, self.channel.protect(update, self.weight(update)), update.loss)

    def partial(self, sent: Iterable[EncryptedCandidate]) -> Candidates[Encrypted]:
        """Return the encrypted updates of one cohort of clients, with their training losses, by client."""
        return {candidate.client: candidate for candidate in sent}

    def merge(self, left: Candidates[Encrypted], right: Candidates[Encrypted]) -> Candidates[Encrypted]:
        """Merge the encrypted updates of two groups of cohorts, by client."""
        return left | right

    def begin_round(self, clients: Sequence[int], memory: Memory) -> EncryptedScores:
        """Begin a round with the clients' smoothed weights of earlier rounds, and return the session."""
        return EncryptedScores(weigh=self.rule.weigh, mixed=self.mixed, memory=memory, over=self)

    def mixed(self, models: Mapping[int, Encrypted]) -> dict[int, Encrypted]:
        """Return the encrypted mixture of updates that is scored for each client (equation 4.5)."""
        return {
            model: self.channel.encryptor.weighted([models[client] for client in mix], list(mix.values()))
            for model, mix in self._mixes(models).items()
        }

    def mixtures(self, updates: Sequence[Update]) -> Mixtures:
        """Return the decrypted mixtures of a round's updates that clients receive for scoring."""
        models = {update.client: self.protect(update).model for update in updates}
        mixes = self._mixes(models)
        shares = {model: {c: Fraction(n, sum(mix.values())) for c, n in mix.items()} for model, mix in mixes.items()}
        return as_mixtures(self._opened(self.mixed(models), updates[0].round), shares)

    def answer(self, payload: Score[Encrypted] | Open, member: Member) -> Evaluation | Tensors:
        """Return a client's reply: the client's scores of all models, or the decrypted weighted sum of the updates.

        Raises `ProtectionError` for mixtures that differ from the rule's, and for a sum of fewer than all pieces. The
        server computes the number of pieces per client from the clients' replies, and a client cannot check it.
        """
        if isinstance(payload, Open):
            self._check_sum(payload.sum)
            return self._mean(payload.sum, member.round)
        self.channel.check_present(payload.models)
        if {model: factors(encrypted) for model, encrypted in payload.models.items()} != self._mixes(payload.models):
            raise ProtectionError("the server sent mixtures that differ from the rule's and are not decrypted")
        return self.rule.answer(Score(self._opened(payload.models, member.round)), member)

    def combine(self, total: EncryptedScores, generator: torch.Generator) -> Tensors:
        """Return the weighted sum of the updates, as decrypted by a client."""
        assert total.opened is not None
        return total.opened

    def _check_sum(self, payload: Encrypted) -> None:
        pieces = factors(payload)
        if not set(pieces) <= set(self.channel.clients) or sum(pieces.values()) != self.pieces:
            raise ProtectionError(
                f"the server asks for a sum of {sum(pieces.values())} of {self.pieces} pieces, or of clients that are "
                f"not in the round: it is not decrypted"
            )

    def _opened(self, models: Mapping[int, Encrypted], round: int) -> dict[int, Tensors]:
        """Decrypt the models to be scored; a single update only if nothing is fused."""
        return {model: self._mean(one, round, alone=self.rule.fusion is None) for model, one in models.items()}

    def _mean(self, encrypted: Encrypted, round: int, alone: bool = False) -> Tensors:
        tensors, buffers, weight = self.channel.open(encrypted, round, alone)
        return scaled(tensors, 1 / weight), scaled(buffers, 1 / weight)

    def _mixes(self, clients: Collection[int]) -> dict[int, dict[int, int]]:
        """Return the pieces of each client's update in the mixture for each model: model -> client -> pieces."""
        shares = self.rule.shares(clients)
        return {model: {client: int(s * self.pieces) for client, s in mix.items()} for model, mix in shares.items()}


def factors(encrypted: Encrypted) -> dict[int, int]:
    """Return the factor by which the server has multiplied each client's encrypted update, by client."""
    return {share.client: share.after for share in encrypted.shares}
