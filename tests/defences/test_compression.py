"""Compression: exact counts, error feedback that loses nothing, unbiased rounding, bytes by closed form."""

from __future__ import annotations

from math import ceil, log2
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from rayfed.defences.base import Batch, Defence, Task
from rayfed.defences.error_feedback import Compression
from rayfed.defences.prune import Prune
from rayfed.defences.quantise import Quantise
from rayfed.defences.top_k import TopK
from rayfed.errors import UserError
from rayfed.gradients import flatten
from rayfed.simulation.client.local import wrap_updates
from rayfed.update import Named, Update


def normal(seed: int) -> Named:
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(20, 30, generator=g), "b": 0.1 * torch.randn(400, generator=g)}


def sent(
    defences: list[Defence],
    tensors: Named,
    weights: Named | None = None,
    state: dict[str, Any] | None = None,
    seed: int = 0,
) -> Update:
    inner = Update(client=0, round=0, tensors=tensors, buffers={}, samples=1, loss=0.0)
    batch = Batch(torch.zeros(1, 1, 2, 2), torch.zeros(1, dtype=torch.long))
    generator = torch.Generator().manual_seed(seed)
    task = Task(0, 0, nn.Identity(), weights or {}, {}, batch, generator, order=0, state={} if state is None else state)
    return wrap_updates(lambda _: inner, defences)(task)


def bits_of(*tensors: torch.Tensor, bits: int = 32) -> int:
    named = {str(i): t for i, t in enumerate(tensors)}
    return 8 * Update(0, 0, named, {}, 1, 0.0, bits).sent_bytes


@pytest.mark.parametrize("ratio", [0.3, 0.9])
def test_prune_by_weight_and_gradient_drops_the_smallest_products(ratio: float) -> None:
    update, weights = normal(1), normal(2)
    for name, t in sent([Prune(ratio=ratio, by="weight_gradient")], update, weights).tensors.items():
        score, kept = (weights[name] * update[name]).abs(), t != 0
        assert int((~kept).sum()) == int(ratio * t.numel())
        assert torch.equal(t[kept], update[name][kept])
        assert score[~kept].max() < score[kept].min()


def test_global_prune_ranks_all_layers_together() -> None:
    update = normal(1)
    out = sent([Prune(ratio=0.6, scope="global")], update).tensors
    before, after = flatten(update), flatten(out)
    assert int((after == 0).sum()) == 600
    assert before[after == 0].abs().max() < before[after != 0].abs().min()
    assert (out["b"] == 0).float().mean() > 0.9  # its values are ten times smaller


@pytest.mark.parametrize(("k", "kept"), [(1, 1), (37, 37), (1000, 1000), (0.05, 50), (1e-6, 1)])
def test_top_k_keeps_exactly_the_largest_k(k: float, kept: int) -> None:
    before, after = flatten(normal(3)), flatten(sent([TopK(k=k)], normal(3)).tensors)
    largest = before.abs().topk(kept).indices
    assert int((after != 0).sum()) == kept
    assert torch.equal(after[largest], before[largest])


def test_counts_are_exact_where_values_are_equal() -> None:
    flat = {"a": torch.ones(7), "b": torch.ones(5)}
    assert int(flatten(sent([TopK(k=5)], flat).tensors).sum()) == 5
    assert int(flatten(sent([Prune(ratio=0.5, scope="global")], flat).tensors).sum()) == 6


def test_values_that_are_not_numbers_are_sent_so_that_divergence_shows() -> None:
    diverged = {"a": torch.tensor([1.0, float("nan"), 2.0, 3.0])}
    for defence in (Prune(ratio=0.75), TopK(k=1), Quantise(bits=4), Quantise(bits=1)):
        assert sent([defence], diverged).tensors["a"].isnan().any()


def test_top_k_refuses_more_values_than_the_model_has() -> None:
    TopK(k=12).check(nn.Linear(3, 3))
    with pytest.raises(UserError, match="12 trainable values"):
        TopK(k=13).check(nn.Linear(3, 3))


@pytest.mark.parametrize("k", [0, 0.0, 1.0, 2.5, -3])
def test_top_k_takes_a_count_or_a_share(k: float) -> None:
    with pytest.raises(ValidationError):
        TopK(k=k)


FEEDBACK = [
    Prune(ratio=0.9, error_feedback=True),
    Prune(ratio=0.9, by="weight_gradient", scope="global", error_feedback=True),
    TopK(k=20, error_feedback=True),
    Quantise(bits=1, error_feedback=True),
    Quantise(bits=3, error_feedback=True),
]


@pytest.mark.parametrize("defence", FEEDBACK, ids=str)
def test_error_feedback_loses_nothing(defence: Compression) -> None:
    state: dict[str, Any] = {}
    weights, total, arrived = normal(99), torch.zeros(1000, dtype=torch.double), torch.zeros(1000, dtype=torch.double)
    for round in range(20):
        total += flatten(normal(round))
        arrived += flatten(sent([defence], normal(round), weights, state).tensors)
    [residual] = state.values()
    torch.testing.assert_close(arrived + flatten(residual), total, atol=1e-5, rtol=0)
    assert flatten(residual).norm() < 20 * flatten(normal(0)).norm()


def test_error_feedback_sends_a_small_value_once_enough_is_owed() -> None:
    state: dict[str, Any] = {}
    rounds = [
        sent([TopK(k=1, error_feedback=True)], {"a": torch.tensor([1.0, 0.4])}, state=state).tensors["a"].tolist()
        for _ in range(4)
    ]
    assert rounds == [[1, 0], [1, 0], [0, pytest.approx(1.2)], [2, 0]]


def test_every_defence_of_a_stack_has_its_own_memory() -> None:
    state: dict[str, Any] = {}
    stack: list[Defence] = [Prune(ratio=0.5, error_feedback=True), Quantise(bits=2, error_feedback=True)]
    total, arrived = torch.zeros(1000), torch.zeros(1000)
    for round in range(10):
        total += flatten(normal(round))
        arrived += flatten(sent(stack, normal(round), state=state).tensors)
    assert len(state) == 2
    owed = sum((flatten(residual) for residual in state.values()), torch.zeros(1000))
    torch.testing.assert_close(arrived + owed, total, atol=1e-4, rtol=0)


def test_without_error_feedback_nothing_is_remembered() -> None:
    state: dict[str, Any] = {}
    sent([Prune(ratio=0.5), TopK(k=3), Quantise(bits=2)], normal(0), state=state)
    assert state == {}


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_stochastic_rounding_is_unbiased_with_the_variance_of_its_levels(bits: int) -> None:
    values = torch.cat([torch.linspace(-1, 1, 41), torch.tensor([1e-3])])
    draws = 4000
    defence = Quantise(bits=bits, rounding="stochastic")
    found = torch.stack([sent([defence], {"a": values}, seed=i).tensors["a"] for i in range(draws)]).double()
    step = 1 / (2 ** (bits - 1) - 1)
    share = (values.double() / step) % 1
    deviation = step * (share * (1 - share)).sqrt()
    # 42 values at five standard errors: one test in forty thousand fails by chance
    assert ((found.mean(0) - values).abs() <= 5 * deviation / draws**0.5 + 1e-6).all()
    torch.testing.assert_close(found.std(0), deviation, rtol=0.15, atol=0.1 * step)
    assert ((found - values).abs() < step * (1 + 1e-6)).all()
    torch.testing.assert_close((found / step).round() * step, found, rtol=0, atol=1e-6)


def test_stochastic_rounding_keeps_pruned_values_at_zero_and_follows_the_generator() -> None:
    stack: list[Defence] = [Prune(ratio=0.9), Quantise(bits=2, rounding="stochastic")]
    first, again, other = (sent(stack, normal(0), seed=seed).tensors["a"] for seed in (1, 1, 2))
    assert int((first != 0).sum()) <= 60
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("wrong", [{"bits": 1}, {"bits": 4, "error_feedback": True}])
def test_stochastic_rounding_is_refused_where_it_makes_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="rounding: stochastic"):
        Quantise(rounding="stochastic", **wrong)


def test_the_shortest_form_of_a_tensor_is_what_travels() -> None:
    def sparse(size: int, kept: int) -> torch.Tensor:
        return (torch.arange(size) < kept).float()

    assert bits_of(sparse(1024, 1024)) == 32 * 1024  # dense
    assert bits_of(sparse(1024, 512)) == 32 * 512 + 1024  # a bit mask: an index would take 10 bits
    assert bits_of(sparse(1024, 8)) == (32 + 10) * 8  # a list of indices
    assert bits_of(sparse(1000, 8)) == (32 + ceil(log2(1000))) * 8
    assert bits_of(sparse(1024, 8), sparse(1024, 1024), bits=8) == (8 + 10) * 8 + 8 * 1024
    assert bits_of(sparse(1024, 0)) == 0
    assert bits_of(sparse(1, 1)) == 32


def test_one_bit_is_dense_only_where_no_value_is_zero() -> None:
    assert bits_of(torch.ones(1024), bits=1) == 1024
    assert bits_of((torch.arange(1024) < 512).float(), bits=1) == 1024 + 512
