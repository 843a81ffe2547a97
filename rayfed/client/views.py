"""Views: which work of a client an attack observes (`observes`); `TABLE` lists those that a scenario can name.

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
    from rayfed.update import Mixtures, Sealed, Update

TABLE: dict[str, str] = {
    "update": "rayfed.client.views:WholeUpdate",
    "gradient": "rayfed.client.views:OneGradient",
    "shown": "rayfed.client.views:ShownToClients",
}


@dataclass(frozen=True)
class Sight:
    """The part of a client's answer that a view shows."""

    update: Update
    """Update as the attacker takes it, or the one that is in `sealed`."""
    sealed: Sealed | None = None
    """The answer as its channel hides it: the attacker sees this in its place."""
    mixtures: Mixtures | None = None
    """All that clients were shown in the round."""

    @property
    def seen(self) -> Update:
        """The update as the attacker sees it, without values if its channel hides them."""
        return self.update if self.sealed is None else replace(self.update, tensors={}, buffers={})


class View:
    """Base of every view: the client's work of the round, as the server receives it."""

    describe: ClassVar[str]
    """Name of what is observed, in words that are followed by `of N samples`."""
    of_round: ClassVar[bool] = True
    """Whether the answer is the round's own, with the same noise; then the client has to take part."""
    mixes: ClassVar[bool] = False
    """Whether what is seen may be a mixture of several clients' updates, so that there is something to `unmix`."""
    involves_others: ClassVar[bool] = False
    """Whether the view takes the work of other clients (`involves`)."""

    def check(self, scenario: Scenario, attack: AttackSpec) -> Iterator[tuple[str, str]]:
        """Yield fields of the attack that are incompatible with the view, with the reason."""
        from rayfed.scenario import resolve

        if self.of_round and any(arm.training.optimiser != "sgd" for arm in resolve(scenario).values()):
            message = "an update after steps of Adam is no sum of gradients: set `observes: gradient`, or train by sgd"
            yield "observes", message
        if self.of_round and attack.batch_size != 1:
            message = f"found {attack.batch_size}, but an update has the victim's own batches: set `observes: gradient`"
            yield "batch_size", message
        if attack.unmix and not self.mixes:
            yield "unmix", "mixtures are what clients are shown of one another's models: set `observes: shown`"

    def involves(self, scenario: Scenario, round: int, victim: int) -> list[int]:
        """Return other clients whose work of the round the view repeats."""
        return []

    def samples(self, attack: AttackSpec) -> int:
        """Return the fewest samples that a victim has to hold."""
        return 1

    def repeats(self, training: Training, samples: int) -> bool:
        """Return whether a client with this many samples uses the same ones in every observed round."""
        return training.batch_size is None or training.batch_size >= samples

    def training(self, training: Training) -> Training:
        """Return the local training behind the observed answer, given that of the client's rounds."""
        return training

    def indices(self, observed: ObservedClient) -> np.ndarray:
        """Return the indices of the training samples behind the answer."""
        return observed.runtime.parts[observed.client]

    def shows(self, observed: ObservedClient, answer: Update) -> Sight:
        """Return the shown part of the answer."""
        from rayfed.aggregation.over_channel import OverChannel

        rule = observed.runtime.rule(observed.visit.arm, observed.visit.sent)
        return Sight(answer, sealed=rule.observed(answer) if isinstance(rule, OverChannel) else None)


@component
class WholeUpdate(View):
    """The update that the victim really sent in the round.

    Up to rounding, where its cohort was trained together (`training.vectorise`).
    """

    describe: ClassVar[str] = "the update"


@component
class OneGradient(View):
    """The victim's answer for one step on `batch_size` of its samples, through the same defences.

    An answer of its own: the noise of the round's update hides that alone.
    """

    describe: ClassVar[str] = "the gradient"
    of_round: ClassVar[bool] = False

    def samples(self, attack: AttackSpec) -> int:
        """Return the batch size."""
        return attack.batch_size

    def repeats(self, training: Training, samples: int) -> bool:
        """Return True: all answers are on the batch of the attacked round."""
        return True

    def training(self, training: Training) -> Training:
        """Return the training that takes one gradient of all samples behind the answer."""
        from rayfed.scenario import Training

        return Training(algorithm="fedsgd", batch_size=None)

    def indices(self, observed: ObservedClient) -> np.ndarray:
        """Draw `batch_size` of the client's own samples."""
        from rayfed import seeds

        draw = seeds.numpy_generator(observed.runtime.scenario.seed, "victim", observed.attacked, observed.client)
        return draw.choice(observed.runtime.parts[observed.client], observed.attack.batch_size, replace=False)


@component
class ShownToClients(View):
    """The victim's model as `fedboosting` shows it to the round's clients: its update, or a mixture (`fusion`)."""

    describe: ClassVar[str] = "what clients are shown of the update"
    mixes: ClassVar[bool] = True
    involves_others: ClassVar[bool] = True

    def check(self, scenario: Scenario, attack: AttackSpec) -> Iterator[tuple[str, str]]:
        """Yield what is incompatible with the view: servers' attacks, repeated answers and earlier rounds."""
        yield from super().check(scenario, attack)
        if hasattr(registry.find(attack.kind, attack.name), "tamper"):
            message = (
                f"{attack.name} is the server's attack, who sends another model: observe what it is sent, not shown"
            )
            yield "observes", message
        if attack.averages > 1:
            yield "averages", "clients are shown one mixture in a round: take `averages` out, or observe the gradient"
        if attack.earlier:
            yield "earlier", "what clients were shown in earlier rounds is not kept: observe the update or the gradient"

    def involves(self, scenario: Scenario, round: int, victim: int) -> list[int]:
        """Return all clients of the round."""
        from rayfed.client.plan import drawn_clients

        return drawn_clients(scenario, round)

    def shows(self, observed: ObservedClient, answer: Update) -> Sight:
        """Return the update as other clients see it; without values if they are shown nothing."""
        visit = observed.visit
        seen = observed.runtime.mixtures(visit.arm, visit.sent, visit.states)
        if seen is None:
            return Sight(replace(answer, tensors={}, buffers={}))
        shown = replace(answer, tensors=seen.updates[answer.client], buffers=seen.buffers[answer.client])
        return Sight(shown, mixtures=seen)
