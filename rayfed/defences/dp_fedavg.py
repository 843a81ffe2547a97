"""DP-FedAvg: every client's update is clipped, and noise hides in their sum whether a client took part.

Sources: McMahan et al. 2018, 'Learning differentially private recurrent language models'; Geyer et al. 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import ClassVar, Literal

import torch

from rayfed.aggregation.base import Aggregation
from rayfed.aggregation.fedavg import FedAvg
from rayfed.aggregation.noisy_sum import NoisySum
from rayfed.catalogue import component
from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.defences.noise import clipped
from rayfed.defences.private import Private
from rayfed.errors import UserError
from rayfed.privacy.accountant import Release
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

    vectorises: ClassVar[bool] = True

    noise: Literal["server", "clients"] = "server"
    """Who adds the noise: the server to the sum, or every client of a fixed number its part of it. In both cases the
    guarantee is for who sees sums only: whoever sees one client's update meets a part of the noise, or none."""

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Clip what is sent; add this client's part of the noise."""

        def update(task: Task) -> Update:
            sent = next(task)
            tensors = clipped(sent.tensors, self.clip, 2)
            if self.noise == "clients":
                part = self.deviation / sqrt(task.clients_per_round)
                draw = task.generator
                tensors = {n: t + part * torch.randn(t.shape, generator=draw).to(t) for n, t in tensors.items()}
            return replace(sent, tensors=tensors, bits=32)

        return update

    def refuses(self, later: Sequence[Defence]) -> str | None:
        """Anything behind it."""
        return "it must come last, for what comes after it could undo its clip bound" if later else None

    def wrap_aggregation(self, next: Aggregation, clients: int) -> Aggregation:
        """Add all updates alike; raises `UserError` for rules that are no mean."""
        if not isinstance(next, FedAvg):
            raise UserError(f"dp_fedavg adds noise to a mean, not to what {type(next).__name__} makes: use fedavg")
        return NoisySum(clients=clients, deviation=self.deviation if self.noise == "server" else 0.0)

    def released(self, setting: Setting, multiplier: float) -> tuple[Release, ...]:
        """One sum a round."""
        drawn, all_clients = setting.clients_per_round, len(setting.clients)
        if setting.client_sampling == "poisson":
            if self.noise == "clients":
                raise UserError(
                    "dp_fedavg: clients cannot divide the noise when their number is drawn: use `noise: server`, or "
                    "federation.sampling: fixed"
                )
            return (Release("gaussian", multiplier, setting.rounds, drawn / all_clients),)
        if drawn == all_clients:
            return (Release("gaussian", multiplier, setting.rounds),)
        # One client in another's place: the sum moves by up to twice the clip bound.
        return (Release("gaussian", multiplier / 2, setting.rounds, drawn=(drawn, all_clients)),)

    def spends(self, setting: Setting) -> Spending:
        """The account of all rounds."""
        assert self.noise_multiplier is not None
        drawn, all_clients = setting.clients_per_round, len(setting.clients)
        fixed = setting.client_sampling == "fixed"
        how = (
            "all of them in every round"
            if fixed and drawn == all_clients
            else f"{drawn} drawn without replacement"
            if fixed
            else f"each drawn for itself with probability {drawn / all_clients:.3g}"
        )
        return Spending(
            self.released(setting, self.noise_multiplier),
            self.delta,
            unit="client",
            adjacency="one client replaced by another"
            if fixed and drawn < all_clients
            else "one client added or removed",
            against="whoever sees the global weights, but not the server"
            if self.noise == "server"
            else "whoever sees sums of updates (secure aggregation), but no single one",
            mechanism=f"Gaussian noise of {self.noise_multiplier:.3g} times the clip bound on the sum of each round, "
            f"{all_clients} clients, {how}",
        )
