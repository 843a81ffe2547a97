"""Text of the next step that the verdicts of a run suggest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayfed.core.reasons import Reason
from rayfed.evidence.next_step import NextStep, Step, decide_next_step, is_search
from rayfed.evidence.verdicts import RunEvidence
from rayfed.report.text.formats import MAX_NAMES
from rayfed.store.folder import SCENARIO

_REASONS = {
    Reason.NO_ADAPTIVE_ATTACK: "run an adaptive attack on {arms}: add `knowledge: [defence, code]` to an attack.",
    Reason.NO_ADAPTIVE_ATTACK_WORKS: (
        "add `knowledge: [defence, code]` to an attack that succeeds without a defence, to attack {arms}, or give the "
        "adaptive attacks more iterations."
    ),
    Reason.DEFENCES_UNKNOWN: (
        "measure the federation's defence itself with adaptive attackers (rayfed audit --defence)."
    ),
    Reason.UNDECLARED: (
        "declare the effect of the defence of {arms}: override `transform`, and `log_likelihood` if it adds noise. "
        "More time does not help."
    ),
    Reason.DECLARATION_WRONG: "correct the declaration of the defence of {arms}. More time does not help.",
    Reason.BUFFERS_NOT_SOLVED: (
        "write an attack on the buffers that clients of {arms} return, or return none. More time does not help."
    ),
    Reason.DECLARATION_NOT_TESTED: (
        "read why the declaration of the defence of {arms} could not be tested. More time does not help."
    ),
}
"""Advice by reason of inconclusive arms."""
_ADD_SEARCH = "add an attack that searches, such as inverting_gradients (rayfed list attacks)."
_TEXTS = {
    Step.CHECK_MEMBERSHIP: "check the figures against a bound:\n  rayfed gate {run} --fail-above membership.auc=0.6",
    Step.CHANGE_DEFENCE: "every arm leaks. Try a stronger or another defence (rayfed list defences).",
    Step.RUN_LEFT_OUT: "attacks were left out for lack of time. Give more minutes, or fewer defences.",
    Step.USE_ACCOUNT: (
        "these attacks cannot be checked against the update of {arms}, and more time does not help. Use a defence with "
        "a privacy account to bound every attack."
    ),
    Step.COMPARE_RECONSTRUCTIONS: "compare the reconstructions of {arms} with the originals (output.images: all).",
    Step.READ_REASONS: "see above why attacks returned no result.",
}


def next_step_text(evidence: RunEvidence, run: str | None = None) -> str:
    """Return the user's next step, with a command if possible; empty if every arm has a result.

    `run` is the folder of a run whose scenario can be launched again.
    """
    step = decide_next_step(evidence)
    return f"Next: {_step_text(step, evidence.scenario, run)}" if step else ""


def _step_text(step: NextStep, scenario: Mapping[str, Any], run: str | None) -> str:
    arms = ", ".join(step.arms)
    if step.reason:
        return _REASONS[step.reason].format(arms=arms)
    if step.step == Step.SEARCH_LONGER:
        why = "an attack that fails without a defence is no evidence for a defence: " if step.nothing_leaks else ""
        return why + _search_text("give the searches more iterations", _ADD_SEARCH, scenario, run)
    if step.step == Step.ATTACK_LONGER:
        arms = ", ".join(step.arms[:MAX_NAMES])
        return _search_text(f"attack {arms} for longer", f"to attack {arms} further, {_ADD_SEARCH}", scenario, run)
    return _TEXTS[step.step].format(arms=arms, run=run or "RUN")


def _search_text(longer: str, added: str, scenario: Mapping[str, Any], run: str | None) -> str:
    """Return the advice on longer searches with the command; for a run without searches, to add one."""
    attacks = scenario.get("attacks") or []
    searches = [place for place, attack in enumerate(attacks) if is_search(attack)]
    if run is not None and not searches:
        return added
    if run is None or not searches:
        return f"{longer} (--minutes, or --iterations)."
    iterations = max(1000, 4 * int(attacks[searches[0]]["iterations"]))
    return f"{longer}:\n  rayfed launch {run}/{SCENARIO} --set attacks.{searches[0]}.iterations={iterations}"
