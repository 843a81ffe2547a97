"""The attacker who fits a private part with the images: its objective, its gradient, what it finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.optimize import approx_fprime
from torch import Tensor, nn

from rayfed.attacks.adaptive.unlock import Unlock, _keys
from rayfed.attacks.matching.dlg import Dlg
from rayfed.attacks.matching.problem import Matching
from rayfed.errors import UserError
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.models.key_lock import lock_norms
from rayfed.models.lenet import LeNet
from rayfed.models.private import freeze, only, private_names, without
from rayfed.samples import Pixels
from rayfed.update import LocalTraining, Named, Observation
from tests.helpers.attack_fixtures import digit, observe, psnr, seeded, two_digits

LENGTH = 3


def locked(seed: int = 0) -> nn.Module:
    """A sigmoid LeNet for 8x8 digits with a lock behind its first convolution."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LeNet(activation="sigmoid", init="uniform", norm="batch").build((1, 8, 8), 10)
        return lock_norms(model, (0,), LENGTH, None).eval()


def drawn(seed: int) -> Named:
    """The private part of somebody."""
    model = locked(seed)
    return only(weights_of(model) | buffers_of(model), private_names(model))


def observed(index: int, supposed: Named, own: Named, known: bool = True) -> tuple[nn.Module, Observation]:
    """The model as an attacker has it, and the public gradient of a digit at a client with the private part `own`."""
    model = locked()
    hidden = private_names(model)
    public, rest = without(weights_of(model), hidden), without(buffers_of(model), hidden)
    freeze(model, hidden)
    labels = torch.tensor([index])
    update, _ = gradient(model, public, rest | own, digit(index), labels)
    seen = Observation(0, 0, public, rest | supposed, update, 1.0, 1, Pixels(1, 8, 8), 10, labels if known else None)
    return model, seen


def problem_of(model: nn.Module, seen: list[Observation]) -> Matching:
    return Unlock()._matching(seen, model)


def test_the_objective_is_that_of_the_private_part_at_a_point() -> None:
    own, supposed = drawn(1), drawn(2)
    model, seen = observed(3, supposed, own)
    problem = problem_of(model, [seen])
    assert problem.sought.keys() == private_names(model)
    away = [(own[name] - t).double() / t.double().std(correction=0) for name, t in problem.sought.items()]
    truth = torch.cat([digit(3).double().flatten(), *(t.flatten() for t in away)])
    guess = torch.cat([truth[: problem.shown], torch.zeros(problem.dimension - problem.shown)])
    values = problem.values(torch.stack([truth, guess]), torch.tensor([0, 0]))
    other, _ = gradient(model, seen.weights, seen.buffers, digit(3), torch.tensor([3]))
    assert values[0] < 1e-10 * problem.target_norms()[0]
    missed = sum(float((other[name] - seen.update[name]).square().sum()) for name in other)
    assert values[1].item() == pytest.approx(missed, rel=1e-4)


@pytest.mark.engine
@pytest.mark.parametrize("local", [LocalTraining(), LocalTraining(steps=2, lr=0.1)])
def test_the_slope_agrees_with_finite_differences(local: LocalTraining) -> None:
    model, seen = observed(3, drawn(2), drawn(1), known=False)
    attack = Unlock(local_steps="simulated" if local.steps > 1 else "divided")
    problem = attack._matching([replace(seen, local=local)], model)
    point = torch.rand(1, problem.dimension, generator=seeded(0)[0], dtype=torch.float64)
    victim = torch.tensor([0])
    _, slope = problem.value_and_gradient(point, victim)

    def value(x: Tensor) -> float:
        return float(problem.values(torch.as_tensor(x, dtype=torch.float64)[None], victim))

    expected = torch.as_tensor(approx_fprime(point[0].numpy(), value, 1e-6))
    torch.testing.assert_close(slope[0], expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_together_is_as_alone() -> None:
    supposed = drawn(5)
    model, first = observed(3, supposed, drawn(1), known=False)
    _, second = observed(5, supposed, drawn(2), known=False)
    attack = Unlock(iterations=1, restarts=1)
    together = attack.reconstruct([first, second], model, seeded(7, 8))
    (alone,) = attack.reconstruct([second], model, seeded(8))
    assert alone.trace[-1][1] == pytest.approx(together[1].trace[-1][1], abs=1e-4)
    assert together[1].images.shape == (1, 1, 8, 8)


@pytest.mark.engine
def test_it_finds_images_behind_locks_that_stop_dlg() -> None:
    """Of most victims: every start may end in a local minimum, and three starts are few."""
    digits, supposed = (1, 4, 7, 9), drawn(50)
    model, seen = locked(), [observed(index, supposed, drawn(60 + index), known=False)[1] for index in digits]
    freeze(model, private_names(model))
    blind = Dlg(iterations=3, restarts=1).reconstruct(seen, model, seeded(*digits))
    joint = Unlock(iterations=15).reconstruct(seen, model, seeded(*digits))
    assert all(psnr(result.images, digit(index)) < 14 for result, index in zip(blind, digits, strict=True))
    assert sum(psnr(result.images, digit(index)) > 40 for result, index in zip(joint, digits, strict=True)) >= 3
    assert [result.labels.item() for result in joint] == list(digits)


def test_a_lock_that_is_sent_gives_its_key_away() -> None:
    own, model = drawn(1), locked()
    key = "norm1.lock.key"
    weights, buffers = weights_of(model), buffers_of(model)
    update, _ = gradient(model, weights, buffers | {key: own[key]}, digit(3), torch.tensor([3]))
    seen = Observation(0, 0, weights, buffers, update, 1.0, 1, Pixels(1, 8, 8), 10)
    assert _keys(seen, model).keys() == {key}
    torch.testing.assert_close(_keys(seen, model)[key], own[key], rtol=1e-4, atol=1e-5)
    (result,) = Unlock(iterations=15, restarts=2).reconstruct([seen], model, seeded(0))
    assert psnr(result.images, digit(3)) > 40


def test_any_private_module_will_do() -> None:
    model = LeNet(activation="sigmoid", norm="batch").build((1, 8, 8), 10).eval()
    for front in (model.conv1, model.norm1):
        front.private = True
    hidden = private_names(model)
    freeze(model, hidden)
    seen = observe(model, digit(3), torch.tensor([3]))
    (result,) = Unlock(iterations=1, restarts=1).reconstruct([seen], model, seeded(0))
    assert result.status == "ok"
    assert problem_of(model, [seen]).sought.keys() == {"conv1.weight", "conv1.bias", "norm1.weight", "norm1.bias"}
    assert result.trace[-1][1] < result.trace[0][1]


def test_what_is_kept_is_not_sought() -> None:
    model, seen = locked(), [observed(0, drawn(50), drawn(60), known=False)[1]]
    freeze(model, private_names(model))
    sought = Unlock(kept=("*.gamma.*",))._matching(seen, model).sought
    assert sought.keys() == {name for name in Unlock()._matching(seen, model).sought if ".gamma." not in name}
    with pytest.raises(UserError, match=r"kept: .*'conv9"):
        Unlock(kept=("conv9.*",)).reconstruct(seen, model, seeded(0))


def test_patterns_of_what_is_kept_are_checked_before_the_run() -> None:
    whole = Pixels(1, 8, 8), 10
    Unlock(kept=("*.gamma.*",)).check(locked(), *whole)
    with pytest.raises(UserError, match=r"kept: .*'conv9"):
        Unlock(kept=("conv9.*",)).check(locked(), *whole)
    with pytest.raises(UserError, match="layers"):
        Unlock(layers=["conv9.*"]).check(locked(), *whole)
    Unlock(kept=("conv9.*",)).check(LeNet().build((1, 8, 8), 10), *whole)  # to an arm without one it does not apply


def test_a_model_without_a_private_part_is_not_for_it() -> None:
    model, observations = two_digits()
    for result in Unlock().reconstruct(observations, model, seeded(0, 1)):
        assert result.status == "not applicable"
        assert "nothing to unlock" in result.message
