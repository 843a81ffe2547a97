"""The audit: from a model and data to a scenario, and from its rows to a sentence as strong as what was measured."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from time import monotonic, process_time, sleep
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor, nn

from rayfed import registry, scenario
from rayfed.analysis import audit
from rayfed.analysis.audit import Plan
from rayfed.analysis.loading import load
from rayfed.attacks.analytic import Analytic
from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.fit import with_fit
from rayfed.attacks.inverting_gradients import InvertingGradients
from rayfed.cli.options import of_fields
from rayfed.data.section import data_section
from rayfed.engine import attacking, auditing, fitting, rehearsing, runs
from rayfed.engine import audit as engine
from rayfed.engine.attacking import Allowance, Spare
from rayfed.engine.audit import pipelines
from rayfed.engine.auditing import Budget, _limit, _not_measured
from rayfed.engine.auditing import rehearsed as rehearse
from rayfed.engine.executor import Done
from rayfed.engine.fitting import Fitted
from rayfed.engine.inputs import Inputs, prepare
from rayfed.engine.local import LocalExecutor, local
from rayfed.engine.progress import AuditProgress, Progress
from rayfed.engine.rehearsing import Pace, Trial
from rayfed.errors import ClientError, ResourceError, UserError
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.findings import GRADIENT_FIT_TOL, findings
from rayfed.evidence.methods import FEWEST, METHODS, MOST, USEFUL, Method
from rayfed.models.build import build_model
from rayfed.models.describe import described
from rayfed.reasons import Reason
from rayfed.report.terminal_run import RunView
from rayfed.samples import Pixels
from rayfed.scenario import Scenario
from rayfed.store import exits
from rayfed.store.finding import Elsewhere, NotRun
from rayfed.store.folder import RunFolder
from rayfed.store.schemas import UNPLAYED, WANT_OF_TIME
from rayfed.update import LocalTraining, Observation
from tests.attack_fixtures import digit, observe
from tests.conftest import REPOSITORY
from tests.test_cli import run

IMAGES = Criterion.of("pixels", None)
LOCAL = ("--executor", "local")


def rehearsed(
    planned: Plan,
    said: list[str] | None = None,
    shrink: bool = True,
    seconds: float = 0.0,
    iterations: int | None = 1,
    printed: StringIO | None = None,
) -> tuple[Scenario, Allowance, Sequence[str]] | None:
    """Rehearse an audit with so many evaluations of each search, or in so many seconds.

    `said` gets what it says, `printed` its notes.
    """
    view = RunView(Console(file=printed or StringIO(), width=200))
    view.say = lambda *parts: (said if said is not None else []).append("".join(map(str, parts)))  # type: ignore[method-assign]
    return rehearse(planned, [], Budget(monotonic(), seconds, iterations=iterations), view, shrink)


def row(arm: str, batch: int, psnr: float | None, attack: str = "a", **more: Any) -> dict[str, Any]:
    usual = {
        "victim": 0,
        "sample": 0,
        "distortion": 0.0,
        "above_baseline": 5.0,
        "identified": 1.0,
        "knowledge": [],
        "fit": 1e-6,
    }
    usual |= {"status": "ok" if psnr is not None else "not applicable", "message": ""}
    return {"arm": arm, "batch_size": batch, "attack": attack, "psnr": psnr, **usual, **more}


def states(*rows: dict[str, Any]) -> dict[tuple[str, int], str]:
    return {(f.arm, f.batch): f.state for f in findings(rows, IMAGES)}


def plan(**changes: Any) -> Plan:
    digits = {"name": "digits", "size": 8, "train_samples": 40, "test_samples": 20}
    return Plan(**{"model": {"name": "mlp"}, "data": digits, "batches": [1, 8], "samples": 4, **changes})


def test_the_audit_is_a_scenario_that_fits_its_images() -> None:
    data = data_section(str(REPOSITORY / "scenarios" / "user_data" / "train.parquet"), 16)
    planned = plan(model={"name": "lenet"}, data=data, seed=7)
    s = scenario.parse(planned.scenario_text({audit.title(*search): 20 for search in planned.searches}))
    assert (s.data.name, s.seed, s.federation.clients) == ("parquet", 7, 4)
    assert prepare(s).data.sample.shape[1:] == (16, 16)
    assert next(iter(s.played)) == audit.UNDEFENDED
    assert {a.batch_size: a.victims for a in s.attacks} == {1: 4, 8: 1}


def test_closed_forms_come_first_and_every_attack_has_all_twins() -> None:
    planned = plan()
    s = scenario.parse(planned.scenario_text({audit.title(*search): 20 for search in planned.searches}))
    kinds = ["iterations" in attack.parameters for attack in s.attacks]
    assert kinds == sorted(kinds)
    twins = [(a.name, a.batch_size, tuple(a.knowledge)) for a in s.attacks]
    assert len(twins) == len(set(twins))
    assert all((name, batch, twin) in twins for name, batch, _ in twins for twin in audit.TWINS.values())


def test_all_attacks_of_the_list_are_registered() -> None:
    assert {method.name for method in METHODS} <= registry.table("attacks").keys()


@pytest.mark.parametrize(("data", "name"), [("digits", "digits"), ("{tmp}", "image_folder"), ("x.parquet", "parquet")])
def test_data_is_a_file_a_folder_or_a_name(data: str, name: str, tmp_path: Path) -> None:
    assert data_section(data.format(tmp=tmp_path), None)["name"] == name


def test_tables_and_texts_have_sections_of_their_own(tmp_path: Path) -> None:
    assert data_section("x.parquet", None, "ill") == {"name": "table", "path": "x.parquet", "label": "ill"}
    (tmp_path / "author").mkdir()
    (tmp_path / "author" / "a.txt").write_text("words")
    assert data_section(str(tmp_path), None) == {"name": "text", "root": str(tmp_path)}


def test_a_leak_is_near_beyond_guessing_and_told_apart() -> None:
    assert IMAGES.leaks(row("none", 1, 15.0))
    assert not IMAGES.leaks(row("none", 1, 14.9))
    assert not IMAGES.leaks(row("none", 1, 40.0, above_baseline=0.0))
    assert not IMAGES.leaks(row("none", 1, 40.0, identified=0.0))
    assert not IMAGES.leaks(row("none", 1, None))
    assert Criterion.of("pixels", 30.0).leaks(row("none", 1, 31.0))


def test_what_is_no_nearer_than_a_public_image_is_no_reconstruction_and_no_acquittal() -> None:
    assert IMAGES.leaks(row("none", 1, 20.0, above_public=1.0))
    assert not IMAGES.leaks(row("none", 1, 20.0, above_public=-1.0))
    rows = [row("none", 1, 30.0, above_public=9.0), row("x", 1, 20.0, above_public=-1.0)]
    [found] = [f for f in findings(rows, IMAGES) if f.arm == "x"]
    assert (found.state, found.reason) == ("inconclusive", Reason.PUBLIC_SAMPLE_AS_CLOSE)
    rows.append(row("x", 1, 18.0, above_public=2.0, sample=1))
    [found] = [f for f in findings(rows, IMAGES) if f.arm == "x"]
    assert (found.state, found.leaked, found.best, found.alike) == ("leaks", 1, 18.0, 1)


def test_a_state_is_as_strong_as_what_was_measured() -> None:
    leak, no, nothing = {"psnr": 20.0}, {"psnr": 9.0}, {"psnr": None}
    cases = {"a": (leak, leak, "leaks"), "b": (leak, no, "not reconstructed"), "c": (no, no, "inconclusive")}
    cases |= {"d": (no, leak, "leaks"), "e": (leak, nothing, "not measured"), "f": (nothing, nothing, "not measured")}
    for name, (bare, defended, expected) in cases.items():
        found = states(row("none", 1, **bare), row(name, 1, **defended))
        assert found[name, 1] == expected, name
    assert states(row("none", 1, 9.0)) == {("none", 1): "not reconstructed"}


@pytest.mark.parametrize(
    ("bare", "here"),
    [
        ([row("none", 1, 9.0)], Elsewhere.NO_LEAK),
        ([row("none", 1, 9.0, "b"), row("none", 1, None, status=UNPLAYED)], Elsewhere.NO_TIME),
        ([row("none", 1, 9.0, "b"), row("none", 1, None, status="failed")], Elsewhere.NO_RESULT),
        ([row("none", 1, 9.0, "b")], Elsewhere.NOT_IN_RUN),
    ],
)
def test_an_undefended_arm_says_what_leaked_behind_a_defence_and_what_that_attack_did_here(
    bare: list[dict[str, Any]], here: Elsewhere
) -> None:
    none, x = findings([*bare, row("x", 1, 20.0)], IMAGES)
    assert none.state != "leaks", "what was not measured is not claimed"
    assert none.overtaken
    assert (none.overtaken.arm, none.overtaken.here) == ("x", here)
    assert x.overtaken is None
    for defended in (row("x", 1, 9.0), row("x", 4, 20.0)):
        assert findings([*bare, defended], IMAGES)[0].overtaken is None, "nothing leaked behind it at this batch size"
    leaks = [row("none", 1, 30.0, "c"), *bare, row("x", 1, 20.0)]
    assert findings(leaks, IMAGES)[0].overtaken is None, "it leaks here, too"


def test_an_attack_that_works_undefended_and_failed_here_leaves_the_arm_unmeasured() -> None:
    bare = [row("none", 1, 40.0, "idlg batch 1, non-adaptive"), row("none", 1, 6.0, "analytic batch 1, non-adaptive")]
    closed = row("x", 1, 6.0, "analytic batch 1, non-adaptive")
    stopped = row("x", 1, None, "idlg batch 1, non-adaptive", status="failed", message="raised")
    [found] = [f for f in findings([*bare, closed, stopped], IMAGES) if f.arm == "x"]
    assert found.state == "not measured"
    assert [one[:3] for one in found.no_results] == [("idlg batch 1, non-adaptive", "failed", "raised")]
    assert states(*bare, closed)["x", 1] == "not measured", "an attack without a row has not answered"
    other = row("x", 1, 7.0, "idlg batch 1, non-adaptive", victim=1)
    assert states(*bare, closed, stopped, other)["x", 1] == "not measured", "nor has one that failed on a victim"
    assert states(*bare, closed, stopped | {"status": "ok", "psnr": 7.0, "message": ""})["x", 1] == "not reconstructed"
    diverged = stopped | {"status": "diverged", "psnr": 7.0}
    assert states(*bare, closed, diverged)["x", 1] == "not measured", "nor has one that diverged"


def test_a_search_that_failed_leaves_an_arm_unmeasured_though_another_attack_works() -> None:
    bare = [row("none", 1, 40.0, "analytic batch 1, non-adaptive"), row("none", 1, 8.0, "idlg batch 1, non-adaptive")]
    closed = row("x", 1, 6.0, "analytic batch 1, non-adaptive")
    for status in ("failed", "diverged"):
        stopped = row("x", 1, 7.0, "idlg batch 1, non-adaptive", status=status, message="raised")
        assert states(*bare, closed, stopped)["x", 1] == "not measured"


def test_a_closed_form_is_known_by_its_label() -> None:
    found_nothing = row("none", 1, 6.0, "non-adaptive", status="diverged", message="nothing fits")
    [unknown] = findings([found_nothing], IMAGES)
    [known] = findings([found_nothing], IMAGES, closed=["non-adaptive"])
    assert (unknown.state, known.state) == ("not measured", "not reconstructed")


def test_attacks_say_of_how_many_samples_they_find_without_a_defence() -> None:
    bare = [row("none", 4, 40.0 if sample == 2 else 8.0, sample=sample) for sample in range(4)]
    defended = [row("x", 4, 8.0, sample=sample) for sample in range(4)]
    [found] = [f for f in findings([*bare, *defended], IMAGES) if f.arm == "x"]
    assert (found.state, found.shown) == ("not reconstructed", 1)
    every = [row("none", 4, 40.0, sample=sample) for sample in range(4)]
    [found] = [f for f in findings([*every, *defended], IMAGES) if f.arm == "x"]
    assert found.shown == found.samples == 4


def test_a_defence_is_shown_on_samples_that_leak_to_adaptive_attacks() -> None:
    known = {"knowledge": ["defence", "code"]}
    bare = [row("none", 4, 40.0, sample=sample) for sample in range(4)]
    bare += [row("none", 4, 40.0 if sample == 0 else 8.0, "b", sample=sample, **known) for sample in range(4)]
    defended = [
        row("x", 4, 8.0, attack, sample=sample, **more)
        for attack, more in (("a", {}), ("b", known))
        for sample in range(4)
    ]
    [found] = [one for one in findings([*bare, *defended], IMAGES) if one.arm == "x"]
    assert (found.state, found.shown) == ("not reconstructed", 1)


def test_a_value_that_is_no_number_is_no_result() -> None:
    rows = [row("none", 1, 30.0), row("x", 1, 30.0, above_baseline=float("nan"))]
    assert states(*rows)["x", 1] == "not measured"


def test_reasons_of_attacks_without_an_answer_stand_beside_every_state() -> None:
    for bare, defended in ((30.0, 20.0), (30.0, 8.0), (8.0, 8.0)):
        silent = row("x", 1, None, "b", status="failed", message="raised")
        rows = [row("none", 1, bare), row("x", 1, defended), silent]
        [found] = [f for f in findings(rows, IMAGES) if f.arm == "x"]
        assert [one[:3] for one in found.no_results] == [("b", "failed", "raised")]


def test_a_search_that_was_not_timed_had_no_budget() -> None:
    planned = plan(batches=[1])
    [first, *rest] = [audit.title(*search) for search in planned.searches]
    timed = trials_of(planned, 0.01)
    trials = [Trial(t.title, "does not fit") if t.title.startswith(f"{first},") else t for t in timed]
    assert fitting.untimed(planned, timed) == []
    assert fitting.untimed(planned, trials) == [first]
    assert fitting.untimed(planned, [Trial(t.title, "broke", raised=True) for t in trials]) == []
    rows = [row(arm, 1, psnr, f"{first}, non-adaptive") for arm, psnr in {"none": 30.0, "x": 8.0}.items()]
    for short, expected in (([f"{first}, non-adaptive"], (f"{first}, non-adaptive",)), (rest, ())):
        [found] = [f for f in findings(rows, IMAGES, short) if f.arm == "x"]
        assert found.short_searches == expected


def test_an_attack_applies_where_any_victim_of_the_call_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "METHODS", (Method("inverting_gradients", evaluations=1),))
    played = LocalExecutor.run_attackers

    def first_refused(self: LocalExecutor, calls: Any) -> Any:
        [done] = played(self, calls)
        refused = replace(done.result[0], status="not applicable", message="not this one")
        return [done._replace(result=[refused, *done.result[1:]])]

    monkeypatch.setattr(LocalExecutor, "run_attackers", first_refused)
    planned = plan(batches=[1], samples=2)
    inputs = prepare(scenario.parse(planned.scenario_text({audit.title(*s): 1 for s in planned.searches})))
    assert [trial.obstacle for trial in rehearsing.Rehearsal(inputs).trials()] == ["", "", ""]


@pytest.mark.parametrize("inherent", [True, False])
def test_what_does_not_apply_is_tried_with_labels_unless_nothing_known_would_help(
    monkeypatch: pytest.MonkeyPatch, inherent: bool
) -> None:
    monkeypatch.setattr(audit, "METHODS", (Method("analytic"),))
    played: list[tuple[str, ...]] = []

    def refused(self: LocalExecutor, calls: Any) -> Any:
        played.append(tuple(calls[0].args[0].knowledge))
        observations = calls[0].args[2]
        guesses = [not_applicable(observation, "not here", inherent) for observation in observations]
        yield Done(calls[0], guesses, [guesses])

    monkeypatch.setattr(LocalExecutor, "run_attackers", refused)
    inputs = prepare(scenario.parse(plan(batches=[1, 8]).scenario_text({})))
    trials = list(rehearsing.Rehearsal(inputs).trials())
    assert played == ([()] if inherent else 2 * [(), ("defence", "code", "labels")])
    assert [trial.never for trial in trials] == [inherent] * 6
    late = list(rehearsing.Rehearsal(inputs).trials(enough=lambda trial: True))
    assert [trial.tried for trial in late] == ([True] * 6 if inherent else [True, *[False] * 5]), "it is no gap"


def test_what_only_the_first_call_loads_is_not_counted_for_every_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "METHODS", (Method("analytic"), Method("inverting_gradients", 1)))
    monkeypatch.setattr(rehearsing, "_LOADING", 0.3)
    played, called = LocalExecutor.run_attackers, set()

    def loading_first(self: LocalExecutor, calls: Any) -> Any:
        began, name = process_time(), calls[0].args[0].name
        while name not in called and process_time() < began + 0.4:
            pass
        called.add(name)
        return played(self, calls)

    monkeypatch.setattr(LocalExecutor, "run_attackers", loading_first)
    planned = plan(batches=[1], samples=1, defences={})
    text = planned.scenario_text({audit.title(*search): 1 for search in planned.searches})
    trials = list(rehearsing.Rehearsal(prepare(scenario.parse(text))).trials())
    assert called == {"analytic", "inverting_gradients"}
    assert max(trial.start for trial in trials) < 0.3


@pytest.mark.parametrize("slow", [True, False])
def test_a_search_that_took_long_is_supposed_to_take_as_long_for_each_sample_of_larger_batches(
    monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    monkeypatch.setattr(audit, "METHODS", (Method("analytic"), Method("inverting_gradients", 1)))
    monkeypatch.setattr(rehearsing, "_QUICK", 0.0 if slow else 1.0)
    planned = plan(batches=[1, 8], samples=2, defences={})
    text = planned.scenario_text({audit.title(*search): 1 for search in planned.searches})
    trials = {t.title: t for t in rehearsing.Rehearsal(prepare(scenario.parse(text))).trials(monotonic() + 600)}
    assert {name for name, trial in trials.items() if trial.supposed} == {
        f"inverting_gradients batch 8, {twin}" for twin in audit.TWINS if slow
    }, "closed forms are tried at each batch size"
    small, large = (trials[f"inverting_gradients batch {batch}, non-adaptive"] for batch in (1, 8))
    assert (large.each == 4 * small.each) == slow, "a client's batch of 8 beside two clients' batches of one"


@pytest.mark.parametrize("seconds", [1e-9, 0.0])
def test_a_little_time_that_is_gone_before_the_first_attack_still_gives_one_answer(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "METHODS", (Method("buffers"), Method("inverting_gradients", 1)))
    planned = plan(batches=[1], samples=1, defences={})
    loaded = scenario.parse(planned.scenario_text({audit.title(*search): 1 for search in planned.searches}))
    folder = runs.attack(loaded, None, str(tmp_path / "run"), local, Progress(), None, Allowance(seconds))
    answered = [row["arm"] for row in folder.read_table("attacks").to_pylist() if row["status"] == "ok"]
    assert answered == (["none"] if seconds else []), "without any time nothing is played"


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_what_was_left_out_is_played_where_time_is_left_for_it(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "METHODS", (Method("analytic"), Method("inverting_gradients", 1)))
    planned = plan(batches=[1], samples=1, defences={})
    loaded = scenario.parse(planned.scenario_text({audit.title(*search): 1 for search in planned.searches}))
    titles = [f"inverting_gradients batch 1, {twin}" for twin in audit.TWINS]
    left_out = {("none", title): (UNPLAYED, WANT_OF_TIME) for title in titles}
    allowance = Allowance(600, left_out=left_out, spare=[Spare("none", titles, seconds)])
    folder = runs.attack(loaded, None, str(tmp_path / "run"), local, Progress(), None, allowance)
    states = {row["attack"]: row["status"] for row in folder.read_table("attacks").to_pylist()}
    assert {states[title] == UNPLAYED for title in titles} == {seconds > 600}
    assert list(states.values())[:3] == ["ok"] * 3


@pytest.mark.engine
def test_one_sample_is_attacked_where_there_is_no_time_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = fitting.fit

    def short(planned: Plan, *args: Any, **more: Any) -> Fitted:
        return fit(planned, *args, **more | ({} if planned.samples == 1 else {"seconds": 0.0, "given": None}))

    monkeypatch.setattr("rayfed.engine.auditing.fit", short)
    lines: list[str] = []
    found = rehearsed(plan(batches=[1, 8], samples=4, defences={}), lines, seconds=60.0, iterations=None)
    assert found is not None
    assert found[0].federation.clients == 1
    assert {attack.batch_size for attack in found[0].attacks} == {1}
    assert any(line.startswith("--batch 1 --images 1") and "NOT MEASURED" in line for line in lines)


NAMED: audit.Defences = {name: [{"name": "gaussian", "sigma": sigma}] for name, sigma in (("a", 0.1), ("b", 0.2))}


def test_defences_that_the_user_named_have_an_answer_before_time_goes_to_anything_else() -> None:
    """Larger batches, longer searches and attackers who know more wait for all attacks on all arms that were named."""
    planned = plan(batches=[1, 8], defences=NAMED)
    trials = trials_of(planned, each=0.01, start=0.02)
    leaking = [f"inverting_gradients batch 8, {twin}" for twin in audit.TWINS]  # which a larger batch has, too
    whole = fitting.fit(planned, trials, Pace(), ARMS, 1e6, leaking=leaking).whole
    for share in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8):
        found = fitting.fit(planned, trials, Pace(), ARMS, share * whole, leaking=leaking)
        asked = {(u.arm, u.titles) for u in found.played + found.left_out if u.batch == 1 and not u.beyond}
        played = {(u.arm, u.titles) for u in found.played}
        assert found.answers == (asked <= played)
        if not found.answers:
            assert played <= asked
            assert found.iterations["inverting_gradients batch 1"] == FEWEST
        counts = [sum(arm == one for arm, _ in played & asked) for one in NAMED]
        assert max(counts) - min(counts) <= 1, "an attack is on all arms before the next one"
    assert found.answers


@pytest.mark.parametrize(("each", "samples"), [(0.01, 4), (0.19, 2), (0.3, 1), (0.55, 1)])
def test_defences_that_the_user_named_are_attacked_on_fewer_samples_where_time_is_short(
    each: float, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = (Method("inverting_gradients", evaluations=1),)
    for module in (audit, rehearsing, fitting):
        monkeypatch.setattr(module, "METHODS", only)
    tried = lambda self, *_: [  # noqa: E731
        Trial(a.title, each=each * min(a.batch_size, 4), evaluation=each) for a in self.inputs.scenario.attacks
    ]
    monkeypatch.setattr(rehearsing.Rehearsal, "trials", tried)
    monkeypatch.setattr(auditing._Clock, "slower", 1.0)  # whatever else the machine does
    said: list[str] = []
    found = rehearsed(plan(batches=[1, 8], defences=NAMED), said, seconds=68.0, iterations=None)
    assert found is not None
    loaded, allowance, *_ = found
    assert loaded.federation.clients == samples
    played = {(arm, title) for stage in allowance.stages for arm, title in stage if "batch 1," in title}
    titles = {f"inverting_gradients batch 1, {twin}" for twin in audit.TWINS}
    assert played >= {(arm, title) for arm in NAMED for title in titles}
    assert (samples < 4) == any(
        line.startswith(f"--batch 1 --images {samples}") and "NOT MEASURED" in line for line in said
    )
    assert "--minutes " in allowance.enough, "where it takes longer than expected, it is said what would do"


def test_larger_batches_are_not_tried_where_named_defences_take_all_of_the_time() -> None:
    planned = plan(batches=[1, 8], defences=NAMED)
    trials = trials_of(planned, each=0.01)
    first = [trial for trial in trials if " batch 1, " in trial.title]
    needed = 3 * 40 * 0.01 * 3 + 3 * 2 * 0.01 * 3
    assert fitting.crowded(planned, first, 0.5 * needed)
    assert not fitting.crowded(planned, first, 1.1 * needed)
    assert not fitting.crowded(planned, first[:-1], 0.5 * needed), "nothing is known yet"
    assert not fitting.crowded(replace(planned, defences=audit.DEFENCES), first, 0.0), "of those there may be fewer"


def test_two_arms_have_searches_that_find_something_before_many_have_any() -> None:
    planned, arms = plan(batches=[1, 2]), dict.fromkeys(("none", *"abcdefgh"), True)
    trials = trials_of(planned, each=0.01)

    def played(seconds: float, **given: Any) -> tuple[dict[str, int], set[str]]:
        fitted = fitting.fit(planned, trials, Pace(), arms, seconds, **given)
        return fitted.iterations, {u.arm for u in fitted.played if u.batch == 1 and u.method.name.startswith("inv")}

    (few, more), (enough, some) = played(4.0), played(5.0)
    assert few["inverting_gradients batch 1"] == FEWEST
    assert enough["inverting_gradients batch 1"] >= USEFUL
    assert {"none", "a"} == some < more
    assert enough["inverting_gradients batch 2"] < USEFUL
    assert played(10.0, given=60)[0] == {
        "inverting_gradients batch 1": 60,
        "inverting_gradients batch 2": 60,
        "idlg batch 1": 3,
        "idlg batch 2": 3,
    }


def test_a_richer_search_takes_nothing_from_an_audit_that_has_time_for_it() -> None:
    planned, arms = plan(batches=[1, 8]), dict.fromkeys(("none", *"abcdefghi"), True)
    trials = trials_of(planned, each=0.01)
    whole = fitting.fit(planned, trials, Pace(), arms, 1.0).whole
    left_out = [
        sum(not u.obstacle for u in fitting.fit(planned, trials, Pace(), arms, times * whole).left_out)
        for times in (0.5, 1, 2, 3, 6)
    ]
    assert left_out == sorted(left_out, reverse=True)
    assert left_out[-2:] == [0, 0]


def test_a_richer_search_does_not_push_its_own_arms_out() -> None:
    """What comes before, because it is cheap or leaked in its trial, may take the time of the first two arms."""
    planned, arms = plan(batches=[1, 8]), dict.fromkeys(("none", "a"), True)
    trials = trials_of(planned, each=0.01)
    leaking = [f"inverting_gradients batch 8, {twin}" for twin in audit.TWINS]
    for seconds in (2.0, 3.0, 5.0, 8.0):
        fitted = fitting.fit(planned, trials, Pace(), arms, seconds, leaking=leaking)
        if fitted.iterations["inverting_gradients batch 1"] > FEWEST:
            assert {u.arm for u in fitted.played if u.batch == 1 and u.method.name.startswith("inv")} == {*arms}


def test_what_leaked_in_its_trial_comes_before_what_did_not() -> None:
    planned = plan()
    trials = trials_of(planned, each=1.0)
    whole = fitted(planned, trials, 1e6)
    last = whole.played[-1]
    some = fitting.fit(planned, trials, Pace(), ARMS, whole.whole / 2, leaking=last.titles[:1])
    assert last.titles not in [unit.titles for unit in fitted(planned, trials, whole.whole / 2).played]
    assert last.titles in [unit.titles for unit in some.played]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("prune", "ratio: required, but not given: share of .* as '{name: prune, ratio: VALUE}'$"),
        ("dp_sgd", "give either noise_multiplier or epsilon, as '{name: dp_sgd, FIELD: VALUE}'$"),
        ({"name": "prune"}, "ratio: required, but not given"),
        ("nothing_here:X", "nothing_here.py .*FOLDER/nothing_here.py:X$"),
    ],
)
def test_a_defence_is_told_as_its_option_takes_it(given: Any, said: str) -> None:
    """`--set defences.0.ratio=VALUE`, which helps in a scenario, reaches no defence that an option names."""
    with pytest.raises(UserError, match=said):
        pipelines([given])


def test_what_defences_take_is_measured_for_as_long_as_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "METHODS", (Method("analytic"),))
    planned = plan(batches=[1], samples=2)
    rehearsal = rehearsing.Rehearsal(prepare(scenario.parse(planned.scenario_text({}))))
    observed, of = list[str](), rehearsal._observed
    monkeypatch.setattr(rehearsal, "_observed", lambda arm, *args: observed.append(arm) or of(arm, *args))
    late = rehearsal.pace(until=0.0)
    assert set(observed) == {"none", "gaussian 0.01"}, "an arm with a defence shows what its code takes"
    assert {arm for arm, _ in late.observing} == {audit.UNDEFENDED, *planned.defences}
    slowest = max(late.observing[arm, "adaptive"] for arm in ("none", "gaussian 0.01"))
    assert late.observing["prune 0.9", "adaptive"] == slowest


def test_an_attacker_that_could_not_do_what_its_name_says_shows_nothing() -> None:
    rows = [row("none", 1, 30.0), row("x", 1, 9.0, reason=Reason.UNDECLARED)]
    [_, found] = findings(rows, IMAGES)
    assert found.state == "not measured"
    assert states(row("none", 1, 30.0), row("x", 1, 30.0, reason=Reason.UNDECLARED))["x", 1] == "leaks"
    fitted = row("x", 1, 9.0, message="soft labels were fitted")
    assert states(row("none", 1, 30.0), fitted)["x", 1] == "not reconstructed"


def test_batches_do_not_lend_each_other_their_leaks() -> None:
    rows = [row("none", 1, 30.0), row("none", 4, 8.0), row("x", 1, 8.0), row("x", 4, 8.0)]
    assert states(*rows)["x", 1] == "not reconstructed"
    assert states(*rows)["x", 4] == "inconclusive"


def test_one_sentence_names_states_batches_and_the_attack() -> None:
    rows = [
        row("none", 1, 30.0), row("none", 4, 40.0), row("none", 16, None, message="no head"),
        row("x", 1, 36.0, "dlg batch 1, adaptive", knowledge=["defence", "code"], family="dlg"),
        row("x", 1, 20.0, sample=1),
        row("x", 4, 8.0), row("x", 16, None, message="no head"),
    ]  # fmt: skip
    found = {f.batch: f for f in findings(rows, IMAGES) if f.arm == "x"}
    assert {batch: one.state for batch, one in found.items()} == {
        1: "leaks",
        4: "not reconstructed",
        16: "not measured",
    }
    assert found[1].by == ("dlg", ("defence", "code"))


def test_a_leak_hardly_above_guessing_says_how_far() -> None:
    """Whether it is a leak is decided sample by sample, against a guess and hundreds of other samples."""
    rows = [row("x", 1, 16.0, victim=i, above_baseline=gain) for i, gain in enumerate((0.4, -0.5, 0.2, -0.5))]
    assert states(*rows) == {("x", 1): "leaks"}
    sure = [one | {"above_baseline": 1.0 + 0.1 * one["victim"]} for one in rows]
    [found] = findings([*sure, *(one | {"attack": "b", "above_baseline": 0.1} for one in sure)], IMAGES)
    assert found.most == pytest.approx(1.3)


def test_a_finding_keeps_the_closest_of_each_twin() -> None:
    rows = [
        row("x", 1, 12.0),
        row("x", 1, 16.0, knowledge=["defence", "code"]),
        row("x", 1, 14.0, knowledge=["defence", "code", "labels"]),
    ]
    [found] = findings(rows, IMAGES)
    assert dict(found.closest) == {(): 12.0, ("defence", "code"): 16.0, ("defence", "code", "labels"): 14.0}
    assert found.best == 16.0


def test_the_closest_of_what_leaked_stands_beside_a_leak() -> None:
    [found] = findings([row("x", 1, 16.0), row("x", 1, 40.0, "b", above_baseline=-1.0)], IMAGES)
    assert (found.state, found.best, found.by) == ("leaks", 16.0, ("a", ()))


@pytest.mark.engine
def test_default_batches_are_no_larger_than_what_clients_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "METHODS", (Method("analytic"),))
    said: list[str] = []
    found = rehearsed(plan(batches=[1, 4, 16], samples=8), said)
    assert found is not None
    assert [a.batch_size for a in found[0].attacks] == [1, 1, 1, 4, 4, 4, 5, 5, 5]
    assert any(line.startswith("--batch 1,4,5 instead of 1,4,16: each of 8 clients") for line in said)
    with pytest.raises(UserError, match="--batch 16: each of 8 clients"):
        rehearsed(plan(batches=[16], samples=8), shrink=False)


def test_notes_on_the_data_come_before_the_trials_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "METHODS", (Method("analytic"),))
    rows = "".join(f"P{i},{i % 7},{'ab'[i % 2]}\n" for i in range(40))
    (tmp_path / "rows.csv").write_text(f"patient,age,diagnosis\n{rows}")
    table = {"name": "table", "path": str(tmp_path / "rows.csv"), "label": "diagnosis"}
    printed = StringIO()
    found = rehearsed(plan(data=table, batches=[1]), printed=printed)
    assert found is not None
    assert printed.getvalue().count("column 'patient' has a different value in every row") == 1
    view = RunView(Console(file=printed, width=200))
    view.noted = found[2]
    for message in (*found[2], "and another"):
        view.note(message)
    assert printed.getvalue().count("column 'patient' has a different value in every row") == 1
    assert "note: and another" in printed.getvalue()


def test_where_no_trial_answers_nothing_more_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "METHODS", (Method("analytic"),))
    monkeypatch.setattr(rehearsing.Rehearsal, "pace", lambda self: pytest.fail("measured for nothing"))
    found = rehearsed(plan(batches=[1]), iterations=None)
    assert found is not None
    assert found.short is not None
    assert not found.short.options


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a first search loads for longer than an audit without any time waits for it."""
    monkeypatch.setattr(auditing, "_TOLD", 600.0)


def too_short(planned: Plan, said: list[str] | None = None, seconds: float = 0.0) -> auditing.TooShort:
    found = rehearsed(planned, said, seconds=seconds, iterations=None)
    assert found is not None
    assert found.short is not None
    assert found.allowance.seconds == 0, "nothing is played"
    return found.short


@pytest.mark.usefixtures("patient")
def test_a_time_too_short_is_told_with_the_smallest_audit_that_says_something() -> None:
    short = too_short(plan(batches=[1, 2], samples=4))
    smaller = {"batch": "1", "images": 1, "defence": [{"name": "gaussian", "sigma": 0.01}]}
    assert short.options == smaller | {"minutes": short.options["minutes"]}, "more where the machine is busy"
    alone = too_short(plan(batches=[1], samples=1, defences={}))
    assert list(alone.options) == ["minutes"], "what cannot shrink is not named"


@pytest.mark.engine
@pytest.mark.usefixtures("patient", "reports")
def test_an_audit_without_time_for_an_attack_ends_with_a_page_and_the_command_that_says_more(tmp_path: Path) -> None:
    typed = ("--model", "mlp", "--data", "digits", "--set", "data.train_samples=60", "--out", str(tmp_path))
    first = ("--defence", "{name: quantise, bits: 8}")
    asked = ("audit", *typed, *first, "--defence", "{name: gaussian, sigma: 1.0}", "--minutes", "0", *LOCAL)
    code, output = run(*asked)
    assert code == 0, "nobody asked for a bound"
    command = output.strip().splitlines()[-1].strip()
    assert re.search(
        r"audit --model mlp --data digits --defence '{name: quantise, bits: 8}' --batch 1 --images 1 --minutes \d+ "
        r"--set data.train_samples=60 --out \S+ --executor local$",
        command,
    )
    [folder] = tmp_path.iterdir()
    told = {row["arm"]: row for row in load(str(folder)).table("verdicts").to_pylist()}
    assert {row["verdict"] for row in told.values()} == {"not measured"}
    code, output = run(*asked, "--fail-above", "15")
    assert (code, "gate: NOT MEASURED" in output) == (3, True), output


def test_what_trials_measured_is_written_down_where_nothing_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed forms are whole; of a search, which trials begin alone, the labels that it read are known."""
    fit = fitting.fit
    monkeypatch.setattr("rayfed.engine.auditing.fit", lambda *args, **more: replace(fit(*args, **more), played=[]))
    searches = Method("analytic"), Method("inverting_gradients", evaluations=1)
    monkeypatch.setattr(audit, "METHODS", searches)
    found = rehearsed(plan(batches=[1], samples=2, defences={}), seconds=600.0, iterations=None)
    assert found is not None
    assert found.short is not None
    folder = runs.attack(found.scenario, None, str(tmp_path), local, Progress(), None, found.allowance)
    rows = folder.read_table("attacks").to_pylist()
    assert len(rows) == len(found.scenario.attacks) * 2
    forms = [row for row in rows if row["attack"] == "analytic batch 1, non-adaptive"]
    assert [(row["status"], row["psnr"] > 100) for row in forms] == [("ok", True)] * 2
    cut = [row for row in rows if row["attack"] == "inverting_gradients batch 1, non-adaptive"]
    assert {(row["status"], row["psnr"], row["fit"], row["label_accuracy"]) for row in cut} == {
        (UNPLAYED, None, None, 1.0)
    }
    assert all(row["message"].startswith(WANT_OF_TIME) for row in cut)
    alone = found.scenario.model_copy(update={"attacks": found.scenario.attacks[:1]})
    again = runs.attack(alone, None, str(tmp_path / "again"), local, Progress())
    same = [row for row in again.read_table("attacks").to_pylist() if row["attack"] == "analytic batch 1, non-adaptive"]
    assert [row["psnr"] for row in same] == [row["psnr"] for row in forms], "a trial's answer is the attack's"


def test_a_closed_form_is_cut_off_and_then_nothing_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that would go on for ever ends with its share of the time, and so do its twins and larger batches."""
    calls: list[float] = []

    def endless(*_: Any) -> Any:
        calls.append(monotonic())
        while True:
            torch.zeros(1) + 1

    monkeypatch.setattr("rayfed.attacks.analytic.Analytic.reconstruct", endless)
    monkeypatch.setattr(audit, "METHODS", (Method("analytic"),))
    loaded = scenario.parse(plan(batches=[1, 2], defences={}).scenario_text({}))
    began = monotonic()
    trials = list(rehearsing.Rehearsal(prepare(loaded)).trials(until=began + 4.0))
    assert monotonic() < began + 4.0
    assert len(calls) == 1
    assert not any(trial.tried for trial in trials)
    assert trials[0].obstacle == rehearsing._CUT_OFF
    assert auditing._applying(trials) == [f"analytic: {rehearsing._CUT_OFF}"]


def test_twins_of_a_timed_search_need_no_trial_where_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = tuple(method for method in METHODS if method.name in ("inverting_gradients", "idlg"))
    monkeypatch.setattr(audit, "METHODS", searches)
    planned = plan(batches=[1], samples=1, defences={})
    text = planned.scenario_text({audit.title(*search): 1 for search in planned.searches})
    trials = list(rehearsing.Rehearsal(prepare(scenario.parse(text))).trials(until=0.0))
    assert [trial.tried for trial in trials] == [True, True, True, False, False, False]
    assert len({(trial.each, trial.evaluation) for trial in trials[:3]}) == 1
    assert trials[0].evaluation > 0


def test_a_search_is_as_slow_as_the_slowest_of_its_twins() -> None:
    planned = plan(batches=[1])
    trials = trials_of(planned, each=0.01)
    slow = [replace(t, each=0.1) if t.title == "idlg batch 1, adaptive, with labels" else t for t in trials]
    few, many = (fitted(planned, each, 250.0).iterations["idlg batch 1"] for each in (slow, trials))
    assert few <= many / 7


@pytest.mark.engine
def test_what_trials_found_is_shown_where_nothing_more_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    none = lambda *args, **more: replace(fit(*args, **more), played=[])  # noqa: E731
    fit = fitting.fit
    monkeypatch.setattr("rayfed.engine.auditing.fit", none)
    said: list[str] = []
    assert too_short(plan(batches=[1]), said, seconds=3600.0).message.startswith("--minutes 60 is too short")
    found = "\n".join(said).partition("trials on the undefended model")[2]
    assert re.search(r"analytic batch 1: LEAKS, max >100 dB", found)
    assert re.search(r"inverting_gradients batch 1: (LEAKS|no leak yet)", found)
    assert "not reconstructed" not in found


def test_that_searches_take_long_is_told_before_the_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsing.Rehearsal, "gradient", property(lambda self: 0.5))
    monkeypatch.setattr(rehearsing.Rehearsal, "trials", lambda *_: [])

    def told(seconds: float, iterations: int | None = None, **changes: Any) -> list[str]:
        said: list[str] = []
        rehearsed(plan(batches=[1], **changes), said, seconds=seconds, iterations=iterations)
        return [line for line in said if line.startswith("searches: ")]

    [long], [alone] = told(60.0), told(60.0, defences={})
    assert "one gradient takes about 0.5 s at batch 1, and an evaluation several times that" in long
    assert ("--minutes 1" in long, "--minutes" in alone) == (True, False)
    assert told(3600.0) == told(60.0, iterations=40) == []


def test_a_near_reconstruction_that_is_no_leak_is_told_whatever_is_missing_beside_it() -> None:
    near, late = row("none", 1, 35.0, identified=0.0), row("none", 1, None, "b", status=UNPLAYED, message=WANT_OF_TIME)
    [found] = findings([near, late], IMAGES)
    assert (found.state, found.reason) == ("not measured", Reason.CLOSER_TO_ANOTHER_SAMPLE)
    [found] = findings([row("none", 1, 8.0), late], IMAGES)
    assert (found.state, found.reason) == ("not measured", None)


def test_nothing_more_is_tried_where_no_two_arms_can_be_compared() -> None:
    """A long search alone: then what is left of the time goes to the undefended model."""
    search, form = (
        Trial("tag batch 1, non-adaptive", each=1.0, evaluation=1.0),
        Trial("analytic batch 1, non-adaptive", "no layer"),
    )
    asked = plan(batches=[1, 4], samples=2)
    alone = 4 * FEWEST * 0.5  # of one of two samples, without a defence and by three attackers
    assert fitting.too_slow_to_compare(asked, [form, search], alone - 1)
    assert not fitting.too_slow_to_compare(asked, [form, search], alone + 1)
    assert not fitting.too_slow_to_compare(asked, [form], 0.0), "nothing was timed"
    assert not fitting.too_slow_to_compare(asked, [replace(form, obstacle=""), search], 0.0), (
        "a closed form says something"
    )


@pytest.mark.engine
def test_a_trial_that_is_enough_is_the_last() -> None:
    asked = plan(batches=[1, 2])
    loaded = scenario.parse(asked.scenario_text({audit.title(*search): 1 for search in asked.searches}))
    trials = list(rehearsing.Rehearsal(prepare(loaded)).trials(enough=lambda trial: trial.evaluation > 0))
    assert len(trials) == len(loaded.attacks)
    tried = [trial.title for trial in trials if trial.tried and not trial.obstacle and trial.each]
    assert all(title.startswith("inverting_gradients batch 1") for title in tried)
    assert all(not trial.tried or trial.never for trial in trials if " batch 2" in trial.title)


def test_a_closed_form_is_not_tried_on_batches_that_would_take_most_of_the_time() -> None:
    [one] = scenario.parse(plan(batches=[8]).scenario_text({"inverting_gradients batch 8": 1})).attacks[:1]
    took = {(one.name, 1): 2.0, (one.name, 4): 3.0, (one.name, 16): 90.0, ("other", 1): 50.0}
    assert rehearsing._on_smaller(one, took) == [16.0, 6.0]
    assert rehearsing._on_smaller(one, {(one.name, 1): 0.5}) == [], "what is quick is tried"
    search = next(a for a in scenario.parse(plan(batches=[8]).scenario_text({"inverting_gradients batch 8": 1})).attacks
                  if a.name == "inverting_gradients")  # fmt: skip
    assert rehearsing._on_smaller(search, {(search.name, 1): 50.0}) == []


def test_what_attacks_need_starts_before_the_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsing.Rehearsal, "trials", lambda *_: pytest.fail("tried for nothing"))

    @contextmanager
    def fails(inputs: Inputs, progress: Progress) -> Iterator[Any]:
        raise ResourceError("Ray did not start")
        yield

    with pytest.raises(ResourceError, match="Ray did not start"):
        engine.audit(plan(batches=[1]), Budget(monotonic(), 60.0), fails, partial(nullcontext, AuditProgress()))


def test_starting_takes_of_the_minutes_and_trials_half_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[float] = []
    monkeypatch.setattr(rehearsing.Rehearsal, "trials", lambda self, until, *_: ends.append(until) or [])
    ready: list[float] = []

    def start(_: Inputs) -> None:
        sleep(0.3)
        ready.append(monotonic())

    began = monotonic()
    rehearse(plan(batches=[1]), [], Budget(began, 60.0), AuditProgress(), True, start)
    assert ends[0] == pytest.approx((ready[0] + began + 60.0) / 2, abs=0.1)
    assert Budget(began, 1.0, ready=began + 5.0).trials_end == began + 5.0, "where all is gone"


def test_what_trials_found_is_told_where_no_attack_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "METHODS", (Method("analytic"),))
    monkeypatch.setattr(rehearsing.Rehearsal, "pace", raising(ClientError))
    said: list[str] = []
    with pytest.raises(ClientError):
        rehearsed(plan(batches=[1]), said)
    assert "  analytic batch 1: LEAKS, max >100 dB" in said


def raising(error: type[BaseException]) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


@pytest.mark.usefixtures("reports")
@pytest.mark.parametrize("where", ["a trial", "the choice", "the plan", "the start", "the first attack"])
def test_an_audit_that_is_stopped_in_its_trials_leaves_a_page_of_what_they_found(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "METHODS", (Method("analytic"), Method("inverting_gradients", 1)))
    if where == "the plan":
        monkeypatch.setattr(auditing, "_tell_plan", raising(KeyboardInterrupt))
    elif where == "the choice":
        monkeypatch.setattr(rehearsing.Rehearsal, "pace", raising(KeyboardInterrupt))
    elif where == "the start":
        monkeypatch.setattr("rayfed.engine.federation.Federation.make_keys", raising(KeyboardInterrupt))
    elif where == "the first attack":
        monkeypatch.setattr(attacking.Attacks, "_attack", raising(KeyboardInterrupt))
    else:
        monkeypatch.setattr(InvertingGradients, "reconstruct", raising(KeyboardInterrupt))
    planned = plan(batches=[1], defences={"x": [{"name": "prune", "ratio": 0.5}]})
    budget, watch = Budget(monotonic(), 60.0), partial(nullcontext, AuditProgress())
    with pytest.raises(KeyboardInterrupt):
        engine.audit(planned, budget, local, watch, out=str(tmp_path))
    [folder] = map(RunFolder.open, map(str, tmp_path.iterdir()))
    assert exits.status(folder)["state"] == "interrupted"
    assert folder.exists("report.html")
    assert {row["attack"].partition(" ")[0] for row in folder.read_table("attacks").to_pylist()} == {"analytic"}


def test_an_audit_that_is_stopped_before_any_answer_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "METHODS", (Method("analytic"),))
    monkeypatch.setattr(Analytic, "reconstruct", raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.audit(
            plan(batches=[1]),
            Budget(monotonic(), 60.0),
            local,
            partial(nullcontext, AuditProgress()),
            out=str(tmp_path),
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.engine
def test_searches_are_counted_in_evaluations_alone() -> None:
    said: list[str] = []
    rehearsed(plan(batches=[1]), said, iterations=40)
    [line] = [line for line in said if line.startswith("evaluations of the objective in each search: ")]
    assert "inverting_gradients batch 1 40" in line
    assert "idlg batch 1 40" in line  # two iterations of twenty each
    assert not any(line.startswith("iterations") for line in said)


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


def test_default_batches_that_the_model_does_not_take_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "METHODS", (Method("inverting_gradients", evaluations=1),))
    said: list[str] = []
    planned = plan(model={"name": "tests.test_audit:Normed"}, batches=[1, 4], defences={})
    found = rehearsed(planned, said)
    assert found is not None
    assert {attack.batch_size for attack in found[0].attacks} == {4}
    assert said[0].startswith("--batch 4: without 1, ")
    assert "batch norm" in said[0]
    with pytest.raises(UserError, match="--batch: remove 1"):
        rehearsed(planned, shrink=False)
    way_out = r"larger batches \(--batch 4\), a larger --size, or .*--set model.batch_norm=eval"
    with pytest.raises(UserError, match=way_out):
        rehearsed(replace(planned, batches=[1]))


def trials_of(planned: Plan, each: float, start: float = 0.0) -> list[Trial]:
    found = []
    for method in (m for m in METHODS if m.takes(planned.modality, 1)):
        for batch in planned.batches:
            titles = [f"{audit.title(method, batch)}, {twin}" for twin in audit.TWINS]
            found += [Trial(t, start=start, each=each * bool(method.evaluations)) for t in titles]
    return found


ARMS = {"none": True, "a": True, "b": True}


def fitted(planned: Plan, trials: list[Trial], seconds: float, pace: Pace | None = None) -> Fitted:
    return fitting.fit(planned, trials, pace or Pace(), ARMS, seconds)


def test_a_budget_is_spent_and_not_exceeded() -> None:
    planned = plan(batches=[1, 2])
    trials = trials_of(planned, each=0.01, start=0.001)
    for seconds in (100.0, 600.0):
        found = fitted(planned, trials, seconds)
        assert not found.left_out
        assert 0.8 * seconds < found.seconds <= seconds
        calls = fitting.of_calls(trials, found.iterations)  # one call of four victims, one of two
        assert found.seconds == pytest.approx(len(ARMS) * sum(calls.values()))


def test_a_budget_has_bounds_and_iterations_two_digits() -> None:
    planned = plan(batches=[1])
    few = fitted(planned, trials_of(planned, each=10.0), 1.0).iterations
    assert few == {audit.title(m, b): fitting.fewest(m) for m, b in planned.searches}
    many = fitted(planned, trials_of(planned, each=1e-9), 600.0).iterations
    assert many == {audit.title(m, b): MOST // m.evaluations for m, b in planned.searches}
    some = fitted(planned, trials_of(planned, each=0.0123), 600.0).iterations
    assert all(str(count)[2:].strip("0") == "" for count in some.values())


def test_what_does_not_fit_is_left_out_attack_by_attack_and_large_batches_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fitting, "_CHEAP", 0.0)
    planned, needed = plan(batches=[1, 2]), Pace({(arm, twin): 0.5 for arm in ARMS for twin in audit.TWINS})
    trials = trials_of(planned, each=0.01, start=0.1)
    whole = fitted(planned, trials, 1e6, needed)
    assert not whole.left_out
    for share in (0.9, 0.75, 0.6):
        found = fitted(planned, trials, share * whole.whole, needed)
        assert found.seconds <= share * whole.whole
        left_out = {(unit.arm, unit.titles) for unit in found.left_out}
        assert [unit for unit in whole.played if (unit.arm, unit.titles) not in left_out] == found.played
        counts = {batch: sum(unit.batch == batch for unit in found.played) for batch in planned.batches}
        assert counts[1] >= counts[2], "small batches first"
        for first in (True, False):
            needed_of = [u for u in found.played if u.batch == 1 and not u.beyond]
            methods = [u.method for u in needed_of if (u.arm in list(ARMS)[:2]) == first]
            assert methods == sorted(methods, key=METHODS.index), "an attack is whole before the next one"
    least = min(unit.seconds or 0.0 for unit in whole.played)
    assert not fitted(planned, trials, 0.99 * least, needed).says_anything
    assert fitted(planned, trials, 1.01 * least, needed).says_anything


def test_attacks_without_time_have_a_line_for_all_that_are_alike() -> None:
    planned, slow = plan(batches=[1]), Pace({(arm, twin): 1.0 for arm in ARMS for twin in audit.TWINS})
    trials = trials_of(planned, each=0.01, start=0.1)
    late = [replace(t, tried=False) if t.title.startswith("idlg") else t for t in trials]
    left_out = fitted(planned, late, 0.0, slow).left_out
    timed = [unit for unit in left_out if unit.seconds is not None]
    names = ", ".join(dict.fromkeys(unit.method.name for unit in timed))
    assert "peel" in names
    assert _not_measured(left_out, list(ARMS)) == [
        f"NOT MEASURED unless time is left: {names} at batch 1 on all arms",
        "NOT MEASURED, no time: idlg at batch 1 on all arms (their trials were not completed, so it is not known "
        "whether they apply)",
    ]
    some = [unit for unit in timed if unit.method.name == "peel" and (unit.beyond or unit.arm == "a")]
    [_line] = _not_measured(some, list(ARMS))


def test_time_goes_to_the_defences_before_what_is_answered_already() -> None:
    """A closed form leaked in its trial: that shows what a defence is measured against, and searches come behind it."""
    planned = plan(batches=[1])
    trials = trials_of(planned, each=0.01)
    leaking = [f"analytic batch 1, {twin}" for twin in audit.TWINS]
    first = 40 * 0.01 * 3 + 2 * 0.01 * 3  # both searches behind one defence
    for share, arms in ((1.1, {"a"}), (2.1, {"a", "b"})):
        found = fitting.fit(planned, trials, Pace(), ARMS, share * first, leaking=leaking)
        assert {u.arm for u in found.played if u.method.name == "inverting_gradients"} == arms
        assert found.iterations["inverting_gradients batch 1"] == FEWEST
        assert found.compares
    bare = [u for u in found.left_out if u.arm == "none"]
    assert {u.method.name for u in bare} == {"inverting_gradients"}
    assert found.left_out[-len(bare) :] == bare, "what is left goes to them last"
    unknown = fitting.fit(planned, trials, Pace(), ARMS, 1.7 * first)
    searched = [(u.arm, u.titles) for u in unknown.played if u.method.name == "inverting_gradients"]
    assert [arm for arm, _ in searched] == ["none", "a"], "without a leak each search is played without a defence, too"
    assert searched[0][1] == ("inverting_gradients batch 1, non-adaptive",)


def test_no_time_goes_to_longer_searches_while_a_defence_waits_for_it() -> None:
    planned, arms = plan(batches=[1]), {"none": True, "a": True}
    trials = trials_of(planned, each=0.01)
    needed = 40 * 0.01 * 4 + 2 * 0.01 * 4
    waits = fitting.fit(planned, trials, Pace(), arms, 0.9 * needed)
    assert "a" in {u.arm for u in waits.left_out if u.method.name == "inverting_gradients"}
    assert waits.iterations["inverting_gradients batch 1"] == FEWEST
    assert not [u for u in waits.played if u.beyond and u.method.name == "inverting_gradients"]
    hopeless = fitting.fit(planned, trials, Pace(), arms, 0.5 * needed)
    assert hopeless.iterations["inverting_gradients batch 1"] > FEWEST, "what would not suffice for it is used"


def test_what_was_not_played_without_a_defence_has_to_answer_behind_it() -> None:
    bare = [row("none", 1, 40.0, "analytic"), row("none", 1, None, "april", status=UNPLAYED, message=WANT_OF_TIME)]
    defended = row("x", 1, 8.0, "analytic")
    assert states(*bare, defended, row("x", 1, 8.0, "april"))["x", 1] == "not reconstructed"
    unanswered = row("x", 1, None, "april")
    assert states(*bare, defended, unanswered)["x", 1] == "not measured", "it may leak without"
    unanswered = row("x", 1, None, "analytic")


@pytest.mark.engine
def test_attacks_are_played_in_the_order_in_which_they_were_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "METHODS", (Method("buffers"), Method("columns")))
    planned = plan(batches=[1], samples=1, defences={"x": [{"name": "prune", "ratio": 0.5}]})
    loaded = scenario.parse(planned.scenario_text({}))
    order = [(arm, a.title) for arm in ("x", "none") for a in reversed(loaded.attacks)]
    played: list[tuple[str, str]] = []
    run_attackers = LocalExecutor.run_attackers

    def noted(self: LocalExecutor, calls: Any, hear: Any = None) -> Any:
        played.extend((call.args[1].name, call.args[0].title) for call in calls)
        return run_attackers(self, calls, hear)

    monkeypatch.setattr(LocalExecutor, "run_attackers", noted)
    runs.attack(loaded, None, str(tmp_path / "run"), local, Progress(), None, Allowance(600, stages=[order]))
    assert played == order


@pytest.mark.engine
def test_no_more_observations_are_held_than_memory_is_set_aside_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a language model behind ten defences would be tens of gigabytes."""
    search = Method("inverting_gradients", evaluations=1)
    monkeypatch.setattr(audit, "METHODS", (Method("columns"), search))
    planned = plan(batches=[1], samples=2, defences={"x": [{"name": "prune", "ratio": 0.5}]})
    loaded = scenario.parse(planned.scenario_text({audit.title(*search): 1 for search in planned.searches}))
    held, most = list[Any](), list[int]()
    run_clients = LocalExecutor.run_clients

    def observed(self: LocalExecutor, calls: Any) -> Any:
        for done in run_clients(self, calls):
            if done.call.method == "observe":
                held.append(weakref.ref(done.rest[0][0]))
                most.append(sum(one() is not None for one in held))
            yield done
            del done

    waiting: list[int] = []
    monkeypatch.setattr(LocalExecutor, "run_clients", observed)
    monkeypatch.setattr(Progress, "attacks_done", lambda self, round, done, left: waiting.append(len(done) + len(left)))
    rows = []
    for name, most_held, calls in (("all", attacking._HELD, 12), ("one", 1, 1)):
        held.clear(), most.clear(), waiting.clear()
        monkeypatch.setattr(attacking, "_HELD", most_held)
        folder = runs.attack(loaded, None, str(tmp_path / name), local, Progress())
        assert max(most) == calls
        assert set(waiting) == {12}, "what is not observed yet is waiting, too"
        rows.append([row | {"seconds": 0} for row in folder.read_table("attacks").to_pylist()])
    assert rows[0] == rows[1]


def test_what_later_stages_need_is_observed_when_earlier_ones_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an interrupted audit has rows of its first stage."""
    monkeypatch.setattr(audit, "METHODS", (Method("buffers"), Method("columns")))
    planned = plan(batches=[1], samples=1, defences={"x": [{"name": "prune", "ratio": 0.5}]})
    loaded = scenario.parse(planned.scenario_text({}))
    first, *rest = [(arm, a.title) for arm in ("none", "x") for a in loaded.attacks]
    done: list[str] = []
    run_clients = LocalExecutor.run_clients

    def noted(self: LocalExecutor, calls: Any) -> Any:
        for call in calls:
            if call.method == "observe":
                done.append(call.args[1].arm)
                if call.args[1].arm == "x":
                    raise KeyboardInterrupt
        return run_clients(self, calls)

    monkeypatch.setattr(LocalExecutor, "run_clients", noted)
    with pytest.raises(KeyboardInterrupt):
        runs.attack(
            loaded, None, str(tmp_path / "run"), local, Progress(), None, Allowance(600, stages=[[first], rest])
        )
    assert done[:2] == ["none", "none"]
    [folder] = (tmp_path / "run").iterdir()
    [row] = RunFolder.open(str(folder)).read_table("attacks").to_pylist()
    assert (row["arm"], row["attack"]) == first


def test_a_leak_may_be_found_where_a_search_is_played_or_what_leaked() -> None:
    planned = plan(batches=[1, 2])
    some = fitted(planned, trials_of(planned, each=0.01, start=0.001), 1e6)
    arms = ["none", "a", "b"]
    assert fitting.answerable(some, arms, []) == {"a", "b"}
    searches = [u for u in some.played if u.arm == "b" and u.batch == 1 and u.method.evaluations]
    without = replace(some, played=[u for u in some.played if u not in searches], left_out=searches)
    assert fitting.answerable(without, arms, []) == {"a"}, "closed forms that found nothing bare, and larger batches"
    assert fitting.answerable(without, arms, ["analytic batch 1, non-adaptive"]) == {"a", "b"}
    assert fitting.answerable(without, arms, ["analytic batch 2, non-adaptive"]) == {"a"}
    assert fitting.answerable(replace(some, played=[], left_out=some.played), arms, []) == {"a"}


def test_of_the_usual_defences_those_are_audited_that_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "METHODS", (Method("inverting_gradients", evaluations=1),))
    monkeypatch.setattr(auditing, "answerable", lambda *_: {"gaussian 0.01", "prune 0.9"})
    timed: list[str] = []
    of = rehearsing.Rehearsal._observed
    monkeypatch.setattr(
        rehearsing.Rehearsal, "_observed", lambda self, arm, *args: timed.append(arm) or of(self, arm, *args)
    )
    said: list[str] = []
    found = rehearsed(plan(batches=[1], samples=1), said, seconds=60.0, iterations=None)
    assert found is not None
    assert found[1].arms == ["none", "gaussian 0.01", "prune 0.9"]
    assert list(found[0].played) == ["none", *audit.DEFENCES], "what is left out is in the folder, and not measured"
    assert set(timed) == {"none", "gaussian 0.01", "prune 0.9"}, "the others are not even timed"
    [line] = [line for line in said if line.startswith("defences: ")]
    assert line.startswith(
        "defences: gaussian 0.01, prune 0.9 (2 of 9 default defences; choose with --defence)\n"
        "NOT MEASURED, no time: all attacks on quantise 4-bit, gaussian 0.1, "
    )
    minutes = [re.findall(r"--minutes (\d+)", line) for line in said]
    [whole, one] = next(found for found in minutes if len(found) == 2)
    assert int(whole) >= int(one), "a quick machine needs one minute for either"
    assert sum(map(len, minutes)) == 3, "beside the limit there is one estimate"
    assert f"time for all of this: {found[1].enough}" in said
    assert found[1].enough.endswith(
        f"--minutes {whole} in total (each attack that applies, at batch 1, on 10 arms), or --minutes {one} with one "
        "--defence"
    )
    asked = {"a": [{"name": "prune", "ratio": 0.9}], "b": [{"name": "prune", "ratio": 0.8}]}
    found = rehearsed(plan(batches=[1], samples=1, defences=asked), seconds=60.0, iterations=None)
    assert found is not None
    assert found[1].arms == ["none", "a", "b"], "what was asked for is answered, if only by its name"


@pytest.mark.engine
def test_arms_that_there_is_no_time_for_are_not_measured(tmp_path: Path) -> None:
    loaded = scenario.parse(plan(batches=[1], samples=1, defences=audit.DEFENCES).scenario_text(dict.fromkeys(
        ("inverting_gradients batch 1", "idlg batch 1"), 1)))  # fmt: skip
    attacks = [attack for attack in loaded.attacks if attack.name == "analytic"]
    loaded = loaded.model_copy(update={"attacks": attacks})
    allowance = Allowance(600, arms=["none", "prune 0.9"])
    folder = runs.attack(loaded, None, str(tmp_path), local, Progress(), None, allowance)
    assert {row["arm"] for row in folder.read_table("attacks").to_pylist()} == {"none", "prune 0.9"}
    found = {row["arm"]: row for row in load(folder.url).table("verdicts").to_pylist()}
    assert list(found) == ["none", *audit.DEFENCES]
    others = [arm for arm in audit.DEFENCES if arm != "prune 0.9"]
    assert {found[arm]["verdict"] for arm in others} == {"not measured"}
    assert {found[arm]["reason"] for arm in others} == {Reason.NO_RECONSTRUCTION_ATTACK}


def test_an_audit_begins_with_the_data_that_it_read(tmp_path: Path) -> None:
    """So that the wrong folder or column is seen at once."""
    table, said = tmp_path / "people.csv", list[str]()
    table.write_text("age,income\n" + "\n".join(f"{i},{'high' if i % 3 else 'low'}" for i in range(50)))
    data = {"name": "table", "path": str(table), "label": "income"}
    rehearsed(Plan({"name": "mlp"}, data, [1], 1, defences={}), said)
    assert said[0] == (
        f"data table (path {table}, label income): 40 training records of 1 column and 10 test records, "
        "2 classes (high, low)"
    )


@pytest.mark.parametrize("unplayed", [False, True])
def test_time_that_an_audit_leaves_is_printed(unplayed: bool) -> None:
    view = RunView(Console(file=StringIO()))
    view.ready(0)
    assert view._time_unused() == "", "there was no limit"
    view._attacks = [row("none", 1, 9.0, status=UNPLAYED if unplayed else "ok")]
    view.ends = Allowance(60.0).ends
    assert view._time_unused().startswith("0:59 ")
    view.ends = Allowance(10.0).ends
    assert view._time_unused() == ""
    view.ends = Allowance(60.0, until=monotonic() + 10).ends
    assert view._time_unused() == "", "actors that were late took the rest"


@pytest.mark.parametrize(("each", "samples"), [(0.3, 1), (0.8, 2)])
def test_where_no_two_arms_can_be_compared_one_usual_defence_is_left(
    each: float, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time suffices for the undefended model alone, and all that is told is of the arms that are left."""
    only = (Method("inverting_gradients", evaluations=1),)
    for module in (audit, rehearsing, fitting):
        monkeypatch.setattr(module, "METHODS", only)
    slow = lambda self, *_: [Trial(a.title, each=each, evaluation=each) for a in self.inputs.scenario.attacks]  # noqa: E731
    monkeypatch.setattr(rehearsing.Rehearsal, "trials", slow)
    monkeypatch.setattr(auditing._Clock, "slower", 1.0)  # whatever else the machine does
    said: list[str] = []
    found = rehearsed(plan(batches=[1], samples=samples), said, seconds=60.0, iterations=None)
    assert found is not None
    assert found[1].arms == ["none", "gaussian 0.01"]
    assert {arm for arm, _ in found[1].left_out} == {"none", "gaussian 0.01"}
    assert (
        sum(line.startswith("NOT MEASURED unless time is left: inverting_gradients at batch 1") for line in said) == 1
    )


@pytest.mark.parametrize("methods", [("inverting_gradients",), ("inverting_gradients", "idlg")])
def test_the_minutes_that_are_said_to_suffice_for_all_usual_defences_do(
    methods: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "METHODS", [method for method in METHODS if method.name in methods])
    planned, arms = plan(batches=[1]), dict.fromkeys(["none", *audit.DEFENCES], True)
    tried = [trial for trial in trials_of(planned, each=0.1) if trial.title.partition(" ")[0] in methods]
    for seconds in (5.0, 10.0, 20.0):
        short = fitting.fit(planned, tried, Pace(), arms, seconds)
        assert short.left_out
        enough = fitting.fit(planned, tried, Pace(), arms, 1.25 * short.first_batch)
        assert not enough.left_out


def test_where_something_leaked_the_first_defence_is_attacked_by_all_before_others_by_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If that takes half of the time at most: one defence measured to its end says more than several begun."""
    monkeypatch.setattr(fitting, "_CHEAP", 0.0)
    planned, leaking = plan(batches=[1]), ["analytic batch 1, non-adaptive"]
    tried = trials_of(planned, each=0.01, start=0.1)
    whole = fitting.fit(planned, tried, Pace(), ARMS, 1e6, given=40).played
    needed = sum(unit.seconds or 0.0 for unit in whole if unit.arm == "a")

    def order(seconds: float) -> list[tuple[str, str]]:
        found = fitting.fit(planned, tried, Pace(), ARMS, seconds, given=40, leaking=leaking)
        return [(unit.arm, unit.method.name) for unit in found.played]

    methods = len({unit.method.name for unit in whole})
    enough = order(2.5 * needed)
    assert enough[0] == ("none", "analytic")
    assert [arm for arm, _ in enough[1 : methods + 1]] == ["a"] * methods
    assert order(1.5 * needed)[:3] == [("none", "analytic"), ("a", "analytic"), ("b", "analytic")]


def test_what_takes_next_to_nothing_is_played_small_batches_first() -> None:
    planned = plan(batches=[1, 4])
    trials = trials_of(planned, each=0.01, start=1e-6)
    leaking = ["analytic batch 4, non-adaptive"]
    units = fitting.fit(planned, trials, Pace(), ARMS, 600.0, leaking=leaking).played
    quick = [unit.batch for unit in units if unit.method.name == "analytic"]
    assert quick == sorted(quick)


def test_what_does_not_apply_takes_no_time_from_what_does() -> None:
    planned = plan(batches=[1])
    able = trials_of(planned, each=0.01, start=1.0)
    trials = [replace(t, obstacle="no head", never=True) if t.title.startswith("analytic") else t for t in able]
    applying = 1e-9 + sum(unit.seconds or 0.0 for unit in fitted(planned, trials, 1e6).played if unit.applies)
    found = fitted(planned, trials, applying)
    assert {unit.method.name for unit in found.left_out} == {"analytic"}
    assert {unit.unplayed(1.0) for unit in found.left_out} == {("not applicable", "no head")}
    other = fitting.fit(planned, trials, Pace(), ARMS | {"b": False}, applying)
    assert ("b", "analytic") in {(unit.arm, unit.method.name) for unit in other.played}, "its model may have another"


def test_what_was_refused_in_its_trial_is_no_gap_on_the_arm_that_it_was_tried_on() -> None:
    """It may apply to what a defence sends, and to victims that were not tried."""
    planned = plan(batches=[1])
    able = trials_of(planned, each=0.01, start=1.0)
    trials = [replace(t, obstacle="no position") if t.title.startswith("april") else t for t in able]

    def left_out(asked: Plan, trials: Sequence[Trial]) -> dict[tuple[str, str], str]:
        found = fitted(asked, trials, 0.0).left_out
        return {(u.arm, u.method.name): fitting.refused(u, asked, trials).obstacle for u in found}

    found = left_out(planned, trials)
    assert [place for place, obstacle in found.items() if obstacle] == [("none", "april")]
    assert found["a", "april"] == ""
    assert not any(left_out(plan(batches=[1], samples=100), trials).values())
    broken = [replace(t, raised=True) if t.obstacle else t for t in trials]
    assert not any(left_out(planned, broken).values()), "an error is a gap"
    late = [replace(t, tried=False) if t.title == "april batch 1, adaptive" else t for t in trials]
    assert not any(left_out(planned, late).values()), "of one of its attackers nothing is known"


def test_an_attack_for_which_there_was_no_time_is_not_measured() -> None:
    bare = [row("none", 1, 30.0, "idlg batch 1, non-adaptive"), row("none", 1, 9.0, "analytic batch 1, non-adaptive")]
    here = row("x", 1, 7.0, "idlg batch 1, non-adaptive")
    late = row(
        "x", 1, None, "analytic batch 1, non-adaptive", status="not played", message="not enough time (about 4.0 s)"
    )
    late |= {"true_label": None, "distortion": None}
    found = [f for f in findings([*bare, here, late], IMAGES) if f.arm == "x"]
    assert found[0].state == "not measured", "even where it does not leak without the defence"
    assert found[0].not_run == (NotRun("analytic batch 1, non-adaptive", ()),)
    leaking = [f for f in findings([*bare, here | {"psnr": 20.0}, late], IMAGES) if f.arm == "x"]
    assert leaking[0].state == "leaks"
    adaptive = here | {"attack": "analytic batch 1, adaptive", "knowledge": ["defence", "code"]}
    [told] = [f for f in findings([*bare, here, adaptive, late], IMAGES) if f.arm == "x"]
    assert (told.state, len(told.not_run)) == ("not measured", 1)
    [nothing] = [f for f in findings([*bare, late], IMAGES) if f.arm == "x"]
    assert nothing.state == "not measured"
    assert nothing.no_results == ()


class Opaque(nn.Module):
    """A model with nothing linear at either end, and a gradient that cannot be differentiated."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.randn(classes, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = Once.apply(images[:, 0, None] * self.scales).mean((2, 3))
        return logits


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope * 2


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(8, 8))
        self.embed, self.mix, self.head = (
            nn.Linear(8, 8),
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        rows = self.embed(images[:, 0]) + self.positions
        logits: Tensor = self.head(self.mix(rows, rows, rows)[0].mean(1))
        return logits


def test_the_description_is_of_what_the_model_does() -> None:
    def said(model: nn.Module) -> str:
        return "\n".join(described(model.train(), Pixels(1, 8, 8)))

    mlp = said(build_model("mlp", {}, (1, 8, 8), 10, seed=0))
    assert "reads the input itself" in mlp
    assert "batch statistics" not in mlp
    norms = said(build_model("lenet", {"norm": "batch"}, (1, 8, 8), 10, seed=0))
    assert "batch statistics" in norms
    assert "clients send batch statistics" in norms
    assert "dropout" not in norms
    dropped = said(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 10)))
    assert "dropout" in dropped
    assert "batch statistics" in dropped, "what is drawn does not hide the norms"
    frozen = build_model("mlp", {}, (1, 8, 8), 10, seed=0)
    next(frozen.parameters()).requires_grad_(False)
    assert "frozen: 1 parameters" in said(frozen)
    layers = said(Vit())
    assert "layers: 2 Linear, 1 MultiheadAttention; " in layers, "neither the model itself nor the attention's inside"
    assert "own parameters: positions" in layers
    assert "head: head (Linear)" in layers
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(64, 10))
    assert "first: 1 (ParametrizedLinear)" in said(nn.Sequential(nn.Flatten(), normed))


OWN = """
from torch import nn
class XrayNet(nn.Module): ...
def One(): return nn.Sequential(nn.Flatten(), nn.Linear(192, 1))
def Few(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
"""
TARGET = ("--model", "mlp", "--data", "--loss", "mean_squared_error")


def test_mistakes_are_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("age,ill\n1,x\n2,y\n")
    (tmp_path / "own.py").write_text(OWN)
    one = f"{tmp_path}/own.py:One"
    for folder, sizes in {"two": (8, 8), "mixed": (8, 9), "broken": (8, 8)}.items():
        for name, size in zip("ab", sizes, strict=True):
            (tmp_path / folder / name).mkdir(parents=True)
            for i in range(4):
                Image.new("RGB", (size, size)).save(tmp_path / folder / name / f"{i}.png")
    (tmp_path / "broken" / "b" / "0.png").write_bytes(b"nothing")
    assert run("audit", "--model", "lenet", "--data", "digits", "--batch", "1,x")[0] == 2
    for arguments, expected in {
        ("--model", "lenett", "--data", "digits"): "did you mean 'lenet'",
        ("--model", "nowhere.py:Net", "--data", "digits"): "nowhere.py",
        ("--model", "lenet", "--data", "/no/such/folder"): "--data /no/such/folder",
        ("--model", "mlp", "--data", str(tmp_path / "t.csv")): "--text. Columns: age, ill",
        ("--model", "mlp", "--data", str(tmp_path), "--target", "age"): "as a Parquet file",
        ("--data", "digits"): "--model",
        ("--model", "lenet"): "--data",
        ("--model", "lenet", "--data", "digits", "--defence", "{name"): "error: --defence: '{name' is not valid YAML",
        ("--model", "lenet", "--data", "digits", "--defence", "{sigma: 1}"): "--defence",
        (
            "--model",
            "lenet",
            "--data",
            "digits",
            "--defence",
            "{name: gaussian, sigma: -1}",
        ): "'{name: gaussian, sigma: -1}': s",
        ("--model", "lenet", "--data", "digits", "--defence", "gausian"): "did you mean 'gaussian'",
        ("--model", "lenet", "--data", "digits", "--loss", "bce"): "--loss: unknown loss 'bce': did you mean 'binary_c",
        ("--model", f"{tmp_path}/own.py:XRayNet", "--data", "digits"): "'XRayNet'; did you mean 'XrayNet'",
        ("--model", one, "--data", f"{tmp_path}/two", "--batch", "1"): f"'{one}' returns (2, 1) for 2 images",
        (
            "--data",
            f"{tmp_path}/two",
            "--batch",
            "1",
            "--model",
            one,
        ): "or set --loss binary_cross_entropy, which needs",
        (
            "--model",
            f"{tmp_path}/own.py:Few",
            "--data",
            "digits",
            "--size",
            "8",
        ): "set --target to their column and --loss mean_squ",
        ("--model", "lenet", "--data", f"{tmp_path}/mixed", "--batch", "1"): "set --size 8 to resize all of them",
        ("--model", "lenet", "--data", f"{tmp_path}/broken", "--batch", "1"): "broken/b/0.png is not an image",
        ("--model", "mlp", "--data", f"{tmp_path}/t.csv", "--label", "il"): "error: --label: ",
        ("--model", "mlp", "--data", f"{tmp_path}/t.csv", "--target", "age"): "Add --loss mean_squared_error",
        (*TARGET[:3], f"{tmp_path}/t.csv", "--target", "ill", *TARGET[3:]): "--label",
    }.items():
        code, output = run("audit", *arguments, *LOCAL)
        assert (code, expected in output) == (2, True), output


def test_fields_are_told_as_options_and_names_of_files_are_not() -> None:
    for said, told in {
        "data.label: x has no column": "--label: x has no column",
        "set `data.size: 8` or `loss`": "set --size 8 or --loss",
        "`data.public`, or `model.batch_norm: eval`": "--set data.public=VALUE, or --set model.batch_norm=eval",
        "runs/data.size.csv, data.size.csv and `size`": "runs/data.size.csv, data.size.csv and `size`",
    }.items():
        assert of_fields(said) == told


SMALL = ("--data", "digits", "--size", "8", "--set", "data.train_samples=60", "--iterations", "20", *LOCAL)


@pytest.mark.parametrize(
    ("iterations", "spare", "told"),
    [
        (
            None,
            True,
            "; at most about --minutes 1.5 in total, and remaining time is used for ",
        ),
        (None, False, "; at most about --minutes 1.5 in total"),
        (40, True, ""),
    ],
)
def test_an_estimate_says_that_an_audit_may_take_all_the_time(iterations: int | None, spare: bool, told: str) -> None:
    said = _limit(Budget(0.0, 90.0, iterations=iterations), spare)
    assert said.startswith(told)
    assert said.endswith("left out") == (spare and iterations is None)


def test_trials_leave_the_gpu_to_the_attacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are played in the driver, whose cache would be beside the actors' shares of the same GPU."""
    told = list[str]()
    monkeypatch.setattr(engine, "rehearsed", lambda *_: told.append("tried"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("given back"))
    assert engine.audit(plan(), Budget(monotonic(), 0.0), local, lambda: nullcontext(AuditProgress())) == []
    assert told == ["tried", "given back"]


def _verdicts(folder: Path) -> list[dict[str, Any]]:
    """The verdicts of the only audit in a folder."""
    [run_folder] = folder.glob("audit-*")
    found: list[dict[str, Any]] = load(str(run_folder)).table("verdicts").to_pylist()
    return found


@pytest.mark.engine
def test_an_audit_says_what_leaks_and_what_stops_these_attacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one closed form and both searches; the audit's tutorial plays all attacks behind noise that stops them."""
    few = [method for method in METHODS if method.name in ("columns", "inverting_gradients", "idlg")]
    monkeypatch.setattr(audit, "METHODS", few)
    defences = (
        "--defence",
        "{name: gaussian, sigma: 1000.0}",
        "--defence",
        "[{name: prune, ratio: 0.5}, {name: quantise, bits: 8}]",
    )
    arguments = ["--batch", "1,2", "--images", "2", "--minutes", "1", *defences]
    code, output = run("audit", "--model", "mlp", *SMALL, *arguments, "--out", str(tmp_path))
    assert code == 0, output
    assert "columns: applies" in output
    assert "estimated time on one core:" in output
    found = {row["arm"]: row["verdict"] for row in _verdicts(tmp_path) if row["batch_size"] == 1}
    assert found["none"] == "leaks"
    assert found["gaussian (sigma 1000.0)"] == "not reconstructed"
    assert "prune (ratio 0.5) + quantise (bits 8)" in found
    [report] = tmp_path.glob("audit-*/report.html")
    assert report.stat().st_size > 10_000


@pytest.mark.engine
def test_where_nothing_applies_it_is_said_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "METHODS", (Method("analytic"),))
    (tmp_path / "opaque_nets.py").write_text(f"from {__name__} import Opaque\n")
    model = f"{tmp_path}/opaque_nets.py:Opaque"
    code, output = run("audit", "--model", model, *SMALL, "--batch", "1", "--images", "1", "--out", str(tmp_path))
    assert code == 0, output
    assert "NOT MEASURED: no attack applies" in output


@pytest.mark.engine
def test_weights_of_a_run_are_audited_beside_untrained_ones(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "name: t\ndata: {name: digits, size: 8, train_samples: 60, test_samples: 20}\n"
        "model: {name: mlp, hidden: [16]}\n"
        "federation: {rounds: 1, clients: 3}\narms: {bare: [], half: [{name: prune, ratio: 0.5}]}\n"
    )
    assert run("launch", str(tmp_path / "s.yaml"), "--out", str(tmp_path), *LOCAL)[0] == 0
    [trained] = tmp_path.glob("t-*")
    budget = ("--iterations", "20", "--batch", "1", "--images", "1", "--out", str(tmp_path / "audits"), *LOCAL)
    code, output = run("audit", "--run", str(trained), "--defence", "{name: prune, ratio: 0.5}", *budget)
    assert code == 0, output
    assert output.count("Attacked: ") == 2
    assert str(trained) in output.rpartition("Attacked: ")[2]
    played = sorted((tmp_path / "audits").glob("audit-*"))
    assert len(played) == 2
    assert "those of arm bare" in (played[1] / "log.txt").read_text()
    code, output = run("attack", str(played[0] / "scenario.yaml"), "--run", str(trained), "--arm", "x", *LOCAL)
    assert (code, "has no arm 'x'" in output) == (2, True)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("text_transformer", ["text", "--set", "data.length=8", "--set", "data.vocabulary=300", "--set",
                              "model.vocabulary=300"]),
        ("mlp", ["diabetes"]),
    ],
)  # fmt: skip
def test_texts_and_records_are_audited_by_the_same_command(model: str, data: list[str], tmp_path: Path) -> None:
    budget = ("--iterations", "20", "--batch", "1", "--images", "1", "--out", str(tmp_path), *LOCAL)
    code, output = run("audit", "--model", model, "--data", *data, "--defence", "[]", *budget)
    assert code == 0, output
    assert "LEAKS" in output


def test_an_arm_of_a_run_needs_the_run(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("name: t\nfederation: {rounds: 1, clients: 2}\nattacks: [analytic]\n")
    code, output = run("attack", str(tmp_path / "s.yaml"), "--arm", "none", *LOCAL)
    assert (code, "--run" in output) == (2, True)


def test_labels_of_a_batch_stand_beside_the_better_of_two_guesses() -> None:
    """Of 9 and 7 labels of two classes, eight of each are 15 of 16, which a batch of noise got, too."""
    rows = [
        row("noise", 16, 8.0, sample=i, true_label=int(i < 9), label_accuracy=15 / 16, label_baseline=15 / 16)
        for i in range(16)
    ]
    [found] = findings(rows, IMAGES)
    [better] = findings([one | {"label_accuracy": 1.0} for one in rows], IMAGES)
    assert found.labels
    assert better.labels
    assert (found.labels.beyond, better.labels.beyond) == (False, True)


def test_an_undefended_gradient_that_nothing_found_explains_is_inconclusive() -> None:
    assert states(row("none", 1, 8.0, fit=0.9)) == {("none", 1): "inconclusive"}
    assert states(row("none", 1, 8.0, fit=0.9), row("none", 1, 7.0, "b", fit=1e-6)) == {
        ("none", 1): "not reconstructed"
    }
    # of two samples one is explained
    other = {"victim": 1, "identified": 0.0}
    assert states(row("none", 1, 8.0, fit=1e-6), row("none", 1, 8.0, fit=0.9, **other)) == {("none", 1): "inconclusive"}
    assert states(row("none", 1, 30.0, fit=0.9)) == {("none", 1): "leaks"}
    # a defence may have changed the gradient, so that the sample itself does not explain it
    leak, behind = row("none", 1, 30.0, fit=0.0), row("noise", 1, 8.0, fit=0.9)
    assert states(leak, behind)["noise", 1] == "not reconstructed"
    alone = [row("noise", 1, 8.0, fit=0.9)]
    for changed, state in ((False, "inconclusive"), (True, "not reconstructed")):
        [found] = findings(alone, IMAGES, undefended=["noise"], changed=changed)
        assert found.state == state
    # a sample whose gradient could not be compared is not explained by another's
    assert states(row("none", 1, 8.0, fit=1e-6), row("none", 1, 8.0, fit=None, **other)) == {
        ("none", 1): "inconclusive"
    }
    # nor where no answer could be
    assert states(row("none", 1, 8.0, fit=None)) == {("none", 1): "inconclusive"}
    [found] = findings([row("none", 1, 8.0, fit=0.9)], IMAGES)
    assert found.reason == Reason.NOT_CONVERGED


@pytest.mark.parametrize(("fit", "state"), [(1e-4, "inconclusive"), (1e-6, "not reconstructed")])
def test_tokens_that_come_near_do_not_explain_a_gradient(fit: float, state: str) -> None:
    """As those that `tag` finds where adapters or the head alone are trained, of which 3 % are right."""
    wrong = row("none", 1, None, status="ok", token_accuracy=0.03, above_baseline=-0.1, fit=fit)
    assert [found.state for found in findings([wrong], Criterion.of("tokens", None))] == [state]


@pytest.mark.parametrize(("bag", "state"), [(0.95, "inconclusive"), (0.5, "not reconstructed")])
def test_tokens_in_another_order_are_no_sign_that_a_text_is_hidden(bag: float, state: str) -> None:
    """A model that takes the mean of its words' vectors shows all words, and any order of them has its gradient."""
    found = row("none", 1, None, status="ok", token_accuracy=0.38, rouge1=bag, above_baseline=0.2, fit=0.0)
    [finding] = findings([found], Criterion.of("tokens", None))
    assert finding.state == state
    assert (finding.reason == Reason.TOKENS_IN_ANOTHER_ORDER) == (bag > 0.9)
    part = {"parts_recovered": 0.38, "parts_baseline": 0.1, "parts_evidence": 50.0, "columns": None, "identified": 1.0}
    [finding] = findings([found | part], Criterion.of("tokens", None))
    assert finding.state == "leaks"
    assert (finding.reason == Reason.TOKENS_IN_ANOTHER_ORDER) == (bag > 0.9)


def test_what_a_gradient_hardly_depends_on_does_not_explain_it() -> None:
    """Of sigmoids in series any image has nearly the gradient that was seen: a grey one, and another digit."""
    torch.manual_seed(0)
    convolutions = nn.Conv2d(1, 16, 3, padding=1), nn.Sigmoid(), nn.Conv2d(16, 16, 3, padding=1), nn.Sigmoid()
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(1024, 10))
    seen = observe(model, digit(3), torch.tensor([3]))
    for images in (torch.full((1, 1, 8, 8), 0.5), torch.rand(1, 1, 8, 8), digit(13)):
        [found] = with_fit([Reconstruction(images, torch.tensor([3]))], [seen], model)
        assert found.fit is not None
        assert found.fit > GRADIENT_FIT_TOL
    [found] = with_fit([Reconstruction(digit(3), torch.tensor([3]))], [seen], model)
    assert found.fit is not None
    assert found.fit < GRADIENT_FIT_TOL


def test_a_fit_is_how_far_what_was_found_has_the_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    seen = observe(model, digit(3), torch.tensor([3]))
    right = Reconstruction(digit(3), torch.tensor([3]))

    def fit(found: Reconstruction, seen: Observation = seen) -> float | None:
        return with_fit([found], [seen], model)[0].fit

    assert (fit(right) or 0) < 1e-3
    assert (fit(replace(right, images=digit(0))) or 0) > GRADIENT_FIT_TOL
    assert fit(replace(right, images=torch.full((1, 1, 8, 8), 0.5))) == 1
    decayed = replace(seen, local=LocalTraining(weight_decay=1.0))
    decayed = replace(decayed, update={name: t + decayed.weights[name] for name, t in seen.update.items()})
    assert (fit(right, decayed) or 0) < 1e-3, "the decay is no part of the gradient"
    broken = replace(seen, update={name: t * torch.nan for name, t in seen.update.items()})
    assert fit(right, broken) is None
    assert fit(replace(right, status="diverged")) is None
    assert fit(right, replace(seen, local=LocalTraining(steps=2, lr=0.1))) is None
    assert fit(replace(right, images=torch.zeros(1, 5))) is None, "the model does not take it"
