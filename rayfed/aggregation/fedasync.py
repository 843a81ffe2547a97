"""FedAsync: mix each arriving model into the global one, with less weight for stale models.

Source: Xie, Koyejo and Gupta 2019, 'Asynchronous federated optimization', algorithm 1 and the staleness functions of
section 5.2: x <- (1 - a s(t - tau)) x + a s(t - tau) x_new. A client sends the difference from the weights that it
received, from which the server computes the client's model. The paper's proximal term in the client's loss (rho) is
left out: clients train as with any other rule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, FiniteFloat

from rayfed.aggregation.asynchronous import AsynchronousRule, Model
from rayfed.aggregation.weighted_sum import WeightedSum, scaled
from rayfed.errors import UserError
from rayfed.registry import component
from rayfed.update import Named

Factor = Annotated[FiniteFloat, Field(ge=0)]


@component
class FedAsync(AsynchronousRule):
    """Mix each client's model into the global one as it arrives, with `clients_per_round: 1`.

    `federation.system.concurrency` tasks run at the same time. The paper's proximal term in the clients' loss is left
    out. The server's optimiser must be sgd with lr 1 and no momentum. Source: Xie et al. 2019, algorithm 1.
    """

    mixes: ClassVar[bool] = True

    mixing: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Weight of a client's model without staleness (the paper's alpha)."""
    staleness: Literal["constant", "hinge", "polynomial"] = "polynomial"
    """Factor of the weight as a function of the staleness s. `constant`: 1. `hinge`: 1 up to `b`, then 1 / (a (s - b) +
    1). `polynomial`: (1 + s)^-a."""
    a: Factor = 0.5
    """Decay rate of the weight with the staleness, for `hinge` and `polynomial`."""
    b: Factor = 4.0
    """Staleness from which `hinge` decays."""

    def check(self, clients: int) -> None:
        """Raise `UserError` unless the server mixes one client's model at a time (`clients_per_round: 1`)."""
        if clients != 1:
            raise UserError(f"fedasync mixes one model at a time: set federation.clients_per_round to 1, not {clients}")

    def share(self, staleness: int) -> float:
        """Return the weight with which a model of a given staleness (in server steps) is mixed into the global one."""
        if self.staleness == "constant":
            return self.mixing
        if self.staleness == "hinge":
            return self.mixing / (self.a * max(staleness - self.b, 0) + 1)
        return float(self.mixing * (1 + staleness) ** -self.a)

    def aged(self, update: WeightedSum, staleness: int, sent: Named, now: Model) -> WeightedSum:
        """Return the step from the global model to its mixture with the client's model, and the mixed buffers."""
        share = self.share(staleness)
        away = {name: now.weights[name] - sent[name] + t for name, t in update.tensors.items()}
        buffers = {name: now.buffers[name] + share * (b - now.buffers[name]) for name, b in update.buffers.items()}
        return replace(update, tensors=scaled(away, share), buffers=buffers)
