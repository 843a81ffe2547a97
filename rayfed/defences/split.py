"""SplitFed, as in the paper on private passports: the first layers stay with the client.

Source: Gu et al. 2021, "Federated Deep Learning with Bayesian Privacy", section 5.1 and algorithm 1; after Thapa et al.
2020, "SplitFed: When Federated Learning Meets Split Learning".
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from rayfed.defences.base import Defence
from rayfed.models.private_conv import PrivateConv, keep_front
from rayfed.registry import component


@component
class Split(Defence):
    """Keep the first convolutions and their normalisations private; later layers are shared.

    Empirical. A round has two stages: all layers train, the public ones are averaged; the private ones then train on
    the new ones before anything else is done with them. Accuracies are means over the round's clients, each with its
    own private layers.
    """

    layers: Annotated[int, Field(ge=1)] = 1
    """Number of private convolutions, from the front."""
    start: Literal["common", "own"] = "common"
    """The private layers' initial weights: those that the server draws for all, as in the paper, which everybody knows;
    or a draw of each client's own."""
    private_epochs: Annotated[int, Field(ge=0)] = 1
    """Passes over a client's data in which its private layers alone learn, whenever new weights have arrived."""

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Make the front private; raises `UserError` unless the model begins with that many convolutions."""
        return keep_front(model, self.layers, self._block)

    def _block(self, conv: nn.Conv2d, norm: nn.Module | None) -> PrivateConv:
        return PrivateConv(conv, norm, self.start == "common")
