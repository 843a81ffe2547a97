"""Returned batch-norm statistics: closed forms for what they tell of a batch, and that attacks use it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from rayfed.attacks.matching.batch_norm import MovedStatistics, batch_norm_prior, returned_moments
from rayfed.attacks.matching.distances import squared_l2
from rayfed.attacks.matching.dlg import Dlg
from rayfed.attacks.matching.problem import Matching
from rayfed.defences.base import Batch, Task
from rayfed.gradients import buffers_of, weights_of
from rayfed.models.convnet import ConvNet
from rayfed.models.lenet import LeNet
from rayfed.scenario import Training
from rayfed.simulation.client.local import local_training, update_method
from rayfed.update import Observation
from tests.helpers.attack_fixtures import digit, photo, psnr, sample_of, seeded

PHOTOS = torch.cat([photo(0, 0), photo(100, 150), photo(30, 60)])
LABELS = torch.arange(3)
ONE_STEP = Training(algorithm="fedsgd")


def trained(model: nn.Module, images: Tensor, labels: Tensor, training: Training) -> Observation:
    """What a server sees of a client's real round."""
    weights, buffers = weights_of(model), buffers_of(model)
    kept = {name: buffer.clone() for name, buffer in buffers.items()}
    task = Task(0, 0, model, weights, kept, Batch(images, labels), generator=seeded(0)[0], order=1)
    update = update_method(training, [])(task)
    local = local_training(len(images), training)
    return Observation(
        victim=0,
        round=0,
        weights=weights,
        buffers=buffers,
        update=update.tensors,
        scale=local.scale,
        batch_size=len(images),
        sample=sample_of(images),
        classes=10,
        labels=labels,
        local=local,
        returned_buffers=update.buffers,
    )


def convnet(momentum: float | None = 0.1, training: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = ConvNet(width=4).build((3, 32, 32), 10).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = momentum
    with torch.no_grad():
        model(torch.rand(4, 3, 32, 32, generator=seeded(5)[0]))  # statistics of other images, one batch of them
    return model.train(training)


def entering(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """What enters each batch norm, by PyTorch's own hooks: (C, values)."""
    found: dict[str, Tensor] = {}
    norms = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    hooks = [
        m.register_forward_pre_hook(lambda _, x, n=n: found.__setitem__(n, x[0].transpose(0, 1).flatten(1)))
        for n, m in norms
    ]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
def test_one_step_tells_the_batchs_mean_and_variance(momentum: float | None) -> None:
    model = convnet(momentum)
    moments = returned_moments(model, trained(model, PHOTOS, LABELS, ONE_STEP))
    expected = entering(model, PHOTOS)
    assert moments.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(moments[name][0].float(), values.mean(1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(moments[name][1].float(), values.var(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_distance_is_nothing_at_the_truth_whatever_the_steps(momentum: float | None) -> None:
    model = convnet(momentum)
    standing = Training(algorithm="fedavg", epochs=2, batch_size=2, lr=1e-9)  # the weights stay, the statistics move
    for training in (ONE_STEP, standing):
        observation = trained(model, PHOTOS, LABELS, training)
        problem = Matching.of([observation, observation], model, None, squared_l2, dtype=torch.float64)
        assert problem.statistics is not None
        points = torch.stack([PHOTOS, torch.rand(3, 3, 32, 32, generator=seeded(0)[0])]).double()
        right, wrong = problem.statistics(points, torch.tensor([0, 1]))
        assert right < (1e-8 if training is ONE_STEP else 0.05 * wrong)  # which images met first nobody else knows
        assert wrong > 0.1


def test_its_slope_against_finite_differences() -> None:
    model = convnet()
    observation = trained(model, PHOTOS, LABELS, ONE_STEP)
    problem = Matching.of([observation], model, None, squared_l2, dtype=torch.float64)
    assert isinstance(problem.statistics, MovedStatistics)
    victims, images = torch.tensor([0]), torch.rand(1, 3, 3, 32, 32, dtype=torch.float64, generator=seeded(1)[0])
    [slope] = torch.autograd.grad(problem.statistics(images.requires_grad_(), victims).sum(), images)
    for axis in ((0, 0, 0, 3, 4), (0, 2, 2, 31, 0)):
        step = torch.zeros_like(images)
        step[axis] = 1e-6
        difference = problem.statistics(images + step, victims) - problem.statistics(images - step, victims)
        assert slope[axis].item() == pytest.approx(difference.item() / 2e-6, rel=1e-4)


def test_nothing_is_told_by_statistics_that_did_not_move_or_did_not_come() -> None:
    still = convnet(training=False)
    assert returned_moments(still, trained(still, PHOTOS, LABELS, ONE_STEP)) == {}
    model = convnet()
    observation = replace(trained(model, PHOTOS, LABELS, ONE_STEP), returned_buffers={})
    assert returned_moments(model, observation) == {}
    assert Matching.of([observation], model, None, squared_l2).statistics is None


def test_the_prior_on_what_was_sent_gives_way_to_what_came_back_and_needs_real_statistics() -> None:
    model = convnet()
    observation = trained(model, PHOTOS, LABELS, ONE_STEP)
    assert batch_norm_prior(model, observation) is None
    assert batch_norm_prior(model, replace(observation, returned_buffers={})) is not None
    fresh = ConvNet(width=4).build((3, 32, 32), 10).eval()  # 0 and 1, of no image at all
    assert batch_norm_prior(fresh, trained(fresh, PHOTOS, LABELS, ONE_STEP)) is None


@pytest.mark.engine
@pytest.mark.parametrize("batch", [1, 2])
def test_dlg_reads_a_lenet_with_batch_norm_in_training_mode(batch: int) -> None:
    torch.manual_seed(0)
    model = LeNet(activation="sigmoid", init="uniform", norm="batch").build((1, 8, 8), 10).train()
    images, labels = torch.cat([digit(3), digit(4)])[:batch], torch.tensor([3, 4])[:batch]
    seen = trained(model, images, labels, ONE_STEP)
    attack = Dlg(iterations=60, restarts=2)
    scores = []
    for observation in (replace(seen, returned_buffers={}), seen):
        [found] = attack.reconstruct([observation], model, seeded(1))
        scores.append(max(psnr(found.images, images), psnr(found.images.flip(0), images)))
    assert scores[0] < 15  # gradients alone: as the guide said
    assert scores[1] > 80
