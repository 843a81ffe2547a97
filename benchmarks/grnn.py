"""What GRNN rebuilds: batch 1, larger batches with success rates, terms of the objective, resolutions.

    RAYFED_DATA=PATH python -m benchmarks.grnn single batches terms resolutions [--figure success.png]

An untrained sigmoid LeNet with weights from U(-0.5, 0.5), no defence, labels not known: the setting of Ren 2022, tables
3.4, 3.6, 3.12 and figure 3.5 (non-converged model). The thesis attacks resolutions (table 3.9) on ResNet-18, this page
on the same LeNet. Images are drawn by the seed from the test splits; of digits, MNIST and CIFAR-10 behind the first
hundred, among which the attack's settings were chosen. `thesis` is the PSNR in the convention of the thesis' table 3.4
(`psnr_overflow`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.attacks.matching.grnn import Grnn
from rayfed.core import seeds
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.metrics.score import Scorer
from rayfed.models.build import build_model
from rayfed.registry import build
from rayfed.samples import Pixels
from rayfed.update import Observation

DATA = Path(os.environ.get("RAYFED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
TUNED_ON = {"digits": 100, "mnist": 100, "cifar10": 100}
CLASSES = 10
SCORER = Scorer(("mse", "psnr", "ssim", "label_accuracy", "psnr_overflow"))
SSIM_SUCCESS = 0.5
TERMS: dict[str, dict[str, float]] = {
    "MSE": {"mse": 1, "wd": 0, "tv": 0},
    "WD": {"mse": 0, "wd": 1, "tv": 0},
    "CD": {"mse": 0, "wd": 0, "cd": 1, "tv": 0},
    "MSE + WD": {"mse": 1, "wd": 1, "tv": 0},
    "MSE + CD": {"mse": 1, "wd": 0, "cd": 1, "tv": 0},
    "MSE + CD + TV": {"mse": 1, "wd": 0, "cd": 1},
    "MSE + WD + TV": {},
}
"""Objectives by weights. MSE is a sum over the entries of the gradient and WD their mean, so that those with WD are
played a second time with a sum of it."""
THRESHOLDS = {"mse": (0.001, 0.003, 0.01, 0.03, 0.1), "psnr": (10, 15, 20, 25, 30), "ssim": (0.1, 0.3, 0.5, 0.7, 0.9)}

Rows = list[dict[str, Any]]


@cache
def test_split(name: str, size: int | None) -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W) in [0, 1] and labels of a data set's test split.

    Class indices modulo ten: with a head of 1,000 classes the resolution would not be all that differs.
    """
    component, parameters = {
        "digits": ("digits", {}),
        "mnist": ("mnist", {"root": str(DATA / "mnist")}),
        "cifar10": ("parquet", parquet("cifar10/lossless-train", "cifar10/lossless-test")),
        "tiny_imagenet": ("parquet", parquet("tiny-imagenet/train", "tiny-imagenet/val")),
        "imagenet": ("parquet", parquet("imagenet-sample/sample-224")),
    }[name]
    dataset = build("datasets", component, {**parameters, "size": size}).load()
    return torch.from_numpy(dataset.test_images).float() / 255, torch.from_numpy(dataset.test_labels) % CLASSES


def parquet(train: str, test: str | None = None) -> dict[str, str]:
    """The parameters of a data set in files of these names; without `test` a fifth is held out."""
    files = {"train": train} if test is None else {"train": train, "test": test}
    return {split: str(DATA / f"{name}.parquet") for split, name in files.items()}


def attacked(attack: Grnn, name: str, victims: int, batch: int, seed: int, size: int | None = None) -> Rows:
    """The scores of all images of some victims, each row with the seconds that one image took."""
    images, labels = test_split(name, size)
    shape = (images.shape[1], images.shape[2], images.shape[3])
    drawing = seeds.torch_generator(seed, "images", name, batch)
    first = TUNED_ON.get(name, 0)
    chosen = first + torch.randperm(len(labels) - first, generator=drawing)[: victims * batch]
    parts = [(images[rows], labels[rows]) for rows in chosen.split(batch)]
    model = build_model("lenet", {"activation": "sigmoid", "init": "uniform"}, shape, CLASSES, seed)
    observations = [observed(model, *part) for part in parts]
    generators = [seeds.torch_generator(seed, "attack", name, batch, victim) for victim in range(victims)]
    rows: Rows = []
    for part, found in zip(parts, attack.reconstruct(observations, model, generators), strict=True):
        scored = SCORER.score(*part, found.images, found.labels)
        rows += [{**row, "seconds": found.seconds / batch} for row in scored]
    return rows


def observed(model: nn.Module, images: Tensor, labels: Tensor) -> Observation:
    """What a server sees of a client that sends the gradient of one batch."""
    weights, buffers = weights_of(model), buffers_of(model)
    update, _ = gradient(model, weights, buffers, images, labels)
    shape = (images.shape[1], images.shape[2], images.shape[3])
    return Observation(0, 0, weights, buffers, update, 1.0, len(labels), Pixels(*shape), CLASSES)


def head(first: str) -> None:
    """Open a table whose lines `line` prints."""
    print(f"\n| {first} | images | PSNR mean (min) | thesis | SSIM | SSIM >= {SSIM_SUCCESS} | labels | s an image |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")


def line(first: str, rows: Rows) -> None:
    """Print the means of some rows."""
    psnr = [row["psnr"] for row in rows]
    names = ("psnr_overflow", "ssim", "label_accuracy", "seconds")
    thesis, ssim, labels, seconds = (mean(row[name] for row in rows) for name in names)
    print(
        f"| {first} | {len(rows)} | {mean(psnr):.1f} dB ({min(psnr):.1f}) | {thesis:.1f} | {ssim:.2f} "
        f"| {passed(rows, 'ssim', SSIM_SUCCESS):.0%} | {labels:.1%} | {seconds:.1f} |",
        flush=True,
    )


def passed(rows: Rows, metric: str, threshold: float) -> float:
    """The share of images that are at least as good as the threshold."""
    sign = -1 if metric == "mse" else 1
    return mean(sign * row[metric] >= sign * threshold for row in rows)


def single(seed: int) -> None:
    head("batch 1")
    for name in ("mnist", "digits", "cifar10"):
        line(name, attacked(Grnn(), name, 5, 1, seed))


def batches(seed: int, figure: str | None) -> None:
    by_size = {}
    head("MNIST, batch")
    for size in (1, 4, 8, 16):
        by_size[size] = attacked(Grnn(), "mnist", max(2, 8 // size), size, seed)
        line(str(size), by_size[size])
    for metric, thresholds in THRESHOLDS.items():
        print(f"\n| success, {metric} {'<=' if metric == 'mse' else '>='} |", *(f"{t:g} |" for t in thresholds))
        print("| --- |", *("--- |" for _ in thresholds))
        for size, rows in by_size.items():
            print(f"| batch {size} |", *(f"{passed(rows, metric, t):.0%} |" for t in thresholds))
    if figure is not None:
        draw(by_size, figure)


def draw(by_size: dict[int, Rows], path: str) -> None:
    """The success rates against the thresholds: a panel for each metric, a curve for each batch size."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(12, 3.5), layout="constrained")
    for axes, (metric, last) in zip(drawn.subplots(1, 3), {"mse": 0.2, "psnr": 60, "ssim": 1}.items(), strict=True):
        thresholds = torch.linspace(0, last, 101).tolist()
        for size, rows in by_size.items():
            axes.plot(thresholds, [passed(rows, metric, t) for t in thresholds], label=f"batch {size}")
        axes.set(xlabel=f"threshold of {metric}", ylabel="success rate", ylim=(0, 1.02))
        axes.legend()
    drawn.savefig(path)


def terms(seed: int) -> None:
    head("MNIST, objective")
    images, _ = test_split("mnist", None)
    model = build_model("lenet", {"activation": "sigmoid", "init": "uniform"}, tuple(images.shape[1:]), CLASSES, seed)
    entries = sum(weight.numel() for weight in model.parameters())
    for name, weights in TERMS.items():
        line(name, attacked(Grnn(**weights), "mnist", 3, 1, seed))
        if weights.get("wd", 1):
            summed = name.replace("WD", "WD summed")
            line(summed, attacked(Grnn(**{**weights, "wd": entries}), "mnist", 3, 1, seed))


def resolutions(seed: int) -> None:
    head("colour, batch 1")
    for name, size in (("cifar10", 32), ("tiny_imagenet", 64), ("imagenet", 128)):
        line(f"{name}, {size}x{size}", attacked(Grnn(), name, 2 if size < 128 else 1, 1, seed, size))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["single", "batches", "terms", "resolutions"])
    parser.add_argument("--seed", type=int, default=2022)
    parser.add_argument("--figure", help="where to draw the success rates")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for part in chosen.parts:
        if part == "batches":
            batches(chosen.seed, chosen.figure)
        else:
            {"single": single, "terms": terms, "resolutions": resolutions}[part](chosen.seed)


if __name__ == "__main__":
    main()
