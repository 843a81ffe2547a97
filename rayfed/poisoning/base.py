"""The contract of a poisoning: changes of a malicious client's data or update.

A poisoning is a frozen dataclass whose fields are the scenario's parameters. It comes around the client's defences: the
data are poisoned before these see them, the update after they have worked, so that a clip or noise at the client
binds nobody who does not want to be bound. Buffers are sent as they are.
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
    """Knowledge of a malicious client beyond its own update."""

    clients: int
    """Number of clients of the round."""
    honest: Sequence[Update]
    """Updates that the malicious clients of the round would send if they were honest, its own among them, in the order
    of their numbers; empty where the poisoning does not say that it `colludes`."""
    generator: torch.Generator
    """Its only source of randomness, seeded by (seed, round, client)."""


class Poisoning:
    """Base of every poisoning; its hooks change nothing."""

    colludes: ClassVar[bool] = False
    """Whether it needs the honest updates of all malicious clients, which are then made again for each cohort."""
    has_trigger: ClassVar[bool] = False
    """Whether it teaches the model a backdoor, which `triggered` defines."""

    def check(self, image_shape: tuple[int, ...], classes: int, clients: int, malicious: int) -> None:
        """Raise `UserError` if the poisoning is undefined for such data, or for the largest malicious share."""

    def poison_data(self, data: Batch, classes: int, generator: torch.Generator) -> Batch:
        """Return all of the client's samples for training; `generator` is the same in every round."""
        return data

    def poison_update(self, update: Update, insight: Insight) -> Update:
        """Return the update to send in place of the honest, defended one."""
        return update

    def triggered(self, test: Batch) -> Batch:
        """Return test samples with the backdoor's trigger and the attacker's label, to measure its success."""
        raise NotImplementedError
