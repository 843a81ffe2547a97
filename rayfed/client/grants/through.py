"""Search through the defences' code: apply it to the gradient of the reconstruction, and match the observed update.

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
    """Defences that make the same of one gradient each time, with a task of the attacker's own."""

    defences: Sequence[Defence]
    task: Task

    def __call__(self, gradient: Named) -> Named:
        """Return what is sent in place of a gradient, with its graph."""
        import torch

        task = self.task.replace(
            weights={name: tensor.clone().to(gradient[name]) for name, tensor in self.task.weights.items()},
            generator=torch.Generator().manual_seed(0),
            state={},
        )
        loss = torch.zeros(())
        with warnings.catch_warnings(action="ignore"):  # code that reads a norm as a number meets one with a graph
            return answered(self.defences, task, lambda *_: (gradient, loss), one_step=True).tensors

    @property
    def has_slope(self) -> bool:
        """Whether what is sent moves with a gradient about as its slope says: code may leave PyTorch, round or sort."""
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
"""Step by which a slope is tried, in deviations of a gradient's values, and by how much its square may miss."""


def answered(defences: Sequence[Defence], task: Task, sent: GradientMethod, one_step: bool) -> Update:
    """Return the defences' update for a task of the attacker's, where `sent` stands in place of a batch's gradient."""
    from rayfed.client.local import gradient_method, wrap_updates
    from rayfed.update import Update

    def update(task: Task) -> Update:
        method = gradient_method(defences if one_step else (), sent)
        tensors, _ = method(task, task.weights, task.data)
        return Update(task.client, task.round, tensors, task.buffers, len(task.data.labels), loss=0.0)

    return wrap_updates(update, defences)(task)
