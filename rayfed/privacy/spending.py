"""Inputs of the accountants: a run's sampling of clients and samples, and a mechanism's releases in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayfed.privacy.accountant import Release


@dataclass(frozen=True)
class Work:
    """One client's participation in a run: rounds, samples and steps."""

    samples: int
    batch_size: int
    """Number of samples of one local step, expected where they are drawn."""
    steps: int
    """Number of local steps of one round."""
    rounds: int
    """Number of rounds in which the client is drawn."""


@dataclass(frozen=True)
class Setting:
    """The properties of a run on which its privacy depends."""

    clients: tuple[Work, ...]
    clients_per_round: int
    """Number of clients of a round, expected where they are drawn."""
    rounds: int
    client_sampling: Literal["fixed", "poisson"]
    """`clients_per_round` of the clients without replacement, or each for itself."""
    sample_sampling: Literal["shuffle", "poisson"]
    """Batches of a fresh permutation each epoch, or each sample for itself in every step."""
    layers: int
    """Number of parameter tensors of the model."""
    values: int = 1
    """Number of parameters of one update."""
    missing: int = 0
    """Number of clients of a round that drop out before their updates are added."""
    masked: bool = False
    """Whether secure aggregation shows the server sums of updates, and no single one."""

    @property
    def works(self) -> tuple[Work, ...]:
        """The distinct participations of clients in the run."""
        return tuple(dict.fromkeys(self.clients))

    @property
    def most_rounds(self) -> int:
        """Number of rounds of the client that is drawn most often."""
        return max(work.rounds for work in self.clients)


@dataclass(frozen=True)
class Spending:
    """A defence's releases in a setting, and what they protect."""

    releases: tuple[Release, ...]
    """One for each client that may be the worst off."""
    delta: float
    unit: Literal["sample", "client"]
    """Unit of privacy, whose presence is hidden: one sample of one client, or all samples of one client."""
    adjacency: str
    """Relation of the two data sets that cannot be told apart."""
    against: str
    """Adversary against whom the guarantee holds: who sees no more than this."""
    mechanism: str
    """Description of the mechanism, with its numbers."""
