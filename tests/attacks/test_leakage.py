"""What attacks find behind real images' updates, sent through the real chain of defences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rayfed.attacks.matching.dlg import Dlg
from rayfed.attacks.matching.idlg import Idlg
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.attacks.matching.problem import Matching
from rayfed.defences.gaussian import Gaussian
from rayfed.defences.prune import Prune
from rayfed.metrics.images import psnr
from rayfed.models.build import build_model
from tests.helpers.attack_fixtures import LENET, generators, images_of, observed


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attack"), [("digits", Dlg()), ("digits", Idlg()), ("photos", Idlg())])
def test_dlg_and_idlg_rebuild_single_images(name: str, attack: Dlg | Idlg) -> None:
    """DLG on a photograph takes half a minute for each: one is in `test_attacks`."""
    images, labels = images_of(name, 4, skip=3)
    seen = [observed(build_model(*LENET, tuple(images.shape[1:]), 10, seed=1), images[i : i + 1], labels[i : i + 1])
            for i in range(4)]  # fmt: skip
    found = attack.reconstruct(seen, build_model(*LENET, tuple(images.shape[1:]), 10, seed=0), generators(4))
    quality = psnr(images, torch.cat([f.images for f in found]))
    assert (quality > 40).sum() >= 3, quality
    assert [int(f.labels) for f in found] == labels.tolist()


@pytest.mark.engine
def test_noise_takes_dlg_down_and_pruning_does_not() -> None:
    images, labels = images_of("digits", 1, size=16, skip=5)
    model = build_model(*LENET, (1, 16, 16), 10, seed=2)
    quality = {}
    for name, stack in {"none": [], "gaussian": [Gaussian(sigma=0.1)], "prune": [Prune(ratio=0.9)]}.items():
        [found] = Dlg(restarts=1 if stack else 3).reconstruct(
            [observed(model, images, labels, stack)], model, generators(1)
        )
        quality[name] = psnr(images, found.images).item()
    assert quality["none"] > 40
    assert quality["gaussian"] < 12
    assert quality["prune"] > 30  # what is pruned away shows itself


@pytest.mark.slow
def test_inverting_gradients_on_an_untrained_convnet() -> None:
    """Three photographs' patches, known labels; Geiping 2020's setting at a small budget."""
    images, labels = images_of("photos", 3)
    model = build_model("convnet", {"width": 16}, (3, 32, 32), 10, seed=4).eval()
    seen = [replace(observed(model, images[i : i + 1], labels[i : i + 1]), labels=labels[i : i + 1]) for i in range(3)]
    found = InvertingGradients(iterations=400).reconstruct(seen, model, generators(3))
    assert psnr(images, torch.cat([f.images for f in found])).mean() > 18


@pytest.mark.engine
def test_steps_without_the_sign_come_far_nearer_on_a_smooth_network() -> None:
    """The attacker's own objective, not the truth, chooses between both kinds of steps."""
    images, labels = images_of("digits", 2, size=16, skip=3)
    model = build_model(*LENET, (1, 16, 16), 10, seed=0).eval()
    seen = [replace(observed(model, images[i : i + 1], labels[i : i + 1]), labels=labels[i : i + 1]) for i in range(2)]
    quality, loss = {}, {}
    for signed in (True, False, None):
        found = InvertingGradients(iterations=200, signed=signed).reconstruct(seen, model, generators(2))
        quality[signed] = psnr(images, torch.cat([f.images for f in found]))
        loss[signed] = [f.loss for f in found]
        assert all(f.iterations in (50, 200) for f in found)
    assert quality[False].mean() > quality[True].mean() + 6
    assert quality[None].mean() > quality[True].mean() + 6
    assert all(of_both <= fixed for of_both, fixed in zip(loss[None], loss[True], strict=True))


def test_the_search_goes_on_with_the_steps_of_the_smaller_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each victim by itself, and also where the weight of the variation is given."""
    images, labels = images_of("digits", 2, size=8, skip=3)
    model = build_model(*LENET, (1, 8, 8), 10, seed=0).eval()
    seen = [replace(observed(model, images[i : i + 1], labels[i : i + 1]), labels=labels[i : i + 1]) for i in range(2)]
    calls: list[tuple[int, bool, list[int], list[float]]] = []
    search = InvertingGradients._ends

    def noted(
        self: InvertingGradients, problem: Any, judge: Any, start: Any, victims: Any, steps: int, signed: bool
    ) -> Any:
        found, points = search(self, problem, judge, start, victims, steps, signed)
        calls.append((steps, signed, victims.tolist(), [one.loss for one in found]))
        return found, points

    monkeypatch.setattr(InvertingGradients, "_ends", noted)
    InvertingGradients(iterations=40, tv=1e-3).reconstruct(seen, model, generators(2))
    trials, wholes = calls[:2], calls[2:]
    assert [(steps, signed) for steps, signed, _, _ in trials] == [(10, True), (10, False)]
    smaller = [32 * trials[0][3][v] <= trials[1][3][v] for v in range(2)]
    went_on = {victim: signed for steps, signed, victims, _ in wholes for victim in victims}
    assert {steps for steps, *_ in wholes} == {40}
    assert went_on == dict(enumerate(smaller))
    calls.clear()
    for signed in (True, False):
        InvertingGradients(iterations=40, tv=1e-3, signed=signed).reconstruct(seen, model, generators(2))
    assert [(steps, signed) for steps, signed, *_ in calls] == [(40, True), (40, False)]  # no trials


@pytest.mark.parametrize("weight", [0.0, 1e-3])
def test_steps_on_the_sign_do_not_depend_on_the_size_of_the_slope(
    weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = images_of("digits", 1, size=8, skip=3)
    model = build_model(*LENET, (1, 8, 8), 10, seed=0).eval()
    seen = [replace(observed(model, images, labels), labels=labels)]
    attack = InvertingGradients(iterations=12, tv=weight, signed=True)
    [plain] = attack.reconstruct(seen, model, generators(1))
    exact = Matching.value_and_gradient

    def larger(self: Matching, points: Any, victims: Any) -> Any:
        values, slopes = exact(self, points, victims)
        return values, 1024 * slopes

    monkeypatch.setattr(Matching, "value_and_gradient", larger)
    [scaled] = attack.reconstruct(seen, model, generators(1))
    assert torch.equal(plain.images, scaled.images)
