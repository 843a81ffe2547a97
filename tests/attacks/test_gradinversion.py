"""GradInversion: its terms against loops and closed forms, labels, seeds, and that it reconstructs real images."""

from __future__ import annotations

from dataclasses import replace
from math import cos, pi

import pytest
import torch
from torch import Tensor, nn

from rayfed.attacks.matching.batch_norm import batch_norm_prior
from rayfed.attacks.matching.gradinversion import GradInversion, _apart, _rates
from rayfed.attacks.matching.priors import euclidean
from rayfed.models.convnet import ConvNet
from rayfed.models.lenet import LeNet
from tests.helpers.attack_fixtures import digit, leaky_lenet, observe, photo, psnr, seeded

PHOTOS = torch.cat([photo(0, 0), photo(100, 150)])


def small_convnet(training: bool) -> nn.Module:
    """Its running statistics are those of real images."""
    torch.manual_seed(0)
    model = ConvNet(width=4).build((3, 32, 32), 10).train()
    with torch.no_grad():
        for _ in range(100):
            model(PHOTOS)
    return model.train(training)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_prior_against_hooks_one_batch_at_a_time(training: bool) -> None:
    model = small_convnet(training)
    observation = observe(model, PHOTOS, torch.tensor([1, 2]))
    images = torch.rand(3, 2, 3, 32, 32, generator=seeded(0)[0])
    prior = batch_norm_prior(model, observation)
    assert prior is not None
    for batch, value in zip(images, prior(images), strict=True):
        inputs: dict[str, Tensor] = {}
        handles = [
            module.register_forward_pre_hook(lambda _, x, name=name, inputs=inputs: inputs.__setitem__(name, x[0]))
            for name, module in model.named_modules()
            if name.startswith("bn")
        ]
        model(batch)
        for handle in handles:
            handle.remove()
        expected = sum(
            (x.mean((0, 2, 3)) - observation.buffers[f"{name}.running_mean"]).norm()
            + (x.transpose(0, 1).flatten(1).var(1, correction=0) - observation.buffers[f"{name}.running_var"]).norm()
            for name, x in inputs.items()
        )
        torch.testing.assert_close(value, expected)


def test_batch_norm_prior_prefers_what_the_statistics_come_from() -> None:
    model = small_convnet(training=False)
    prior = batch_norm_prior(model, observe(model, PHOTOS, torch.tensor([1, 2])))
    assert prior is not None
    true, noise = prior(torch.stack([PHOTOS, torch.rand(PHOTOS.shape, generator=seeded(0)[0])]))
    assert true < noise / 3


def test_the_prior_is_absent_without_batch_norm() -> None:
    model = LeNet().build((3, 32, 32), 10)
    assert batch_norm_prior(model, observe(model, PHOTOS, torch.tensor([1, 2]))) is None


def test_statistics_count_from_the_first_that_moved_whatever_was_counted() -> None:
    """Averaging leaves the counters at 0, and a batch norm may begin with any count."""
    torch.manual_seed(0)
    fresh = ConvNet(width=4).build((3, 32, 32), 10).eval()
    seen = observe(fresh, PHOTOS, torch.tensor([1, 2]))
    counted = {name: t + 7 if name.endswith("tracked") else t for name, t in seen.buffers.items()}
    assert batch_norm_prior(fresh, seen) is None
    assert batch_norm_prior(fresh, replace(seen, buffers=counted)) is None
    moved = small_convnet(training=False)
    seen = observe(moved, PHOTOS, torch.tensor([1, 2]))
    averaged = {name: t * 0 if name.endswith("tracked") else t for name, t in seen.buffers.items()}
    assert batch_norm_prior(moved, replace(seen, buffers=averaged)) is not None


def test_slope_of_the_priors_against_finite_differences() -> None:
    model = small_convnet(training=False).double()
    prior = GradInversion(tv=0.1, l2=0.1)._prior(model, observe(model, PHOTOS.double(), torch.tensor([1, 2])))
    images = torch.rand(1, 2, 3, 32, 32, dtype=torch.float64, generator=seeded(0)[0]).requires_grad_()
    [slope] = torch.autograd.grad(prior(images).sum(), images)
    for axis in ((0, 0, 0, 3, 4), (0, 1, 2, 31, 0)):
        step = torch.zeros_like(images)
        step[axis] = 1e-7
        difference = (prior(images + step) - prior(images - step)).item() / 2e-7
        assert slope[axis].item() == pytest.approx(difference, rel=1e-4)


def test_seeds_are_drawn_to_their_mean() -> None:
    images = torch.rand(6, 2, 1, 4, 4, dtype=torch.float64, generator=seeded(0)[0])  # two victims, three seeds
    slopes = _apart(images, 3)
    for victim in (slice(0, 3), slice(3, 6)):
        free = images[victim].clone().requires_grad_()
        euclidean(free - images[victim].mean(0)).mean(1).sum().backward()
        torch.testing.assert_close(slopes[victim], free.grad)
    assert _apart(images, 1).eq(0).all()


def test_a_strong_group_makes_seeds_agree() -> None:
    model = leaky_lenet((1, 8, 8))
    observation = observe(model, digit(3), torch.tensor([3]))
    alone, together = (
        GradInversion(iterations=60, seeds=2, group=group, matching=1e-6, noise=0) for group in (0.0, 10.0)
    )
    single = GradInversion(iterations=60, seeds=1, matching=1e-6, noise=0)
    found = [attack.reconstruct([observation], model, seeded(0))[0].images for attack in (alone, together, single)]
    torch.testing.assert_close(found[0], found[2], atol=0.05, rtol=0)
    assert (found[1] - found[2]).abs().mean() > 0.1


def test_step_sizes_scale_with_the_budget() -> None:
    long, short = _rates(0.1, 20_000), _rates(0.1, 200)
    assert long.index(max(long)) == 49
    assert max(short) == pytest.approx(0.1)
    assert short[100] == pytest.approx(0.1 * (1 + cos(pi / 2)) / 2)
    assert long[-1] < short[-1] < 1e-4


def test_labels_that_must_repeat_are_counted() -> None:
    model = leaky_lenet((1, 8, 8))
    images = torch.cat([digit(i) for i in range(11)])
    observation = observe(model, images, torch.arange(11) % 10, known=False)
    [found] = GradInversion(iterations=1).reconstruct([observation], model, seeded(0))
    assert found.status == "ok"
    assert len(found.labels) == 11


@pytest.mark.engine
def test_gradinversion_finds_a_digit_and_its_label() -> None:
    model = leaky_lenet((1, 8, 8))
    observation = observe(model, digit(3), torch.tensor([3]), known=False)
    (found,) = GradInversion(iterations=400).reconstruct([observation], model, seeded(0))
    assert psnr(found.images, digit(3)) > 25
    assert found.labels.tolist() == [3]
    assert found.trace[-1][1] < 0.01 * found.trace[0][1]
