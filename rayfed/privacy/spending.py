"""What a guarantee rests on: how a run draws clients and samples, and what a mechanism releases in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayfed.privacy.accountant import Release


@dataclass(frozen=True)
class Work:
    """One client's part in a run."""

    samples: int
    batch_size: int
    """Samples of one local step; their expected number where they are drawn."""
    steps: int
    """Local steps of one round."""
    rounds: int
    """Rounds in which it is drawn."""


@dataclass(frozen=True)
class Setting:
    """A run, as far as its privacy depends on it."""

    clients: tuple[Work, ...]
    clients_per_round: int
    """Their expected number where they are drawn."""
    rounds: int
    client_sampling: Literal["fixed", "poisson"]
    """`clients_per_round` of the clients without replacement, or each for itself."""
    sample_sampling: Literal["shuffle", "poisson"]
    """Batches of a fresh permutation each epoch, or each sample for itself in every step."""
    layers: int
    """Parameter tensors of the model."""
    values: int = 1
    """Parameters of one update."""
    missing: int = 0
    """Clients of a round that drop out before their updates are added."""
    masked: bool = False
    """Whether secure aggregation shows the server sums of updates, and no single one."""

    @property
    def works(self) -> tuple[Work, ...]:
        """What clients do, once each: of many clients a few kinds."""
        return tuple(dict.fromkeys(self.clients))

    @property
    def most_rounds(self) -> int:
        """Rounds of the client that is drawn most often."""
        return max(work.rounds for work in self.clients)


@dataclass(frozen=True)
class Spending:
    """What a defence has released in a setting."""

    releases: tuple[Release, ...]
    """One for each client that may be the worst off."""
    delta: float
    unit: Literal["sample", "client"]
    """Whose presence is hidden: one sample of one client, or all samples of one client."""
    adjacency: str
    """Which two data sets cannot be told apart."""
    against: str
    """From whom: who sees no more than this may not tell."""
    mechanism: str
    """In words, with its numbers."""
