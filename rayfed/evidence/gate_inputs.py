"""Results of a run that a gate reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rayfed.evidence.arms import arm_names, is_undefended
from rayfed.evidence.bounds import MEMBERSHIP, BoundedShare, boundable_metrics
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.methods import closed_forms
from rayfed.evidence.rows import Row
from rayfed.evidence.verdicts import RunEvidence, collect_evidence, run_findings
from rayfed.metrics.known import modality_by
from rayfed.metrics.top import TOP_1
from rayfed.store.finding import Finding

if TYPE_CHECKING:
    from rayfed.samples import Modality


@dataclass(frozen=True)
class GateInputs:
    """Results of a run, as a gate reads them from the run's folder."""

    scenario: Mapping[str, Any]
    attacks: Sequence[Row]
    inferences: Sequence[Row]
    finished: bool = True
    stored: RunEvidence | None = None
    """Evidence read from the run's folder; None to compute it from the rows."""

    @cached_property
    def evidence(self) -> RunEvidence:
        """Return the results with the run's own verdicts."""
        return self.stored or collect_evidence(self.scenario, self.attacks, self.inferences, self.finished)

    @cached_property
    def modality(self) -> Modality:
        """Return the modality of the samples, derived from the scenario's metrics."""
        return modality_by(self.scenario["metrics"]["names"])

    @property
    def measured(self) -> list[str]:
        """Return the names of the measures of the run that a gate can bound."""
        names = [name for name in boundable_metrics(self.modality) if name in self.scenario["metrics"]["names"]]
        if any(row.get(TOP_1.name) is not None for row in self.attacks):
            names.append(BoundedShare.IDENTITY)
        if any(row["metric"] == "auc" for row in self.inferences):
            names += MEMBERSHIP
        return names

    @cached_property
    def arms(self) -> list[str]:
        """Return the names of all arms."""
        return arm_names(self.scenario, self.attacks, self.inferences)

    @property
    def default_arms(self) -> list[str]:
        """Return the arms that a gate checks by default: all arms with a defence, or all arms if none has a defence."""
        return [arm for arm in self.arms if not is_undefended(self.scenario, arm)] or self.arms

    @cached_property
    def closed_forms(self) -> frozenset[str]:
        """Return the titles of closed-form attacks, for which 'diverged' is a valid result."""
        return closed_forms(self.scenario)

    @property
    def criterion(self) -> Criterion:
        """Return the run's own criterion of a leak."""
        return self.evidence.criterion

    @property
    def findings(self) -> list[Finding]:
        """Return the findings by the run's own criterion."""
        return self.evidence.findings

    def compute_findings(self, rows: Sequence[Row], criterion: Criterion) -> list[Finding]:
        """Return the findings on rows of `attacks` by a criterion."""
        return run_findings(self.scenario, rows, self.finished, criterion)
