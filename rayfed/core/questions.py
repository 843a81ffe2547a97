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
    """Question that the server sends to some or all clients of a round."""

    payload: Any
    """Content sent to the clients, such as weights or ciphertexts. Must be picklable. Its type identifies the phase."""
    of: Literal["one", "all"] = "all"
    """Clients to ask: all clients of the round, or the first one."""


class RoundSession:
    """Immutable state of the server in a round with questions to clients. Each step returns a new session.

    Questions come in two phases. Before training, the server may `request` replies and `broadcast` data to the clients.
    After training, `finalise` takes the sum of the updates, and the server may `request` replies again.
    """

    aborted: str | None = None
    """Reason why the server skips its step in this round. None: the round is valid."""

    def request(self) -> Question | None:
        """Return the server's next question to the clients. None if the current phase has no more questions."""
        return None

    def receive(self, answers: Mapping[int, Any]) -> RoundSession:
        """Return the session after the clients' replies (client -> reply) to the last question."""
        raise NotImplementedError

    def broadcast(self) -> Any:
        """Return the data that the server sends to clients with the weights. None if there are no such data."""
        return None

    def finalise(self, total: Any) -> RoundSession:
        """Return the session after all clients' messages have been merged into one partial result, `total`."""
        raise NotImplementedError

    def remembered(self) -> Memory:
        """Return the aggregation rule's state for the next round. Checkpoints contain this state."""
        return {}

    def rows(self) -> Tables:
        """Return the round's rows for the run's tables, by table name."""
        return {}
