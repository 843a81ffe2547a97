"""Base of rules that need all updates of a round at once, such as robust rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayfed import gradients
from rayfed.aggregation.base import Aggregation
from rayfed.core.memory import copy_to_host
from rayfed.update import Named, Update


@dataclass(frozen=True)
class Received:
    """Part of a client's message that rules use: update, buffers and number of samples."""

    tensors: Named
    buffers: Named
    samples: int


class Gathering(Aggregation[Update, list[Received], list[Received]]):
    """Base of the rules that collect every update at the server. Memory grows with the number of clients per round.

    The same rule is applied to the float buffers (batch-norm statistics) as a second vector, because malicious clients
    can manipulate them, too.
    """

    gathers: ClassVar[bool] = True

    def partial(self, sent: Iterable[Update]) -> list[Received]:
        """Return the unchanged updates of one cohort of clients, on the CPU: a GPU could hold only some of a round."""
        return [Received(_on_host(update.tensors), _on_host(update.buffers), update.samples) for update in sent]

    def merge(self, left: list[Received], right: list[Received]) -> list[Received]:
        """Concatenate two lists of updates, in the order of the cohorts."""
        return left + right

    def combine(self, total: list[Received], generator: torch.Generator) -> tuple[Named, Named]:
        """Apply the rule to the updates and, separately, to the buffers, and return both results."""
        samples = torch.tensor([float(one.samples) for one in total])
        return (
            self._reduced([one.tensors for one in total], samples),
            self._reduced([one.buffers for one in total], samples),
        )

    def reduce(self, vectors: Tensor, samples: Tensor) -> Tensor:
        """Reduce the clients' vectors (n, d) to one vector (d,), given the clients' numbers of samples (n,)."""
        raise NotImplementedError

    def _reduced(self, sent: Sequence[Named], samples: Tensor) -> Named:
        if not sent[0]:
            return {}
        vectors = torch.stack([gradients.flatten(named) for named in sent])
        return gradients.unflatten(self.reduce(vectors, samples.to(vectors)), like=sent[0])


def _on_host(named: Named) -> Named:
    return {name: copy_to_host(tensor) for name, tensor in named.items()}
