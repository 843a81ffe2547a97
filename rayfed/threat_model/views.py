"""Views: the data of a client that an attack observes (`observes`); `TABLE` lists the built-in ones.

PyTorch is imported only in functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from rayfed import registry
from rayfed.registry import component

if TYPE_CHECKING:
    import numpy as np

    from rayfed.scenario import AttackSpec, Scenario, Training
    from rayfed.simulation.client.visit import ObservedClient
    from rayfed.update import Mixtures, Sealed, Update

TABLE: dict[str, str] = {
    "update": "rayfed.threat_model.views:WholeUpdate",
    "gradient": "rayfed.threat_model.views:OneGradient",
    "shown": "rayfed.threat_model.views:ShownToClients",
}


@dataclass(frozen=True)
class VisibleUpdate:
    """The part of a client's update that a view shows to the attacker."""

    update: Update
    """Update that the attacker observes, or that `sealed` contains."""
    sealed: Sealed | None = None
    """Protected update, which the attacker observes instead; None without protection."""
    mixtures: Mixtures | None = None
    """Mixtures that clients received in the round."""

    @property
    def seen(self) -> Update:
        """Return the update that the attacker observes, without values if the update is protected."""
        return self.update if self.sealed is None else replace(self.update, tensors={}, buffers={})


class View:
    """Base class of views, which define the data that an attack observes; by default the round's update."""

    describe: ClassVar[str]
    """Name of the observed data, to be followed by `of N samples`."""
    of_round: ClassVar[bool] = True
    """Whether the view shows the update of the round itself, so that the client must be sampled in the round."""
    mixes: ClassVar[bool] = False
    """Whether the view may show mixtures of several clients' updates, which `unmix` separates."""
    involves_others: ClassVar[bool] = False
    """Whether the view needs the work of other clients (`involves`)."""

    def check(self, scenario: Scenario, attack: AttackSpec) -> Iterator[tuple[str, str]]:
        """Yield fields of the attack that are incompatible with the view, each with an error message."""
        from rayfed.scenario import resolve

        trainings = [arm.training for arm in resolve(scenario).values()] if self.of_round else []
        if any(training.optimiser != "sgd" for training in trainings):
            yield (
                "observes",
                "an update after steps of Adam or AdaDelta is not a sum of gradients; set `observes: gradient`, or use "
                "sgd",
            )
        elif any(training.nesterov for training in trainings):
            yield "observes", "steps with `nesterov` are not simulated; set `observes: gradient`, or remove `nesterov`"
        if self.of_round and attack.batch_size != 1:
            message = f"found {attack.batch_size}, but an update uses the victim's batches; set `observes: gradient`"
            yield "batch_size", message
        if attack.unmix and not self.mixes:
            yield "unmix", "only mixtures of updates can be unmixed; set `observes: shown`, or remove `unmix`"

    def involves(self, scenario: Scenario, round: int, victim: int) -> list[int]:
        """Return the other clients of the round whose training the view repeats."""
        return []

    def samples(self, attack: AttackSpec) -> int:
        """Return the minimum number of samples that a victim must have."""
        return 1

    def repeats(self, training: Training, samples: int) -> bool:
        """Return whether a client that has `samples` samples uses the same samples in every observed round."""
        return training.batch_size is None or training.batch_size >= samples

    def training(self, training: Training) -> Training:
        """Return the training settings of the observed update, given the training settings of the client's rounds."""
        return training

    def indices(self, observed: ObservedClient) -> np.ndarray:
        """Return the indices of the training samples from which the observed update is computed."""
        return observed.runtime.parts[observed.client]

    def shows(self, observed: ObservedClient, answer: Update) -> VisibleUpdate:
        """Return the part of a client's update `answer` that the attacker observes."""
        from rayfed.aggregation.over_channel import OverChannel

        rule = observed.runtime.rule(observed.visit.arm, observed.visit.sent)
        return VisibleUpdate(answer, sealed=rule.observed(answer) if isinstance(rule, OverChannel) else None)


@component
class WholeUpdate(View):
    """The update that the victim sent in the round.

    Equal up to rounding if its cohort was trained together (`training.vectorise`).
    """

    describe: ClassVar[str] = "the update"


@component
class OneGradient(View):
    """The victim's update for one step on `batch_size` of its samples, under the same defences.

    Its noise is sampled independently of the noise in the round's update.
    """

    describe: ClassVar[str] = "the gradient"
    of_round: ClassVar[bool] = False

    def samples(self, attack: AttackSpec) -> int:
        """Return the attack's batch size, the minimum number of samples that a victim must have."""
        return attack.batch_size

    def repeats(self, training: Training, samples: int) -> bool:
        """Return True, because the updates of all observed rounds use the batch of the attacked round."""
        return True

    def training(self, training: Training) -> Training:
        """Return training settings that give the gradient of one batch."""
        from rayfed.scenario import Training

        return Training(algorithm="fedsgd", batch_size=None)

    def indices(self, observed: ObservedClient) -> np.ndarray:
        """Return the indices of `batch_size` training samples, sampled from the client's samples."""
        from rayfed.core import seeds

        draw = seeds.numpy_generator(observed.runtime.scenario.seed, "victim", observed.attacked, observed.client)
        return draw.choice(observed.runtime.parts[observed.client], observed.attack.batch_size, replace=False)


@component
class ShownToClients(View):
    """The victim's update, or a mixture (`fusion`), as `fedboosting` sends it to the clients of the round."""

    describe: ClassVar[str] = "the shown update or mixture"
    mixes: ClassVar[bool] = True
    involves_others: ClassVar[bool] = True

    def check(self, scenario: Scenario, attack: AttackSpec) -> Iterator[tuple[str, str]]:
        """Yield fields that are incompatible with the view: attacks by the server, `averages` and `earlier`."""
        yield from super().check(scenario, attack)
        if hasattr(registry.find(attack.kind, attack.name), "tamper"):
            message = (
                f"{attack.name} is an attack by the server, which sends another model; set `observes` to update or "
                f"gradient"
            )
            yield "observes", message
        if attack.averages > 1:
            yield "averages", "clients receive one mixture per round; remove `averages`, or set `observes: gradient`"
        if attack.earlier:
            yield "earlier", "mixtures of earlier rounds are not stored; set `observes` to update or gradient"

    def involves(self, scenario: Scenario, round: int, victim: int) -> list[int]:
        """Return all clients of the round, because every client's training is repeated."""
        from rayfed.simulation.client.plan import drawn_clients

        return drawn_clients(scenario, round)

    def shows(self, observed: ObservedClient, answer: Update) -> VisibleUpdate:
        """Return the update that other clients receive, without values if the aggregation rule sends none."""
        visit = observed.visit
        seen = observed.runtime.mixtures(visit.arm, visit.sent, visit.states)
        if seen is None:
            return VisibleUpdate(replace(answer, tensors={}, buffers={}))
        shown = replace(answer, tensors=seen.updates[answer.client], buffers=seen.buffers[answer.client])
        return VisibleUpdate(shown, mixtures=seen)
