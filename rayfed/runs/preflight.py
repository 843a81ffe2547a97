"""Warnings, before a run, about arms that cannot have the verdict "not reconstructed".

The module applies the rules of verdicts (`rayfed.evidence.verdicts.run_findings`) to the rows of an ideal run. In that
run every attack succeeds without a defence, fails under one, and explains the update if it has the defence's code. An
arm that is inconclusive in the ideal run cannot be "not reconstructed".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from rayfed.attacks.base import InferenceAttack
from rayfed.core.reasons import NOT_ADAPTIVE, OF_DECLARATION, Reason
from rayfed.errors import UserError
from rayfed.evidence.arms import arm_spec, has_user_defence
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.verdicts import run_findings
from rayfed.report.text.reasons import doubt_text
from rayfed.scenario import AttackSpec, Scenario
from rayfed.simulation.client import plan
from rayfed.simulation.client.runtime import ClientRuntime
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.client.visit import ClientVisit
from rayfed.simulation.inputs import Inputs
from rayfed.store.finding import Doubt, State
from rayfed.threat_model.observations import ObservationBuilder

Undeclared = Mapping[tuple[str, str], Doubt]
"""(Arm, attack title) -> why the declarations of the arm's defences say nothing."""


def find_unreachable(scenario: Scenario, undeclared: Undeclared | None = None) -> list[str]:
    """Return one line for each reason why an arm with defences cannot have the verdict "not reconstructed"."""
    document = scenario.model_dump(mode="json")
    reasons: dict[str, dict[str, None]] = {}
    for one in run_findings(
        document, list(_rows(scenario, undeclared or {})), criterion=Criterion.from_modality("pixels", None)
    ):
        if one.state in (State.INCONCLUSIVE, State.NOT_MEASURED) and one.doubt and (why := _why(one.doubt)):
            reasons.setdefault(why, {})[one.arm] = None
    return [
        f"{', '.join(arms)}: the verdict cannot be NOT RECONSTRUCTED, because {why}" for why, arms in reasons.items()
    ]


def find_undeclared(inputs: Inputs) -> Undeclared:
    """Return why declarations of the user's defences say nothing, by arm and attack.

    Each defence is tested once, on the first update of each attack.
    """
    scenario, found = inputs.scenario, dict[tuple[str, str], Doubt]()
    document = scenario.model_dump(mode="json")
    due = [
        (account.arm, attack)
        for account in inputs.accounts
        for attack in _rebuilding(scenario)
        if has_user_defence(document, account.name) and not account.arm.spec.protection
        if "code" in attack.knowledge and attack.rounds
    ]
    if not due:
        return found
    runtime = ClientRuntime(scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    for arm, attack in due:
        victim = plan.victims(scenario, attack, attack.rounds[0], inputs.parts.sizes)[0]
        visit = ClientVisit(arm.spec.name, Sent(0, arm.weights, arm.buffers), victim)
        with suppress(UserError):  # the run reports the error
            seen, _ = ObservationBuilder(runtime).observe(visit, attack)
            declared = seen.extra["observation_model"]
            if declared.reason is not None:
                found[arm.spec.name, attack.title] = Doubt(declared.reason, declared.detail)
    return found


def _rebuilding(scenario: Scenario) -> list[AttackSpec]:
    """Return the attacks that reconstruct samples."""
    return [attack for attack in scenario.attacks if not isinstance(attack.build(), InferenceAttack)]


def _rows(scenario: Scenario, undeclared: Undeclared) -> Iterator[dict[str, Any]]:
    """Yield the rows of the ideal run: one sample per victim and attack, for arms without encryption or masks."""
    document = scenario.model_dump(mode="json")
    for arm in scenario.written_arms:
        spec = arm_spec(document, arm)
        if spec.get("protection") or scenario.federation.protection:
            continue
        outcome = {"psnr": 0.0, "above_baseline": -1.0, "identified": 0.0} if spec.get("defences") else _FOUND
        for attack in _rebuilding(scenario):
            size, doubt = 0 if attack.view.of_round else attack.batch_size, undeclared.get((arm, attack.title))
            reason, message = (doubt.reason, doubt.message) if doubt else (None, "")
            known = {"knowledge": attack.knowledge, "family": attack.family, "fit": 0.0, "status": "ok"}
            known |= {"reason": reason, "message": message}
            victims = attack.victims if isinstance(attack.victims, int) else len(attack.victims)
            for round in attack.rounds:
                for victim in range(victims):
                    key = {"arm": arm, "attack": attack.title, "round": round, "victim": victim, "sample": 0}
                    yield key | {"batch_size": size} | known | outcome


_FOUND = {"psnr": 100.0, "above_baseline": 50.0, "identified": 1.0}


def _why(doubt: Doubt) -> str:
    """Return a reason and a fix as text; empty if only the run can decide."""
    if doubt.reason in NOT_ADAPTIVE | {Reason.ADAPTIVE_NOT_CONVERGED}:
        return (
            "no attack on every sample has the defences' code. Add this line to an attack: knowledge: [defence, code]"
        )
    if doubt.reason == Reason.NO_UNDEFENDED_ARM:
        return "no comparable arm is attacked without a defence. Add an arm without defences: none: []"
    return doubt_text(doubt) if doubt.reason in OF_DECLARATION else ""
