"""Tables of a run and their summaries, read and computed once for its page or its statement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from rayfed.evidence.arms import arm_names, is_secure
from rayfed.evidence.attack_results import (
    InferenceResult,
    Leakage,
    leading_metric,
    summarise_inferences,
    summarise_leakage,
)
from rayfed.evidence.label_mix import LabelMix, compute_label_mix
from rayfed.evidence.methods import closed_forms
from rayfed.evidence.rows import Row
from rayfed.evidence.training import ArmSummary, summarise_arms
from rayfed.evidence.verdicts import RunEvidence, read_evidence
from rayfed.metrics.known import METRICS
from rayfed.report.samples import Samples, make_sample_filter
from rayfed.report.text.weights import attacked_weights
from rayfed.store import exits
from rayfed.store.folder import RunFolder


@dataclass(frozen=True)
class RunData:
    """Tables of one run and their summaries."""

    folder: RunFolder

    @cached_property
    def scenario(self) -> dict[str, Any]:
        """Scenario with all defaults."""
        return self.folder.scenario()

    @cached_property
    def status(self) -> Mapping[str, Any]:
        """Status of the run."""
        return exits.read_status(self.folder)

    @property
    def state(self) -> str:
        """Return the state of the run."""
        return str(self.status.get("state", "unknown"))

    @property
    def is_audit(self) -> bool:
        """Return whether updates were attacked without a training."""
        return self.status.get("kind") == "attack"

    @property
    def secure(self) -> bool:
        """Return whether noise and keys are independent of the seed."""
        return is_secure(self.scenario)

    def rows(self, table: str) -> list[Row]:
        """Return the rows of a table."""
        rows: list[Row] = self.folder.read_table(table).to_pylist()
        return rows

    @cached_property
    def rounds(self) -> list[Row]:
        """Rows of the table `rounds`."""
        return self.rows("rounds")

    @cached_property
    def attacks(self) -> list[Row]:
        """Rows of the table `attacks`."""
        return self.rows("attacks")

    @cached_property
    def inferences(self) -> list[Row]:
        """Rows of the table `inferences`."""
        return self.rows("inferences")

    @cached_property
    def privacy(self) -> list[Row]:
        """Rows of the table `privacy`."""
        return self.rows("privacy")

    @cached_property
    def proved(self) -> list[Row]:
        """Rows of the table `proved`."""
        return self.rows("proved")

    @cached_property
    def names(self) -> list[str]:
        """Names of all arms, in the order of their colours."""
        return arm_names(self.scenario, self.rounds, self.attacks, self.inferences)

    @cached_property
    def arms(self) -> list[ArmSummary]:
        """Summary of the training of each arm."""
        clients = self.folder.read_table("clients").select(["arm", "sent_bytes"]).to_pylist()
        return summarise_arms(self.names, self.scenario, self.rounds, clients)

    @property
    def trained(self) -> bool:
        """Return whether any arm has a complete round."""
        return any(arm.rounds for arm in self.arms)

    @property
    def tested(self) -> bool:
        """Return whether the accuracy of any arm is known."""
        return any(arm.accuracy is not None for arm in self.arms)

    @cached_property
    def thresholds(self) -> dict[str, float]:
        """Thresholds of the probability of reconstruction success, by metric."""
        requested = (self.scenario.get("metrics") or {}).get("success") or {}
        return {metric: threshold for metric, threshold in requested.items() if metric in METRICS}

    @cached_property
    def leaks(self) -> list[Leakage]:
        """Results of attacks that reconstruct samples."""
        return summarise_leakage(self.attacks, self.names, self.thresholds)

    @cached_property
    def scored(self) -> list[Leakage]:
        """Results with a score, the one with the best reconstruction first."""
        metric = leading_metric(self.attacks)

        def order(leak: Leakage) -> float:
            value = leak.scores[metric]
            return inf if value is None else -value.high

        return sorted((leak for leak in self.leaks if any(leak.scores.values())), key=order)

    @cached_property
    def closed(self) -> frozenset[str]:
        """Titles of closed-form attacks."""
        return closed_forms(self.scenario)

    @cached_property
    def claims(self) -> list[InferenceResult]:
        """Results of attacks without reconstructions."""
        return summarise_inferences(self.inferences, self.names)

    @cached_property
    def evidence(self) -> RunEvidence:
        """Verdicts of the run."""
        return read_evidence(self.folder)

    @cached_property
    def samples(self) -> Samples:
        """Filter of the samples that a page shows."""
        return make_sample_filter([self.scenario])

    @cached_property
    def mix(self) -> LabelMix | None:
        """Distribution of samples over the clients; None if it is not recorded."""
        return compute_label_mix(self.folder.read_table("partition"))

    @property
    def weights(self) -> str:
        """Return a description of the attacked weights."""
        return attacked_weights(self.scenario, self.status, self.attacks)
