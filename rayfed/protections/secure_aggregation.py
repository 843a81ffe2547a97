"""Secure aggregation: updates under masks that cancel in their sum, also if clients drop out.

Before clients train, the channel's session asks for their keys (phase 0) and their shares (phase 1), and they agree
with whom and for which model they mask what they send (phase 2); when all is added it has the survivors confirm who
they are (phase 3), and asks for the shares that unmask the sum (phase 4). The protocol itself is in
`rayfed.crypto.masking` and `rayfed.crypto.session`.

Sources: Bonawitz et al. 2017, 'Practical secure aggregation for privacy-preserving machine learning', figure 4; Bell et
al. 2020, 'Secure single-server aggregation with (poly)logarithmic overhead', section 3, for the sparse graph.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rayfed.crypto.encryptor import beyond, in_steps
from rayfed.crypto.keys import derive
from rayfed.crypto.layout import Layout, flat, single
from rayfed.crypto.masking import Participant, Setting, Transcript, expand
from rayfed.crypto.packing import FixedPoint
from rayfed.crypto.session import Advertise, Agree, Confirm, MaskingSession, Peers, Reveal, Share
from rayfed.errors import ProtectionError, UserError
from rayfed.protections.base import Clipping
from rayfed.protections.channel import ClientRound, Opened, SecureChannel
from rayfed.registry import component
from rayfed.update import Masked, Named, Update, digest_of

Phase = Literal["advertise", "share", "mask", "confirm", "reveal"]
PHASES: tuple[Phase, ...] = ("advertise", "share", "mask", "confirm", "reveal")

Count = Annotated[int, Field(ge=0)]


@component
class Dropouts:
    """Numbers of clients of a round that drop out before each phase, for the rest of the round."""

    advertise: Count = 0
    share: Count = 0
    mask: Count = 0
    confirm: Count = 0
    reveal: Count = 0

    def until(self, phase: Phase) -> int:
        """Return the number of clients that have dropped out when this phase's messages are sent."""
        return sum(getattr(self, each) for each in PHASES[: PHASES.index(phase) + 1])


@component
class SecureAggregation(Clipping):
    """Send updates as integers under pairwise and own masks: the server learns the sum alone.

    No key is shared by all, and a client answers nothing that contradicts what it was asked before in the round. With n
    clients around one (itself and its neighbours), a server that lies does not get both secrets of a client as long as
    fewer than 2 * threshold - n of them collude with it and it passes on clients' own keys: it could replace them, for
    nobody vouches for them. Where fewer than `threshold` are left of some client and its neighbours, the round is not
    applied.
    """

    masks: ClassVar[bool] = True

    threshold: Annotated[int, Field(ge=2)] | None = None
    """Number of a client and its neighbours who must stay for the sum to be opened: more than half of them; null: more
    than two thirds."""
    neighbours: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    """Clients with whom each one has common masks; null: all others of the round."""
    bits: Annotated[int, Field(ge=2, le=32)] = 32
    """Bits of one value; half a step, clip / (2^bits - 2), is lost at most. What is sent has 64 whatever this says."""
    dropouts: Dropouts = Dropouts()
    """Clients that drop out in every round, to show what becomes of it: how many before which phase, drawn from the
    seed."""

    @model_validator(mode="after")
    def _connected(self) -> Self:
        # Who has lost all neighbours on one side of the ring has half of them and itself left: the round ends there.
        if self.neighbours and self.threshold and self.threshold < self.neighbours // 2 + 2:
            raise ValueError(
                f"threshold: with {self.neighbours} neighbours take {self.neighbours // 2 + 2} or more: drop-outs may "
                f"cut the graph otherwise, and the server would learn the sum of each part"
            )
        return self

    @property
    def code(self) -> FixedPoint:
        """Code of values as integers."""
        return FixedPoint(self.bits)

    def summing(self, clients: int, units: int, step: float | None) -> MaskedChannel:
        """Return the channel for weighted updates as 64-bit integers; multiples of a step stay exact.

        Raises `UserError` for sums that 64 bits have no room for, and for a threshold of half the clients around one.
        """
        protection = self if step is None else self.exact(step)
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
        return MaskedChannel(protection, clients)

    def exact(self, step: float) -> SecureAggregation:
        """Return a copy that keeps multiples of `step` exact, up to 2^24 of them."""
        return replace(self, bits=32, clip=step * FixedPoint(32).most)

    @property
    def missing(self) -> int:
        """Number of clients that drop out before they send."""
        return self.dropouts.until("mask")

    def around(self, clients: int) -> int:
        """Return the number of clients in a neighbourhood, the client included, for rounds of this size."""
        return min(self.neighbours or clients, clients - 1) + 1

    def needed(self, clients: int) -> int:
        """Return how many clients of a neighbourhood must stay."""
        return self.threshold or 2 * self.around(clients) // 3 + 1

    def withstands(self, clients: int, colluders: int) -> bool:
        """Return whether a server that colludes with clients learns only the sum of the others.

        The server is honest but curious. Colluders must be fewer than the threshold, which opens a client's secrets.
        And the others must be connected by masks, else each part of them shows its sum: a ring with k neighbours takes
        the loss of any k - 1 (Harary 1962).
        """
        lost = colluders + self.missing
        connected = self.around(clients) == clients or lost < self.around(clients) - 1
        return colluders < self.needed(clients) and connected


@dataclass(frozen=True)
class Hosted:
    """Secrets and state of a process with clients, none of which the server has."""

    secret: bytes
    """Secret from which each client's own follows: it stands for what every device draws for itself."""
    peers: Peers | None
    """Content that the session sent clients before they train; None before that, and where the round is aborted."""
    leaving: Sequence[int]
    """The round's clients in the order in which simulated drop-outs take them."""
    model: Named = field(default_factory=dict)
    """The weights and buffers that they were sent, by names of which none stands for both."""
    transcripts: dict[int, Transcript] = field(default_factory=dict)
    """Transcript of each client in the round, to which its answers are added."""

    @cached_property
    def digest(self) -> bytes:
        """Digest of the model, on which clients that mask together must agree.

        In the order in which it was sent, in which their values stand in what they mask.
        """
        return digest_of(self.model)


@dataclass(frozen=True)
class MaskedChannel(SecureChannel[Masked, Masked]):
    """Channel of masked updates, of which the server sees only the sum, also if clients drop out."""

    protection: SecureAggregation
    clients: int
    """Most clients of a round."""
    hosted: Hosted | None = None
    """Knowledge of the clients; None at the server."""

    needs_all: ClassVar[str | None] = (
        "the others' masks would stay in the sum; `dropouts` of the protection are those that it is prepared for"
    )

    def check(self, clients: int) -> None:
        """Raise `UserError` if the smallest round has fewer clients than threshold or drop-outs require."""
        needed, around = self.protection.needed(clients), self.protection.around(clients)
        if needed > around:
            raise UserError(
                f"secure_aggregation: threshold: {needed} of a client and its neighbours must stay, but in a round of "
                f"{clients} clients they are {around}: take a lower threshold, or more clients a round"
            )
        if self.protection.dropouts.until("reveal") > clients:
            raise UserError(f"secure_aggregation: dropouts: more than the {clients} clients of a round: take fewer")

    def describe(self) -> str:
        """Return the resolution of sent values and who unmasks the sum, in words."""
        p = self.protection
        return (
            f"masks sums of up to {self.clients} clients: {in_steps(p.code, p.clip, p.clip_buffers)}; opened by "
            f"{p.needed(self.clients)} of {p.around(self.clients)}, a client and its neighbours"
        )

    def at_clients(self, round: ClientRound) -> Self:
        """Return a copy with each client's secret, and the model that it masks for."""
        parts = {"weights": round.sent.weights, "buffers": round.sent.buffers}
        model = {f"{part}.{name}": t for part, tensors in parts.items() for name, t in tensors.items()}
        own = derive(round.secret, "own")
        hosted = Hosted(own, round.sent.broadcast, round.leaving, model, round.transcripts)
        return replace(self, hosted=hosted)

    def protect(self, update: Update, weight: int) -> Masked:
        """Return the masked weighted update and weight; an empty message for a client that has dropped out."""
        peers, vector = self._hosted.peers, self._vector(update, weight)
        if peers is None or update.client not in peers.agreed or not self._stays(update.client, "mask"):
            return _masked(update, (), np.zeros_like(vector))
        itself, agreed = self._participant(update.client, update.round), peers.agreed[update.client]
        masked = itself.mask(vector, peers.directory, peers.shared, self._hosted.digest, agreed)
        return _masked(update, (update.client,), masked)

    def observed(self, update: Update, weight: int) -> Masked:
        """Return the update under an independent mask.

        What one is sent under cannot be told from it, nor used a second time.
        """
        vector = self._vector(update, weight)
        return _masked(update, (update.client,), vector + expand(secrets.token_bytes(32), len(vector)))

    def clipped(self, update: Update) -> int:
        """Return the number of values beyond the protection's clip bounds."""
        return beyond(update, self.protection.clip, self.protection.clip_buffers)

    def answer(self, payload: Advertise | Share | Agree | Confirm | Reveal, client: int, round: int) -> Any:
        """Return a client's answer in phases 0 to 4; None if it is not asked or has dropped out."""
        itself = self._participant(client, round)
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

    def partial(self, messages: Iterable[Masked]) -> Masked:
        """Return the sum over one cohort."""
        return reduce(self.merge, messages)

    def merge(self, left: Masked, right: Masked) -> Masked:
        """Return the sum of two sums, modulo 2^64."""
        return replace(left, clients=left.clients + right.clients, vector=left.vector + right.vector)

    def begin_round(self, clients: Sequence[int]) -> MaskingSession:
        """Return the initial session.

        The graph follows from the keys that clients are going to advertise.
        """
        return MaskingSession(clients, self.protection.needed(len(clients)), self.protection.neighbours or len(clients))

    def opened(self, session: MaskingSession) -> Opened:
        """Return the unmasked sums, and the sum of the weights."""
        assert session.masked is not None
        assert session.opened is not None
        p, layout = self.protection, Layout(session.masked.tensors, session.masked.buffers)
        values = p.code.decode(session.opened[:-1], layout.bounds(p.clip, p.clip_buffers))
        tensors, buffers = (single(part) for part in layout.named(values))
        return tensors, buffers, int(session.opened[-1])

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

    def _vector(self, update: Update, weight: int) -> np.ndarray:
        """Return the weighted update in whole steps, with its weight, (D + 1,) uint64."""
        p, layout = self.protection, Layout.of(update)
        values = p.code.encode(flat(update), layout.bounds(p.clip, p.clip_buffers))
        return np.append(weight * values, weight).view(np.uint64)


def _masked(update: Update, clients: tuple[int, ...], vector: np.ndarray) -> Masked:
    layout = Layout.of(update)
    return Masked(update.round, clients, layout.tensors, layout.buffers, vector)
