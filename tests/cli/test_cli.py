"""The command line: what a user types, what it prints, and its exit codes."""

from __future__ import annotations

import gzip
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from rayfed import registry
from rayfed.cli import app
from rayfed.report.terminal.run import RunView
from rayfed.report.terminal.sweep import SweepView
from rayfed.results.sweep_folder import SweepFolder
from rayfed.scenario import Scenario
from rayfed.store.folder import RunFolder
from tests.conftest import REPOSITORY, imported
from tests.helpers.command import LOCAL, MINIMAL, run
from tests.helpers.report_fixtures import Page, make_sweep
from tests.helpers.scenario_fixtures import SCENARIOS, tiny

SHORT = ("key_lock", "tabular", "toy", "undefended")
"""Scenarios that take no more than some seconds even with a report; four others are in `test_executors`."""


@pytest.fixture
def file(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(text: str = MINIMAL) -> str:
        (tmp_path / "s.yaml").write_text(text)
        return str(tmp_path / "s.yaml")

    return write


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("fedration.rounds=2", "unknown key; did you mean 'federation'?"),
        ("training.lr=fast", "training.lr: found 'fast'; input should be a valid number"),
        ("defences=[{name: gaussian, sigma: -0.1}]", "defences.0.sigma: found -0.1; input should be greater than"),
        ("federation.clients=101", "101"),
        ("attacks=[{name: ddlg}]", "did you mean 'dlg'?"),
        ("data={name: mnist, root: /nowhere}", "/nowhere"),
        ("data={name: image_folder, root: /nowhere}", "/nowhere"),
        ("model={name: convnet}", "convnet"),
        ("model={name: torchvision, arch: resnet81}", "resnet"),
    ],
)
def test_the_users_mistakes_end_with_2_and_one_message(change: str, expected: str, file) -> None:  # type: ignore[no-untyped-def]
    code, output = run("launch", file(), "--set", change)
    assert code == 2, output
    assert output.startswith("error:")
    assert expected in output
    assert "Traceback" not in output


def test_more_clients_than_samples_names_both_numbers(file) -> None:  # type: ignore[no-untyped-def]
    code, output = run("validate", file(), "--set", "federation.clients=101")
    assert code == 2
    assert "101" in output
    assert "100" in output


def test_not_yaml(file) -> None:  # type: ignore[no-untyped-def]
    code, output = run("launch", file("name: [unclosed\nfederation: {"))
    assert (code, "not valid YAML" in output) == (2, True)


def test_missing_scenario(tmp_path: Path) -> None:
    code, output = run("launch", str(tmp_path / "no.yaml"))
    assert (code, "no such scenario file; `rayfed new NAME`" in output) == (2, True)
    assert "`rayfed launch noniid` runs the built-in scenario" in run("launch", str(tmp_path / "noniid.yaml"))[1]


def truncated_mnist(folder: Path) -> None:
    folder.mkdir()
    for split, n in (("train", 10), ("t10k", 5)):
        with gzip.open(folder / f"{split}-images-idx3-ubyte.gz", "wb") as images:
            images.write(struct.pack(">IIII", 2051, n, 28, 28) + bytes(n * 784 - (100 if split == "train" else 0)))
        with gzip.open(folder / f"{split}-labels-idx1-ubyte.gz", "wb") as labels:
            labels.write(struct.pack(">II", 2049, n) + bytes(n))


def test_truncated_idx_names_the_file(tmp_path: Path, file) -> None:  # type: ignore[no-untyped-def]
    truncated_mnist(tmp_path / "mnist")
    code, output = run("launch", file(), "--set", f"data={{name: mnist, root: {tmp_path / 'mnist'}}}")
    assert code == 2
    assert "train-images-idx3-ubyte.gz" in output


def test_truncated_parquet_names_the_file(tmp_path: Path, file) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "broken.parquet"
    pq.write_table(pa.table({"image": [{"bytes": b"x", "path": None}] * 50, "label": np.zeros(50, np.int64)}), path)
    path.write_bytes(path.read_bytes()[:-20])
    code, output = run("launch", file(), "--set", f"data={{name: parquet, train: {path}}}")
    assert (code, "broken.parquet" in output) == (2, True)


def test_images_that_the_model_cannot_take(file) -> None:  # type: ignore[no-untyped-def]
    code, output = run("validate", file(), "--set", "model={name: small_cnn}")
    assert code == 2
    assert "8" in output


def test_unwritable_output_folder(tmp_path: Path, file) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "a_file").write_text("")
    code, output = run("launch", file(), "--out", str(tmp_path / "a_file" / "runs"))
    assert code == 2, output
    assert "choose another folder with --out" in output


@pytest.mark.engine
@pytest.mark.usefixtures("ray_session")
def test_resources_that_are_not_there(tmp_path: Path, file) -> None:  # type: ignore[no-untyped-def]
    code, output = run("launch", file(), "--out", str(tmp_path), "--set", "resources.clients.num_gpus=1")
    assert code == 2, output
    assert "resources.clients: one actor asks for 1 CPU and 1 GPU" in output


@pytest.mark.engine
def test_a_module_beside_the_scenario_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def move_to(name: str) -> Path:
        """As a new process in another folder would start."""
        monkeypatch.setattr(sys, "path", before.copy())
        monkeypatch.setattr(registry, "SEARCHED", [])
        sys.modules.pop("own_net", None)
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        return tmp_path / name

    before = sys.path.copy()
    home = move_to("scenarios")
    code = (
        "from torch import nn\n\n\ndef net(classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    (home / "own_net.py").write_text(code)
    text = MINIMAL.replace("{name: mlp, hidden: [8]}", "own_net:net") + "attacks: [{name: idlg, iterations: 1}]\n"
    (home / "s.yaml").write_text(text)
    move_to("elsewhere")
    exit_code, output = run("launch", str(home / "s.yaml"), "--out", str(tmp_path / "runs"), *LOCAL)
    assert exit_code == 0, output
    [folder] = (tmp_path / "runs").iterdir()
    saved = folder / "scenario.yaml"
    saved.write_text(saved.read_text().replace("rounds: 1", "rounds: 2"))
    move_to("third")
    exit_code, output = run("resume", str(folder), "--extend", *LOCAL)
    assert exit_code == 0, output
    (move_to("fourth") / "s.yaml").write_text(text)
    exit_code, output = run("attack", "s.yaml", "--run", str(folder), "--out", str(tmp_path / "attacked"), *LOCAL)
    assert exit_code == 0, output


@pytest.mark.parametrize("command", ["resume", "report"])
def test_a_folder_that_is_no_run(command: str, tmp_path: Path) -> None:
    code, output = run(command, str(tmp_path))
    assert (code, "not a run folder" in output) == (2, True)


def test_a_defect_of_ours_ends_with_1(monkeypatch: pytest.MonkeyPatch, file) -> None:  # type: ignore[no-untyped-def]
    from rayfed.simulation import inputs

    monkeypatch.setattr(inputs, "prepare_inputs", divmod)  # raises within rayfed's code
    assert run("validate", file())[0] == 1
    with pytest.raises(TypeError):
        CliRunner().invoke(app, ["validate", file(), "--debug"], catch_exceptions=False)


@pytest.mark.parametrize(("command", "resumable"), [("launch", True), ("attack", False)])
def test_what_had_not_begun_is_not_said_to_go_on(
    command: str,
    resumable: bool,
    monkeypatch: pytest.MonkeyPatch,
    file,  # type: ignore[no-untyped-def]
) -> None:
    from rayfed.runs import runner

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, command, interrupted)
    code, output = run(command, file(), "--set", "attacks=[idlg]")
    assert (code, "before any result was written" in output) == (130, resumable)
    assert "rayfed resume" not in output


@pytest.mark.parametrize("again", [False, True])
def test_an_interrupted_run_is_named_as_resume_takes_it(
    again: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file,  # type: ignore[no-untyped-def]
) -> None:
    from rayfed.runs import runner

    def interrupted(*arguments: object) -> None:
        if again:
            raise KeyboardInterrupt

    def begun(scenario: Scenario, out: str, execution: object, view: RunView) -> None:
        view.starting(scenario, RunFolder.at(f"{out}/mine"), "here")
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "launch", begun)
    monkeypatch.setattr(RunView, "interrupted", interrupted)
    code, output = run("launch", file(), "--out", str(tmp_path / "two words"), *LOCAL)
    assert code == 130
    assert f"`rayfed resume '{tmp_path}/two words/mine'`" in output, output


def test_an_interrupted_sweep_is_named_as_resume_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file) -> None:  # type: ignore[no-untyped-def]
    from rayfed.runs import sweeps

    def begun(scenario: Scenario, out: str, execution: object, view: SweepView) -> None:
        view.starting(scenario, SweepFolder(RunFolder.at(f"{out}/mine")), "here", 2, 0)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeps, "sweep", begun)
    swept = ("--set", "sweep={fields: {training.lr: [0.1, 0.2]}}")
    code, output = run("sweep", file(), *swept, "--out", str(tmp_path), *LOCAL)
    assert code == 130
    assert f"`rayfed resume {tmp_path}/mine`" in output, output


def test_an_interrupted_sweep_has_the_page_of_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Callable[[], str]
) -> None:
    from rayfed.runs import sweeps

    made = make_sweep(str(tmp_path / "runs"), sigmas=2, repeats=1, failed=0, stopped=0)
    made.write_outcomes(made.outcomes().to_pylist()[:2])

    def begun(scenario: Scenario, out: str, execution: object, view: SweepView) -> None:
        view.starting(scenario, made, "here", 3, 0)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeps, "sweep", begun)
    code, output = run("sweep", file(), "--set", "sweep={fields: {training.lr: [0.1, 0.2]}}", *LOCAL)
    assert code == 130
    assert f"{made.url}/report.html" in output
    assert "2 trials finished" in Page(made.files.read_text("report.html")).text


def test_a_sweep_says_which_pareto_optimal_settings_leak() -> None:
    both = {"status": "finished", "attack": "dlg", "baseline_accuracy": 0.1, "attacked": 1, "without_result": 0}
    rows = [
        {**both, "trial": 0, "arm": "none", "test_accuracy": 0.9, "psnr": 40.0, "result": "leaks", "verdict": "leaks"},
        {**both, "trial": 1, "arm": "noise", "test_accuracy": 0.8, "psnr": 5.0, "verdict": "not reconstructed"},
    ]
    said = StringIO()
    SweepView(Console(file=said, width=200), bar=False).finished(rows, [], "report.html")
    [line] = [line for line in said.getvalue().splitlines() if "Pareto-optimal" in line]
    assert "†" not in said.getvalue()
    assert set(line.partition(": ")[2].split("; ")) == {"none (leaks)", "noise"}
    rows = [row | {"seed": seed, "repeat": seed} for row in rows for seed in (0, 1)]
    rows[-1] |= {"verdict": "inconclusive", "test_accuracy": 0.1}
    SweepView(Console(file=said, width=200), bar=False).finished(rows, [], "report.html")
    assert "noise§" in said.getvalue()
    assert "5¶" in said.getvalue()
    assert "noise in 1 of 2." in said.getvalue()


@pytest.mark.engine
@pytest.mark.usefixtures("ray_session")
@pytest.mark.slow
def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path, file) -> None:  # type: ignore[no-untyped-def]
    """The real command, stopped by Ctrl-C, then by `kill -9`, then resumed to the end."""
    out = tmp_path / "runs"
    arguments = ["launch", file(), "--out", str(out), "--set", "federation.rounds=40"]
    command = [sys.executable, "-m", "rayfed"]
    folder = _stopped_after([*command, *arguments], out, rounds=2, how=signal.SIGINT, code=130)
    assert json.loads((folder / "status.json").read_text())["state"] == "interrupted"
    _stopped_after([*command, "resume", str(folder)], out, rounds=6, how=signal.SIGKILL, code=-signal.SIGKILL)
    done = subprocess.run([*command, "resume", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    exit_code, output = run(*arguments)
    assert exit_code == 0, output
    other = next(p for p in out.iterdir() if p != folder)
    assert _final_weights(folder) == _final_weights(other)


@pytest.mark.engine
def test_a_reader_that_has_seen_enough_is_no_defect() -> None:
    scenario = REPOSITORY / "scenarios" / "defences.yaml"
    process = subprocess.Popen(
        [sys.executable, "-m", "rayfed", "validate", str(scenario)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_run_that_is_told_to_stop_is_killed(how: signal.Signals, code: int, tmp_path: Path, file) -> None:  # type: ignore[no-untyped-def]
    command = [sys.executable, "-m", "rayfed", "launch", file(), "--out", str(tmp_path / "runs")]
    folder = _stopped_after(
        [*command, "--set", "federation.rounds=400"], tmp_path / "runs", rounds=1, how=how, code=code
    )
    assert json.loads((folder / "status.json").read_text())["state"] == "killed"


def test_a_warning_of_another_package_is_shown_once() -> None:
    code = (
        "import warnings\nfrom rayfed.cli.warned import warn_once\nwarn_once()\n"
        "for n in 1, 1, 2:\n    with warnings.catch_warnings():\n        warnings.simplefilter('default')\n"
        "    warnings.warn(f'built {n}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [done.stderr.count(f"UserWarning: built {n}") for n in (1, 2)] == [1, 1], done.stderr


def _with_default_signals() -> None:
    """Let signals end this process, which background jobs of a shell (SIGINT) and of nohup (SIGHUP) ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _stopped_after(command: list[str], out: Path, rounds: int, how: signal.Signals, code: int) -> Path:
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_with_default_signals,
    )
    deadline = time.monotonic() + 120
    while not list(out.glob(f"*/rounds/part-{rounds:05d}*.parquet")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.05)
    os.kill(process.pid, how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    if how != signal.SIGKILL:
        assert "rayfed resume" in errors
    return next(out.iterdir())


def _final_weights(folder: Path) -> dict[str, list[float]]:
    from rayfed.store import checkpoint
    from rayfed.store.folder import RunFolder

    saved = checkpoint.load(RunFolder.open(str(folder)))
    assert saved is not None
    assert saved.round == 39
    return {name: w.tolist() for name, w in saved.server["none"]["weights"].items()}


@pytest.mark.engine
def test_new_validate_list_describe_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("new", "mine")[0] == 0
    code, output = run("new", "mine")
    assert (code, "mine.yaml" in output) == (2, True)
    code, output = run("validate", "mine.yaml")
    assert code == 0, output
    assert "mine.yaml: valid" in output
    code, output = run("validate", "mine.yaml", "--set", "sweep={repeats: 4}")
    assert (
        "paired by seed: Wilcoxon's p value cannot be below 5 % with 4 pairs and 1 arm: its minimum is 0.12" in output
    )
    assert "Wilcoxon" not in run("validate", "mine.yaml", "--set", "sweep={repeats: 6}")[1]
    arm = "[{name: dp_fedavg, noise_multiplier: 2, clip: 1}]"
    code, output = run("validate", "mine.yaml", "--set", f"arms.private={arm}")
    assert "private epsilon" in output, output
    sealed = ("--set", "federation.protection=ckks", "--set", "federation.failures={then: drop}")
    code, output = run("validate", "mine.yaml", *sealed)
    assert "its clients must trust the server's list of failed clients" in output, output
    for kind in registry.KINDS:
        assert run("list", kind)[0] == 0
    assert "did you mean 'defences'" in run("list", "defence5")[1]
    code, output = run("describe", "defence", "gaussian")
    assert code == 0
    assert "Standard deviation" in output
    said = " ".join(run("describe", "defences", "dp_fedavg")[1].split())
    assert "`protection: secure_aggregation`" in said
    assert run("describe", "defence", "gausian")[0] == 2
    assert json.loads(CliRunner().invoke(app, ["schema"]).output)["title"] == "Scenario"


def test_ones_own_component_is_described_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rule.py").write_text(
        "from rayfed.aggregation.fedavg import FedAvg\nfrom rayfed.registry import component\n\n\n"
        '@component\nclass Mine(FedAvg):\n    """My own mean."""\n'
    )
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(registry, "SEARCHED", [])
    monkeypatch.chdir(tmp_path)
    code, output = run("describe", "aggregation", "own_rule:Mine")
    assert (code, "My own mean." in output) == (0, True), output
    code, output = run("describe", "aggregation", "no_rule:Mine")
    assert (code, "beside the scenario" in output) == (2, False), output
    assert "unknown grant 'zzz': valid are activations, " in run("describe", "grant", "zzz")[1]


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda p: p.stem)
def test_every_scenario_is_valid(path: Path) -> None:
    from rayfed import scenario
    from rayfed.errors import UserError

    if "name: timm:" in path.read_text():
        imported("timm", "hub")
    sys.path.insert(0, str(path.parent))
    try:
        scenario.load(path)
    except UserError as error:
        pytest.fail(str(error))
    finally:
        sys.path.remove(str(path.parent))


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=pytest.mark.engine if p.stem in SHORT else pytest.mark.slow, id=p.stem) for p in SCENARIOS],
)
def test_every_scenario_runs_at_a_tiny_size(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(REPOSITORY)
    sets = (part for change in tiny(path, request) for part in ("--set", change))
    code, output = run("launch", str(path), "--out", str(tmp_path), *sets, *LOCAL)
    assert code == 0, output
    [folder] = tmp_path.iterdir()
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    assert "<html" in (folder / "report.html").read_text()
