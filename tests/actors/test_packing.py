"""GPUs by default (`num_gpus: auto`): on a simulated node, and with invented figures of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors import cluster, packing
from actors.attacker import AttackerActor, _end_soon
from actors.cluster import Node
from actors.process import ResourceShare
from rayfed import scenario as scenarios
from rayfed.aggregation.median import Median
from rayfed.core.memory import SIMULATED_PEAK, Peak, keep_within, peak
from rayfed.errors import ResourceError
from rayfed.runs.resume import gpus_of_run, select_determining_fields
from rayfed.scenario.trials import plan_largest
from rayfed.simulation.client import plan
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.executors.base import Call, Crashed, Done, Overdue
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.gpus import KINDS, with_devices
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.machine import device_for
from rayfed.store.checkpoint import Checkpoint
from rayfed.store.folder import RunFolder
from rayfed.update import Update

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


@pytest.mark.parametrize(("others", "together"), [(0, 8), (30, 5), (75, 1)])
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
    assert packing.shares_of({"clients": Peak(2 * GIB, 0, 8 * GIB)}, 1) == {"clients": 0.3333}
    assert packing.shares_of({"clients": Peak(5 * GIB, 0, 8 * GIB)}, 1) == {"clients": 1}


@pytest.mark.parametrize(("tensors", "others"), [(8, 0), (2, 6), (1, 7)])
def test_an_actor_that_finished_alone_fits_alone(tensors: int, others: int) -> None:
    """Even if its assumed CUDA context does not fit."""
    assert packing.shares_of({"clients": Peak(tensors * GIB, others * GIB, 8 * GIB)}, 1) == {"clients": 1}


def test_memory_of_other_processes_is_not_shared() -> None:
    """Figures of an H200: 8.05 GiB of tensors, 25.3 GiB in use by other processes."""
    peak = Peak(int(8.05 * GIB), int(25.3 * GIB), int(139.8 * GIB))
    assert packing.shares_of({"clients": peak}, 1) == {"clients": 0.0769}


MIB = st.integers(100, 30_000)


@given(MIB, MIB, MIB, st.integers(31_000, 80_000), st.integers(1, 8))
def test_every_actor_has_the_memory_that_it_needs(
    client: int, attacker: int, others: int, total: int, gpus: int
) -> None:
    """If one of each kind fits on a GPU, both share it. If not, no GPU has both, and a single GPU is refused."""
    peaks: packing.Needs = {
        "clients": Peak(client << 20, others << 20, total << 20),
        "attackers": Peak(attacker << 20, others << 20, total << 20),
    }
    room = (total - others) << 20
    needs = {kind: peak.took for kind, peak in peaks.items() if peak}
    pairs = room // sum(needs.values())
    if not pairs and gpus == 1:
        with pytest.raises(ResourceError):
            packing.shares_of(peaks, gpus)
        return
    shares = packing.shares_of(peaks, gpus)
    assert all(shares[kind] * room >= need - 2e-4 * room for kind, need in needs.items())
    if pairs:
        assert pairs * sum(shares.values()) <= 1 + 1e-9
    else:
        assert sum(shares.values()) > 1


def test_an_unknown_need_is_a_whole_gpu_or_what_the_other_kind_leaves() -> None:
    client = Peak(3 * GIB // 2, 0, 8 * GIB)  # 2 GiB
    assert packing.shares_of({"attackers": None}, 1) == {"attackers": 1}
    assert packing.shares_of({"clients": client, "attackers": None}, 2) == {"clients": 0.25, "attackers": 1}
    assert packing.shares_of({"clients": client, "attackers": None}, 1) == {"clients": 0.25, "attackers": 0.75}
    assert packing.shares_of({"clients": None, "attackers": None}, 1) == {"clients": 0.5, "attackers": 0.5}
    third = packing.shares_of({"clients": Peak(5 * GIB // 2, 0, 9 * GIB), "attackers": None}, 1)
    assert third == {"clients": 0.3334, "attackers": 0.6666}, "all of what the client needs"
    with pytest.raises(ResourceError):
        packing.shares_of({"clients": Peak(8 * GIB, 0, 8 * GIB), "attackers": None}, 1)


def _worker(*changes: str, text: str = TEXT) -> ClientWorker:
    inputs = prepare_inputs(scenarios.parse(text, changes=changes))
    return ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)


def test_the_largest_cohorts_of_each_arm_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leave nothing behind: the weights are those of a run that measured nothing."""
    worker, played = _worker(), list[tuple[str, int]]()
    task = worker.task
    monkeypatch.setattr(worker, "task", lambda arm, s, c, *rest: played.append((arm, c)) or task(arm, s, c, *rest))
    before = {name: w.clone() for name, w in worker.arm("none").weights.items()}
    worker.train_largest()
    assert played == [(arm, client) for arm in ("none", "noise") for client in range(3)]
    assert all(torch.equal(w, before[name]) for name, w in worker.arm("none").weights.items())


def test_the_largest_cohorts_have_the_largest_client_and_the_most_samples() -> None:
    scenario = scenarios.parse(TEXT)
    assert plan.largest_cohorts(scenario, np.array([1, 1, 1, 2, 2, 2])) == [(0, [3, 4, 5])]
    assert plan.largest_cohorts(scenario, np.array([9, 9, 9, 1, 1, 20])) == [(0, [3, 4, 5]), (0, [0, 1, 2])]
    few = scenarios.parse(TEXT, changes=["federation.rounds=9", "federation.clients_per_round=2"])
    [(round, cohort)] = plan.largest_cohorts(few, np.array([1, 1, 1, 1, 1, 8]))
    assert 5 in cohort
    assert cohort in plan.cohorts(few, round)


def test_measuring_includes_what_a_cohort_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sum is on the GPU while the next client trains. A client that fails ends no measuring."""
    worker, summed = _worker(), list[int]()
    rule = type(worker.rule("none", Sent(0, {}, {})))
    partial = rule.partial
    monkeypatch.setattr(rule, "partial", lambda self, sent: summed.append(1) or partial(self, sent))
    worker.train_largest()
    assert len(summed) == 2, "both arms"
    worker = _worker("training.lr=1e30", "training.steps=3", "training.epochs=null")
    worker.train_largest()


def test_rules_that_gather_keep_no_update_on_a_gpu() -> None:
    """The number of updates of a call grows with the round, so they do not fit into a share."""
    there = Update(0, 0, {"w": torch.zeros(2, device="meta")}, {"b": torch.zeros(1)}, 3, 0.0)
    moved = list[torch.Tensor]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rayfed.aggregation.gathering.copy_to_host", lambda t: moved.append(t) or torch.zeros(t.shape))
        [received] = Median().partial([there])
    assert len(moved) == 2
    assert received.tensors["w"].device == torch.device("cpu")


def test_attacks_are_observed_on_every_arm_with_their_earlier_rounds() -> None:
    attack = "{name: inverting_gradients, observes: gradient, earlier: 2, rounds: [2], iterations: 20, victims: 2}"
    worker = _worker("federation.rounds=3", text=f"{TEXT}attacks: [{attack}]\n")
    for arm in ("none", "noise"):
        victims, observations = worker.first_observations(arm, 0)
        assert [observation.victim for observation in observations] == list(victims)
        assert [[one.round for one in (*seen.earlier, seen)] for seen in observations] == [[0, 1, 2]] * len(victims)


def test_attacks_on_encrypted_updates_are_observed() -> None:
    """With a key pair of the clients."""
    worker = _worker("arms.noise={protection: {name: ckks}}", text=TEXT + ATTACKS)
    victims, observations = worker.first_observations("noise", 0)
    assert len(victims) == len(observations) == 2
    assert all(observation.sealed is not None for observation in observations)


def test_an_attack_that_fails_has_an_unknown_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """A started search and a finished attack are measured."""
    worker = _worker(text=TEXT + ATTACKS)
    victims, observations = worker.first_observations("none", 0)
    [spec], arm = worker.scenario.attacks, worker.specs["none"].to_attackers()
    data, keys = worker.data, [bytes([victim] * 32) for victim in victims]
    attacker = AttackerActor(ResourceShare(1, 0), data.sample.published(), len(data.classes))
    monkeypatch.setenv("RAYFED_SIMULATED_GPUS", "1")
    iterations = list[int]()
    monkeypatch.setattr("actors.attacker._end_soon", lambda one: iterations.append(one.iteration) or _end_soon(one))
    assert attacker.begin_attack(spec, arm, observations, keys) == SIMULATED_PEAK
    assert max(iterations) == 10, "the search was stopped"
    shapeless = dict.fromkeys(worker.arm("none").weights, torch.zeros(1))
    broken = [replace(observation, update=shapeless) for observation in observations]
    assert attacker.begin_attack(spec, arm, broken, keys) is None


class _Played:
    """Pool without actors, in which each measuring call has a given result."""

    results: ClassVar[dict[str, Any]] = {}
    calls: ClassVar[list[Call]] = []

    def __init__(self, *_: Any) -> None:
        pass

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass

    def run(self, calls: list[Call]) -> list[Done]:
        _Played.calls += calls
        for call in calls:
            if isinstance(error := self.results[call.method], Exception):
                raise error
        return [Done(call, self.results[call.method], [()] * (call.returns - 1)) for call in calls]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, float], list[Call]]]:
    """Return a function that returns the shares on some GPUs, given the calls' results, and the calls."""
    monkeypatch.setattr(packing, "Workers", _Played)

    def shares(gpus: int, *changes: str, text: str = TEXT + ATTACKS, **results: Any) -> Any:
        number = {"clients": gpus, "attackers": gpus}
        monkeypatch.setattr(packing, "alive", lambda: {"a": Node(8, gpus)})
        monkeypatch.setattr(packing, "available_gpus", lambda *_: number)
        monkeypatch.setattr(packing, "connected", lambda *_: nullcontext())
        monkeypatch.setattr(_Played, "calls", [])
        monkeypatch.setattr(_Played, "results", RESULTS | results)
        scenario = scenarios.parse(text, changes=changes)
        if scenario.sweep:
            placed = packing.with_measured_shares(scenario)
        else:
            placed = packing.with_shares(prepare_inputs(scenario, gpus=number), lambda _: None)
        return {kind: getattr(placed.resources, kind).num_gpus for kind in KINDS}, _Played.calls

    return shares


SMALL, LARGE = Peak(3 * GIB // 2, 0, 16 * GIB), Peak(15 * GIB, 0, 16 * GIB)
RESULTS = {"train_largest": None, "peak": SMALL, "first_observations": [0], "begin_attack": SMALL}


def test_each_attack_is_measured_on_each_arm_within_the_limits_of_a_real_call(measured: Any) -> None:
    shares, calls = measured(1, "resources.timeout=7")
    assert shares == {"clients": 0.125, "attackers": 0.125}
    begun = [call for call in calls if call.method == "begin_attack"]
    assert [call.args[1].name for call in begun] == ["none", "noise"]
    assert {(call.limit, call.crashes) for call in begun} == {(7, 1)}
    assert [call.method for call in calls].index("peak") == 3, "after both observations"


@pytest.mark.parametrize(
    "unknown", [{"begin_attack": end} for end in (None, Overdue(), Crashed(False))] + [{"first_observations": []}]
)
def test_an_attack_that_cannot_be_measured_does_not_end_the_run(measured: Any, unknown: dict[str, Any]) -> None:
    assert measured(2, **unknown)[0] == {"clients": 0.125, "attackers": 1}
    assert measured(1, **unknown)[0] == {"clients": 0.125, "attackers": 0.875}
    fixed = "resources.clients.num_gpus=0"
    assert measured(1, fixed, **unknown)[0] == {"clients": 0, "attackers": 1}


def test_kinds_that_do_not_fit_together_are_on_different_gpus(measured: Any) -> None:
    assert measured(8, peak=LARGE)[0] == {"clients": 1, "attackers": 0.125}
    with pytest.raises(ResourceError):
        measured(1, peak=LARGE)


def test_a_sweep_measures_the_largest_trials_of_all_arms(measured: Any) -> None:
    fields = {
        "training.batch_size": [2, 8, 4],
        "training.lr": {"low": 0.1, "high": 0.5},
        "model.hidden": [[8], [16]],
        "attacks.inverting_gradients.batch_size": [1, 2],
    }
    sweep = f"sweep: {json.dumps({'fields': fields, 'search': 'random', 'samples': 5})}\n"
    shares, calls = measured(1, "attacks.inverting_gradients.observes=gradient", text=TEXT + ATTACKS + sweep)
    assert shares == {"clients": 0.125, "attackers": 0.125}
    assert [call.method for call in calls].count("train_largest") == 2
    begun = [call.args[:2] for call in calls if call.method == "begin_attack"]
    assert {attack.batch_size for attack, _ in begun} == {2}
    assert {arm.training.batch_size for _, arm in begun} == {8}
    assert {tuple(arm.model.parameters["hidden"]) for _, arm in begun} == {(8,), (16,)}
    assert len(begun) == 2 * 2, "each model and each arm"


def test_a_sweep_whose_largest_values_do_not_fit_together_has_unknown_needs(measured: Any) -> None:
    sweep = "sweep: {fields: {federation.clients: [4, 6], federation.clients_per_round: [4, 6]}}\n"
    assert measured(2, text=TEXT + sweep)[0] == {"clients": 0.125, "attackers": 0}
    sweep = "sweep: {fields: {attacks.inverting_gradients.batch_size: [1, 100]}}\n"
    gradient = "attacks.inverting_gradients.observes=gradient"
    assert measured(2, gradient, text=TEXT + ATTACKS + sweep)[0] == {"clients": 1, "attackers": 1}


SWEEP = "sweep: {fields: {training.lr: [0.1, 0.5]}}\n"


@pytest.mark.parametrize("call", ["train_largest", "first_observations", "peak", "begin_attack"])
def test_a_sweep_continues_if_its_largest_trial_cannot_be_measured(measured: Any, call: str) -> None:
    """Such as a batch that needs too much memory: the sweep may not have this combination. A run ends."""
    for error in (torch.OutOfMemoryError("too large"), ValueError("of the model")):
        assert measured(2, text=TEXT + ATTACKS + SWEEP, **{call: error})[0] == {"clients": 1, "attackers": 1}
        with pytest.raises((ResourceError, ValueError)):
            measured(2, **{call: error})


@pytest.mark.parametrize(("samples", "trials"), [(3, 2), (8, 8)])
def test_a_sweep_measures_no_more_trials_than_it_has(samples: int, trials: int) -> None:
    """Three fields with two values each have eight combinations."""
    values = {
        "training.vectorise": ["auto", "loop"],
        "model.hidden": [[8], [16]],
        "federation.evaluate_clients": [True, False],
    }
    sweep = f"sweep: {json.dumps({'fields': values, 'search': 'random', 'samples': samples})}\n"
    found = plan_largest(scenarios.parse(TEXT + sweep))
    assert len(found) == trials
    for path, each in values.items():
        assert {repr(trial.values[path]) for trial in found} == {repr(value) for value in each}


def test_clients_observe_while_measured_whatever_attackers_compute_on(measured: Any) -> None:
    """An observation may have a larger batch than training."""
    shares, calls = measured(1, "resources.attackers.num_gpus=0")
    assert shares == {"clients": 0.125, "attackers": 0}
    assert [call.method for call in calls] == ["train_largest", "first_observations", "first_observations", "peak"]


def test_auto_is_the_cpu_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    inputs = prepare_inputs(scenarios.parse(TEXT))
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
    on_cpu = Checkpoint(0, {}, scenario=select_determining_fields(with_devices(automatic, NONE)))
    on_gpu = Checkpoint(0, {}, scenario=select_determining_fields(automatic))
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
from rayfed.runs import runner
from rayfed.simulation.progress import Progress

acquire = ActorPool.acquire

def placed(self, kind, share, *arguments):
    actor, arrival = acquire(self, kind, share, *arguments)
    print("PLACED", kind.__name__, share.num_gpus, flush=True)
    return actor, arrival

ActorPool.acquire = placed
ray.init(address="local", include_dashboard=False, num_cpus=4, num_gpus=2)
folder = runner.launch(scenarios.parse(sys.stdin.read(), changes=sys.argv[2:]), sys.argv[1], on_ray(), Progress())
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


def test_gpus_of_a_node_without_cpus_for_an_actor_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "alive", lambda: {"a": Node(0, 4), "b": Node(2, 1), "c": Node(64, 0)})
    monkeypatch.setattr(cluster, "connected", lambda *_: nullcontext())
    scenario = scenarios.parse(TEXT + ATTACKS + "resources: {clients: {num_cpus: 4}}\n")
    assert cluster.available_gpus("there", scenario) == {"clients": 0, "attackers": 1}


def test_no_cluster_is_asked_if_all_numbers_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[object]()
    monkeypatch.setattr(cluster, "connected", lambda *address: nullcontext(asked.append(address)))
    monkeypatch.setattr(cluster, "alive", dict)
    given = "resources: {clients: {num_gpus: 0.5}, attackers: {num_gpus: 0}}\n"
    assert cluster.available_gpus("there", scenarios.parse(TEXT + given)) == NONE
    assert not asked
    cluster.available_gpus("there", scenarios.parse(TEXT))
    assert asked


def test_clients_may_be_anywhere_if_nothing_attacks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "alive", lambda: {"a": Node(8, 2, {"kind": "gpu"})})
    monkeypatch.setattr(cluster, "connected", lambda *_: nullcontext())
    scenario = scenarios.parse(TEXT + "resources: {attackers: {labels: {kind: gpu}}}\n")
    assert cluster.available_gpus("there", scenario)["clients"] == 2


@pytest.mark.parametrize("up", [False, True])
@pytest.mark.parametrize(("by_ray", "by_pytorch"), [(1, 2), (2, 1), (2, 0), (0, 2)])
def test_pytorch_and_ray_both_count_the_gpus_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, up: bool, by_ray: int, by_pytorch: int
) -> None:
    """Whether the Ray that starts in the background is up already or not."""
    monkeypatch.setattr(cluster, "alive", lambda: {"a": Node(8, by_ray)})
    monkeypatch.setattr(cluster, "connected", lambda *_: nullcontext())
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: up)
    monkeypatch.setattr(cluster.local_ray, "_background", object())
    monkeypatch.setenv("RAYFED_SIMULATED_GPUS", str(by_pytorch))
    smaller = min(by_ray, by_pytorch)
    assert cluster.available_gpus(None, scenarios.parse(TEXT)) == {"clients": smaller, "attackers": smaller}


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
    share = packing.shares_of({"clients": Peak(tensors, 0, total)}, 1)["clients"]
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", bounds.append)
    for free in (total, total // 2, GIB):  # other processes' memory is none of its context
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, total))
        keep_within(share)
    assert len(set(bounds)) == 1
    assert tensors <= bounds[0] * total + total / 10_000 <= share * total, "but for the rounding of shares"
