"""GPUs by default (`num_gpus: auto`): on a simulated node, and with invented figures of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors import cluster, packing
from actors.cluster import Node
from rayfed import scenario as scenarios
from rayfed.engine.continuing import gpus_of_run, what_counts
from rayfed.engine.gpus import KINDS, with_devices
from rayfed.engine.inputs import prepare
from rayfed.engine.machine import device_for
from rayfed.engine.worker import ClientWorker
from rayfed.errors import ResourceError
from rayfed.memory import Peak, keep_within, peak
from rayfed.store.checkpoint import Checkpoint
from rayfed.store.folder import RunFolder

GIB = 2**30
NONE, TWO = (dict.fromkeys(KINDS, gpus) for gpus in (0, 2))
TEXT = """
name: t
data: {name: digits, size: 8, train_samples: 40, test_samples: 10}
model: {name: mlp, hidden: [8]}
federation: {rounds: 1, clients: 6, cohort_size: 3}
arms: {none: [], noise: [{name: dp_sgd, clip: 1, noise_multiplier: 1}]}
"""
ATTACKS = "attacks: [{name: inverting_gradients, iterations: 20, victims: 2}]\n"


@pytest.mark.parametrize(("others", "together"), [(0, 8), (30, 5), (75, 0)])
def test_a_peak_is_of_this_process_and_leaves_others_theirs(
    monkeypatch: pytest.MonkeyPatch, others: int, together: int
) -> None:
    """It has 4 GiB of tensors now and had 9, which counts, and half a GiB of CUDA's own."""
    free = 75 * GIB + GIB // 2 - others * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 4 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 9 * GIB)
    assert peak() == Peak(tensors=9 * GIB, others=others * GIB, total=80 * GIB)
    assert peak().together == together


def test_shares_fill_a_gpu_and_no_more() -> None:
    assert packing.shares_of({"clients": Peak(2 * GIB, 0, 8 * GIB)}) == {"clients": 0.3333}
    assert packing.shares_of({"clients": Peak(5 * GIB, 0, 8 * GIB)}) == {"clients": 1}
    with pytest.raises(ResourceError, match="clients"):
        packing.shares_of({"clients": Peak(8 * GIB, 0, 8 * GIB)})


def test_memory_of_other_processes_is_not_shared() -> None:
    """Figures of an H200: 8.05 GiB of tensors, 25.3 GiB in use by other processes."""
    assert packing.shares_of({"clients": Peak(int(8.05 * GIB), int(25.3 * GIB), int(139.8 * GIB))}) == {
        "clients": 0.0769
    }
    with pytest.raises(ResourceError, match="clients"):
        packing.shares_of({"clients": Peak(2 * GIB, 6 * GIB, 8 * GIB)})


MIB = st.integers(100, 30_000)


@given(MIB, MIB, MIB, st.integers(4_000, 80_000))
def test_clients_and_attackers_share_a_gpu(client: int, attacker: int, others: int, total: int) -> None:
    """Each has the memory that it needs. If a GPU has no room for one of each kind, they fill it."""
    needs = {"clients": client + 512, "attackers": attacker + 512}
    peaks = {kind: Peak((need - 512) << 20, others << 20, total << 20) for kind, need in needs.items()}
    room = total - others
    if max(needs.values()) > room:
        with pytest.raises(ResourceError):
            packing.shares_of(peaks)
        return
    shares = packing.shares_of(peaks)
    pairs = room // sum(needs.values())
    assert max(pairs, 1) * sum(shares.values()) <= 1 + 1e-9
    if pairs:
        assert all(shares[kind] * room >= need - 2e-4 * room for kind, need in needs.items())
    else:
        assert sum(shares.values()) >= 1 - 3e-4


def test_the_first_cohort_of_each_arm_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves nothing behind: the run that follows has the bits of one that measured nothing."""
    inputs = prepare(scenarios.parse(TEXT))
    worker = ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    played = list[tuple[str, int]]()
    task = worker.task
    monkeypatch.setattr(worker, "task", lambda arm, s, c, *rest: played.append((arm, c)) or task(arm, s, c, *rest))
    monkeypatch.setattr("rayfed.engine.worker.peak", lambda: Peak(1, 2, 6))
    before = {name: w.clone() for name, w in worker.arm("none").weights.items()}
    assert worker.first_work() == Peak(1, 2, 6)
    assert played == [(arm, client) for arm in ("none", "noise") for client in range(3)]
    assert all(torch.equal(w, before[name]) for name, w in worker.arm("none").weights.items())


def test_auto_is_the_cpu_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    inputs = prepare(scenarios.parse(TEXT))
    assert {getattr(inputs.scenario.resources, kind).num_gpus for kind in KINDS} == {0}
    assert device_for("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_for("auto") == torch.device("cuda")
    assert with_devices(scenarios.parse(TEXT), TWO).resources.attackers.num_gpus == "auto"


def test_a_number_is_kept() -> None:
    fixed = scenarios.parse(TEXT, changes=["resources.clients.num_gpus=0.5", "resources.attackers={num_gpus: 0}"])
    for gpus in (NONE, TWO):
        assert with_devices(fixed, gpus).resources.clients.num_gpus == 0.5
        assert with_devices(fixed, gpus).resources.attackers.num_gpus == 0


def test_a_run_continues_on_the_device_that_it_began_on() -> None:
    here, there = (SimpleNamespace(num_gpus=lambda _, gpus=gpus: gpus) for gpus in (NONE, TWO))
    automatic = scenarios.parse(TEXT)
    on_cpu = Checkpoint(0, {}, scenario=what_counts(with_devices(automatic, NONE)))
    on_gpu = Checkpoint(0, {}, scenario=what_counts(automatic))
    assert gpus_of_run(on_cpu, automatic, there) == NONE
    assert gpus_of_run(on_gpu, automatic, there) == TWO
    assert gpus_of_run(None, automatic, there) == TWO
    with pytest.raises(ResourceError):
        gpus_of_run(on_gpu, automatic, here)


PLACED = """
import sys
import ray
from actors.actor_pool import ActorPool
from actors.executor import on_ray
from rayfed import scenario as scenarios
from rayfed.engine import runs
from rayfed.engine.progress import Progress

acquire = ActorPool.acquire

def placed(self, kind, share, *arguments):
    actor, arrival = acquire(self, kind, share, *arguments)
    print("PLACED", kind.__name__, share.num_gpus, flush=True)
    return actor, arrival

ActorPool.acquire = placed
ray.init(address="local", include_dashboard=False, num_cpus=4, num_gpus=2)
folder = runs.launch(scenarios.parse(sys.stdin.read(), changes=sys.argv[2:]), sys.argv[1], on_ray(), Progress())
print("RUN", folder.url, ray.cluster_resources()["GPU"], flush=True)
"""


def _placed(tmp_path: Path, *changes: str) -> tuple[dict[str, set[float]], RunFolder]:
    """Run on a simulated node with two GPUs, and return the GPUs of each kind of actor."""
    done = subprocess.run(
        [sys.executable, "-c", PLACED, str(tmp_path), *changes],
        input=TEXT + ATTACKS,
        env=os.environ | {"RAYFED_SIMULATED_GPUS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    placed = defaultdict[str, set[float]](set)
    for line in done.stdout.splitlines():
        if line.startswith("PLACED"):
            _, kind, gpus = line.split()
            placed[kind].add(float(gpus))
    run = next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("RUN"))
    return placed, RunFolder.open(run)


@pytest.mark.parametrize(
    ("labels", "gpus"),
    [
        ({}, {"clients": 3, "attackers": 3}),
        ({"attackers": {"labels": {"kind": "gpu"}}}, {"clients": 1, "attackers": 2}),
    ],
)
def test_the_gpus_of_a_kind_are_those_of_its_nodes(
    labels: dict[str, Any], gpus: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients stay off nodes that attackers ask for by labels."""
    nodes = {"a": Node(8, 2, {"kind": "gpu"}), "b": Node(8, 1, {"kind": "cpu"}), "c": Node(8, 0)}
    monkeypatch.setattr(cluster, "alive", lambda: nodes)
    monkeypatch.setattr(cluster, "connected", lambda *_: nullcontext())
    scenario = scenarios.parse(TEXT + ATTACKS + f"resources: {json.dumps(labels)}\n")
    assert cluster.available_gpus("there", scenario) == gpus


@pytest.mark.engine
def test_a_run_uses_the_gpus_of_a_node_unless_it_is_not_to(tmp_path: Path) -> None:
    """On a simulated node: the actors that measure have a GPU each, the others share them."""
    placed, folder = _placed(tmp_path / "auto")
    assert placed["ClientActor"] == placed["AttackerActor"] == {1.0, 0.125}
    on_gpus = folder.read_table("attacks").to_pylist()
    placed, folder = _placed(tmp_path / "cpu", *(f"resources.{kind}.num_gpus=0" for kind in KINDS))
    assert placed["ClientActor"] == placed["AttackerActor"] == {0.0}
    psnr = [[row["psnr"] for row in rows] for rows in (on_gpus, folder.read_table("attacks").to_pylist())]
    assert psnr[0] == psnr[1], "simulated GPUs compute as the CPU does"


@pytest.mark.parametrize("tensors", [GIB // 8, GIB, 5 * GIB])
def test_an_actor_is_left_what_was_measured_whoever_was_there_before(
    monkeypatch: pytest.MonkeyPatch, tensors: int
) -> None:
    bounds, total = list[float](), 80 * GIB
    share = packing.shares_of({"clients": Peak(tensors, 0, total)})["clients"]
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", bounds.append)
    for free in (total, total // 2, GIB):  # other processes' memory is none of its context
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, total))
        keep_within(share)
    assert len(set(bounds)) == 1
    assert tensors <= bounds[0] * total + total / 10_000 <= share * total, "but for the rounding of shares"
