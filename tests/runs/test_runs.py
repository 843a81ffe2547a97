"""Whole runs: folders that survive, the same bits after a break, and what is in the tables."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.errors import RunError, UserError
from rayfed.registry import component
from rayfed.runs import runner
from rayfed.simulation.executors.local import local
from rayfed.simulation.progress import Progress
from rayfed.store.folder import RunFolder
from rayfed.update import Update
from tests.helpers.run_fixtures import assert_same_bits, weights
from tests.helpers.small_runs import ATTACK, BOOSTED, assert_same_votes, parsed

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return runner.launch(parsed(extra=ATTACK), str(tmp_path_factory.mktemp("runs")), local, Progress())


@component
class Slow(Defence):
    """Costs nothing but time."""

    SECONDS = 0.3

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        def update(task: Task) -> Update:
            time.sleep(self.SECONDS)
            return next(task)

        return update


class Stop(Progress):
    """Interrupts the driver after some rounds, as Ctrl-C does."""

    def __init__(self, after: int) -> None:
        self.after = after

    def clients_done(self, round: int, done: int, total: int) -> None:
        if round == self.after and done > 4:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_interrupted_run_is_readable_and_resumes_to_the_same_bits(
    after: int, undisturbed: RunFolder, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        runner.launch(parsed(extra=ATTACK), str(tmp_path), local, Stop(after))
    [path] = tmp_path.iterdir()
    folder = RunFolder.open(str(path))
    status = json.loads(folder.read_text("status.json"))
    assert (status["state"], status["rounds_done"]) == ("interrupted", after)
    assert folder.exists("report.html")
    assert folder.read_table("rounds").num_rows == 2 * after
    runner.resume(str(path), local, Progress())
    assert_same_bits(weights(folder), weights(undisturbed))
    for table in ("rounds", "clients", "attacks", "images", "partition"):
        assert folder.read_table(table).num_rows == undisturbed.read_table(table).num_rows
    timed = ["seconds"]
    for table in ("clients", "attacks"):
        a, b = (f.read_table(table).drop_columns(timed) for f in (folder, undisturbed))
        assert a.equals(b)
    with pytest.raises(RunError, match="nothing to resume"):
        runner.resume(str(path), local, Progress())


@pytest.fixture(scope="module")
def boosted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return runner.launch(parsed(*BOOSTED), str(tmp_path_factory.mktemp("boosted")), local, Progress())


def test_clients_votes_are_in_the_tables_and_the_memory_in_the_checkpoint(boosted: RunFolder) -> None:
    votes, scores = (boosted.read_table(table).to_pylist() for table in ("weights", "scores"))
    assert {row["arm"] for row in votes} == {"boosted"}
    for round in range(3):
        drawn = {row["client"]: row["weight"] for row in votes if row["round"] == round}
        assert sum(drawn.values()) == pytest.approx(1)
        pairs = [(row["model"], row["validator"]) for row in scores if row["round"] == round]
        assert pairs == [(model, validator) for model in drawn for validator in drawn]
    assert weights(boosted)["mean"]["memory"] == {}
    assert set(weights(boosted)["boosted"]["memory"]) == {row["client"] for row in votes}


def test_votes_are_the_same_after_a_resume(boosted: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        runner.launch(parsed(*BOOSTED), str(tmp_path), local, Stop(2))
    [path] = tmp_path.iterdir()
    runner.resume(str(path), local, Progress())
    assert_same_votes(RunFolder.open(str(path)), boosted)


def test_attacks_leave_rows_images_and_traces(undisturbed: RunFolder) -> None:
    attacks = undisturbed.read_table("attacks").to_pandas()
    assert len(attacks) == 2 * 3 * 2  # arms, victims, images
    assert set(attacks["round"]) == {1}
    assert attacks["psnr"].notna().all()
    victims = [set(rows["victim"]) for _, rows in attacks.groupby("arm")]
    assert victims[0] == victims[1]
    assert undisturbed.read_table("images").num_rows == len(attacks)
    assert undisturbed.read_table("traces").num_rows > 0
    strips = undisturbed.read_table("snapshots").to_pandas()
    assert len(strips) == 2 * 2 * 2  # arms, images of the first victim, iterations 0 and 5
    assert set(strips["victim"]) == {attacks["victim"][0]}
    assert strips["image"].map(bytes).isin(undisturbed.read_table("images").to_pandas()["reconstructed"]).sum() == 4


def test_a_failed_run_leaves_a_readable_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not finite"):
        runner.launch(parsed("training.lr=1e38"), str(tmp_path), local, Progress())
    [path] = tmp_path.iterdir()
    status = json.loads((path / "status.json").read_text())
    assert status["state"] == "failed"
    assert "not finite" in status["error"]
    assert "not finite" in (path / "report.html").read_text()


def test_fedsgd_and_adam_run(tmp_path: Path) -> None:
    changes = [
        "training={algorithm: fedsgd, batch_size: null, lr: 0.1}",
        "federation.server={optimiser: adam, lr: 0.01}",
    ]
    folder = runner.launch(parsed(*changes), str(tmp_path), local, Progress())
    losses = folder.read_table("rounds").to_pandas().query("arm == 'none'")["train_loss"].tolist()
    assert losses[-1] < losses[0]


def test_an_arms_seconds_are_its_own(tmp_path: Path) -> None:
    arms = "arms={slow: [{name: 'tests.runs.test_runs:Slow'}], none: []}"
    s = parsed(arms, "federation.rounds=1", "federation.cohort_size=7", "resources.clients.actors=1")
    folder = runner.launch(s, str(tmp_path), local, Progress())
    seconds = {row["arm"]: row["actor_seconds"] for row in folder.read_table("rounds").to_pylist()}
    assert seconds["slow"] >= 7 * Slow.SECONDS
    for arm in seconds:
        clients = [row["seconds"] for row in folder.read_table("clients").to_pylist() if row["arm"] == arm]
        assert sum(clients) <= seconds[arm] < sum(clients) + 7 * Slow.SECONDS


def test_attacks_alone_see_the_untrained_model_or_what_a_run_has_learnt(tmp_path: Path) -> None:
    whole = runner.launch(parsed(extra=ATTACK), str(tmp_path), local, Progress())
    before = runner.launch(parsed("federation.rounds=1"), str(tmp_path), local, Progress())
    alone = runner.attack(parsed("attacks.0.rounds=[0]", extra=ATTACK), before.url, str(tmp_path), local, Progress())
    timeless = ["seconds"]
    rows, expected = (folder.read_table("attacks").drop_columns(timeless).to_pylist() for folder in (alone, whole))
    assert rows == expected
    assert len(rows) == 2 * 3 * 2
    assert not alone.read_table("rounds").num_rows
    untrained = runner.attack(parsed(extra=ATTACK), None, str(tmp_path), local, Progress())
    assert {row["round"] for row in untrained.read_table("attacks").to_pylist()} == {0}
    with pytest.raises(RunError, match="nothing to resume"):
        runner.resume(alone.url, local, Progress())
    other = parsed("model.hidden=[8]", extra=ATTACK)
    with pytest.raises(RunError, match="trained another model"):
        runner.attack(other, before.url, str(tmp_path), local, Progress())
    with pytest.raises(RunError, match="no round is finished"):
        runner.attack(other, alone.url, str(tmp_path), local, Progress())
