"""What reaches the server, and how long adding takes, where partial results meet on their nodes first and where not.

    python -m benchmarks.nodes [--nodes 2 8 32] [--actors 16] [--cohorts 6400] [--numbers 1100000]
    python -m benchmarks.nodes --ray 2 4             # real nodes of Ray on this machine, one actor each

Without `--ray` the nodes are pretended: the run's own plan of calls and sums (`rayfed.simulation.rounds.node_sums`),
with the real copying and adding in this process, one after another. A node's seconds are those of its longest chain of
calls, for calls of one level go on side by side on its actors; a network is not pretended.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from rayfed.aggregation.fedavg import FedAvg
from rayfed.aggregation.server import TreeFold
from rayfed.aggregation.weighted_sum import WeightedSum
from rayfed.scenario import ResolvedArm, Scenario, parse, resolve
from rayfed.simulation.client.runtime import CohortReport
from rayfed.simulation.executors.base import Call, Done
from rayfed.simulation.executors.stragglers import Cohort, Portion, Result, split_by_weight
from rayfed.simulation.rounds.node_sums import NodeSums, assign_homes


def arm() -> ResolvedArm:
    """Return the arm of a scenario without attacks or defences."""
    return resolve(parse("{name: nodes, model: mlp, data: digits, federation: {rounds: 1, clients: 2}}"))["none"]


@dataclass
class Adding:
    """Pretended nodes, which hold partial results and add them up; sums are of `numbers` numbers."""

    numbers: int
    levels: list[float] = field(default_factory=list)
    """Seconds of the longest call of each level of sums."""
    moved: int = 0
    """Partial results that went from one node to another, the server's apart."""

    def __post_init__(self) -> None:
        self._sum = WeightedSum({"w": torch.rand(self.numbers)}, {}, 1.0)

    def made(self, work: Sequence[Portion]) -> Iterator[Result]:
        """Yield portions' partial results on their own nodes."""
        for portion in work:
            fold = TreeFold(FedAvg(), len(portion))
            fold.nodes.update(dict.fromkeys(branches(portion), self._sum))
            yield Result(portion, CohortReport([], 0.0), fold.nodes, portion[0].node)

    def run(self, calls: Sequence[Call]) -> Iterator[Done]:
        """Do the calls of one level, each where it is best done."""
        longest = 0.0
        for call in calls:
            _, _, count, *partials = call.args
            seconds, left = self.added(count, partials)
            longest = max(longest, seconds)
            self.moved += sum(len(p) for p, one in zip(partials, call.tag, strict=True) if one.node != call.node)
            yield Done(call, None, [left], call.node)
        self.levels.append(longest)

    def added(self, count: int, partials: Sequence[Any]) -> tuple[float, Any]:
        """Return the seconds that it takes to read and add partial results, and what is left of them."""
        began, fold = perf_counter(), TreeFold(FedAvg(), count)
        for some in partials:
            for (level, index), one in some.items():
                fold.add(index, WeightedSum({"w": one.tensors["w"].clone()}, {}, one.weight), level)
        return perf_counter() - began, fold.nodes


def branches(portion: Portion) -> list[tuple[int, int]]:
    """Return the places in the server's tree of a portion's partial results."""
    fold: Any = TreeFold(Places(), len(portion))  # type: ignore[arg-type]
    for cohort in portion:
        fold.add(cohort.index, True)
    return list(fold.nodes)


class Places:
    """Rule that adds nothing."""

    @staticmethod
    def merge(left: bool, right: bool) -> bool:
        return left and right


def planned(cohorts: int, nodes: int, actors: int, spread: float, meet: bool) -> list[list[Cohort]]:
    """Return the portions of a round whose cohorts have so many samples, log-normal with this spread, as rounds do."""
    weights = np.ceil(10 * np.random.default_rng(0).lognormal(0, spread, cohorts)).tolist()
    runs = split_by_weight(weights, 2 * nodes * actors, nodes * actors)
    loads = [sum(weights[i] for i in run) for run in runs]
    names = assign_homes(loads, {f"{i:04}": actors for i in range(nodes)}) if meet else [""] * len(runs)
    played = arm()
    return [[Cohort(played, i, None, (i,), {}, node=n) for i in run] for run, n in zip(runs, names, strict=True)]


def pretended(cohorts: int, nodes: int, actors: int, numbers: int, spread: float, meet: bool) -> str:
    """Return a line on one round."""
    work, adding = planned(cohorts, nodes, actors, spread, meet), Adding(numbers)
    sums = NodeSums(adding.run, adding.made, {"none": None}, {"none": cohorts})
    for result in adding.made(work):
        sums.add(result)
    arriving = list(sums.met()) if meet else [("none", result.partials) for result in adding.made(work)]
    count = sum(len(partials) for _, partials in arriving)
    seconds, _ = adding.added(cohorts, [partials for _, partials in arriving])
    size = 4e-6 * numbers
    where = "nodes first" if meet else "server alone"
    return (
        f"{nodes:>6}{len(work):>7}  {spread:<7}{where:14}{count:>8}{count * size:>12,.0f}{adding.moved * size:>14,.0f}"
        f"{sum(adding.levels):>10.2f}{seconds:>10.2f}{sum(adding.levels) + seconds:>9.2f}"
    )


def scenario_of(nodes: int) -> Scenario:
    """Return a round of 64 clients, whose sums of 4 MB are too large to be sent along with a report."""
    return parse(
        f"""
        name: nodes
        data: {{name: digits, size: 28, train_samples: 640, test_samples: 20}}
        model: {{name: mlp, hidden: [1200]}}
        training: {{batch_size: 10}}
        federation: {{rounds: 1000, clients: 64, evaluate_every: 1000}}
        resources: {{clients: {{actors: {nodes}, num_cpus: 1}}}}
        """
    )


@contextmanager
def _cluster(nodes: int) -> Iterator[None]:
    """Start a head without CPUs, where driver and server are, and so many nodes of one CPU."""
    import ray
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": 200_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **store})
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=1, **store)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield
        ray.shutdown()
    finally:
        cluster.shutdown()


def on_cluster(nodes: int, rounds: int) -> Iterator[str]:
    """Yield a line for rounds in which nodes add first, and one for rounds in which the server does all."""
    from ray.experimental import get_object_locations

    from actors.executor import RayExecutor, on_ray
    from rayfed.simulation.inputs import prepare_inputs
    from rayfed.simulation.progress import Progress
    from rayfed.simulation.rounds.federation import Federation
    from rayfed.simulation.rounds.round import Round

    served, apart = RayExecutor.serve, RayExecutor.nodes
    added: list[Any] = []
    bits: dict[bool, list[Any]] = {True: [], False: []}

    def counting(self: RayExecutor, method: str, *args: Any, returns: int = 1) -> Any:
        if method == "add":
            added.append(args[-1])
        return served(self, method, *args, returns=returns)

    RayExecutor.serve = counting  # type: ignore[method-assign]
    inputs = prepare_inputs(scenario_of(nodes))
    with _cluster(nodes):
        for meet in (True, False):
            RayExecutor.nodes = apart if meet else lambda _: {}  # type: ignore[method-assign]
            with on_ray()(inputs, Progress()) as executor:
                federation = Federation(inputs, executor, Progress(), {}, lambda *_: {})
                seconds, sizes, counts = [], [], []
                for number in range(rounds + 1):
                    added.clear()
                    began = perf_counter()
                    Round(federation, number, ["none"]).play(due=())
                    seconds.append(perf_counter() - began)
                    found = get_object_locations(added)
                    counts.append(len(added))
                    sizes.append(sum(found[ref]["object_size"] for ref in added) / 1e6)
                bits[meet] = [w.numpy().tobytes() for w in federation.saved["none"]["weights"].values()]
            where = "nodes first" if meet else "server alone"
            took, size, count = (median(values[1:]) for values in (seconds, sizes, counts))
            yield f"{nodes:>6}  {where:14}{count:>8.0f}{size:>12.1f}{took:>12.2f}"
    RayExecutor.serve, RayExecutor.nodes = served, apart  # type: ignore[method-assign]
    assert bits[True] == bits[False], "bits hang on where sums are made"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="*", default=[2, 8, 32])
    parser.add_argument("--actors", type=int, default=16, help="of each node")
    parser.add_argument("--cohorts", type=int, default=6400)
    parser.add_argument("--numbers", type=int, default=1_100_000, help="of a model")
    parser.add_argument("--ray", type=int, nargs="*", metavar="NODES", help="real nodes of Ray instead")
    parser.add_argument("--rounds", type=int, default=5, help="with --ray, after one that does not count")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    if chosen.ray:
        print(" nodes  sums          results  MB to server   s a round")
        for nodes in chosen.ray:
            for line in on_cluster(nodes, chosen.rounds):
                print(line, flush=True)
        return
    print(" nodes  calls  spread sums          results  MB to server  MB of nodes  s nodes  s server    s all")
    for nodes in chosen.nodes:
        for spread in (0.0, 0.5):
            for meet in (False, True):
                print(pretended(chosen.cohorts, nodes, chosen.actors, chosen.numbers, spread, meet), flush=True)


if __name__ == "__main__":
    main()
