"""Attacks on gradients of images with masks, given or not, and whole runs of segmentation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayfed import scenario as scenarios
from rayfed.attacks.base import Attack, Reconstruction
from rayfed.attacks.closed_form.analytic import Analytic
from rayfed.attacks.closed_form.april import April
from rayfed.attacks.closed_form.peel import _COUNTLESS, Peel
from rayfed.attacks.closed_form.spear import Spear
from rayfed.attacks.matching.distances import one_minus_cosine
from rayfed.attacks.matching.dlg import Dlg
from rayfed.attacks.matching.grnn import Grnn
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.attacks.matching.options import _NO_CLASSES
from rayfed.attacks.matching.problem import Matching
from rayfed.attacks.sealed import _NOT_GIVEN, attempt
from rayfed.attacks.server.imprint import Imprint
from rayfed.core.losses import PlaceCrossEntropy, attach_loss
from rayfed.metrics.masks import mask_iou
from rayfed.runs import runner
from rayfed.simulation.executors.local import local
from rayfed.simulation.progress import Progress
from rayfed.update import Observation
from tests.conftest import REPOSITORY
from tests.helpers.attack_fixtures import digit, generators, observe, psnr

CLASSES = 3


def masked(model: nn.Module, images: Tensor, known: bool = False) -> tuple[Observation, Tensor]:
    """What a server sees of images whose masks are of three classes, by their levels of grey in parts."""
    attach_loss(model, PlaceCrossEntropy())
    masks = (images.mean(1) > 0.3).long() + (torch.arange(images.shape[-1]) > 5)
    return replace(observe(model, images, masks, known), classes=CLASSES, has_places=True), masks


def small() -> nn.Module:
    """A smooth network of convolutions for grey images of 8 x 8."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.GELU(), nn.Conv2d(16, 16, 3, padding=1), nn.GELU(),
        nn.ConvTranspose2d(16, 16, 4, stride=2, padding=1), nn.GELU(), nn.Conv2d(16, CLASSES, 1),
    )  # fmt: skip


def struck(attack: Attack, model: nn.Module, *seen: Observation) -> list[Reconstruction]:
    found: Sequence[Any] = attempt(attack, seen, model, generators(len(seen)), factor=False)
    return list(found)


# ---- searches ----


@pytest.mark.engine
@pytest.mark.parametrize("known", [True, False])
def test_a_search_finds_an_image_with_its_mask_given_and_both_where_it_is_not(known: bool) -> None:
    model, image = small(), digit(3)
    seen, mask = masked(model, image, known)
    [found] = struck(Dlg(iterations=60, restarts=1), model, seen)
    assert psnr(found.images, image) > 60
    assert torch.equal(found.labels, mask)
    assert mask.unique().tolist() == [0, 1, 2]


def test_a_search_for_masks_says_so() -> None:
    model = small()
    seen, mask = masked(model, digit(3))
    [found] = struck(InvertingGradients(iterations=2), model, seen)
    assert found.labels.shape == mask.shape
    assert "soft labels were fitted" in found.message


def test_the_slope_of_the_objective_in_masks_is_that_of_differences() -> None:
    model = small().double()
    seen, _ = masked(model, digit(3).double())
    problem = Matching.of([seen], model, None, one_minus_cosine, dtype=torch.float64)
    assert problem.dimension == 64 + CLASSES * 64
    draw = torch.Generator().manual_seed(1)
    point, way = (torch.randn(1, problem.dimension, generator=draw, dtype=torch.float64) for _ in range(2))
    victims = torch.zeros(1, dtype=torch.int64)
    _, slope = problem.value_and_gradient(point, victims)
    assert slope[0, 64:].abs().min() > 0, "every pixel's class has a say"
    step = 1e-5
    ahead, behind = (problem.values(point + side * step * way, victims) for side in (1, -1))
    torch.testing.assert_close((slope * way).sum(1), (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-9)


def test_the_true_image_and_mask_have_the_observed_gradient() -> None:
    model, image = small(), digit(3)
    seen, mask = masked(model, image)
    problem = Matching.of([seen], model, None, one_minus_cosine)
    sure = 40 * nn.functional.one_hot(mask, CLASSES).movedim(-1, 1).float()
    point = torch.cat([image.flatten(), sure.flatten()])[None]
    assert float(problem.values(point, torch.zeros(1, dtype=torch.int64))) < 1e-5
    assert torch.equal(problem.hard_labels(point, torch.zeros(1, dtype=torch.int64))[0], mask)


def test_attacks_that_need_masks_say_that_they_were_not_given() -> None:
    model = small()
    seen, _ = masked(model, digit(3))
    [found] = struck(Grnn(iterations=1), model, seen)
    assert found.status == "not applicable"
    assert _NOT_GIVEN in found.message
    [average] = struck(
        InvertingGradients(iterations=1, start="class_average"), model, replace(seen, extra={"public": ()})
    )
    assert _NO_CLASSES in average.message


# ---- closed forms ----


class Whole(nn.Module):
    """A network that scores pixels by way of one vector of the whole image."""

    def __init__(self, bias: bool = True, hidden: int = 40, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, hidden, bias=bias)
        self.last = nn.Linear(hidden, CLASSES * 64)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.first(images.flatten(1)))
        return self.last(hidden).unflatten(1, (CLASSES, 8, 8))


class Patches(nn.Module):
    """Patches of 2 x 2 with learned positions, mixed, and scored pixel by pixel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(1, 24, 2, stride=2)
        self.positions = nn.Parameter(0.1 * torch.randn(1, 24, 4, 4))
        self.mixed = nn.Conv2d(24, 24, 3, padding=1)
        self.head = nn.ConvTranspose2d(24, CLASSES, 2, stride=2)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.mixed(self.embed(images) + self.positions)))
        return scores


@pytest.mark.parametrize(("attack", "make"), [(Analytic(), Whole), (April(), Patches)])
@pytest.mark.parametrize("known", [True, False])
def test_closed_forms_read_an_image_whose_mask_nobody_told(
    attack: Attack, make: Callable[[], nn.Module], known: bool
) -> None:
    model, image = make(), digit(3)
    seen, mask = masked(model, image, known)
    [found] = struck(attack, model, seen)
    assert found.status == "ok", found.message
    assert psnr(found.images, image) > 60
    assert known == (found.loss < 1e-3), "without the mask nothing can be compared"
    assert known == torch.equal(found.labels, mask)


@pytest.mark.parametrize("known", [True, False])
def test_spear_reads_a_batch_with_masks(known: bool) -> None:
    images = torch.cat([digit(3), digit(5)])
    model = Whole(hidden=60)
    seen, _ = masked(model, images, known)
    [found] = struck(Spear(), model, seen)
    assert found.status == "ok", found.message
    best = [max(psnr(one, image) for one in found.images) for image in images]
    assert min(best) > 60


def test_what_labels_would_have_to_tell_is_told() -> None:
    image = digit(3)
    seen, _ = masked(biased := Whole(), image)
    [peeled] = struck(Peel(), biased, seen)
    assert peeled.status == "not applicable"
    assert _COUNTLESS in peeled.message
    unbiased = Whole(bias=False)
    seen, mask = masked(unbiased, image)
    [scaled] = struck(Analytic(), unbiased, seen)
    assert scaled.status == "not applicable"
    assert "labels per position were not given" in scaled.message
    [given] = struck(Analytic(), unbiased, replace(seen, labels=mask))
    assert psnr(given.images, image) > 60


def test_a_malicious_server_reads_images_with_masks() -> None:
    model, images = small(), torch.cat([digit(i) for i in (3, 5)])
    attack = Imprint(brightness=(0.3, 0.05))
    attach_loss(model, PlaceCrossEntropy())
    honest, _ = masked(model, images)
    tampered, weights, buffers = attack.tamper(
        model, honest.weights, honest.buffers, (1, 8, 8), {}, torch.Generator().manual_seed(0)
    )
    tampered.load_state_dict(weights | buffers)
    seen, _ = masked(tampered, images)
    [found] = struck(attack, model, seen)
    assert min(max(psnr(one, image) for one in found.images) for image in images) > 40


# ---- whole runs ----


def test_the_share_of_a_mask_that_is_found_is_its_intersection_over_union() -> None:
    true = torch.tensor([[[0, 0], [1, 1]], [[0, 0], [0, -100]], [[-100, -100], [-100, -100]]])
    found = torch.tensor([[[0, 1], [1, 1]], [[0, 0], [0, 1]], [[0, 0], [0, 0]]])
    first, second, none = mask_iou(true, found).tolist()
    assert first == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert second == 1, "pixels without a class count nothing"
    assert none != none


@pytest.mark.engine
def test_a_run_reports_what_was_learnt_and_found_of_masks(tmp_path: Path) -> None:
    root = REPOSITORY / "scenarios" / "user_data" / "coins.parquet"
    search = {"name": "inverting_gradients", "iterations": 2, "observes": "gradient"}
    written = {
        "name": "t",
        "data": {"name": "image_masks", "root": str(root), "size": 8, "classes": ["background", "coin"]},
        "model": {"name": "unet", "width": 4, "levels": 2},
        "training": {"steps": 2, "batch_size": 8, "augment": {"crop": 1, "flip": True}},
        "federation": {"rounds": 3, "clients": 2},
        "arms": {"none": [], "dp": [{"name": "dp_sgd", "clip": 1.0, "epsilon": 8}]},
        "attacks": [
            search | {"label": "given", "knowledge": ["labels"]},
            search,
            {"name": "analytic", "observes": "gradient"},
            {"name": "grnn", "observes": "gradient"},
            {"name": "membership", "knowledge": ["candidates"]},
        ],
    }
    run = runner.launch(scenarios.check_scenario(written, "t"), str(tmp_path), local, Progress())
    rounds = {row["arm"]: row for row in run.read_table("rounds").to_pylist()}
    assert all(0 < row["test_iou"] < 1 and 0.3 < row["baseline_iou"] < 0.5 for row in rounds.values())
    rows = {(row["arm"], row["attack"]): row for row in run.read_table("attacks").to_pylist()}
    assert rows["none", "given"]["mask_iou"] == 1
    assert 0 < rows["none", "inverting_gradients"]["mask_iou"] < 1
    assert "no linear layer" in rows["none", "analytic"]["message"]
    assert _NOT_GIVEN in rows["none", "grnn"]["message"]
    assert rows["none", "grnn"]["psnr"] is rows["none", "grnn"]["mask_iou"] is None
    [told] = [row for row in run.read_table("inferences").to_pylist() if row["arm"] == "none"]
    assert 0 <= told["value"] <= 1
