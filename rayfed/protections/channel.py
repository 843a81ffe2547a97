"""Base class of secure channels, which carry updates to a server that can add but not read the updates.

A channel defines the clients' messages, their sum, who decrypts the sum, and which sums a client refuses to decrypt.
Rules use channels only through this interface (`rayfed.aggregation.over_channel`), and channels do not depend on rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from rayfed.core.questions import RoundSession
from rayfed.crypto.masking import Transcript
from rayfed.update import Named, Sealed, Update

Message = TypeVar("Message")
"""Message of one client."""
Sum = TypeVar("Sum")
"""Sum of the messages of one or several cohorts."""
Opened = tuple[Named, Named, int]
"""The weighted sums of updates and of buffers, and the sum of the weights."""


class SentModel(Protocol):
    """Protocol of the server's message to the clients in a round."""

    @property
    def weights(self) -> Named:
        """Return the global weights that the server sends."""

    @property
    def buffers(self) -> Named:
        """Return the global buffers that the server sends."""

    @property
    def keys(self) -> bytes:
        """Return the encrypted keys that `SecureChannel.make_keys` created, as forwarded by the server."""

    @property
    def broadcast(self) -> Any:
        """Return the data that `RoundSession.broadcast` returned for the clients."""

    @property
    def digest(self) -> str:
        """Return the digest of the message's round, weights, buffers and keys."""


@dataclass(frozen=True)
class ClientRound:
    """Data of a round that the client processes of an arm have, but the server does not have."""

    secret: bytes
    """Secret that only the clients know; it simulates their key exchange before the first round."""
    sent: SentModel
    drawn: Sequence[int]
    """The round's clients, which each client knows without asking the server."""
    leaving: Sequence[int]
    """The round's clients in the order in which they drop out in the simulation."""
    drops: bool = False
    """Whether failed clients are left out; clients must then trust the server about who has failed."""
    transcripts: dict[int, Transcript] = field(default_factory=dict)
    """Transcript of each client in the round, to which its replies are added."""


class SecureChannel(ABC, Generic[Message, Sum]):
    """Base class of secure channels: public parameters and, only in clients' copies, the clients' secrets."""

    needs_all: ClassVar[str | None] = None
    """Why no client of a round may drop out unexpectedly, in words; None if clients may."""

    def check(self, clients: int) -> None:
        """Raise `UserError` if the smallest round has too few clients for the channel."""

    @abstractmethod
    def describe(self) -> str:
        """Describe the channel's messages in words, as a continuation of an arm's name."""

    # The clients' side

    def make_keys(self, secret: bytes) -> bytes:
        """Create the keys that all clients share, encrypted for the clients, before the first round.

        Empty if clients share no keys.
        """
        return b""

    @abstractmethod
    def at_clients(self, round: ClientRound) -> Self:
        """Return the clients' copy of the channel, with the secrets that the clients of a round know."""

    @abstractmethod
    def protect(self, update: Update, weight: int) -> Message:
        """Return the protected (encrypted or masked) form of a client's update and weight."""

    @abstractmethod
    def observed(self, update: Update, weight: int) -> Sealed | None:
        """Return the server's view of one client's update, for attacks; None if the server sees the update itself.

        This copy is only for attacks: it cannot be included in a sum that is decrypted.
        """

    def clipped(self, update: Update) -> int | None:
        """Return the number of an update's values that `protect` clips; None if the channel does not clip."""
        return None

    @abstractmethod
    def answer(self, payload: Any, client: int, round: int) -> Any:
        """Return a client's reply to a question. Raises `ProtectionError` if the client must not decrypt the sum."""

    # The server's side, without secrets

    @abstractmethod
    def partial(self, messages: Iterable[Message]) -> Sum:
        """Return the sum of the protected updates of one cohort of clients."""

    @abstractmethod
    def merge(self, left: Sum, right: Sum) -> Sum:
        """Add two partial sums of protected updates."""

    @abstractmethod
    def begin_round(self, clients: Sequence[int]) -> RoundSession:
        """Begin a round, and return the session in which the server obtains the sum of the clients' updates."""

    @abstractmethod
    def opened(self, session: Any) -> Opened:
        """Return the decrypted or unmasked sums of a finished session."""
