"""GradViT: its terms against loops, patches found by trying, changes of places, and what they are worth."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.patches import TinyVit
from rayfed.attacks.base import NotApplicable
from rayfed.attacks.closed_form.probe import probe
from rayfed.attacks.matching.distances import squared_l2
from rayfed.attacks.matching.gradvit import GradVit, Patches, _moved, patches_of, relative_distance
from rayfed.attacks.matching.problem import Matching
from rayfed.models.convnet import ConvNet
from rayfed.models.lenet import LeNet
from rayfed.models.mlp import Mlp
from rayfed.update import Observation
from tests.helpers.attack_fixtures import digit, images_of, observe, photo, psnr, seeded


def tiny(*shape: int, patch: tuple[int, int] = (4, 4), by_hand: bool = False) -> nn.Module:
    torch.manual_seed(0)
    channels, height, width = shape
    return TinyVit((channels, height, width), patch, by_hand)


def digits(model: nn.Module, *indices: int, known: bool = True) -> Observation:
    images = torch.cat([digit(i) for i in indices])
    return observe(model, images, torch.tensor([i % 10 for i in indices]), known)


@pytest.mark.parametrize(("height", "width"), [(8, 12), (9, 14), (4, 12)])
def test_borders_against_a_loop(height: int, width: int) -> None:
    images = torch.rand(2, 3, height, width, generator=seeded(0)[0])
    for image, found in zip(images, Patches(4, 3).borders(images), strict=True):
        down = [(image[:, y] - image[:, y - 1]).abs() for y in range(4, height, 4)]
        across = [(image[:, :, x] - image[:, :, x - 1]).abs() for x in range(3, width, 3)]
        expected = sum(float(torch.stack(of).mean()) for of in (down, across) if of)
        assert float(found) == pytest.approx(expected)


def test_what_changes_inside_patches_alone_costs_nothing_at_borders() -> None:
    inside = torch.zeros(1, 1, 8, 8)
    inside[:, :, 1::4, 2::4] = 1
    assert float(Patches(4, 4).borders(inside)) == 0
    assert float(Patches(2, 2).borders(inside)) > 0


def test_each_parameter_counts_alike_and_one_without_a_gradient_hardly() -> None:
    draw = seeded(0)[0]
    targets = {"large": 1e2 * torch.randn(2, 3, 4, generator=draw), "small": torch.randn(2, 5, generator=draw)}
    found = {name: 1.5 * target for name, target in targets.items()}
    torch.testing.assert_close(relative_distance(found, targets), torch.full((2,), 0.5))
    dead, noise = targets | {"dead": torch.zeros(2, 7)}, {"dead": torch.full((2, 7), 1e-6)}
    assert relative_distance(targets | noise, dead).max() < 1e-5
    torch.testing.assert_close(relative_distance(found | noise, dead), torch.full((2,), 1 / 3), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("shape", "patch", "by_hand"),
    [((1, 8, 8), (4, 4), False), ((3, 12, 12), (3, 3), True), ((3, 8, 16), (2, 4), False), ((1, 10, 9), (4, 4), False)],
)
def test_patches_are_found_whatever_cuts_them(
    shape: tuple[int, int, int], patch: tuple[int, int], by_hand: bool
) -> None:
    model = tiny(*shape, patch=patch, by_hand=by_hand)
    for count in (1, 2):
        images = torch.rand(count, *shape, generator=seeded(1)[0])
        seen = observe(model, images, torch.arange(count))
        assert patches_of(probe(model, seen), count) == patch


def test_patches_are_found_where_their_embedding_is_frozen() -> None:
    model = tiny(1, 8, 8)
    for parameter in model.embed.parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    seen = digits(model, 3)
    assert not any(name.startswith("embed") for name in seen.update)
    assert patches_of(probe(model, seen), 1) == (4, 4)


@pytest.mark.parametrize("model", [LeNet(), ConvNet(width=4), Mlp()], ids=lambda model: type(model).__name__)
def test_models_without_patches_are_not_applicable(model: LeNet | ConvNet | Mlp) -> None:
    torch.manual_seed(0)
    network = model.build((3, 32, 32), 10).eval()
    seen = observe(network, photo(0, 0), torch.tensor([1]))
    with pytest.raises(NotApplicable, match="does not cut images into patches"):
        patches_of(probe(network, seen), 1)
    [found] = GradVit(iterations=4).reconstruct([seen], network, seeded(0))
    assert (found.status, found.inherent) == ("not applicable", True)
    assert "patches" in found.message


def test_convolutions_that_touch_but_see_one_pixel_twice_cut_nothing() -> None:
    overlapping = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.Flatten(), nn.Linear(36, 10))
    tiled = nn.Sequential(nn.Conv2d(1, 4, 2, stride=2), nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(NotApplicable):
        patches_of(probe(overlapping, digits(overlapping, 3)), 1)
    assert patches_of(probe(tiled, digits(tiled, 3)), 1) == (2, 2)


@pytest.mark.parametrize("indices", [(3,), (3, 5)])
def test_places_that_were_changed_are_changed_back(indices: tuple[int, ...]) -> None:
    """From the truth with two patches in each other's places, of two images where there are two, the truth again."""
    model = tiny(1, 8, 8)
    seen = digits(model, *indices)
    problem = Matching.of([seen], model, None, squared_l2)
    truth = torch.cat([digit(i) for i in indices])
    mixed = truth.clone()
    mixed[0, :, :4, :4], mixed[-1, :, 4:, :4] = truth[-1, :, 4:, :4], truth[0, :, :4, :4]
    victims = torch.zeros(1, dtype=torch.int64)
    found = _moved(problem, mixed.reshape(1, -1), victims, Patches(4, 4), 60, seeded(0))
    assert torch.equal(problem.images(found)[0], truth)
    assert not torch.equal(mixed, truth)


def test_a_result_depends_on_its_own_generator_alone() -> None:
    model = tiny(1, 8, 8)
    observations = [digits(model, i, known=False) for i in (3, 5)]
    attack = GradVit(iterations=12, restarts=2)
    together = attack.reconstruct(observations, model, seeded(7, 8))
    (alone,) = attack.reconstruct(observations[1:], model, seeded(8))
    (other,) = attack.reconstruct(observations[1:], model, seeded(9))
    assert alone.trace[-1][1] == pytest.approx(together[1].trace[-1][1], abs=1e-4)
    assert other.loss != alone.loss
    assert [int(found.labels) for found in together] == [3, 5]
    assert [iteration for iteration, _ in together[0].snapshots] == [0, 10, 12]
    assert torch.equal(together[0].snapshots[-1][1], together[0].images)


def test_batches_of_several_come_back_in_their_shape() -> None:
    model = tiny(1, 8, 8)
    [found] = GradVit(iterations=8).reconstruct([digits(model, 1, 2, 3)], model, seeded(0))
    assert (found.status, found.iterations) == ("ok", 8)
    assert found.images.shape == (3, 1, 8, 8)
    assert 0 <= found.images.min() <= found.images.max() <= 1


@pytest.mark.slow
@pytest.mark.engine
def test_digits_are_found_in_their_places_where_other_searches_confuse_these() -> None:
    """Eight digits of four patches, 400 evaluations of the objective for every attack: `benchmarks/patches.py`."""
    model, (images, labels) = tiny(1, 8, 8), images_of("digits", 8, 8)
    observations = [observe(model, images[i : i + 1], labels[i : i + 1]) for i in range(8)]

    def mean(attack: GradVit) -> float:
        found = attack.reconstruct(observations, model, seeded(*range(8)))
        return sum(psnr(one.images[0], image) for one, image in zip(found, images, strict=True)) / 8

    whole = mean(GradVit(iterations=300))
    assert whole > 60
    assert whole > mean(GradVit(iterations=400, moves=False, borders=0)) + 30
