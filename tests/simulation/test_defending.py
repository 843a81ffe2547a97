"""Defences in a loop of the user's own: those of a run, with an account of the loop that was told."""

from __future__ import annotations

import pickle
from math import erf, exp, sqrt
from typing import Any

import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.nn import functional as F

import rayfed
from rayfed.errors import UserError
from rayfed.update import Named
from tests.helpers.loop_fixtures import DP_SGD, GAUSSIAN, LOOP


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def state(model: nn.Module) -> Named:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def data(count: int = 4) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return torch.rand(count, 1, 2, 3, generator=drawn), torch.randint(3, (count,), generator=drawn)


def test_the_epsilon_of_gaussian_answers_is_that_of_the_closed_form_rounded_up() -> None:
    """Ten answers with noise of 4 times the sensitivity are one with mu = sqrt(10) / 4 (Balle and Wang 2018)."""
    mu = sqrt(10) / 4

    def normal(x: float) -> float:
        return (1 + erf(x / sqrt(2))) / 2

    def excess(epsilon: float) -> float:
        return normal(mu / 2 - epsilon / mu) - exp(epsilon) * normal(-mu / 2 - epsilon / mu) - 1e-5

    exact = brentq(excess, 0.1, 20)
    [account] = rayfed.defend([GAUSSIAN], net(), rounds=10).account
    assert account.found is not None
    assert exact <= account.found.epsilon <= exact * 1.01
    assert float(str(account).partition("epsilon ")[2].partition(" ")[0]) >= exact


@pytest.mark.engine
def test_an_account_is_of_steps_rounds_and_draws_as_they_were_told() -> None:
    def epsilon(**changes: Any) -> float:
        [account] = rayfed.defend([DP_SGD], net(), **(LOOP | changes)).account
        assert account.found is not None
        return account.found.epsilon

    assert epsilon(poisson=True) < epsilon()
    assert epsilon(poisson=True) < epsilon(poisson=True, rounds=6)
    assert epsilon(poisson=True) < epsilon(poisson=True, steps=20)
    assert epsilon() == epsilon(steps=5), "a sample is once in an epoch of ten steps, and as often in half of one"
    assert epsilon() < epsilon(steps=20)


def test_what_has_no_guarantee_has_no_epsilon() -> None:
    for told in (["prune", {"ratio": 0.5}], ["gaussian", {"sigma": 8.0}]):
        guard = rayfed.defend([{"name": told[0], **told[1]}], net(), rounds=1)  # type: ignore[dict-item]
        assert not guard.guaranteed
        assert "no epsilon" in str(guard)
        assert "epsilon holds" not in str(guard)
    broken = rayfed.defend([DP_SGD, {"name": "soteria", "ratio": 0.5}], net(), **LOOP)
    assert not broken.guaranteed
    assert "no epsilon: soteria" in str(broken)
    assert "covers only the model" in str(rayfed.defend([GAUSSIAN], net(), rounds=1))
    assert "not to protect" in str(rayfed.defend([GAUSSIAN], net(), rounds=1, seed=0))


@pytest.mark.engine
def test_an_answer_is_clipped_and_noised_and_what_is_no_parameter_stays() -> None:
    model = nn.Sequential(net(), nn.BatchNorm1d(3)).eval()
    sent = state(model)
    returned = {name: t + 10 if t.is_floating_point() and "running" not in name else t for name, t in sent.items()}
    quiet = rayfed.defend([{"name": "gaussian", "clip": 1.0, "sigma": 0.0}], model, rounds=1)
    answer = quiet.answer(sent, returned)
    parameters = [name for name, _ in model.named_parameters()]
    moved = torch.cat([(sent[name] - answer[name]).flatten() for name in parameters])
    assert moved.norm() == pytest.approx(1.0, abs=1e-5)
    assert not quiet.guaranteed
    assert "adds no noise" in str(quiet)
    assert torch.all(moved < 0)
    assert all(torch.equal(answer[name], returned[name]) for name in answer if name not in parameters)
    noisy = rayfed.defend([{"name": "gaussian", "clip": 1.0, "sigma": 3.0}], net(), rounds=400)
    same = state(net())
    noise = torch.cat([(noisy.answer(same, same)[n] - t).flatten() for _ in range(100) for n, t in same.items()])
    assert noise.std() == pytest.approx(3.0, rel=0.05)


def test_noise_is_fresh_in_every_answer_and_every_copy_and_repeats_with_a_seed_alone() -> None:
    same = state(net())

    def first(guard: Any) -> Tensor:
        found: Tensor = guard.answer(same, same)["1.weight"]
        return found

    guard = rayfed.defend([GAUSSIAN], net(), rounds=9)
    copies = [pickle.loads(pickle.dumps(guard)) for _ in range(2)]
    drawn = [first(guard), first(guard), *map(first, copies)]
    assert len({tuple(one.flatten().tolist()) for one in drawn}) == 4
    seeded = [rayfed.defend([GAUSSIAN], net(), rounds=9, seed=5) for _ in range(2)]
    assert torch.equal(*map(first, seeded))
    assert not torch.equal(first(seeded[0]), first(rayfed.defend([GAUSSIAN], net(), rounds=9, seed=5)))
    assert not torch.equal(*(seeded[1].answer(same, same, 3, client)["1.weight"] for client in (0, 1)))


def test_backward_sets_the_gradient_of_dp_sgd() -> None:
    """Without noise: the mean of per-sample gradients, each clipped over all layers, by plain autograd."""
    model, (x, y) = net(), data()
    guard = rayfed.defend([{**DP_SGD, "noise_multiplier": 0.0}], model, **LOOP)
    loss = guard.backward(model, x, y)
    assert loss == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)
    wanted = [torch.zeros_like(p) for p in model.parameters()]
    for image, label in zip(x, y, strict=True):
        each = torch.autograd.grad(F.cross_entropy(model(image[None]), label[None]), list(model.parameters()))
        factor = min(1.0, 0.5 / float(torch.cat([g.flatten() for g in each]).norm()))
        wanted = [sum_ + factor * g / 4 for sum_, g in zip(wanted, each, strict=True)]
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)


def test_a_loop_with_dp_sgd_and_compression_trains_and_answers() -> None:
    model, (x, y) = net(), data(40)
    guard = rayfed.defend([DP_SGD, {"name": "top_k", "k": 20}], model, **LOOP)
    assert guard.guaranteed, "compression looks at nothing but what was noised"
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(LOOP["rounds"]):
        sent = state(model)
        for rows in torch.randperm(40).split(4):
            guard.backward(model, x[rows], y[rows])
            optimiser.step()
        answer = guard.answer(sent, model.state_dict())
        assert sum(int((answer[n] != sent[n]).sum()) for n in sent) == 20
        model.load_state_dict(answer)
    guard.backward(model, x[:4], y[:4])
    with pytest.raises(UserError, match="update 4, but the account covers 3"):
        guard.answer(sent, sent)


def test_more_than_was_told_is_refused() -> None:
    model, (x, y) = net(), data()
    guard = rayfed.defend([DP_SGD], model, **(LOOP | {"steps": 1}))
    with pytest.raises(UserError, match="backward"):
        guard.answer(state(model), state(model))
    guard.backward(model, x, y)
    with pytest.raises(UserError, match="step 2 of a round, but the account covers 1"):
        guard.backward(model, x, y)
    with pytest.raises(UserError, match="a batch of 5 samples"):
        rayfed.defend([DP_SGD], model, **LOOP).backward(model, *data(5))
    normed = nn.Sequential(net(), nn.BatchNorm1d(3))
    sent = state(normed)
    normed(x)
    with pytest.raises(UserError, match="statistics"):
        rayfed.defend([GAUSSIAN], normed, rounds=1).answer(sent, normed.state_dict())


@pytest.mark.parametrize(
    ("defences", "loop", "said"),
    [
        (["instahide"], {"rounds": 1}, "changes the data"),
        ([{"name": "precode"}], {"rounds": 1}, "changes the model"),
        ([{"name": "dp_fedavg", "noise_multiplier": 1.0}], {"rounds": 1}, "dp_fedavg needs the server"),
        ([DP_SGD], {"rounds": 1}, "`samples`"),
        ([GAUSSIAN], {"rounds": 0}, "rounds: found 0"),
        ([DP_SGD], LOOP | {"batch_size": 41}, "batch_size: found 41"),
        ([{"name": "gaussian", "sigmma": 1.0}], {"rounds": 1}, "sigmma"),
        (["gausian"], {"rounds": 1}, "gaussian"),
        (["prune"], {"rounds": 1}, "^defence prune: ratio: required, but not given: share of the values"),
    ],
)
def test_what_a_loop_cannot_have_is_refused(defences: list[Any], loop: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        rayfed.defend(defences, net(), **loop)


def test_rounds_are_counted_whatever_number_the_server_gives_them() -> None:
    same = state(net())
    guard = rayfed.defend([GAUSSIAN], net(), rounds=1)
    guard.answer(same, same, round=0)
    guard.answer(same, same, round=0, client=1)
    for named in (0, -1):
        with pytest.raises(UserError, match="update 2, but the account covers 1"):
            guard.answer(same, same, round=named)


def test_a_named_round_does_not_spare_the_gradients() -> None:
    same = state(net())
    with pytest.raises(UserError, match="backward"):
        rayfed.defend([DP_SGD], net(), **LOOP).answer(same, same, round=0)


def test_a_tied_weight_is_defended_under_both_of_its_names() -> None:
    model = nn.ModuleDict({"one": nn.Linear(6, 6, bias=False), "two": nn.Linear(6, 6, bias=False)})
    model["two"].weight = model["one"].weight
    sent = state(model)
    answer = rayfed.defend([GAUSSIAN], model, rounds=1).answer(sent, {name: t + 1 for name, t in sent.items()})
    assert torch.equal(answer["one.weight"], answer["two.weight"])
    assert not torch.equal(answer["two.weight"], sent["two.weight"] + 1)


def test_counts_in_a_buffer_are_not_sent_beside_an_epsilon() -> None:
    model = net()
    model.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
    sent = state(model)
    with pytest.raises(UserError, match="'seen' has changed"):
        rayfed.defend([GAUSSIAN], model, rounds=1).answer(sent, {**sent, "seen": torch.tensor([17, 3, 20])})
