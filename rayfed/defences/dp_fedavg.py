"""DP-FedAvg: every client's update is clipped, and noise hides in their sum whether a client took part.

Sources: McMahan et al. 2018, 'Learning differentially private recurrent language models'; Geyer et al. 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import ClassVar, Literal

from rayfed.aggregation.base import Aggregation
from rayfed.aggregation.fedavg import FedAvg
from rayfed.aggregation.noisy_sum import NoisySum
from rayfed.catalogue import component
from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.defences.noise import clipped
from rayfed.defences.private import Private
from rayfed.errors import UserError
from rayfed.privacy.accountant import Release
from rayfed.privacy.sampling import gaussian, noised
from rayfed.privacy.spending import Setting, Spending
from rayfed.update import Update


@component
class DpFedAvg(Private):
    """Hide whole clients from everybody who sees the global weights.

    Clients clip their updates to an L2 norm; the sum, in which all clients weigh alike, gets Gaussian noise of
    deviation `noise_multiplier * clip` and is divided by the expected number of clients. An attacker who sees single
    updates, as the server does, is not kept off. It is the last defence of its stack, for what comes after could undo
    the bound.
    """

    post_processes: ClassVar[bool] = True

    noise: Literal["server", "clients"] = "server"
    """Who adds the noise: the server to the sum, or every client of a fixed number its part of it. In both cases the
    guarantee is for who sees sums only: whoever sees one client's update meets a part of the noise, or none."""

    @property
    def needs_all(self) -> str | None:
        """Every client brings a part of the noise, where they do."""
        return "its part of the noise would be missing in the sum" if self.noise == "clients" else None

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Clip what is sent; add this client's part of the noise."""

        def update(task: Task) -> Update:
            sent = next(task)
            tensors = clipped(sent.tensors, self.clip, 2)
            if self.noise == "clients":
                tensors = noised(tensors, self.deviation / sqrt(task.clients_per_round), gaussian, task.generator)
            return replace(sent, tensors=tensors, bits=32)

        return update

    def refuses(self, later: Sequence[Defence]) -> str | None:
        """Anything behind it."""
        return "it must come last, for what comes after it could undo its clip bound" if later else None

    def wrap_aggregation(self, next: Aggregation, clients: int) -> Aggregation:
        """Add all updates alike, whatever `weights` says; raises `UserError` for rules other than `fedavg`."""
        if type(next) is not FedAvg:
            raise UserError(f"dp_fedavg adds noise to a mean, not to what {type(next).__name__} makes: use fedavg")
        return NoisySum(clients=clients, deviation=self.deviation if self.noise == "server" else 0.0)

    def released(self, setting: Setting, multiplier: float) -> tuple[Release, ...]:
        """One sum a round."""
        return (self._account(setting, multiplier)[0],)

    def spends(self, setting: Setting) -> Spending:
        """The account of all rounds."""
        assert self.noise_multiplier is not None
        release, adjacency, how = self._account(setting, self.noise_multiplier)
        against = {
            "server": "whoever sees the global weights, but not the server",
            "clients": "whoever sees sums of updates (secure aggregation) or takes part, but sees no single update",
        }
        return Spending(
            (release,),
            self.delta,
            unit="client",
            adjacency=adjacency,
            against=against[self.noise],
            mechanism=f"Gaussian noise of {self.noise_multiplier:.3g} times the clip bound on the sum of each round, "
            f"{len(setting.clients)} clients, {how}",
        )

    def _account(self, setting: Setting, multiplier: float) -> tuple[Release, str, str]:
        """What is released, for which neighbours, and how clients are drawn, in words."""
        drawn, others, rounds = setting.clients_per_round, len(setting.clients) - 1, setting.rounds
        zeroed = "one client's update set to zero"
        if self.noise == "clients":
            if setting.client_sampling == "poisson" or drawn == 1:
                raise UserError(
                    "dp_fedavg: clients can divide the noise only where two or more of them, in a fixed number, take "
                    "part: use `noise: server`, or change federation.sampling and clients_per_round"
                )
            # Who adds up knows who was drawn, and who takes part knows its own share of the noise.
            rest = Release("gaussian", multiplier * sqrt((drawn - 1) / drawn), setting.most_rounds)
            return rest, zeroed, f"of which one of the {drawn} that take part knows its own share"
        if setting.client_sampling == "poisson":
            rate = drawn / (others + 1)
            how = f"each drawn for itself with probability {rate:.3g}"
            return Release("gaussian", multiplier, rounds, rate), zeroed, how
        if drawn > others:
            return Release("gaussian", multiplier, rounds), zeroed, "all of them in every round"
        # A client that was not drawn knows it, and looks for the victim among the others. One in another's place moves
        # the sum by up to twice the clip bound.
        population = None if drawn == others else (drawn, others)
        release = Release("gaussian", multiplier / 2, rounds, drawn=population)
        return release, "one client's update replaced by another's", f"{drawn} drawn without replacement"
