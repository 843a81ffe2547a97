"""The audit: from a model and data to a scenario, and from its rows to a sentence as strong as what was measured."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from rayfed import registry, scenario
from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.closed_form.analytic import Analytic
from rayfed.attacks.fit import with_fit
from rayfed.attacks.progress import Standing
from rayfed.audits import plan as audit
from rayfed.audits import run as engine
from rayfed.audits.options import parse_pipelines
from rayfed.audits.plan import Plan
from rayfed.audits.queue import pass_evaluations, pass_iterations, plan_stages
from rayfed.cli.options import name_options
from rayfed.core.reasons import Reason
from rayfed.data.section import UserData
from rayfed.errors import UserError
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.findings import GRADIENT_FIT_TOL, compute_findings
from rayfed.evidence.methods import METHODS, MOST, Method
from rayfed.models.build import build_model
from rayfed.models.describe import described
from rayfed.registry import component
from rayfed.results.loading import open_results
from rayfed.runs import runner
from rayfed.samples import Pixels
from rayfed.simulation.executors.local import LocalExecutor, local
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import AuditProgress, Progress
from rayfed.simulation.rounds import attacks
from rayfed.simulation.rounds.attacks import Deadline
from rayfed.store import exits
from rayfed.store.finding import Elsewhere, NotRun
from rayfed.store.folder import RunFolder
from rayfed.store.schemas import UNPLAYED, WANT_OF_TIME
from rayfed.update import LocalTraining, Observation
from tests.conftest import REPOSITORY
from tests.helpers.attack_fixtures import digit, observe
from tests.helpers.audit_rows import row
from tests.helpers.command import run

IMAGES = Criterion.from_modality("pixels", None)
LOCAL = ("--executor", "local")


def states(*rows: dict[str, Any]) -> dict[tuple[str, int], str]:
    return {(f.arm, f.batch): f.state for f in compute_findings(rows, IMAGES)}


def plan(**changes: Any) -> Plan:
    digits = {"name": "digits", "size": 8, "train_samples": 40, "test_samples": 20}
    return Plan(**{"model": {"name": "mlp"}, "data": digits, "batches": [1, 8], "samples": 4, **changes})


def test_the_audit_is_a_scenario_that_fits_its_images() -> None:
    data = UserData(str(REPOSITORY / "scenarios" / "user_data" / "train.parquet"), 16).section()
    planned = plan(model={"name": "lenet"}, data=data, seed=7)
    s = scenario.parse(planned.scenario_text({audit.make_title(*search): 20 for search in planned.searches}))
    assert (s.data.name, s.seed, s.federation.clients) == ("parquet", 7, 4)
    assert prepare_inputs(s).data.sample.shape[1:] == (16, 16)
    assert next(iter(s.played)) == audit.UNDEFENDED
    assert {a.batch_size: a.victims for a in s.attacks} == {1: 4, 8: 1}


def test_closed_forms_come_first_and_every_attack_has_all_twins() -> None:
    planned = plan()
    s = scenario.parse(planned.scenario_text({audit.make_title(*search): 20 for search in planned.searches}))
    kinds = ["iterations" in attack.parameters for attack in s.attacks]
    assert kinds == sorted(kinds)
    twins = [(a.name, a.batch_size, tuple(a.knowledge)) for a in s.attacks]
    assert len(twins) == len(set(twins))
    assert all((name, batch, twin) in twins for name, batch, _ in twins for twin in audit.ATTACKER_KNOWLEDGE.values())


def test_all_attacks_of_the_list_are_registered() -> None:
    assert {method.name for method in METHODS} <= registry.table("attacks").keys()


@pytest.mark.parametrize(("data", "name"), [("digits", "digits"), ("{tmp}", "image_folder"), ("x.parquet", "parquet")])
def test_data_is_a_file_a_folder_or_a_name(data: str, name: str, tmp_path: Path) -> None:
    assert UserData(data.format(tmp=tmp_path)).section()["name"] == name


def test_tables_and_texts_have_sections_of_their_own(tmp_path: Path) -> None:
    assert UserData("x.parquet", label="ill").section() == {"name": "table", "path": "x.parquet", "label": "ill"}
    (tmp_path / "author").mkdir()
    (tmp_path / "author" / "a.txt").write_text("words")
    assert UserData(str(tmp_path)).section() == {"name": "text", "root": str(tmp_path)}


def test_a_leak_is_near_beyond_guessing_and_told_apart() -> None:
    assert IMAGES.leaks(row("none", 1, 15.0))
    assert not IMAGES.leaks(row("none", 1, 14.9))
    assert not IMAGES.leaks(row("none", 1, 40.0, above_baseline=0.0))
    assert not IMAGES.leaks(row("none", 1, 40.0, identified=0.0))
    assert not IMAGES.leaks(row("none", 1, None))
    assert Criterion.from_modality("pixels", 30.0).leaks(row("none", 1, 31.0))


def test_what_is_no_nearer_than_a_public_image_is_no_reconstruction_and_no_acquittal() -> None:
    assert IMAGES.leaks(row("none", 1, 20.0, above_public=1.0))
    assert not IMAGES.leaks(row("none", 1, 20.0, above_public=-1.0))
    rows = [row("none", 1, 30.0, above_public=9.0), row("x", 1, 20.0, above_public=-1.0)]
    [found] = [f for f in compute_findings(rows, IMAGES) if f.arm == "x"]
    assert (found.state, found.reason) == ("inconclusive", Reason.PUBLIC_SAMPLE_AS_CLOSE)
    rows.append(row("x", 1, 18.0, above_public=2.0, sample=1))
    [found] = [f for f in compute_findings(rows, IMAGES) if f.arm == "x"]
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
    none, x = compute_findings([*bare, row("x", 1, 20.0)], IMAGES)
    assert none.state != "leaks", "what was not measured is not claimed"
    assert none.overtaken
    assert (none.overtaken.arm, none.overtaken.here) == ("x", here)
    assert x.overtaken is None
    for defended in (row("x", 1, 9.0), row("x", 4, 20.0)):
        assert compute_findings([*bare, defended], IMAGES)[0].overtaken is None, (
            "nothing leaked behind it at this batch size"
        )
    leaks = [row("none", 1, 30.0, "c"), *bare, row("x", 1, 20.0)]
    assert compute_findings(leaks, IMAGES)[0].overtaken is None, "it leaks here, too"


def test_an_attack_that_works_undefended_and_failed_here_leaves_the_arm_unmeasured() -> None:
    bare = [row("none", 1, 40.0, "idlg batch 1, non-adaptive"), row("none", 1, 6.0, "analytic batch 1, non-adaptive")]
    closed = row("x", 1, 6.0, "analytic batch 1, non-adaptive")
    stopped = row("x", 1, None, "idlg batch 1, non-adaptive", status="failed", message="raised")
    [found] = [f for f in compute_findings([*bare, closed, stopped], IMAGES) if f.arm == "x"]
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
    [unknown] = compute_findings([found_nothing], IMAGES)
    [known] = compute_findings([found_nothing], IMAGES, closed=["non-adaptive"])
    assert (unknown.state, known.state) == ("not measured", "not reconstructed")


def test_attacks_say_of_how_many_samples_they_find_without_a_defence() -> None:
    bare = [row("none", 4, 40.0 if sample == 2 else 8.0, sample=sample) for sample in range(4)]
    defended = [row("x", 4, 8.0, sample=sample) for sample in range(4)]
    [found] = [f for f in compute_findings([*bare, *defended], IMAGES) if f.arm == "x"]
    assert (found.state, found.shown) == ("not reconstructed", 1)
    every = [row("none", 4, 40.0, sample=sample) for sample in range(4)]
    [found] = [f for f in compute_findings([*every, *defended], IMAGES) if f.arm == "x"]
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
    [found] = [one for one in compute_findings([*bare, *defended], IMAGES) if one.arm == "x"]
    assert (found.state, found.shown) == ("not reconstructed", 1)


def test_a_value_that_is_no_number_is_no_result() -> None:
    rows = [row("none", 1, 30.0), row("x", 1, 30.0, above_baseline=float("nan"))]
    assert states(*rows)["x", 1] == "not measured"


def test_reasons_of_attacks_without_an_answer_stand_beside_every_state() -> None:
    for bare, defended in ((30.0, 20.0), (30.0, 8.0), (8.0, 8.0)):
        silent = row("x", 1, None, "b", status="failed", message="raised")
        rows = [row("none", 1, bare), row("x", 1, defended), silent]
        [found] = [f for f in compute_findings(rows, IMAGES) if f.arm == "x"]
        assert [one[:3] for one in found.no_results] == [("b", "failed", "raised")]


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
        parse_pipelines([given])


def small(*names: str, **changes: Any) -> Plan:
    """An audit of one sample by some attacks, on the undefended arm and behind a defence."""
    methods = [method for method in METHODS if method.name in names]
    usual = {"batches": [1], "samples": 1, "defences": {"x": [{"name": "prune", "ratio": 0.5}]}, "methods": methods}
    return plan(**usual | changes)


class Clock(AuditProgress):
    """A clock that stands still until `moves` is true of a pass or a result; then the time is over, or Ctrl-C comes."""

    def __init__(self, moves: Callable[[Any], bool] = lambda _: False, stops: bool = False) -> None:
        self.moves, self.stops, self.time, self.lines = moves, stops, 0.0, list[str]()

    def __call__(self) -> float:
        return self.time

    def say(self, *parts: str) -> None:
        self.lines.append("".join(parts))

    def best_so_far(self, best: Mapping[str, str]) -> None:
        self._hear(tuple(best))

    def pass_done(self, evaluations: int, *_: Any) -> None:
        self._hear(str(evaluations))

    def _hear(self, what: Any) -> None:
        if self.moves(what):
            self.time = 1000.0
            if self.stops:
                raise KeyboardInterrupt


def audited(
    planned: Plan, out: Path, clock: Clock | None = None, evaluations: int | None = None, **more: Any
) -> RunFolder:
    """Audit in this process, until the clock moves or with so many evaluations, and return the run's folder."""
    clock = clock or Clock()
    budget = engine.AuditBudget(Deadline(100.0, clock), evaluations)
    [found] = engine.run_audit(planned, budget, local, lambda: nullcontext(clock), out=str(out), **more)
    return found.folder


def rows_of(folder: RunFolder) -> list[dict[str, Any]]:
    return [row | {"seconds": 0} for row in folder.read_table("attacks").to_pylist()]


def test_small_batches_closed_forms_and_the_undefended_arm_come_first() -> None:
    queue = plan_stages(small("analytic", "inverting_gradients", batches=[1, 4]), ["x", "none"], evaluations=150)
    order = [
        (stage.evaluations, stage.searches, *(f"{unit.arm} {unit.batch}" for unit in stage.units)) for stage in queue
    ]
    first = [
        (100, searches, f"{arm} {batch}") for batch in (1, 4) for searches in (False, True) for arm in ("none", "x")
    ]
    assert order == [*first, *((150, True, f"{arm} {batch}") for batch in (1, 4) for arm in ("none", "x"))]
    assert plan_stages(small("idlg", batches=[16]), ["none"]) == [], "larger than the attack takes"


def test_passes_double() -> None:
    assert list(pass_evaluations()) == [100, 200, 400, 800, 1600, 3200, 6400, 12800, MOST]
    assert [list(pass_evaluations(last)) for last in (1, 100, 250)] == [[1], [100], [100, 200, 250]]
    planned = small("inverting_gradients", "idlg")
    assert pass_iterations(planned, 400) == {"inverting_gradients batch 1": 400, "idlg batch 1": 5}
    assert pass_iterations(planned, 400, fixed=True)["idlg batch 1"] == 20


def test_the_finished_passes_decide_the_results_and_the_rest_is_not_run(tmp_path: Path) -> None:
    planned = small("columns", "inverting_gradients")
    whole = audited(planned, tmp_path / "whole", evaluations=200)
    late = audited(planned, tmp_path / "late", Clock(lambda heard: heard == "200"))
    assert rows_of(late) == rows_of(whole)
    assert {row["iterations"] for row in rows_of(late)} <= {0, 100, 200}
    assert {one["iterations"] for one in late.scenario()["attacks"] if one["name"] != "columns"} == {200}
    first = rows_of(audited(planned, tmp_path / "first", Clock(lambda heard: heard != "100")))
    assert {(row["arm"], row["family"]) for row in first if row["status"] != UNPLAYED} == {("none", "columns")}
    assert len(first) == len(rows_of(whole))


def test_attacks_on_an_arm_that_leaks_come_last_in_the_pass(tmp_path: Path) -> None:
    class Order(Clock):
        def search_goes_on(self, round: int, title: str, arm: str, standing: Standing) -> None:
            order.append(arm)

    order: list[str] = []
    defences = {"x": [{"name": "prune", "ratio": 0.1}], "y": [{"name": "gaussian", "sigma": 10.0}]}
    audited(small("columns", "inverting_gradients", defences=defences), tmp_path, Order(), evaluations=1)
    assert list(dict.fromkeys(order)) == ["none", "y", "x"]


def test_an_audit_without_time_lists_what_was_not_run(tmp_path: Path) -> None:
    clock = Clock()
    clock.time = 100.0
    folder = audited(small("columns", "inverting_gradients"), tmp_path, clock)
    assert {(row["status"], row["message"]) for row in rows_of(folder)} == {(UNPLAYED, WANT_OF_TIME)}
    told = open_results(folder.url).table("verdicts").to_pylist()
    assert [(row["arm"], row["verdict"]) for row in told] == [("none", "not measured"), ("x", "not measured")]


@pytest.mark.usefixtures("reports")
def test_an_audit_that_is_stopped_leaves_a_page_of_what_was_measured(tmp_path: Path) -> None:
    clock = Clock(lambda heard: "x" in heard, stops=True)
    with pytest.raises(KeyboardInterrupt):
        audited(small("columns"), tmp_path, clock)
    [folder] = map(RunFolder.open, map(str, tmp_path.iterdir()))
    assert exits.read_status(folder)["state"] == "interrupted"
    assert folder.exists("report.html")
    assert sorted((row["arm"], row["status"]) for row in rows_of(folder)) == [*[("none", "ok")] * 3, ("x", "ok")]


@component
class Fading:
    """An attack that is exact in a short search, and returns grey after a long one."""

    iterations: int = 1

    def reconstruct(self, observations: Any, model: nn.Module, generators: Any) -> list[Reconstruction]:
        found = Analytic().reconstruct(observations, model, generators)
        return found if self.iterations < 200 else [replace(one, images=one.images * 0 + 0.5) for one in found]


@component
class Inherent:
    """An attack that never applies."""

    def reconstruct(self, observations: Any, model: nn.Module, generators: Any) -> list[Reconstruction]:
        return [not_applicable(observation, "never", inherent=True) for observation in observations]


@component
class Endless:
    """A closed form that does not end."""

    def reconstruct(self, observations: Any, model: nn.Module, generators: Any) -> list[Reconstruction]:
        while True:
            torch.zeros(1) + 1


def test_no_result_of_an_earlier_pass_is_lost(tmp_path: Path) -> None:
    fading = Method(f"{__name__}:Fading", evaluations=1)
    assert all(row["psnr"] > 50 for row in rows_of(audited(small(methods=[fading]), tmp_path, evaluations=400)))


def test_a_closed_form_that_takes_a_tenth_of_the_time_is_cut_off_and_not_run_again(tmp_path: Path) -> None:
    planned = small(methods=[Method(f"{__name__}:Endless"), Method("columns")], batches=[1, 2])
    began = monotonic()
    budget = engine.AuditBudget(Deadline(began + 9.0), None)
    [found] = engine.run_audit(planned, budget, local, lambda: nullcontext(AuditProgress()), out=str(tmp_path))
    rows = rows_of(found.folder)
    assert {row["status"] for row in rows if row["family"] != "columns"} == {UNPLAYED}
    assert UNPLAYED not in {row["status"] for row in rows if row["family"] == "columns"}


def test_what_never_applies_is_run_without_a_defence_only(tmp_path: Path) -> None:
    planned = small(methods=[Method(f"{__name__}:Inherent")], batches=[1, 2])
    [found] = engine.run_audit(
        planned, engine.AuditBudget(Deadline(0.0), 1), local, lambda: nullcontext(Clock()), out=str(tmp_path)
    )
    assert not found.applies
    rows = rows_of(found.folder)
    assert {row["status"] for row in rows} == {"not applicable"}
    assert {(row["arm"], row["batch_size"]) for row in rows} == {
        (arm, batch) for arm in ("none", "x") for batch in (1, 2)
    }
    assert len({row["message"] for row in rows}) == 1


class Broken(nn.Module):
    """A model without a gradient."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(image_shape[-1] * image_shape[-2], classes)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            raise RuntimeError("broken")
        found: Tensor = self.head(images.flatten(1))
        return found


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


def test_batches_are_those_that_data_and_model_take(tmp_path: Path) -> None:
    planned = small("buffers", batches=[1, 4, 16], samples=8, defences={})
    rows = rows_of(audited(planned, tmp_path / "few", evaluations=1, shrink=True))
    assert {row["batch_size"] for row in rows} == {1, 4, 5}
    with pytest.raises(UserError, match="--batch 16: each of 8 clients"):
        audited(planned, tmp_path)
    normed = small("buffers", model={"name": f"{__name__}:Normed"}, batches=[1, 4], defences={})
    rows = rows_of(audited(normed, tmp_path / "norm", evaluations=1, shrink=True))
    assert {row["batch_size"] for row in rows} == {4}
    with pytest.raises(UserError, match="--batch: remove 1"):
        audited(normed, tmp_path)
    way_out = r"larger batches \(--batch 4\), a larger --size, or .*--set model.batch_norm=eval"
    with pytest.raises(UserError, match=way_out):
        audited(replace(normed, batches=[1]), tmp_path)
    with pytest.raises(UserError, match="broken"):
        audited(small("buffers", model={"name": f"{__name__}:Broken"}), tmp_path, evaluations=1)


def test_an_audit_begins_with_the_data_that_it_read(tmp_path: Path) -> None:
    """So that the wrong folder or column is seen at once."""
    table, clock = tmp_path / "people.csv", Clock()
    table.write_text("age,income\n" + "\n".join(f"{i},{'high' if i % 3 else 'low'}" for i in range(50)))
    data = {"name": "table", "path": str(table), "label": "income"}
    audited(small("buffers", model={"name": "mlp"}, data=data, defences={}), tmp_path / "out", clock, evaluations=1)
    assert str(table) in clock.lines[0]


@pytest.mark.engine
def test_no_more_observations_are_held_than_memory_is_set_aside_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a language model behind ten defences would be tens of gigabytes."""
    planned = small("columns", "inverting_gradients", samples=2)
    loaded = scenario.parse(planned.scenario_text({audit.make_title(*search): 1 for search in planned.searches}))
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
    for name, most_held, calls in (("all", attacks._HELD, 12), ("one", 1, 1)):
        held.clear(), most.clear(), waiting.clear()
        monkeypatch.setattr(attacks, "_HELD", most_held)
        folder = runner.attack(loaded, None, str(tmp_path / name), local, Progress())
        assert max(most) == calls
        assert set(waiting) == {12}, "what is not observed yet is waiting, too"
        rows.append(rows_of(folder))
    assert rows[0] == rows[1]


def test_an_attacker_that_could_not_do_what_its_name_says_shows_nothing() -> None:
    rows = [row("none", 1, 30.0), row("x", 1, 9.0, reason=Reason.UNDECLARED)]
    [_, found] = compute_findings(rows, IMAGES)
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
    found = {f.batch: f for f in compute_findings(rows, IMAGES) if f.arm == "x"}
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
    [found] = compute_findings([*sure, *(one | {"attack": "b", "above_baseline": 0.1} for one in sure)], IMAGES)
    assert found.most == pytest.approx(1.3)


def test_a_finding_keeps_the_closest_of_each_twin() -> None:
    rows = [
        row("x", 1, 12.0),
        row("x", 1, 16.0, knowledge=["defence", "code"]),
        row("x", 1, 14.0, knowledge=["defence", "code", "labels"]),
    ]
    [found] = compute_findings(rows, IMAGES)
    assert dict(found.closest) == {(): 12.0, ("defence", "code"): 16.0, ("defence", "code", "labels"): 14.0}
    assert found.best == 16.0


def test_the_closest_of_what_leaked_stands_beside_a_leak() -> None:
    [found] = compute_findings([row("x", 1, 16.0), row("x", 1, 40.0, "b", above_baseline=-1.0)], IMAGES)
    assert (found.state, found.best, found.by) == ("leaks", 16.0, ("a", ()))


def test_a_near_reconstruction_that_is_no_leak_is_told_whatever_is_missing_beside_it() -> None:
    near, late = row("none", 1, 35.0, identified=0.0), row("none", 1, None, "b", status=UNPLAYED, message=WANT_OF_TIME)
    [found] = compute_findings([near, late], IMAGES)
    assert (found.state, found.reason) == ("not measured", Reason.CLOSER_TO_ANOTHER_SAMPLE)
    [found] = compute_findings([row("none", 1, 8.0), late], IMAGES)
    assert (found.state, found.reason) == ("not measured", None)


def test_what_was_not_played_without_a_defence_has_to_answer_behind_it() -> None:
    bare = [row("none", 1, 40.0, "analytic"), row("none", 1, None, "april", status=UNPLAYED, message=WANT_OF_TIME)]
    defended = row("x", 1, 8.0, "analytic")
    assert states(*bare, defended, row("x", 1, 8.0, "april"))["x", 1] == "not reconstructed"
    unanswered = row("x", 1, None, "april")
    assert states(*bare, defended, unanswered)["x", 1] == "not measured", "it may leak without"
    unanswered = row("x", 1, None, "analytic")


def test_an_attack_for_which_there_was_no_time_is_not_measured() -> None:
    bare = [row("none", 1, 30.0, "idlg batch 1, non-adaptive"), row("none", 1, 9.0, "analytic batch 1, non-adaptive")]
    here = row("x", 1, 7.0, "idlg batch 1, non-adaptive")
    late = row(
        "x", 1, None, "analytic batch 1, non-adaptive", status="not played", message="not enough time (about 4.0 s)"
    )
    late |= {"true_label": None, "distortion": None}
    found = [f for f in compute_findings([*bare, here, late], IMAGES) if f.arm == "x"]
    assert found[0].state == "not measured", "even where it does not leak without the defence"
    assert found[0].not_run == (NotRun("analytic batch 1, non-adaptive", ()),)
    leaking = [f for f in compute_findings([*bare, here | {"psnr": 20.0}, late], IMAGES) if f.arm == "x"]
    assert leaking[0].state == "leaks"
    adaptive = here | {"attack": "analytic batch 1, adaptive", "knowledge": ["defence", "code"]}
    [told] = [f for f in compute_findings([*bare, here, adaptive, late], IMAGES) if f.arm == "x"]
    assert (told.state, len(told.not_run)) == ("not measured", 1)
    [nothing] = [f for f in compute_findings([*bare, late], IMAGES) if f.arm == "x"]
    assert nothing.state == "not measured"
    assert nothing.no_results == ()


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
        assert name_options(said) == told


SMALL = ("--data", "digits", "--size", "8", "--set", "data.train_samples=60", "--iterations", "20", *LOCAL)


def _verdicts(folder: Path) -> list[dict[str, Any]]:
    """The verdicts of the only audit in a folder."""
    [run_folder] = folder.glob("audit-*")
    found: list[dict[str, Any]] = open_results(str(run_folder)).table("verdicts").to_pylist()
    return found


@pytest.mark.engine
def test_an_audit_says_what_leaks_and_what_stops_these_attacks(tmp_path: Path) -> None:
    defences = (
        "--defence",
        "{name: gaussian, sigma: 1000.0}",
        "--defence",
        "[{name: prune, ratio: 0.5}, {name: quantise, bits: 8}]",
    )
    arguments = ["--batch", "1,2", "--images", "2", *defences, "--out", str(tmp_path)]
    code, output = run("audit", "--model", "lenet", *SMALL, *arguments)
    assert code == 0, output
    found = {row["arm"]: row["verdict"] for row in _verdicts(tmp_path) if row["batch_size"] == 1}
    assert found["none"] == "leaks"
    assert found["gaussian (sigma 1000.0)"] == "not reconstructed"
    assert "prune (ratio 0.5) + quantise (bits 8)" in found
    [report] = tmp_path.glob("audit-*/report.html")
    assert report.stat().st_size > 10_000


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
    [found] = compute_findings(rows, IMAGES)
    [better] = compute_findings([one | {"label_accuracy": 1.0} for one in rows], IMAGES)
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
        [found] = compute_findings(alone, IMAGES, undefended=["noise"], changed=changed)
        assert found.state == state
    # a sample whose gradient could not be compared is not explained by another's
    assert states(row("none", 1, 8.0, fit=1e-6), row("none", 1, 8.0, fit=None, **other)) == {
        ("none", 1): "inconclusive"
    }
    # nor where no answer could be
    assert states(row("none", 1, 8.0, fit=None)) == {("none", 1): "inconclusive"}
    [found] = compute_findings([row("none", 1, 8.0, fit=0.9)], IMAGES)
    assert found.reason == Reason.NOT_CONVERGED


@pytest.mark.parametrize(("fit", "state"), [(1e-4, "inconclusive"), (1e-6, "not reconstructed")])
def test_tokens_that_come_near_do_not_explain_a_gradient(fit: float, state: str) -> None:
    """As those that `tag` finds where adapters or the head alone are trained, of which 3 % are right."""
    wrong = row("none", 1, None, status="ok", token_accuracy=0.03, above_baseline=-0.1, fit=fit)
    assert [found.state for found in compute_findings([wrong], Criterion.from_modality("tokens", None))] == [state]


@pytest.mark.parametrize(("bag", "state"), [(0.95, "inconclusive"), (0.5, "not reconstructed")])
def test_tokens_in_another_order_are_no_sign_that_a_text_is_hidden(bag: float, state: str) -> None:
    """A model that takes the mean of its words' vectors shows all words, and any order of them has its gradient."""
    found = row("none", 1, None, status="ok", token_accuracy=0.38, rouge1=bag, above_baseline=0.2, fit=0.0)
    [finding] = compute_findings([found], Criterion.from_modality("tokens", None))
    assert finding.state == state
    assert (finding.reason == Reason.TOKENS_IN_ANOTHER_ORDER) == (bag > 0.9)
    part = {"parts_recovered": 0.38, "parts_baseline": 0.1, "parts_evidence": 50.0, "columns": None, "identified": 1.0}
    [finding] = compute_findings([found | part], Criterion.from_modality("tokens", None))
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
