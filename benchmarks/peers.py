"""PSNR of `inverting_gradients`, the package `breaching` and the paper's own code, each by its defaults in equal time.

    python -m benchmarks.peers --train FILE --test FILE [--cases convnet] [--states untrained trained]
                               [--batches 1 4 8] [--seconds 8] [--images 8] [--skip 900] [--weights FOLDER]
                               [--device cuda]

Every side has the same weights, gradients and labels, batch norm in evaluation mode, one thread, and as many of its
iterations as fit into the same seconds of CPU time: `--seconds` for each image of a batch. With `--device cuda` these
are seconds of the clock, and TF32 is off. It attacks one batch after another. What a side needs for an iteration is
measured beforehand; what it really used is printed.

- `inverting_gradients`: the attack with its defaults.
- `breaching`: its configuration `invertinggradients` (total variation 0.2), by the package itself, if it is there.
- `original`: a plain loop with the defaults of the commands of github.com/JonasGeiping/invertinggradients (1157b61):
  cosine, Adam on the sign with 0.1, decay by ten at 3/8, 5/8 and 7/8, the box, a normal start, one restart, total
  variation 1e-4. (Its library's own default is 0.1, which is what 0.2 is in `breaching`.)

FILE is a Parquet file of images; those attacked take no part in training. The images of a batch are matched to the true
ones by the best assignment. An environment for all sides: rayfed and `pip install breaching==0.1.2`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter, process_time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.attacks import observe, plain
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.data.base import Dataset, load_in_memory
from rayfed.metrics.assignment import assign
from rayfed.metrics.images import psnr
from rayfed.models.build import build_model
from rayfed.registry import build
from rayfed.update import Observation

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "convnet": ("convnet", {"width": 64}),
    "lenet": ("lenet", {}),
    "resnet18": ("resnet18", {}),
}
ORIGINAL_TV = 1e-4
SAMPLES, EPOCHS, BATCH = 2000, 2, 32
"""Of training: enough for gradients that are no longer those of random weights."""

Side = Callable[[nn.Module, Observation, int, int], Tensor]
"""Model, what is observed, iterations and seed -> images (N, C, H, W)."""


def ours(model: nn.Module, seen: Observation, iterations: int, seed: int) -> Tensor:
    attack = InvertingGradients(iterations=iterations)
    return attack.reconstruct([seen], model, [torch.Generator().manual_seed(seed)])[0].images


def breaching(model: nn.Module, seen: Observation, iterations: int, seed: int) -> Tensor:
    from benchmarks.breaching_attack import attack

    torch.manual_seed(seed)
    problem = {"gradients": list(seen.update.values()), "labels": seen.labels, "shape": seen.sample.shape}
    return attack(model, problem, iterations)


def original(model: nn.Module, seen: Observation, iterations: int, seed: int) -> Tensor:
    start = torch.randn(seen.batch_size, *seen.sample.shape, generator=torch.Generator().manual_seed(seed))
    return plain(model, seen, start.to(device_of(model)), iterations, ORIGINAL_TV)


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def prepared(case: str, data: Dataset, trained: bool, folder: Path | None, device: torch.device) -> nn.Module:
    """Return a case's model in evaluation mode; its trained weights are kept in `folder` and taken from there."""
    name, parameters = CASES[case]
    model = build_model(name, parameters, data.train_images.shape[1:], len(data.classes), seed=11).to(device).eval()
    kept = folder / f"{case}.pt" if folder else None
    if trained and kept and kept.exists():
        model.load_state_dict(torch.load(kept, map_location=device))
    elif trained:
        train(model, pixels(data.train_images[np.arange(SAMPLES)]), torch.from_numpy(data.train_labels[:SAMPLES]))
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), kept)
    return model


def train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Train with Adam, the passes in bfloat16; the order of the samples is always the same."""
    rng, device = torch.Generator().manual_seed(0), device_of(model)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(images), generator=rng).split(BATCH):
            optimiser.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(model(images[rows].to(device)), labels[rows].to(device))
            loss.backward()
            optimiser.step()
    model.eval()


def pixels(stored: np.ndarray) -> Tensor:
    return torch.from_numpy(stored).float() / 255


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    device = device_of(model)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        found = torch.cat([model(x.to(device)).argmax(1).cpu() for x in images.split(100)])
    return (found == labels).double().mean().item()


def iterations_in(budget: float, cost: Callable[[int], float]) -> int:
    """Return how many iterations take `budget` seconds, by what fewer take; `cost` plays so many, in seconds.

    What is found is played once and put right, as the first and last iterations of a search may cost more than others.
    """
    cost(1)  # the first call of all does more
    fixed, few = cost(1), 2
    while (seconds := cost(few)) - fixed < budget / 8:
        few *= 2
    found = max(1, 1 + round((budget - fixed) * (few - 1) / (seconds - fixed)))
    return max(1, round(found * budget / cost(found)))


def timed(side: Side, model: nn.Module, seen: Observation, iterations: int, seed: int) -> tuple[float, Tensor]:
    began = clock(model)
    found = side(model, seen, iterations, seed)
    return clock(model) - began, found.cpu()


def clock(model: nn.Module) -> float:
    """Return the seconds of this process's CPU time, or of the clock once the card has done what it was given."""
    if device_of(model).type != "cuda":
        return process_time()
    torch.cuda.synchronize()
    return perf_counter()


def played(
    side: Side, model: nn.Module, images: Tensor, seen: list[Observation], iterations: int
) -> tuple[list[float], list[float]]:
    """Return the seconds that each batch takes a side, and the PSNR of each image (N, C, H, W)."""
    spent, quality = [], []
    for i, (true, one) in enumerate(zip(images.split(seen[0].batch_size), seen, strict=True)):
        seconds, found = timed(side, model, one, iterations, i)
        spent.append(seconds)
        quality += psnr(true, found[assign(true, found)]).tolist()
    return spent, quality


def compare(sides: dict[str, Side], model: nn.Module, images: Tensor, seen: list[Observation], budget: float) -> None:
    """Print each side's iterations, seconds and PSNR on the same batches, and by how much the first side is better."""
    results: dict[str, list[float]] = {}
    for name, side in sides.items():
        iterations = iterations_in(budget, lambda n, side=side: timed(side, model, seen[0], n, 0)[0])  # type: ignore[misc]
        spent, quality = played(side, model, images, seen, iterations)
        results[name] = quality
        ahead = [first - one for first, one in zip(next(iter(results.values())), quality, strict=True)]
        print(
            f"  {name:19}{iterations:7} it {mean(spent):7.1f} s",
            f"{mean(quality):6.2f} dB (deviation {stdev(quality):.1f});",
            f"first ahead by {mean(ahead):+.2f} +- {stdev(ahead) / len(ahead) ** 0.5:.2f};",
            " ".join(f"{value:.1f}" for value in quality),
            flush=True,
        )
    print(f"  best: {max(results, key=lambda name: mean(results[name]))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--train", required=True, metavar="FILE")
    parser.add_argument("--test", required=True, metavar="FILE")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--states", nargs="*", choices=["untrained", "trained"], default=["untrained", "trained"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 4, 8])
    parser.add_argument("--seconds", type=float, default=8, help="CPU seconds, or a card's, for each image of a batch")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--skip", type=int, default=900, help="test images before those attacked; they tell accuracy")
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="keeps trained weights from run to run")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device(chosen.device)
    sides: dict[str, Side] = {"inverting_gradients": ours, "original": original}
    if find_spec("breaching"):
        sides["breaching"] = breaching
    data = build("datasets", "parquet", {"train": chosen.train, "test": chosen.test}).load()
    images, labels = pixels(load_in_memory(data.test_images)), torch.from_numpy(data.test_labels)
    attacked = slice(chosen.skip, chosen.skip + chosen.images)
    for case, state in product(chosen.cases, chosen.states):
        model = prepared(case, data, state == "trained", chosen.weights, device)
        right = accuracy(model, images[: chosen.skip], labels[: chosen.skip])
        for batch in chosen.batches:
            print(f"{case}, {state} (accuracy {right:.2f}), batch {batch}; load {os.getloadavg()[0]:.1f}", flush=True)
            pairs = zip(images[attacked].split(batch), labels[attacked].split(batch), strict=True)
            seen = [observe(model.cpu(), x, y, len(data.classes)).to(device) for x, y in pairs]
            compare(sides, model.to(device), images[attacked], seen, chosen.seconds * batch)


if __name__ == "__main__":
    main()
