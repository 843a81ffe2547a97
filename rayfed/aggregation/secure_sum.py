"""A weighted mean of updates that the server sees under masks alone, and whose sum it opens whoever drops out.

Source: Bonawitz et al. 2017, 'Practical secure aggregation for privacy-preserving machine learning', figure 4. Before
clients train, the rule's session asks for their keys (phase 0) and their shares (phase 1), and they agree with whom and
for which model they mask what they send (phase 2); when all is added it has the survivors confirm who they are (phase
3), and asks for the shares that unmask the sum (phase 4). The protocol itself is in `rayfed.crypto.masking` and
`rayfed.crypto.session`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any, ClassVar

import numpy as np
import torch

from rayfed.aggregation.base import Aggregation, Member, Question
from rayfed.aggregation.fedavg import FedAvg, WeightedSum
from rayfed.aggregation.noisy_sum import NoisySum
from rayfed.aggregation.protected import single, units_of, weighted_sum_of
from rayfed.crypto.keys import derive
from rayfed.crypto.layout import Layout, flat
from rayfed.crypto.masking import Participant, Setting, Transcript, expand
from rayfed.crypto.sealing import beyond, in_steps
from rayfed.crypto.session import Advertise, Agree, Confirm, Reveal, Session, Share, Told
from rayfed.errors import ProtectionError, UserError
from rayfed.protections.secure_aggregation import Phase, SecureAggregation
from rayfed.update import Masked, Named, Update, digest_of


@dataclass(frozen=True)
class Hosted:
    """What a process knows that works for clients, and the server does not."""

    secret: bytes
    """From which each client's own follows: it stands for what every device draws for itself."""
    told: Told | None
    """What the session told them before they train; None before that, and where the round is aborted."""
    leaving: Sequence[int]
    """The round's clients in the order in which simulated drop-outs take them."""
    model: Named = field(default_factory=dict)
    """The weights and buffers that they were sent, by names of which none stands for both."""
    transcripts: dict[int, Transcript] = field(default_factory=dict)
    """What each of them remembers of the round; what a client answers is added to its own."""

    @cached_property
    def digest(self) -> bytes:
        """Of the model: clients mask for the same one, or not together.

        In the order in which it was sent, in which their values stand in what they mask.
        """
        return digest_of(self.model)


@dataclass(frozen=True)
class SecureSum(Aggregation):
    """`rule` on masked updates."""

    rule: FedAvg
    protection: SecureAggregation
    clients: int
    """Of a round, at most."""
    hosted: Hosted | None = None
    """None at the server."""

    needs_all: ClassVar[str | None] = (
        "the others' masks would stay in the sum; `dropouts` of the protection are those that it is prepared for"
    )

    @classmethod
    def of(cls, rule: Aggregation, protection: SecureAggregation, clients: int, samples: int) -> SecureSum:
        """The rule under masks, where a round has so many clients and samples at most.

        Raises `UserError` for a rule that is no weighted sum, for sums that 64 bits have no room for, and for a
        threshold of half the clients around one.
        """
        summed = weighted_sum_of(rule)
        if isinstance(summed, NoisySum) and summed.step is not None:
            protection = protection.exact(summed.step)
        units = units_of(summed, clients, samples)
        if protection.code.most * units >= 1 << 63:
            raise UserError(
                f"secure_aggregation: updates weighted up to {units} together have no room in 64 bits with "
                f"{protection.bits} bits a value: take fewer bits, or weights: uniform"
            )
        needed, around = protection.needed(clients), protection.around(clients)
        if 2 * needed <= around:
            raise UserError(
                f"secure_aggregation: threshold: {needed} is not more than half of {around}, a client and its "
                f"neighbours: a server that tells one half otherwise than the other would open single updates; take "
                f"{around // 2 + 1} or more"
            )
        return cls(summed, protection, clients)

    def at_clients(self, hosted: Hosted) -> SecureSum:
        """The same where clients are."""
        return replace(self, hosted=hosted)

    def check(self, clients: int) -> None:
        """Raise `UserError` where the smallest round has fewer clients than the threshold or the drop-outs need."""
        needed, around = self.protection.needed(clients), self.protection.around(clients)
        if needed > around:
            raise UserError(
                f"secure_aggregation: threshold: {needed} of a client and its neighbours must stay, but in a round of "
                f"{clients} clients they are {around}: take a lower threshold, or more clients a round"
            )
        if self.protection.dropouts.until("reveal") > clients:
            raise UserError(f"secure_aggregation: dropouts: more than the {clients} clients of a round: take fewer")

    def describe(self) -> str:
        """What is sent, in words."""
        p = self.protection
        return (
            f"masks sums of up to {self.clients} clients: {in_steps(p.code, p.clip, p.clip_buffers)}; opened by "
            f"{p.needed(self.clients)} of {p.around(self.clients)}, a client and its neighbours"
        )

    def caveat(self) -> None:
        """Clients see of one another what the server opens."""

    def opens(self, clients: Sequence[int], round: int) -> Session:
        """Nothing known: the graph follows from the keys that clients are going to advertise."""
        return Session(clients, self.protection.needed(len(clients)), self.protection.neighbours or len(clients))

    def asks(self, total: Session) -> Question | None:
        """What the session asks next; it waits for the masked sum in between."""
        asked = total.asks()
        return Question(asked) if asked else None

    def answer(self, payload: Advertise | Share | Agree | Confirm | Reveal, member: Member) -> Any:
        """What a client says in phases 0 to 4; None where it is not asked, or has dropped out."""
        client, itself = member.client, self._participant(member.client, member.round)
        match payload:
            case Advertise() if self._stays(client, "advertise"):
                return itself.advertise()
            case Share(directory) if client in directory and self._stays(client, "share"):
                return itself.share(directory)
            case Agree(directory, shared) if client in shared and self._stays(client, "mask"):
                return itself.agree(directory, shared, self._hosted.digest)
            case Confirm(directory, shared, survivors, agreed) if client in agreed and self._stays(client, "confirm"):
                return itself.confirm(directory, shared, survivors, agreed[client])
            case Reveal(directory, shared, survivors, confirmed, boxes) if client in boxes and self._stays(
                client, "reveal"
            ):
                return itself.reveal(directory, shared, survivors, confirmed[client], boxes[client])
        return None

    def hears(self, total: Session, answers: Mapping[int, Any]) -> Session:
        """The session with what was said, aborted where too few are left."""
        return total.hears({client: answer for client, answer in answers.items() if answer is not None})

    def told(self, total: Session) -> Told | None:
        """With whom clients mask; None where the round is aborted."""
        return total.told()

    def sends(self, update: Update) -> Masked:
        """The weighted update and its weight, masked; nothing of who has dropped out."""
        told, vector = self._hosted.told, self._vector(update)
        if told is None or update.client not in told.agreed or not self._stays(update.client, "mask"):
            return _masked(update, (), np.zeros_like(vector))
        itself, agreed = self._participant(update.client, update.round), told.agreed[update.client]
        masked = itself.mask(vector, told.directory, told.shared, self._hosted.digest, agreed)
        return _masked(update, (update.client,), masked)

    def observed(self, update: Update) -> Masked:
        """The update under a mask of its own: what one is sent under cannot be told from it, nor used a second time."""
        vector = self._vector(update)
        return _masked(update, (update.client,), vector + expand(secrets.token_bytes(32), len(vector)))

    def clipped(self, update: Update) -> int:
        """Values beyond the protection's clip bounds."""
        return beyond(update, self.protection.clip, self.protection.clip_buffers)

    def partial(self, updates: Iterable[Masked]) -> Masked:
        """The sum over one cohort."""
        return reduce(self.merge, updates)

    def merge(self, left: Masked, right: Masked) -> Masked:
        """The sum of two sums, modulo 2^64."""
        return replace(left, clients=left.clients + right.clients, vector=left.vector + right.vector)

    def joins(self, session: Session, total: Masked) -> Session:
        """The session with the masked sum."""
        return session.joins(total)

    def aborted(self, total: Session) -> str | None:
        """That too few were left to open a sum."""
        return total.aborted

    def combine(self, total: Session, generator: torch.Generator) -> tuple[Named, Named]:
        """What the rule makes of such a sum."""
        assert total.masked is not None
        assert total.opened is not None
        p, layout = self.protection, Layout(total.masked.tensors, total.masked.buffers)
        values = p.code.decode(total.opened[:-1], layout.bounds(p.clip, p.clip_buffers))
        tensors, buffers = (single(part) for part in layout.named(values))
        return self.rule.combine(WeightedSum(tensors, buffers, float(total.opened[-1])), generator)

    def idle(self, weights: Named, generator: torch.Generator) -> Named:
        """As the rule has it."""
        return self.rule.idle(weights, generator)

    def rows(self, total: Session) -> dict[str, list[dict[str, Any]]]:
        """How many clients were left in each phase, and what was sent for it."""
        row = {
            "clients": len(total.clients),
            "advertised": len(total.advertised),
            "shared": len(total.boxes),
            "sent": len(total.masked.clients) if total.masked else 0,
            "confirmed": len(total.confirmed),
            "revealed": len(total.revealed),
            "protocol_bytes": total.protocol_bytes,
            "aborted": total.aborted,
        }
        return {"secure_sums": [row]}

    @property
    def _hosted(self) -> Hosted:
        if self.hosted is None:
            raise ProtectionError("only clients have secrets to mask with")
        return self.hosted

    def _participant(self, client: int, round: int) -> Participant:
        hosted, p = self._hosted, self.protection
        drawn = len(hosted.leaving)
        setting = Setting(derive(hosted.secret, "run"), round, p.needed(drawn), p.neighbours or drawn)
        return Participant(
            client, derive(hosted.secret, client, round), setting, hosted.transcripts.setdefault(client, {})
        )

    def _stays(self, client: int, phase: Phase) -> bool:
        return client not in self._hosted.leaving[: self.protection.dropouts.until(phase)]

    def _vector(self, update: Update) -> np.ndarray:
        """(D + 1,) uint64: the weighted update in whole steps, and its weight."""
        p, layout, weight = self.protection, Layout.of(update), self.rule.weight(update)
        values = p.code.encode(flat(update), layout.bounds(p.clip, p.clip_buffers))
        return np.append(weight * values, weight).view(np.uint64)


def _masked(update: Update, clients: tuple[int, ...], vector: np.ndarray) -> Masked:
    layout = Layout.of(update)
    return Masked(update.round, clients, layout.tensors, layout.buffers, vector)
