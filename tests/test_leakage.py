"""What attacks find behind real images' updates, sent through the real chain of defences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rayfed.attacks.dlg import Dlg
from rayfed.attacks.idlg import Idlg
from rayfed.attacks.inverting_gradients import InvertingGradients
from rayfed.defences.gaussian import Gaussian
from rayfed.defences.prune import Prune
from rayfed.metrics.images import psnr
from rayfed.models.build import build_model
from tests.attack_fixtures import LENET, generators, images_of, observed


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
