"""Secure aggregation: updates are sent with masks that cancel in the sum, even if clients drop out.

Before training, the channel's session asks clients for their keys (phase 0) and shares (phase 1). Clients then agree on
the clients and the model to mask for (phase 2). After the vectors are added, the survivors confirm their list (phase 3)
and send the shares that unmask the sum (phase 4). The protocol is in `rayfed.crypto.masking` and
`rayfed.crypto.session`.

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

from rayfed.crypto.encryptor import count_beyond, describe_resolution
from rayfed.crypto.keys import derive
from rayfed.crypto.layout import UpdateLayout, flatten_update, to_single
from rayfed.crypto.masking import MaskingSetting, Participant, Transcript, expand_mask
from rayfed.crypto.packing import FixedPoint
from rayfed.crypto.session import Advertise, Agree, Confirm, MaskingSession, Peers, Reveal, ShareSecrets
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
    """Numbers of clients per round that drop out before each phase of secure aggregation."""

    advertise: Count = 0
    share: Count = 0
    mask: Count = 0
    confirm: Count = 0
    reveal: Count = 0

    def until(self, phase: Phase) -> int:
        """Return the number of clients that drop out before the messages of the given phase are sent."""
        return sum(getattr(self, each) for each in PHASES[: PHASES.index(phase) + 1])


@component
class SecureAggregation(Clipping):
    """Send updates as integers with pairwise and individual masks, so that the server learns only their sum.

    No key is shared by all clients, and a client rejects questions that contradict earlier ones of the round. Let n be
    the number of a client and its neighbours. A malicious server never obtains both secrets of a client if fewer than 2
    * threshold - n of them collude with it and it forwards the clients' keys unchanged. It could forge keys, because no
    authority certifies them. The round is not applied if fewer than `threshold` of some client and its neighbours are
    left.
    """

    masks: ClassVar[bool] = True

    threshold: Annotated[int, Field(ge=2)] | None = None
    """Minimum number of a client and its neighbours that must stay to unmask the sum: more than half of them. Null:
    more than two thirds."""
    neighbours: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    """Number of clients with which each client shares masks. Null: all other clients of the round."""
    bits: Annotated[int, Field(ge=2, le=32)] = 32
    """Bits per value. The rounding error is at most half a step, clip / (2^bits - 2). Clients always send 64 bits per
    value."""
    dropouts: Dropouts = Dropouts()
    """Number of clients that drop out in every round before each phase, to simulate failures. The seed determines
    which."""

    @model_validator(mode="after")
    def _connected(self) -> Self:
        # A client without neighbours on one side of the ring has half of them left, plus itself: the round must end.
        if self.neighbours and self.threshold and self.threshold < self.neighbours // 2 + 2:
            raise ValueError(
                f"threshold: with {self.neighbours} neighbours set {self.neighbours // 2 + 2} or more: otherwise "
                f"drop-outs may cut the graph, and the server would learn the sum of each part"
            )
        return self

    @property
    def code(self) -> FixedPoint:
        """Return the encoding of values as integers."""
        return FixedPoint(self.bits)

    def summing(self, clients: int, units: int, step: float | None) -> MaskedChannel:
        """Return a channel for sums of weighted updates as 64-bit integers. Multiples of `step` stay exact.

        Raises `UserError` for sums that exceed 64 bits, and for a threshold of at most half of a client and its
        neighbours.
        """
        protection = self if step is None else self.exact(step)
        if protection.code.most * units >= 1 << 63:
            raise UserError(
                f"secure_aggregation: updates with a total weight of up to {units} exceed 64 bits with "
                f"{protection.bits} bits per value: set fewer bits, or weights: uniform"
            )
        needed, around = protection.needed(clients), protection.around(clients)
        if 2 * needed <= around:
            raise UserError(
                f"secure_aggregation: threshold: {needed} is not more than half of {around}, a client and its "
                f"neighbours: a server that sends different lists to two halves could unmask single updates; set "
                f"{around // 2 + 1} or more"
            )
        return MaskedChannel(protection, clients)

    def exact(self, step: float) -> SecureAggregation:
        """Return a copy of the protection that keeps multiples of `step` exact, up to 2^24 times `step`."""
        return replace(self, bits=32, clip=step * FixedPoint(32).most)

    @property
    def missing(self) -> int:
        """Return the number of clients that drop out before they send an update."""
        return self.dropouts.until("mask")

    def around(self, clients: int) -> int:
        """Return the number of a client and its neighbours, for rounds of `clients` clients."""
        return min(self.neighbours or clients, clients - 1) + 1

    def needed(self, clients: int) -> int:
        """Return the minimum number of a client and its neighbours that must stay until the end of a round."""
        return self.threshold or 2 * self.around(clients) // 3 + 1

    def withstands(self, clients: int, colluders: int) -> bool:
        """Return whether a server that colludes with clients learns only the sum of the other clients' updates.

        The server is honest but curious. There must be fewer colluders than the threshold, which opens a client's
        secrets. The other clients must stay connected by masks, or each connected part would reveal its sum. A ring
        with k neighbours stays connected after the loss of any k - 1 clients (Harary 1962).
        """
        lost = colluders + self.missing
        connected = self.around(clients) == clients or lost < self.around(clients) - 1
        return colluders < self.needed(clients) and connected


@dataclass(frozen=True)
class Hosted:
    """Secrets and state of a client process, which the server does not have."""

    secret: bytes
    """Secret from which each client's own one is derived; it simulates secrets that every device samples itself."""
    peers: Peers | None
    """Message of the session to clients before training; None before it, and if the round is aborted."""
    leaving: Sequence[int]
    """The round's clients in the order in which they drop out in the simulation."""
    model: Named = field(default_factory=dict)
    """The weights and buffers that the clients received, by unique names."""
    transcripts: dict[int, Transcript] = field(default_factory=dict)
    """Transcript of each client in the round, to which its replies are added."""

    @cached_property
    def digest(self) -> bytes:
        """Return the digest of the model, on which clients that mask together must agree.

        It depends on the order of the tensors, which is also the order of values in the masked vector.
        """
        return digest_of(self.model)


@dataclass(frozen=True)
class MaskedChannel(SecureChannel[Masked, Masked]):
    """Secure channel of masked updates. The server sees only the sum of the updates, even if clients drop out."""

    protection: SecureAggregation
    clients: int
    """Maximum number of clients per round."""
    hosted: Hosted | None = None
    """Secrets and state of the clients; None at the server."""

    needs_all: ClassVar[str | None] = (
        "the other clients' masks would remain in the sum; only `dropouts` of the protection are allowed"
    )

    def check(self, clients: int) -> None:
        """Raise `UserError` if the smallest round has fewer clients than the threshold or the drop-outs need."""
        needed, around = self.protection.needed(clients), self.protection.around(clients)
        if needed > around:
            raise UserError(
                f"secure_aggregation: threshold: {needed} of a client and its neighbours must stay, but in a round of "
                f"{clients} clients there are only {around}: lower the threshold, or increase clients_per_round"
            )
        if self.protection.dropouts.until("reveal") > clients:
            raise UserError(f"secure_aggregation: dropouts exceed the {clients} clients of a round: lower dropouts")

    def describe(self) -> str:
        """Describe, in words, the resolution of the sent values and the number of clients that unmask the sum."""
        p = self.protection
        return (
            f"masks sums of up to {self.clients} clients: {describe_resolution(p.code, p.clip, p.clip_buffers)}; "
            f"unmasked by {p.needed(self.clients)} of {p.around(self.clients)} clients (a client and its neighbours)"
        )

    def at_clients(self, round: ClientRound) -> Self:
        """Return the clients' copy of the channel, with the clients' secrets and the received model."""
        parts = {"weights": round.sent.weights, "buffers": round.sent.buffers}
        model = {f"{part}.{name}": t for part, tensors in parts.items() for name, t in tensors.items()}
        own = derive(round.secret, "own")
        hosted = Hosted(own, round.sent.broadcast, round.leaving, model, round.transcripts)
        return replace(self, hosted=hosted)

    def protect(self, update: Update, weight: int) -> Masked:
        """Return a client's masked, weighted update; an empty message if the client has dropped out."""
        peers, vector = self._hosted.peers, self._vector(update, weight)
        if peers is None or update.client not in peers.agreed or not self._stays(update.client, "mask"):
            return _masked(update, (), np.zeros_like(vector))
        itself, agreed = self._participant(update.client, update.round), peers.agreed[update.client]
        masked = itself.mask(vector, peers.directory, peers.shared, self._hosted.digest, agreed)
        return _masked(update, (update.client,), masked)

    def observed(self, update: Update, weight: int) -> Masked:
        """Return a client's update with a mask that is used only for attacks.

        It reveals nothing about the mask that is sent, and cannot be used in the sum.
        """
        vector = self._vector(update, weight)
        return _masked(update, (update.client,), vector + expand_mask(secrets.token_bytes(32), len(vector)))

    def clipped(self, update: Update) -> int:
        """Return the number of an update's values that exceed the protection's clip bounds."""
        return count_beyond(update, self.protection.clip, self.protection.clip_buffers)

    def answer(self, payload: Advertise | ShareSecrets | Agree | Confirm | Reveal, client: int, round: int) -> Any:
        """Return a client's reply in phases 0 to 4; None if the client is not asked or has dropped out."""
        itself = self._participant(client, round)
        match payload:
            case Advertise() if self._stays(client, "advertise"):
                return itself.advertise()
            case ShareSecrets(directory) if client in directory and self._stays(client, "share"):
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
        """Return the masked sum of one cohort's updates."""
        return reduce(self.merge, messages)

    def merge(self, left: Masked, right: Masked) -> Masked:
        """Add two masked sums, modulo 2^64."""
        return replace(left, clients=left.clients + right.clients, vector=left.vector + right.vector)

    def begin_round(self, clients: Sequence[int]) -> MaskingSession:
        """Begin a round, and return the server's session in the first phase.

        The graph is derived later, from the keys that clients advertise.
        """
        return MaskingSession(clients, self.protection.needed(len(clients)), self.protection.neighbours or len(clients))

    def opened(self, session: MaskingSession) -> Opened:
        """Return the unmasked sums of updates and of buffers, and the sum of the weights."""
        assert session.masked is not None
        assert session.opened is not None
        p, layout = self.protection, UpdateLayout(session.masked.tensors, session.masked.buffers)
        values = p.code.decode(session.opened[:-1], layout.bounds(p.clip, p.clip_buffers))
        tensors, buffers = (to_single(part) for part in layout.split_by_name(values))
        return tensors, buffers, int(session.opened[-1])

    @property
    def _hosted(self) -> Hosted:
        if self.hosted is None:
            raise ProtectionError("only clients have secrets to mask with")
        return self.hosted

    def _participant(self, client: int, round: int) -> Participant:
        hosted, p = self._hosted, self.protection
        drawn = len(hosted.leaving)
        setting = MaskingSetting(derive(hosted.secret, "run"), round, p.needed(drawn), p.neighbours or drawn)
        return Participant(
            client, derive(hosted.secret, client, round), setting, hosted.transcripts.setdefault(client, {})
        )

    def _stays(self, client: int, phase: Phase) -> bool:
        return client not in self._hosted.leaving[: self.protection.dropouts.until(phase)]

    def _vector(self, update: Update, weight: int) -> np.ndarray:
        """Return the weighted update in whole steps, with its weight, (D + 1,) uint64."""
        p, layout = self.protection, UpdateLayout.from_update(update)
        values = p.code.encode(flatten_update(update), layout.bounds(p.clip, p.clip_buffers))
        return np.append(weight * values, weight).view(np.uint64)


def _masked(update: Update, clients: tuple[int, ...], vector: np.ndarray) -> Masked:
    layout = UpdateLayout.from_update(update)
    return Masked(update.round, clients, layout.tensors, layout.buffers, vector)
