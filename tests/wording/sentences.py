"""Text of every reason, fact and next step, by the name of its enum member."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rayfed.core.reasons import Reason
from rayfed.evidence.baseline import Change, ChangeReason, ChangeReasonKind, MissingUpdates, SignificanceTest
from rayfed.evidence.bounds import Bound
from rayfed.evidence.checks import (
    AttackBudget,
    Check,
    Count,
    GateReason,
    GateState,
    LabelBaseline,
    NotRunOn,
    ReasonKind,
    Recovered,
    SearchBudget,
    ShareBudget,
)
from rayfed.evidence.criteria import Criterion, CriterionResult
from rayfed.evidence.membership import Identification, Roc
from rayfed.evidence.next_step import NextStep, Step
from rayfed.evidence.rows import Row
from rayfed.evidence.settings import Weakness
from rayfed.evidence.updates import AttackedUpdate
from rayfed.metrics.roc import Estimate
from rayfed.report.text import next_step as next_steps
from rayfed.report.text.baseline import change_reason_text, change_text
from rayfed.report.text.captions import scenario_caption
from rayfed.report.text.gate import check_text, reason_text
from rayfed.report.text.membership import IDENTIFICATIONS, rate_text
from rayfed.report.text.reasons import (
    REASONS,
    attacker_text,
    judgement_text,
    no_result_text,
    not_run_text,
    overtaken_text,
    pending_text,
)
from rayfed.report.text.settings import weakness_text
from rayfed.report.text.summary import subject_text
from rayfed.report.text.sweeps import sweep_verdicts
from rayfed.store.exits import advise_on_state
from rayfed.store.finding import (
    Attacker,
    Doubt,
    Elsewhere,
    Finding,
    Missing,
    NoResult,
    NotRun,
    Overtaken,
    Part,
    PartColumn,
    Pending,
    RecoveredLabels,
    State,
)
from tests.helpers.result_fixtures import setting

ADAPTIVE = Attacker("dlg", ("defence", "code"))
CRITERION = Criterion.from_modality("pixels", 15.0)
CHECK = Check("noise", 4, Bound("psnr", 15.0), GateState.INCONCLUSIVE, 9.0, ADAPTIVE, samples=8)
SHARE = Check("noise", None, Bound("membership.auc", 0.6), GateState.INCONCLUSIVE, 0.55, ("loss",), samples=8)
CURVE = Roc(Estimate(0.7, 0.6, 0.8), Estimate(0.5, 0.4, 0.6), {0.01: Estimate(0.2, 0.1, 0.3), 0.001: None}, 50, 50)
LABELS = RecoveredLabels("dlg", 1.0, 0.25, 0.2, 0.3, 8, 3, 2, share_by_chance=True)
PART = Part("dlg", 0.6, 0.1, 3, (PartColumn("age", 0.8, 0.2), PartColumn("sex", 0.9, None)))
FINDING = Finding("noise", 4, State.INCONCLUSIVE, by=None, part=PART, part_by=ADAPTIVE, labels=LABELS)
NOT_RUN = NotRun("dlg", ((), ("defence", "code")), ((),))
OVERTAKEN = Overtaken(ADAPTIVE, "noise", 4, Elsewhere.NOT_IN_RUN)
FACTS: dict[ReasonKind, Any] = {
    ReasonKind.DOUBT: Doubt(Reason.NOT_CONVERGED),
    ReasonKind.NO_RESULT: NoResult("dlg", "failed", "KeyError: 3", None),
    ReasonKind.NOT_RUN: (NOT_RUN,),
    ReasonKind.METRIC_NOT_COMPUTED: Count(1, 8),
    ReasonKind.OVERTAKEN: OVERTAKEN,
    ReasonKind.SHOWN_ON: Count(1, 8),
    ReasonKind.PART_RECOVERED: Recovered(FINDING, CRITERION),
    ReasonKind.LABELS_RECOVERED: Recovered(FINDING, CRITERION),
    ReasonKind.BUDGET: AttackBudget((SearchBudget("dlg", 100, 300), SearchBudget("idlg", 9, 9)), False, 90.0),
    ReasonKind.WRONG_REPLAY_SETTINGS: 0.9,
    ReasonKind.LABEL_BASELINE: LabelBaseline(0.25, 8),
    ReasonKind.NO_SCORES: "loss",
    ReasonKind.NOT_RECOGNISED: "dlg",
    ReasonKind.NOT_RUN_ON: NotRunOn("loss", Count(1, 8)),
    ReasonKind.FEW_NON_MEMBERS: CURVE,
    ReasonKind.INTERVAL_REACHES: 0.7,
    ReasonKind.SHARE_BUDGET: ShareBudget((("loss", 8),), 90.0),
}
"""Example of the fact of each kind of reason of a gate that has one."""
ON_SHARES = (ReasonKind.NOT_RUN_ON, ReasonKind.FEW_NON_MEMBERS, ReasonKind.INTERVAL_REACHES, ReasonKind.SHARE_BUDGET)
CHANGES: dict[ChangeReasonKind, Any] = {
    ChangeReasonKind.OTHER_ARM: "old",
    ChangeReasonKind.FEWER_ITERATIONS: ("dlg", "idlg"),
    ChangeReasonKind.UPDATES_MISSING: MissingUpdates(3, (1, 4)),
}
"""Example of the fact of each kind of reason of a change that has one."""


def render() -> str:
    """Return every sentence on its own line, after the name of its enum member."""
    return "\n".join(f"{name}: {text}" for name, text in _sentences()) + "\n"


def _sentences() -> Iterator[tuple[str, str]]:
    yield from (("reason", f"{reason.name}: {REASONS[reason]}") for reason in Reason)
    yield from _on_attacks()
    yield from _on_gates()
    yield from _on_changes()
    yield from _on_next_steps()
    yield from _on_runs()
    repeats: list[Row] = [
        {"attack": "dlg", "verdict": "inconclusive", "doubt": Reason.NOT_CONVERGED},
        {"attack": "dlg"},
    ]
    for weakness in Weakness:
        yield f"weakness {weakness.name}", weakness_text(weakness, replace(setting("noise"), rows=repeats), ["loss"])


def _on_runs() -> Iterator[tuple[str, str]]:
    for kind in ("training", "attack"):
        for state in ("running", "finished", "failed", "interrupted", "killed", "fenced"):
            yield f"advice {kind} {state}", advise_on_state(state, kind, "RUN")
    attacked = {"kind": "attack", "weights": "initial"}
    for model in ({}, {"state": "w.pt"}, {"name": "hf"}, {"name": "my:Net"}):
        yield "subject", subject_text(_scenario(**model), attacked, [{"round": 0}])
    for weights in ("trained for 3 rounds", "given", None):
        yield "subject", subject_text(_scenario(), {"kind": "attack", "weights": weights}, [{"round": 3}])
    for rounds in ({0}, {0, 4}, set[int]()):
        yield "subject", subject_text(_scenario(), {"kind": "training"}, [{"round": round} for round in rounds])
    repeats = [{"repeat": i, "verdict": state} for i, state in enumerate(("inconclusive", "leaks", "inconclusive"))]
    best = {"result": "leaks", "max_similarity": 17.8, "baseline_similarity": 14.3, "attack": "dlg", "psnr": 12.0}
    swept = [replace(setting("noise"), rows=[row | best for row in repeats])]
    yield from ((f"sweep verdict {state}", text) for state, text in sweep_verdicts(swept))
    for data in ({"name": "parquet", "train": "/home/me/scans.parquet"}, {"name": "cifar10", "root": "/data"}):
        yield "caption", scenario_caption({"model": {"name": "timm", "arch": "vit"}, "data": data})


def _scenario(**model: Any) -> dict[str, Any]:
    return {"model": {"name": "timm", "arch": "vit", **model}, "data": {"name": "digits"}}


def _on_attacks() -> Iterator[tuple[str, str]]:
    for knowledge in ((), ("defence", "code"), ("defence", "code", "labels"), ("public",)):
        yield "attacker", attacker_text(knowledge)
    for missing in Missing:
        yield f"missing {missing.name}", no_result_text(NoResult("dlg", "ok", "", missing), "ssim")
    yield "not run", not_run_text(NOT_RUN)
    yield from (("pending", pending_text(Pending("dlg", works))) for works in (True, False))
    for here in Elsewhere:
        yield f"overtaken {here.name}", overtaken_text(OVERTAKEN._replace(here=here))
    for judgement in CriterionResult:
        yield f"judgement {judgement.name}", judgement_text(CRITERION, judgement)
    lower, certain = Estimate(0.3, 0.2, 0.4), Estimate(0.7, 0.6, 0.8)
    for auc, control in (
        (CURVE.auc, CURVE.control),
        (certain, certain),
        (lower, None),
        (Estimate(0.5, 0.4, 0.6), None),
    ):
        roc = Roc(auc, control, {}, 50, 50)
        yield f"identification {Identification(roc.identification).name}", IDENTIFICATIONS[roc.identification]
    yield from ((f"rate {rate:g}", rate_text(CURVE, rate)) for rate in CURVE.true_positives)


def _on_gates() -> Iterator[tuple[str, str]]:
    for kind in ReasonKind:
        check = SHARE if kind in ON_SHARES else CHECK
        yield f"gate {kind.name}", reason_text(GateReason(kind, FACTS.get(kind)), check)
    for state in GateState:
        reasons = (GateReason(ReasonKind.NOT_EXCEEDED),)
        yield f"check {state.name}", check_text(Check("noise", 4, CHECK.bound, state, 9.0, ADAPTIVE, 1, 8, reasons))
    yield "check of a share", check_text(SHARE)


def _on_changes() -> Iterator[tuple[str, str]]:
    for kind in ChangeReasonKind:
        yield f"change {kind.name}", change_reason_text(ChangeReason(kind, CHANGES.get(kind)))
    test, newly = SignificanceTest.PAIRED_T, (AttackedUpdate(0, 3, 4),)
    yield "change", change_text(Change(0, "noise", "psnr", GateState.FAILED, test, 8, 1.5, 0.01, (), newly))


def _on_next_steps() -> Iterator[tuple[str, str]]:
    scenario = {"attacks": [{"name": "analytic"}, {"name": "dlg", "iterations": 300}]}
    for step in Step:
        for reason in next_steps._REASONS if step == Step.REMOVE_REASON else (None,):
            made = NextStep(step, ("noise", "prune"), reason, nothing_leaks=True)
            name = f"step {step.name}" + (f" {reason.name}" if reason else "")
            yield name, next_steps._step_text(made, scenario, "RUN")
    search = NextStep(Step.SEARCH_LONGER)
    yield "step SEARCH_LONGER without a search", next_steps._step_text(search, {}, "RUN")
    yield "step SEARCH_LONGER of an audit", next_steps._step_text(search, {}, None)
