"""As many client actors on a GPU as its memory takes (`num_gpus: auto`), with pretended figures: there is no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors import cluster, packing
from actors.cluster import Node, allot_trial
from rayfed import scenario as scenarios
from rayfed.engine import runs
from rayfed.engine.inputs import prepare
from rayfed.engine.local import local
from rayfed.engine.machine import device_for
from rayfed.engine.progress import Progress
from rayfed.engine.worker import ClientWorker
from rayfed.errors import ResourceError, ScenarioError
from rayfed.memory import Peak, keep_within, peak

GIB = 2**30
TEXT = """
name: t
data: {name: digits, size: 8, train_samples: 40, test_samples: 10}
model: {name: mlp, hidden: [8]}
federation: {rounds: 1, clients: 6, cohort_size: 3}
arms: {none: [], noise: [{name: dp_sgd, clip: 1, noise_multiplier: 1}]}
resources: {clients: {num_gpus: auto, num_cpus: 0.5}}
"""


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
    share, told = packing.share_of(Peak(2 * GIB, 0, 8 * GIB))
    assert (share, told) == (
        0.3333,
        "num_gpus: auto: a client actor took 2.50 GiB, with 0.50 for CUDA's own: 3 share a GPU of 8.0 GiB",
    )
    assert packing.share_of(Peak(5 * GIB, 0, 8 * GIB))[0] == 1
    with pytest.raises(ResourceError, match=r"took 8\.5 GiB, more than there is on its GPU of 8\.0 GiB: lower"):
        packing.share_of(Peak(8 * GIB, 0, 8 * GIB))


def test_other_processes_on_the_gpu_are_none_of_an_actors_memory() -> None:
    """As once on an H200: 8.05 GiB of tensors, 25.3 of others, counted as CUDA's own let 4 share it."""
    share, told = packing.share_of(Peak(int(8.05 * GIB), int(25.3 * GIB), int(139.8 * GIB)))
    assert (share, told) == (
        0.0769,
        "num_gpus: auto: a client actor took 8.55 GiB, with 0.50 for CUDA's own: 13 share a GPU of 139.8 GiB, "
        "of which other processes have 25.3",
    )
    with pytest.raises(ResourceError, match=r"its GPU of 8\.0 GiB, of which other processes have 6\.0: lower training"):
        packing.share_of(Peak(2 * GIB, 6 * GIB, 8 * GIB))


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


def test_actors_are_as_many_as_share_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Any]()

    class One:
        def __init__(self, pool: Any, size: int, kind: type, share: Any, *rest: Any) -> None:
            made.append((size, kind.__name__, share.num_gpus))

        def wait(self) -> None:
            pass

        def run(self, calls: Any) -> Any:
            assert [call.method for call in calls] == ["first_work"]
            return iter([SimpleNamespace(result=Peak(7 * GIB // 2, 0, 16 * GIB))])

        def close(self) -> None:
            made.append("closed")

    nodes = {"a": Node(8, 2)}
    monkeypatch.setattr(packing, "Workers", One)
    monkeypatch.setattr(packing, "alive", lambda: nodes)
    inputs, notes = prepare(scenarios.parse(TEXT)), list[str]()
    sized = packing.with_shares(inputs, notes.append)
    assert made == [(1, "ClientActor", 1.0), "closed"]
    assert sized.resources.clients.num_gpus == 0.25
    assert notes == [
        "num_gpus: auto: a client actor took 4.00 GiB, with 0.50 for CUDA's own: 4 share a GPU of 16.0 GiB"
    ]
    assert cluster.divide(list(nodes.values()), sized, 20, 0).clients == 8
    nodes["a"] = Node(8, 0)
    with pytest.raises(ResourceError, match=r"one actor asks for 0\.5 CPU and 1 GPU, but no node has more than"):
        packing.with_shares(inputs, notes.append)
    fixed = prepare(scenarios.parse(TEXT, changes=["resources.clients.num_gpus=0.5"]))
    assert packing.with_shares(fixed, notes.append) is fixed.scenario


def test_where_a_number_is_needed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ScenarioError, match="auto is for clients: what an attack takes is not known before it"):
        scenarios.parse(TEXT, changes=["resources.attackers={num_gpus: auto}"])
    with pytest.raises(ResourceError, match="auto is for runs; Ray Tune places the trials"):
        allot_trial(scenarios.parse(TEXT))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ResourceError, match="num_gpus: auto asks for a GPU, but PyTorch"):
        runs.launch(scenarios.parse(TEXT), str(tmp_path), local, Progress())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_for("auto") == torch.device("cuda")


@pytest.mark.parametrize("tensors", [GIB // 8, GIB, 5 * GIB])
def test_an_actor_is_left_what_was_measured_whoever_was_there_before(
    monkeypatch: pytest.MonkeyPatch, tensors: int
) -> None:
    bounds, total = list[float](), 80 * GIB
    share, _ = packing.share_of(Peak(tensors, 0, total))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", bounds.append)
    for free in (total, total // 2, GIB):  # other processes' memory is none of its context
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, total))
        keep_within(share)
    assert len(set(bounds)) == 1
    assert tensors <= bounds[0] * total + total / 10_000 <= share * total, "but for the rounding of shares"
