"""What an attack observes of a client (`observes`): one view each; `TABLE` is what a scenario can name.

As with grants, PyTorch is imported in functions only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from rayfed import registry
from rayfed.registry import component

if TYPE_CHECKING:
    import numpy as np

    from rayfed.client.visit import ObservedClient
    from rayfed.scenario import AttackSpec, Scenario, Training
    from rayfed.update import Encrypted, Masked, Mixtures, Update

TABLE: dict[str, str] = {
    "update": "rayfed.client.views:WholeUpdate",
    "gradient": "rayfed.client.views:OneGradient",
    "shown": "rayfed.client.views:ShownToClients",
}


@dataclass(frozen=True)
class Sight:
    """What a view lets through of a client's answer."""

    update: Update
    """What the attacker takes for the update, or what is in `sealed`."""
    sealed: Encrypted | Masked | None = None
    """The answer as it was encrypted or masked: the attacker sees this in its place."""
    mixtures: Mixtures | None = None
    """All that clients were shown in the round."""


class View:
    """Base of every view: the client's work of the round, as the server gets it."""

    describe: ClassVar[str]
    """What is observed, in words that are followed by `of N samples`."""
    of_round: ClassVar[bool] = True
    """Whether it is what the client does in the round anyway, with the same noise; then the client has to take part."""
    mixes: ClassVar[bool] = False
    """Whether what is seen may be a mixture of several clients' updates, so that there is something to `unmix`."""
    involves_others: ClassVar[bool] = False
    """Whether it takes the work of other clients (`involves`)."""

    def check(self, scenario: Scenario, attack: AttackSpec) -> Iterator[tuple[str, str]]:
        """Fields of the attack that do not go with it, and why, in words."""
        from rayfed.scenario import resolve

        if self.of_round and any(arm.training.optimiser == "adam" for arm in resolve(scenario).values()):
            message = "an update after steps of Adam is no sum of gradients: set `observes: gradient`, or train by sgd"
            yield "observes", message
        if self.of_round and attack.batch_size != 1:
            message = f"found {attack.batch_size}, but an update has the victim's own batches: set `observes: gradient`"
            yield "batch_size", message
        if attack.unmix and not self.mixes:
            yield "unmix", "mixtures are what clients are shown of one another's models: set `observes: shown`"

    def involves(self, scenario: Scenario, round: int, victim: int) -> list[int]:
        """The clients whose work of the round it repeats beside the victim's."""
        return []

    def samples(self, attack: AttackSpec) -> int:
        """How many samples a victim has to hold, at least."""
        return 1

    def training(self, training: Training) -> Training:
        """How the client trains for its answer, where it trains like this in a round."""
        return training

    def indices(self, observed: ObservedClient) -> np.ndarray:
        """The training samples that the answer is about."""
        return observed.runtime.parts[observed.client]

    def shows(self, observed: ObservedClient, answer: Update) -> Sight:
        """What is seen of the answer."""
        from rayfed.aggregation.over_channel import OverChannel

        rule = observed.runtime.rule(observed.visit.arm, observed.visit.sent)
        return Sight(answer, sealed=rule.observed(answer) if isinstance(rule, OverChannel) else None)


@component
class WholeUpdate(View):
    """What the victim really sent in that round.

    Up to rounding, where its cohort was one vmap call.
    """

    describe: ClassVar[str] = "the update"


@component
class OneGradient(View):
    """What the victim would send for one step on `batch_size` of its samples, through the same defences.

    An answer of its own: the noise of the round's update hides that alone.
    """

    describe: ClassVar[str] = "the gradient"
    of_round: ClassVar[bool] = False

    def samples(self, attack: AttackSpec) -> int:
        """The batch."""
        return attack.batch_size

    def training(self, training: Training) -> Training:
        """One gradient of all samples that it is about."""
        from rayfed.scenario import Training

        return Training(algorithm="fedsgd", batch_size=None)

    def indices(self, observed: ObservedClient) -> np.ndarray:
        """Some of the client's own."""
        from rayfed import seeds

        draw = seeds.numpy_generator(observed.runtime.scenario.seed, "victim", observed.round, observed.client)
        return draw.choice(observed.runtime.parts[observed.client], observed.attack.batch_size, replace=False)


@component
class ShownToClients(View):
    """What `fedboosting` shows the clients of the round of the victim's model: its update, or a mixture (`fusion`)."""

    describe: ClassVar[str] = "what clients are shown of the update"
    mixes: ClassVar[bool] = True
    involves_others: ClassVar[bool] = True

    def check(self, scenario: Scenario, attack: AttackSpec) -> Iterator[tuple[str, str]]:
        """Neither servers' attacks nor repeated answers."""
        yield from super().check(scenario, attack)
        if hasattr(registry.find(attack.kind, attack.name), "tamper"):
            message = (
                f"{attack.name} is the server's attack, who sends another model: observe what it is sent, not shown"
            )
            yield "observes", message
        if attack.averages > 1:
            yield "averages", "clients are shown one mixture in a round: take `averages` out, or observe the gradient"

    def involves(self, scenario: Scenario, round: int, victim: int) -> list[int]:
        """All that take part."""
        from rayfed.client.plan import drawn_clients

        return drawn_clients(scenario, round)

    def shows(self, observed: ObservedClient, answer: Update) -> Sight:
        """What stands for the update; without any values where clients are shown nothing."""
        visit = observed.visit
        seen = observed.runtime.mixtures(visit.arm, visit.sent, visit.states)
        if seen is None:
            return Sight(replace(answer, tensors={}, buffers={}))
        shown = replace(answer, tensors=seen.updates[answer.client], buffers=seen.buffers[answer.client])
        return Sight(shown, mixtures=seen)
