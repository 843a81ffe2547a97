"""Attacks that an audit runs, with their costs and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rayfed import registry
from rayfed.evidence.arms import attack_specs

if TYPE_CHECKING:
    from rayfed.samples import Modality


@dataclass(frozen=True)
class Method:
    """Attack that the audit runs, with the attack's cost and limits."""

    name: str
    evaluations: int = 0
    """Evaluations of the objective per iteration; 0 for a closed form."""
    largest: int | None = None
    """Maximum batch size: on larger batches the attack takes the most time and reconstructs nothing."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0
    """Weight of a search when time is divided among several."""

    def takes(self, modality: Modality, batch: int) -> bool:
        """Return whether the attack runs on batches of `batch` samples of a modality."""
        from rayfed.samples import supported_modalities  # imports PyTorch, which readers of tables do not need

        works = modality in supported_modalities("attacks", registry.find("attacks", self.name))
        return works and (self.largest is None or batch <= self.largest)


METHODS = (
    Method("analytic"),
    Method("spear"),
    Method("peel"),
    Method("april"),
    Method("buffers"),  # reads buffers, which no defence of the update changes
    Method("columns"),
    Method("entries"),
    Method("embedding_rows"),
    Method("dager"),
    Method("inverting_gradients", evaluations=1),
    Method("idlg", evaluations=20, largest=4, parameters={"restarts": 1}, share=0.25),  # succeeds early or not at all
    Method("tag", evaluations=1),
)
"""All attacks of the audit, closed forms first."""

CLOSED_FORMS = frozenset(method.name for method in METHODS if not method.evaluations)
"""Attacks that may find that no sample fits the update. Their status is then 'diverged'."""
FEWEST, USEFUL, MOST = 40, 100, 24_000
"""Evaluations of a search: the minimum with any budget, the minimum if there is time for them on two arms, and the
maximum."""


def closed_forms(scenario: Mapping[str, Any]) -> frozenset[str]:
    """Return the titles of a scenario's closed-form attacks, for which 'diverged' is a valid result."""
    return frozenset(title for title, spec in attack_specs(scenario).items() if spec["name"] in CLOSED_FORMS)


def short_searches(scenario: Mapping[str, Any]) -> list[str]:
    """Return the titles of searches that ran at most `FEWEST` evaluations."""
    evaluations = {method.name: method.evaluations for method in METHODS if method.evaluations}
    short = []
    for title, spec in attack_specs(scenario).items():
        iterations = spec.get("iterations", FEWEST + 1)
        if spec["name"] in evaluations and iterations * evaluations[spec["name"]] <= FEWEST:
            short.append(title)
    return short
