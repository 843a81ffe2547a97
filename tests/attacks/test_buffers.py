"""Buffers that clients return: what solving them gives away, whatever a defence does to the update."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction
from rayfed.attacks.closed_form.buffers import Buffers
from rayfed.core.reasons import Reason
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.findings import compute_findings
from rayfed.update import LocalTraining
from tests.helpers.attack_fixtures import observe, psnr, seeded
from tests.helpers.audit_rows import row
from tests.helpers.images import digits


class Kept(nn.Module):
    """A mean of what enters it, kept as modules of users' own do it."""

    def __init__(self, shape: tuple[int, ...], how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(shape))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and self.how == "in place":
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * inputs.mean(0))
        elif self.training and self.how == "data":
            self.mean.data.lerp_(inputs.data.mean(0), 0.1)
        elif self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        return inputs - self.mean


def of_pixels(how: str) -> nn.Module:
    return nn.Sequential(Kept((1, 8, 8), how), nn.Conv2d(1, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 10))


def of_features() -> nn.Module:
    """Which are a function of the image that is not affine, but one to one."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.Tanh(), Kept((128,), "assigned"), nn.Linear(128, 10))


def of_pixels_by_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def behind_noise(model: nn.Module, images: Tensor, labels: Tensor) -> Reconstruction:
    """What is read where the update is nothing but noise, after one step in training mode."""
    model.train()
    seen = observe(model.eval(), images, labels, True)
    model.train()
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    model(images)
    returned = {n: b.detach().clone() for n, b in model.named_buffers() if b.is_floating_point()}
    noise = {name: torch.randn_like(t) for name, t in seen.update.items()}
    seen = replace(seen, buffers=buffers, returned_buffers=returned, update=noise, classes=10)
    (result,) = Buffers().reconstruct([seen], model, seeded(0))
    return result


class Code(nn.Module):
    """Keeps pixels in 16 levels, each with those before it modulo 17: from which they follow, but by no slope."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, flat: Tensor) -> Tensor:
        if self.training:
            self.seen = (15 * flat.detach()[0]).round().cumsum(0) % 17
        return flat


def test_buffers_that_hold_a_sample_and_were_not_solved_are_no_answer() -> None:
    """Behind noise that nobody sees through, what the client returns beside it is all that there is to read."""
    images, labels = digits(1, 1)
    model = nn.Sequential(nn.Flatten(), Code(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    result = behind_noise(model, images, labels)
    assert (result.status, result.reason) == ("diverged", Reason.BUFFERS_NOT_SOLVED)
    seen = model[1].seen
    read = (seen - torch.cat([torch.zeros(1), seen[:-1]])) % 17 / 15
    assert psnr(read.view_as(images), images) > 25
    rows = [row("none", 1, 30.0), row("noise", 1, 8.0, identified=0.0, knowledge=["defence", "code"])]
    told = row(
        "noise", 1, 8.0, "buffers", identified=0.0, status="diverged", message=result.message, reason=result.reason
    )
    criterion = Criterion.from_modality("pixels", None)
    for more, state in (([], "not reconstructed"), ([told], "inconclusive")):
        [found] = [one for one in compute_findings([*rows, *more], criterion, closed=["buffers"]) if one.arm == "noise"]
        assert found.state == state


@pytest.mark.parametrize("how", ["in place", "data", "assigned"])
@pytest.mark.parametrize("seed", [1, 2])
def test_an_image_is_read_off_a_running_mean_behind_any_noise(how: str, seed: int) -> None:
    images, labels = digits(1, seed)
    result = behind_noise(of_pixels(how), images, labels)
    assert result.status == "ok", result.message
    assert psnr(result.images, images) > 100


@pytest.mark.parametrize("seed", [3, 4])
def test_an_image_is_read_off_the_mean_of_its_features(seed: int) -> None:
    torch.manual_seed(seed)
    images, labels = digits(1, seed)
    assert psnr(behind_noise(of_features(), images, labels).images, images) > 60


@pytest.mark.parametrize("model", [of_pixels("in place"), of_pixels_by_batch_norm()], ids=["own", "batch norm"])
def test_a_batch_gives_the_mean_image(model: nn.Module) -> None:
    images, labels = digits(3, 5)
    result = behind_noise(model, images, labels)
    assert torch.allclose(result.images.mean(0), images.mean(0), atol=1e-4)


def test_what_cannot_be_solved_is_not_applicable() -> None:
    images, labels = digits(1, 7)
    model = of_pixels("in place")
    seen = replace(observe(model.eval(), images, labels, True), classes=10)
    assert "no buffer" in Buffers().reconstruct([seen], model, seeded(0))[0].message
    several = replace(seen, local=LocalTraining(steps=3))
    assert "several local steps" in Buffers().reconstruct([several], model, seeded(0))[0].message
    small = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    result = behind_noise(small, images, labels)
    assert result.status == "not applicable"
    assert "8 values" in result.message
