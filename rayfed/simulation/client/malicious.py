"""Malicious clients of an arm, which poison their data or updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from rayfed.core import seeds
from rayfed.defences.base import Batch
from rayfed.poisoning.base import Insight, Poisoning
from rayfed.scenario import ResolvedArm, Scenario
from rayfed.simulation.client import plan
from rayfed.simulation.client.failures import Failed, Made, attempt
from rayfed.update import Update


@dataclass(frozen=True)
class Malicious:
    """The malicious clients of one arm, and the poisoning of their data or updates."""

    scenario: Scenario
    clients: frozenset[int]
    poisoning: Poisoning

    @classmethod
    def of(cls, scenario: Scenario, arm: ResolvedArm) -> Malicious:
        """Return the malicious clients of an arm, possibly none."""
        poisoning = arm.malicious.build() if arm.malicious else Poisoning()
        return cls(scenario, plan.malicious_clients(scenario, arm), poisoning)

    def check(self, image_shape: tuple[int, ...], classes: int) -> None:
        """Raise `UserError` if the poisoning is undefined for the data or for one of the rounds."""
        drawn = [plan.drawn_clients(self.scenario, round) for round in range(self.scenario.federation.rounds)]
        counts = [(len(clients), len(self.clients.intersection(clients))) for clients in drawn if clients]
        worst = max(counts, key=lambda count: count[1] / count[0], default=(0, 0))
        self.poisoning.check(image_shape, classes, *worst)

    def among(self, clients: Iterable[int]) -> list[int]:
        """Return the malicious clients among the given clients."""
        return [client for client in clients if client in self.clients]

    def data(self, client: int, own: Batch, classes: int) -> Batch:
        """Return a client's training samples, poisoned if the client is malicious."""
        if client not in self.clients:
            return own
        generator = seeds.torch_generator(self.scenario.seed, "poisoning", client)
        return self.poisoning.poison_data(own, classes, generator)

    def attempted(self, made: Made, honest: Sequence[Update]) -> Made:
        """Return a client's update, poisoned if the client is malicious, or a failure if training or poisoning failed.

        If malicious clients collude, `honest` contains the unpoisoned updates of all malicious clients of the round.
        """
        if isinstance(made, Failed):
            return made
        return attempt(made.client, partial(self._poisoned, made, honest))

    def _poisoned(self, update: Update, honest: Sequence[Update]) -> Update:
        if update.client not in self.clients:
            return update
        generator = seeds.torch_generator(self.scenario.seed, "poisoning", update.client, update.round)
        clients = len(plan.drawn_clients(self.scenario, update.round))
        return self.poisoning.poison_update(update, Insight(clients, honest, generator))
