"""Local optimisers: SGD with momentum, Adam, AdamW or AdaDelta.

Sources: Kingma and Ba 2015, "Adam", algorithm 1; Loshchilov and Hutter 2019, "Decoupled weight decay regularization";
Zeiler 2012, "ADADELTA", algorithm 1; Sutskever et al. 2013 for Nesterov's momentum. Constants are PyTorch's.

These are not the classes of `torch.optim`, so that one call can step the stacked weights of a cohort.
"""

from __future__ import annotations

import torch

from rayfed.gradients import clipped
from rayfed.scenario import Training
from rayfed.update import Named

_BETAS, _EPSILON = (0.9, 0.999), 1e-8
_DELTA_DECAY, _DELTA_EPSILON = 0.9, 1e-6
"""Decay of AdaDelta's mean squares, and the constant added to them."""


class LocalOptimiser:
    """Optimiser of a client's local steps, with a new state every round."""

    def __init__(self, training: Training, together: bool = False) -> None:
        """Initialise the optimiser's state; with `together`, tensors have a leading dimension of clients."""
        self._training, self._together = training, together
        self._steps = 0
        self._first: Named = {}
        """SGD's velocity, Adam's first moment, or AdaDelta's mean square of the steps."""
        self._second: Named = {}
        """Mean square of the gradients (Adam, AdaDelta)."""

    @torch.no_grad()
    def step(self, weights: Named, slope: Named) -> None:
        """Update `weights` in place by one step along the gradient `slope`."""
        training = self._training
        self._steps += 1
        rules = {"sgd": self._sgd, "adam": self._adam, "adamw": self._adam, "adadelta": self._adadelta}
        move = rules[training.optimiser]
        if training.clip_norm is not None:
            slope = clipped(slope, training.clip_norm, leading=int(self._together))
        for name, g in slope.items():
            if training.weight_decay and training.optimiser == "adamw":
                weights[name].mul_(1 - training.lr * training.weight_decay)
            elif training.weight_decay:
                g = g.add(weights[name], alpha=training.weight_decay)
            weights[name].sub_(move(name, g), alpha=training.lr)

    def _sgd(self, name: str, g: torch.Tensor) -> torch.Tensor:
        if not self._training.momentum:
            return g
        past = self._first.get(name)
        self._first[name] = g.clone() if past is None else past.mul_(self._training.momentum).add_(g)
        velocity = self._first[name]
        return g.add(velocity, alpha=self._training.momentum) if self._training.nesterov else velocity

    def _adam(self, name: str, g: torch.Tensor) -> torch.Tensor:
        b1, b2 = _BETAS
        first = self._first.setdefault(name, torch.zeros_like(g)).mul_(b1).add_(g, alpha=1 - b1)
        second = self._second.setdefault(name, torch.zeros_like(g)).mul_(b2).addcmul_(g, g, value=1 - b2)
        size = (second / (1 - b2**self._steps)).sqrt_().add_(_EPSILON)
        return first.div(size).div_(1 - b1**self._steps)

    def _adadelta(self, name: str, g: torch.Tensor) -> torch.Tensor:
        decay, fresh = _DELTA_DECAY, 1 - _DELTA_DECAY
        squares = self._second.setdefault(name, torch.zeros_like(g)).mul_(decay).addcmul_(g, g, value=fresh)
        moves = self._first.setdefault(name, torch.zeros_like(g))
        step = (moves + _DELTA_EPSILON).sqrt_().div_((squares + _DELTA_EPSILON).sqrt_()).mul_(g)
        moves.mul_(decay).addcmul_(step, step, value=fresh)
        return step
