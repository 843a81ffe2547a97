"""The contract of a secure channel: how updates get to a server that adds what it cannot read.

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
from rayfed.update import Encrypted, Masked, Named, Update

Message = TypeVar("Message")
"""What one client sends."""
Sum = TypeVar("Sum")
"""What the messages of a cohort are reduced to, and those of all cohorts."""
Opened = tuple[Named, Named, int]
"""The weighted sums of updates and of buffers, and the sum of the weights."""


class SentModel(Protocol):
    """What the server has sent clients in a round."""

    @property
    def weights(self) -> Named:
        """The global weights."""

    @property
    def buffers(self) -> Named:
        """The global buffers."""

    @property
    def keys(self) -> bytes:
        """What `SecureChannel.make_keys` made, as the server passes it on."""

    @property
    def broadcast(self) -> Any:
        """What `RoundSession.broadcast` gave."""

    @property
    def digest(self) -> str:
        """Of round, weights, buffers and keys."""


@dataclass(frozen=True)
class ClientRound:
    """What a process knows of a round that works for an arm's clients, and the server does not."""

    secret: bytes
    """What clients know and nobody else: it stands for what they exchange before the first round."""
    sent: SentModel
    drawn: Sequence[int]
    """The round's clients, as each of them knows by itself: no server is asked."""
    leaving: Sequence[int]
    """The same in the order in which simulated drop-outs take them."""
    drops: bool = False
    """Whether clients that fail are left out: then clients have to believe the server who has failed."""
    transcripts: dict[int, Transcript] = field(default_factory=dict)
    """What each client remembers of the round; what it answers is added to its own."""


class SecureChannel(ABC, Generic[Message, Sum]):
    """Base of every channel: a frozen dataclass of public parameters, and, at clients alone, their secrets."""

    needs_all: ClassVar[str | None] = None
    """Why no client of a round may be left out unplanned, in words; None where any may."""

    def check(self, clients: int) -> None:
        """Raise `UserError` where the smallest round, of so many clients, has too few for it."""

    @abstractmethod
    def describe(self) -> str:
        """What is sent, in words that follow the name of an arm."""

    # The clients' side

    def make_keys(self, secret: bytes) -> bytes:
        """What one client makes for all before the first round, locked for them; nothing where they share no keys."""
        return b""

    @abstractmethod
    def at_clients(self, round: ClientRound) -> Self:
        """The same with what clients of a round know."""

    @abstractmethod
    def protect(self, update: Update, weight: int) -> Message:
        """What a client sends of its update, the weight with it; its size is `sent_bytes`."""

    @abstractmethod
    def observed(self, update: Update, weight: int) -> Encrypted | Masked | None:
        """What a server that looks at one client has in place of its update; None: the update itself.

        It is made to be looked at: nothing of it fits into a sum that is opened.
        """

    def clipped(self, update: Update) -> int | None:
        """How many of an update's values `protect` clips; None where it does not clip."""
        return None

    @abstractmethod
    def answer(self, payload: Any, client: int, round: int) -> Any:
        """A client's answer to a question of the session; raises `ProtectionError` for what it must not open."""

    # The server's side, without secrets

    @abstractmethod
    def partial(self, messages: Iterable[Message]) -> Sum:
        """The sum over one cohort."""

    @abstractmethod
    def merge(self, left: Sum, right: Sum) -> Sum:
        """The sum of two sums."""

    @abstractmethod
    def begin_round(self, clients: Sequence[int]) -> RoundSession:
        """What the server goes through to have the sum of these clients opened."""

    @abstractmethod
    def opened(self, session: Any) -> Opened:
        """What the session came to."""
