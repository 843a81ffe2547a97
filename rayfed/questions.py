"""Define the questions that a server asks clients in a round, and the session that collects the replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Memory = dict[Any, Any]
"""State that a rule keeps between rounds: tensors, numbers, strings and containers, which checkpoints can store."""
Tables = dict[str, list[dict[str, Any]]]
"""Rows by table name, without the columns for arm and round."""


@dataclass(frozen=True)
class Question:
    """A question of the server to clients of a round."""

    payload: Any
    """Content sent to the clients, such as weights or ciphertexts. Must be picklable. Its type identifies the phase."""
    of: Literal["one", "all"] = "all"
    """Clients to ask: all clients of the round, or the first one."""


class RoundSession:
    """The server's state in a round with questions to clients. Immutable: each step returns a new session.

    Questions come in two phases. Before training, the server may `request` replies and `broadcast` data to the clients.
    After training, `finalise` takes the sum of the updates, and the server may `request` replies again.
    """

    aborted: str | None = None
    """Reason why the server skips its step in this round. None: the round is valid."""

    def request(self) -> Question | None:
        """Return the next question. None if the current phase has no more."""
        return None

    def receive(self, answers: Mapping[int, Any]) -> RoundSession:
        """Return the session with the clients' replies to the last question, by client."""
        raise NotImplementedError

    def broadcast(self) -> Any:
        """Return data to send to clients with the weights. None: nothing."""
        return None

    def finalise(self, total: Any) -> RoundSession:
        """Return the session with the clients' messages, merged into one partial result."""
        raise NotImplementedError

    def remembered(self) -> Memory:
        """Return the rule's state for the next round. It is stored in checkpoints."""
        return {}

    def rows(self) -> Tables:
        """Return the round's rows for the tables of the run."""
        return {}
