"""Faults while a run goes on: what dies is done again to the same bits, what fails is told or left out."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import ray
import torch
from pydantic import Field

from actors import workers
from actors.actor_pool import ActorPool
from actors.executor import on_ray
from actors.process import Renewable, ResourceShare
from actors.sweep import on_tune
from rayfed import scenario as scenarios
from rayfed.aggregation.fedavg import FedAvg
from rayfed.aggregation.server import TreeFold
from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.errors import ClientError, RunError, ScenarioError
from rayfed.registry import component
from rayfed.runs import runner, sweeps
from rayfed.samples import Pixels
from rayfed.scenario import Scenario, resolve
from rayfed.simulation.client.arm import build_arm
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.client.visit import ClientVisit
from rayfed.simulation.executors.base import Call, Overdue
from rayfed.simulation.executors.local import local
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress, SweepProgress
from rayfed.store import files
from rayfed.store.folder import RunFolder
from rayfed.store.schemas import TABLES
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.update import Update
from tests.conftest import REPOSITORY, missing
from tests.helpers import faults
from tests.helpers.processes import in_own_process, user_namespaces
from tests.helpers.run_fixtures import Noting, assert_same_bits, weights

TEXT = """
name: t
seed: 5
data: {name: digits, size: 8, train_samples: 400, test_samples: 100}
partition: {name: dirichlet, alpha: 1}
model: {name: mlp, hidden: [16]}
training: {batch_size: 8}
federation: {rounds: 2, clients: 8, clients_per_round: 6, cohort_size: 3}
arms:
  odd: [{name: top_k, k: 0.5, error_feedback: true}, {name: "tests.actors.test_faults:Odd", how: none}]
resources: {clients: {actors: 2}, attackers: {actors: 1}}
"""
DROP = "federation.failures.then=drop"


@component
class Odd(Defence):
    """Some clients fail in one round."""

    vectorises: ClassVar[bool] = True
    mended: ClassVar[bool] = False

    how: Literal["none", "nan", "shape", "name", "nothing", "raise", "hang", "exit"] = "none"
    clients: list[int] = Field(default_factory=list)
    round: int = 0

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        def update(task: Task) -> Any:
            sent = next(task)
            if self.mended or task.client not in self.clients or task.round != self.round:
                return sent
            first = next_of(sent.tensors)
            match self.how:
                case "nan":
                    sent.tensors[first] = sent.tensors[first] * torch.nan
                case "shape":
                    sent.tensors[first] = sent.tensors[first][:1]
                case "name":
                    sent.tensors["more"] = sent.tensors.pop(first)
                case "nothing":
                    return None
                case "raise":
                    raise ZeroDivisionError("by the test")
                case "hang":
                    ctypes.PyDLL(None).sleep(600)  # and no other thread of the process gets a turn
                case "exit":
                    os._exit(3)
            return sent

        return update


def next_of(tensors: dict[str, torch.Tensor]) -> str:
    return next(iter(tensors))


def parsed(how: str = "none", clients: tuple[int, ...] = (), *changes: str, round: int = 0) -> Scenario:
    own = [f"arms.odd.1.how={how}", f"arms.odd.1.clients={list(clients)}", f"arms.odd.1.round={round}"]
    return scenarios.parse(TEXT, changes=[*own, *changes])


def cohort(scenario: Scenario, clients: list[int], states: dict[int, Any] | None = None) -> tuple[Any, Any]:
    """What a runtime makes of these clients in round 0."""
    inputs = prepare_inputs(scenario)
    runtime = ClientRuntime(scenario, inputs.data, inputs.parts, torch.device("cpu"))
    arm = build_arm(resolve(scenario)["odd"], inputs.data.sample, 10, scenario.seed)
    return runtime.cohort("odd", Sent(0, arm.weights, arm.buffers), clients, states or {})


HOWS = [
    ("nan", "sent an update that is not finite"),
    ("shape", r"sent an update of the wrong form \(tensors: '.*' has shape \[1, .*\], expected"),
    ("name", r"sent an update of the wrong form \(tensors: '.*' is missing\)"),
    ("nothing", "sent a NoneType instead of an update"),
    ("raise", r"raised ZeroDivisionError: by the test \(test_faults.py, line \d+\)"),
]


@pytest.mark.parametrize("vectorise", ["loop", "vmap"])
@pytest.mark.parametrize(("how", "reason"), HOWS)
def test_a_client_that_fails_ends_the_run_with_one_message(how: str, reason: str, vectorise: str) -> None:
    s = parsed(how, (2,), f"training.vectorise={vectorise}")
    with pytest.raises(ClientError, match=f"^client 2 {reason}.* in round 1 of arm 'odd': .*then: drop.*rayfed resume"):
        cohort(s, [1, 2, 3])


@pytest.mark.parametrize(("how", "reason"), HOWS)
def test_so_does_one_whose_work_others_need(how: str, reason: str) -> None:
    """Malicious clients that collude work with one another's honest updates, whatever their cohorts."""
    malicious = "federation.malicious={name: a_little_is_enough, clients: [2]}"
    s = parsed(how, (2,), malicious, "federation.clients_per_round=8")
    with pytest.raises(ClientError, match=f"^client 2 {reason}.* in round 1 of arm 'odd': "):
        cohort(s, [1, 2, 3])


@pytest.mark.parametrize(("how", "reason"), HOWS[1:])  # to an attack, what is not finite is an update as well
def test_so_does_one_that_an_attack_observes(how: str, reason: str) -> None:
    s = parsed(how, (2,), "attacks=[{name: analytic, rounds: [0], victims: [2], observes: gradient}]")
    inputs = prepare_inputs(s)
    runtime = ClientRuntime(s, inputs.data, inputs.parts, torch.device("cpu"))
    arm = build_arm(resolve(s)["odd"], inputs.data.sample, 10, s.seed)
    visit = ClientVisit("odd", Sent(0, arm.weights, arm.buffers), 2)
    with pytest.raises(ClientError, match=f"^client 2 {reason}.* during the attack 'analytic' in round 1 of arm 'odd'"):
        ObservationBuilder(runtime).observe(visit, s.attacks[0])


@pytest.mark.parametrize("vectorise", ["loop", "vmap", "fused"])
@pytest.mark.parametrize(("how", "reason"), HOWS)
def test_a_cohort_without_a_client_has_the_bits_of_one_that_never_had_it(how: str, reason: str, vectorise: str) -> None:
    s = parsed(how, (2, 4), DROP, f"training.vectorise={vectorise}")
    partial, report = cohort(s, [1, 2, 3, 4])
    expected, other = cohort(s, [1, 3])
    assert_same_bits(vars(partial) | {"weight": torch.tensor(0)}, vars(expected) | {"weight": torch.tensor(0)})
    assert partial.weight == expected.weight
    rows = {row["client"]: row for row in report.rows}
    assert list(rows) == [1, 2, 3, 4]
    assert rows[1]["status"] == rows[3]["status"] == "ok"
    assert [rows[c].keys() for c in (2, 4)] == [{"arm", "round", "client", "malicious", "status"}] * 2
    assert report.states.keys() == {1, 3}  # what 2 and 4 remember stays what it was
    assert_same_bits(report.states, other.states)


def test_a_failed_clients_memory_is_not_touched() -> None:
    before = cohort(parsed(), [1, 2])[1].states
    kept = {client: {key: dict(value) for key, value in state.items()} for client, state in before.items()}
    _, report = cohort(parsed("raise", (2,), DROP), [1, 2], before)
    assert_same_bits(before, kept)
    assert report.states.keys() == {1}


def test_common_work_that_raises_is_the_fault_of_who_raises_alone() -> None:
    s = parsed(
        "none", (), DROP, "training.vectorise=vmap", "arms.odd=[{name: 'tests.actors.test_faults:Picky', client: 2}]"
    )
    partial, report = cohort(s, [1, 2, 3])
    expected, _ = cohort(s, [1, 3])
    assert_same_bits(partial.tensors, expected.tensors)
    assert "raised LookupError" in {row["client"]: row["status"] for row in report.rows}[2]


@component
class Picky(Defence):
    """One client cannot read its data."""

    client: int = 0

    def wrap_data(self, next: Any) -> Any:
        def data(task: Task) -> Any:
            if task.client == self.client:
                raise LookupError("no such page")
            return next(task)

        return data


def test_nobody_left_is_no_partial_result() -> None:
    partial, report = cohort(parsed("nan", (1, 2), DROP), [1, 2])
    assert partial is None
    assert len(report.rows) == 2
    fold = TreeFold(FedAvg(), 3)
    some, _ = cohort(parsed(), [1, 2])
    for index, part in enumerate([None, some, None]):
        fold.add(index, part)
    assert fold.total() is some


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("federation.protection=secure_aggregation", "masks would remain in the sum"),
        (
            "arms.odd=[{name: dp_fedavg, clip: 1, noise_multiplier: 1, delta: 1.0e-5, noise: clients}]",
            "part of the noise",
        ),
        ("attacks=[{name: analytic, observes: shown, rounds: [0]}]", "other clients"),
    ],
)
def test_what_needs_every_client_cannot_drop_any(change: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=f"federation.failures.then: drop is not .* arm 'odd': .*{message}"):
        prepare_inputs(parsed("none", (), DROP, change))
    prepare_inputs(parsed("none", (), change))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return runner.launch(parsed(), str(tmp_path_factory.mktemp("runs")), local, Progress())


def drawn(folder: RunFolder, round: int) -> list[int]:
    return [row["client"] for row in folder.read_table("clients").to_pylist() if row["round"] == round]


@pytest.mark.usefixtures("reports")
def test_a_run_goes_on_without_who_fails(undisturbed: RunFolder, tmp_path: Path) -> None:
    bad = drawn(undisturbed, 0)[1]
    attack = "attacks=[{name: analytic, rounds: [0], victims: 2, observes: gradient}]"
    noting = Noting()
    folder = runner.launch(parsed("nan", (bad,), DROP, attack), str(tmp_path), local, noting)
    foreseen, note = noting.notes
    assert foreseen.startswith("odd: the verdict cannot be NOT RECONSTRUCTED")
    assert (
        f"1 of 6 clients are excluded from round 1 of arm odd: client {bad} sent an update that is not finite" in note
    )
    assert f"client {bad} is excluded: it sent" in folder.read_text("log.txt")
    clients = folder.read_table("clients").to_pylist()
    assert [row["client"] for row in clients if row["status"] != "ok"] == [bad]
    assert len(clients) == 12
    first, second = folder.read_table("rounds").to_pylist()
    assert (first["clients"], second["clients"]) == (5, 6)
    assert first["samples"] == sum(row["samples"] or 0 for row in clients if row["round"] == 0)
    assert first["bytes_down"] == second["bytes_down"]  # it was sent the weights, too
    assert folder.exists("report.html")
    assert bad not in {row["victim"] for row in folder.read_table("attacks").to_pylist()}


def test_a_round_in_which_all_fail_changes_nothing(tmp_path: Path) -> None:
    one = parsed("raise", tuple(range(8)), DROP, "federation.rounds=1", "federation.server.momentum=0.5")
    failed = runner.launch(one, str(tmp_path), local, Progress())
    [row] = failed.read_table("rounds").to_pylist()
    assert (row["clients"], row["train_loss"], row["bytes_up"]) == (0, None, 0)
    saved = weights(failed)["odd"]
    assert_same_bits(saved["weights"], build_arm(resolve(one)["odd"], Pixels(1, 8, 8), 10, one.seed).weights)


def test_a_run_that_a_client_stops_is_resumed_when_it_is_mended(
    undisturbed: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = drawn(undisturbed, 1)[0]
    with pytest.raises(ClientError, match=f"client {bad} raised ZeroDivisionError.* in round 2"):
        runner.launch(parsed("raise", (bad,), round=1), str(tmp_path), local, Progress())
    [path] = tmp_path.iterdir()
    assert len(RunFolder.open(str(path)).read_table("rounds")) == 1
    monkeypatch.setattr(Odd, "mended", True)
    runner.resume(str(path), local, Progress())
    assert_same_bits(weights(RunFolder.open(str(path))), weights(undisturbed))


class Sleeper(Renewable):
    def __init__(self, share: ResourceShare) -> None:
        pass

    def work(self, what: Any) -> Any:
        return what

    def sleep(self) -> None:
        ctypes.PyDLL(None).sleep(600)


class Sleepers(ActorPool):
    def acquire(self, *_: Any) -> Any:
        return super().acquire(Sleeper, ResourceShare(0, 0))


@pytest.mark.engine
@pytest.mark.usefixtures("ray_session")
def test_who_takes_too_long_is_ended_and_what_waits_behind_it_is_not_lost() -> None:
    two = workers.Workers(Sleepers(), 2)
    two.wait()
    calls = [Call("sleep", (), "late", limit=1.0), *(Call("work", (i,), i) for i in range(20))]
    results = {call.tag: result for call, result, *_ in two.run(calls)}
    assert isinstance(results.pop("late"), Overdue)
    assert results == {i: i for i in range(20)}
    assert two.losses == 0
    two.close()


class Frail(Renewable):
    """Dies as it starts while a file has a character left."""

    def __init__(self, share: ResourceShare, lives: Path) -> None:
        if text := lives.read_text():
            lives.write_text(text[1:])
            os._exit(1)

    def work(self, what: Any) -> Any:
        return what


class FrailPool(ActorPool):
    def acquire(self, *arguments: Any) -> Any:
        return super().acquire(Frail, ResourceShare(0, 0), *arguments)


@pytest.mark.engine
@pytest.mark.usefixtures("ray_session")
def test_an_actor_that_dies_as_it_starts_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "lives").write_text("xx")
    one = workers.Workers(FrailPool(), 1, tmp_path / "lives")
    one.wait()
    assert one.losses == 2
    assert [result for _, result, *_ in one.run([Call("work", (3,))])] == [3]
    one.close()


PATIENT = ["federation.failures.timeout=5", "federation.rounds=1"]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_client_that_hangs_is_found_and_left_out(undisturbed: RunFolder, tmp_path: Path) -> None:
    bad = drawn(undisturbed, 0)[1]
    noting = Noting()
    hung = runner.launch(parsed("hang", (bad,), DROP, *PATIENT), str(tmp_path), on_ray(), noting)
    assert "clients of round 1 together exceeded federation.failures.timeout" in noting.notes[0]
    raised = runner.launch(parsed("raise", (bad,), DROP, "federation.rounds=1"), str(tmp_path), local, Progress())
    assert_same_bits(weights(hung), weights(raised))
    rows, others = (folder.read_table("clients").drop_columns(["seconds"]).to_pylist() for folder in (hung, raised))
    assert next(row for row in rows if row["client"] == bad)["status"] == "took longer than 5 s 2 times"
    assert [row for row in rows if row["client"] != bad] == [row for row in others if row["client"] != bad]
    assert len(rows) == len(others)


@pytest.mark.engine
@pytest.mark.usefixtures("ray_session")
def test_a_client_that_ends_its_process_is_found_and_left_out(undisturbed: RunFolder, tmp_path: Path) -> None:
    bad = drawn(undisturbed, 0)[1]
    noting = Noting()
    ended = runner.launch(parsed("exit", (bad,), DROP, "federation.rounds=1"), str(tmp_path), on_ray(), noting)
    assert "clients of round 1 ended their processes" in " ".join(noting.notes)
    raised = runner.launch(parsed("raise", (bad,), DROP, "federation.rounds=1"), str(tmp_path), local, Progress())
    assert_same_bits(weights(ended), weights(raised))
    rows, others = (folder.read_table("clients").drop_columns(["seconds"]).to_pylist() for folder in (ended, raised))
    assert next(row for row in rows if row["client"] == bad)["status"] == "ended its process 2 times"
    assert [row for row in rows if row["client"] != bad] == [row for row in others if row["client"] != bad]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_client_that_hangs_ends_the_run(undisturbed: RunFolder, tmp_path: Path) -> None:
    bad = drawn(undisturbed, 0)[1]
    changes = [*PATIENT, "federation.failures.retries=0", "federation.cohort_size=1"]
    with pytest.raises(ClientError, match=rf"client {bad} took longer than 5 s in round 1 of arm 'odd': raise"):
        runner.launch(parsed("hang", (bad,), *changes), str(tmp_path), on_ray(), Progress())


class Full:
    """A disk that is full from some write on, until room is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.writes, self.after, self._replace = 0, after, files._replace
        monkeypatch.setattr(files, "_replace", self.replace)

    def replace(self, path: Path, data: bytes, mode: int) -> None:
        self.writes += 1
        if self.writes > self.after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._replace(path, data, mode)


@pytest.mark.parametrize("after", [0, 14])
def test_a_full_disk_ends_a_run_that_goes_on_when_there_is_room(
    after: int, undisturbed: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        Full(patched, after)
        with pytest.raises(RunError, match="No space left on device; check whether the disk is full"):
            runner.launch(parsed(), str(tmp_path), local, Progress())
    [path] = tmp_path.iterdir()
    assert not list(path.rglob("*.tmp"))
    if not after:
        assert [file.parent.name for file in path.rglob("*") if file.is_file()] == ["lease"] * 2
        return
    runner.resume(str(path), local, Progress())
    assert not faults.differences(path, Path(undisturbed.url))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A whole run of the command, undisturbed, and its seconds."""
    place = tmp_path_factory.mktemp("alone")
    began = time.monotonic()
    command = faults.launched(place)
    assert command.wait() == 0, command.said()
    seconds = time.monotonic() - began
    assert not command.left()
    run = faults.run_of(place)
    assert run is not None
    return run, seconds


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_drivers_that_are_killed_leave_nothing_behind_and_their_runs_resume(
    alone: tuple[Path, float], tmp_path: Path
) -> None:
    """At ten moments, two drivers at a time; Ray's agents take up to a minute to see that a driver is gone, so all are
    waited for together.
    """
    expected, seconds = alone
    moments = [(i + random.Random(i).random()) / 10 for i in range(10)]
    with ThreadPoolExecutor(2) as two:
        places = [tmp_path / f"{moment:.3f}" for moment in moments]
        killed = list(two.map(faults.driver_killed, places, [moment * seconds for moment in moments]))
    for disturbed in killed:
        run = faults.run_of(disturbed.place)
        assert run is not None
        assert not faults.differences(run, expected), disturbed.moment
        for table in TABLES:
            parts = RunFolder.open(str(run)).read_table(table)
            assert len(parts) == len(RunFolder.open(str(expected)).read_table(table))
    assert not [title for disturbed in killed for title in disturbed.left()]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["server", "clients", "latest", "tidy"])
def test_a_driver_that_dies_as_it_writes_a_checkpoint_resumes(
    step: str, alone: tuple[Path, float], tmp_path: Path
) -> None:
    """Between the files of round 2's checkpoint, and before those that they replace are removed, by a patch in the
    process that is killed.
    """
    (tmp_path / "sitecustomize.py").write_text(DEADLY)
    environment = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "DEADLY": step}
    file = tmp_path / "s.yaml"
    file.write_text(faults.TEXT)
    command = faults.Command(["-m", "rayfed", "launch", str(file), "--out", str(tmp_path / "runs")], environment)
    assert command.wait() == -signal.SIGKILL
    again = faults.resumed(tmp_path)
    assert again.wait() == 0, again.said()
    run = faults.run_of(tmp_path)
    assert run is not None
    assert not faults.differences(run, alone[0])
    assert not list(run.rglob("*.tmp"))
    assert not command.left()


DEADLY = """
import os, signal, sys
if "rayfed" in sys.orig_argv:
    from rayfed.store import files
    replace, step = files._replace, os.environ["DEADLY"]
    def deadly(path, data, mode):
        if "clients" in path.parts:
            now = step == "clients" and path.name.split(".")[1] == "2"
        else:
            now = step in path.name and ("round-00002" in path.name or b'"round": 2' in data)
        if "checkpoint" in path.parts and now:
            path.with_name("." + path.name + ".half.tmp").write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        replace(path, data, mode)
        if step == "tidy" and path.name == "latest.json" and b'"round": 2' in data:
            os.kill(os.getpid(), signal.SIGKILL)
    files._replace = deadly
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a file system in memory")
def test_a_file_system_that_is_full(alone: tuple[Path, float], tmp_path: Path) -> None:
    if not user_namespaces():
        missing("no file system of one's own: allow unprivileged user namespaces")
    expected, _ = alone
    disturbed = faults.disk_full(tmp_path / "run", faults.kilobytes(expected) // 3)
    run = faults.run_of(disturbed.place)
    assert run is not None
    assert not faults.differences(run, expected)
    assert not disturbed.left()


NODE = """
import sys, logging
import ray
from ray.cluster_utils import Cluster
from actors.executor import on_ray
from rayfed.runs import runner
from rayfed.simulation.progress import Progress
from tests.helpers import faults
from rayfed import scenario as scenarios

class NodeKiller(Progress):
    done = False
    def clients_done(self, round, done, total):
        if round == 2 and not self.done:
            self.done = True
            cluster.remove_node(second, allow_graceful=False)
    def note(self, message):
        print(message)

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
second = cluster.add_node(num_cpus=2)
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
s = scenarios.parse(faults.TEXT, changes=["resources.clients={actors: 3, num_cpus: 1}"])
killer = NodeKiller()
print("RUN", runner.launch(s, sys.argv[1], on_ray(), killer).url, flush=True)
assert killer.done
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_whole_node_is_killed(alone: tuple[Path, float], tmp_path: Path) -> None:
    said = in_own_process(NODE, str(tmp_path)).splitlines()
    assert any("again" in line for line in said)
    run = next(line.removeprefix("RUN ") for line in said if line.startswith("RUN "))
    assert not faults.differences(Path(run), alone[0])


STORE = """
import sys, logging
import ray
from rayfed.runs import runner
from rayfed.simulation.progress import Progress
from rayfed import scenario as scenarios
from actors.executor import on_ray
from tests.helpers.run_fixtures import BIG

ray.init(address="local", num_cpus=2, object_store_memory=int(sys.argv[2]), include_dashboard=False,
         log_to_driver=False, logging_level=logging.ERROR)
s = scenarios.parse(BIG)
print(runner.launch(s, sys.argv[1], on_ray(), Progress()).url)
"""


@pytest.mark.slow
def test_an_object_store_that_is_smaller_than_a_rounds_updates(tmp_path: Path) -> None:
    """A round's are 8 x 17 MB."""
    small, large = (in_own_process(STORE, str(tmp_path / size), size).split()[-1] for size in ("80000000", "500000000"))
    assert not faults.differences(Path(small), Path(large))


@component
class Greedy(Defence):
    """In one trial it takes what the process has, or the process itself."""

    how: Literal["nothing", "memory", "process"] = "nothing"

    def check(self, model: Any) -> None:
        """Where the trial is: its process builds the arm, too."""
        if self.how == "process" and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        def update(task: Task) -> Update:
            if self.how == "memory":
                limited(next, task)
            return next(task)

        return update


def limited(next: UpdateMethod, task: Task) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, before[1]))
    try:
        bytearray(1 << 31)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(("how", "message"), [("memory", "MemoryError"), ("process", "died")])
def test_a_trial_that_runs_out_of_memory_is_a_row_and_the_others_are_right(
    how: str, message: str, ray_session: None, tmp_path: Path
) -> None:
    arms = "arms={odd: [{name: 'tests.actors.test_faults:Greedy', how: nothing}]}"
    fields = f"sweep={{max_concurrent: 1, fields: {{arms.odd.defences.0.how: [nothing, {how}], training.lr: [0.1]}}}}"
    s = scenarios.parse(TEXT, changes=[arms, fields])
    folder = sweeps.sweep(s, str(tmp_path), on_tune(), SweepProgress())
    good, bad = folder.outcomes().to_pylist()
    assert (good["status"], bad["status"]) == ("finished", "failed")
    assert message in bad["error"]
    own = runner.launch(scenarios.parse(TEXT, changes=[arms]), str(tmp_path), local, Progress())
    assert_same_bits(weights(folder.trial(good["run"])), weights(own))
