"""Interface of poisonings: changes to the data or the update of a malicious client.

A poisoning is a frozen dataclass whose fields are the scenario's parameters. It wraps the client's defences: it changes
the data before them and the update after them. Clipping or noise on the client therefore constrains only honest
clients. Buffers are sent unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from rayfed.defences.base import Batch
from rayfed.update import Update


@dataclass(frozen=True)
class Insight:
    """Information that a malicious client has in addition to its update."""

    clients: int
    """Number of clients in the round."""
    honest: Sequence[Update]
    """Updates that the round's malicious clients, including this one, would send if they were honest, in the order of
    client numbers. Empty unless the poisoning `colludes`."""
    generator: torch.Generator
    """The only source of randomness, seeded by (seed, round, client)."""


class Poisoning:
    """Base class of poisonings. Its methods leave data and updates unchanged."""

    colludes: ClassVar[bool] = False
    """Whether the poisoning needs the honest updates of all malicious clients, which each cohort then recomputes."""
    has_trigger: ClassVar[bool] = False
    """Whether the poisoning trains a backdoor, which `triggered` defines."""

    def check(self, image_shape: tuple[int, ...], classes: int, clients: int, malicious: int) -> None:
        """Raise `UserError` if the poisoning is undefined for the data, or for the largest malicious share."""

    def poison_data(self, data: Batch, classes: int, generator: torch.Generator) -> Batch:
        """Return the samples on which the malicious client trains. `generator` is the same in every round."""
        return data

    def poison_update(self, update: Update, insight: Insight) -> Update:
        """Return the update that a malicious client sends instead of its honest update, which passed the defences."""
        return update

    def triggered(self, test: Batch) -> Batch:
        """Return test samples with the backdoor's trigger and the attacker's label, to measure its success rate."""
        raise NotImplementedError
