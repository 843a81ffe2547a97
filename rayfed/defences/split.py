"""SplitFed, as in the paper on private passports: the first layers never leave the client.

Source: Gu et al. 2021, "Federated Deep Learning with Bayesian Privacy", section 5.1 and algorithm 1; after Thapa et al.
2020, "SplitFed: When Federated Learning Meets Split Learning".
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from rayfed.defences.base import Defence, Task
from rayfed.models.private_conv import PrivateConv, keep_front
from rayfed.registry import component
from rayfed.update import Named


@component
class PrivateFront(Defence):
    """Base of the defences that keep the first convolutions private."""

    layers: Annotated[int, Field(ge=1)] = 1
    """Number of private convolutions, counted from the input."""
    start: Literal["common", "own"] = "common"
    """Initial weights of the private layers. `common`: the same public values for all clients, as in the paper. `own`:
    each client samples its own."""
    private_epochs: Annotated[int, Field(ge=0)] = 1
    """Epochs over a client's data that train only its private layers, run whenever new global weights arrive."""

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Make the model's first layers private. Raises `UserError` if the model begins with too few convolutions."""
        return keep_front(model, self.layers, self._block)

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the gradient unchanged: the model of the task is the adapted one."""
        return tensors

    def _block(self, conv: nn.Conv2d, norm: nn.Module | None) -> PrivateConv:
        raise NotImplementedError


@component
class Split(PrivateFront):
    """Keep the first convolutions and their normalisations private; share the later layers.

    Empirical. A round has two stages. First all layers train, and the server averages the public ones. Then each client
    trains its private layers with the new public ones. Accuracies are means over the round's clients, each with its own
    private layers.
    """

    sent_out: bool = False
    """Average these layers at the server too, and send them to the clients again in every round. This protects nothing.
    It is another reading of algorithm 1, for measuring how far the clients' layers are apart (figure 4)."""

    def _block(self, conv: nn.Conv2d, norm: nn.Module | None) -> PrivateConv:
        block = PrivateConv(conv, norm, self.start == "common")
        block.private = not self.sent_out
        return block
