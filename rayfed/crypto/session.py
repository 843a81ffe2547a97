"""The server's side of secure aggregation: what it has of a round, phase after phase, and what it asks for next.

Source: Bonawitz et al. 2017, 'Practical secure aggregation for privacy-preserving machine learning', figure 4. What
clients do, and what they refuse to a server that does otherwise, is in `rayfed.crypto.masking`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rayfed.crypto.masking import TAG_BYTES, Directory, KeyList, Revealed, neighbours, unmasked
from rayfed.crypto.shamir import SHARE_BYTES
from rayfed.questions import Question, RoundSession, Tables
from rayfed.update import Masked

Letters = Mapping[int, Mapping[int, bytes]]
"""Boxes or tags, of each sender by receiver; where they are delivered, of each receiver by sender."""


@dataclass(frozen=True)
class Advertise:
    """Asks all for their public keys."""


@dataclass(frozen=True)
class Share:
    """Asks who has advertised for boxes, one for each client around it and one for itself.

    This question and those that follow carry the directory, though it is sent once: what a client remembers of it in
    this simulation is its digest.
    """

    directory: Directory


@dataclass(frozen=True)
class Agree:
    """Asks who has shared for tags: with whom it is to mask."""

    directory: Directory
    shared: tuple[int, ...]


@dataclass(frozen=True)
class Peers:
    """With whom clients mask, which they are sent when they train."""

    directory: Directory
    shared: tuple[int, ...]
    agreed: Mapping[int, bytes]
    """For each client the tag by which it knows that it has agreed to this."""


@dataclass(frozen=True)
class Confirm:
    """Asks the survivors for tags: whose vectors are in the sum."""

    directory: Directory
    shared: tuple[int, ...]
    survivors: tuple[int, ...]
    agreed: Letters
    """For each survivor the tags of phase 2 that others made for it."""


@dataclass(frozen=True)
class Reveal:
    """Asks those who have confirmed for what unmasks the sum."""

    directory: Directory
    shared: tuple[int, ...]
    survivors: tuple[int, ...]
    confirmed: Letters
    """For each of them the tags of phase 3 that others made for it."""
    boxes: Letters
    """And the boxes that it alone can open."""


@dataclass(frozen=True)
class MaskingSession(RoundSession):
    """All that the server has of a round: keys, shares, and with whom to mask; when vectors have come, whose they are,
    and what unmasks them.
    """

    clients: Sequence[int]
    """Those drawn for the round."""
    threshold: int
    """How many of a client and its neighbours must stay."""
    degree: int
    """Neighbours of each client, where so many have advertised."""
    advertised: Directory = field(default_factory=dict)
    """Empty until clients were asked; where nobody answers, the round is aborted."""
    near: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Whom each client has for neighbours."""
    boxes: Letters = field(default_factory=dict)
    """Empty likewise, as all that follows."""
    agreed: Letters = field(default_factory=dict)
    masked: Masked | None = None
    confirmed: Letters = field(default_factory=dict)
    revealed: Mapping[int, Revealed] = field(default_factory=dict)
    opened: np.ndarray | None = None
    """(D + 1,) int64, the sum without masks."""
    aborted: str | None = None
    """Why the round came to nothing."""

    def request(self) -> Question | None:
        """The next phase; it waits for the masked sum in between."""
        if self.aborted or self.opened is not None:
            return None
        if not self.advertised:
            return Question(Advertise())
        if not self.boxes:
            return Question(Share(self.advertised))
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
        """With the answers of those who gave one; aborted where too few are left.

        Raises `ProtectionError` where shares do not fit together.
        """
        said = {client: answer for client, answer in answers.items() if answer is not None}
        if not self.advertised:
            keys = KeyList(said)
            new = replace(self, advertised=keys, near=neighbours(keys, self.degree))
            return new._checked(said, said, "advertised keys")
        if not self.boxes:
            return replace(self, boxes=said)._checked(said, said, "shared secrets")
        if not self.agreed:
            return replace(self, agreed=said)._checked(self.boxes, said, "agreed with whom to mask")
        if not self.confirmed:
            return replace(self, confirmed=said)._checked(self.boxes, said, "confirmed who is left")
        new = replace(self, revealed=said)._checked(self.boxes, said, "revealed shares")
        if new.aborted or self.masked is None:
            return new
        parties = self.masked.clients, self._dropped(self.masked), self.near, self.advertised
        return replace(new, opened=unmasked(self.masked.vector, *parties, said, self.threshold).view(np.int64))

    def broadcast(self) -> Peers | None:
        """With whom clients mask; None where the round is aborted, and nobody sends anything."""
        if self.aborted:
            return None
        return Peers(self.advertised, self._shared, {client: tags[client] for client, tags in self.agreed.items()})

    def finalise(self, total: Masked) -> MaskingSession:
        """With the masked sum."""
        if self.aborted:
            return self
        return replace(self, masked=total)._checked(self.boxes, total.clients, "sent updates")

    def rows(self) -> Tables:
        """How many clients were left in each phase, and what was sent for it."""
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
        """Sent beside the masked vectors, both ways and less headers and clients' numbers: keys, which all are passed
        on to all, boxes and tags, which are passed on, shares.
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
        """Those present of a client and its neighbours: they hold the shares of its secrets."""
        return sorted({client, *self.near[client]}.intersection(present))

    def _dropped(self, masked: Masked) -> tuple[int, ...]:
        return tuple(client for client in self.boxes if client not in masked.clients)

    def _checked(self, owners: Collection[int], present: Collection[int], done: str) -> MaskingSession:
        """Aborted where too few of those are present who hold the shares of an owner's secrets."""
        fewest = min((len(self._around(owner, present)) for owner in owners), default=0)
        if fewest >= self.threshold:
            return self
        reason = (
            f"{len(present)} of {len(self.clients)} clients {done}, which leaves {fewest} of a client and its "
            f"neighbours; {self.threshold} are needed"
        )
        return replace(self, aborted=reason)


def _delivered(letters: Letters, receivers: Collection[int]) -> Letters:
    """Who gets what from whom."""
    return {c: {sender: own[c] for sender, own in letters.items() if c in own} for c in receivers}
