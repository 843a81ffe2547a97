"""Grant of the victim's defences: a simulated client, and the values of the update that they do not change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rayfed.registry import component
from rayfed.threat_model.grants.base import Grant

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rayfed.defences.base import Defence
    from rayfed.scenario import Training
    from rayfed.simulation.client.visit import ObservedClient, Truth
    from rayfed.update import Named, Observation, Update


@dataclass(frozen=True)
class DefendedClient:
    """Simulation of a client that has the victim's defences and the attacker's samples.

    It does not contain the victim's state or random numbers.
    """

    training: Training
    defences: tuple[Defence, ...]
    clients_per_round: int
    answers: int
    """Number of updates that are averaged."""

    def update(
        self, observation: Observation, model: nn.Module, inputs: Tensor, labels: Tensor, generator: torch.Generator
    ) -> Named:
        """Return the defended update for inputs (N, *shape) and labels (N,), from the weights sent to the victim."""
        import torch

        from rayfed.core import seeds
        from rayfed.simulation.client.local import update_method
        from rayfed.threat_model.observation_model import ObservationModel

        declared = ObservationModel(self.defences, self.clients_per_round)
        work, sent = update_method(self.training, self.defences), []
        for _ in range(self.answers):
            order = int.from_bytes(seeds.sample_key(generator))
            task = declared.task(observation, model, inputs, labels).replace(generator=generator, order=order)
            sent.append(work(task).tensors)
        return {name: torch.stack([one[name] for one in sent]).mean(0) for name in sent[0]}


@component
class KnownDefence(Grant):
    """The victim's defences: a simulated defended client, and masks of unchanged values.

    Attacks do not match changed values (such as pruned ones), and apply the defences to their shadow clients. With
    `averages: K` the attack sees the mean of K updates of the victim from the same weights and samples.
    """

    describe: ClassVar[str] = "which defence there is"
    fills: ClassVar[tuple[str, ...]] = ("defence", "defended")
    averages: ClassVar[bool] = True

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        """Return a simulated client with the victim's defences, and masks of the update's unchanged values.

        For a protected update, the masks are returned as a function, as they would reveal which values are zero.
        """
        from rayfed.defences.some_clients import defences_at
        from rayfed.threat_model.observation_model import LeftAlone

        hooks = "exposed", "exposed_in_mean"
        used = defences_at(observed.arm.defences, observed.client)
        defences = tuple(defence for defence in used if defence.overrides(*hooks))
        masks = LeftAlone(defences, observed.error())(update) if update.tensors else LeftAlone(defences)
        played = DefendedClient(
            observed.training,
            used,
            observed.runtime.scenario.clients_per_round,
            observed.attack.averages,
        )
        return {"defence": masks, "defended": played}
