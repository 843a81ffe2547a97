"""Text of reasons: why an attack has no result, and why results do not show whether an arm leaks."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed.core.reasons import OF_DECLARATION, Reason
from rayfed.evidence.criteria import Criterion, CriterionResult
from rayfed.metrics.known import METRICS
from rayfed.store.finding import Attacker, Doubt, Elsewhere, Finding, Gap, Missing, NoResult, NotRun, Overtaken, Pending

ATTACKERS: dict[tuple[str, ...], str] = {
    (): "non-adaptive",
    ("defence", "code"): "adaptive",
    ("defence", "code", "labels"): "adaptive, with labels",
}
"""Names of attackers, by their knowledge in addition to the model and the update."""
REASONS = {
    Reason.ENCRYPTED: "the update is encrypted: the attacker sees a ciphertext, not a gradient",
    Reason.MASKED: "the update is masked: without the other clients' shares it is uniform noise",
    Reason.UNDECLARED: "a defence does not declare its effect (transform, log_likelihood)",
    Reason.DECLARATION_WRONG: "a defence does something else than it declares",
    Reason.DECLARATION_NOT_TESTED: "the declaration of a defence could not be tested against its code",
    Reason.BUFFERS_NOT_SOLVED: "the returned buffers could determine the samples",
    Reason.CLOSER_TO_ANOTHER_SAMPLE: (
        "a reconstruction reaches the threshold, but it is closer to another sample: compare it with the original "
        "(output.images: all)"
    ),
    Reason.PUBLIC_SAMPLE_AS_CLOSE: (
        "a reconstruction reaches the threshold, but a public sample is as close: compare it with the original "
        "(output.images: all)"
    ),
    Reason.TOKENS_IN_ANOTHER_ORDER: (
        "a reconstruction reaches the threshold in another order: all tokens of the text were recovered"
    ),
    Reason.NOT_CONVERGED: "the search did not converge: no reconstruction has the observed gradient",
    Reason.FEW_SAMPLES_FIT: (
        "the search converged to another sample with the observed gradient, and samples between it and the original do "
        "not have this gradient: few samples share it, so the original may be identifiable among them"
    ),
    Reason.NOT_COMPARED: "no reconstruction could be compared with the update, so the search may not have converged",
    Reason.ADAPTIVE_NOT_CONVERGED: (
        "the adaptive attacks did not converge: no reconstruction explains the update as well as the original does"
    ),
    Reason.ADAPTIVE_NOT_COMPARED: "no reconstruction of an adaptive attack could be compared with the update",
    Reason.NO_ADAPTIVE_ATTACK: ("no adaptive attack (knowledge: [defence, code]) returned a result for every sample"),
    Reason.NO_ADAPTIVE_ATTACK_WORKS: "no adaptive attack that was run here succeeds without a defence",
    Reason.NO_UNDEFENDED_ARM: "no arm without a defence was attacked",
    Reason.NOTHING_LEAKS_UNDEFENDED: "the attacks reconstructed nothing without a defence either",
    Reason.NO_RECONSTRUCTION_ATTACK: "no attack that reconstructs samples was run",
    Reason.DEFENCES_UNKNOWN: "the attackers of a replay do not know the defences of the federation",
}
"""Text of each reason."""
CODE_OF_USER = "the attacker ran the defence's code on its own gradients only, and it may act differently on others"
RUN_NOT_FINISHED = "the run is not finished"
NOTHING_REBUILT = REASONS[Reason.NO_RECONSTRUCTION_ATTACK]
NO_ATTACK_YET = "the run is not finished, and no attack that reconstructs samples is done"
"""Why an arm without rows of attacks is not measured, in a finished and in an unfinished run."""
_ELSEWHERE = {
    Elsewhere.NOT_IN_RUN: "was not run here",
    Elsewhere.NO_TIME: "was not run here for lack of time",
    Elsewhere.NO_RESULT: "returned no result here",
    Elsewhere.NO_LEAK: "did not succeed here",
}
_JUDGEMENTS = {
    CriterionResult.LEAK: "reconstructed",
    CriterionResult.NOT_COMPARED: "not compared with the baseline",
    CriterionResult.BELOW_BASELINE: "does not beat the baseline",
}


def doubt_text(doubt: Doubt) -> str:
    """Return the reason why results do not decide."""
    if doubt.reason in OF_DECLARATION and doubt.message:
        return f"{REASONS[doubt.reason]}: {doubt.message}"
    return doubt.message or REASONS[doubt.reason] + (gap_text(doubt.gap) if doubt.gap else "")


def gap_text(gap: Gap) -> str:
    """Return how well the best reconstruction explains an update, and how well the true samples do."""
    if gap.of_likelihood:
        return f" (log-likelihood {gap.best:,.0f}, that of the original {gap.needed:,.0f})"
    return f" (distance of its gradient {gap.best:.1g}, allowed {gap.needed:.1g})"


def attacker_text(knowledge: Sequence[str]) -> str:
    """Return the name of an attacker with some knowledge: `adaptive`, or `given public`."""
    return ATTACKERS.get(tuple(knowledge)) or f"given {', '.join(knowledge)}"


def attack_text(attacker: Attacker | None) -> str:
    """Return an attack with its attacker: `dlg, adaptive`; empty for None."""
    return f"{attacker.attack}, {attacker_text(attacker.knowledge)}" if attacker else ""


def no_result_text(one: NoResult, metric: str = "") -> str:
    """Return why an attack has no result; `metric` is a bounded metric of which no value was computed."""
    if one.missing:
        return f"{one.attack} {_missing_text(one.missing, metric)}"
    return f"{one.attack} {': '.join(filter(None, (one.status, one.message)))}"


def _missing_text(missing: Missing, metric: str) -> str:
    if missing == Missing.COMPARISON:
        return f"without {' and '.join(Criterion.needs)}"
    if missing == Missing.METRIC:
        return f"without a value of {METRICS[metric].title}"
    return {
        Missing.RECONSTRUCTION: "returned no finite reconstruction",
        Missing.LABELS_GIVEN: "was given the labels",
        Missing.LABELS: "has no valid share of labels",
    }[missing]


def no_results_text(finding: Finding, metric: str = "") -> list[str]:
    """Return why attacks of a finding have no result, and whether the run is unfinished."""
    texts = [no_result_text(one, metric).strip() for one in finding.no_results]
    return [*[RUN_NOT_FINISHED] * finding.unfinished, *texts]


def hidden_text(finding: Finding) -> list[str]:
    """Return why there is nothing to attack: the messages of the attacks."""
    return list(dict.fromkeys(one.message for one in finding.no_results))


def not_run_text(one: NotRun) -> str:
    """Return an attack that was not run for lack of time, with the attackers if others ran it."""
    if not one.with_knowledge:
        return one.attack
    few = len(one.only) < len(one.with_knowledge)
    names = " and ".join(f"“{attacker_text(each)}”" for each in (one.only if few else one.with_knowledge))
    return f"{one.attack} ({'all but ' if few else ''}{names})"


def pending_text(one: Pending) -> str:
    """Return an attack whose missing result would decide, with the reason."""
    return f"{one.attack} ({'it succeeds without a defence' if one.works else 'it was not run without a defence'})"


def overtaken_text(one: Overtaken) -> str:
    """Return the attack that succeeded against a defence, with its result on the undefended arm."""
    where = f"{attack_text(one.by)} succeeds against {one.arm} at batch size {one.batch}"
    return f"{where} and {_ELSEWHERE[one.here]}, so this arm may leak as well"


def judgement_text(criterion: Criterion, judgement: CriterionResult) -> str:
    """Return `reconstructed` for a leak, otherwise the reason why a reconstruction is no leak."""
    if judgement == CriterionResult.PUBLIC_AS_CLOSE:
        return f"not closer than a public {criterion.noun}"
    if judgement == CriterionResult.CLOSER_TO_ANOTHER:
        return f"closer to another {criterion.noun}"
    if judgement == CriterionResult.BELOW_THRESHOLD:
        return f"below {criterion.written(criterion.threshold)}"
    return _JUDGEMENTS[judgement]
