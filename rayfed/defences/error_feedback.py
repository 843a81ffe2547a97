"""Base of compressing defences with error feedback: the compression error is added to the client's next update.

Sources: Seide 2014, '1-bit stochastic gradient descent', section 2; Stich 2018, 'Sparsified SGD with memory', algorithm
1; Lin 2018, 'Deep gradient compression', section 3.1 (local gradient accumulation).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.defences.declarations import straight_through
from rayfed.registry import component
from rayfed.update import Named, Update


@component
class Compression(Defence):
    """Base of the defences that send an approximation of the update, computed by `compress`."""

    # The residual is computed only from the output of earlier defences, so it reveals no more than they do.
    vectorises: ClassVar[bool] = True
    post_processes: ClassVar[bool] = True

    error_feedback: bool = False
    """Add the compression error of this update to the client's next update, instead of losing it."""

    def compress(self, task: Task, update: Update) -> Update:
        """Return a compressed update, which approximates the given update."""
        raise NotImplementedError

    @property
    def has_latents(self) -> bool:
        """Return whether an error of earlier updates, which the attacker does not know, is added (error feedback)."""
        return self.error_feedback

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the compressed tensors, with the derivative of the identity."""
        exact = {name: tensor.detach() for name, tensor in tensors.items()}
        update = Update(task.client, task.round, exact, {}, len(task.data.labels), loss=0.0)
        compressed = self.compress(task, update).tensors
        return {name: straight_through(compressed[name], tensor) for name, tensor in tensors.items()}

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Add the compression error of the client's earlier updates to the update, then compress the sum."""

        def update(task: Task) -> Update:
            computed = next(task)
            if not self.error_feedback:
                return self.compress(task, computed)
            residual = task.state.get(self._state_key, {})
            owed = {name: t + residual[name].to(t) if name in residual else t for name, t in computed.tensors.items()}
            sent = self.compress(task, replace(computed, tensors=owed))
            task.state[self._state_key] = {name: t - sent.tensors[name] for name, t in owed.items()}
            return sent

        return update

    @property
    def keeps_state(self) -> bool:
        """Return whether the client keeps a compression error for its next update (error feedback)."""
        return self.error_feedback

    @property
    def _state_key(self) -> str:
        """Key of the residual in the client's state, different for each defence of a pipeline."""
        return f"residual of {self}"
