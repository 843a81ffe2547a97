"""Gradient matching with the model in bfloat16: it runs, repeats itself, and finds nearly what float32 finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rayfed.attacks.matching import rounding
from rayfed.attacks.matching.distances import one_minus_cosine, squared_l2
from rayfed.attacks.matching.gradinversion import GradInversion
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.attacks.matching.problem import Matching
from rayfed.models.convnet import ConvNet
from rayfed.update import LocalTraining
from tests.helpers.attack_fixtures import digit, observe, photo, psnr, seeded, two_digits

ATTACKS = [InvertingGradients, GradInversion]


@pytest.mark.engine
@pytest.mark.parametrize("attack", ATTACKS)
def test_digits_are_found_and_found_again(attack: type[InvertingGradients | GradInversion]) -> None:
    model, observations = two_digits()
    first, again = (
        attack(iterations=200, precision="bfloat16").reconstruct(observations, model, seeded(0, 1)) for _ in range(2)
    )
    for one, other, index in zip(first, again, (3, 5), strict=True):
        assert one.images.dtype == torch.float32
        assert torch.equal(one.images, other.images)
        assert psnr(one.images, digit(index)) > 15  # random pixels: 7


@pytest.mark.parametrize("attack", ATTACKS)
def test_together_equals_alone_and_batch_norm_works(attack: type[InvertingGradients | GradInversion]) -> None:
    torch.manual_seed(0)
    model = ConvNet(width=4).build((3, 32, 32), 10).eval()
    observations = [observe(model, photo(60 * i, 0), torch.tensor([i])) for i in (0, 1)]
    options = {"signed": True} if attack is InvertingGradients else {}
    # with one weight and one kind of steps, as rounding may change which of two is chosen
    short = attack(iterations=3, precision="bfloat16", tv=1e-3, **options)
    together = short.reconstruct(observations, model, seeded(0, 1))
    (alone,) = short.reconstruct(observations[1:], model, seeded(1))
    assert alone.trace[0][1] == pytest.approx(together[1].trace[0][1], rel=0.01)  # bfloat16 has 8 bits


@pytest.mark.parametrize("local", [LocalTraining(), LocalTraining(steps=3, lr=1e-3)])
def test_slopes_point_where_those_of_float32_do(local: LocalTraining) -> None:
    """Also after steps that are far below the spacing of bfloat16 at the weights."""
    model, observations = two_digits(known=False)
    observations = [replace(observation, local=local) for observation in observations]
    points = torch.rand(2, 64 + 10, generator=seeded(0)[0])
    (value, slope), (expected, reference) = (
        Matching.of(
            observations, model, None, squared_l2, local_steps="simulated", model_dtype=dtype
        ).value_and_gradient(points, torch.arange(2))
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert value.dtype == slope.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=0.05, atol=0)
    assert (torch.cosine_similarity(slope, reference) > 0.99).all()


def test_targets_are_not_rounded() -> None:
    model, observations = two_digits()
    problem = Matching.of(observations, model, None, one_minus_cosine, model_dtype=torch.bfloat16)
    for name, target in problem.targets.items():
        assert torch.equal(target[1], observations[1].update[name])


SAME_IN_8_BITS = 54.2
"""dB at which errors are half a step of 8 bits: what is nearer is the same image, how near depends on the processor."""


@pytest.mark.engine
def test_searches_that_may_round_find_what_others_find(monkeypatch: pytest.MonkeyPatch) -> None:
    model, observations = two_digits()
    exact = InvertingGradients(iterations=200, precision="float32").reconstruct(observations, model, seeded(0, 1))
    monkeypatch.setattr(rounding, "_is_fast", lambda problem: True)
    calls = []
    monkeypatch.setattr(
        rounding, "_in_bfloat16", lambda problem, make=rounding._in_bfloat16: calls.append(make(problem)) or calls[-1]
    )
    found = InvertingGradients(iterations=200).reconstruct(observations, model, seeded(0, 1))
    assert {problem.model_dtype for problem in calls} == {torch.bfloat16}
    for one, reference, index in zip(found, exact, (3, 5), strict=True):
        assert one.images.dtype == torch.float32
        assert psnr(one.images, digit(index)) > min(psnr(reference.images, digit(index)), SAME_IN_8_BITS) - 3


def test_nothing_is_rounded_where_slopes_would_be_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cancelling(torch.nn.Module):
        """What its offset leaves of the inputs in float32 is gone in bfloat16."""

        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(((x.flatten(1) + 4096) - 4096).square())

    torch.manual_seed(0)
    model = Cancelling()
    seen = observe(model, digit(3), torch.tensor([3]))
    problem = Matching.of([seen], model, None, one_minus_cosine)
    monkeypatch.setattr(rounding, "_is_fast", lambda problem: True)
    points = torch.rand(1, 64, generator=seeded(0)[0])
    assert rounding.rounded(problem, points, torch.zeros(1, dtype=torch.long)) is problem


def test_simulated_steps_and_small_models_keep_float32() -> None:
    model, observations = two_digits()
    many = [replace(seen, local=LocalTraining(steps=3, lr=1e-3)) for seen in observations]
    points, victims = torch.rand(2, 64, generator=seeded(0)[0]), torch.arange(2)
    for problem in (
        Matching.of(observations, model, None, squared_l2),
        Matching.of(many, model, None, squared_l2, local_steps="simulated"),
    ):
        assert rounding.rounded(problem, points, victims) is problem
