"""Going on with an edited scenario: refused where results would be a mixture, the same bits where they are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rayfed
from rayfed import scenario as scenarios
from rayfed.errors import ResourceError, RunError
from rayfed.report.export.share import copy_shareable
from rayfed.report.html.run import write_report
from rayfed.runs import resume, runner, sweeps
from rayfed.runs.local_sweep import local_sweep
from rayfed.runs.sweeps import SweepRecorder
from rayfed.simulation.client import plan
from rayfed.simulation.executors.local import local
from rayfed.simulation.gpus import KINDS, with_devices
from rayfed.simulation.progress import Progress, SweepProgress
from rayfed.store.checkpoint import Checkpoint
from rayfed.store.folder import RunFolder
from tests.helpers.progress_fixtures import Interrupted
from tests.helpers.run_fixtures import assert_same_bits, weights

TEXT = """
name: t
seed: 5
data: {name: digits, size: 8, train_samples: 120, test_samples: 40}
model: {name: mlp, hidden: [8]}
training: {batch_size: 8, steps: 2, momentum: 0.5}
federation: {rounds: 2, clients: 4, clients_per_round: 3, server: {momentum: 0.5}}
arms:
  none: []
  private: [{name: dp_sgd, clip: 1, noise_multiplier: 1.1, delta: 0.001}]
attacks:
  - {name: idlg, rounds: [0], observes: gradient, iterations: 3}
"""
LATER = "{name: idlg, rounds: [0, 2], observes: gradient, iterations: 3}"
NEW = "{name: inverting_gradients, rounds: [3], observes: gradient, iterations: 3}"
LONGER = ("federation.rounds=4", f"attacks=[{LATER}, {NEW}]")


NO_GPUS = dict.fromkeys(KINDS, 0)


def parsed(*changes: str) -> scenarios.Scenario:
    return scenarios.parse(TEXT, changes=changes)


def begun(out: Path) -> RunFolder:
    """A run of one round out of two."""
    with pytest.raises(KeyboardInterrupt):
        runner.launch(parsed(), str(out), local, Interrupted())
    [path] = out.iterdir()
    return RunFolder.open(str(path))


def edit(folder: RunFolder, *changes: str) -> None:
    document = scenarios.parse(folder.read_text("scenario.yaml"), changes=changes)
    folder.write_text("scenario.yaml", "# edited by hand\n" + document.dump())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("seed=6", "seed was 5 and is 6"),
        ("training.momentum=0.9", "training.momentum was 0.5 and is 0.9"),
        ("data.train_samples=121", "data.train_samples"),
        ("federation.server.momentum=0", "federation.server.momentum"),
        ("federation.evaluate_every=2", "federation.evaluate_every"),
        ("arms.more=[{name: gaussian, sigma: 1}]", "arms.more was not set"),
        ("arms.private.0.clip=2", "arms.private.defences.dp_sgd.clip"),
        ("attacks.0.iterations=4", "attacks.idlg.iterations"),
        ("metrics.names=[mse]", "metrics.names"),
        ("resources.clients.num_cpus=2", "resources.clients.num_cpus was 1 and is 2"),
        ("resources.clients.num_gpus=0.5", "resources.clients.num_gpus"),
    ],
)
@pytest.mark.parametrize("extend", [False, True])
def test_what_determined_the_rounds_played_is_not_edited(change: str, field: str, extend: bool, tmp_path: Path) -> None:
    saved = Checkpoint(0, {}, scenario=resume.select_determining_fields(with_devices(parsed(), NO_GPUS)))
    with pytest.raises(RunError) as error:
        resume.check_same(RunFolder.at(str(tmp_path)), saved, with_devices(parsed(change), NO_GPUS), extend)
    assert field in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        "name=other",
        "output.folder=elsewhere",
        "resources.clients={actors: 7, num_cpus: 0.25}",
        "federation.failures={timeout: 60, then: drop}",
        "metrics.success={psnr: 30}",
    ],
)
def test_what_changes_no_result_may_be_edited(change: str, tmp_path: Path) -> None:
    saved = Checkpoint(0, {}, scenario=resume.select_determining_fields(parsed()))
    resume.check_same(RunFolder.at(str(tmp_path)), saved, parsed(change))


def test_a_run_of_a_version_without_families_of_attacks_is_continued(tmp_path: Path) -> None:
    scenario = parsed("attacks=[{name: analytic, family: closed}]")
    saved = resume.select_determining_fields(parsed("attacks=[analytic]"))
    for attack in saved["attacks"]:
        del attack["family"]
    resume.check_same(RunFolder.at(str(tmp_path)), Checkpoint(0, {}, scenario=saved), scenario)


@pytest.mark.parametrize("played", [1, 2])
def test_what_is_to_come_may_be_edited_where_that_is_asked_for(played: int, tmp_path: Path) -> None:
    folder, saved = (
        RunFolder.at(str(tmp_path)),
        Checkpoint(played - 1, {}, scenario=resume.select_determining_fields(parsed())),
    )
    for changes in (LONGER[:1], LONGER):
        with pytest.raises(RunError, match="--extend"):
            resume.check_same(folder, saved, parsed(*changes))
        resume.check_same(folder, saved, parsed(*changes), extend=True)
    with pytest.raises(RunError, match="attacks was"):
        resume.check_same(folder, saved, parsed("attacks=[]"), extend=True)


def test_rounds_that_are_played_are_not_taken_back(tmp_path: Path) -> None:
    saved = Checkpoint(1, {}, scenario=resume.select_determining_fields(parsed()))
    with pytest.raises(RunError, match=r"federation\.rounds is 1, but 2"):
        resume.check_same(RunFolder.at(str(tmp_path)), saved, parsed("federation.rounds=1"), extend=True)


@pytest.mark.engine
def test_a_run_does_not_become_shorter_than_it_was_begun(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    planned = scenarios.parse(folder.read_text("scenario.yaml")).federation.rounds
    edit(folder, f"federation.rounds={planned - 1}")
    with pytest.raises(RunError, match=r"federation\.rounds is"):
        runner.resume(folder.url, local, Progress(), extend=True)


@pytest.mark.engine
def test_a_run_whose_data_have_changed_is_not_resumed(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    folder.write_part("partition", 0, folder.read_table("partition").slice(1))
    with pytest.raises(RunError, match="data differ from those of the finished rounds"):
        runner.resume(folder.url, local, Progress())


@pytest.mark.engine
def test_a_run_whose_pixels_have_changed_is_not_resumed(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    record = folder.read_mapping("environment.json")
    record["hashes"]["data"]["test"] = "0" * 64
    folder.write_text("environment.json", json.dumps(record))
    before = folder.read_mapping("status.json")
    with pytest.raises(RunError, match=r"the data \(test\) differ from those of the finished rounds"):
        runner.resume(folder.url, local, Progress())
    assert folder.read_mapping("status.json") == before


@pytest.mark.engine
def test_a_run_without_its_checkpoints_index_is_not_begun_anew(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    folder.remove("checkpoint/latest.json")
    before = len(folder.files("rounds"))
    with pytest.raises(RunError, match=r"latest\.json' is missing"):
        runner.resume(folder.url, local, Progress())
    assert len(folder.files("rounds")) == before


@pytest.mark.engine
def test_a_run_whose_scenario_was_edited_is_not_resumed(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    text = folder.read_text("scenario.yaml")
    edit(folder, "seed=6")
    with pytest.raises(RunError, match="seed was 5 and is 6"):
        runner.resume(folder.url, local, Progress())
    folder.write_text("scenario.yaml", "# a remark\n" + text.replace("actors: null", "actors: 2"))
    runner.resume(folder.url, local, Progress())
    assert folder.read_mapping("status.json")["state"] == "finished"


@pytest.mark.engine
def test_results_show_the_scenario_that_was_played(tmp_path: Path) -> None:
    """Whatever is written into the file afterwards; what determines no result may change."""
    folder = begun(tmp_path / "runs")
    assert folder.scenario_text() == folder.read_text("scenario.yaml")
    played = rayfed.load(folder.url).scenario
    edit(folder, "training.lr=9", "arms.none=[{name: gaussian, sigma: 1}]", "metrics.success.psnr=21")
    assert rayfed.load(folder.url).scenario == {**played, "metrics": {**played["metrics"], "success": {"psnr": 21}}}
    assert not any("gaussian" in row["defences"] for row in rayfed.load(folder.url).outcomes().to_pylist())
    write_report(folder)
    page = folder.read_text("report.html")
    assert "scenario.yaml was edited after the run" in page
    assert "lr: 9" not in page
    with copy_shareable(rayfed.load(folder.url), str(tmp_path / "copy")) as copy:
        assert copy.scenario() == folder.scenario()


TABLES = ("rounds", "clients", "attacks", "images", "traces", "privacy", "partition")
TIMES = {"seconds", "actor_seconds", "warming"}


@pytest.mark.engine
@pytest.mark.parametrize("finished", [True, False])
def test_an_extended_run_is_one_that_was_longer_from_the_start(finished: bool, tmp_path: Path) -> None:
    folder = runner.launch(parsed(), str(tmp_path / "a"), local, Progress()) if finished else begun(tmp_path / "a")
    short = folder.read_table("privacy").to_pylist()
    edit(folder, *LONGER)
    with pytest.raises(RunError, match="--extend"):
        runner.resume(folder.url, local, Progress())
    runner.resume(folder.url, local, Progress(), extend=True)
    longer = runner.launch(parsed(*LONGER), str(tmp_path / "b"), local, Progress())
    assert_same_bits(weights(folder), weights(longer))
    for table in TABLES:
        ours, theirs = (f.read_table(table) for f in (folder, longer))
        kept = [name for name in ours.column_names if name not in TIMES]
        assert ours.select(kept).equals(theirs.select(kept)), table
    assert {row["round"] for row in folder.read_table("attacks").to_pylist()} == {0, 2, 3}
    warming = [{row["round"] for row in f.read_table("rounds").to_pylist() if row["warming"]} for f in (folder, longer)]
    assert warming == [{0, 2 if finished else 1}, {0}], "a resume is another process"
    assert folder.read_table("privacy").to_pylist() != short
    with pytest.raises(RunError, match="all 4 rounds are finished"):
        runner.resume(folder.url, local, Progress(), extend=True)
    earlier = folder.read_mapping("environment.json")["earlier"]
    assert len(earlier) == 1
    assert earlier[0]["torch"]
    assert "earlier.0.torch" in folder.read_text("report.html")


@pytest.mark.engine
def test_attacks_meet_the_weights_of_their_own_scenario_alone(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run")
    for change in ("seed=6", "training.momentum=0", "arms.private.0.clip=2", "partition={name: dirichlet, alpha: 1}"):
        with pytest.raises(RunError, match="had another scenario"):
            runner.attack(parsed(change), folder.url, str(tmp_path / "no"), local, Progress())
    one_arm = parsed("arms={none: []}", "attacks.0.batch_size=2", "federation.rounds=9", "resources.clients.num_cpus=1")
    found = runner.attack(one_arm, folder.url, str(tmp_path / "yes"), local, Progress())
    assert {row["arm"] for row in found.read_table("attacks").to_pylist()} == {"none"}


@pytest.mark.engine
def test_a_trial_goes_on_by_its_own_scenario_alone(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    with pytest.raises(RunError, match=r"training\.momentum was 0\.5 and is 0"):
        runner.launch_in(folder, parsed("training.momentum=0"), local, Progress())
    runner.launch_in(folder, parsed(), local, Progress())
    with pytest.raises(RunError, match="seed was 5 and is 7"):  # finished, but the result is not this scenario's
        runner.launch_in(folder, parsed("seed=7"), local, Progress())


@pytest.mark.engine
def test_trials_of_an_edited_sweep_are_not_mixed(tmp_path: Path) -> None:
    fields = "arms={none: []}", "sweep={fields: {training.lr: {low: 0.1, high: 0.2}}, search: random, samples: 1}"
    folder = sweeps.sweep(parsed("federation.rounds=1", *fields), str(tmp_path), local_sweep, SweepProgress()).files
    before = folder.read_text("scenario.yaml")
    edit(folder, "training.momentum=0", "sweep.samples=2")
    with pytest.raises(RunError, match=r"training\.momentum was 0\.5 and is 0"):
        sweeps.resume(folder.url, False, local_sweep, SweepProgress())
    folder.write_text("scenario.yaml", before)
    edit(folder, "sweep.samples=2")
    assert sweeps.resume(folder.url, False, local_sweep, SweepProgress()).outcomes().num_rows == 2


class Devices:
    """Execution of a sweep on a machine with a number of GPUs, which notes the devices of the trials."""

    def __init__(self, gpus: int) -> None:
        self.gpus, self.seen = gpus, dict[str, object]()

    def num_gpus(self, _: scenarios.Scenario) -> dict[str, int]:
        return dict.fromkeys(KINDS, self.gpus)

    def __call__(self, recorder: SweepRecorder) -> None:
        resources = recorder.scenario.resources
        self.seen = {kind: getattr(resources, kind).num_gpus for kind in KINDS}


@pytest.mark.parametrize(("before", "now", "used"), [(0, 0, 0), (0, 2, 0), (1, 2, "auto"), (1, 0, None)])
def test_a_sweep_continues_on_the_kind_of_device_that_it_began_on(
    before: int, now: int, used: object, tmp_path: Path
) -> None:
    fields = "arms={none: []}", "sweep={fields: {training.lr: [0.1, 0.2]}}"
    first, second = Devices(before), Devices(now)
    folder = sweeps.sweep(parsed(*fields), str(tmp_path), first, SweepProgress())
    assert first.seen == dict.fromkeys(KINDS, "auto" if before else 0)
    if used is None:
        with pytest.raises(ResourceError):
            sweeps.resume(folder.url, False, second, SweepProgress())
    else:
        sweeps.resume(folder.url, False, second, SweepProgress())
        assert second.seen == dict.fromkeys(KINDS, used)


def test_a_run_keeps_the_size_of_its_cohorts_when_it_is_resumed(tmp_path: Path) -> None:
    """Whether clients use GPUs decides it, and is stored with the run."""
    automatic = parsed("federation.clients_per_round=null", "federation.clients=40")
    for gpus in (0, 1):
        began = with_devices(automatic, dict.fromkeys(KINDS, gpus))
        saved = Checkpoint(0, {}, scenario=resume.select_determining_fields(began))
        resumed = with_devices(automatic, resume.same_gpus(saved.scenario, automatic, dict.fromkeys(KINDS, 1)))
        assert plan.cohort_size(resumed) == plan.cohort_size(began)
        resume.check_same(RunFolder.at(str(tmp_path)), saved, resumed)
    on_cpu, on_gpu = (with_devices(automatic, dict.fromkeys(KINDS, gpus)) for gpus in (0, 1))
    assert plan.cohort_size(on_cpu) != plan.cohort_size(on_gpu)


@pytest.mark.engine
def test_a_family_is_read_from_a_finished_run(tmp_path: Path) -> None:
    scenario = parsed("attacks=[{name: analytic, family: closed, observes: gradient}]")
    folder = runner.launch(scenario, str(tmp_path), local, Progress())
    assert [one["family"] for one in folder.scenario()["attacks"]] == ["closed"]
    assert {row["family"] for row in folder.read_table("attacks").to_pylist()} == {"closed"}
