"""Resolved arms: each arm with the scenario's values for the fields that it does not set."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rayfed.scenario.components import AggregationSpec, DefenceSpec, LossSpec, MaliciousSpec, ModelSpec, ProtectionSpec
from rayfed.scenario.sections import Scenario, ServerSection, Training


@dataclass(frozen=True)
class ResolvedArm:
    """Complete specification of one arm: model, training, defences, aggregation, but not the run's seed and keys."""

    name: str
    model: ModelSpec
    loss: LossSpec
    training: Training
    defences: list[DefenceSpec]
    """Defences, in the order in which they are applied."""
    aggregation: AggregationSpec
    protection: ProtectionSpec | None
    """Protection of the updates; None for plain updates."""
    malicious: MaliciousSpec | None
    server: ServerSection
    clients_per_round: int
    """Number of clients per round; the expected number with Poisson sampling."""

    def published(self) -> ResolvedArm:
        """Return a copy of the arm without the malicious clients, which the server does not know."""
        return replace(self, malicious=None)

    def to_attackers(self) -> ResolvedArm:
        """Return the arm as attackers know it: no malicious clients, and only defences that change the architecture."""
        adapting = [defence for defence in self.defences if defence.build().overrides("adapt_model")]
        return replace(self.published(), defences=adapting)

    @property
    def update_scale(self) -> float:
        """Return the factor f for which the trained weights equal the received weights minus f times the update."""
        return 1.0 if self.training.algorithm == "fedavg" else self.training.lr

    @property
    def server_lr(self) -> float:
        """Return the learning rate of the server's optimiser."""
        return self.server.lr or self.update_scale


def resolve(scenario: Scenario) -> dict[str, ResolvedArm]:
    """Return the scenario's arms by name, each with the scenario's values for the fields that the arm does not set."""
    s, federation = scenario, scenario.federation
    return {
        name: ResolvedArm(
            name,
            ModelSpec.model_validate(s.model_with(arm.model)) if arm.model else s.model,
            s.loss,
            Training.model_validate({**s.training.model_dump(), **arm.training}) if arm.training else s.training,
            arm.defences,
            arm.aggregation or federation.aggregation,
            arm.protection or federation.protection,
            arm.malicious or federation.malicious,
            federation.server,
            s.clients_per_round,
        )
        for name, arm in s.played.items()
    }
