"""Resolved arms: each arm with the scenario's values for all that it does not set."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rayfed.scenario.components import AggregationSpec, DefenceSpec, LossSpec, MaliciousSpec, ModelSpec, ProtectionSpec
from rayfed.scenario.sections import Scenario, ServerSection, Training


@dataclass(frozen=True)
class ResolvedArm:
    """Specification of one arm; it has no seed and no key."""

    name: str
    model: ModelSpec
    loss: LossSpec
    training: Training
    defences: list[DefenceSpec]
    """The defence pipeline, in the order in which the defences are applied."""
    aggregation: AggregationSpec
    protection: ProtectionSpec | None
    """Protection under which clients send; None: they hide nothing."""
    malicious: MaliciousSpec | None
    server: ServerSection
    clients_per_round: int
    """Number of clients of a round, expected where they are drawn one by one."""

    def published(self) -> ResolvedArm:
        """Return the part of the arm that the server knows, without its malicious clients."""
        return replace(self, malicious=None)

    def to_attackers(self) -> ResolvedArm:
        """Return the part of the arm that attackers know: of its defences, only architectural ones."""
        adapting = [defence for defence in self.defences if defence.build().overrides("adapt_model")]
        return replace(self.published(), defences=adapting)

    @property
    def update_scale(self) -> float:
        """Factor f such that a client's own model is the sent weights minus f times its update."""
        return 1.0 if self.training.algorithm == "fedavg" else self.training.lr

    @property
    def server_lr(self) -> float:
        """Step size of the server."""
        return self.server.lr or self.update_scale


def resolve(scenario: Scenario) -> dict[str, ResolvedArm]:
    """Return the resolved arms by name, in the order of the scenario."""
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
