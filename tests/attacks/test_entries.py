"""Inputs of linear layers that are looked up entry by entry, and gradients that no search can follow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayfed.attacks.base import Reconstruction
from rayfed.attacks.closed_form.entries import Entries
from rayfed.attacks.matching.idlg import Idlg
from rayfed.attacks.matching.second_derivatives import _JUMPS
from tests.helpers.attack_fixtures import digit, observe, psnr, seeded


class Behind(nn.Module):
    """A linear layer on what a map makes of an image 8x8 or a text of 6 tokens, and a head."""

    def __init__(self, encode: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.encode, self.first, self.head = encode, nn.Linear(width, 24), nn.Linear(24, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.first(self.encode(inputs).to(self.first.weight.dtype).flatten(1)).tanh())


class Levels(nn.Module):
    """A trained vector for each of 17 levels of each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.head = nn.Embedding(17 * 64, 3), nn.Linear(192, 24), nn.Linear(24, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows = (16 * images.flatten(1)).round().long() + 17 * torch.arange(64)
        return self.head(self.first(self.table(rows).flatten(1)).tanh())


class Sequence(nn.Module):
    """A recurrent layer on learnt vectors, all of whose states enter the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(1024, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(48, 10)

    def forward(self, texts: Tensor) -> Tensor:
        return self.head(self.layer(self.table(texts))[0].flatten(1))


def thermometer(images: Tensor) -> Tensor:
    return images[..., None] > (torch.arange(16) + 0.5) / 16


def waves(images: Tensor) -> Tensor:
    return torch.cat([f(2**k * 3.1 * images) for k in range(5) for f in (torch.sin, torch.cos)], 1)


def bits(texts: Tensor) -> Tensor:
    return texts[..., None] >> torch.arange(10) & 1


def number(texts: Tensor) -> Tensor:
    return texts / 1024


def read(model: nn.Module, inputs: Tensor) -> Reconstruction:
    (result,) = Entries().reconstruct([observe(model, inputs, torch.tensor([3]))], model, seeded(0))
    return result


@pytest.mark.parametrize(("encode", "width"), [(thermometer, 1024), (waves, 640)])
def test_a_pixel_is_looked_up_by_what_it_alone_is_made_into(encode: Callable[[Tensor], Tensor], width: int) -> None:
    torch.manual_seed(0)
    result = read(Behind(encode, width), digit(3))
    assert result.status == "ok"
    assert psnr(result.images, digit(3)) > 30


def test_a_pixel_is_looked_up_by_the_row_of_a_trained_table() -> None:
    torch.manual_seed(0)
    assert psnr(read(Levels(), digit(5)).images, digit(5)) > 30


@pytest.mark.parametrize("model", [lambda: Behind(bits, 60), lambda: Behind(number, 6), Sequence])
def test_tokens_are_looked_up_by_bits_by_numbers_and_behind_those_before(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    text = torch.tensor([[5, 900, 3, 3, 77, 1023]])
    assert torch.equal(read(model(), text).images, text)


def test_what_every_number_mixes_and_what_is_affine_is_not_looked_up() -> None:
    torch.manual_seed(0)
    mixing = torch.randn(64, 64)
    mixed = read(Behind(lambda images: (images.flatten(1) @ mixing).tanh(), 64), digit(3))
    assert mixed.status == "not applicable"
    assert "depends on several entries" in mixed.message
    assert read(Behind(lambda images: 2 * images - 1, 64), digit(3)).status == "not applicable"


def test_a_gradient_that_changes_by_jumps_alone_is_refused_to_searches() -> None:
    torch.manual_seed(0)
    model = Behind(thermometer, 1024)
    (result,) = Idlg(iterations=2).reconstruct([observe(model, digit(3), torch.tensor([3]))], model, seeded(0))
    assert result.status == "not applicable"
    assert _JUMPS in result.message


def test_a_gradient_that_does_not_depend_on_the_sample_is_searched() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), Behind(lambda flat: F.pad(0 * flat, (0, 0)), 64))
    (result,) = Idlg(iterations=2).reconstruct([observe(model, digit(3), torch.tensor([3]))], model, seeded(0))
    assert result.status == "ok"


def test_a_model_that_mixes_entries_is_seen_by_few_of_them() -> None:
    """Every entry costs passes: of a convolutional network they would take longer than a search."""

    class Counting(nn.Sequential):
        seen = 0

        def forward(self, inputs: Tensor) -> Tensor:
            Counting.seen += len(inputs)
            return super().forward(inputs)

    torch.manual_seed(0)
    model = Counting(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    (result,) = Entries().reconstruct([observe(model, digit(3), torch.tensor([3]))], model, seeded(0))
    assert result.status == "not applicable"
    assert "depends on several entries" in result.message
    assert Counting.seen < 200
