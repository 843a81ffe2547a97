"""Verdicts on the arms of a run, computed from the scenario and the tables of results."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rayfed import registry
from rayfed.analysis.audit import FEWEST, METHODS
from rayfed.evidence.arms import arm_names, arm_spec, is_recorded, is_undefended
from rayfed.evidence.attack_results import InferenceResult, summarise_inferences
from rayfed.evidence.attack_status import closed_forms
from rayfed.evidence.criteria import Criterion, modality_of
from rayfed.evidence.findings import Doubt, Finding, State, cells_without_adaptive_attack, findings, worst_state
from rayfed.evidence.rows import Row
from rayfed.metrics.known import NOUNS, leading, modality_by
from rayfed.reasons import NEAR, Reason
from rayfed.report.text.findings import labels_beyond_text
from rayfed.report.text.membership import auc_text, identification_text, rate_text, unknown_rates_text
from rayfed.report.text.reasons import attack_text, doubt_text, no_results_text, not_run_text, pending_text
from rayfed.store.folder import SCENARIO
from rayfed.store.schemas import UNPLAYED

if TYPE_CHECKING:
    from rayfed.samples import Modality

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
    return replace(finding, code_of_user=True) if held and has_own(scenario, finding.arm) else finding


def has_own(scenario: Mapping[str, Any], arm: str) -> bool:
    """Return whether an arm has a defence that the user wrote, which is not part of rayfed."""
    specs = arm_spec(scenario, arm).get("defences") or []
    names = [str(spec["name"] if isinstance(spec, Mapping) else spec) for spec in specs]
    known = registry.table("defences")
    return not all(known.get(name, name).startswith("rayfed.") for name in names)


NOTHING_REBUILT = "no attack that reconstructs samples was run"
UNFINISHED = "the run is not finished, and no attack that reconstructs samples is done"
"""Why an arm without rows of attacks is not measured, in a finished and in an unfinished run."""


def verdicts(
    scenario: Mapping[str, Any], attacks: Sequence[Row], inferences: Sequence[Row], finished: bool = True
) -> list[Verdict]:
    """Return a verdict on every arm; for an unfinished run, verdicts on leaks only."""
    found, criterion = run_findings(scenario, attacks, finished), criterion_of(scenario, attacks)
    inferred = summarise_inferences(inferences, arm_names(scenario, inferences))
    return [
        _verdict(
            arm,
            tuple(one for one in found if one.arm == arm),
            [row for row in attacks if row["arm"] == arm],
            tuple(claim for claim in inferred if claim.arm == arm),
            criterion,
            finished,
        )
        for arm in arm_names(scenario, attacks, inferences)
    ]


def _verdict(
    arm: str,
    found: tuple[Finding, ...],
    attacks: Sequence[Row],
    inferred: tuple[InferenceResult, ...],
    criterion: Criterion,
    finished: bool,
) -> Verdict:
    """Return the verdict on one arm from its findings, rows of `attacks` and inferences."""
    parts = {one.part.attack for one in found if one.part} if not any(one.leaked for one in found) else set()
    rows = [row for row in attacks if row["attack"] in parts] or attacks
    return Verdict(arm, worst_state(found), found, closest(rows, criterion), inferred, finished)


COLUMNS = pa.schema(
    [
        ("arm", pa.string()),
        ("batch_size", pa.int64()),  # null if no reconstruction attack was run
        ("verdict", pa.string()),  # one of `State`
        ("metric", pa.string()),
        ("max_similarity", pa.float64()),  # maximum of the metric, among leaks if there are any
        ("above_baseline", pa.float64()),  # of that reconstruction, as in the table `attacks`
        ("attack", pa.string()),  # attack of that reconstruction with its attacker, without batch size
        ("leaked", pa.int64()),
        ("samples", pa.int64()),
        ("parts_recovered", pa.float64()),  # share of columns or tokens recovered; null if it may be due to chance
        ("parts_baseline", pa.float64()),
        ("labels", pa.float64()),  # share recovered by the best attack that was not given the labels
        ("labels_baseline", pa.float64()),  # share recovered by the best of three guesses
        ("labels_by_chance", pa.bool_()),  # whether the share may be due to chance, as the best of many attempts
        ("reason", pa.string()),  # reason of an inconclusive or unmeasured verdict
    ]
)
"""Columns of the table of verdicts, a row for each arm and batch size."""


def verdicts_table(
    scenario: Mapping[str, Any],
    attacks: Sequence[Row],
    arms: Sequence[str],
    finished: bool,
    inferences: Sequence[Row] = (),
) -> pa.Table:
    """Return the verdicts on the given arms as a table (`COLUMNS`), one row for each arm and batch size."""
    metric = leading(_form(scenario, attacks)).name
    found = run_findings(scenario, attacks, finished)
    rows = [
        {
            "arm": one.arm,
            "batch_size": one.batch,
            "verdict": one.state,
            "metric": metric,
            "max_similarity": one.best,
            "above_baseline": one.gain,
            "attack": attack_text(one.by) or None,
            "leaked": one.leaked,
            "samples": one.samples,
            "parts_recovered": one.part.found if one.part else None,
            "parts_baseline": one.part.guessed if one.part else None,
            "labels": one.labels.share if one.labels else None,
            "labels_baseline": (one.labels.guesses.best or None) if one.labels else None,
            "labels_by_chance": one.labels.lucky if one.labels else None,
            "reason": reason_text(one) or None,
        }
        for arm in arms
        for one in found
        if one.arm == arm
    ]
    silent = [arm for arm in arms if arm not in {one.arm for one in found}]
    why = NOTHING_REBUILT if finished else UNFINISHED
    told = {
        arm: [claimed(one) for one in summarise_inferences(inferences, arms) if one.arm == arm]
        for arm in silent
        if finished
    }
    rows += [{"arm": arm, "verdict": "not measured", "reason": "; ".join([why, *told.get(arm, [])])} for arm in silent]
    return pa.Table.from_pylist(sorted(rows, key=lambda row: arms.index(str(row["arm"]))), COLUMNS)


def reason_text(finding: Finding) -> str:
    """Return all reasons why a finding does not decide, and why attacks have no result; empty if there are none."""
    parts = [doubt_text(finding.doubt)] if finding.doubt else []
    parts += [pending_text(one) for one in finding.pending_attacks]
    parts += [not_run_text(one) for one in finding.not_run]
    return "; ".join([*parts, *no_results_text(finding)])


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


def claimed(claim: InferenceResult) -> str:
    """Return a sentence on the result of an inference attack (without reconstructions), compared with chance."""
    failures = "".join(f"; {status}: {message}" for status, message in claim.failures)
    if claim.roc:
        control = f"control without the update {auc_text(claim.roc.control)}" if claim.roc.control else "no control"
        rates = [rate_text(claim.roc, rate) for rate, share in claim.roc.true_positives.items() if share]
        told = ", ".join([f"pooled AUC {auc_text(claim.roc.auc)}", control, *rates])
        return f"{claim.attack} on {claim.roc.members} members: {identification_text(claim.roc)}: {told}{failures}"
    if not claim.value or not claim.chance:
        return f"{claim.attack}: nothing inferred{failures}"
    metric = claim.metric.replace("_", " ")
    return f"{claim.attack}: {metric} {claim.value.mean:.2f} (chance {claim.chance.mean:.2f}){failures}"


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


def short_searches(scenario: Mapping[str, Any]) -> list[str]:
    """Return the titles of searches that ran at most `FEWEST` evaluations."""
    evaluations = {method.name: method.evaluations for method in METHODS if method.evaluations}
    return [
        str(attack.get("label") or attack["name"])
        for attack in scenario.get("attacks") or []
        if isinstance(attack, Mapping) and attack.get("name") in evaluations
        if attack.get("iterations", FEWEST + 1) * evaluations[attack["name"]] <= FEWEST
    ]
