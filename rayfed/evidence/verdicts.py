"""Verdicts on the arms of a run: computed once, when the run ends, and stored in the table `verdicts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rayfed.core.reasons import Reason
from rayfed.errors import RunError
from rayfed.evidence.arms import arm_names, arm_spec, has_user_defence, is_recorded, is_undefended
from rayfed.evidence.attack_results import InferenceResult, summarise_inferences
from rayfed.evidence.bounds import MEMBERSHIP, BoundedShare, boundable_metrics
from rayfed.evidence.criteria import Criterion, infer_modality
from rayfed.evidence.findings import cells_without_adaptive_attack, compute_findings, worst_state
from rayfed.evidence.methods import closed_forms, short_searches
from rayfed.evidence.rows import Row, get_sample_key, group_rows
from rayfed.metrics.known import leading, modality_by
from rayfed.metrics.top import TOP_1
from rayfed.store import exits
from rayfed.store.finding import Doubt, Finding, State
from rayfed.store.folder import RunFolder
from rayfed.store.typed import rows_from, table_from

if TYPE_CHECKING:
    from rayfed.samples import Modality

VERDICTS = "verdicts"
"""Name of the table with the verdict on each arm and batch size."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on one arm."""

    arm: str
    state: State
    """Worst state over its batch sizes."""
    findings: tuple[Finding, ...] = ()
    """Findings by batch size; empty if no attack that reconstructs samples was run."""
    closest: Row | None = None
    """Row of the best reconstruction among leaks, or among all if nothing leaks."""
    inferences: tuple[InferenceResult, ...] = ()
    """Results of attacks without reconstructions, such as membership inference."""
    finished: bool = True
    """Whether the run has finished; before, only leaks are known."""

    @property
    def only_inferences(self) -> bool:
        """Return whether only attacks without reconstructions were run."""
        return bool(self.inferences) and not self.findings and self.finished

    @property
    def answered(self) -> bool:
        """Return whether the attacks support a statement on the arm; False for an inconclusive arm."""
        return self.state not in (State.NOT_MEASURED, State.INCONCLUSIVE)

    @property
    def reasons(self) -> frozenset[Reason]:
        """Return the reasons of the findings whose results do not decide."""
        return frozenset(one.reason for one in self.findings if one.reason)


def find_closest(attacks: Sequence[Row], criterion: Criterion) -> Row | None:
    """Return the row of the best reconstruction, among leaks if there are any; None without a finite value."""
    found = [(criterion.leaks(row), value, row) for row in attacks if (value := criterion.nearness(row)) is not None]
    return max(found, key=lambda one: one[:2], default=(False, 0.0, None))[2]


def _modality(scenario: Mapping[str, Any], attacks: Sequence[Row]) -> Modality:
    """Return the modality of a run's samples, from the results or else from the scenario's metrics."""
    names = (scenario.get("metrics") or {}).get("names") or ()
    modality = infer_modality(attacks)
    return modality_by(names) if modality == "pixels" else modality


def choose_criterion(scenario: Mapping[str, Any], attacks: Sequence[Row]) -> Criterion:
    """Return the criterion of a leak for a run's rows, with the scenario's threshold for the leading metric."""
    modality = _modality(scenario, attacks)
    success = (scenario.get("metrics") or {}).get("success") or {}
    return Criterion.from_modality(modality, success.get(leading(modality).name))


def run_findings(
    scenario: Mapping[str, Any], attacks: Sequence[Row], finished: bool = True, criterion: Criterion | None = None
) -> list[Finding]:
    """Return the findings on all arms of a run, by the run's own criterion unless another is given.

    Attacks show that they work on arms without a defence that have the same model.
    """
    criterion = criterion or choose_criterion(scenario, attacks)
    closed, short = closed_forms(scenario), short_searches(scenario)
    found: list[Finding] = []
    not_adaptive: dict[tuple[str, int], Reason] = {}
    arms_by_model: dict[str, list[str]] = {}
    for arm in dict.fromkeys(row["arm"] for row in attacks):
        arms_by_model.setdefault(repr(arm_spec(scenario, arm).get("model")), []).append(arm)
    for arms in arms_by_model.values():
        rows = [row for row in attacks if row["arm"] in arms]
        bare = [arm for arm in arms if is_undefended(scenario, arm)]
        found += compute_findings(rows, criterion, short, bare, finished, closed)
        not_adaptive |= cells_without_adaptive_attack(rows, criterion, bare, closed)
    return [_with_adaptive_attacks(scenario, one, not_adaptive.get((one.arm, one.batch))) for one in found]


def _with_adaptive_attacks(scenario: Mapping[str, Any], finding: Finding, reason: Reason | None) -> Finding:
    """Return a finding as inconclusive if its defence holds only because no adaptive attack is valid (`reason`)."""
    held = finding.state == State.NOT_RECONSTRUCTED and bool(arm_spec(scenario, finding.arm).get("defences"))
    if held and reason:
        reason = Reason.DEFENCES_UNKNOWN if is_recorded(scenario, finding.arm) else reason
        return replace(finding, state=State.INCONCLUSIVE, doubt=Doubt(reason))
    return replace(finding, code_of_user=True) if held and has_user_defence(scenario, finding.arm) else finding


@dataclass(frozen=True)
class RunEvidence:
    """Results of the attacks of a run, with the verdict on each arm."""

    scenario: Mapping[str, Any]
    attacks: Sequence[Row]
    inferences: Sequence[Row]
    finished: bool
    rows: Sequence[Finding]
    """Rows of the table `verdicts`."""

    @property
    def findings(self) -> list[Finding]:
        """Return the findings on arms that attacks tried to reconstruct samples of."""
        return [row for row in self.rows if row.batch is not None]

    @property
    def is_current(self) -> bool:
        """Return whether the rows are on all results of the attacks and on the present state of the run."""
        cells = group_rows(self.attacks, "arm", "batch_size")
        attacked = {cell: len(set(map(get_sample_key, rows))) for cell, rows in cells.items()}
        inferred = {row["arm"] for row in self.inferences}
        return (
            bool(self.rows)
            and attacked == {(row.arm, row.batch): row.samples for row in self.findings}
            and inferred <= {row.arm for row in self.rows}
            and all(row.unfinished != self.finished for row in self.rows if row.state != State.LEAKS)
        )

    @cached_property
    def criterion(self) -> Criterion:
        """Return the criterion of a leak."""
        return choose_criterion(self.scenario, self.attacks)

    @cached_property
    def arms(self) -> list[str]:
        """Return the names of all arms."""
        return arm_names(self.scenario, self.attacks, self.inferences)

    @property
    def gated_arms(self) -> list[str]:
        """Return the arms that a gate checks by default: all arms with a defence, or all arms if none has a defence."""
        return [arm for arm in self.arms if not is_undefended(self.scenario, arm)] or self.arms

    @cached_property
    def modality(self) -> Modality:
        """Return the modality of the samples, derived from the scenario's metrics."""
        return modality_by(self.scenario["metrics"]["names"])

    @cached_property
    def closed_forms(self) -> frozenset[str]:
        """Return the titles of closed-form attacks, for which 'diverged' is a valid result."""
        return closed_forms(self.scenario)

    @property
    def measures(self) -> list[str]:
        """Return the names of the measures of the run that a gate can bound."""
        names = [name for name in boundable_metrics(self.modality) if name in self.scenario["metrics"]["names"]]
        if any(row.get(TOP_1.name) is not None for row in self.attacks):
            names.append(BoundedShare.IDENTITY)
        if any(row["metric"] == "auc" for row in self.inferences):
            names += MEMBERSHIP
        return names

    def compute_findings(self, rows: Sequence[Row], criterion: Criterion) -> list[Finding]:
        """Return the findings on rows of `attacks` by a criterion."""
        return run_findings(self.scenario, rows, self.finished, criterion)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Return the verdict on each arm, in the order of the table."""
        return [self._verdict(arm) for arm in dict.fromkeys(row.arm for row in self.rows)]

    def _verdict(self, arm: str) -> Verdict:
        found = tuple(each for each in self.findings if each.arm == arm)
        attacks = [row for row in self.attacks if row["arm"] == arm]
        of_parts = {each.part.attack for each in found if each.part}
        if not any(each.leaked for each in found):
            attacks = [row for row in attacks if row["attack"] in of_parts] or attacks
        inferences = tuple(each for each in self._inferences if each.arm == arm)
        return Verdict(arm, worst_state(found), found, find_closest(attacks, self.criterion), inferences, self.finished)

    @cached_property
    def _inferences(self) -> list[InferenceResult]:
        return summarise_inferences(self.inferences, arm_names(self.scenario, self.inferences))


def collect_evidence(
    scenario: Mapping[str, Any], attacks: Sequence[Row], inferences: Sequence[Row], finished: bool = True
) -> RunEvidence:
    """Compute the verdicts on all arms from the tables of results; for an unfinished run, verdicts on leaks only."""
    found = run_findings(scenario, attacks, finished)
    rows: list[Finding] = []
    for arm in arm_names(scenario, attacks, inferences):
        rows += [each for each in found if each.arm == arm] or [_unattacked(arm, finished)]
    return RunEvidence(scenario, attacks, inferences, finished, rows)


def _unattacked(arm: str, finished: bool) -> Finding:
    return Finding(arm, state=State.NOT_MEASURED, doubt=Doubt(Reason.NO_RECONSTRUCTION_ATTACK), unfinished=not finished)


def read_evidence(folder: RunFolder) -> RunEvidence:
    """Read the verdicts of a run; compute them if the table is missing or damaged, or is on other results.

    The table is missing for an older run and for a run that has not ended. It is on other results if the driver died
    after it resumed a run.
    """
    scenario, finished = folder.scenario(), exits.is_complete(exits.read_status(folder))
    attacks, inferences = (folder.read_table(name).to_pylist() for name in ("attacks", "inferences"))
    stored = RunEvidence(scenario, attacks, inferences, finished, _stored_rows(folder))
    return stored if stored.is_current else collect_evidence(scenario, attacks, inferences, finished)


def _stored_rows(folder: RunFolder) -> list[Finding]:
    """Return the rows of the table `verdicts`; empty if the table is missing, damaged or of another version."""
    try:
        return rows_from(folder.read_table(VERDICTS), Finding)
    except (RunError, ValueError):
        return []


def write_verdicts(folder: RunFolder) -> None:
    """Write the table `verdicts` of a run that has ended, unless the table has the present verdicts."""
    rows = read_evidence(folder).rows
    if rows != _stored_rows(folder):
        folder.write_part(VERDICTS, 0, table_from(rows, Finding))
