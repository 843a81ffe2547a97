"""Sums on nodes before the server's: no bit hangs on which node adds what, in which order, or on lost nodes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfed import scenario as scenarios
from rayfed.aggregation.server import TreeFold
from rayfed.runs import runner
from rayfed.scenario import resolve
from rayfed.simulation.client.runtime import CohortReport
from rayfed.simulation.executors.base import Call, Done, Gone, Lost
from rayfed.simulation.executors.local import LocalExecution, LocalExecutor, local
from rayfed.simulation.executors.stragglers import Cohort, Portion, Result, split_by_weight
from rayfed.simulation.inputs import Inputs
from rayfed.simulation.progress import Progress
from rayfed.simulation.rounds import node_sums
from rayfed.simulation.rounds.node_sums import FAN_IN, NodeSums, assign_homes
from tests.helpers.portion_fixtures import Adding
from tests.helpers.run_fixtures import assert_same_bits, weights

ARMS = list(
    resolve(
        scenarios.parse(
            "{name: t, model: mlp, data: digits, federation: {rounds: 1, clients: 2}, arms: {a: {}, b: {}}}"
        )
    ).values()
)


@dataclass
class Nodes:
    """Pretended nodes that train, add and are lost as it is drawn; a cohort's partial result is its number."""

    draw: random.Random
    numbers: np.ndarray
    names: Sequence[str]
    losses: int = 0
    """Fold calls whose arguments are lost."""
    obedient: bool = False
    """Whether calls are done where they are best done; else anywhere."""
    received: int = 0
    """Partial results that reached the server."""
    most: int = 0
    """Most results that one call has added."""
    folded: list[str] = field(default_factory=list)

    def train(self, work: Sequence[Portion]) -> Iterator[Result]:
        for portion in self.draw.sample(list(work), len(work)):
            fold = TreeFold(Adding(), len(portion))  # type: ignore[arg-type]
            for cohort in portion:
                fold.add(cohort.index, self.numbers[cohort.index])
            node = portion[0].node if self.obedient else self.draw.choice(self.names)
            yield Result(portion, CohortReport([], 0.0), fold.nodes, node)

    def run(self, calls: Sequence[Call]) -> Iterator[Done]:
        for call in self.draw.sample(list(calls), len(calls)):
            if self.losses and self.draw.random() < 0.5:
                self.losses -= 1
                yield Done(call, Gone(), [])
                continue
            _, sent, count, *partials = call.args
            assert sent == f"sent to {call.args[0]}"
            node = call.node if self.obedient else self.draw.choice(self.names)
            self.folded.append(node)
            self.most = max(self.most, len(partials))
            fold = TreeFold(Adding(), count)  # type: ignore[arg-type]
            for some in partials:
                for (level, index), partial in some.items():
                    fold.add(index, partial, level)
            yield Done(call, None, [fold.nodes], node)

    def totals(self, runs: Sequence[list[int]], where: Sequence[str]) -> dict[str, Any]:
        """The sums of two arms with the same numbers, each cohort trained in one of these runs."""
        count = len(self.numbers)
        counts, sent = {arm.name: count for arm in ARMS}, {arm.name: f"sent to {arm.name}" for arm in ARMS}
        work = [
            [Cohort(arm, i, "sent", (i,), {}, node=node) for i in run]
            for arm in ARMS
            for run, node in zip(runs, where, strict=True)
        ]
        sums = NodeSums(self.run, self.train, sent, counts)
        for result in self.train(work):
            sums.add(result)
        folds = {arm.name: TreeFold(Adding(), count) for arm in ARMS}  # type: ignore[arg-type]
        for arm, partials in sums.merge():
            for (level, index), partial in partials.items():
                folds[arm].add(index, partial, level)
                self.received += 1
        return {arm: fold.total() for arm, fold in folds.items()}


def straight(numbers: np.ndarray) -> bytes:
    fold = TreeFold(Adding(), len(numbers))  # type: ignore[arg-type]
    for index, number in enumerate(numbers):
        fold.add(index, number)
    total: bytes = fold.total().tobytes()
    return total


@pytest.mark.engine
@given(
    st.randoms(use_true_random=False),
    st.integers(1, 200),
    st.integers(0, 2**32 - 1),
    st.integers(1, 40),
    st.integers(2, 20),
    st.integers(0, 3),
    st.booleans(),
)
def test_no_bit_hangs_on_nodes_order_or_losses(
    draw: random.Random, count: int, seed: int, calls: int, nodes: int, losses: int, obedient: bool
) -> None:
    numbers = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    runs, names = split_by_weight([1.0] * count, calls, nodes), [str(i) for i in range(nodes)]
    world = Nodes(draw, numbers, names, losses, obedient)
    totals = world.totals(runs, assign_homes([float(len(run)) for run in runs], dict.fromkeys(names, 1)))
    assert [total.tobytes() for total in totals.values()] == [straight(numbers)] * 2
    assert world.most <= FAN_IN


def test_nodes_that_are_lost_again_and_again_lose_the_round() -> None:
    world = Nodes(random.Random(3), np.zeros(64, np.float32), ["a", "b"], losses=10**6, obedient=True)
    with pytest.raises(Lost, match="died 4 times"):
        world.totals([[i] for i in range(64)], ["a"] * 32 + ["b"] * 32)


@pytest.mark.engine
@given(
    st.lists(st.floats(0, 100), max_size=100),
    st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 16), min_size=1, max_size=8),
)
def test_portions_go_to_nodes_in_runs(loads: list[float], nodes: dict[str, int]) -> None:
    found = assign_homes(loads, nodes)
    assert len(found) == len(loads)
    assert [node for i, node in enumerate(found) if i == 0 or found[i - 1] != node] == sorted(set(found))


def test_a_node_gets_work_as_it_has_actors() -> None:
    found = assign_homes([2.0] * 40, {"a": 1, "b": 2, "c": 7})
    assert {node: found.count(node) for node in "abc"} == {"a": 4, "b": 8, "c": 28}


@pytest.mark.parametrize(("nodes", "before", "after"), [(2, 236, 8), (8, 944, 37), (32, 2880, 18), (50, 1600, 7)])
def test_few_partial_results_reach_the_server(nodes: int, before: int, after: int) -> None:
    """Of 6,400 cohorts that are alike, on nodes of 16 actors; every so many nodes bring their sums together."""
    runs = split_by_weight([10.0] * 6400, 32 * nodes, 16 * nodes)
    names = [str(i) for i in range(nodes)]
    assert sum(_branches(run[0], run[-1] + 1) for run in runs) == before
    world = Nodes(random.Random(3), np.zeros(6400, np.float32), names, obedient=True)
    world.totals(runs, assign_homes([float(len(run)) for run in runs], dict.fromkeys(names, 16)))
    assert world.received == 2 * after
    assert set(world.folded) == set(names)


def _branches(start: int, stop: int) -> int:
    fold = TreeFold(Adding(), stop)  # type: ignore[arg-type]
    for index in range(start, stop):
        fold.add(index, 0)
    return len(fold.nodes)


TEXT = """
name: t
data: {name: digits, size: 8, train_samples: 120, test_samples: 20}
model: {name: mlp, hidden: [8]}
training: {batch_size: 8, momentum: 0.5}
federation: {rounds: 2, clients: 12, cohort_size: 1}
arms:
  mean: {}
  bounded: {aggregation: {name: norm_bounding, norm: 1.0}}
  gathered: {aggregation: median}
  masked: {protection: {name: secure_aggregation, dropouts: {mask: 2}}}
  encrypted: {protection: {name: paillier, key_bits: 512, insecure: true, bits: 24}}
  packed: {protection: ckks}
"""


class OnThreeNodes(LocalExecutor):
    """Pretends that calls are done on three nodes, in another order, and that what some held is lost."""

    folds = 0

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.clients = 48
        self._draw = random.Random(7)

    def nodes(self) -> dict[str, int]:
        return {"one": 8, "two": 16, "three": 24}

    def run_clients(self, calls: Sequence[Call]) -> Iterator[Done]:
        for call in self._draw.sample(list(calls), len(calls)):
            if call.losable and self._draw.random() < 0.2:
                yield Done(call, Gone(), [])
                continue
            type(self).folds += call.method == "fold"
            for done in super().run_clients([call]):
                yield done._replace(node=self._draw.choice([call.node or "one", "one", "two", "three"]))


@pytest.mark.engine
def test_rules_masks_and_encryption_come_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The masked sum, ciphertexts, and what a rule keeps of each update beside its sum."""
    monkeypatch.setattr(node_sums, "LEAST", 0)
    scenario = scenarios.parse(TEXT)
    here = runner.launch(scenario, str(tmp_path / "here"), local, Progress())
    there = runner.launch(scenario, str(tmp_path / "there"), LocalExecution(OnThreeNodes), Progress())
    assert OnThreeNodes.folds > 2 * 5 * 2, "more than two for each round and arm whose sum is smaller than its parts"
    assert_same_bits(weights(there), weights(here))
