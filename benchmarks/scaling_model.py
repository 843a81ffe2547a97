"""A round of a large federation as a discrete-event simulation, fed with what a small one costs.

    python -m benchmarks.scaling_model           # against docs/scaling.json, then 10^7 clients on 1,000 nodes

A round is: the weights spread over the nodes; the driver hands out cohorts and takes reports back, one after the other;
actors train; partial results cross the server's network and are folded there, one after the other. With `folds` they
meet on their nodes first, by the run's own plan (`rayfed.simulation.rounds.node_sums`), when all cohorts are trained.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import ceil, log2
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

from benchmarks.nodes import Places, branches, planned
from rayfed.aggregation.server import TreeFold
from rayfed.simulation.client.runtime import CohortReport
from rayfed.simulation.executors.base import Call, Done
from rayfed.simulation.executors.stragglers import Result
from rayfed.simulation.rounds.node_sums import NodeSums

MEASURED = Path(__file__).resolve().parent.parent / "docs" / "scaling.json"


@dataclass(frozen=True)
class Costs:
    """What things cost, in seconds and bytes."""

    client: float
    """A client's local round on one actor."""
    cohort: float
    """What an actor does for a cohort besides: to take the weights, to hand the sum over."""
    call: float
    """The driver's part in a cohort: to send the call, to take the report."""
    row: float
    """The driver's part in one client: its row in the report and in the tables."""
    fixed: float
    """What a round takes besides: draws, the server's step, the checkpoint."""
    bytes: int
    """Of the weights, and of a partial result."""
    fold: float
    """Of the server, in seconds a byte of a partial result: to read it and to add it."""
    wait: float
    """Of the driver, for each report and each actor then at work: Ray goes through all that is waited for."""
    network: float = 10e9 / 8
    """Bytes a second of a node's network card."""
    spread: float = 0.3
    """Standard deviation of the logarithm of a cohort's time: other users, unlike machines."""


@dataclass(frozen=True)
class Plan:
    """A federation's round on a cluster."""

    per_round: int
    cohorts: int
    nodes: int
    actors: int
    """Of each node."""
    folds: bool = False
    """Whether nodes add up before the server does."""


def play(plan: Plan, costs: Costs, seed: int = 0) -> dict[str, float]:
    """Seconds of one round, and of that how long actors, driver, server and its network were at work."""
    sizes = np.diff(np.linspace(0, plan.per_round, plan.cohorts + 1).round()).astype(int)
    work, several = sizes * costs.client + costs.cohort, plan.nodes > 1
    if several:
        draw = np.random.default_rng(seed)
        work = work * draw.lognormal(-(costs.spread**2) / 2, costs.spread, len(sizes))
    transfer, fold = several * costs.bytes / costs.network, costs.fold * costs.bytes
    broadcast = transfer * ceil(log2(plan.nodes))
    ends, driven, busy = _driven(plan, costs, sizes, work, broadcast)
    arriving, met = np.sort(ends), 0.0
    if plan.folds:
        met, left = _met(plan, costs, fold, transfer)
        arriving = np.full(left, max(ends.max(), driven) + met)
    network = server = 0.0
    for end in arriving:
        network = max(network, end) + transfer
        server = max(server, network) + fold
    return {
        "seconds": max(driven, server) + costs.fixed,
        "actors": float(work.sum()) / (plan.nodes * plan.actors),
        "driver": busy,
        "folds": len(arriving) * fold,
        "network": len(arriving) * transfer,
        "nodes": met,
        "broadcast": broadcast,
    }


def _met(plan: Plan, costs: Costs, fold: float, transfer: float) -> tuple[float, int]:
    """Seconds in which nodes add up what their actors have sent, and how many results are left.

    A level takes as long as its longest call, or as the driver, which hands out one after another.
    """
    work, levels = planned(plan.cohorts, plan.nodes, plan.actors, 0.0, meet=True), list[float]()

    def run(calls: Sequence[Call]) -> Iterator[Done]:
        longest = len(calls) * (costs.call + costs.wait * min(len(calls), plan.nodes * plan.actors))
        for one in calls:
            tree: Any = TreeFold(Places(), plan.cohorts)  # type: ignore[arg-type]
            seconds = 0.0
            for held, partials in zip(one.tag, one.args[3:], strict=True):
                seconds += len(partials) * (fold + transfer * (held.node != one.node))
                for (level, index), partial in partials.items():
                    tree.add(index, partial, level)
            longest = max(longest, seconds)
            yield Done(one, None, [tree.nodes], one.node)
        levels.append(longest)

    sums = NodeSums(run, lambda _: iter(()), {"none": None}, {"none": plan.cohorts})
    for portion in work:
        partials = dict.fromkeys(branches(portion), True)
        sums.add(Result(portion, CohortReport([], 0.0), partials, portion[0].node))
    left = sum(len(partials) for _, partials in sums.met())
    return sum(levels), left


def _driven(
    plan: Plan, costs: Costs, sizes: np.ndarray, work: np.ndarray, begins: float
) -> tuple[np.ndarray, float, float]:
    """When each cohort is trained, when the driver has its last report, and for how long it was at work.

    The driver does one thing at a time, as `actors.workers` does: it sends a call while an actor has fewer than two,
    and takes the first report else.
    """
    count = plan.nodes * plan.actors
    slots = deque([*range(count), *(range(count) if plan.cohorts > count else ())])
    free, now, busy = [begins] * count, begins, 0.0
    ends, actors = np.zeros(plan.cohorts), np.zeros(plan.cohorts, int)
    running: list[tuple[float, int]] = []
    waiting = deque(range(plan.cohorts))
    while waiting or running:
        if waiting and slots:
            cohort, actor = waiting.popleft(), slots.popleft()
            now, busy = now + costs.call / 2, busy + costs.call / 2
            free[actor] = max(free[actor], now) + work[cohort]
            ends[cohort], actors[cohort] = free[actor], actor
            heappush(running, (free[actor], cohort))
        else:
            end, cohort = heappop(running)
            taken = costs.call / 2 + costs.wait * min(len(running) + 1, count) + costs.row * sizes[cohort]
            now, busy = max(now, end) + taken, busy + taken
            slots.append(int(actors[cohort]))
    return ends, now, busy


def fitted(growing: Sequence[dict[str, float]], fine: dict[str, float], bytes: int, fold: float, wait: float) -> Costs:
    """Costs from measured rounds on two actors: a client's from the actors' own clock, a call's from a round in many
    cohorts beside the same in few, and of the rest the part that grows with clients by least squares.

    A call's is what the round takes beyond the actors' work, as if the driver never worked beside them. `play` has it
    work beside them, and so makes too little of that round.
    """

    def left(p: dict[str, float]) -> float:
        return p["seconds"] - p["actor_seconds"] / 2

    [coarse] = [p for p in growing if p["per_round"] == fine["per_round"]]
    call = max((left(fine) - left(coarse)) / (fine["cohorts"] - coarse["cohorts"]), 0.0)
    weights = [1 / p["seconds"] for p in growing]
    row, rest = np.polyfit([p["per_round"] for p in growing], [left(p) for p in growing], 1, w=weights)
    more = fine["actor_seconds"] - coarse["actor_seconds"]
    cohort = max(more / (fine["cohorts"] - coarse["cohorts"]), 0.0)
    largest = growing[-1]
    client = (largest["actor_seconds"] - largest["cohorts"] * cohort) / largest["per_round"]
    fixed = max(rest - coarse["cohorts"] * call, 0.0)
    return Costs(client, cohort, call, max(float(row), 0.0), fixed, bytes, fold, wait)


def fold_cost(numbers: int) -> float:
    """Seconds a byte to add two partial results as the server does, measured here."""
    import torch

    from rayfed.aggregation.fedavg import FedAvg
    from rayfed.aggregation.weighted_sum import WeightedSum

    torch.set_num_threads(1)
    sums = [WeightedSum({"w": torch.rand(numbers)}, {}, 1.0) for _ in range(2)]
    rule, taken = FedAvg(), []
    for _ in range(20):
        began = perf_counter()
        rule.merge(*(WeightedSum({"w": s.tensors["w"].clone()}, {}, 1.0) for s in sums))
        taken.append(perf_counter() - began)
    return float(np.median(taken)) / (4 * numbers)


def wait_cost(references: int) -> float:
    """Seconds a reference to wait for the first of so many calls, where one is done, on a Ray that is started here."""
    import ray

    from actors import local_ray

    class Sleeper:
        def sleep(self, seconds: float) -> None:
            sleep(seconds)

    local_ray.start()
    with local_ray.ending():
        idle, busy = (ray.remote(Sleeper).options(num_cpus=0).remote() for _ in range(2))
        waiting, taken = [busy.sleep.remote(3600) for _ in range(references)], []
        for _ in range(20):
            done = idle.sleep.remote(0)
            ray.get(done)
            began = perf_counter()
            assert ray.wait([*waiting, done], num_returns=1)[0] == [done]
            taken.append(perf_counter() - began)
    return float(np.median(taken)) / references


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--measured", type=Path, default=MEASURED)
    measured = json.loads(parser.parse_args().measured.read_text())
    points = measured["growing"] + measured["fine"]
    fine, wait = measured["fine"][0], wait_cost(16_000)
    costs = fitted(measured["growing"], fine, bytes=4 * 13_426, fold=fold_cost(11_000_000), wait=wait)
    print(f"a client {1e3 * costs.client:.2f} ms, a cohort {1e3 * costs.cohort:.2f} ms, ", end="")
    print(f"a call {1e3 * costs.call:.2f} ms, a row {1e6 * costs.row:.0f} us, ", end="")
    print(f"a round besides {1e3 * costs.fixed:.0f} ms, a fold {1e9 * costs.fold:.2f} s a GB, ", end="")
    print(f"to wait {1e6 * costs.wait:.2f} us an actor")
    print("\nclients a round  cohorts  measured (s)  simulated (s)  ratio")
    for p in points:
        simulated = play(Plan(int(p["per_round"]), int(p["cohorts"]), 1, 2), costs)["seconds"]
        row = f"{p['per_round']:>15,}{p['cohorts']:>9}{p['seconds']:14.3f}{simulated:15.3f}"
        print(f"{row}{simulated / p['seconds']:7.2f}")
    dearest = fine["seconds"] / fine["cohorts"] - costs.row
    print(f"\nwere the driver alone what the round of {fine['cohorts']} cohorts took, a call would be ", end="")
    print(f"{1e3 * dearest:.2f} ms: 'dearest' is the driver then")
    print("\n10^7 clients, 100,000 a round, 1,000 nodes of 16 actors; seconds of a round, and of each at work")
    resnet = replace(costs, client=costs.client * 100, bytes=44_700_000)
    for name, each in (("LeNet", costs), ("ResNet-18", resnet)):
        for cohorts, folds in ((8, False), (16_000, False), (16_000, True), (32_000, False), (32_000, True)):
            found = play(Plan(100_000, cohorts, 1000, 16, folds), each)
            found["dearest"] = found["driver"] + cohorts * (dearest - costs.call)
            how = f"{name}, {cohorts:,} cohorts" + ", nodes fold" * folds
            print(f"{how:41}" + "  ".join(f"{what} {seconds:6.1f}" for what, seconds in found.items()))


if __name__ == "__main__":
    main()
