"""FedKL: scale and shift of normalisation layers computed from a private key by private layers.

Source: Ren 2023 (thesis), chapter 5; Ren et al. 2022, "FedKL: Gradient Leakage Defence with Key-Lock Module for
Federated Learning".
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from rayfed.defences.base import Defence
from rayfed.models.activation import Activation
from rayfed.models.key_lock import lock_norms
from rayfed.registry import component


@component
class KeyLock(Defence):
    """Lock convolution-normalisation blocks; every client has its own key and lock, which it never sends.

    Empirical. Needs a model with norms. A client's key is drawn once for the whole run; its lock, drawn too, is trained
    by the client alone. Accuracies are means over the round's clients, each with its own key and lock.
    """

    length: Annotated[int, Field(ge=1)] = 1024
    """Length of the key."""
    blocks: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Convolution-normalisation blocks that are locked, counted from 0."""
    start: Literal["own", "common"] = "own"
    """The lock's initial weights: a draw of each client's own, or those that the server draws for all, as in the
    thesis, which everybody knows. Keys are always the client's own."""
    activation: Activation | None = None
    """Activation behind the lock's linear maps: none as in the thesis' equations, `relu` or `sigmoid` as in the
    authors' code."""

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Put locks into the model; raises `UserError` for a block that it does not have."""
        return lock_norms(model, self.blocks, self.length, self.activation, self.start == "common")
