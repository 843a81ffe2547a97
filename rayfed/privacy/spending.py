"""Inputs of the accountants: a run's sampling of clients and samples, and a mechanism's releases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayfed.privacy.accountant import Release


@dataclass(frozen=True)
class ClientWork:
    """One client's participation in a run: rounds, samples and steps."""

    samples: int
    batch_size: int
    """Number of samples per local step; the expected number under Poisson sampling."""
    steps: int
    """Number of local steps per round."""
    rounds: int
    """Number of rounds for which the client is sampled."""


@dataclass(frozen=True)
class PrivacySetting:
    """Properties of a run on which the privacy guarantees of its defences depend."""

    clients: tuple[ClientWork, ...]
    clients_per_round: int
    """Number of clients per round; the expected number under Poisson sampling."""
    rounds: int
    client_sampling: Literal["fixed", "poisson"]
    """`fixed`: `clients_per_round` clients without replacement. `poisson`: each client independently."""
    sample_sampling: Literal["shuffle", "poisson"]
    """`shuffle`: batches of a new permutation in each epoch. `poisson`: each sample independently in every step."""
    layers: int
    """Number of parameter tensors of the model."""
    values: int = 1
    """Number of parameters per update."""
    missing: int = 0
    """Number of clients per round that drop out before their updates are added."""
    masked: bool = False
    """Whether secure aggregation limits the server to sums of updates."""

    @property
    def works(self) -> tuple[ClientWork, ...]:
        """Return the distinct participations of clients in the run, without duplicates."""
        return tuple(dict.fromkeys(self.clients))

    @property
    def most_rounds(self) -> int:
        """Return the number of rounds of the client that is sampled most often."""
        return max(work.rounds for work in self.clients)


@dataclass(frozen=True)
class Spending:
    """Privacy accounting of a defence in a run: its releases, and the unit of privacy that they protect."""

    releases: tuple[Release, ...]
    """One release per client that may have the largest epsilon."""
    delta: float
    unit: Literal["sample", "client"]
    """Unit of privacy whose presence is hidden: one sample of one client, or all samples of one client."""
    adjacency: str
    """Relation of two data sets that are indistinguishable."""
    against: str
    """Adversary of the guarantee, described by the data that it sees."""
    mechanism: str
    """Description of the mechanism, with its numbers."""
