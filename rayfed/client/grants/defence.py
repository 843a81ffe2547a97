"""Grant of the victim's defences: their code, and the values of the update that they leave unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rayfed.client.grants.base import Grant
from rayfed.registry import component

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rayfed.client.visit import ObservedClient, Truth
    from rayfed.defences.base import Defence
    from rayfed.scenario import Training
    from rayfed.update import Named, Observation, Update


@dataclass(frozen=True)
class LeftAlone:
    """Function that returns which values of an update no defence of a pipeline has changed."""

    defences: tuple[Defence, ...]
    error: Named | None = None
    """Standard error of each value, of an update that is the mean of several answers."""

    def __call__(self, update: Update) -> Named:
        """Return a bool mask of every tensor, by name, True where no defence has changed it."""
        import torch

        masks = {name: torch.ones_like(t, dtype=torch.bool) for name, t in update.tensors.items()}
        for defence in self.defences:
            exposed = defence.exposed(update) if self.error is None else defence.exposed_in_mean(update, self.error)
            for name, mask in (exposed or {}).items():
                masks[name] = masks[name] & mask
        return masks


@dataclass(frozen=True)
class DefendedClient:
    """Simulation of a client with the victim's defences, for samples of the attacker's own.

    It has none of the victim's state and randomness.
    """

    training: Training
    defences: tuple[Defence, ...]
    clients_per_round: int
    answers: int
    """Number of answers of which the mean is sent."""

    def update(
        self, observation: Observation, model: nn.Module, inputs: Tensor, labels: Tensor, generator: torch.Generator
    ) -> Named:
        """Return the update for inputs (N, *shape) and labels (N,), at the weights that the victim was sent."""
        import torch

        from rayfed import seeds
        from rayfed.client.local import update_method
        from rayfed.defences.base import Batch, Task

        public = observation.extra.get("public")
        work, sent = update_method(self.training, self.defences), []
        for _ in range(self.answers):
            task = Task(
                client=observation.victim,
                round=observation.round,
                model=model,
                weights={name: w.clone() for name, w in observation.weights.items()},
                buffers={name: b.clone() for name, b in observation.buffers.items()},
                data=Batch(inputs, labels, places=torch.arange(len(labels), device=labels.device)),
                generator=generator,
                order=int.from_bytes(seeds.drawn(generator)),
                public=Batch(*public) if public else None,
                classes=observation.classes,
                clients_per_round=self.clients_per_round,
            )
            sent.append(work(task).tensors)
        return {name: torch.stack([one[name] for one in sent]).mean(0) for name in sent[0]}


@component
class KnownDefence(Grant):
    """Grant of a simulated defended client and of the mask of unchanged values.

    What they changed (what pruning cut, what Soteria touched) is then not matched, and attacks that learn from shadow
    clients defend these. With `averages: K` the victim also answers K times at the same weights with the same samples,
    and the attack sees the mean.
    """

    describe: ClassVar[str] = "which defence there is"
    fills: ClassVar[tuple[str, ...]] = ("defence", "defended")
    averages: ClassVar[bool] = True

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        """Return a simulated defended client, and the masks of what the attacker sees.

        Where that is no value, it is given how masks follow from an opened update.

        A mask tells which values are zero, so none is made here of an update that the attacker does not see.
        """
        hooks = "exposed", "exposed_in_mean"
        defences = tuple(defence for defence in observed.arm.defences if defence.overrides(*hooks))
        masks = LeftAlone(defences, observed.error())(update) if update.tensors else LeftAlone(defences)
        played = DefendedClient(
            observed.training,
            observed.arm.defences,
            observed.runtime.scenario.clients_per_round,
            observed.attack.averages,
        )
        return {"defence": masks, "defended": played}
