"""The contract of a poisoning: what a malicious client does to the data it trains on, or to the update it sends.

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
    """Knowledge of a malicious client about a round beside its own update."""

    clients: int
    """Number of clients of the round."""
    honest: Sequence[Update]
    """Updates that the malicious clients of the round would send if they were honest, its own among them, in the order
    of their numbers; empty where the poisoning does not say that it `colludes`."""
    generator: torch.Generator
    """Its only source of randomness, seeded by (seed, round, client)."""


class Poisoning:
    """Base of every behaviour: all hooks pass through."""

    colludes: ClassVar[bool] = False
    """Whether it needs the honest updates of all malicious clients, which are then made again for each cohort."""
    has_trigger: ClassVar[bool] = False
    """Whether it teaches the model a backdoor, which `triggered` defines."""

    def check(self, image_shape: tuple[int, ...], classes: int, clients: int, malicious: int) -> None:
        """Raise `UserError` where it has no meaning for such data, or for the round with the most malicious clients."""

    def poison_data(self, data: Batch, classes: int, generator: torch.Generator) -> Batch:
        """Return all of the client's samples as it trains on them; `generator` is the same in every round."""
        return data

    def poison_update(self, update: Update, insight: Insight) -> Update:
        """Return what is sent in place of the update that the client's training and defences have made."""
        return update

    def triggered(self, test: Batch) -> Batch:
        """Return the test samples on which the backdoor is tried, with its trigger, labelled as the attacker wants."""
        raise NotImplementedError
