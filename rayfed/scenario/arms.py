"""The arms that a run plays, each with what it does not set itself taken from the scenario."""

from __future__ import annotations

from dataclasses import dataclass

from rayfed.scenario.components import AggregationSpec, DefenceSpec, MaliciousSpec, ModelSpec, ProtectionSpec
from rayfed.scenario.sections import Scenario, ServerSection, Training


@dataclass(frozen=True)
class ResolvedArm:
    """All that is specified of one arm; it has no seed and no key, so that every process of a run may know it."""

    name: str
    model: ModelSpec
    training: Training
    defences: list[DefenceSpec]
    """In the order in which they are applied."""
    aggregation: AggregationSpec
    protection: ProtectionSpec | None
    """How clients hide what they send; None: not at all."""
    malicious: MaliciousSpec | None
    server: ServerSection
    clients_per_round: int
    """Their expected number where they are drawn one by one."""

    @property
    def update_scale(self) -> float:
        """A client's own model is the weights that it was sent, less this times its update."""
        return 1.0 if self.training.algorithm == "fedavg" else self.training.lr

    @property
    def server_lr(self) -> float:
        """The server's step size."""
        return self.server.lr or self.update_scale


def resolve(scenario: Scenario) -> dict[str, ResolvedArm]:
    """The arms by name, in the order of the scenario."""
    s, federation = scenario, scenario.federation
    return {
        name: ResolvedArm(
            name,
            ModelSpec.model_validate(s.model_with(arm.model)) if arm.model else s.model,
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
