"""A weighted mean of updates that the server sees under masks alone, and whose sum it opens whoever drops out.

Source: Bonawitz et al. 2017, 'Practical secure aggregation for privacy-preserving machine learning', figure 4. Before
clients train, the rule's session asks for their keys (phase 0) and their shares (phase 1); what they send is masked
(phase 2); when all is added it asks the survivors for the shares that unmask the sum (phase 3). The protocol itself is
in `rayfed.crypto.masking` and `rayfed.crypto.session`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar

import numpy as np
import torch

from rayfed.aggregation.base import Aggregation, Member, Question
from rayfed.aggregation.fedavg import FedAvg, WeightedSum
from rayfed.aggregation.noisy_sum import NoisySum
from rayfed.aggregation.protected import single, units_of, weighted_sum_of
from rayfed.crypto.keys import derive
from rayfed.crypto.layout import Layout, flat
from rayfed.crypto.masking import Advertised, Participant, neighbours
from rayfed.crypto.sealing import beyond, in_steps
from rayfed.crypto.session import Advertise, Directories, Reveal, Session, Share
from rayfed.errors import ProtectionError, UserError
from rayfed.protections.secure_aggregation import Phase, SecureAggregation
from rayfed.seeds import numpy_generator
from rayfed.update import Masked, Named, Update


@dataclass(frozen=True)
class Clients:
    """What a process knows that works for clients, and the server does not."""

    secret: bytes
    """From which each client's own follows: it stands for what every device draws for itself."""
    told: Directories
    """What the session told them."""
    leaving: Sequence[int]
    """The round's clients in the order in which simulated drop-outs take them."""


@dataclass(frozen=True)
class SecureSum(Aggregation):
    """`rule` on masked updates."""

    rule: FedAvg
    protection: SecureAggregation
    clients: int
    """Of a round, at most."""
    hosted: Clients | None = None
    """None at the server."""

    needs_all: ClassVar[str | None] = (
        "the others' masks would stay in the sum; `dropouts` of the protection are those that it is prepared for"
    )

    @classmethod
    def of(cls, rule: Aggregation, protection: SecureAggregation, clients: int, samples: int) -> SecureSum:
        """The rule under masks, where a round has so many clients and samples at most.

        Raises `UserError` for a rule that is no weighted sum, and for sums that 64 bits have no room for.
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
        return cls(summed, protection, clients)

    def at_clients(self, secret: bytes, told: Directories, leaving: Sequence[int]) -> SecureSum:
        """The same where clients are."""
        return replace(self, hosted=Clients(secret, told, leaving))

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
        """Nothing known but the graph, which is public: it follows from the number of the round."""
        order = numpy_generator("neighbours", round)
        near = neighbours(clients, self.protection.neighbours or len(clients), order)
        return Session(near, self.protection.needed(len(clients)))

    def asks(self, total: Session) -> Question | None:
        """Keys, then shares; when vectors have come, what unmasks them."""
        asked = total.asks()
        return Question(asked) if asked else None

    def answer(self, payload: Advertise | Share | Reveal, member: Member) -> Any:
        """What a client says in phases 0, 1 and 3; None where it is not asked, or has dropped out."""
        client, itself = member.client, self._participant(member.client, member.round)
        match payload:
            case Advertise() if self._stays(client, "advertise"):
                return itself.advertise()
            case Share(directories) if client in directories and self._stays(client, "share"):
                return itself.share(directories[client], self.protection.needed(len(self._hosted.leaving)))
            case Reveal(directories, boxes, survivors, dropped) if client in boxes and self._stays(client, "reveal"):
                return itself.reveal(boxes[client], directories[client], survivors, dropped)
        return None

    def hears(self, total: Session, answers: Mapping[int, Any]) -> Session:
        """The session with what was said, aborted where too few are left."""
        return total.hears({client: answer for client, answer in answers.items() if answer is not None})

    def told(self, total: Session) -> Directories:
        """For each client that has shared the keys of those with whom it masks, and its own."""
        return total.told()

    def sends(self, update: Update) -> Masked:
        """The weighted update and its weight, masked; nothing of who has dropped out."""
        client, layout = update.client, Layout.of(update)
        told = self._hosted.told.get(client)
        if told is None or not self._stays(client, "mask"):
            nothing = np.zeros(layout.size + 1, np.uint64)
            return Masked(update.round, (), layout.tensors, layout.buffers, nothing)
        others = {other: keys for other, keys in told.items() if other != client}
        return self._masked(update, self._participant(client, update.round), others)

    def observed(self, update: Update) -> Masked:
        """The update under a mask of its own: what one is sent under cannot be told from it, nor used a second time."""
        return self._masked(update, Participant(update.client, secrets.token_bytes(32)), {})

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
            "clients": len(total.near),
            "advertised": len(total.advertised),
            "shared": len(total.boxes),
            "sent": len(total.masked.clients) if total.masked else 0,
            "revealed": len(total.revealed),
            "protocol_bytes": total.protocol_bytes,
            "aborted": total.aborted,
        }
        return {"secure_sums": [row]}

    @property
    def _hosted(self) -> Clients:
        if self.hosted is None:
            raise ProtectionError("only clients have secrets to mask with")
        return self.hosted

    def _participant(self, client: int, round: int) -> Participant:
        return Participant(client, derive(self._hosted.secret, client, round))

    def _stays(self, client: int, phase: Phase) -> bool:
        return client not in self._hosted.leaving[: self.protection.dropouts.until(phase)]

    def _masked(self, update: Update, itself: Participant, others: Mapping[int, Advertised]) -> Masked:
        p, layout, weight = self.protection, Layout.of(update), self.rule.weight(update)
        values = p.code.encode(flat(update), layout.bounds(p.clip, p.clip_buffers))
        vector = np.append(weight * values, weight).view(np.uint64)
        return Masked(update.round, (update.client,), layout.tensors, layout.buffers, itself.mask(vector, others))
