"""The contract of an aggregation: how many updates become one step of the server.

It is written as a fold, so that updates are reduced where they are made and the server never holds more than a few
partial results: `partial` turns one cohort's updates into a partial result (on a client actor), `merge` joins
two of them (on the server, always in the same tree order, so the result does not depend on what arrived first), and
`combine` turns the last one into the step. A rule that needs more than the updates puts questions to clients in
between: `asks` on the server, `answer` where the clients are, `hears` on the server again, until it has no more to ask.
One that needs answers before clients train `opens` a session, which is asked about in the same way; then clients are
`told` what they need of it, and when all is added it `joins` the total.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch

from rayfed.update import Masked, Named, Sealed, Shown, Update

Memory = dict[Any, Any]
"""What a rule keeps from round to round: tensors, numbers, strings and containers of them, as the checkpoint takes."""


@dataclass(frozen=True)
class Question:
    """What the server asks clients of a round before it can step."""

    payload: Any
    """What it sends them: weights, ciphertexts; picklable."""
    of: Literal["one", "all"] = "all"
    """Whom: every client of the round, or any one of them (the first)."""


class Member(Protocol):
    """A client as it answers a question."""

    @property
    def client(self) -> int:
        """Its number."""

    @property
    def round(self) -> int:
        """The round that is asked about."""

    def evaluate(
        self, update: Named, buffers: Named, split: Literal["validation", "train"] = "validation"
    ) -> tuple[float, float]:
        """Mean loss and accuracy, on some of the client's own samples, of the model that sent this update, or of a mean
        of such models where it is a mean of their updates.
        """


class Aggregation:
    """Base of every aggregation rule."""

    validates: ClassVar[bool] = False
    """Whether clients must hold samples out of training, on which they evaluate."""
    reveals: ClassVar[str | None] = None
    """What clients tell the server beside their updates, in words; no defence of the update covers it."""

    needs_all: ClassVar[str | None] = None
    """Why no client of a round may be left out unplanned, in words; None where any may."""

    def check(self, clients: int) -> None:
        """Raise `UserError` where the rule has no meaning with so many clients, the fewest of any round."""

    def opens(self, clients: Sequence[int], round: int) -> Any | None:
        """What the server starts a round of these clients with; `asks` and `hears` go on with it. None: no session."""
        return None

    def told(self, total: Any) -> Any:
        """What clients are sent of a session beside the weights, when all has been asked about it."""
        raise NotImplementedError

    def sends(self, update: Update) -> Any:
        """What a client sends of its update, with its size as `sent_bytes`: the update itself, or that sealed."""
        return update

    def observed(self, update: Update) -> Sealed | Masked | None:
        """What a server that looks at one client has in place of its update; None: the update."""
        return None

    def clipped(self, update: Update) -> int | None:
        """How many of an update's values `sends` clips; None where it does not clip."""
        return None

    def partial(self, updates: Iterable[Any]) -> Any:
        """Reduce what one cohort sends; what it returns is sent to the server and must be picklable."""
        raise NotImplementedError

    def merge(self, left: Any, right: Any) -> Any:
        """Join two partial results; the order of the arguments is the order of the cohorts."""
        raise NotImplementedError

    def joins(self, session: Any, total: Any) -> Any:
        """The total with the session that was opened before."""
        raise NotImplementedError

    def recall(self, total: Any, memory: Memory) -> Any:
        """The total with what the rule remembers of earlier rounds; the memory is empty at first."""
        return total

    def asks(self, total: Any) -> Question | None:
        """What clients have to answer before `combine`, given what is known by now; None: nothing (more)."""
        return None

    def answer(self, payload: Any, member: Member) -> Any:
        """A client's answer, made on a client actor and sent to the server."""
        raise NotImplementedError

    def hears(self, total: Any, answers: Mapping[int, Any]) -> Any:
        """The total with the clients' answers to what it asked, by client."""
        raise NotImplementedError

    def aborted(self, total: Any) -> str | None:
        """Why the round came to nothing, so that the server takes no step; None: it did not."""
        return None

    def seen(self, updates: Sequence[Update]) -> Shown | None:
        """What every client of a round with these updates is shown of them; None: nothing. For attackers alone."""
        return None

    def combine(self, total: Any, generator: torch.Generator) -> tuple[Named, Named]:
        """The step that the server optimiser takes (same sign as a gradient), and the averaged float buffers.

        `generator` is the server's only source of randomness.
        """
        raise NotImplementedError

    def memory(self, total: Any) -> Memory:
        """What the rule remembers after this round. It survives the server's death and a resume."""
        return {}

    def rows(self, total: Any) -> dict[str, list[dict[str, Any]]]:
        """What the round leaves in the run's tables beside its step: rows by table, less arm and round."""
        return {}

    def idle(self, weights: Named, generator: torch.Generator) -> Named:
        """The step after a round in which no client was drawn: none."""
        return {name: torch.zeros_like(w) for name, w in weights.items()}
