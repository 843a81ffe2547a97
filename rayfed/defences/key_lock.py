"""FedKL: scale and shift of normalisation layers, computed from a private key by private layers.

Source: Ren 2023 (thesis), chapter 5; Ren et al. 2022, "FedKL: Gradient Leakage Defence with Key-Lock Module for
Federated Learning".
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from rayfed.defences.base import Defence, Task
from rayfed.models.activation import Activation
from rayfed.models.key_lock import lock_norms
from rayfed.registry import component
from rayfed.update import Named


@component
class KeyLock(Defence):
    """Lock convolution-normalisation blocks with a key and a lock per client, which are never sent.

    Empirical. Needs a model with norms. A client samples its key once for the whole run. Only the client trains its
    lock, which is initialised at random. Accuracies are means over the round's clients, each with its own key and lock.
    """

    length: Annotated[int, Field(ge=1)] = 1024
    """Length of the key."""
    blocks: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Indices of the locked convolution-normalisation blocks, counted from 0."""
    start: Literal["own", "common"] = "own"
    """Initial weights of the lock. `own`: each client samples its own. `common`: the same public values for all
    clients, as in the thesis. Keys are always the client's own."""
    activation: Activation | None = None
    """Activation after the lock's linear maps. Null: none, as in the thesis' equations. The authors' code uses `relu`
    or `sigmoid`."""

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Insert the key-locks into the model. Raises `UserError` if the model does not have one of the blocks."""
        return lock_norms(model, self.blocks, self.length, self.activation, self.start == "common")

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the gradient unchanged: the model of the task is the adapted one."""
        return tensors
