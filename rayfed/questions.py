"""Questions of the server to a round's clients, and the session that collects the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Memory = dict[Any, Any]
"""State that a rule keeps from round to round: tensors, numbers, strings and containers, as the checkpoint takes."""
Tables = dict[str, list[dict[str, Any]]]
"""Rows by table, without the columns for arm and round."""


@dataclass(frozen=True)
class Question:
    """A question of the server to clients of a round."""

    payload: Any
    """Content sent to the clients: weights, ciphertexts; picklable. Its type says in which phase they are."""
    of: Literal["one", "all"] = "all"
    """Clients that are asked: every client of the round, or any one of them (the first)."""


class RoundSession:
    """The server's side of one round with questions to clients; immutable, each step returns a new one.

    It asks in two phases. Before clients train it may `request` what has to be known by then, and `broadcast` what
    clients need of it; `finalise` takes what they have sent, and it may `request` again, until it can be combined.
    """

    aborted: str | None = None
    """Reason why the round is void, so that the server takes no step; None where it is not."""

    def request(self) -> Question | None:
        """Return the next question; None if the current phase has no more."""
        return None

    def receive(self, answers: Mapping[int, Any]) -> RoundSession:
        """Return the session with the clients' answers to the last question, by client."""
        raise NotImplementedError

    def broadcast(self) -> Any:
        """Return data that clients are sent with the weights when they train; None for nothing."""
        return None

    def finalise(self, total: Any) -> RoundSession:
        """Return the session with what clients sent, merged into one partial result."""
        raise NotImplementedError

    def remembered(self) -> Memory:
        """Return the rule's state for the next round, which survives the server's death and a resume."""
        return {}

    def rows(self) -> Tables:
        """Return the rows that the round adds to the run's tables."""
        return {}
