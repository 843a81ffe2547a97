"""Columns of a linear layer's gradient, and rows of which a defence leaves few as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from rayfed.attacks.closed_form.analytic import Analytic
from rayfed.attacks.closed_form.columns import Columns
from rayfed.update import Named, Observation
from tests.helpers.attack_fixtures import digit, observe, psnr, seeded

DRAW = torch.Generator().manual_seed(4)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Sigmoid(), nn.Linear(48, 10))


def behind(change: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Observation]:
    """The observation of a digit whose every tensor was changed."""
    model = network()
    seen = observe(model, digit(3), torch.tensor([3]))
    return model, replace(seen, update={name: change(tensor) for name, tensor in seen.update.items()})


def normal(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=DRAW)


def shuffled(tensor: Tensor) -> Tensor:
    """Each column's values in an order of its own."""
    return tensor.gather(0, torch.rand(tensor.shape, generator=DRAW).argsort(0))


def signs_of_columns(tensor: Tensor) -> Tensor:
    return normal(tensor).sign() * tensor.abs().mean(0)


def noise_of_columns(tensor: Tensor) -> Tensor:
    return normal(tensor) * tensor.norm(dim=0)


def turned(tensor: Tensor) -> Tensor:
    """The rows of a matrix, and not those of its bias, rotated together."""
    return torch.linalg.qr(torch.randn(len(tensor), len(tensor), generator=DRAW))[0] @ tensor


def places_of_the_largest(tensor: Tensor) -> Tensor:
    """Ones where the largest three values in ten stand, and no other."""
    return (tensor.abs() > tensor.abs().flatten().quantile(0.7)).float()


@pytest.mark.parametrize(
    ("change", "least"),
    [(shuffled, 100), (signs_of_columns, 100), (noise_of_columns, 17), (turned, 100), (places_of_the_largest, 15)],
)
def test_a_column_tells_its_pixel_by_its_sum_or_length(change: Callable[[Tensor], Tensor], least: float) -> None:
    model, seen = behind(change)
    (result,) = Columns().reconstruct([seen], model, seeded(0))
    assert result.status == "ok"
    assert psnr(result.images, digit(3)) > least


def test_values_of_one_size_need_not_be_places() -> None:
    """Of two classes and pixels of two levels every product has one size, and the bias tells its scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    image = 0.4 * (digit(3) > 0.5).float()
    (result,) = Columns().reconstruct([observe(model, image, torch.tensor([1]))], model, seeded(0))
    assert psnr(result.images, image) > 60


def test_lengths_without_a_sample_in_them_give_none() -> None:
    model, seen = behind(normal)
    (result,) = Columns().reconstruct([seen], model, seeded(0))
    assert psnr(result.images, digit(3)) < 8


def test_columns_need_one_sample_and_numbers_that_are_not_negative() -> None:
    model, seen = behind(shuffled)
    (result,) = Columns().reconstruct([replace(seen, batch_size=2)], model, seeded(0))
    assert result.status == "not applicable"
    torch.manual_seed(0)
    centred = nn.Sequential(nn.BatchNorm2d(1, affine=False).eval(), network())
    centred[0].running_mean.fill_(0.5)
    (result,) = Columns().reconstruct([observe(centred.eval(), digit(3), torch.tensor([3]))], centred, seeded(0))
    assert result.status == "not applicable"


def but_for_a_row(update: Named) -> Named:
    """Noise on all of the first layer's weights but one row."""
    noisy = {name: tensor + normal(tensor) if tensor.ndim > 1 else tensor for name, tensor in update.items()}
    noisy["1.weight"][7] = update["1.weight"][7]
    return noisy


def but_for_a_fifth(update: Named) -> Named:
    """Noise on four of five weights, and none on biases."""
    masks = {name: torch.rand(tensor.shape, generator=DRAW) > 0.2 for name, tensor in update.items()}
    return {n: t + normal(t) * masks[n] if t.ndim > 1 else t for n, t in update.items()}


@pytest.mark.parametrize("defend", [but_for_a_row, but_for_a_fifth])
def test_few_values_that_were_sent_as_they_are_are_enough(defend: Callable[[Named], Named]) -> None:
    model = network()
    seen = observe(model, digit(3), torch.tensor([3]))
    (result,) = Analytic().reconstruct([replace(seen, update=defend(seen.update))], model, seeded(0))
    assert psnr(result.images, digit(3)) > 25
