"""Verdicts that no run of a scenario can have, told before it is played.

The rules are those of the verdicts (`rayfed.analysis.verdicts.run_findings`). They are given the rows of a run in which
every attack succeeds without a defence, finds nothing behind one, and explains what was sent wherever it has the code.
An arm that is inconclusive even then can only leak, or be not measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from rayfed.analysis.audit import ALONE, UNEXPLAINED_PART, UNREAD, Criterion
from rayfed.analysis.summary import arm_spec
from rayfed.analysis.verdicts import has_own, run_findings
from rayfed.attacks.base import InferenceAttack
from rayfed.attacks.undone import unused
from rayfed.client import plan
from rayfed.client.observations import ObservationBuilder
from rayfed.client.runtime import ClientRuntime
from rayfed.client.sent import Sent
from rayfed.client.visit import ClientVisit
from rayfed.engine.inputs import Inputs
from rayfed.errors import UserError
from rayfed.hidden import UNREHEARSED, UNUSED
from rayfed.scenario import AttackSpec, Scenario

Unused = Mapping[tuple[str, str], str]
"""By arm and title of an attack, what it makes no use of in the code of the arm's defences."""


def unreachable(scenario: Scenario, unused: Unused | None = None) -> list[str]:
    """Return a line for each reason why no answer of the planned attacks can speak for arms with defences."""
    document = scenario.model_dump(mode="json")
    reasons: dict[str, dict[str, None]] = {}
    for one in run_findings(document, list(_rows(scenario, unused or {})), criterion=Criterion.of("pixels", None)):
        if one.state == "inconclusive" and (why := _why(one.lacking)):
            reasons.setdefault(why, {})[one.arm] = None
    return [
        f"{', '.join(arms)}: the verdict can only be LEAKS or NOT MEASURED, because {why}"
        for why, arms in reasons.items()
    ]


def unused_code(inputs: Inputs) -> Unused:
    """Return what attackers with the code of the user's own defences will not use of it, by running these once.

    It is found out as in the run, on the first update of each attack.
    """
    scenario, found = inputs.scenario, dict[tuple[str, str], str]()
    document = scenario.model_dump(mode="json")
    due = [
        (account.arm, attack)
        for account in inputs.accounts
        for attack in _rebuilding(scenario)
        if has_own(document, account.name) and not account.arm.spec.protection
        if "code" in attack.knowledge and attack.rounds
    ]
    if not due:
        return found
    runtime = ClientRuntime(scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    for arm, attack in due:
        victim = plan.victims(scenario, attack, attack.rounds[0], inputs.parts.sizes)[0]
        visit = ClientVisit(arm.spec.name, Sent(0, arm.weights, arm.buffers), victim)
        with suppress(UserError):  # the run says it
            found[arm.spec.name, attack.title] = unused(ObservationBuilder(runtime).observe(visit, attack)[0])
    return found


def _rebuilding(scenario: Scenario) -> list[AttackSpec]:
    """Return the attacks that rebuild samples."""
    return [attack for attack in scenario.attacks if not isinstance(attack.build(), InferenceAttack)]


def _rows(scenario: Scenario, unused: Unused) -> Iterator[dict[str, Any]]:
    """Yield the rows of the best run: a sample for each victim of an attack, of arms that send values to look at."""
    document = scenario.model_dump(mode="json")
    for arm in scenario.written_arms:
        spec = arm_spec(document, arm)
        if spec.get("protection") or scenario.federation.protection:
            continue
        outcome = {"psnr": 0.0, "above_guessing": -1.0, "told_apart": 0.0} if spec.get("defences") else _FOUND
        for attack in _rebuilding(scenario):
            told, size = ",".join(attack.knowledge), 0 if attack.view.of_round else attack.batch_size
            known = {"knowledge": told, "fit": 0.0, "message": unused.get((arm, attack.title), ""), "status": "ok"}
            victims = attack.victims if isinstance(attack.victims, int) else len(attack.victims)
            for round in attack.rounds:
                for victim in range(victims):
                    key = {"arm": arm, "attack": attack.title, "round": round, "victim": victim, "sample": 0}
                    yield key | {"batch_size": size} | known | outcome


_FOUND = {"psnr": 100.0, "above_guessing": 50.0, "told_apart": 1.0}


def _why(lacking: str) -> str:
    """Return a reason with what to do; empty for one that the run alone can tell."""
    if lacking in (*UNREAD, UNEXPLAINED_PART):
        return (
            "no attack that meets every sample has the defences' code. Give one this line: knowledge: [defence, code]"
        )
    if lacking == ALONE:
        return "nothing like it is attacked without a defence. Add an arm that has none: none: []"
    return lacking if lacking.startswith((UNUSED, UNREHEARSED)) else ""
