"""FedAsync: each arriving model is mixed into the global one, with less weight the staler it is.

Source: Xie, Koyejo and Gupta 2019, 'Asynchronous federated optimization', algorithm 1 and the staleness functions of
section 5.2: x <- (1 - a s(t - tau)) x + a s(t - tau) x_new. A client sends the difference to what it was sent, from
which the server, who knows that, has its model. The proximal term that the paper adds to a client's loss (rho) is left
out: clients train as under any other rule.
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
    """Mixing of each client's model into the global one as it arrives, with `clients_per_round: 1`.

    `federation.system.concurrency` tasks are in flight. The paper's proximal term in the clients' loss is left out. The
    server's optimiser must be plain: sgd with lr 1 and no momentum. Source: Xie et al. 2019, algorithm 1.
    """

    mixes: ClassVar[bool] = True

    mixing: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Weight of a client's model that is not stale (the paper's alpha)."""
    staleness: Literal["constant", "hinge", "polynomial"] = "polynomial"
    """Function of the staleness s that the weight is multiplied by: 1; or 1 up to `b` and 1 / (a (s - b) + 1) beyond;
    or (1 + s)^-a."""
    a: Factor = 0.5
    """How fast the weight falls with the staleness, of `hinge` and `polynomial`."""
    b: Factor = 4.0
    """Staleness from which on `hinge` falls."""

    def check(self, clients: int) -> None:
        """Raise `UserError` unless one model is mixed at a time."""
        if clients != 1:
            raise UserError(f"fedasync mixes one model at a time: set federation.clients_per_round to 1, not {clients}")

    def share(self, staleness: int) -> float:
        """Return the mixing weight of a model that is this many steps old."""
        if self.staleness == "constant":
            return self.mixing
        if self.staleness == "hinge":
            return self.mixing / (self.a * max(staleness - self.b, 0) + 1)
        return float(self.mixing * (1 + staleness) ** -self.a)

    def aged(self, update: WeightedSum, staleness: int, sent: Named, now: Model) -> WeightedSum:
        """Return the step from the global model to the mixture, and the mixture of the buffers."""
        share = self.share(staleness)
        away = {name: now.weights[name] - sent[name] + t for name, t in update.tensors.items()}
        buffers = {name: now.buffers[name] + share * (b - now.buffers[name]) for name, b in update.buffers.items()}
        return replace(update, tensors=scaled(away, share), buffers=buffers)
