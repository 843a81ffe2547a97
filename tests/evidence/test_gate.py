"""The gate: what passes a bound, what nothing shows, what got worse, and the script of the documentation."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import numpy as np
import pytest
import torch
import yaml
from scipy.stats import t
from typer.main import get_command

from rayfed import scenario as scenarios
from rayfed.audits.replay import Recorded
from rayfed.cli import app
from rayfed.cli.bounds import parse_bounds
from rayfed.cli.gate import _arm as named_arm
from rayfed.core.reasons import Reason
from rayfed.errors import Killed, UserError
from rayfed.evidence.baseline import Change, ChangeReasonKind, compare_with_baseline
from rayfed.evidence.bounds import MEMBERSHIP, Bound, boundable_metrics
from rayfed.evidence.checks import (
    Check,
    ReasonKind,
)
from rayfed.evidence.gate import check_bounds
from rayfed.evidence.labels import LUCK, collect_label_inferences
from rayfed.evidence.updates import measure_updates
from rayfed.evidence.verdicts import collect_evidence
from rayfed.metrics.known import default_names
from rayfed.metrics.labels import even_guess, label_accuracy
from rayfed.report.gate import GatedRun, Ruling, make_gate_schema, read_document
from rayfed.runs import runner
from rayfed.simulation.executors.local import local
from rayfed.simulation.progress import Progress
from rayfed.store.finding import Doubt, Missing
from rayfed.store.schemas import UNPLAYED
from tests.conftest import REPOSITORY
from tests.helpers.command import run
from tests.helpers.gate_rows import SCENARIO, row
from tests.helpers.result_fixtures import small_sweep

PSNR, LPIPS = Bound("psnr", 15.0), Bound("lpips_alex", 0.3)


def states(bound: Bound, *rows: dict[str, Any], finished: bool = True) -> dict[str, str]:
    arms = list(dict.fromkeys(one["arm"] for one in rows))
    checks = check_bounds(collect_evidence(SCENARIO, rows, [], finished), [bound], arms)
    return {check.arm: check.state for check in checks}


def check_x(bound: Bound, rows: Sequence[dict[str, Any]], scenario: dict[str, Any] = SCENARIO) -> Check:
    [check] = check_bounds(collect_evidence(scenario, rows, []), [bound], ["x"])
    return check


def kinds(check: Check) -> list[ReasonKind]:
    return [reason.kind for reason in check.reasons]


def updates_of_x(rows: Sequence[dict[str, Any]], scenario: dict[str, Any] = SCENARIO) -> list[dict[str, Any]]:
    return measure_updates(collect_evidence(scenario, rows, []), ["psnr"], ["x"])


def test_an_arm_passes_where_what_leaks_without_a_defence_does_not_leak_there() -> None:
    assert states(PSNR, row("none", 40.0), row("x", 14.9), row("y", 15.0)) == {
        "none": "failed", "x": "passed", "y": "failed",
    }  # fmt: skip


@pytest.mark.parametrize("names", [("dp", "dp vs strong"), ("a", "a vs "), ("x batch 4", "x, adaptive"), ("", " vs ")])
def test_no_name_of_an_arm_hides_another_arm(names: tuple[str, str]) -> None:
    arms = {"none": [], names[0]: [{"name": "dp_sgd"}], names[1]: [{"name": "gaussian"}]}
    rows = [row("none", 40.0), row(names[0], 100.0), row(names[1], 9.0)]
    inputs = collect_evidence(SCENARIO | {"arms": arms}, rows, [])
    assert inputs.gated_arms == list(names)
    assert {check.arm: check.state for check in check_bounds(inputs, [PSNR], inputs.gated_arms)} == {
        names[0]: "failed", names[1]: "passed",
    }  # fmt: skip


def test_no_label_makes_a_search_a_closed_form() -> None:
    """A closed form that finds that no sample fits has finished; a search that diverged has not."""
    attacks = [{"name": "analytic"}, {"name": "idlg", "label": "analytic batch 1, adaptive"}]
    rows = [row("none", 40.0, attack="analytic batch 1, adaptive"), row("x", 3.0, status="diverged")]
    rows[1]["attack"] = "analytic batch 1, adaptive"
    check = check_x(PSNR, rows, SCENARIO | {"attacks": attacks})
    assert check.state == "not measured"


def test_a_passed_check_says_on_how_many_samples_it_is_shown() -> None:
    rows = [row("none", 40.0), row("none", 9.0, sample=1), row("x", 9.0), row("x", 9.0, sample=1)]
    check = check_x(PSNR, rows)
    assert (check.state, check.value) == ("passed", 9.0)
    assert dict(check.reasons) == {ReasonKind.SHOWN_ON: (1, 2)}
    guessed = [row("none", 40.0), row("none", 30.0, sample=1, above_baseline=-1.0), *rows[2:]]
    assert dict(check_x(PSNR, guessed).reasons) == {ReasonKind.SHOWN_ON: (1, 2)}
    assert check_x(PSNR, [row("none", 40.0), row("x", 9.0)]).reasons == ()


def test_nothing_passes_where_another_attack_raised() -> None:
    raised = {"psnr": None, "status": "failed", "message": "OutOfMemoryError", "attack": "b"}
    rows = [row("none", 40.0), row("none", **raised), row("x", 9.0), row("x", **raised), row("y", 9.0)]
    assert states(PSNR, *rows) == {"none": "failed", "x": "not measured", "y": "passed"}


def test_a_value_that_exceeds_the_bound_but_not_the_baseline_is_marked() -> None:
    guessed = [row("none", 19.1, above_baseline=-1.7), row("x", 19.3, above_baseline=-1.5)]
    check = check_x(PSNR, guessed)
    assert (check.state, check.value) == ("inconclusive", 19.3)
    assert ReasonKind.BASELINE_REACHES_BOUND in kinds(check)
    assert kinds(check_x(PSNR, [row("none", 9.0), row("x", 9.0)])) == [ReasonKind.NOT_EXCEEDED]


def test_a_bare_number_bounds_what_samples_of_a_table_are_ranked_by() -> None:
    """PSNR is measured of records, too; where no attack answered, rows measure nothing at all."""
    scenario = SCENARIO | {"metrics": {"names": default_names("records")}}
    silent = row("none", status="failed", message="raised")
    for rows in ([row("none", 40.0, feature_accuracy=1.0)], [silent], []):
        inputs = collect_evidence(scenario, rows, [])
        assert parse_bounds(["0.9"], inputs.modality, inputs.measures) == [Bound("feature_accuracy", 0.9)]
        assert parse_bounds(["features=0.9"], inputs.modality, inputs.measures) == [Bound("feature_accuracy", 0.9)]


def test_a_passed_check_says_what_else_was_read() -> None:
    """A bound is on whole rows; columns and labels may be read all the same."""
    scenario = SCENARIO | {"metrics": {"names": default_names("records")}}
    parts = {"parts_baseline": 0.2, "parts_evidence": 10.0}
    labels = {"label_accuracy": 1.0, "label_baseline": 0.5, "knowledge": ["defence", "code"]}

    def record(arm: str, share: float, sample: int = 0, label: int = 0) -> dict[str, Any]:
        read = {"parts_recovered": share, "feature_accuracy": share, "sample": sample, "true_label": label}
        return row(arm, batch=2, columns=[{"name": "age", "found": True, "guess": 0.2}], **parts, **labels, **read)

    rows = [record("none", 1.0), record("none", 1.0, 1, 1), record("x", 0.8), record("x", 0.8, 1, 1)]
    bound = Bound("feature_accuracy", 0.9)
    check = check_x(bound, rows, scenario)
    assert check.state == "passed"
    assert kinds(check) == [ReasonKind.PART_RECOVERED, ReasonKind.LABELS_RECOVERED]
    failed = check_x(Bound("feature_accuracy", 0.5), rows, scenario)
    assert failed.state == "failed"


def test_no_bound_on_whole_images_is_passed_where_pixels_were_read() -> None:
    parts = {"parts_recovered": 0.3, "parts_baseline": 0.05, "parts_evidence": 30.0}
    rows = [row("none", 40.0), row("x", 9.0, **parts)]
    check = check_x(PSNR, rows)
    assert check.state == "inconclusive"
    assert ReasonKind.PART_RECOVERED in kinds(check)
    rows[1]["parts_evidence"] = 1.0
    assert check_x(PSNR, rows).state == "passed"


def test_the_reason_of_a_passed_value_that_exceeds_the_bound_is_the_baseline() -> None:
    rows = [row("none", 40.0), row("x", 16.0, above_baseline=-1.0)]
    check = check_x(PSNR, rows)
    assert (check.state, check.value, kinds(check)) == ("passed", 16.0, [ReasonKind.BASELINE_REACHES_BOUND])


def test_an_undefended_arm_that_was_not_measured_says_what_passed_the_bound_behind_a_defence() -> None:
    unplayed = row("none", attack="b", status="not played", message="not enough time")
    inputs = collect_evidence(SCENARIO, [row("none", 9.0), unplayed, row("x", 20.0)], [])
    none, x = check_bounds(inputs, [PSNR], ["none", "x"])
    assert (none.state, x.state, kinds(x)) == ("not measured", "failed", [])
    assert ReasonKind.OVERTAKEN in kinds(none)


def test_an_arm_with_opponents_is_looked_at() -> None:
    rows = [row("none", 40.0), row("x vs quiet", 40.0)]
    scenario = SCENARIO | {"opponents": {"quiet": {}}}
    assert "x vs quiet" in collect_evidence(scenario, rows, []).gated_arms


def test_every_bound_of_a_metric_counts() -> None:
    assert [bound.limit for bound in parse_bounds(["5", "psnr=30"], "pixels", ["psnr"])] == [5.0, 30.0]


def test_a_bound_on_another_metric_is_not_passed_by_guesses_that_psnr_compares() -> None:
    rows = [row("none", 40.0, ssim=0.9), row("x", 9.0, ssim=0.6, above_baseline=-1.0)]
    assert states(Bound("ssim", 0.5), *rows) == {"none": "failed", "x": "inconclusive"}


def test_nothing_passes_that_nothing_shows() -> None:
    """Attacks that find nothing anywhere, did not answer, or did not come to an end show nothing."""
    assert states(PSNR, row("none", 9.0), row("x", 9.0)) == {"none": "inconclusive", "x": "inconclusive"}
    assert states(PSNR, row("x", 9.0)) == {"x": "inconclusive"}
    silent = row("x", None, status="failed", message="raised")
    assert states(PSNR, row("none", 40.0), silent)["x"] == "not measured"
    assert states(PSNR, row("none", 40.0), row("x", 9.0), finished=False) == {"none": "failed", "x": "not measured"}
    assert states(PSNR, row("none", 40.0), row("x", 40.0, identified=0.0))["x"] == "inconclusive"
    assert states(PSNR, row("none", 40.0), row("x", 40.0, above_baseline=0.0))["x"] == "passed"
    assert states(PSNR, row("none", 40.0), row("x", 40.0, above_baseline=None))["x"] == "not measured"
    check = check_x(PSNR, [row("none", 40.0)])
    assert (check.state, kinds(check)) == ("not measured", [ReasonKind.NO_RECONSTRUCTION_ATTACK])


def test_what_was_recorded_never_passes_and_a_distance_that_may_be_a_mistake_is_told() -> None:
    arms = {"none": [], "x": [{"name": f"{Recorded.__module__}:{Recorded.__name__}"}]}
    for far, told in ((0.6, True), (0.4, False)):
        rows = [row("none", 40.0, distortion=0.0), row("x", 9.0, knowledge=["labels"], distortion=far)]
        check = check_x(PSNR, rows, SCENARIO | {"arms": arms})
        facts = {ReasonKind.DOUBT: Doubt(Reason.DEFENCES_UNKNOWN, "")}
        facts |= {ReasonKind.WRONG_REPLAY_SETTINGS: far} if told else {}
        assert (check.state, dict(check.reasons)) == ("inconclusive", facts)


def test_a_distance_is_passed_from_below() -> None:
    of = {"none": 0.01, "x": 0.31, "y": 0.3}
    rows = [row(arm, 20.0, lpips_alex=value) for arm, value in of.items()]
    assert states(LPIPS, *rows) == {"none": "failed", "x": "passed", "y": "failed"}
    found = {check.arm: check.value for check in check_bounds(collect_evidence(SCENARIO, rows, []), [LPIPS], list(of))}
    assert found == of
    nearest = [row("x", 20.0, lpips_alex=0.9), row("x", 20.0, "b", lpips_alex=0.4)]
    check = check_x(LPIPS, nearest)
    assert (check.value, check.by and check.by[0]) == (0.4, "b")
    assert states(LPIPS, *(row(arm, 20.0, lpips_alex=None) for arm in of))["x"] == "not measured"


LABELS = Bound("label_accuracy", 0.9)


def labels_of(arm: str, found: Sequence[float], attack: str = "a", batch: int = 1, **more: Any) -> list[dict[str, Any]]:
    """Updates of samples of ten classes, and the share of each update's labels that an attack found."""
    return [
        row(arm, 9.0, attack, batch, victim=victim, sample=sample, label_accuracy=share, **more)
        | {"true_label": (victim * batch + sample) % 10}
        for victim, share in enumerate(found)
        for sample in range(batch)
    ]


def test_labels_that_were_given_are_not_found() -> None:
    given = {"knowledge": ["defence", "code", "labels"]}
    rows = [*labels_of("none", [1] * 8), *labels_of("x", [1, 0] * 4), *labels_of("x", [1] * 8, "b", **given)]
    assert states(LABELS, *rows) == {"none": "failed", "x": "passed"}
    assert states(LABELS, *rows, *labels_of("y", [1] * 8, above_baseline=-1.0))["y"] == "failed"
    found = [*labels_of("none", [1] * 8, **given), *labels_of("x", [1] * 8, **given)]
    only = check_x(LABELS, found)
    assert dict(only.reasons) == {ReasonKind.NO_RESULT: ("a", "ok", "", Missing.LABELS_GIVEN)}


def test_of_many_attackers_who_guess_none_names_labels() -> None:
    """At batch 1 one of a dozen is right about any given sample."""
    rng = np.random.default_rng(3)
    bare = [one for i in range(12) for one in labels_of("none", [1] * 16, f"a{i}")]
    for _ in range(20):
        guesses = rng.integers(10, size=(12, 16)) == 0
        assert guesses.any(0).sum() > 4
        rows = [one for i, found in enumerate(guesses) for one in labels_of("x", found.astype(float), f"a{i}")]
        assert states(LABELS, *bare, *rows) == {"none": "failed", "x": "passed"}


def test_labels_that_luck_may_name_pass_nothing() -> None:
    few = [*labels_of("none", [1] * 2), *labels_of("x", [1] * 2)]
    check = check_x(LABELS, few)
    assert (check.state, check.value) == ("inconclusive", 1.0)
    assert dict(check.reasons) == {ReasonKind.LABEL_BASELINE: (0.5, 2), ReasonKind.NOT_SIGNIFICANT: None}
    assert states(LABELS, *labels_of("none", [1]), *labels_of("x", [0]))["x"] == "inconclusive", (
        "without a defence, luck too"
    )
    alike = [one | {"true_label": 1} for one in [*labels_of("none", [1] * 8), *labels_of("x", [1] * 8)]]
    assert states(LABELS, *alike) == {"none": "inconclusive", "x": "inconclusive"}, "naming one label finds all"


def test_a_closed_form_that_fits_no_sample_names_no_label() -> None:
    """Its rows have figures: those of grey images and of a label that nobody asked for."""
    scenario = SCENARIO | {"attacks": [{"name": "analytic", "label": "a"}]}
    rows = [*labels_of("none", [1] * 8), *labels_of("x", [0] * 8, status="diverged")]
    check = check_x(LABELS, rows, scenario)
    assert check.state == "passed"
    silent = [row(arm, 40.0 if arm == "none" else None, victim=v, status=s) for arm, s in ARMS for v in range(8)]
    check = check_x(PSNR, silent, scenario)
    assert check.state == "not measured", "without a figure nothing is measured"


ARMS = (("none", "ok"), ("x", "diverged"))


@pytest.mark.parametrize("others", [0, 1, 11])
@pytest.mark.parametrize("wholly", [0, 1, 4, 7])
def test_updates_that_are_read_wholly_are_no_pass(wholly: int, others: int) -> None:
    """However many attackers find nothing beside the one who reads them, and although most updates are not read."""
    rows = labels_of("x", [*[1.0] * wholly, *[0.5] * (8 - wholly)], batch=4)
    rows += [one for i in range(others) for one in labels_of("x", [0.25] * 8, f"b{i}", batch=4)]
    rows += [one for i in range(others) for one in labels_of("none", [0.25] * 8, f"b{i}", batch=4)]
    check = check_x(LABELS, [*labels_of("none", [1] * 8, batch=4), *rows])
    expected = {0: {"passed"}, 1: {"failed", "inconclusive"}}.get(wholly, {"failed"})
    assert check.state in expected
    assert check.value == {0: 0.5, 7: 7.5 / 8}.get(wholly, 1.0), "of all labels, where these are past the bound"
    assert check.state != "failed" or (check.exceeding, check.samples) == (4 * wholly, 32)


@pytest.mark.parametrize(
    ("classes", "updates", "batch", "rest"), [(10, 8, 32, 0.7), (10, 16, 32, 0.7), (2, 64, 8, 0.4), (2, 32, 4, 0.5)]
)
@pytest.mark.parametrize("clients", [1, 64])
def test_what_guesses_do_not_reach_as_often_is_no_pass(
    classes: int, updates: int, batch: int, rest: float, clients: int
) -> None:
    """Where batches are large, classes are few or one client answers in every round, the bounds on luck are wide."""
    rng = np.random.default_rng(1)
    labels = rng.integers(classes, size=(updates, batch))
    whole = updates * 3 // 4
    made = labels_of("x", [*[1.0] * whole, *[rest] * (updates - whole)], batch=batch)
    rows = [
        one | {"true_label": int(own), "victim": one["victim"] % clients, "round": one["victim"] // clients}
        | {"label_baseline": even_guess(torch.tensor(labels[one["victim"]]), classes)}
        for one, own in zip(made, labels.flatten(), strict=True)
    ]  # fmt: skip
    bare = [one | {"arm": "none", "label_accuracy": 1.0} for one in rows]
    assert states(LABELS, *bare, *rows)["x"] != "passed"
    guesses = [one | {"label_accuracy": one["label_baseline"]} for one in rows]
    [found] = collect_label_inferences(guesses)
    assert found.reaching(0.9) == 0 or not found.may_reach(0.9)


def test_repeats_are_attempts_of_their_own() -> None:
    """Who restarts keeps the best, which need not be the first; repeated labels prove no more."""
    bare, repeats = labels_of("none", [1] * 8), [labels_of("x", [0] * 8, repeat=i) for i in range(3)]
    rows = [one for each in repeats for one in each]
    assert states(LABELS, *bare, *rows, *labels_of("x", [1] * 8, repeat=3)) == {"none": "failed", "x": "failed"}
    assert states(LABELS, *bare, *rows)["x"] == "passed"
    four = [one for i in range(8) for one in labels_of("x", [1] * 2, repeat=i)]
    assert not any(each.luck < LUCK for each in collect_label_inferences(four))


def test_attackers_without_time_leave_the_guess_as_it_is() -> None:
    """Their rows have no label: the commonest found 0 % beside them, and nothing was beyond luck."""
    late = [one | {"true_label": None} for one in labels_of("none", [0] * 8, "b", status=UNPLAYED)]
    for one in late:
        one["label_accuracy"] = None
    rows = [*labels_of("none", [1] * 8), *late]
    [found] = collect_label_inferences(rows)
    assert found.guesses.commonest == 1 / 8
    assert found.attempts == 1
    assert not found.lucky


def test_what_has_no_label_to_compare_is_no_answer() -> None:
    rows = [*labels_of("none", [1] * 8), *labels_of("x", [0] * 8)]
    for one in rows[9:]:
        one["label_accuracy"] = None
    assert states(LABELS, *rows)["x"] == "not measured"


def test_the_budget_stands_beside_a_passed_check() -> None:
    """0 % after next to no search says next to nothing."""
    bare = labels_of("none", [1] * 8, batch=2)
    rows = labels_of("x", [0] * 8, "idlg batch 2, adaptive", 2, iterations=2, seconds=0.5, family="idlg")
    rows[0]["iterations"] = 1
    same = [one | {"attack": "a", "iterations": 0, "seconds": 1.0} for one in rows]

    given = [one | {"attack": "g", "knowledge": ["labels"], "iterations": 4800} for one in rows]
    absent = [one | {"attack": "n", "status": "not applicable", "seconds": 400.0} for one in rows]

    def budget(*rows: dict[str, Any], **scenario: Any) -> Any:
        check = check_x(LABELS, [*bare, *rows], SCENARIO | scenario)
        assert check.state == "passed"
        return dict(check.reasons)[ReasonKind.BUDGET]

    assert budget(*rows, *same, *given, *absent) == ((("idlg", 1, 2),), False, 12.0)
    assert budget(*same) == ((), False, 8.0)
    assert budget(*same, attacks=[{"name": "analytic", "label": "a"}]) == ((), True, 8.0)


def test_a_share_of_labels_that_is_no_number_is_not_measured() -> None:
    nan = float("nan")
    rows = [*labels_of("none", [1] * 8), *labels_of("x", [nan] * 8, label_baseline=nan)]
    check = check_x(LABELS, rows)
    assert check.state == "not measured"
    assert collect_label_inferences(rows[8:]) == []


def guessed(rng: np.random.Generator, labels: np.ndarray, prior: np.ndarray, how: str) -> list[float]:
    """Shares of the labels (updates, batch) that an attacker finds who knows the prior and sees no update."""
    size, shares = labels.shape[1], []
    for own in labels:
        if how == "drawn":
            named = rng.choice(len(prior), size, p=prior)
        elif how == "one":
            named = np.full(size, rng.integers(len(prior)))
        else:
            named = np.repeat(np.arange(len(prior)), np.floor(prior * size + 0.5).astype(int))[:size]
        shares.append(label_accuracy(torch.tensor(own), torch.tensor(np.resize(named, size))))
    return shares


@pytest.mark.parametrize("how", ["drawn", "one", "proportion"])
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("skew", ["even", "two classes", "one a client", "two a client"])
def test_luck_is_told_as_such(how: str, batch: int, skew: str) -> None:
    """Of guesses that know how often labels are, the best is beyond luck in one of twenty runs at most."""
    rng, beyond, runs = np.random.default_rng(5), 0, 40
    prior = np.full(10, 0.1) if skew != "two classes" else np.array([0.5, 0.5, *[0.0] * 8])
    for _ in range(runs):
        each = {"one a client": 1, "two a client": 2}.get(skew, 0)
        few = [rng.choice(10, each, replace=False) if each else np.arange(10) for _ in range(8)]
        of = [prior[own] / prior[own].sum() for own in few]
        labels = np.stack([rng.choice(own, batch, p=share) for own, share in zip(few, of, strict=True)])
        rows = []
        for i in range(1 if how == "proportion" else 12):
            made = labels_of("x", guessed(rng, labels, prior, how), f"a{i}", batch=batch)
            rows += [
                one | {"true_label": int(own), "label_baseline": even_guess(torch.tensor(update), 10)}
                for one, own, update in zip(made, labels.flatten(), np.repeat(labels, batch, 0), strict=True)
            ]
        beyond += any(not one.lucky or one.whole for one in collect_label_inferences(rows))
    assert beyond <= max(2, runs // 20)


def scored(arm: str, apart: float, count: int = 2000, attack: str = "m", **more: Any) -> dict[str, Any]:
    """Candidates of whom members score higher by `apart` of the spread."""
    scores = [
        {"kind": kind, "sample": i, "score": i / count + shift, "control": 0.0}
        for kind, shift in (("member", apart), ("non-member", 0.0))
        for i in range(count)
    ]
    usual = {"victim": 0, "round": 0, "repeat": 0, "metric": "auc", "status": "ok", "message": None}
    return usual | {"arm": arm, "attack": attack, "scores": scores} | more


def of_members(bound: Bound, *rows: dict[str, Any], finished: bool = True) -> dict[str, Check]:
    inputs, arms = collect_evidence(SCENARIO, [], rows, finished), list(dict.fromkeys(one["arm"] for one in rows))
    return {check.arm: check for check in check_bounds(inputs, [bound], arms)}


def test_membership_passes_where_its_interval_is_below_the_bound() -> None:
    """Uniform scores, members' higher by d: the AUC is 1 - (1 - d)^2 / 2, and a share d of them is above all others."""
    rows = scored("none", 0.3), scored("x", 0.01)
    found = of_members(Bound("membership.auc", 0.6), *rows)
    assert found["none"].value == pytest.approx(1 - 0.7**2 / 2, abs=1e-3)
    assert {arm: check.state for arm, check in found.items()} == {"none": "failed", "x": "passed"}
    found = of_members(Bound("membership.tpr", 0.1), *rows)
    assert found["none"].value == pytest.approx(0.3, abs=2e-3)
    assert {arm: check.state for arm, check in found.items()} == {"none": "failed", "x": "passed"}
    for check in found.values():
        assert (check.by, check.interval and check.interval.value) == (("m",), check.value)
    assert dict(found["x"].reasons) == {ReasonKind.SHARE_BUDGET: ((("m", 1),), None)}
    near = of_members(Bound("membership.auc", 0.52), *rows)["x"]
    assert (near.state, kinds(near)) == ("inconclusive", [ReasonKind.INTERVAL_REACHES])
    few = of_members(Bound("membership.tpr", 0.1), scored("none", 0.3), scored("x", 0.01, 500))["x"]
    assert (few.state, kinds(few)) == ("not measured", [ReasonKind.FEW_NON_MEMBERS])
    useless = of_members(Bound("membership.auc", 0.6), scored("none", 0.0), scored("x", 0.0))["x"]
    assert useless.state == "inconclusive"
    assert of_members(Bound("membership.auc", 0.6), *rows, finished=False)["x"].state == "not measured"


def test_no_share_passes_that_an_attack_did_not_answer_for() -> None:
    """A victim on which it raised, one that it never met, and an attack that works and was not played here."""
    bound, silent = Bound("membership.auc", 0.6), {"scores": None, "status": "failed", "message": "out of memory"}
    bare = [scored("none", 0.3), scored("none", 0.3, victim=1)]
    failed = {ReasonKind.NO_RESULT: ("m", "failed", "out of memory", None)}
    raised = of_members(bound, *bare, scored("x", 0.01), scored("x", 0.0, victim=1, **silent))["x"]
    assert (raised.state, dict(raised.reasons)) == ("not measured", failed)
    unmet = of_members(bound, *bare, scored("x", 0.01))["x"]
    assert (unmet.state, dict(unmet.reasons)) == ("not measured", {ReasonKind.NOT_RUN_ON: ("m", (1, 2))})
    weak = [scored(arm, 0.01, attack="weak", victim=i) for arm in ("none", "x") for i in (0, 1)]
    missing = of_members(bound, *bare, *weak)["x"]
    assert (missing.state, dict(missing.reasons)) == ("not measured", {ReasonKind.NOT_RUN_ON: ("m", (2, 2))})
    whole = scored("x", 0.01), scored("x", 0.01, victim=1)
    for name, limit in (("membership.auc", 0.6), ("membership.tpr", 0.1)):
        assert of_members(Bound(name, limit), *bare, *whole)["x"].state == "passed"
    found = of_members(bound, *bare, scored("x", 0.3), scored("x", 0.0, victim=1, **silent))["x"]
    assert found.state == "failed", "what was found counts, whatever else is missing"


def test_no_membership_passes_for_attackers_who_do_not_know_the_defence() -> None:
    """One who does has to work, and to make use of what the code tells."""
    bound, bare = Bound("membership.auc", 0.6), scored("none", 0.3)
    for more in ([], ["defence"], ["code"]):
        spec = {"name": "membership", "label": "m", "knowledge": ["candidates", *more]}
        inputs = collect_evidence(SCENARIO | {"attacks": [spec]}, [], [bare, scored("x", 0.01)])
        [check] = check_bounds(inputs, [bound], ["x"])
        assert (check.state, kinds(check)) == ("inconclusive", [ReasonKind.NO_ADAPTIVE_MEMBERSHIP])
    unused = scored("x", 0.01, reason=Reason.UNDECLARED, message="noise takes few values")
    doubt = {ReasonKind.DOUBT: Doubt(Reason.UNDECLARED, unused["message"])}
    assert dict(of_members(bound, bare, unused)["x"].reasons) == doubt
    blind = [scored(arm, apart, attack="non-adaptive") for arm, apart in (("none", 0.3), ("x", 0.01))]
    weak = [scored(arm, 0.0) for arm in ("none", "x")]
    assert kinds(of_members(bound, *blind, *weak)["x"]) == [ReasonKind.NO_ADAPTIVE_MEMBERSHIP]
    assert of_members(bound, *blind, bare, scored("x", 0.01))["x"].state == "passed"


def named(arm: str, hits: int, of: int = 100, **more: Any) -> list[dict[str, Any]]:
    return [row(arm, **{"psnr": 9.0, "victim": i, "top1": float(i < hits), "people": 40} | more) for i in range(of)]


def test_identity_passes_where_its_interval_is_below_the_bound() -> None:
    bound, bare = Bound("identity", 0.1), named("none", 90)
    assert collect_evidence(SCENARIO, bare, []).measures[-1] == "identity"
    assert states(bound, *bare, *named("x", 2), *named("y", 10)) == {"none": "failed", "x": "passed", "y": "failed"}
    assert states(bound, *bare, *named("x", 5))["x"] == "inconclusive", "its interval reaches 11 %"
    assert states(bound, *named("none", 2), *named("x", 2))["x"] == "inconclusive", "guessing gets as much"
    assert states(bound, *bare, *named("x", 2), finished=False)["x"] == "not measured"
    silent = row("x", None, attack="b", top1=None, people=40, status="failed", message="OutOfMemoryError")
    assert states(bound, *bare, *named("x", 2), silent)["x"] == "not measured"
    other = row("x", None, attack="b", top1=None, people=40, status="not applicable", message="no attention")
    assert states(bound, *bare, *named("x", 2), other)["x"] == "passed"


@pytest.mark.parametrize(
    "more",
    [{"knowledge": []}, {"knowledge": ["labels"]}, {"reason": Reason.BUFFERS_NOT_SOLVED}, {"fit": 0.9}, {"fit": None}],
)
@pytest.mark.parametrize("bare_psnr", [12.0, 40.0])
def test_no_identity_passes_without_a_valid_adaptive_attack(more: dict[str, Any], bare_psnr: float) -> None:
    rows = [*named("none", 90, psnr=bare_psnr), *named("x", 2, **more)]
    assert states(Bound("identity", 0.1), *rows)["x"] == "inconclusive"


def test_no_identity_passes_that_an_attack_did_not_answer_for() -> None:
    """An attack that works without a defence has to answer on the samples whose people it names there."""
    bound, bare = Bound("identity", 0.1), [*named("none", 90), *named("none", 0, attack="never")]
    never, deaf = named("x", 0, attack="never"), {"top1": None, "status": "not applicable", "message": "no layer"}
    silent = [{**one, **deaf} for one in named("x", 0)]
    unfit = {ReasonKind.NO_RESULT: ("a", "not applicable", "no layer", None)}
    check = check_x(bound, [*bare, *never, *silent])
    assert (check.state, dict(check.reasons)) == ("not measured", unfit)
    assert states(bound, *bare, *never)["x"] == "not measured"
    assert states(bound, *bare, *never, *named("x", 0, of=89))["x"] == "not measured", "one was not attacked here"
    assert states(bound, *bare, *never, *named("x", 0, of=90))["x"] == "passed"
    far = [{**one, "status": "diverged"} for one in named("x", 0)]
    assert states(bound, *bare, *never, *far)["x"] == "not measured"
    assert states(bound, *bare, *never, *named("x", 11), *silent[:1])["x"] == "failed"


def test_repeats_are_no_samples_of_identity() -> None:
    bound = Bound("identity", 0.1)

    def repeated(arm: str, hits: int) -> list[dict[str, Any]]:
        return [one for i in range(15) for one in named(arm, 4 if i < hits else 0, of=4, repeat=i)]

    check = check_x(bound, [*repeated("none", 15), *repeated("x", 0)])
    assert (check.state, kinds(check)) == ("inconclusive", [ReasonKind.INTERVAL_REACHES]), "four samples, not 60"
    once = check_x(bound, [*repeated("none", 15), *repeated("x", 1)])
    assert (once.state, once.value) == ("failed", 1.0)
    guessed = [one for i in range(15) for one in named("none", 100 if i < 1 else 0, repeat=i)]
    assert check_x(Bound("identity", 0.5), [*guessed, *named("x", 0)]).state == "passed"
    few = [one | {"people": 10} for one in guessed]
    lucky = check_x(Bound("identity", 0.5), [*few, *named("x", 0, people=10)])
    assert lucky.state == "inconclusive", "fifteen guesses among ten people name as many"


def test_identity_is_of_what_all_attacks_name_together() -> None:
    """Attacks that name other people each are added up, on the samples of any of them."""
    bare, others = [*named("none", 90), *named("none", 90, attack="b")], named("x", 10, attack="b")
    b = [{**one, "top1": float(5 <= one["victim"] < 10)} for one in others]
    check = check_x(Bound("identity", 0.1), [*bare, *named("x", 5), *b])
    assert (check.state, check.value, check.by) == ("failed", 0.1, ("a", "b"))
    alone = check_x(Bound("identity", 0.1), [*bare, *named("x", 5), *others])
    assert (alone.value, alone.by) == (0.1, ("b",))
    many = named("x", 0, of=1000, attack="c")
    apart = check_x(Bound("identity", 0.1), [*bare, *named("x", 5), *b, *many])
    assert apart.state == "failed", "samples that the two were not played on do not dilute theirs"


def test_no_share_passes_a_bound_that_nothing_reached_without_a_defence() -> None:
    """Scores uniform, members' higher by 0.06: an AUC of 0.558, well above chance, and 6 % found."""
    rows = [scored("none", 0.06), scored("x", 0.0)]
    for name, reached, beyond in (("membership.auc", 0.55, 0.65), ("membership.tpr", 0.05, 0.5)):
        assert of_members(Bound(name, reached), *rows)["x"].state == "passed"
        check = of_members(Bound(name, beyond), *rows)["x"]
        assert (check.state, kinds(check)) == ("inconclusive", [ReasonKind.NOT_EXCEEDED])
    assert kinds(check_x(Bound("identity", 0.3), [*named("none", 20), *named("x", 0)])) == [ReasonKind.NOT_EXCEEDED]
    others = [{**one, "top1": 1 - one["top1"]} for one in named("none", 80, attack="b")]
    both = [*named("none", 20), *others, *named("x", 0), *named("x", 0, attack="b")]
    assert states(Bound("identity", 0.3), *both)["x"] == "passed", "they reach it together"


def test_bounds_have_names_of_what_is_measured() -> None:
    names = boundable_metrics("pixels")
    assert parse_bounds(["15"], "pixels", names) == [PSNR]
    assert parse_bounds(["0.5"], "tokens", boundable_metrics("tokens")) == [Bound("token_accuracy", 0.5)]
    assert parse_bounds(["LPIPS=0.3", "ssim = 0.5", "labels=0.9"], "pixels", names) == [
        LPIPS, Bound("ssim", 0.5), Bound("label_accuracy", 0.9),
    ]  # fmt: skip
    assert parse_bounds(["membership.tpr=0.1"], "pixels", [*names, *MEMBERSHIP]) == [Bound("membership.tpr", 0.1)]
    for text, said in {
        "ssimm=0.5": "'ssimm' is not measured here; did you mean 'ssim'? (valid: ",
        "membership.tpr=0.1": "not measured here",
        "identified=1": "not measured here",
        "bp_ki=1": "not measured here",
        "tokens=0.1": "not measured here",
        "psnr=much": "'much'",
        "nan": "'nan'",
        "labels=15": "is a share",
    }.items():
        with pytest.raises(UserError, match=re.escape(said)):
            parse_bounds([text], "pixels", names)
    with pytest.raises(UserError, match="is a share"):
        parse_bounds(["15"], "tokens", boundable_metrics("tokens"))


def document(values: dict[int, float], samples: str = "s", arm: str = "x", metric: str = "psnr") -> dict[str, Any]:
    found = [
        {"arm": arm, "round": 0, "batch": 1, "victim": v, "leaked": int(x >= 30), "attacks": {"a": 100}}
        | {"values": {metric: x}}
        for v, x in values.items()
    ]
    return {"metrics": [metric], "runs": [{"arms": [arm], "samples": samples, "finished": True, "updates": found}]}


def change(now: dict[int, float], then: dict[int, float], **more: Any) -> Change:
    [found] = compare_with_baseline(
        document(now, **more), document(then, **({"samples": "s"} | {"metric": more.get("metric", "psnr")}))
    )
    return found


def test_more_than_chance_is_a_paired_t_test_on_the_same_samples() -> None:
    then = {v: 10.0 + v for v in range(4)}
    found = change({v: x + 2 + (-1) ** v for v, x in then.items()}, then)  # differences 3, 1, 3, 1
    assert (found.test, found.updates, found.difference) == ("paired t", 4, 2.0)
    assert found.p == pytest.approx(float(t.sf(2 / (sqrt(4 / 3) / sqrt(4)), 3)))
    assert found.state == "failed"
    assert change(then, then).state == "passed"
    assert change(then, then).p == 1.0
    assert change({v: x - 5 for v, x in then.items()}, then).state == "passed"
    assert change({v: x + 3 * (-1) ** v + 0.1 for v, x in then.items()}, then).state == "passed"
    nearer = change({v: 0.2 + v / 100 for v in then}, {v: 0.5 + v / 50 for v in then}, metric="lpips_alex")
    assert nearer.state == "failed", "a distance that falls"


def test_one_client_that_newly_leaks_fails_and_is_named() -> None:
    """Of any number of clients; the t of one difference beside zeros is 1, so no paired test ever finds it."""
    then = dict.fromkeys(range(20), 10.0)
    found = change(then | {7: 40.0}, then)
    assert found.p == pytest.approx(float(t.sf(1, 19)))
    assert (found.state, found.newly) == ("failed", ((0, 1, 7),))
    assert change(then | {7: 29.9}, then).state == "passed"
    leaking = then | {7: 30.0}
    assert change(leaking | {7: 35.0}, leaking).newly == (), "it leaked then, too"
    assert change(then, leaking).newly == (), "nor what leaks no more"
    assert change(then | {7: 40.0}, then, samples="others").newly == (), "other samples are other clients' luck"
    assert change({0: 40.0}, {0: 10.0}).state == "failed"
    assert change(then | {20: 40.0}, then).newly == (), "nobody looked at client 20 then"


def test_an_update_leaks_by_the_runs_own_criterion() -> None:
    rows = [row("x", 30.0), row("x", 30.0, "b"), row("x", 20.0, sample=1, identified=0.0), row("x", 14.0, victim=1)]
    found = updates_of_x(rows)
    assert [(one["victim"], one["leaked"]) for one in found] == [(0, 1), (1, 0)]


def test_other_samples_are_compared_without_pairs() -> None:
    """Welch's t of two small samples, by its formula."""
    now, then = {0: 20.0, 1: 22.0, 2: 24.0}, {0: 10.0, 1: 11.0, 2: 15.0}
    found = change(now, then, samples="others")
    a, b = 4 / 3, 7 / 3  # variances 4 and 7 over 3
    freedom = (a + b) ** 2 / (a**2 / 2 + b**2 / 2)
    assert found.test == "Welch t"
    assert found.p == pytest.approx(float(t.sf(10 / sqrt(a + b), freedom)))
    assert found.state == "failed"


def test_what_cannot_be_compared_is_not_taken_for_unchanged() -> None:
    assert change({0: 12.0}, {0: 10.0}).state == "inconclusive"
    assert change({0: 10.0}, {0: 10.0}).state == "passed"
    assert change({0: 10.0}, {}).state == change({}, {0: 10.0}).state == "not measured"
    both = {"metrics": ["psnr"], "runs": [{"arms": ["x", "y"], "samples": "s", "finished": True, "updates": []}]}
    assert [one.state for one in compare_with_baseline(both, document({0: 1.0}))] == ["not measured"] * 2
    [renamed] = compare_with_baseline(document({0: 9.0}, arm="new"), document({0: 9.0}))
    assert (renamed.state, dict(renamed.reasons)) == ("passed", {ChangeReasonKind.OTHER_ARM: "x"})


def test_what_a_baseline_has_and_this_run_lacks_is_named() -> None:
    then = document({0: 10.0, 1: 11.0})
    now = document({0: 10.0, 1: 11.0}, arm="y")
    then["runs"][0]["arms"], now["runs"][0]["arms"] = ["x", "y"], ["y", "z"]
    gone = [one for one in compare_with_baseline(now, then) if one.arm == "x"]
    assert [one.state for one in gone] == ["not measured"]


@pytest.mark.parametrize("samples", ["s", "others"])
def test_weaker_attacks_and_unfinished_runs_acquit_of_nothing(samples: str) -> None:
    values = {0: 10.0, 1: 11.0, 2: 12.0}
    then, now = document(values), document({v: x - 5 for v, x in values.items()}, samples)
    assert compare_with_baseline(now, then)[0].state == "passed"
    one = now["runs"][0]["updates"][1]
    for made in ({}, {"b": 100}, {"a": 49}):
        one["attacks"] = made
        [found] = compare_with_baseline(now, then)
        weaker = {ChangeReasonKind.FEWER_ITERATIONS: ("a",)}
        assert (found.state, dict(found.reasons)) == ("not measured", weaker)
    one["attacks"] = {"a": 50, "b": 1}
    assert compare_with_baseline(now, then)[0].state == "passed"
    now["runs"][0]["finished"] = False
    assert compare_with_baseline(now, then)[0].state == "not measured"
    one["values"], one["leaked"] = {"psnr": 40.0}, 1
    assert compare_with_baseline(now, then)[0].state == ("failed" if samples == "s" else "not measured")


def test_several_comparisons_are_corrected() -> None:
    then, now = {0: 1.0, 1: 2.0, 2: 3.0}, {0: 2.0, 1: 4.1, 2: 4.0}
    alone = change(now, then)
    many = [document(side) for side in (now, then)]
    for one in many:
        one["runs"] *= 3
    assert alone.p is not None
    assert [found.p for found in compare_with_baseline(*many)] == [pytest.approx(3 * alone.p)] * 3


def test_an_updates_value_is_the_mean_of_the_nearest_to_each_sample() -> None:
    rows = [row("x", 10.0), row("x", 30.0, "b"), row("x", 20.0, sample=1), row("x", 1.0, victim=1), row("none", 9.0)]
    found = updates_of_x(rows)
    assert [(one["victim"], one["values"]["psnr"]) for one in found] == [(0, 25.0), (1, 1.0)]
    assert [one["attacks"] for one in found] == [{"a": 0, "b": 0}, {"a": 0}]
    silent = [row("x", 10.0), row("x", None, "b", status="failed"), row("x", None, "c", status="not applicable")]
    silent.append(row("x", 9.0, "d", status="diverged"))
    [one] = updates_of_x(silent)
    assert one["attacks"] == {"a": 0}
    early = [row("x", 10.0, repeat=repeat, iterations=7) for repeat in (0, 1)]
    planned = SCENARIO | {"attacks": [{"name": "b", "label": "a", "iterations": 300}]}
    assert [updates_of_x(early, of)[0]["attacks"] for of in (SCENARIO, planned)] == [
        {"a": 14}, {"a": 600}
    ]  # fmt: skip


class Stored:
    url = "runs/r"


def ruling(*rows: dict[str, Any], allow: bool = False, baseline: Any = None, bound: bool = True) -> Ruling:
    gated = GatedRun(Stored(), "w")  # type: ignore[arg-type]
    gated.__dict__.update(evidence=collect_evidence(SCENARIO, rows, []), samples="s", _status={})
    return Ruling([gated], [PSNR] if bound else [], allow, baseline)


def test_a_ruling_is_as_strict_as_its_worst_check(tmp_path: Path) -> None:
    bare = row("none", 40.0)
    for rows, verdict, allowed in (
        ([bare, row("x", 9.0), row("y", 9.0)], "passed", True),
        ([bare, row("x", 9.0), row("y", 30.0)], "failed", False),
        ([bare, row("x", 9.0)], "not measured", True),
        ([row("none", 9.0), row("x", 9.0), row("y", 9.0)], "not measured", True),
    ):
        found = ruling(*rows)
        assert found.verdict == verdict
        assert found.passed == (verdict == "passed")
        assert ruling(*rows, allow=True).passed == allowed
        for one in (found, ruling(*rows, allow=True)):
            jsonschema.validate(one.document(), make_gate_schema())
            suite = ElementTree.fromstring(one.junit())
            assert int(suite.attrib["tests"]) == len(suite) == 2
            assert int(suite.attrib["failures"]) == (verdict == "failed")
            assert one.document()["exit_code"] == (0 if one.passed else 3)
    assert ruling(bare, bound=False).verdict == "no bound"
    nothing = Ruling([], [PSNR])
    assert (nothing.verdict, nothing.passed) == ("not measured", False)
    assert 'errors="1"' in nothing.junit()
    file = tmp_path / "gate.json"
    file.write_text(json.dumps(ruling(bare, row("x", 9.0), row("y", 9.0)).document()))
    worse = ruling(bare, row("x", 9.0), row("y", 12.0), baseline=read_document(file), bound=False)
    assert {one.arm: one.state for one in worse.changes} == {"x": "passed", "y": "inconclusive"}
    jsonschema.validate(worse.document(), make_gate_schema())
    file.write_text(file.read_text().replace('"version": 2', '"version": 1'))
    with pytest.raises(UserError, match="not a --json file"):
        read_document(file)
    with pytest.raises(UserError, match="cannot be read"):
        read_document(tmp_path / "none.json")


def test_the_schema_refuses_what_a_ruling_never_says() -> None:
    good = ruling(row("none", 40.0), row("x", 9.0)).document()
    for change in ({"verdict": "safe"}, {"exit_code": 1}, {"more": 1}, {"runs": [{"arms": []}]}):
        assert not jsonschema.Draft202012Validator(make_gate_schema()).is_valid(good | change)


def test_mistakes_are_named_before_anything_is_played(tmp_path: Path) -> None:
    small = ("audit", "--model", "mlp", "--data", "digits", "--executor", "local")
    for arguments, expected in {
        (*small, "--fail-above", "tpr=1"): "'tpr' is not measured here",
        (*small, "--baseline", str(tmp_path / "no.json")): "cannot be read",
        ("gate", str(tmp_path), "--fail-above", "1"): "not a run folder",
        ("gate", str(tmp_path)): "--fail-above",
    }.items():
        code, output = run(*arguments)
        assert (code, expected in output) == (2, True), output


def commands(of: Any) -> list[str]:
    """All commands of rayfed in a document."""
    if isinstance(of, dict | list):
        return [one for part in (of.values() if isinstance(of, dict) else of) for one in commands(part)]
    return [of] if isinstance(of, str) and of.startswith("rayfed ") else []


def test_examples_for_build_servers_are_yaml_whose_commands_are_understood() -> None:
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)]
    found = [command for block in blocks for command in commands(block)]
    assert len(blocks) == len(found) == 2
    for command in found:
        _, name, *options = shlex.split(command)
        context = get_command(app).commands[name].make_context(name, options)  # type: ignore[attr-defined]
        assert context.params["fail_above"] == ["15"]


DOCUMENT = REPOSITORY / "docs" / "gate.md"
SLEEPY = "--iterations 20 --batch 1 --images 2 --set data.train_samples=60"
FEW = """
from rayfed.audits import plan
plan.METHODS = tuple(one for one in plan.METHODS if one.name in ("columns", "inverting_gradients"))
from rayfed.cli import main
main()
"""
"""The command with one closed form and one search: the tutorials play all of them."""


def test_an_arm_of_several_defences_does_not_stand_for_the_first_of_them() -> None:
    prune, gaussian, own = {"name": "prune"}, {"name": "gaussian"}, {"name": "defences:ClipEach"}
    arms = {"none": [], "weak (0.5)": [prune], "prune (ratio 0.9)": [prune, gaussian], "mine": [own]}
    assert named_arm("prune", list(arms), {"arms": arms}) == "weak (0.5)"
    assert named_arm("prune (ratio 0.9)", list(arms), {"arms": arms}) == "prune (ratio 0.9)"
    assert {named_arm(name, list(arms), {"arms": arms}) for name in ("ClipEach", "defences.py:ClipEach")} == {"mine"}
    for wrong in ({"both": [prune, gaussian]}, {"one": [prune], "other": [prune]}, {"prune strongly": [gaussian]}):
        with pytest.raises(UserError, match="no arm 'prune'"):
            named_arm("prune", list(wrong), {"arms": wrong})


@pytest.mark.engine
def test_the_script_of_the_documentation_stops_a_build_that_leaks_and_no_other(tmp_path: Path) -> None:
    """Its data, attacks and budget are made few; one defence holds, its sigma made small leaks, as --baseline finds."""
    [script] = re.findall(r"```bash\n(#!/usr/bin/env bash\nset -e\n.*?)```", DOCUMENT.read_text(), re.DOTALL)
    budget = re.sub(r"--minutes \S+", f"{SLEEPY} --executor local", script)
    assert budget != script
    (bin_ := tmp_path / "bin").mkdir()
    (tmp_path / "few.py").write_text(FEW)
    (bin_ / "rayfed").write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/few.py "$@"\n')
    (bin_ / "rayfed").chmod(0o755)
    environment = os.environ | {"PATH": f"{bin_}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    found: dict[str, subprocess.CompletedProcess[str]] = {}
    for name, sigma in (("harmless", "1000"), ("leaking", "0.0001")):
        (tmp_path / "gate.sh").write_text(budget.replace("sigma: 0.5", f"sigma: {sigma}"))
        found[name] = subprocess.run(
            ["bash", "gate.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        written = json.loads((tmp_path / "gate.json").read_text())
        jsonschema.validate(written, make_gate_schema())
        ElementTree.parse(tmp_path / "gate.xml")
        if name == "harmless":
            shutil.copy(tmp_path / "gate.json", tmp_path / "baseline.json")
            [last] = tmp_path.glob("runs/audit-*")
    assert {name: done.returncode for name, done in found.items()} == {"harmless": 0, "leaking": 3}, found
    assert all(("build goes on" in done.stdout) == (done.returncode == 0) for done in found.values())
    assert re.search(r"^ gaussian .* FAILED$", found["leaking"].stdout.partition("since the baseline")[2], re.MULTILINE)
    since = ("--baseline", str(tmp_path / "baseline.json"))
    code, output = run("gate", str(last), "--fail-above", "15", *since)
    assert (code, "PSNR +0 2 1 PASSED" in output) == (0, True), output
    assert run("gate", str(last), "--arm", "none", "--fail-above", "15")[0] == 3
    assert run("gate", str(last), "--arm", "nobody", "--fail-above", "15")[0] == 2
    whole, short = (
        run("gate", str(last), "--arm", name, "--fail-above", "15") for name in ("gaussian (sigma 1000)", "gaussian")
    )
    assert whole == short == (0, whole[1]), "an audit's arm may be named by its defence alone"
    assert run("gate", str(last), "--fail-above", "lpips=0.1")[0] == 2


def test_a_gate_that_is_not_measured_says_what_to_do(tmp_path: Path) -> None:
    """As the run did: whoever gates it later has not seen that."""
    asked = """
name: weak
data: {name: digits, size: 8, train_samples: 20, test_samples: 20}
model: {name: mlp, hidden: [8]}
federation: {rounds: 1, clients: 2}
arms: {none: [], noise: [{name: gaussian, sigma: 1.0}]}
attacks: [{name: inverting_gradients, observes: gradient, iterations: 1, victims: 1, batch_size: 4}]
"""
    folder = runner.attack(scenarios.parse(asked), None, str(tmp_path), local, Progress())
    code, output = run("gate", folder.url, "--fail-above", "30")
    assert code == 3
    checks, _, step = output.partition("Next: ")
    assert "INCONCLUSIVE" in checks
    assert step.endswith("gate: NOT MEASURED")


def test_a_sweep_is_no_run(tmp_path: Path) -> None:
    """It has no attacks of its own, so nothing of its trials would be looked at."""
    sweep = small_sweep(tmp_path)
    code, output = run("gate", sweep.url, "--fail-above", "15", "--allow-unmeasured")
    assert code == 2
    assert "is a sweep" in output


@pytest.mark.parametrize(("gated", "said"), [(["--fail-above", "psnr=20"], True), (["--allow-unmeasured"], False)])
@pytest.mark.parametrize(
    ("stopped", "how", "code"), [(KeyboardInterrupt(), "interrupted", 130), (Killed(15), "killed by SIGTERM", 143)]
)
def test_a_gate_that_was_not_decided_says_so(
    gated: list[str], said: bool, stopped: BaseException, how: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(*_: Any, **__: Any) -> Any:
        raise stopped

    monkeypatch.setattr("rayfed.audits.run.run_audit", stops)
    ended, output = run("audit", "--model", "mlp", "--data", "digits", "--size", "8", "--executor", "local", *gated)
    assert ended == code
    assert (f"gate: NOT MEASURED: {how} before it was decided" in output) == said
    assert ("gate" in output) == said
