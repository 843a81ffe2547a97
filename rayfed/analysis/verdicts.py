"""Verdicts on a run: the result of the attacks on each arm, in the sentences that report and terminal share.

Read are the scenario and the tables of attacks and inferences alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rayfed import registry
from rayfed.analysis.audit import (
    FEWEST,
    GIVEN,
    IN_ANOTHER_ORDER,
    METHODS,
    NEAR,
    NO_CODE,
    NONE_WORKS,
    UNCOMPARED,
    UNEXPLAINED,
    Criterion,
    Finding,
    State,
    by_luck,
    findings,
    labels_beyond,
    modality_of,
    played_by,
    sentence,
    unread,
)
from rayfed.analysis.membership import area, in_words, stated, untold
from rayfed.analysis.summary import Claim, Row, arm_names, arm_spec, claims, recorded, undefended
from rayfed.analysis.unanswered import closed_forms
from rayfed.hidden import UNREHEARSED, UNSOLVED, UNUSED
from rayfed.metrics.known import NOUNS, leading, modality_by
from rayfed.store.folder import SCENARIO
from rayfed.store.schemas import UNPLAYED

if TYPE_CHECKING:
    from rayfed.samples import Modality

MOST = 10
"""Most arms that a line of the headline names."""
WEIGHT: tuple[State, ...] = ("leaks", "not measured", "inconclusive", "not reconstructed", "nothing to attack")
"""States of an arm, that one first which says least good of it: it counts where batch sizes differ."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on one arm."""

    arm: str
    state: State
    """The state among those of its batch sizes that comes first in `WEIGHT`."""
    sentence: str
    closest: Row | None = None
    """Row of the reconstruction that came closest: of those that are leaks, or of all where none is."""
    labels: str = ""
    """Labels of which attackers named more than a guess does, with figures; empty if none did."""
    by_luck: bool = False
    """Whether that may all be the luck of the best of so many attackers."""
    inferred: bool = False
    """Whether no attack rebuilds samples here, and others inferred something."""
    figure: str = ""
    """The most that those inferred, in short: `AUC 0.648`."""
    lacking: tuple[str, ...] = ()
    """Reasons of its findings (`Finding.lacking`)."""
    untold: tuple[str, ...] = ()
    """Rates of membership attacks that too few non-members tell nothing of, with the reason."""

    @property
    def badge(self) -> str:
        """The verdict in a word or a figure."""
        return self.figure if self.inferred and self.figure else self.state

    @property
    def answered(self) -> bool:
        """Whether the attacks support a statement on the arm; inconclusive arms count as not measured."""
        return self.state not in ("not measured", "inconclusive")


def weightiest(found: Sequence[Finding]) -> State:
    """Return the first state in `WEIGHT` that some findings have; "not measured" without findings."""
    return next((state for state in WEIGHT if any(finding.state == state for finding in found)), "not measured")


def closest(attacks: Sequence[Row], criterion: Criterion) -> Row | None:
    """Return the row of the reconstruction nearest to its sample, among leaks if there are any.

    None where nothing finite was reconstructed.
    """
    found = [(criterion.leaks(row), value, row) for row in attacks if (value := criterion.nearness(row)) is not None]
    return max(found, key=lambda one: one[:2], default=(False, 0.0, None))[2]


def _form(scenario: Mapping[str, Any], attacks: Sequence[Row]) -> Modality:
    """Return the form of a run's samples: by what was measured, or where nothing was by what the scenario measures."""
    names = (scenario.get("metrics") or {}).get("names") or ()
    found = modality_of(attacks)
    return modality_by(names) if found == "pixels" else found


def criterion_of(scenario: Mapping[str, Any], attacks: Sequence[Row]) -> Criterion:
    """Return the criterion for a run's rows, with the scenario's threshold for the leading metric."""
    form = _form(scenario, attacks)
    success = (scenario.get("metrics") or {}).get("success") or {}
    return Criterion.of(form, success.get(leading(form).name))


def run_findings(
    scenario: Mapping[str, Any], attacks: Sequence[Row], finished: bool = True, criterion: Criterion | None = None
) -> list[Finding]:
    """Return the findings of a run, by its own criterion unless another is given.

    Attacks show that they work on arms without a defence that have the same model.
    """
    found, why, criterion = [], dict[tuple[str, int], str](), criterion or criterion_of(scenario, attacks)
    models = {arm: repr(arm_spec(scenario, arm).get("model")) for arm in dict.fromkeys(row["arm"] for row in attacks)}
    for model in dict.fromkeys(models.values()):
        alike = [arm for arm, own in models.items() if own == model]
        rows, bare = [row for row in attacks if row["arm"] in alike], [a for a in alike if undefended(scenario, a)]
        found += findings(rows, criterion, _brief(scenario), bare, finished, closed_forms(scenario))
        why |= unread(rows, criterion, bare, closed_forms(scenario))
    own = {arm for arm in models if has_own(scenario, arm)}
    told = []
    for one in found:
        held = one.state == "not reconstructed" and bool(arm_spec(scenario, one.arm).get("defences"))
        if held and (lacking := why.get((one.arm, one.batch))):
            one = replace(one, state="inconclusive", lacking=UNTOLD if recorded(scenario, one.arm) else lacking)
        elif held and one.arm in own:
            one = replace(one, caveat=TRIED)
        told.append(one)
    return told


def has_own(scenario: Mapping[str, Any], arm: str) -> bool:
    """Return whether an arm has defences that rayfed does not come with."""
    specs = arm_spec(scenario, arm).get("defences") or []
    names = [str(spec["name"] if isinstance(spec, Mapping) else spec) for spec in specs]
    known = registry.table("defences")
    return not all(known.get(name, name).startswith("rayfed.") for name in names)


UNTOLD = "no attacker of a replay knows how what was sent is defended"
TRIED = "the defence's code was run on the attacker's own gradients, and may do otherwise on others"
NOTHING_REBUILT = "no attack that rebuilds samples was played here"
UNFINISHED = "the run is not finished, and no attack that rebuilds samples is over here"
"""Why an arm without rows of attacks is not measured: in a finished run, and in one that goes on or broke off."""


def verdicts(
    scenario: Mapping[str, Any], attacks: Sequence[Row], inferences: Sequence[Row], finished: bool = True
) -> list[Verdict]:
    """Return a verdict on every arm; for an unfinished run, leaks only.

    Labels that attacks find alike on several arms are told of the first, to which the others' sentences point.
    """
    arms = arm_names(scenario, attacks, inferences)
    found, criterion = run_findings(scenario, attacks, finished), criterion_of(scenario, attacks)
    inferred = claims(inferences, arm_names(scenario, inferences))
    told = []
    for place, arm in enumerate(arms):
        own = [finding for finding in found if finding.arm == arm]
        earlier = [finding for finding in found if finding.arm in arms[:place]]
        mine = [claim for claim in inferred if claim.arm == arm]
        others = [claimed(claim) for claim in mine]
        few = tuple(dict.fromkeys(said for claim in mine if claim.roc for said in untold(claim.roc)))
        if own:
            words = [sentence(own, criterion, earlier)]
        elif others and finished:
            words = [f"{arm}: {NOTHING_REBUILT}"]
        else:
            words = [f"{arm}: NOT MEASURED, for {NOTHING_REBUILT if finished else UNFINISHED}"]
        words += others
        parts = {one.part.attack for one in own if one.part and not any(each.leaked for each in own)}
        rows = [row for row in attacks if row["arm"] == arm]
        nearest = closest([row for row in rows if played_by(row) in parts] or rows, criterion)
        alone = bool(others) and not own and finished
        named = labels_beyond(own), by_luck(own)
        lacking = tuple(one.lacking for one in own if one.lacking)
        told.append(Verdict(arm, weightiest(own), "; ".join(words), nearest, *named, alone, _most(mine), lacking, few))
    return told


COLUMNS = pa.schema(
    [
        ("arm", pa.string()),
        ("batch_size", pa.int64()),  # null where no attack rebuilt samples
        ("verdict", pa.string()),  # one of `State`
        ("metric", pa.string()),
        ("closest", pa.float64()),  # of the leaks if there are any
        ("above_guessing", pa.float64()),  # as in the table `attacks`, of that reconstruction
        ("attack", pa.string()),  # that made it, without batch size, and who played it
        ("leaked", pa.int64()),
        ("samples", pa.int64()),
        ("parts_found", pa.float64()),  # share of their columns or tokens; null where chance may find as much
        ("parts_guessed", pa.float64()),
        ("labels", pa.float64()),  # share found by the best attack that was not given them
        ("labels_guessed", pa.float64()),  # by the best of three guesses
        ("labels_lucky", pa.bool_()),  # whether the best of as many guesses may find that share by luck
        ("reason", pa.string()),  # why it says no more
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
    """Return the verdicts on these arms in figures (`COLUMNS`), the findings that their sentences are made of.

    Where nothing was rebuilt, the reason says what was inferred.
    """
    metric = leading(_form(scenario, attacks)).name
    found = run_findings(scenario, attacks, finished)
    rows = [
        {
            "arm": one.arm,
            "batch_size": one.batch,
            "verdict": one.state,
            "metric": metric,
            "closest": one.best,
            "above_guessing": one.gain,
            "attack": one.by or None,
            "leaked": one.leaked,
            "samples": one.samples,
            "parts_found": one.part.found if one.part else None,
            "parts_guessed": one.part.guessed if one.part else None,
            "labels": one.labels.share if one.labels else None,
            "labels_guessed": (one.labels.guesses.best or None) if one.labels else None,
            "labels_lucky": one.labels.lucky if one.labels else None,
            "reason": "; ".join(filter(None, (one.lacking, *one.awaited, *one.unplayed, *one.reasons))) or None,
        }
        for arm in arms
        for one in found
        if one.arm == arm
    ]
    silent = [arm for arm in arms if arm not in {one.arm for one in found}]
    why = NOTHING_REBUILT if finished else UNFINISHED
    told = {arm: [claimed(one) for one in claims(inferences, arms) if one.arm == arm] for arm in silent if finished}
    rows += [{"arm": arm, "verdict": "not measured", "reason": "; ".join([why, *told.get(arm, [])])} for arm in silent]
    return pa.Table.from_pylist(sorted(rows, key=lambda row: arms.index(str(row["arm"]))), COLUMNS)


def headline(scenario: Mapping[str, Any], told: Sequence[Verdict]) -> list[str]:
    """Return sentences that sum up: how many arms leak, which, how many are not known, and whose labels leak alone."""
    lines = []
    for states, one, many in _ANSWERS:
        arms = [
            f"{verdict.arm} (no defence)" if undefended(scenario, verdict.arm) else verdict.arm
            for verdict in told
            if verdict.state in states and not verdict.inferred
        ]
        if arms:
            of = f"{len(arms)} of {len(told)} arms {one if len(arms) == 1 else many}"
            more = f" and {len(arms) - MOST} more" if len(arms) > MOST else ""
            lines.append(f"{of}: {', '.join(arms[:MOST])}{more}.")
    if alone := [verdict.arm for verdict in told if verdict.inferred]:
        lines.append(f"{len(alone)} of {len(told)} arms: {NOTHING_REBUILT}; what was inferred stands beside each.")
    return [*lines, *labels_alone(told)]


def labels_alone(told: Sequence[Verdict]) -> list[str]:
    """Return a sentence on the arms of which labels leak, and no sample is known to; none if there are none."""
    alike: dict[str, list[str]] = {}
    for verdict in told:
        if verdict.labels and verdict.state != "leaks":
            alike.setdefault(verdict.labels, []).append(verdict.arm)
    if not alike:
        return []
    read = [f"{', '.join(arms)}, {'each ' if len(arms) > 1 else ''}{found}" for found, arms in alike.items()]
    shown = "; ".join(read[:MOST])
    more = f"; and {sum(map(len, list(alike.values())[MOST:]))} more" if len(read) > MOST else ""
    return [f"More labels were named than a guess names, though no sample is known to be rebuilt: {shown}{more}."]


_ANSWERS: tuple[tuple[tuple[State, ...], str, str], ...] = (
    (("leaks",), "leaks", "leak"),
    (("not measured",), "was not measured", "were not measured"),
    (
        ("inconclusive",),
        "was not measured, for what the attacks found is inconclusive",
        "were not measured, for what the attacks found is inconclusive",
    ),
    (
        ("not reconstructed",),
        "had no sample rebuilt by these attacks within this budget",
        "had no sample rebuilt by these attacks within this budget",
    ),
    (("nothing to attack",), "sends nothing to attack", "send nothing to attack"),
)


_ADVICE: tuple[tuple[str, str], ...] = (
    (NO_CODE, "run an adaptive attack on {arms}: add `knowledge: [defence, code]` to an attack."),
    (
        NONE_WORKS,
        "add `knowledge: [defence, code]` to an attack that succeeds without a defence, to attack {arms}, or give the "
        "adaptive attacks more iterations.",
    ),
    (UNTOLD, "measure the federation's defence itself with adaptive attackers (rayfed audit --defence)."),
    (
        UNUSED,
        "write an attack that uses the code of the defence of {arms}, or change the defence. More time does not help.",
    ),
    (
        UNSOLVED,
        "write an attack on the buffers that clients of {arms} return, or return none. More time does not help.",
    ),
    (UNREHEARSED, "read why the defences of {arms} could not be run by an attacker. More time does not help."),
)
"""What to do about inconclusive arms, by the reason that their findings have, the first that applies."""


def next_step(
    scenario: Mapping[str, Any],
    attacks: Sequence[Row],
    told: Sequence[Verdict],
    enough: str | None = None,
    fewer: str | None = None,
    run: str | None = None,
) -> str:
    """Return what to do to learn more, with a command if there is one; empty if every arm has a result.

    `enough` says which options leave no attack of an audit out, `fewer` that an audit attacked fewer samples than it
    was asked for. `run` is the folder of a run whose scenario can be launched again.
    """
    if told and all(verdict.inferred for verdict in told) and rates(told):
        return f"Next: check the figures against a bound:\n  rayfed gate {run or 'RUN'} --fail-above membership.auc=0.6"
    if not attacks:
        return ""
    states = {verdict.state for verdict in told}
    if states == {"leaks"}:  # which more time does not change
        return "Next: every arm leaks. Try a stronger or another defence (rayfed list defences)."
    if step := _step_of_time(attacks, told, enough, fewer):
        return step
    inconclusive = [verdict for verdict in told if verdict.state == "inconclusive"]
    if step := _step_of_reasons(scenario, inconclusive, "leaks" in states):
        return step
    bare = any(undefended(scenario, v.arm) and v.state == "not reconstructed" for v in told)
    if inconclusive or (bare and "leaks" not in states):
        first = "" if "leaks" in states else "an attack that fails without a defence shows nothing of a defence: "
        return f"Next: {first}give the searches more iterations{_command(scenario, run)}"
    if "not measured" in states:
        return "Next: see above why attacks returned no result."
    held = [verdict.arm for verdict in told if verdict.state == "not reconstructed"]
    if not held:
        return ""
    return f"Next: attack {', '.join(held[:MOST])} for longer{_command(scenario, run)}"


def _step_of_time(attacks: Sequence[Row], told: Sequence[Verdict], enough: str | None, fewer: str | None) -> str:
    """Return what to do about attacks or samples that were left out for lack of time; empty if there are none."""
    unplayed = any(row["status"] == UNPLAYED for row in attacks)
    if enough and fewer and not unplayed:
        return f"Next: {fewer}, for lack of time. To attack all of them, give {enough}."
    if enough and (unplayed or {verdict.arm for verdict in told} > {row["arm"] for row in attacks}):
        return f"Next: attacks were left out for lack of time. To run them, give {enough}."
    return "Next: attacks were left out for lack of time. Give more minutes, or fewer defences." if unplayed else ""


def _step_of_reasons(scenario: Mapping[str, Any], inconclusive: Sequence[Verdict], leaks: bool) -> str:
    """Return what to do about the first reason of `_ADVICE` that inconclusive arms have; empty if they have others."""

    def arms_with(reason: str) -> list[str]:
        return [verdict.arm for verdict in inconclusive if any(reason in one for one in verdict.lacking)]

    for reason, advice in _ADVICE:
        if arms := arms_with(reason):
            return f"Next: {advice.format(arms=', '.join(arms))}"
    unfinished = any(undefended(scenario, arm) for arm in arms_with(UNEXPLAINED))
    if (arms := arms_with(UNCOMPARED)) and not unfinished:  # a search that does not end without a defence comes first
        return (
            f"Next: these attacks cannot be checked against the update of {', '.join(arms)}, and more time does not "
            "help. Use a defence with a privacy account to bound every attack."
        )
    if arms := arms_with(NEAR if leaks else IN_ANOTHER_ORDER):
        return f"Next: compare the reconstructions of {', '.join(arms)} with the originals (output.images: all)."
    return ""


def _command(scenario: Mapping[str, Any], run: str | None) -> str:
    """Return the end of an advice on longer searches: the command, or the options of an audit."""
    attacks = [one for one in scenario.get("attacks") or [] if isinstance(one, Mapping)]
    place = next((i for i, one in enumerate(attacks) if one.get("iterations")), None)
    if run is None or place is None:
        return " (--minutes, or --iterations)."
    more = max(1000, 4 * int(attacks[place]["iterations"]))
    return f":\n  rayfed launch {run}/{SCENARIO} --set attacks.{place}.iterations={more}"


def guess(scenario: Mapping[str, Any], attacks: Sequence[Row]) -> str:
    """Return a description of the guesses shown beside the closest reconstructions."""
    noun = NOUNS[_form(scenario, attacks)]
    public = (scenario.get("data") or {}).get("public")
    typical = {
        "image": "the mean image or the best constant",
        "text": "the commonest token at each place",
        "record": "the mean record or the best constant of each column",
    }[noun]
    nearest = f", and the nearest public {noun} (data.public), chosen by looking at the truth" if public else ""
    return f"Guesses need no update: {typical}{nearest}. What is no nearer is not called a reconstruction."


def attackers(told: Sequence[Verdict]) -> str:
    """Return what the names of attackers in some verdicts mean; empty if none has one."""
    met = [name for name in GIVEN if any(f", {name})" in verdict.sentence for verdict in told)]
    given = "; ".join(f"{name}: {GIVEN[name]}" for name in met)
    return f"In brackets: the attack, and what it has beside model and update ({given})." if met else ""


def rates(told: Sequence[Verdict]) -> str:
    """Return what the figures of a membership attack mean; empty if none is told."""
    if not any("AUC" in verdict.sentence for verdict in told):
        return ""
    few = "".join(f" {said}." for said in dict.fromkeys(said for verdict in told for said in verdict.untold))
    return (
        "AUC: how often a member scores above a non-member, 0.5 by chance and 1 where all are told; pooled: of all "
        "clients together, each client's scores at mean 0 and deviation 1. TPR at 1 % FPR: "
        "the share of members found where one non-member in a hundred is taken for one, 1 % by chance. Control: the "
        "AUC with an update behind which nobody is, 0.5 where members differ in nothing else." + few
    )


def claimed(claim: Claim) -> str:
    """Return an attack's inferences other than reconstructions, beside chance, in words."""
    failures = "".join(f"; {status}: {message}" for status, message in claim.failures)
    if claim.roc:
        control = f"control without the update {area(claim.roc.control)}" if claim.roc.control else "no control"
        rates = [stated(claim.roc, rate) for rate, share in claim.roc.true_positives.items() if share]
        told = ", ".join([f"pooled AUC {area(claim.roc.auc)}", control, *rates])
        return f"{claim.attack} on {claim.roc.members} members: {in_words(claim.roc)}: {told}{failures}"
    if not claim.value or not claim.chance:
        return f"{claim.attack}: nothing inferred{failures}"
    metric = claim.metric.replace("_", " ")
    return f"{claim.attack}: {metric} {claim.value.mean:.2f} (chance {claim.chance.mean:.2f}){failures}"


def _most(mine: Sequence[Claim]) -> str:
    """Return the largest figure of each kind that attacks on an arm inferred, in short."""
    found: dict[str, str] = {}
    for claim in sorted(mine, key=_shown):
        if claim.roc:
            found["AUC"] = f"{claim.roc.auc.value:.3f}"
        elif claim.value:
            found[claim.metric.replace("_", " ")] = f"{claim.value.mean:.2f}"
    return ", ".join(f"{name} {figure}" for name, figure in found.items())


def _shown(claim: Claim) -> float:
    """Return the figure that is shown of a claim: of scores the area over all rounds, which is no mean of theirs."""
    return claim.roc.auc.value if claim.roc else claim.value.mean if claim.value else 0.0


def _brief(scenario: Mapping[str, Any]) -> list[str]:
    """Return the titles of searches with at most `FEWEST` evaluations."""
    evaluations = {method.name: method.evaluations for method in METHODS if method.evaluations}
    return [
        str(attack.get("label")).partition(",")[0]
        for attack in scenario.get("attacks") or []
        if isinstance(attack, Mapping) and attack.get("label") and attack.get("name") in evaluations
        if attack.get("iterations", FEWEST + 1) * evaluations[attack["name"]] <= FEWEST
    ]
