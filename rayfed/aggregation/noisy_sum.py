"""The server's side of client-level differential privacy: a noisy sum, divided by a fixed number of clients.

Source: McMahan et al. 2018, 'Learning differentially private recurrent language models', section 2.2 (the estimator
with a fixed denominator); Geyer et al. 2017, algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayfed.aggregation.weighted_sum import WeightedSum, WeightedSumRule
from rayfed.privacy.sampling import gaussian, noised
from rayfed.update import Named, Update


@dataclass(frozen=True, kw_only=True)
class NoisySum(WeightedSumRule):
    """Unweighted sum of all updates with noise, divided by the actual or expected number of clients of a round.

    A divisor that follows from who was drawn would tell something about it; so the mean is right in expectation only.
    """

    clients: int
    """Number of clients of a round."""
    deviation: float
    """Standard deviation of the Gaussian noise on every value of the sum."""
    step: float | None = None
    """Step of which all values of updates are whole multiples, where clients have added the noise and rounded to it;
    None where they have not. Nothing may round or clip such values again, for the sum would lose noise."""

    def weight(self, update: Update) -> int:
        """Return 1 for every client."""
        return 1

    def heaviest(self, clients: int, samples: int) -> int:
        """Return the number of clients."""
        return clients

    def buffers(self, update: Update) -> Named:
        """Return the buffers in double precision, so that the mean of equal single-precision values is exact."""
        return {name: b.double() for name, b in update.buffers.items()}

    def combine(self, total: WeightedSum, generator: torch.Generator) -> tuple[Named, Named]:
        """Return the noisy mean of the updates, and the mean of the buffers.

        The mean of equal buffers is what they are: rounded otherwise, it would tell how many clients were drawn.
        """
        return self._noised(total.tensors, generator), {n: b / total.weight for n, b in total.buffers.items()}

    def idle(self, weights: Named, generator: torch.Generator) -> Named:
        """Return only noise, because it is secret whether any client was drawn."""
        return self._noised({name: torch.zeros_like(w) for name, w in weights.items()}, generator)

    def _noised(self, sums: Named, generator: torch.Generator) -> Named:
        noisy = noised(sums, self.deviation, gaussian, generator)
        return {name: s / self.clients for name, s in noisy.items()}
