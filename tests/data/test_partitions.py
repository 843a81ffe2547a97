"""Partitions: every sample dealt once, nobody empty, and the skew that each name promises."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from rayfed import registry
from rayfed.data.partitions import TABLE
from rayfed.data.partitions.base import Partition, Parts, count_labels
from rayfed.errors import UserError
from tests.helpers.component_fixtures import required

PARAMETERS = [
    ("iid", {}),
    ("dirichlet", {"alpha": 0.01}),
    ("dirichlet", {"alpha": 1.0}),
    ("dirichlet", {"alpha": 1000.0}),
    ("shards", {}),
    ("shards", {"shards_per_client": 1}),
    ("quantity", {"alpha": 0.05}),
    ("quantity", {"alpha": 10.0}),
    ("blocks", {}),
]


OVERLAPPING = [("resampled", {"samples": 7})]


def split(name, parameters, labels, clients, seed=0):
    return registry.build("partitions", name, parameters).split(labels, clients, np.random.default_rng(seed))


def shares(labels, parts, classes):
    mix = count_labels(labels, parts, classes)
    return mix / mix.sum(1, keepdims=True)


def test_every_name_is_a_partition():
    registered = [(name, required("partitions", name)) for name in TABLE]
    for name, parameters in PARAMETERS + OVERLAPPING + registered:
        assert isinstance(registry.build("partitions", name, parameters), Partition)


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS)
@given(clients=st.integers(1, 100), each=st.floats(2, 40), seed=st.integers(0, 2**64))
def test_every_sample_is_dealt_exactly_once_and_nobody_is_empty(name, parameters, clients, each, seed):
    samples = int(clients * each)
    labels = np.random.default_rng(seed).choice(5, size=samples, p=[0.6, 0.2, 0.1, 0.05, 0.05])
    parts = split(name, parameters, labels, clients, seed + 1)
    assert len(parts) == clients
    assert all(part.dtype == np.int64 and part.ndim == 1 and len(part) for part in parts)
    assert np.sort(np.concatenate(parts)).tolist() == list(range(samples))


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS + OVERLAPPING)
def test_the_generator_is_the_only_source_of_randomness(name, parameters):
    labels = np.arange(400) % 4
    one, again, other = (split(name, parameters, labels, 10, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS)
def test_more_clients_than_samples_are_refused_with_both_numbers(name, parameters):
    with pytest.raises(UserError, match=r"9 samples among 10 clients.*fewer clients or more samples"):
        split(name, parameters, np.arange(9) % 3, 10)


def test_limits_beyond_one_sample_a_client():
    with pytest.raises(UserError, match=r"29 samples among 10 clients: .* 3 shards .* at least 30"):
        split("shards", {"shards_per_client": 3}, np.zeros(29, np.int64), 10)
    with pytest.raises(UserError, match=r"29 samples among 10 clients: .* at least 30"):
        split("dirichlet", {"alpha": 1.0, "min_samples": 3}, np.zeros(29, np.int64), 10)


def test_label_mix_counts():
    labels = np.array([0, 2, 2, 1, 0])
    parts = [np.array([0, 4, 1]), np.array([2, 3])]
    assert count_labels(labels, parts, 4).tolist() == [[2, 0, 1, 0], [0, 1, 1, 0]]


@pytest.mark.parametrize("name", ["iid", "dirichlet"])
def test_equal_sizes(name):
    parts = split(name, {"alpha": 0.1} if name == "dirichlet" else {}, np.arange(1003) % 10, 10)
    assert sorted(len(part) for part in parts) == [100] * 7 + [101] * 3


def worst_deviation(labels, parts, classes):
    """The largest distance of a client's class counts from random draws, in standard deviations."""
    p = np.bincount(labels, minlength=classes) / len(labels)
    sizes = np.array([len(part) for part in parts])[:, None]
    return np.abs((count_labels(labels, parts, classes) - sizes * p) / np.sqrt(sizes * p * (1 - p))).max()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "parameters"), [("iid", {}), ("quantity", {"alpha": 1.0}), ("dirichlet", {"alpha": 1e5})]
)
def test_labels_are_as_if_drawn_at_random(name, parameters, seed):
    labels = np.random.default_rng(seed).choice(4, size=20_000, p=[0.4, 0.3, 0.2, 0.1])
    parts = [part for part in split(name, parameters, labels, 20, seed) if len(part) >= 50]
    assert worst_deviation(labels, parts, 4) < 5  # 80 counts; beyond 5 once in 20,000 such tests


@pytest.mark.parametrize("seed", range(3))
def test_dirichlet_skew_grows_as_alpha_falls(seed):
    labels = np.arange(20_000) % 10
    largest = [
        shares(labels, split("dirichlet", {"alpha": alpha}, labels, 50, seed), 10).max(1).mean()
        for alpha in (100.0, 10.0, 1.0, 0.1, 0.01)
    ]
    assert largest == sorted(largest)
    assert largest[0] < 0.2
    assert largest[-1] > 0.5


def test_dirichlet_near_zero_gives_each_client_one_class_as_far_as_classes_last():
    # In the limit every client wants one of K classes; B ~ Bin(clients, 1/K) want the same one, which suffices for
    # clients / K of them, so on average K E[min(B, clients / K)] / clients of a client's samples are of its class.
    classes, clients = 10, 50
    labels = np.arange(5000) % classes
    largest = [
        shares(labels, split("dirichlet", {"alpha": 1e-6}, labels, clients, seed), classes).max(1).mean()
        for seed in range(50)
    ]
    wants = binom(clients, 1 / classes)
    expected = classes * wants.expect(lambda b: np.minimum(b, clients / classes)) / clients
    # Seeds differ by about 0.05, so their mean by 0.007; where more than twice too many want a class, what they
    # get instead may be the larger part.
    assert np.mean(largest) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("alpha", [3.0, 10.0, 30.0])
def test_dirichlet_shares_vary_as_the_distribution_says(alpha):
    # Var of a share of Dir(a, .., a) over K classes is (1/K)(1 - 1/K) / (K a + 1); drawing n samples from it gives
    # (1/K)(1 - 1/K) (1 + (n - 1) / (K a + 1)) / n. Classes that run out touch few clients at these alphas.
    classes, clients, size = 10, 100, 400
    labels = np.arange(clients * size) % classes
    squares = [
        ((shares(labels, split("dirichlet", {"alpha": alpha}, labels, clients, seed), classes) - 0.1) ** 2).mean()
        for seed in range(10)
    ]
    expected = 0.09 * (1 + (size - 1) / (classes * alpha + 1)) / size
    assert np.mean(squares) == pytest.approx(expected, rel=0.1)


def test_dirichlet_deals_with_every_client_wanting_the_same_class():
    # Two classes, one of them rare: at this alpha nearly every mix is the common class alone.
    labels = (np.arange(1000) < 10).astype(np.int64)
    mix = count_labels(labels, split("dirichlet", {"alpha": 1e-3}, labels, 10), 2)
    assert mix.sum(0).tolist() == [990, 10]
    assert mix.sum(1).tolist() == [100] * 10


def test_shards_give_each_client_two_classes():
    # McMahan et al.: 60,000 digits, 200 shards of 300, 100 clients; here a tenth of that.
    labels = np.random.default_rng(0).permutation(np.arange(6000) % 10)
    parts = split("shards", {}, labels, 100)
    assert {len(part) for part in parts} == {60}
    held = (count_labels(labels, parts, 10) > 0).sum(1)
    assert set(held) <= {1, 2}
    assert (held == 2).mean() > 0.7


@pytest.mark.parametrize("seed", range(3))
def test_quantity_skew_grows_as_alpha_falls(seed):
    labels = np.arange(20_000) % 10
    largest = [
        max(len(part) for part in split("quantity", {"alpha": alpha}, labels, 50, seed)) / len(labels)
        for alpha in (1000.0, 1.0, 0.001)
    ]
    assert largest == sorted(largest)
    assert largest[0] < 0.03
    assert largest[-1] > 0.5


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("dirichlet", {"alpha": 0.0}),
        ("quantity", {"alpha": -1.0}),
        ("shards", {"shards_per_client": 0}),
        ("iid", {"a": 1}),
    ],
)
def test_parameters_out_of_range_are_refused(name, parameters):
    with pytest.raises(ValueError, match="validation error"):
        registry.build("partitions", name, parameters)


def test_blocks_keep_the_order_of_the_data_set():
    parts = split("blocks", {}, np.zeros(10, dtype=np.int64), 3)
    assert [sorted(part.tolist()) for part in parts] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_resampled_clients_outnumber_samples_and_hold_different_ones():
    parts = split("resampled", {"samples": 20}, np.zeros(50, np.int64), 4000)
    drawn = parts.indices.reshape(4000, 20)
    assert (np.diff(np.sort(drawn, axis=1), axis=1) > 0).all()
    counts = np.bincount(drawn.reshape(-1), minlength=50)
    deviation = np.sqrt(4000 * 0.4 * 0.6)  # each client has each sample with probability 20 / 50
    assert np.abs(counts - 1600).max() < 4.5 * deviation
    first = np.bincount(drawn[:, 0], minlength=50)  # in random order: a first place is any sample's
    assert np.abs(first - 80).max() < 4.5 * np.sqrt(80)
    everything = split("resampled", {"samples": 50}, np.zeros(50, np.int64), 3)
    assert all(np.array_equal(np.sort(part), np.arange(50)) for part in everything)


def test_resampled_refuses_more_samples_than_there_are():
    with pytest.raises(UserError, match=r"51 different samples out of 50; lower partition\.samples"):
        split("resampled", {"samples": 51}, np.zeros(50, np.int64), 3)


def test_parts_are_a_sequence_in_two_arrays():
    given = [np.array([4, 1]), np.array([], np.int64), np.array([0, 2, 3])]
    parts = Parts.from_indices(given)
    assert len(parts) == 3
    assert parts.sizes.tolist() == [2, 0, 3]
    assert all(np.array_equal(a, b) for a, b in zip(parts, given, strict=True))
    assert np.array_equal(parts[-1], given[-1])
    assert [part.tolist() for part in parts[1:]] == [[], [0, 2, 3]]
    assert np.shares_memory(parts[2], parts.indices)
    with pytest.raises(IndexError):
        parts[3]
    assert len(Parts.from_indices([])) == 0
    assert Parts.from_indices(parts) is parts


def test_a_hundred_thousand_clients_are_sent_as_two_buffers():
    parts = split("resampled", {"samples": 10}, np.zeros(1000, np.int64), 100_000)
    buffers = []
    head = pickle.dumps(parts, protocol=5, buffer_callback=buffers.append)
    assert len(head) < 1000
    assert sum(memoryview(b).nbytes for b in buffers) == 8 * (1_000_000 + 100_000)
