"""A round's cohorts in runs of one call each: aligned with the tree of the server's sums, and no bit hangs on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfed import scenario as scenarios
from rayfed.aggregation.server import TreeFold
from rayfed.simulation.client import plan
from rayfed.simulation.executors.stragglers import split_among_workers, split_by_weight
from rayfed.simulation.gpus import KINDS, with_devices
from tests.helpers.portion_fixtures import Adding


def folded(numbers: np.ndarray, runs: list[list[int]], order: np.random.Generator) -> tuple[Any, int]:
    """The sum as it is made by a call for each run, and how many partial results reach the server."""
    rule: Any = Adding()
    server, sent = TreeFold(rule, len(numbers)), 0
    for place in order.permutation(len(runs)):
        call = TreeFold(rule, len(runs[place]))
        for index in runs[place]:
            call.add(index, numbers[index])
        for (level, index), partial in call.nodes.items():
            server.add(index, partial, level)
            sent += 1
    return server.total(), sent


def sent_by(runs: list[list[int]], count: int) -> int:
    return folded(np.zeros(count, np.float32), runs, np.random.default_rng(0))[1]


@given(st.lists(st.integers(0, 50), max_size=200), st.integers(1, 40), st.integers(1, 20))
def test_each_cohort_is_in_one_run_of_consecutive_ones(weights: list[int], calls: int, workers: int) -> None:
    runs = split_by_weight(weights, calls, workers)
    assert [i for run in runs for i in run] == list(range(len(weights)))
    assert all(runs)
    assert len(runs) <= calls


@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 20))
def test_sums_have_the_same_bits_whatever_the_runs(count: int, seed: int, calls: int, workers: int) -> None:
    draw = np.random.default_rng(seed)
    numbers = draw.normal(size=count).astype(np.float32)
    weights = draw.integers(1, 100, count).tolist()
    alone, _ = folded(numbers, [[i] for i in range(count)], draw)
    several, _ = folded(numbers, split_by_weight(weights, calls, workers), draw)
    assert several.tobytes() == alone.tobytes()


@pytest.mark.parametrize(("each", "calls"), [(4, 1600), (16, 4), (1, 64), (2, 8), (8, 5), (64, 3)])
def test_runs_that_may_be_subtrees_send_one_partial_result_each(each: int, calls: int) -> None:
    runs = split_by_weight([10.0] * (each * calls), calls, -(-calls // 2))
    assert (len(runs), sent_by(runs, each * calls)) == (calls, calls)


def test_runs_of_unlike_clients_send_a_third_fewer_than_cuts_of_equal_weight() -> None:
    weights = np.ceil(10 * np.random.default_rng(0).lognormal(0, 0.5, 6400)).tolist()
    assert 3 * sent_by(split_by_weight(weights, 1600, 800), 6400) <= 2 * sent_by(equal_runs(weights, 1600), 6400)


def equal_runs(weights: list[float], calls: int) -> list[list[int]]:
    """Runs of about equal weight, cut anywhere: the cohorts go to the call that their middle falls to."""
    middles, total = np.cumsum(weights) - np.array(weights) / 2, sum(weights)
    owners = [min(int(middle * calls // total), calls - 1) for middle in middles]
    return [[i for i, owner in enumerate(owners) if owner == one] for one in sorted(set(owners))]


def ends(runs: list[list[int]], weights: list[float], workers: int) -> float:
    """When all runs are done, if each worker takes the heaviest that is left."""
    busy = [0.0] * workers
    for load in sorted((sum(weights[i] for i in run) for run in runs), reverse=True):
        busy[busy.index(min(busy))] += load
    return max(busy)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(1, 20))
def test_aligned_runs_end_hardly_later_than_those_of_equal_weight(weights: list[int], workers: int) -> None:
    calls, each = 2 * workers, [float(weight) for weight in weights]
    least = ends(equal_runs(each, calls), each, workers)
    assert ends(split_by_weight(each, calls, workers), each, workers) <= least * (1 + 1 / 32) + 1e-9


@pytest.mark.parametrize(
    ("cohorts", "workers", "arms", "calls"),
    [(10, 2, 1, 2), (50, 2, 1, 4), (10, 2, 2, 2), (3, 4, 1, 3), (64, 32, 1, 32), (64, 4, 3, 3), (1, 1, 1, 1)],
)
def test_a_worker_gets_one_call_where_the_only_arm_has_few_cohorts(
    cohorts: int, workers: int, arms: int, calls: int
) -> None:
    assert len(split_among_workers([10.0] * cohorts, workers, arms)) == calls


def test_a_worker_gets_two_calls_where_one_would_be_done_late() -> None:
    weights = [60.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0]
    one, two = split_by_weight(weights, 2, 2), split_among_workers(weights, 2, 1)
    assert ends(two, weights, 2) <= ends(one, weights, 2)
    assert len(split_among_workers([50.0, 1.0, 1.0, 50.0], 2, 1)) == 2


@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(1, 8), st.integers(1, 3))
def test_shares_have_each_cohort_once(weights: list[int], workers: int, arms: int) -> None:
    runs = split_among_workers([float(weight) for weight in weights], workers, arms)
    assert [i for run in runs for i in run] == list(range(len(weights)))


@pytest.mark.parametrize(("drawn", "size"), [(10, 1), (64, 1), (65, 2), (100, 2), (512, 8), (1000, 8), (100_000, 8)])
def test_a_large_round_has_cohorts_for_a_large_cluster(drawn: int, size: int) -> None:
    text = f"name: t\nmodel: mlp\nfederation: {{rounds: 1, clients: 200000, clients_per_round: {drawn}}}"
    on_cpu = with_devices(scenarios.parse(text), dict.fromkeys(KINDS, 0))
    assert plan.cohort_size(on_cpu) == size
    assert plan.cohort_size(scenarios.parse(text, changes=["training.vectorise=fused"])) == -(-drawn // 8)
    on_gpu = with_devices(scenarios.parse(text), dict.fromkeys(KINDS, 1))
    assert plan.cohort_size(on_gpu) == -(-drawn // 8)
