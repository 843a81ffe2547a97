"""Server side of client-level differential privacy: a noisy sum, divided by a fixed number of clients.

Source: McMahan et al. 2018, 'Learning differentially private recurrent language models', section 2.2 (the estimator
with a fixed denominator); Geyer et al. 2017, algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayfed.aggregation.weighted_sum import WeightedSum, WeightedSumRule
from rayfed.privacy.sampling import add_noise, sample_gaussian
from rayfed.update import Named, Update


@dataclass(frozen=True, kw_only=True)
class NoisySum(WeightedSumRule):
    """Unweighted sum of all updates with noise, divided by the actual or expected number of clients per round.

    A divisor that depends on the sampled clients would reveal information about them. So the mean is correct only in
    expectation.
    """

    clients: int
    """Number of clients per round."""
    deviation: float
    """Standard deviation of the Gaussian noise on every value of the sum."""
    step: float | None = None
    """Grid step of all update values if clients add the noise and round to it; None otherwise. Such values must not be
    rounded or clipped again, or the sum would lose noise."""

    def weight(self, update: Update) -> int:
        """Return 1, because all clients have the same weight."""
        return 1

    def heaviest(self, clients: int, samples: int) -> int:
        """Return the largest total weight of a round: the number of clients."""
        return clients

    def buffers(self, update: Update) -> Named:
        """Return a client's buffers in double precision, so that the mean of equal single-precision values is exact."""
        return {name: b.double() for name, b in update.buffers.items()}

    def combine(self, total: WeightedSum, generator: torch.Generator) -> tuple[Named, Named]:
        """Add noise to the sum of the updates, and return the noisy mean and the mean of the buffers.

        The mean of equal buffers is exactly their value: a rounding error would reveal how many clients were sampled.
        """
        return self._noised(total.tensors, generator), {n: b / total.weight for n, b in total.buffers.items()}

    def idle(self, weights: Named, generator: torch.Generator) -> Named:
        """Return a step of pure noise, so that the step does not reveal whether any client was sampled."""
        return self._noised({name: torch.zeros_like(w) for name, w in weights.items()}, generator)

    def _noised(self, sums: Named, generator: torch.Generator) -> Named:
        noisy = add_noise(sums, self.deviation, sample_gaussian, generator)
        return {name: s / self.clients for name, s in noisy.items()}
