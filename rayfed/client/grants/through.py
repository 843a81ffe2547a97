"""Search through the defences: apply their code to the reconstruction's gradient, and match the observed update.

This is for deterministic defences that lose a part of the gradient, such as its norm, and have no inverse. The search
differentiates through the code.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rayfed.defences.base import Defence, GradientMethod, Task
    from rayfed.update import Named, Update


@dataclass(frozen=True)
class Through:
    """Deterministic defences, applied to gradients of the attacker."""

    defences: Sequence[Defence]
    task: Task

    def __call__(self, gradient: Named) -> Named:
        """Return the defended update for a gradient, differentiable with respect to the gradient."""
        import torch

        task = self.task.replace(
            weights={name: tensor.clone().to(gradient[name]) for name, tensor in self.task.weights.items()},
            generator=torch.Generator().manual_seed(0),
            state={},
        )
        loss = torch.zeros(())
        with warnings.catch_warnings(
            action="ignore"
        ):  # PyTorch warns if code converts a tensor with a graph to a number
            return answered(self.defences, task, lambda *_: (gradient, loss), one_step=True).tensors

    @property
    def has_slope(self) -> bool:
        """Return whether the defences' derivative is usable; code that rounds, sorts or leaves PyTorch has none."""
        import torch

        from rayfed.gradients import flatten, unflatten

        like, draw = flatten(self.task.weights), torch.Generator().manual_seed(0)
        one, step = (torch.randn(len(like), generator=draw).to(like).double() for _ in range(2))
        step *= _STEP

        def sent(values: Tensor) -> Tensor:
            return flatten(self(unflatten(values, self.task.weights))).double()

        with torch.enable_grad():
            made = sent(one.requires_grad_())
            moved = (sent(one + step) - made).detach()
            (slope,) = torch.autograd.grad(made @ moved, one, materialize_grads=True)
        size = float(moved.square().sum())
        return size > 0 and abs(float(slope @ step) - size) < _CURVED * size


_STEP, _CURVED = 0.1, 0.25
"""Step of the derivative test, in standard deviations of the gradient, and maximum relative error of its square."""


def answered(defences: Sequence[Defence], task: Task, sent: GradientMethod, one_step: bool) -> Update:
    """Return the defended update for a task of the attacker; `sent` replaces the function that computes gradients."""
    from rayfed.client.local import gradient_method, wrap_updates
    from rayfed.update import Update

    def update(task: Task) -> Update:
        method = gradient_method(defences if one_step else (), sent)
        tensors, _ = method(task, task.weights, task.data)
        return Update(task.client, task.round, tensors, task.buffers, len(task.data.labels), loss=0.0)

    return wrap_updates(update, defences)(task)
