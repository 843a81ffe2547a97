"""The server's side of secure aggregation: what it has of a round, phase after phase, and what it asks for next.

Source: Bonawitz et al. 2017, 'Practical secure aggregation for privacy-preserving machine learning', figure 4. What
clients do is in `rayfed.crypto.masking`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rayfed.crypto.masking import Advertised, Revealed, unmasked
from rayfed.crypto.shamir import SHARE_BYTES
from rayfed.update import Masked

Directories = Mapping[int, Mapping[int, Advertised]]
"""For each client the keys of those around it."""
Boxes = Mapping[int, Mapping[int, bytes]]


@dataclass(frozen=True)
class Advertise:
    """Asks all for their public keys."""


@dataclass(frozen=True)
class Share:
    """Asks who has advertised for boxes, one for each client around it and one for itself."""

    directories: Directories


@dataclass(frozen=True)
class Reveal:
    """Asks the survivors for what unmasks the sum."""

    directories: Directories
    """Those of `Share`, again: who answers keeps nothing between two questions."""
    boxes: Boxes
    """For each survivor those that it alone can open, by sender."""
    survivors: tuple[int, ...]
    dropped: tuple[int, ...]
    """Who shared and sent nothing."""


@dataclass(frozen=True)
class Session:
    """All that the server has of a round."""

    near: Mapping[int, Sequence[int]]
    """Whom each client has for neighbours."""
    threshold: int
    """How many of a client and its neighbours must stay."""
    advertised: Mapping[int, Advertised] = field(default_factory=dict)
    """Empty until clients were asked; where nobody answers, the round is aborted."""
    boxes: Boxes = field(default_factory=dict)
    """Of each sender, by the client that can open them; empty likewise."""
    masked: Masked | None = None
    revealed: Mapping[int, Revealed] = field(default_factory=dict)
    opened: np.ndarray | None = None
    """(D + 1,) int64, the sum without masks."""
    aborted: str | None = None
    """Why the round came to nothing."""

    def asks(self) -> Advertise | Share | Reveal | None:
        """Keys, then shares; when vectors have come, what unmasks them."""
        if self.aborted or self.opened is not None:
            return None
        if not self.advertised:
            return Advertise()
        if not self.boxes:
            return Share(self._directories(self.advertised))
        return self._last_question(self.masked) if self.masked else None

    def hears(self, said: Mapping[int, Any]) -> Session:
        """With the answers of those who gave one; aborted where too few are left.

        Raises `ProtectionError` where shares do not fit together.
        """
        if not self.advertised:
            return replace(self, advertised=said)._checked(said, said, "advertised keys")
        if not self.boxes:
            return replace(self, boxes=said)._checked(said, said, "shared secrets")
        new = replace(self, revealed=said)._checked(self.boxes, said, "revealed shares")
        if new.aborted or self.masked is None:
            return new
        parties = self.masked.clients, self._dropped(self.masked), self.near, self.advertised
        return replace(new, opened=unmasked(self.masked.vector, *parties, said, self.threshold).view(np.int64))

    def told(self) -> Directories:
        """For each client that has shared the keys of those around it that have; nobody where the round is aborted."""
        return {} if self.aborted else self._directories(self.boxes)

    def joins(self, masked: Masked) -> Session:
        """With the masked sum."""
        if self.aborted:
            return self
        return replace(self, masked=masked)._checked(self.boxes, masked.clients, "sent updates")

    @property
    def protocol_bytes(self) -> int:
        """Sent beside the masked vectors, both ways and less headers: keys and boxes, which are passed on, shares."""
        passed_on = sum(map(len, self._directories(self.advertised).values()))
        delivered = self._last_question(self.masked).boxes if self.masked else {}
        boxes = [box for own in [*self.boxes.values(), *delivered.values()] for box in own.values()]
        shares = sum(len(said.selves) + len(said.masks) for said in self.revealed.values())
        return 64 * (len(self.advertised) + passed_on) + sum(map(len, boxes)) + SHARE_BYTES * shares

    def _around(self, client: int, present: Collection[int]) -> list[int]:
        """Those present of a client and its neighbours: they hold the shares of its secrets."""
        return sorted({client, *self.near[client]}.intersection(present))

    def _directories(self, present: Collection[int]) -> Directories:
        return {c: {other: self.advertised[other] for other in self._around(c, present)} for c in present}

    def _dropped(self, masked: Masked) -> tuple[int, ...]:
        return tuple(client for client in self.boxes if client not in masked.clients)

    def _last_question(self, masked: Masked) -> Reveal:
        boxes = {c: {sender: own[c] for sender, own in self.boxes.items() if c in own} for c in masked.clients}
        return Reveal(self._directories(self.boxes), boxes, masked.clients, self._dropped(masked))

    def _checked(self, owners: Collection[int], present: Collection[int], done: str) -> Session:
        """Aborted where too few of those are present who hold the shares of an owner's secrets."""
        fewest = min((len(self._around(owner, present)) for owner in owners), default=0)
        if fewest >= self.threshold:
            return self
        reason = (
            f"{len(present)} of {len(self.near)} clients {done}, which leaves {fewest} of a client and its "
            f"neighbours; {self.threshold} are needed"
        )
        return replace(self, aborted=reason)
