"""Aggregation rules against their definitions, the fold's order, the server's optimisers against torch's."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from rayfed.aggregation.base import Aggregation
from rayfed.aggregation.fedavg import FedAvg
from rayfed.aggregation.median import Median
from rayfed.aggregation.server import TreeFold
from rayfed.aggregation.server_optimiser import ServerOptimiser
from rayfed.update import Update


def updates(count: int) -> list[Update]:
    g = torch.Generator().manual_seed(count)
    return [
        Update(c, 0, {"w": torch.randn(3, 4, generator=g), "b": torch.randn(2, generator=g)},
               {"mean": torch.randn(2, generator=g)}, samples=c + 1, loss=0.0)
        for c in range(count)
    ]  # fmt: skip


def folded(rule: Aggregation, sent: list[Update], size: int, order: list[int] | None = None):  # type: ignore[no-untyped-def]
    cohorts = [sent[i : i + size] for i in range(0, len(sent), size)]
    fold = TreeFold(rule, len(cohorts))
    for i in order or range(len(cohorts)):
        fold.add(i, rule.partial(cohorts[i]))
    return rule.combine(fold.total(), torch.Generator())


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_fedavg_is_the_weighted_mean(size: int) -> None:
    sent = updates(7)
    step, buffers = folded(FedAvg(), sent, size)
    weights = np.arange(1, 8)
    for name in ("w", "b"):
        expected = np.average([u.tensors[name].numpy() for u in sent], axis=0, weights=weights)
        np.testing.assert_allclose(step[name].numpy(), expected, rtol=1e-5, atol=1e-6)
    expected = np.average([u.buffers["mean"].numpy() for u in sent], axis=0, weights=weights)
    np.testing.assert_allclose(buffers["mean"].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_sum_in_place_has_the_bits_of_merges_and_leaves_updates_alone() -> None:
    rule, sent, before = FedAvg(), updates(5), updates(5)
    total = rule.partial(sent)
    merged = rule.partial(sent[:1])
    for update in sent[1:]:
        merged = rule.merge(merged, rule.partial([update]))
    assert total.weight == merged.weight
    for name in ("w", "b"):
        assert torch.equal(total.tensors[name], merged.tensors[name])
        assert all(torch.equal(u.tensors[name], b.tensors[name]) for u, b in zip(sent, before, strict=True))
    assert torch.equal(total.buffers["mean"], merged.buffers["mean"])


def test_fedavg_uniform_is_the_plain_mean() -> None:
    sent = updates(5)
    step, _ = folded(FedAvg(weights="uniform"), sent, 2)
    torch.testing.assert_close(step["w"], torch.stack([u.tensors["w"] for u in sent]).mean(0))


@pytest.mark.parametrize("count", [4, 5])
def test_median_is_numpys(count: int) -> None:
    sent = updates(count)
    step, _ = folded(Median(), sent, 2)
    np.testing.assert_allclose(step["w"].numpy(), np.median([u.tensors["w"].numpy() for u in sent], axis=0), rtol=1e-6)


def test_median_ignores_one_poisoned_client() -> None:
    sent = updates(5)
    sent[0].tensors["w"].fill_(1e9)
    assert folded(Median(), sent, 2)[0]["w"].abs().max() < 10


def test_every_order_of_arrival_gives_the_same_bits() -> None:
    sent = updates(5)
    expected, _ = folded(FedAvg(), sent, 1)
    for order in itertools.permutations(range(5)):
        step, _ = folded(FedAvg(), sent, 1, list(order))
        assert all(torch.equal(step[n], expected[n]) for n in expected)


def test_fold_holds_few_results_at_once() -> None:
    fold = TreeFold(FedAvg(), 1024)
    partial = FedAvg().partial(updates(1))
    order = [i + j for i in range(0, 1024, 4) for j in random.Random(0).sample(range(4), 4)]
    most = 0
    for i in order:
        fold.add(i, partial)
        most = max(most, len(fold._nodes))
    assert most <= 14
    assert fold.total().weight == 1024


def test_an_incomplete_fold_is_refused() -> None:
    fold = TreeFold(FedAvg(), 3)
    fold.add(0, FedAvg().partial(updates(1)))
    with pytest.raises(ValueError, match="not all of the 3"):
        fold.total()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_server_sgd_is_torchs(momentum: float) -> None:
    w = torch.randn(6, generator=torch.Generator().manual_seed(0))
    reference = w.clone().requires_grad_()
    torchs = torch.optim.SGD([reference], lr=0.3, momentum=momentum)
    ours, weights, state = ServerOptimiser("sgd", 0.3, momentum), {"w": w}, {}
    for i in range(5):
        step = torch.randn(6, generator=torch.Generator().manual_seed(i))
        reference.grad = step.clone()
        torchs.step()
        weights, state = ours.step(weights, {"w": step}, state)
        torch.testing.assert_close(weights["w"], reference.detach())


def test_server_adam_follows_the_papers_recursion() -> None:
    """Reddi 2021, algorithm 2, in scalar arithmetic."""
    w, m, v, lr, tau = 1.0, 0.0, 1e-6, 0.1, 1e-3
    ours, weights, state = ServerOptimiser("adam", lr), {"w": torch.tensor([w], dtype=torch.float64)}, {}
    for step in (0.5, -0.2, 0.9, 0.1):
        m, v = 0.9 * m + 0.1 * step, 0.99 * v + 0.01 * step**2
        w -= lr * m / (v**0.5 + tau)
        weights, state = ours.step(weights, {"w": torch.tensor([step], dtype=torch.float64)}, state)
        assert weights["w"].item() == pytest.approx(w, rel=1e-9)
