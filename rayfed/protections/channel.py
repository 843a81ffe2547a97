"""The contract of a secure channel, which carries updates to a server that adds but cannot read them.

A channel says what clients send, how that is added, who opens the sum and what they refuse to open. Rules know channels
by this contract (`rayfed.aggregation.over_channel`), and channels know no rule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from rayfed.crypto.masking import Transcript
from rayfed.questions import RoundSession
from rayfed.update import Named, Sealed, Update

Message = TypeVar("Message")
"""Message of one client."""
Sum = TypeVar("Sum")
"""Sum of a cohort's messages, and of all cohorts'."""
Opened = tuple[Named, Named, int]
"""The weighted sums of updates and of buffers, and the sum of the weights."""


class SentModel(Protocol):
    """Protocol of the server's message to the clients in a round."""

    @property
    def weights(self) -> Named:
        """The global weights."""

    @property
    def buffers(self) -> Named:
        """The global buffers."""

    @property
    def keys(self) -> bytes:
        """Keys that `SecureChannel.make_keys` made, as the server passes them on."""

    @property
    def broadcast(self) -> Any:
        """Content that `RoundSession.broadcast` has returned."""

    @property
    def digest(self) -> str:
        """Digest of round, weights, buffers and keys."""


@dataclass(frozen=True)
class ClientRound:
    """A round's data that processes of an arm's clients have, and the server does not."""

    secret: bytes
    """Secret that clients alone know: it stands for what they exchange before the first round."""
    sent: SentModel
    drawn: Sequence[int]
    """The round's clients, as each of them knows by itself: no server is asked."""
    leaving: Sequence[int]
    """The round's clients in the order in which simulated drop-outs take them."""
    drops: bool = False
    """Whether clients that fail are left out: then clients have to believe the server who has failed."""
    transcripts: dict[int, Transcript] = field(default_factory=dict)
    """Transcript of each client in the round, to which its answers are added."""


class SecureChannel(ABC, Generic[Message, Sum]):
    """Base of every channel: public parameters and, in clients' copies only, their secrets."""

    needs_all: ClassVar[str | None] = None
    """Why no client of a round may be left out unplanned, in words; None where any may."""

    def check(self, clients: int) -> None:
        """Raise `UserError` if the smallest round has too few clients."""

    @abstractmethod
    def describe(self) -> str:
        """Return a description of what is sent, as a continuation of an arm's name."""

    # The clients' side

    def make_keys(self, secret: bytes) -> bytes:
        """Make one client's keys for all clients, locked for them, before the first round.

        Empty where clients share no keys.
        """
        return b""

    @abstractmethod
    def at_clients(self, round: ClientRound) -> Self:
        """Return a copy with the secrets that the clients of a round know."""

    @abstractmethod
    def protect(self, update: Update, weight: int) -> Message:
        """Return the protected form of a client's update and weight, with its size as `sent_bytes`."""

    @abstractmethod
    def observed(self, update: Update, weight: int) -> Sealed | None:
        """Return what the server sees of one client's update; None if it sees the update itself.

        It is made to be looked at: nothing of it fits into a sum that is opened.
        """

    def clipped(self, update: Update) -> int | None:
        """Return the number of an update's values that `protect` clips; None if it does not clip."""
        return None

    @abstractmethod
    def answer(self, payload: Any, client: int, round: int) -> Any:
        """Return a client's answer to the session; raises `ProtectionError` if it must not open the sum."""

    # The server's side, without secrets

    @abstractmethod
    def partial(self, messages: Iterable[Message]) -> Sum:
        """Return the sum over one cohort."""

    @abstractmethod
    def merge(self, left: Sum, right: Sum) -> Sum:
        """Return the sum of two sums."""

    @abstractmethod
    def begin_round(self, clients: Sequence[int]) -> RoundSession:
        """Return the session in which the server obtains the sum of these clients."""

    @abstractmethod
    def opened(self, session: Any) -> Opened:
        """Return the sums that the session has opened."""
