"""Defences: properties of what they send, and their composition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from scipy import stats
from torch import nn

from rayfed.defences.base import Batch, Defence, Task
from rayfed.defences.gaussian import Gaussian
from rayfed.defences.laplace import Laplace
from rayfed.defences.prune import Prune
from rayfed.defences.quantise import Quantise
from rayfed.defences.uniform import Uniform
from rayfed.errors import UserError
from rayfed.simulation.client.local import wrap_updates
from rayfed.update import Named, Update


def sent(defences: list[Defence], tensors: Named, seed: int = 0, weights: Named | None = None) -> Update:
    inner = Update(client=0, round=0, tensors=tensors, buffers={}, samples=1, loss=0.0)
    batch = Batch(torch.zeros(1, 1, 2, 2), torch.zeros(1, dtype=torch.long))
    generator = torch.Generator().manual_seed(seed)
    task = Task(0, 0, nn.Identity(), weights or {}, {}, batch, generator, order=0)
    return wrap_updates(lambda _: inner, defences)(task)


@pytest.fixture
def update() -> Named:
    g = torch.Generator().manual_seed(7)
    return {"a": torch.randn(200, 300, generator=g), "b": 0.01 * torch.randn(5000, generator=g)}


def test_gaussian_noise_has_the_deviation_that_was_asked_for(update: Named) -> None:
    out = sent([Gaussian(sigma=0.3)], update)
    noise = torch.cat([(out.tensors[n] - t).flatten() for n, t in update.items()]) / 0.3
    assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-3


def test_laplace_noise_has_the_scale_that_was_asked_for(update: Named) -> None:
    out = sent([Laplace(scale=0.3)], update)
    noise = torch.cat([(out.tensors[n] - t).flatten() for n, t in update.items()]) / 0.3
    assert stats.kstest(noise.numpy(), "laplace").pvalue > 1e-3


@pytest.mark.parametrize(
    ("defence", "order"),
    [(Gaussian(sigma=0, clip=1.5), 2), (Laplace(scale=0, clip=1.5), 1), (Laplace(scale=0, clip=1.5, norm="l2"), 2)],
)
def test_clip_bounds_the_joint_norm_and_keeps_the_direction(defence: Defence, order: int, update: Named) -> None:
    out = torch.cat([t.flatten() for t in sent([defence], update).tensors.values()])
    before = torch.cat([t.flatten() for t in update.values()])
    assert torch.linalg.vector_norm(out, ord=order).item() == pytest.approx(1.5, rel=1e-4)
    assert torch.cosine_similarity(out, before, dim=0).item() == pytest.approx(1, abs=1e-5)


def test_clip_leaves_short_and_zero_updates_alone() -> None:
    small = {"a": torch.full((3,), 0.1), "b": torch.zeros(2)}
    assert torch.equal(sent([Gaussian(sigma=0, clip=1)], small).tensors["a"], small["a"])
    assert torch.equal(sent([Gaussian(sigma=0, clip=1)], {"b": torch.zeros(2)}).tensors["b"], torch.zeros(2))


def test_noise_follows_the_clients_generator(update: Named) -> None:
    first, again, other = (sent([Gaussian(sigma=1)], update, seed).tensors["a"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_prune_drops_the_smallest_and_keeps_the_rest(ratio: float, update: Named) -> None:
    for name, t in sent([Prune(ratio=ratio)], update).tensors.items():
        kept = t != 0
        assert int((~kept).sum()) == int(ratio * t.numel())
        assert torch.equal(t[kept], update[name][kept])
        if ratio:
            assert update[name][~kept].abs().max() <= update[name][kept].abs().min()


def test_prune_of_equal_values_keeps_its_share() -> None:
    assert int(sent([Prune(ratio=0.5)], {"a": torch.ones(10)}).tensors["a"].sum()) == 5


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 24, 28])
def test_quantise_stays_within_half_a_step(bits: int, update: Named) -> None:
    for name, t in sent([Quantise(bits=bits)], update).tensors.items():
        if bits == 1:
            assert torch.equal(t.sign(), update[name].sign())
            assert len(t.abs().unique()) == 1
            continue
        step = update[name].abs().max().item() / (2 ** (bits - 1) - 1)
        rounding = 2**-23 * update[name].abs().max().item()  # float32 itself, above 23 bits
        assert (t - update[name]).abs().max().item() <= step / 2 + rounding
        assert len(t.unique()) <= 2**bits - 1


def test_quantise_of_zeros() -> None:
    for bits in (1, 8):
        assert torch.equal(sent([Quantise(bits=bits)], {"a": torch.zeros(4)}).tensors["a"], torch.zeros(4))


def test_defences_compose_in_the_order_written(update: Named) -> None:
    noise_last = sent([Prune(ratio=0.9), Gaussian(sigma=1e-3)], update).tensors["a"]
    prune_last = sent([Gaussian(sigma=1e-3), Prune(ratio=0.9)], update).tensors["a"]
    assert (noise_last == 0).float().mean() < 0.01
    assert (prune_last == 0).float().mean() == pytest.approx(0.9)


def test_bytes_on_the_wire(update: Named) -> None:
    values = sum(t.numel() for t in update.values())
    assert sent([], update).sent_bytes == 4 * values
    assert sent([Quantise(bits=8)], update).sent_bytes == values
    kept = values - int(0.9 * 60000) - int(0.9 * 5000)
    assert sent([Prune(ratio=0.9)], update).sent_bytes == (32 * kept + values) // 8
    assert sent([Prune(ratio=0.9), Quantise(bits=8)], update).sent_bytes == (8 * kept + values) // 8
    assert sent([Prune(ratio=0.9), Gaussian(sigma=1)], update).sent_bytes == 4 * values
    buffers = replace(sent([], update), buffers={"m": torch.zeros(10)})
    assert buffers.sent_bytes == 4 * values + 40


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gaussian(sigma=-1),
        lambda: Prune(ratio=1),
        lambda: Quantise(bits=0),
        lambda: Laplace(scale=1, clip=0),
        lambda: Laplace(scale=1, norm="l2"),
        lambda: Laplace(epsilon_per_update=1, clip=1, norm="l2"),
        lambda: Uniform(magnitude=-1),
    ],
)
def test_parameters_are_checked_wherever_a_defence_is_built(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValidationError):
        make()


def test_pruning_by_weight_removes_the_values_of_the_smallest_weights(update: Named) -> None:
    weights = {name: torch.arange(t.numel(), dtype=t.dtype).flip(0).view_as(t) for name, t in update.items()}
    found = sent([Prune(ratio=0.9, by="weight")], update, weights=weights).tensors
    for name, tensor in update.items():
        kept = weights[name] >= int(0.9 * tensor.numel())
        assert torch.equal(found[name], torch.where(kept, tensor, 0.0))


def test_uniform_noise_is_on_the_chosen_layers(update: Named) -> None:
    defence = Uniform(magnitude=0.2, layers=["a*"])
    out = sent([defence], update)
    assert torch.equal(out.tensors["b"], update["b"])
    noise = (out.tensors["a"] - update["a"]).flatten()
    assert stats.kstest(noise.numpy(), stats.uniform(-0.2, 0.4).cdf).pvalue > 1e-4
    exposed = defence.exposed(out)
    assert exposed is not None
    assert {name: bool(mask.all()) for name, mask in exposed.items()} == {"a": False, "b": True}
    with pytest.raises(UserError, match=r"conv9\.\*"):
        Uniform(magnitude=0.2, layers=["conv9.*"]).check(nn.Linear(2, 2))


def test_an_attacker_who_knows_of_pruning_matches_what_was_kept(update: Named) -> None:
    out = sent([Prune(ratio=0.9)], update)
    exposed = Prune(ratio=0.9).exposed(out)
    assert {name: int(mask.sum()) for name, mask in exposed.items()} == {"a": 6000, "b": 500}
