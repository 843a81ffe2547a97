"""Local optimisers: SGD with momentum, or Adam (Kingma and Ba 2015, algorithm 1).

Written out rather than taken from `torch.optim`, so that one call moves a whole cohort's stacked weights under vmap.
"""

from __future__ import annotations

import torch

from rayfed.scenario import Training
from rayfed.update import Named

_BETAS, _EPSILON = (0.9, 0.999), 1e-8


class LocalOptimiser:
    """Optimiser of a client's local steps: moves weights in place, begins anew every round."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._steps = 0
        self._first: Named = {}
        """SGD's velocity, or Adam's first moment."""
        self._second: Named = {}

    @torch.no_grad()
    def step(self, weights: Named, slope: Named) -> None:
        """Take one step down the slope, in place on `weights`."""
        self._steps += 1
        move = self._adam if self._training.optimiser == "adam" else self._sgd
        for name, g in slope.items():
            weights[name].sub_(move(name, g), alpha=self._training.lr)

    def _sgd(self, name: str, g: torch.Tensor) -> torch.Tensor:
        if not self._training.momentum:
            return g
        past = self._first.get(name)
        self._first[name] = g.clone() if past is None else past.mul_(self._training.momentum).add_(g)
        return self._first[name]

    def _adam(self, name: str, g: torch.Tensor) -> torch.Tensor:
        b1, b2 = _BETAS
        first = self._first.setdefault(name, torch.zeros_like(g)).mul_(b1).add_(g, alpha=1 - b1)
        second = self._second.setdefault(name, torch.zeros_like(g)).mul_(b2).addcmul_(g, g, value=1 - b2)
        size = (second / (1 - b2**self._steps)).sqrt_().add_(_EPSILON)
        return first.div(size).div_(1 - b1**self._steps)
