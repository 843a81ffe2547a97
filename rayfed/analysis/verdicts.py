"""Verdicts on the arms of a run, computed from the scenario and the tables of results."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rayfed.evidence.arms import arm_names, arm_spec, has_user_defence, is_recorded, is_undefended
from rayfed.evidence.attack_results import InferenceResult, summarise_inferences
from rayfed.evidence.criteria import Criterion, modality_of
from rayfed.evidence.findings import cells_without_adaptive_attack, findings, worst_state
from rayfed.evidence.methods import closed_forms, short_searches
from rayfed.evidence.rows import Row
from rayfed.metrics.known import NOUNS, leading, modality_by
from rayfed.reasons import NEAR, Reason
from rayfed.report.text.findings import labels_beyond_text
from rayfed.report.text.membership import unknown_rates_text
from rayfed.report.text.reasons import REASONS
from rayfed.store import exits
from rayfed.store.finding import Doubt, Finding, State
from rayfed.store.folder import SCENARIO, RunFolder
from rayfed.store.schemas import UNPLAYED
from rayfed.store.typed import rows_from, table_from

if TYPE_CHECKING:
    from rayfed.samples import Modality

VERDICTS = "verdicts"
"""Name of the table with the verdict on each arm and batch size."""
MOST = 10
"""Maximum number of arms that a line names."""


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
    claims: tuple[InferenceResult, ...] = ()
    """Results of attacks without reconstructions, such as membership inference."""
    finished: bool = True
    """Whether the run has finished; before, only leaks are known."""

    @property
    def inferred(self) -> bool:
        """Return whether only attacks without reconstructions were run."""
        return bool(self.claims) and not self.findings and self.finished

    @property
    def figure(self) -> str:
        """Return the maximum of the results without reconstructions, such as `AUC 0.648`; empty without results."""
        return _most(self.claims)

    @property
    def badge(self) -> str:
        """Return the verdict as one word or value."""
        return self.figure if self.inferred and self.figure else self.state

    @property
    def answered(self) -> bool:
        """Return whether the attacks support a statement on the arm; False for an inconclusive arm."""
        return self.state not in (State.NOT_MEASURED, State.INCONCLUSIVE)

    @property
    def labels(self) -> str:
        """Return the labels that attackers recover beyond the baseline, with figures; empty if there are none."""
        return labels_beyond_text(self.findings)

    @property
    def labels_by_chance(self) -> bool:
        """Return whether all labels recovered beyond the baseline may be due to chance."""
        beyond = [one.labels for one in self.findings if one.labels and one.labels.beyond]
        return bool(beyond) and all(one.by_chance for one in beyond) and not self.targets_beyond

    @property
    def targets_beyond(self) -> bool:
        """Return whether targets were recovered with a smaller error than by guessing the median."""
        return any(one.targets_beyond for one in self.findings)

    @property
    def reasons(self) -> frozenset[Reason]:
        """Return the reasons of the findings whose results do not decide."""
        return frozenset(one.reason for one in self.findings if one.reason)

    @property
    def unknown_rates(self) -> list[str]:
        """Return texts on the rates of membership attacks that too few non-members leave unknown."""
        return list(dict.fromkeys(said for claim in self.claims if claim.roc for said in unknown_rates_text(claim.roc)))


def closest(attacks: Sequence[Row], criterion: Criterion) -> Row | None:
    """Return the row of the best reconstruction, among leaks if there are any; None without a finite value."""
    found = [(criterion.leaks(row), value, row) for row in attacks if (value := criterion.nearness(row)) is not None]
    return max(found, key=lambda one: one[:2], default=(False, 0.0, None))[2]


def _form(scenario: Mapping[str, Any], attacks: Sequence[Row]) -> Modality:
    """Return the modality of a run's samples, from the results or else from the scenario's metrics."""
    names = (scenario.get("metrics") or {}).get("names") or ()
    found = modality_of(attacks)
    return modality_by(names) if found == "pixels" else found


def criterion_of(scenario: Mapping[str, Any], attacks: Sequence[Row]) -> Criterion:
    """Return the criterion of a leak for a run's rows, with the scenario's threshold for the leading metric."""
    form = _form(scenario, attacks)
    success = (scenario.get("metrics") or {}).get("success") or {}
    return Criterion.of(form, success.get(leading(form).name))


def run_findings(
    scenario: Mapping[str, Any], attacks: Sequence[Row], finished: bool = True, criterion: Criterion | None = None
) -> list[Finding]:
    """Return the findings on all arms of a run, by the run's own criterion unless another is given.

    Attacks show that they work on arms without a defence that have the same model.
    """
    criterion = criterion or criterion_of(scenario, attacks)
    closed, short = closed_forms(scenario), short_searches(scenario)
    found: list[Finding] = []
    not_adaptive: dict[tuple[str, int], Reason] = {}
    models = {arm: repr(arm_spec(scenario, arm).get("model")) for arm in dict.fromkeys(row["arm"] for row in attacks)}
    for model in dict.fromkeys(models.values()):
        alike = [arm for arm, own in models.items() if own == model]
        rows, bare = [row for row in attacks if row["arm"] in alike], [a for a in alike if is_undefended(scenario, a)]
        found += findings(rows, criterion, short, bare, finished, closed)
        not_adaptive |= cells_without_adaptive_attack(rows, criterion, bare, closed)
    return [_with_adaptive_attacks(scenario, one, not_adaptive.get((one.arm, one.batch))) for one in found]


def _with_adaptive_attacks(scenario: Mapping[str, Any], finding: Finding, reason: Reason | None) -> Finding:
    """Return a finding as inconclusive if its defence holds only because no adaptive attack is valid (`reason`)."""
    held = finding.state == State.NOT_RECONSTRUCTED and bool(arm_spec(scenario, finding.arm).get("defences"))
    if held and reason:
        reason = Reason.DEFENCES_UNKNOWN if is_recorded(scenario, finding.arm) else reason
        return replace(finding, state=State.INCONCLUSIVE, doubt=Doubt(reason))
    return replace(finding, code_of_user=True) if held and has_user_defence(scenario, finding.arm) else finding


NOTHING_REBUILT = REASONS[Reason.NO_RECONSTRUCTION_ATTACK]
UNFINISHED = "the run is not finished, and no attack that reconstructs samples is done"
"""Why an arm without rows of attacks is not measured, in a finished and in an unfinished run."""


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

    @cached_property
    def criterion(self) -> Criterion:
        """Return the criterion of a leak."""
        return criterion_of(self.scenario, self.attacks)

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
        claims = tuple(claim for claim in self._claims if claim.arm == arm)
        return Verdict(arm, worst_state(found), found, closest(attacks, self.criterion), claims, self.finished)

    @cached_property
    def _claims(self) -> list[InferenceResult]:
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
    """Read the verdicts of a run; compute them for an older run and for a run that has not ended."""
    scenario, finished = folder.scenario(), exits.over(exits.status(folder))
    attacks, inferences = (folder.read_table(name).to_pylist() for name in ("attacks", "inferences"))
    stored = folder.read_table(VERDICTS)
    if len(stored):
        return RunEvidence(scenario, attacks, inferences, finished, rows_from(stored, Finding))
    return collect_evidence(scenario, attacks, inferences, finished)


def write_verdicts(folder: RunFolder) -> None:
    """Compute the verdicts of a run that has ended and write the table `verdicts`."""
    folder.remove_table(VERDICTS)
    rows = read_evidence(folder).rows
    folder.write_part(VERDICTS, 0, table_from(rows, Finding))


def headline(scenario: Mapping[str, Any], told: Sequence[Verdict]) -> list[str]:
    """Return a summary of the verdicts: the arms in each state with their number, and arms that leak labels only."""
    lines = []
    for states, one, many in _ANSWERS:
        arms = [
            f"{verdict.arm} (no defence)" if is_undefended(scenario, verdict.arm) else verdict.arm
            for verdict in told
            if verdict.state in states and not verdict.inferred
        ]
        if arms:
            of = f"{len(arms)} of {len(told)} arms {one if len(arms) == 1 else many}"
            more = f" and {len(arms) - MOST} more" if len(arms) > MOST else ""
            lines.append(f"{of}: {', '.join(arms[:MOST])}{more}.")
    if alone := [verdict.arm for verdict in told if verdict.inferred]:
        lines.append(f"{len(alone)} of {len(told)} arms: {NOTHING_REBUILT}; see the inferences of each arm.")
    return [*lines, *labels_alone(told)]


def labels_alone(told: Sequence[Verdict]) -> list[str]:
    """Return a sentence on the arms that leak labels but no samples; empty if there are none."""
    alike: dict[str, list[str]] = {}
    for verdict in told:
        if verdict.labels and verdict.state != State.LEAKS:
            alike.setdefault(verdict.labels, []).append(verdict.arm)
    if not alike:
        return []
    read = [f"{', '.join(arms)}, {'each ' if len(arms) > 1 else ''}{found}" for found, arms in alike.items()]
    shown = "; ".join(read[:MOST])
    more = f"; and {sum(map(len, list(alike.values())[MOST:]))} more" if len(read) > MOST else ""
    return [f"Labels were recovered beyond the baseline, but no samples: {shown}{more}."]


_ANSWERS: tuple[tuple[tuple[State, ...], str, str], ...] = (
    ((State.LEAKS,), "leaks", "leak"),
    ((State.NOT_MEASURED,), "was not measured", "were not measured"),
    (
        (State.INCONCLUSIVE,),
        "is inconclusive",
        "are inconclusive",
    ),
    (
        (State.NOT_RECONSTRUCTED,),
        "was not reconstructed by these attacks",
        "were not reconstructed by these attacks",
    ),
    ((State.NOTHING_TO_ATTACK,), "sends nothing to attack", "send nothing to attack"),
)


_ADVICE = {
    Reason.NO_ADAPTIVE_ATTACK: "run an adaptive attack on {arms}: add `knowledge: [defence, code]` to an attack.",
    Reason.NO_ADAPTIVE_ATTACK_WORKS: (
        "add `knowledge: [defence, code]` to an attack that succeeds without a defence, to attack {arms}, or give the "
        "adaptive attacks more iterations."
    ),
    Reason.DEFENCES_UNKNOWN: (
        "measure the federation's defence itself with adaptive attackers (rayfed audit --defence)."
    ),
    Reason.CODE_PARTLY_USED: (
        "write an attack that uses the code of the defence of {arms}, or change the defence. More time does not help."
    ),
    Reason.BUFFERS_NOT_SOLVED: (
        "write an attack on the buffers that clients of {arms} return, or return none. More time does not help."
    ),
    Reason.CODE_NOT_RUN: "read why the defences of {arms} could not be run by an attacker. More time does not help.",
}
"""Advice by reason of an inconclusive finding. The first reason that applies counts."""


def next_step(
    scenario: Mapping[str, Any],
    attacks: Sequence[Row],
    told: Sequence[Verdict],
    enough: str | None = None,
    fewer: str | None = None,
    run: str | None = None,
) -> str:
    """Return the user's next step, with a command if possible; empty if every arm has a result.

    `enough` are the options with which an audit runs all attacks. `fewer` is a sentence if an audit attacked fewer
    samples than requested. `run` is the folder of a run whose scenario can be launched again.
    """
    if told and all(verdict.inferred for verdict in told) and rates(told):
        return f"Next: check the figures against a bound:\n  rayfed gate {run or 'RUN'} --fail-above membership.auc=0.6"
    if not attacks:
        return ""
    states = {verdict.state for verdict in told}
    if states == {State.LEAKS}:  # more time does not change this
        return "Next: every arm leaks. Try a stronger or another defence (rayfed list defences)."
    if step := _step_of_time(attacks, told, enough, fewer):
        return step
    inconclusive = [verdict for verdict in told if verdict.state == State.INCONCLUSIVE]
    if step := _step_of_reasons(scenario, inconclusive, State.LEAKS in states):
        return step
    bare = any(is_undefended(scenario, v.arm) and v.state == State.NOT_RECONSTRUCTED for v in told)
    if inconclusive or (bare and State.LEAKS not in states):
        first = "" if State.LEAKS in states else "an attack that fails without a defence is no evidence for a defence: "
        if run is not None and not _searches(scenario):
            return f"Next: {first}{_ADD_SEARCH}"
        return f"Next: {first}give the searches more iterations{_command(scenario, run)}"
    if State.NOT_MEASURED in states:
        return "Next: see above why attacks returned no result."
    held = [verdict.arm for verdict in told if verdict.state == State.NOT_RECONSTRUCTED]
    if not held:
        return ""
    if run is not None and not _searches(scenario):
        return f"Next: to attack {', '.join(held[:MOST])} further, {_ADD_SEARCH}"
    return f"Next: attack {', '.join(held[:MOST])} for longer{_command(scenario, run)}"


def _step_of_time(attacks: Sequence[Row], told: Sequence[Verdict], enough: str | None, fewer: str | None) -> str:
    """Return the next step if attacks or samples were left out for lack of time; empty if none were."""
    unplayed = any(row["status"] == UNPLAYED for row in attacks)
    if enough and fewer and not unplayed:
        return f"Next: {fewer}, for lack of time. To attack all of them, give {enough}."
    if enough and (unplayed or {verdict.arm for verdict in told} > {row["arm"] for row in attacks}):
        return f"Next: attacks were left out for lack of time. To run them, give {enough}."
    return "Next: attacks were left out for lack of time. Give more minutes, or fewer defences." if unplayed else ""


def _step_of_reasons(scenario: Mapping[str, Any], inconclusive: Sequence[Verdict], leaks: bool) -> str:
    """Return the advice on the first reason of `_ADVICE` that an inconclusive arm has; empty if there is none."""

    def arms_with(reasons: Collection[Reason]) -> list[str]:
        return [verdict.arm for verdict in inconclusive if verdict.reasons & set(reasons)]

    for reason, advice in _ADVICE.items():
        if arms := arms_with({reason}):
            return f"Next: {advice.format(arms=', '.join(arms))}"
    unfinished = any(is_undefended(scenario, arm) for arm in arms_with({Reason.NOT_CONVERGED}))
    # a search that does not end without a defence comes first
    if (arms := arms_with({Reason.ADAPTIVE_NOT_COMPARED})) and not unfinished:
        return (
            f"Next: these attacks cannot be checked against the update of {', '.join(arms)}, and more time does not "
            "help. Use a defence with a privacy account to bound every attack."
        )
    if arms := arms_with(NEAR if leaks else {Reason.TOKENS_IN_ANOTHER_ORDER}):
        return f"Next: compare the reconstructions of {', '.join(arms)} with the originals (output.images: all)."
    return ""


_ADD_SEARCH = "add an attack that searches, such as inverting_gradients (rayfed list attacks)."


def _searches(scenario: Mapping[str, Any]) -> bool:
    """Return whether any attack of a scenario is a search, which more iterations may improve."""
    attacks = [one for one in scenario.get("attacks") or [] if isinstance(one, Mapping)]
    return any(one.get("iterations") for one in attacks)


def _command(scenario: Mapping[str, Any], run: str | None) -> str:
    """Return the end of an advice on longer searches: the command, or the options of an audit."""
    attacks = [one for one in scenario.get("attacks") or [] if isinstance(one, Mapping)]
    place = next((i for i, one in enumerate(attacks) if one.get("iterations")), None)
    if run is None or place is None:
        return " (--minutes, or --iterations)."
    more = max(1000, 4 * int(attacks[place]["iterations"]))
    return f":\n  rayfed launch {run}/{SCENARIO} --set attacks.{place}.iterations={more}"


def guess(scenario: Mapping[str, Any], attacks: Sequence[Row]) -> str:
    """Return a description of the baseline: the best guess without the update."""
    noun = NOUNS[_form(scenario, attacks)]
    public = (scenario.get("data") or {}).get("public")
    typical = {
        "image": "the mean image or the best constant",
        "text": "the most common token at each place",
        "record": "the mean record or the best constant of each column",
    }[noun]
    closest = f" The closest public {noun} (data.public) is chosen with knowledge of the original." if public else ""
    return f"Baseline: the best guess without the update ({typical}). A leak has to beat it.{closest}"


def rates(told: Sequence[Verdict]) -> str:
    """Return the legend of membership attacks; empty if no membership attack was run."""
    if not any(claim.roc for verdict in told for claim in verdict.claims):
        return ""
    few = "".join(f" {said}." for said in dict.fromkeys(said for verdict in told for said in verdict.unknown_rates))
    return (
        "AUC: probability that a member scores above a non-member, 0.5 by chance; pooled over clients, whose scores "
        "are standardised. TPR at 1 % FPR: share of members identified if 1 % of non-members are taken for members; "
        "1 % by chance. Control: AUC of the same candidates with an update that contains none of them." + few
    )


def _most(mine: Sequence[InferenceResult]) -> str:
    """Return the maximum result of each kind of inference on an arm, such as `AUC 0.648`."""
    found: dict[str, str] = {}
    for claim in sorted(mine, key=_shown):
        if claim.roc:
            found["AUC"] = f"{claim.roc.auc.value:.3f}"
        elif claim.value:
            found[claim.metric.replace("_", " ")] = f"{claim.value.mean:.2f}"
    return ", ".join(f"{name} {figure}" for name, figure in found.items())


def _shown(claim: InferenceResult) -> float:
    """Return the figure that represents a claim: the pooled AUC of scores, otherwise the mean."""
    return claim.roc.auc.value if claim.roc else claim.value.mean if claim.value else 0.0
