"""CPU seconds of one client iteration behind each defence over none, beside Refiner's table 5 as ratios.

    python -m benchmarks.defences [--models lenet resnet10 resnet18] [--only prune soteria] [--batch 32] [--repeats 5]
    python -m benchmarks.defences --estimate [--batch 4]    # Soteria's two Jacobians beside a loop, on ResNet-18

An iteration is one batch's gradient, through the defence, as an update that could be sent. Images are 3x32x32 noise:
the cost does not depend on what is in them. One thread, whose own seconds count: others may use the machine. Sides take
turns, so compare the ratios of one run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import process_time

import torch
from torch import Tensor

from rayfed.defences.base import Batch, Defence, Task
from rayfed.defences.soteria import displacement, estimated_norms, jacobian_norms
from rayfed.gradients import buffers_of, weights_of
from rayfed.models.build import build_model
from rayfed.models.front import Front
from rayfed.registry import build
from rayfed.scenario import Training
from rayfed.simulation.client.local import update_method
from rayfed.update import Update

SHAPE, CLASSES = (3, 32, 32), 10


@dataclass(frozen=True)
class Side:
    """A defence as the scenario writes it, and the row of Refiner's table 5 that it stands beside."""

    name: str
    parameters: dict[str, object]
    paper: str | None = None
    slow: bool = False
    """On a ResNet it takes minutes: one turn, without warming up."""


DEFENCES: dict[str, Side] = {
    "prune": Side("prune", {"ratio": 0.9}, "Pruning"),
    "prune by weight and gradient, global": Side(
        "prune", {"ratio": 0.9, "by": "weight_gradient", "scope": "global"}, "Pruning"
    ),
    "prune with error feedback": Side("prune", {"ratio": 0.9, "error_feedback": True}, "Pruning"),
    "top_k": Side("top_k", {"k": 0.1}, "Pruning"),
    "quantise": Side("quantise", {"bits": 8}, "GQ"),
    "quantise, stochastic": Side("quantise", {"bits": 8, "rounding": "stochastic"}, "GQ"),
    "gaussian": Side("gaussian", {"sigma": 1e-3, "clip": 1.0}, "Gaussian"),
    "laplace": Side("laplace", {"scale": 1e-3, "clip": 1.0}, "Laplace"),
    "soteria": Side("soteria", {"ratio": 0.5}, "Soteria", slow=True),
    "soteria, estimated": Side("soteria", {"ratio": 0.5, "jacobian": "estimated"}, "Soteria"),
    "grad_defense": Side("grad_defense", {"scale": 1e-3}, "Soteria"),
    "dp_sgd": Side("dp_sgd", {"noise_multiplier": 1.0}),
    "fed_cdp": Side("fed_cdp", {"noise_multiplier": 6.0, "clip": 4.0}),
    "dp_fedavg, clients add the noise": Side("dp_fedavg", {"noise_multiplier": 1.0, "noise": "clients"}),
    "dropout": Side("dropout", {"rate": 0.5}),
    "precode": Side("precode", {}),
    "mixup": Side("mixup", {}),
    "instahide": Side("instahide", {}),
    "ats": Side("ats", {}),
    "outpost": Side("outpost", {}),
    "vae": Side("vae", {}),
}
"""What is measured; a new defence is one line."""

PAPER = {
    "lenet": {"Pruning": 0.0187, "Gaussian": 0.0467, "Laplace": 0.0469, "GQ": 0.0179, "Soteria": 0.4103},
    "resnet10": {"Pruning": 0.0495, "Gaussian": 0.7317, "Laplace": 0.7322, "GQ": 0.0277, "Soteria": 11.3148},
    "resnet18": {"Pruning": 0.0873, "Gaussian": 1.8408, "Laplace": 1.8414, "GQ": 0.0514, "Soteria": 21.7539},
}
"""Refiner (Fan 2024), table 5: seconds an iteration on an A10. It has no row without a defence."""


def task_on(model_name: str, size: int, defence: Defence | None = None) -> Task:
    """A batch of noise on the model as the defence adapts it; two public images of each of two classes."""
    model = build_model(model_name, {}, SHAPE, CLASSES, seed=1)
    model = (defence.adapt_model(model) if defence else model).eval()
    rng = torch.Generator().manual_seed(2)
    data = Batch(torch.rand(size, *SHAPE, generator=rng), torch.arange(size) % CLASSES, places=torch.arange(size))
    public = Batch(torch.rand(4, *SHAPE, generator=rng), torch.arange(4) % 2)
    known = {"public": public, "batch_size": size, "classes": CLASSES}
    return Task(0, 0, model, weights_of(model), buffers_of(model), data, rng, order=0, **known)


def iteration(defences: Sequence[Defence]) -> Callable[[Task], Update]:
    return update_method(Training(algorithm="fedsgd", batch_size=None), defences)


def seconds(work: Callable[[], object]) -> float:
    began = process_time()
    work()
    return process_time() - began


def compare(model_name: str, sides: Sequence[str], size: int, repeats: int) -> None:
    """Print a table: each side's median time, and the median of its ratios to none in the same turn."""
    task = task_on(model_name, size)
    defences = {side: build("defences", DEFENCES[side].name, DEFENCES[side].parameters) for side in sides}
    tasks = {side: task_on(model_name, size, defence) for side, defence in defences.items()}
    rounds = {side: iteration([defence]) for side, defence in defences.items()}
    plain = iteration([])
    plain(task)
    for side in sides:
        if not DEFENCES[side].slow or model_name == "lenet":
            rounds[side](tasks[side])  # the first call of a kind compiles, and measures sensitivities
    taken: dict[str, list[float]] = {side: [] for side in sides}
    ratios: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(repeats):
        for side in sides:
            if turn and DEFENCES[side].slow and model_name != "lenet":
                continue
            plain(task)  # the memory that a side before has given back is fetched again
            alone = seconds(lambda: plain(task))
            taken[side].append(seconds(lambda side=side: rounds[side](tasks[side])))  # type: ignore[misc]
            ratios[side].append(taken[side][-1] / alone)
    print(f"\n{model_name}, batch {size}; load {os.getloadavg()[0]:.1f}; none {seconds(lambda: plain(task)):.4f} s")
    print(f"{'':40}{'s':>10}{'over none':>11}{'over quantise':>15}{'Refiner, over GQ':>18}")
    for side in sides:
        paper, row = PAPER.get(model_name, {}), DEFENCES[side].paper
        theirs = f"{paper[row] / paper['GQ']:.2f}" if row in paper else ""
        ours = f"{median(taken[side]) / median(taken['quantise']):.2f}" if "quantise" in taken else ""
        print(f"{side:40}{median(taken[side]):10.4f}{median(ratios[side]):11.2f}{ours:>15}{theirs:>18}", flush=True)


def estimate(size: int) -> None:
    """Soteria's Jacobian on ResNet-18: a loop over features, one call, and probes; the overlap of what is pruned."""
    task = task_on("resnet18", size)
    state, front = {**task.weights, **task.buffers}, Front(task.model, "fc", before=True)
    images = task.data.inputs

    def features(x: Tensor) -> Tensor:
        return front(state, x)

    def loop() -> Tensor:
        x = images.clone().requires_grad_()
        columns = features(x).sum(0)
        slopes = (torch.autograd.grad(c, x, retain_graph=True)[0] for c in columns)
        return torch.stack([s.flatten(1).norm(dim=1) for s in slopes], dim=1)

    with torch.no_grad():
        values = features(images)
    jacobian_norms(lambda x: x.flatten(1)[:, :4], images)  # the first vmap of a process imports for seconds
    estimated_norms(lambda x: x.flatten(1)[:, :4], images, 1, torch.Generator())
    alone = seconds(loop)
    together = seconds(lambda: jacobian_norms(features, images))
    print(f"resnet18, batch {size}: loop {alone:.2f} s; one call {together:.2f} s")
    exact = displacement(values, jacobian_norms(features, images))
    for probes in (1, 2, 4, 8, 16, 32, 64):
        began = process_time()
        found = displacement(values, estimated_norms(features, images, probes, torch.Generator().manual_seed(probes)))
        share = (process_time() - began) / alone
        overlaps = [_overlap(exact, found, ratio) for ratio in (0.1, 0.5, 0.8)]
        print(
            f"{probes:4} probes: {share:.4f} of the loop; overlap {' '.join(f'{o:.3f}' for o in overlaps)}", flush=True
        )


def _overlap(exact: Tensor, found: Tensor, ratio: float) -> float:
    count = int(ratio * len(exact))
    first, second = (set(d.topk(count).indices.tolist()) for d in (exact, found))
    return len(first & second) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="*", choices=PAPER, default=["lenet", "resnet10", "resnet18"])
    parser.add_argument("--only", nargs="*", choices=DEFENCES, default=list(DEFENCES))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--estimate", action="store_true", help="Soteria's estimated Jacobian instead")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.estimate:
        estimate(chosen.batch)
        return
    for model in chosen.models:
        compare(model, chosen.only, chosen.batch, chosen.repeats)


if __name__ == "__main__":
    main()
