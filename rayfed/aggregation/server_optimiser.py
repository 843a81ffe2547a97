"""The server's optimiser: one step from a pseudo-gradient.

Source: Reddi 2021, 'Adaptive federated optimization', algorithms 1 and 2. `torch.optim` is not used because its first
use in a process costs seconds of imports. The server needs only two rules, on named tensors, with a state that goes
into the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rayfed.update import Named


@dataclass(frozen=True)
class ServerOptimiser:
    """Server optimiser, `sgd` (with momentum) or `adam`, as a pure function of weights, step and state."""

    kind: Literal["sgd", "adam"]
    lr: float
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay rates of the moments (Reddi 2021, section 5: beta1 0.9, beta2 0.99)."""
    tau: float = 1e-3
    """Adaptivity: value added to the root of the second moment (Reddi 2021, algorithm 2; 1e-3 in its experiments)."""

    def step(self, weights: Named, step: Named, state: dict[str, Named]) -> tuple[Named, dict[str, Named]]:
        """Return the weights after one optimiser step, and the optimiser's next state. The initial state is `{}`."""
        if self.kind == "adam":
            return self._adam(weights, step, state)
        if self.momentum:
            past = state.get("velocity", {})
            step = {n: self.momentum * past[n] + s if n in past else s for n, s in step.items()}
            state = {"velocity": step}
        return {n: w - self.lr * step[n] for n, w in weights.items()}, state

    def _adam(self, weights: Named, step: Named, state: dict[str, Named]) -> tuple[Named, dict[str, Named]]:
        """Take a step of FedAdam without bias correction, as in the paper; v starts at tau squared."""
        b1, b2 = self.betas
        zeros = {n: torch.zeros_like(s) for n, s in step.items()}
        first = state.get("first", zeros)
        second = state.get("second", {n: torch.full_like(s, self.tau**2) for n, s in step.items()})
        first = {n: b1 * first[n] + (1 - b1) * s for n, s in step.items()}
        second = {n: b2 * second[n] + (1 - b2) * s.square() for n, s in step.items()}
        moved = {n: w - self.lr * first[n] / (second[n].sqrt() + self.tau) for n, w in weights.items()}
        return moved, {"first": first, "second": second}
