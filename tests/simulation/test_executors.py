"""Executors: everything in one process comes to what actors come to, and gives away no more."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import traceback
from bdb import BdbQuit
from collections.abc import Sequence
from functools import partial
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import ray
import torch
import typer
from ray import cloudpickle
from ray.exceptions import RayTaskError
from torch import nn
from typer.testing import CliRunner

from actors import local_ray, transport, workers
from actors.executor import RayExecutor, on_ray
from actors.sweep import on_tune
from actors.trial import trainable
from rayfed import registry
from rayfed import scenario as scenarios
from rayfed.attacks.base import Reconstruction
from rayfed.attacks.closed_form.analytic import Analytic
from rayfed.cli import app
from rayfed.cli.common import errors_for_people
from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.errors import UserError
from rayfed.registry import component
from rayfed.results.sweep_folder import SweepFolder
from rayfed.runs import executors, runner, sweeps
from rayfed.runs.local_sweep import local_sweep
from rayfed.samples import Records
from rayfed.scenario import ResolvedArm, Scenario
from rayfed.simulation.executors.attacker import AttackWorker
from rayfed.simulation.executors.local import LocalExecution, LocalExecutor, _travelled, local
from rayfed.simulation.progress import Progress, SweepProgress
from rayfed.simulation.tables import RoundTables
from rayfed.update import Observation, Update
from tests.conftest import REPOSITORY
from tests.helpers.faults import differences
from tests.helpers.run_fixtures import Noting, assert_same_bits, weights
from tests.helpers.scenario_fixtures import LARGE, SCENARIOS, tiny

TEXT = """
name: t
data: {name: digits, size: 8, train_samples: 100, test_samples: 20}
model: {name: mlp, hidden: [8]}
training: {batch_size: 8, momentum: 0.5}
federation: {rounds: 2, clients: 2, cohort_size: 1}
resources: {clients: {actors: 2}, attackers: {actors: 1}}
"""
RANDOM_SIZES = ("sent_bytes", "bytes_up")
"""Columns that differ from run to run where ciphertexts of lattices, compressed, have keys of their own."""


def parsed(*changes: str) -> Scenario:
    return scenarios.parse(TEXT, changes=changes)


QUICK = ("noniid", "private", "fedboosting", "secure_aggregation")


@pytest.mark.engine
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[] if p.stem in QUICK else pytest.mark.slow) for p in SCENARIOS if p.stem not in LARGE],
    ids=lambda p: p.stem,
)
def test_actors_come_to_the_same_bits(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Weights, clients' states and tables, with one, two and four client actors.

    Of large networks the scenarios of usual size alone: four runs of a full one, with all its arms, take ten minutes.
    """
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.syspath_prepend(path.parent)
    changes = tiny(path, request)
    scenario = scenarios.load(path, changes)
    protections = [arm.protection.name for arm in scenarios.resolve(scenario).values() if arm.protection]
    but = RANDOM_SIZES if {"ckks", "bfv"} & {*protections} else ()
    here = runner.launch(scenario, str(tmp_path), local, Progress())
    assert "<html" in here.read_text("report.html")
    for actors in (2,) if path.stem in QUICK else (1, 2, 4):
        there = scenarios.load(path, [*changes, f"resources.clients.actors={actors}"])
        folder = runner.launch(there, str(tmp_path), on_ray(), Progress())
        assert not differences(Path(folder.url), Path(here.url), but), actors


@component
class Vandal(Defence):
    """Writes on all that it is given."""

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        def update(task: Task) -> Update:
            sent = next(task)
            for tensor in (*task.weights.values(), *task.buffers.values()):
                tensor.zero_()
            task.data.labels.zero_()
            return sent

        return update


@component
class Defacer(Analytic):
    """Writes on all that it is given, once it has what it wants."""

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        found = super().reconstruct(observations, model, generators)
        for observation in observations:
            for tensor in (*observation.weights.values(), *observation.update.values()):
                tensor.zero_()
        return found


@component
class Honest(Defence):
    """Does nothing."""


def test_what_a_defence_writes_on_its_arguments_reaches_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the clients of other calls, nor those of its own: two calls for eight clients, or a call for each."""
    found = []
    for name, at_once in (("Honest", 1), ("Vandal", 1), ("Vandal", 4)):
        monkeypatch.setattr(LocalExecutor, "clients", at_once)
        scenario = parsed(f"arms.a=[tests.simulation.test_executors:{name}]", "federation.clients=8")
        found.append(weights(runner.launch(scenario, str(tmp_path), local, Progress())))
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])


def test_what_a_defence_writes_on_its_arguments_is_not_observed(tmp_path: Path) -> None:
    """Nor is it the truth by which attacks are scored."""
    attack = "attacks=[{name: analytic, rounds: [0, 1], victims: 2, observes: gradient, batch_size: 1}]"
    arms = [f"arms.a=[tests.simulation.test_executors:{name}]" for name in ("Honest", "Vandal")]
    found = [runner.launch(parsed(arm, attack), str(tmp_path), local, Progress()) for arm in arms]
    uncertain = ["seconds", "objective"]  # nan, where an attack has none
    first, other = (folder.read_table("attacks").drop(uncertain).to_pylist() for folder in found)
    assert first == other
    assert len(first) == 4


def test_what_an_attack_writes_on_its_arguments_reaches_nobody_else(tmp_path: Path) -> None:
    attacks = [
        f"attacks=[{{name: '{name}', label: x, rounds: [0, 1], victims: 2, observes: gradient, batch_size: 1}}]"
        for name in ("tests.simulation.test_executors:Defacer", "analytic")
    ]
    first, other = (runner.launch(parsed(attack), str(tmp_path), local, Progress()) for attack in attacks)
    assert not differences(Path(first.url), Path(other.url))
    assert len(first.read_table("attacks")) == 4


@component
class Hoarder(Defence):
    """Keeps what no process can send to another."""

    what: Literal["lock", "graph"] = "lock"

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        def update(task: Task) -> Update:
            kept = threading.Lock() if self.what == "lock" else torch.ones(2, requires_grad=True) * 2
            task.state["kept"] = kept
            return next(task)

        return update


def test_what_cannot_travel_fails_here_too(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object") as caught:
        runner.launch(parsed("arms.a=[tests.simulation.test_executors:Hoarder]"), str(tmp_path), local, Progress())
    assert caught.value.__notes__ == ["while pickling a value from the call `cohorts` of ClientWorker"]


def test_tensors_travel_without_what_they_were_computed_from(tmp_path: Path) -> None:
    arm = "arms.a=[{name: 'tests.simulation.test_executors:Hoarder', what: graph}]"
    folder = runner.launch(parsed(arm), str(tmp_path), local, Progress())
    assert folder.read_mapping("status.json")["state"] == "finished"


THREADS = list[int]()


@component
class Counting(Defence):
    """Notes how many threads PyTorch has where clients work."""

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        def update(task: Task) -> Update:
            THREADS.append(torch.get_num_threads())
            return next(task)

        return update


def test_clients_have_the_threads_that_their_actors_would_have(tmp_path: Path) -> None:
    """Their number changes the order of sums; afterwards the process has its own again."""
    before = torch.get_num_threads()
    changes = "arms.a=[tests.simulation.test_executors:Counting]", "resources.clients.num_cpus=1.5"
    runner.launch(parsed(*changes), str(tmp_path), local, Progress())
    assert set(THREADS) == {2}
    assert torch.get_num_threads() == before


def test_a_limit_on_clients_time_is_said_not_to_be_kept(tmp_path: Path) -> None:
    noting = Noting()
    runner.launch(parsed("federation.failures.timeout=5"), str(tmp_path), local, noting)
    assert [note for note in noting.notes if "federation.failures.timeout" in note]


@pytest.mark.parametrize("command", ["launch", "attack", "sweep"])
def test_no_cluster_is_named_beside_local(command: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(TEXT + "attacks: [idlg]\n" + SWEEP * (command == "sweep"))
    arguments = [command, str(tmp_path / "s.yaml"), "--executor", "local", "--address", "auto", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert "--executor local" in " ".join(result.output.split())
    assert [path.name for path in tmp_path.iterdir()] == ["s.yaml"]


def test_the_installed_executor_is_found_by_its_entry_points() -> None:
    assert executors.load_entry_point("ray", "execution") is on_ray
    assert executors.load_entry_point("ray", "sweep_execution") is on_tune
    assert executors.load_entry_point("ray", "starting") is local_ray.starting
    assert executors.load_entry_point("ray", "trainable") is trainable


def test_another_package_can_bring_an_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = EntryPoints(
        [EntryPoint("execution", "tests.simulation.test_executors:on_a_cloud", "rayfed.executor.cloud")]
    )
    monkeypatch.setattr(executors, "entry_points", lambda **wanted: installed.select(**wanted))
    assert executors.execution("cloud", "here") == ("cloud", "here")
    with pytest.raises(UserError, match=r"no installed package provides 'cloud' \(sweep_execution\)"):
        executors.sweep_execution("cloud")


def on_a_cloud(address: str | None) -> tuple[str, str | None]:
    return "cloud", address


def test_an_executor_that_is_not_there_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="unknown executor 'rey': did you mean 'ray'"):
        executors.execution("rey")
    monkeypatch.setattr(executors, "entry_points", lambda **_: EntryPoints())
    with pytest.raises(UserError, match=r"no installed package provides 'ray' .*--executor local"):
        executors.sweep_execution("ray")


SWEEP = "sweep: {fields: {training.lr: [0.1]}}\n"


@pytest.mark.parametrize("what", ["scheduler: asha", "trackers: {tensorboard: {}}"])
def test_what_tune_alone_has_is_refused(what: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(TEXT + SWEEP.replace("}}", "}, " + what + "}"))
    arguments = ["sweep", str(tmp_path / "s.yaml"), "--executor", "local", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert f"sweep.{what.partition(':')[0]} needs Ray Tune" in " ".join(result.output.split())


WITHOUT_RAY = """
import sys
from rayfed.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
found = {name for name in sys.modules if name.partition(".")[0] in ("ray", "actors")}
assert not found, found
"""


def in_own_process(code: Sequence[str], folder: Path, said: str = "") -> str:
    """What a Python prints that is told something as it runs."""
    done = subprocess.run(
        [sys.executable, *code],
        input=said,
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != "PYTHONBREAKPOINT"} | {"PYTHONPATH": str(REPOSITORY)},  # Ray's
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.engine
def test_ray_is_not_even_imported(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(TEXT + "attacks: [{name: idlg, iterations: 1}]\n")
    in_own_process(["-c", WITHOUT_RAY, "launch", "s.yaml", "--out", "runs", "--executor", "local"], tmp_path)


STOPPING = """
from rayfed.defences.base import Defence
from rayfed.registry import component

@component
class Stopping(Defence):
    def wrap_update(self, next):
        def update(task):
            if task.client == task.round == 0:
                breakpoint()
            return next(task)
        return update
"""


@pytest.mark.engine
def test_a_debugger_stops_in_a_users_defence(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(STOPPING)
    (tmp_path / "s.yaml").write_text(TEXT + "arms: {a: [own:Stopping]}\n")
    command = ["-m", "rayfed", "launch", "s.yaml", "--out", "runs", "--executor", "local"]
    said = in_own_process(command, tmp_path, "p 6*7, task.client\nc\n")
    assert "(42, 0)" in said
    [report] = tmp_path.glob("runs/*/report.html")
    assert "<html" in report.read_text()


def test_nobody_is_told_who_is_malicious_and_attackers_not_what_encodes_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    roles: list[Any] = []
    given: list[Any] = []
    start, attack, made = LocalExecutor.restart_server, AttackWorker.attack, AttackWorker.__init__

    def started(self: LocalExecutor, told: Any, saved: Any) -> None:
        roles.append(told)
        start(self, told, saved)

    def attacked(self: AttackWorker, *arguments: Any) -> Any:
        given.extend(arguments)
        return attack(self, *arguments)

    def noting(self: AttackWorker, *arguments: Any) -> None:
        given.extend(arguments)
        made(self, *arguments)

    monkeypatch.setattr(LocalExecutor, "restart_server", started)
    monkeypatch.setattr(AttackWorker, "attack", attacked)
    monkeypatch.setattr(AttackWorker, "__init__", noting)
    table = scenarios.parse(
        """
        name: t
        data: diabetes
        model: mlp
        federation: {rounds: 1, clients: 5, malicious: {name: sign_flip, clients: [2, 4]}}
        attacks: [{name: analytic, victims: [1]}]
        """
    )
    runner.launch(table, str(tmp_path), local, Progress())
    assert roles
    assert all(role.arm.malicious is None for told in roles for role in told.values())
    [arm] = [value for value in given if isinstance(value, ResolvedArm)]
    assert arm.malicious is None
    seen = [value for value in given if isinstance(value, Records)]
    seen += [observation.sample for value in given if isinstance(value, list) for observation in value
             if isinstance(observation, Observation)]  # fmt: skip
    assert len(seen) == 2
    columns = {(column.low, column.high, column.deviation) for sample in seen for column in sample.columns}
    assert columns == {(0.0, 1.0, 0.0)}


def test_tensors_travel_as_they_do_between_actors() -> None:
    """In the order of C: another order of the same numbers is another order of sums."""
    tensor = torch.randn(30, 40).T
    arrived = _travelled({"w": tensor, "one": torch.tensor(3.0)})
    assert torch.equal(arrived["w"], tensor)
    assert arrived["w"].stride() == transport._to_tensor(transport._to_numpy(tensor)).stride()
    assert arrived["one"].shape == ()


GRANTING = """
from rayfed.threat_model.grants.base import Grant
from rayfed.registry import component

@component
class Loss(Grant):
    describe = "the training loss"
    fills = ("loss",)
    def grant(self, observed, truth, update):
        return {"loss": update.los}

@component
class Other(Loss):
    pass
"""


def test_mistakes_in_ones_own_code_are_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_grants.py").write_text(GRANTING)
    attack = "attacks: [{name: analytic, observes: gradient, knowledge: ['own_grants:Loss']}]\n"
    (tmp_path / "s.yaml").write_text(TEXT + "arms: {a: []}\n" + attack)
    found = CliRunner().invoke(app, ["launch", "s.yaml", "--executor", "local", "--quiet"])
    assert found.exit_code == 2
    said = " ".join(found.output.split())
    assert "AttributeError: 'Update' object has no attribute 'los' (raised by own_grants.py, line 10;" in said
    assert "internal error" not in said
    twice = "attacks.0.knowledge=['own_grants:Loss', 'own_grants:Other']"
    found = CliRunner().invoke(app, ["validate", "s.yaml", "--set", twice])
    assert found.exit_code == 2
    assert "two of these grants provide 'loss'" in " ".join(found.output.split())


def test_so_they_are_in_an_actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error comes back without its traceback, of which Ray sends the text."""
    monkeypatch.setattr(registry, "SEARCHED", [str(tmp_path)])
    (tmp_path / "own_rule.py").write_text("def bad():\n    return 1 / 0\n")
    code = compile((tmp_path / "own_rule.py").read_text(), str(tmp_path / "own_rule.py"), "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    with pytest.raises(ZeroDivisionError) as caught:
        names["bad"]()
    text = "".join(traceback.format_exception(caught.value))
    sent = cloudpickle.loads(cloudpickle.dumps(RayTaskError("observe", text, caught.value)))

    def arriving(*_: Any) -> None:
        raise sent.as_instanceof_cause()

    monkeypatch.setattr(ray, "get", arriving)
    monkeypatch.setattr(ray, "wait", lambda *_, **__: ([], []))
    server = partial(RayExecutor.get, object.__new__(RayExecutor), [ray.ObjectRef.from_random()])
    for receive in (server, partial(workers.wait_for, [])):
        with pytest.raises(typer.Exit) as ended, errors_for_people(debug=False):
            receive()
        assert ended.value.exit_code == 2
        told = " ".join(capsys.readouterr().err.split())
        assert "error: ZeroDivisionError: division by zero (raised by own_rule.py, line 2;" in told


def test_a_round_that_is_not_applied_is_told_and_logged(tmp_path: Path) -> None:
    told = Noting()
    masks = "{name: secure_aggregation, dropouts: {reveal: 2}}"
    scenario = parsed(f"arms={{a: {{protection: {masks}}}}}")
    folder = runner.launch(scenario, str(tmp_path), local, told)
    lines = [note for note in told.notes if "is not applied: " in note]
    assert len(lines) == scenario.federation.rounds
    assert all(line in folder.read_text("log.txt") for line in lines)


@pytest.mark.parametrize("table", ["validated", "clients", "rounds", "add"])
def test_a_table_that_rules_do_not_have_is_named(table: str) -> None:
    tables = RoundTables()
    with pytest.raises(UserError, match=rf"'{table}', to which rules cannot add rows: .*scores, secure_sums, weights"):
        tables.add({"arm": "a", "round": 0}, {table: [{"factor": 0.5}]})
    assert tables == RoundTables()


def swept(tmp_path: Path, *changes: str) -> SweepFolder:
    fields = "sweep={fields: {training.lr: [0.1, 0.2, 0.3]}}"
    return sweeps.sweep(parsed(fields, *changes), str(tmp_path), local_sweep, SweepProgress())


def test_a_trials_log_has_its_notes(tmp_path: Path) -> None:
    """Nobody watches a trial, so that they stand nowhere else."""
    folder = swept(tmp_path, "federation.failures.timeout=5", "federation.rounds=1")
    for name in folder.trial_names():
        log = folder.trial(f"trials/{name}").read_text("log.txt")
        assert log.count("federation.failures.timeout") == 1


STOPS = list[int]()


@component
class Quitting(Defence):
    """Somebody leaves the debugger here."""

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        def update(task: Task) -> Update:
            STOPS.append(task.client)
            raise BdbQuit

        return update


def test_who_leaves_the_debugger_leaves_the_sweep(tmp_path: Path) -> None:
    STOPS.clear()
    with pytest.raises(BdbQuit):
        swept(tmp_path, "arms.a=[tests.simulation.test_executors:Quitting]")
    assert len(STOPS) == 1
    [folder] = (SweepFolder.open(str(path)) for path in tmp_path.iterdir())
    assert folder.files.read_mapping("status.json")["state"] == "interrupted"
    assert not len(folder.outcomes())  # so that `resume` plays it


def test_no_bar_of_a_sweep_is_where_a_debugger_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = list[bool]()
    monkeypatch.setattr("rich.progress.Progress.start", lambda bar: began.append(not bar.disable))
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    (tmp_path / "s.yaml").write_text(TEXT.replace("rounds: 2", "rounds: 1") + SWEEP)
    arguments = ["sweep", str(tmp_path / "s.yaml"), "--executor", "local", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert began == [False]


def test_what_ray_can_send_travels_here_too() -> None:
    class Made:
        number = 3

    assert _travelled({"kept": Made()})["kept"].number == 3
    assert _travelled(lambda: 3)() == 3


class Asking(LocalExecutor):
    """Notes what the server is asked, and how often its answers are waited for."""

    asked: ClassVar[list[str]] = []

    def check_server(self) -> None:
        self.asked.append("check")

    def serve(self, method: str, *args: Any, returns: int = 1) -> Any:
        self.asked.append(method)
        return super().serve(method, *args, returns=returns)

    def get(self, refs: Sequence[Any], limit: float | None = None) -> list[Any]:
        self.asked.append("wait")
        return super().get(refs, limit)


counting = LocalExecution(Asking)


def test_a_round_waits_for_the_server_once_where_no_rule_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Asking, "asked", [])
    runner.launch(parsed(), str(tmp_path), counting, Progress())
    assert Asking.asked == ["check", "sent", *2 * ["add", "finish", "wait"]], "nor is it looked after in round 1"


def test_an_arms_rule_that_asks_is_asked_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Asking, "asked", [])
    arms = "arms={plain: {}, masked: {protection: secure_aggregation}}"
    runner.launch(parsed(arms, "federation.rounds=1"), str(tmp_path), counting, Progress())
    assert Asking.asked.count("begin_round") == 1
    assert Asking.asked.count("finish") == 2
