"""Machines under a run: instruction sets that change the last bits, GPUs that are not there, rounding to TF32."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from actors import process
from actors.cluster import wanted
from actors.process import Renewable, ResourceShare
from actors.shipping import runtime_env
from rayfed import cli, scenario
from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.closed_form.analytic import Analytic
from rayfed.errors import NotPortable, ResourceError
from rayfed.runs import runner
from rayfed.scenario import Scenario
from rayfed.simulation import machine
from rayfed.simulation.executors.base import Executor
from rayfed.simulation.executors.local import local
from rayfed.simulation.gpus import gpus_here, with_devices
from rayfed.simulation.inputs import Inputs
from rayfed.simulation.machine import PORTABLE, Machine
from rayfed.simulation.progress import Progress
from rayfed.update import Observation
from tests.helpers.cluster_fixtures import document, finished, rayfed
from tests.helpers.cluster_fixtures import environment as plain_environment
from tests.helpers.run_fixtures import Noting, assert_same_bits, weights

PROCESSORS = (
    {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX"},
)
"""Environments in which this machine calculates as two others would."""


def small(**changes: Any) -> Scenario:
    return scenario.parse(document(**changes), "s.yaml")


def needs_avx2() -> None:
    if not re.search(r"\bavx2\b", Path("/proc/cpuinfo").read_text()):
        pytest.skip("this processor has no AVX2")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("deterministic", "executor"),
    [("machine", "local"), ("portable", "local"), pytest.param("portable", "ray", marks=pytest.mark.slow)],
)
def test_portable_bits_are_those_of_every_processor(deterministic: str, executor: str, tmp_path: Path) -> None:
    needs_avx2()
    written = document(model="lenet", resources={"deterministic": deterministic}, seed=3)
    (tmp_path / "s.yaml").write_text(written)
    states = []
    for index, processor in enumerate(PROCESSORS):
        out = tmp_path / str(index)
        command = ("launch", "s.yaml", "--executor", executor, "--out", str(out))
        done = rayfed(*command, cwd=tmp_path, env=plain_environment(**processor))
        assert done.returncode == 0, done.stderr
        states.append(weights(finished(out)))
        said = finished(out).read_mapping("environment.json")
        assert said["deterministic"] == deterministic
        used = "AVX2" if deterministic == "portable" else ("DEFAULT", "AVX2")[index]
        assert all(kind.endswith(f", {used})") for kinds in said["processors"].values() for kind in kinds)
    if deterministic == "portable":
        assert_same_bits(*states)
    else:
        first, second = (state["none"]["weights"] for state in states)
        assert not all(torch.equal(first[name], second[name]) for name in first)


def test_a_process_that_is_not_portable_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotPortable, match="ATEN_CPU_CAPABIL"):
        runner.launch(small(resources={"deterministic": "portable"}), str(tmp_path), local, Progress())
    assert not list(tmp_path.iterdir())


def test_an_environment_that_came_too_late_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PORTABLE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    with pytest.raises(ResourceError, match="PyTorch uses AVX512"):
        machine.check_arithmetic("portable")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    machine.check_arithmetic("portable")


def test_the_command_line_starts_itself_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[Any]()

    def not_portable() -> None:
        raise NotPortable("as it is")

    monkeypatch.setattr(cli, "app", not_portable)
    monkeypatch.setattr(cli, "end_on_signals", lambda: None)
    monkeypatch.setattr(os, "execve", lambda *arguments: begun.append(arguments))
    cli.main()
    [(program, arguments, environment)] = begun
    assert (program, arguments) == (sys.executable, sys.orig_argv)
    assert environment.items() >= PORTABLE.items()


def test_nodes_of_a_cluster_are_sent_the_environment() -> None:
    assert runtime_env(small(resources={"deterministic": "portable"})) == {"env_vars": PORTABLE}
    assert runtime_env(small()) == {}


class Elsewhere(Noting):
    """A run whose client is on another machine than it is."""

    def __init__(self, processor: str) -> None:
        super().__init__()
        self._machine = Machine("client", processor, "cpu")

    def num_gpus(self, scenario: Scenario) -> dict[str, int]:
        return gpus_here()

    @contextmanager
    def __call__(self, inputs: Inputs, progress: Progress) -> Iterator[Executor]:
        with local(inputs, progress) as executor:
            executor.machines = lambda: [self._machine]  # type: ignore[method-assign]
            yield executor


@pytest.mark.engine
@pytest.mark.usefixtures("reports")
def test_a_resume_on_another_kind_of_processor_is_said_and_both_are_kept(tmp_path: Path) -> None:
    first, second = Elsewhere("A (GenuineIntel, AVX512)"), Elsewhere("B (AuthenticAMD, AVX2)")
    folder = runner.launch(small(), str(tmp_path), first, first)
    assert not any("WARNING" in note for note in first.notes)
    longer = folder.read_text("scenario.yaml").replace("rounds: 2\n", "rounds: 3\n")
    folder.write_text("scenario.yaml", longer)
    runner.resume(folder.url, second, second, extend=True)
    [warning] = [note for note in second.notes if "WARNING" in note]
    assert "client on A (GenuineIntel, AVX512) and B (AuthenticAMD, AVX2)" in warning
    assert warning in folder.read_text("log.txt")
    assert folder.read_mapping("environment.json")["processors"] == {
        "client": ["A (GenuineIntel, AVX512)", "B (AuthenticAMD, AVX2)"]
    }
    assert "B (AuthenticAMD, AVX2)" in folder.read_text("report.html")


NO_GPU = "num_gpus: 0.5"


@pytest.mark.parametrize("kind", ["clients", "attackers"])
def test_a_gpu_that_is_not_there_ends_a_run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ResourceError, match=NO_GPU):
        runner.launch(small(resources={kind: {"num_gpus": 0.5}}), str(tmp_path), local, Progress())
    with pytest.raises(ResourceError, match=NO_GPU):
        Renewable().machine(ResourceShare(1, 0.5))


@pytest.mark.engine
@pytest.mark.slow
def test_a_gpu_that_ray_was_promised_ends_a_run(tmp_path: Path) -> None:
    """Ray takes the number of GPUs on trust."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    text = document(resources={"clients": {"actors": 1, "num_gpus": 0.5}})
    (tmp_path / "s.yaml").write_text(text)
    started = "ray.init(address='local', include_dashboard=False, num_cpus=2, num_gpus=1)"
    code = f"import ray; from rayfed.cli import main; {started}; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "launch", "s.yaml", "--out", "out"],
        cwd=tmp_path, env=plain_environment(), capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert re.search(NO_GPU, done.stderr)


def test_the_gpu_that_is_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    limits = list[float]()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (7 * 2**30, 8 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    share = ResourceShare(1, 0.5)
    assert process.set_up(share) == torch.device("cuda")
    assert limits == [0.4375], "half of 8 GiB, less half a GiB for CUDA itself"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 8 * 2**30))
    process.set_up(share)
    assert limits[1] == 0.4375, "what other processes have taken is none of it"
    process.set_up(ResourceShare(1, 0.0625))
    assert limits[2] == 0.03125, "half of a small share is left for tensors"
    assert Renewable().machine(share).device == "NVIDIA Test"


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_off_unless_it_is_asked_for(tf32: bool, tmp_path: Path) -> None:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32

    class Watching(Progress):
        def clients_done(self, round: int, done: int, total: int) -> None:
            assert (cudnn.allow_tf32, matmul.allow_tf32) == (tf32, tf32)

    folder = runner.launch(small(resources={"tf32": tf32}), str(tmp_path), local, Watching())
    assert folder.read_mapping("environment.json")["tf32"] is tf32
    assert (cudnn.allow_tf32, matmul.allow_tf32) == before
    try:
        process.set_up(ResourceShare(1, 0, tf32=tf32))
        assert (cudnn.allow_tf32, matmul.allow_tf32) == (tf32, tf32)
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


def test_attackers_compute_without_tf32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client saves is no limit of an attacker's."""
    found: list[bool] = []

    def answer(_: Any, seen: Sequence[Observation], *__: Any) -> list[Reconstruction]:
        found.append(torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
        return [not_applicable(one, "") for one in seen]

    monkeypatch.setattr(Analytic, "reconstruct", answer)
    asked = small(resources={"tf32": True}, attacks=[{"name": "analytic", "victims": 1, "rounds": [0]}])
    runner.launch(asked, str(tmp_path), local, Progress())
    assert found == [False]
    allotted = wanted(with_devices(asked, gpus_here()), 2, 1)
    assert (allotted.client.tf32, allotted.attacker.tf32) == (True, False)
