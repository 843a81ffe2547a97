"""What a server asks the clients of a round before it can step, and what it knows as they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Memory = dict[Any, Any]
"""What a rule keeps from round to round: tensors, numbers, strings and containers of them, as the checkpoint takes."""
Tables = dict[str, list[dict[str, Any]]]
"""Rows by table, less arm and round."""


@dataclass(frozen=True)
class Question:
    """What the server asks clients of a round."""

    payload: Any
    """What it sends them: weights, ciphertexts; picklable. Its type says in which phase they are."""
    of: Literal["one", "all"] = "all"
    """Whom: every client of the round, or any one of them (the first)."""


class RoundSession:
    """The server's side of one round in which clients are asked; a value, every step makes a new one.

    It asks in two phases. Before clients train it may `request` what has to be known by then, and `broadcast` what
    clients need of it; `finalise` takes what they have sent, and it may `request` again, until it can be combined.
    """

    aborted: str | None = None
    """Why the round came to nothing, so that the server takes no step; None: it did not."""

    def request(self) -> Question | None:
        """What clients have to answer next, given what is known by now; None: nothing (more) in this phase."""
        return None

    def receive(self, answers: Mapping[int, Any]) -> RoundSession:
        """With the clients' answers to what was requested last, by client."""
        raise NotImplementedError

    def broadcast(self) -> Any:
        """What clients are sent beside the weights when they train; None: nothing."""
        return None

    def finalise(self, total: Any) -> RoundSession:
        """With what clients sent, reduced to one partial result."""
        raise NotImplementedError

    def remembered(self) -> Memory:
        """What the rule keeps for the next round. It survives the server's death and a resume."""
        return {}

    def rows(self) -> Tables:
        """What the round leaves in the run's tables beside its step."""
        return {}
