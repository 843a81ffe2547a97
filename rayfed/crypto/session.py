"""Server side of secure aggregation: the state of a round in each phase, and the next question to the clients.

Source: Bonawitz et al. 2017, 'Practical secure aggregation for privacy-preserving machine learning', figure 4. The
clients' side, including their checks of the server, is in `rayfed.crypto.masking`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rayfed.core.questions import Question, RoundSession, Tables
from rayfed.crypto.masking import TAG_BYTES, Directory, KeyList, Revealed, neighbours, unmask_sum
from rayfed.crypto.shamir import SHARE_BYTES
from rayfed.update import Masked

Letters = Mapping[int, Mapping[int, bytes]]
"""Boxes or tags by sender, then receiver; after delivery by receiver, then sender."""


@dataclass(frozen=True)
class Advertise:
    """Question to all clients of a round: send your public keys."""


@dataclass(frozen=True)
class ShareSecrets:
    """Question to clients that have advertised keys: send encrypted shares of your secrets for each neighbour.

    This question and the later ones carry the directory, because a client of this simulation remembers only its digest.
    A real server sends it once.
    """

    directory: Directory


@dataclass(frozen=True)
class Agree:
    """Question to clients that have sent shares: send tags that confirm the list of clients to mask with."""

    directory: Directory
    shared: tuple[int, ...]


@dataclass(frozen=True)
class Peers:
    """List of the clients to mask with, which the server sends to clients before training."""

    directory: Directory
    shared: tuple[int, ...]
    agreed: Mapping[int, bytes]
    """Tag of each client that proves to itself that it has agreed to this list."""


@dataclass(frozen=True)
class Confirm:
    """Question to the survivors: send tags that confirm the list of clients whose vectors are in the sum."""

    directory: Directory
    shared: tuple[int, ...]
    survivors: tuple[int, ...]
    agreed: Letters
    """Tags of phase 2 that other clients made for each survivor."""


@dataclass(frozen=True)
class Reveal:
    """Question to clients that have confirmed the survivors: send the shares that unmask the sum."""

    directory: Directory
    shared: tuple[int, ...]
    survivors: tuple[int, ...]
    confirmed: Letters
    """Tags of phase 3 that other clients made for each confirming client."""
    boxes: Letters
    """Boxes for each confirming client, which only that client can decrypt."""


@dataclass(frozen=True)
class MaskingSession(RoundSession):
    """State of the server in one round of secure aggregation.

    It has keys, shares and the clients to mask with; after the vectors, their senders and the shares that unmask the
    sum.
    """

    clients: Sequence[int]
    """Clients sampled for the round."""
    threshold: int
    """Minimum number of a client and its neighbours that must stay."""
    degree: int
    """Number of each client's neighbours if enough clients have advertised."""
    advertised: Directory = field(default_factory=dict)
    """Public keys, empty until the clients reply. If no client replies, the round is aborted."""
    near: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Neighbours of each client."""
    boxes: Letters = field(default_factory=dict)
    """Boxes with shares. Empty until the clients reply, as are the fields below."""
    agreed: Letters = field(default_factory=dict)
    masked: Masked | None = None
    confirmed: Letters = field(default_factory=dict)
    revealed: Mapping[int, Revealed] = field(default_factory=dict)
    opened: np.ndarray | None = None
    """Sum without masks, (D + 1,) int64."""
    aborted: str | None = None
    """Reason for aborting the round; None otherwise."""

    def request(self) -> Question | None:
        """Return the server's question of the next phase; None while the session waits for the masked sum."""
        if self.aborted or self.opened is not None:
            return None
        if not self.advertised:
            return Question(Advertise())
        if not self.boxes:
            return Question(ShareSecrets(self.advertised))
        if not self.agreed:
            return Question(Agree(self.advertised, self._shared))
        if self.masked is None:
            return None
        so_far, survivors = (self.advertised, self._shared), self.masked.clients
        if not self.confirmed:
            return Question(Confirm(*so_far, survivors, _delivered(self.agreed, survivors)))
        confirmed, boxes = _delivered(self.confirmed, self.confirmed), _delivered(self.boxes, self.confirmed)
        return Question(Reveal(*so_far, survivors, confirmed, boxes))

    def receive(self, answers: Mapping[int, Any]) -> MaskingSession:
        """Return the session after the clients' replies. The session is aborted if too few clients are left.

        Raises `ProtectionError` if the shares are inconsistent.
        """
        said = {client: answer for client, answer in answers.items() if answer is not None}
        if not self.advertised:
            keys = KeyList(said)
            new = replace(self, advertised=keys, near=neighbours(keys, self.degree))
            return new._checked(said, said, "advertised keys")
        if not self.boxes:
            return replace(self, boxes=said)._checked(said, said, "shared secrets")
        if not self.agreed:
            return replace(self, agreed=said)._checked(self.boxes, said, "agreed on the clients to mask with")
        if not self.confirmed:
            return replace(self, confirmed=said)._checked(self.boxes, said, "confirmed the survivors")
        new = replace(self, revealed=said)._checked(self.boxes, said, "revealed shares")
        if new.aborted or self.masked is None:
            return new
        parties = self.masked.clients, self._dropped(self.masked), self.near, self.advertised
        return replace(new, opened=unmask_sum(self.masked.vector, *parties, said, self.threshold).view(np.int64))

    def broadcast(self) -> Peers | None:
        """Return the message with the clients to mask with; None if the round is aborted without any updates."""
        if self.aborted:
            return None
        return Peers(self.advertised, self._shared, {client: tags[client] for client, tags in self.agreed.items()})

    def finalise(self, total: Masked) -> MaskingSession:
        """Return the session after the masked sum of the updates has arrived."""
        if self.aborted:
            return self
        return replace(self, masked=total)._checked(self.boxes, total.clients, "sent updates")

    def rows(self) -> Tables:
        """Return the round's row of the table `secure_sums`: clients per phase, and bytes sent."""
        row = {
            "clients": len(self.clients),
            "advertised": len(self.advertised),
            "shared": len(self.boxes),
            "sent": len(self.masked.clients) if self.masked else 0,
            "confirmed": len(self.confirmed),
            "revealed": len(self.revealed),
            "protocol_bytes": self.protocol_bytes,
            "aborted": self.aborted,
        }
        return {"secure_sums": [row]}

    @property
    def protocol_bytes(self) -> int:
        """Return the number of bytes sent in both directions, without masked vectors, headers and client numbers.

        These are keys, boxes and tags, which are forwarded to other clients, and shares.
        """
        keys = len(self.advertised) * (1 + len(self.advertised))
        last = self.masked.clients if self.masked else ()
        boxes = [*self.boxes.values(), *_delivered(self.boxes, self.confirmed).values()]
        tags = [*self.agreed.values(), *_delivered(self.agreed, last).values()]
        tags += [*self.confirmed.values(), *_delivered(self.confirmed, self.confirmed).values()]
        shares = sum(len(said.selves) + len(said.masks) for said in self.revealed.values())
        size = sum(len(box) for own in boxes for box in own.values()) + TAG_BYTES * sum(map(len, tags))
        return 64 * keys + size + SHARE_BYTES * shares

    @property
    def _shared(self) -> tuple[int, ...]:
        return tuple(self.boxes)

    def _around(self, client: int, present: Collection[int]) -> list[int]:
        """Return which of a client and its neighbours are present; they hold the shares of its secrets."""
        return sorted({client, *self.near[client]}.intersection(present))

    def _dropped(self, masked: Masked) -> tuple[int, ...]:
        return tuple(client for client in self.boxes if client not in masked.clients)

    def _checked(self, owners: Collection[int], present: Collection[int], done: str) -> MaskingSession:
        """Return the session, aborted if too few holders of some client's shares are present."""
        fewest = min((len(self._around(owner, present)) for owner in owners), default=0)
        if fewest >= self.threshold:
            return self
        reason = (
            f"{len(present)} of {len(self.clients)} clients {done}: {fewest} holders of a client's shares "
            f"are left, but {self.threshold} are needed"
        )
        return replace(self, aborted=reason)


def _delivered(letters: Letters, receivers: Collection[int]) -> Letters:
    """Return messages by receiver, then sender."""
    return {c: {sender: own[c] for sender, own in letters.items() if c in own} for c in receivers}
