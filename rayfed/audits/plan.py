"""Audit of one gradient of a model: the scenario that the audit runs.

Every attack of `METHODS` that takes the data's samples is run against every arm by three attackers: non-adaptive,
adaptive, and adaptive with the labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from rayfed import registry
from rayfed.core.documents import dump_yaml
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.methods import METHODS, Method
from rayfed.metrics.known import leading
from rayfed.report.text.reasons import ATTACKERS

if TYPE_CHECKING:
    from rayfed.samples import Modality

UNDEFENDED = "none"
Defences = dict[str, list[dict[str, Any]]]
DEFENCES: Defences = {
    name: pipeline
    for sigma, ratio, bits in ((1e-2, 0.9, 4), (1e-1, 0.99, 1), (1e-3, 0.5, 8))
    for name, pipeline in (
        (f"gaussian {sigma:g}", [{"name": "gaussian", "sigma": sigma}]),
        (f"prune {ratio:g}", [{"name": "prune", "ratio": ratio}]),
        (f"quantise {bits}-bit", [{"name": "quantise", "bits": bits}]),
    )
}
"""Default defences by arm: one of each kind, then stronger and weaker ones."""


ATTACKER_KNOWLEDGE = {name: knowledge for knowledge, name in ATTACKERS.items()}
"""Knowledge granted to each attacker, by name."""


@dataclass(frozen=True)
class Plan:
    """Settings of an audit: a model on data under some defences."""

    model: Mapping[str, Any]
    """The scenario's section `model`."""
    data: Mapping[str, Any]
    """The scenario's section `data`."""
    batches: Sequence[int]
    samples: int
    """Samples attacked for each batch size, rounded up to batches."""
    seed: int = 0
    loss: Mapping[str, Any] = field(default_factory=dict)
    """The scenario's section `loss`; if empty, the loss of the model's task, or the default."""
    defences: Defences = field(default_factory=lambda: DEFENCES)
    threshold: float | None = None
    """Minimum of the leading metric at which a reconstruction may be a leak. None: the metric's default."""
    methods: Sequence[Method] = field(default_factory=lambda: METHODS)
    """Attacks to run, if they take the samples."""

    @property
    def modality(self) -> Modality:
        """Return the modality of the samples, such as images. Raises `UserError` for an unknown data set."""
        from rayfed.samples import dataset_modality

        return dataset_modality(registry.find("datasets", self.data["name"]))

    @property
    def searches(self) -> list[tuple[Method, int]]:
        """Return the pairs of method and batch size whose number of iterations has to be chosen."""
        every = product(self.methods, self.batches)
        return [(m, batch) for m, batch in every if m.evaluations and m.takes(self.modality, batch)]

    def scenario_text(self, iterations: Mapping[str, int]) -> str:
        """Return the audit as a YAML scenario: one round without training, and its attacks, closed forms first.

        `iterations` maps the title of a search (`make_title`) to its iterations.
        """
        criterion = Criterion.from_modality(self.modality, self.threshold)
        attacks = [
            self._attack(method, batch, twin, iterations)
            for method, batch, twin in product(self.methods, self.batches, ATTACKER_KNOWLEDGE)
            if method.takes(self.modality, batch)
        ]
        document = {
            "name": "audit",
            "seed": self.seed,
            "data": dict(self.data),
            "model": dict(self.model),
            **({"loss": dict(self.loss)} if self.loss else {}),
            "federation": {"rounds": 1, "clients": self.samples},
            "arms": {UNDEFENDED: [], **self.defences},
            "attacks": attacks,
            "metrics": {"success": {leading(self.modality).name: criterion.threshold}},
        }
        return dump_yaml(document)

    def _attack(self, method: Method, batch: int, twin: str, iterations: Mapping[str, int]) -> dict[str, Any]:
        searched = {"iterations": iterations[make_title(method, batch)]} if method.evaluations else {}
        return {
            "name": method.name,
            **method.parameters,
            **searched,
            "observes": "gradient",
            "batch_size": batch,
            "victims": -(-self.samples // batch),
            "knowledge": list(ATTACKER_KNOWLEDGE[twin]),
            "label": f"{make_title(method, batch)}, {twin}",
            "family": method.name,
        }


def name_pipeline(pipeline: Sequence[Mapping[str, Any]]) -> str:
    """Return the arm name for a pipeline of defences, with the defences' parameters."""
    parts = []
    for defence in pipeline:
        settings = ", ".join(f"{key} {value}" for key, value in defence.items() if key != "name")
        parts.append(f"{defence['name']} ({settings})" if settings else str(defence["name"]))
    return " + ".join(parts)


def make_title(method: Method, batch: int) -> str:
    """Return the title of a method at a batch size, shared by all attackers that use the method."""
    return f"{method.name} batch {batch}"
