"""What Refiner costs, what it leaves to Inverting Gradients, and what it does to accuracy, beside other defences.

    python -m benchmarks.refiner cost [--models lenet resnet10] [--batch 16] [--repeats 5]
    python -m benchmarks.refiner leak --train FILE --test FILE [--images 6] [--skip 0] [--iterations 400]
                                      [--lenet relu]
    python -m benchmarks.refiner accuracy --train FILE --test FILE [--rounds 800] [--arms none refiner]
    python -m benchmarks.refiner curves --train FILE --test FILE --out ROWS.jsonl [--plot FILE.png] [--images 8]
                                        [--arms none "refiner*"] [--seeds 1 2] [--partitions iid dirichlet]

`cost` compares a client's gradient with its floor: so many times two gradients of the model and one forward and
backward pass of the evaluation network as there are iterations. `leak` attacks single images of the test file under an
untrained LeNet, PyTorch's (`relu`) or DLG's (`sigmoid`). `accuracy` trains the former with 10 IID clients, of whom each
sends one gradient a round. `curves` does both for several strengths of every defence (figures 7c and 13a, tables 6 to
9): it appends a row to its file for everything that is finished, leaves out what is there, and draws the curves of the
file. One thread.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean, median, stdev
from time import perf_counter
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from rayfed.aggregation.server_optimiser import ServerOptimiser
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.core import seeds
from rayfed.data.base import Dataset
from rayfed.defences.base import Batch, Defence, Task
from rayfed.defences.gaussian import Gaussian
from rayfed.defences.prune import Prune
from rayfed.defences.quantise import Quantise
from rayfed.defences.refiner import Refiner
from rayfed.defences.soteria import Soteria
from rayfed.gradients import buffers_of, gradient, norm, weights_of
from rayfed.metrics.images import psnr, ssim
from rayfed.metrics.noise import NoiseRatio
from rayfed.models.build import build_model
from rayfed.models.pretrained import load_evaluator
from rayfed.registry import build
from rayfed.samples import Pixels
from rayfed.scenario import Training
from rayfed.simulation.client.local import gradient_method, update_method
from rayfed.update import Named, Observation

CPU = torch.device("cpu")
FAR = 1e6
SEED = 11

LENETS: dict[str, dict[str, object]] = {"relu": {}, "sigmoid": {"activation": "sigmoid", "init": "uniform"}}

BASELINES: dict[str, list[Defence]] = {
    "none": [],
    **{f"gaussian {sigma:g}": [Gaussian(sigma=sigma, clip=1)] for sigma in (1e-3, 1e-2, 1e-1)},
    **{f"prune {ratio:g}": [Prune(ratio=ratio)] for ratio in (0.5, 0.9, 0.99)},
    **{f"quantise {bits}": [Quantise(bits=bits)] for bits in (8, 4, 1)},
}
RADII: dict[str, list[Defence]] = {
    "refiner": [Refiner()],
    **{f"refiner epsilon {radius:g}": [Refiner(epsilon=radius)] for radius in (0.01, 0.3, 0.9, FAR)},
}
FREE: dict[str, list[Defence]] = {
    **{f"free alpha {alpha:g}": [Refiner(alpha=alpha, epsilon=FAR)] for alpha in (0, 0.1, 0.3, 0.7, 0.9)},
    **{f"free beta {beta:g}": [Refiner(beta=beta, epsilon=FAR)] for beta in (1e-3, 10, 1e3)},
    **{f"free iterations {steps}": [Refiner(iterations=steps, epsilon=FAR)] for steps in (5, 20)},
    **{f"free tau {tau:g}": [Refiner(tau=tau, epsilon=FAR)] for tau in (0.91, 1.0)},
}
"""The parameters of tables 6 to 9, with nothing projected."""
CURVES: dict[str, dict[str, list[Defence]]] = {
    "none": {"none": []},
    "gaussian": {f"gaussian {s:g}": [Gaussian(sigma=s, clip=1)] for s in (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)},
    "prune": {f"prune {ratio:g}": [Prune(ratio=ratio)] for ratio in (0.3, 0.6, 0.8, 0.9, 0.99)},
    "quantise": {f"quantise {bits}": [Quantise(bits=bits)] for bits in (12, 8, 4, 2, 1)},
    "soteria": {f"soteria {r:g}": [Soteria(ratio=r, jacobian="estimated")] for r in (0.1, 0.3, 0.6, 0.9)},
    "refiner": {f"refiner epsilon {radius:g}": [Refiner(epsilon=radius)] for radius in (0.1, 0.3, 0.9)},
    "tables": {
        f"free {name}": FREE[f"free {name}"] for name in ("alpha 0", "alpha 0.9", "beta 1000", "iterations 5", "tau 1")
    },
}
"""Arms of the curves, by family, from weak to strong; those of the tables lie on no curve."""
KNOWN = ("none", "refiner", f"refiner epsilon {FAR:g}")
"""Arms that an attacker is tried on who knows the evaluation network."""


def task_of(model: nn.Module, data: Batch, order: int = 0, seed: int = SEED, weights: Named | None = None) -> Task:
    weights, generator = weights or weights_of(model), seeds.torch_generator(seed, order)
    return Task(0, 0, model, weights, buffers_of(model), data, generator, order)


def cost(arguments: argparse.Namespace) -> None:
    """Medians of sides that take turns."""
    refiner, network = Refiner(), load_evaluator(None, CPU)
    for name in arguments.models:
        model = build_model(name, {}, (3, 32, 32), 10, SEED).train()
        batch = Batch(torch.rand(arguments.batch, 3, 32, 32), torch.arange(arguments.batch) % 10)
        task = task_of(model, batch)
        method = gradient_method([refiner])

        def evaluate(images: Tensor = batch.inputs) -> None:
            images = images.clone().requires_grad_()
            torch.autograd.grad(network(images).sum(), images)

        sides: dict[str, Callable[[], object]] = {
            "refiner": lambda: method(task, task.weights, batch),  # noqa: B023
            "model": lambda: gradient(model, task.weights, buffers_of(model), *batch[:3]),  # noqa: B023
            "evaluator": evaluate,
        }
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(arguments.repeats + 1):
            for side, work in sides.items():
                began = perf_counter()
                work()
                seconds[side].append(perf_counter() - began)
        took = {side: median(values[1:]) for side, values in seconds.items()}
        floor = refiner.iterations * (2 * took["model"] + took["evaluator"])
        print(
            f"{name}, batch {arguments.batch}: refiner {took['refiner'] / floor:.2f} of its floor {floor:.3f} s", end=""
        )
        print(f" (plain gradient {took['model']:.4f} s, evaluation network {took['evaluator']:.4f} s)", flush=True)


def leak(arguments: argparse.Namespace) -> None:
    """Every arm against the same images with the same starts; then the attacker who knows Refiner."""
    data = images_of(arguments, arguments.skip + arguments.images)
    chosen = slice(arguments.skip, None)
    images, labels = pixels(data.test_images[chosen]), torch.from_numpy(data.test_labels[chosen])
    model = build_model("lenet", LENETS[arguments.lenet], (3, 32, 32), 10, SEED)
    arms = BASELINES | RADII | FREE
    observations, apart = [], []
    for stack in arms.values():
        for i in range(len(labels)):
            observation, distance = observe(model, images[i : i + 1], labels[i : i + 1], stack, i)
            observations.append(observation)
            apart.append(distance)
    attack = InvertingGradients(iterations=arguments.iterations)
    show(list(arms), attack, model, observations, images, apart)
    knowing = [o for o, name in zip(observations, np.repeat(list(arms), len(labels)), strict=True) if name in KNOWN]
    for weight in (0.01, 0.1):
        print(f"attacker who knows Refiner, noise: {weight}")
        attack = InvertingGradients(iterations=arguments.iterations, noise=weight)
        show([name for name in arms if name in KNOWN], attack, model, knowing, images)


def observe(
    model: nn.Module, image: Tensor, label: Tensor, stack: Sequence[Defence], order: int
) -> tuple[Observation, float]:
    """What a server sees of one image, and how far it is from the plain gradient, relatively."""
    training, task = Training(algorithm="fedsgd", batch_size=None), task_of(model, Batch(image, label), order)
    sent = update_method(training, stack)(task).tensors
    plain = update_method(training, ())(task).tensors
    distance = float(norm({name: t - plain[name] for name, t in sent.items()}) / norm(plain))
    seen = Observation(0, 0, task.weights, task.buffers, sent, 1.0, 1, Pixels(3, 32, 32), 10, labels=label)
    return seen, distance


def show(
    arms: list[str],
    attack: InvertingGradients,
    model: nn.Module,
    observations: list[Observation],
    images: Tensor,
    apart: Sequence[float] | None = None,
) -> None:
    count, began = len(images), perf_counter()
    starts = [seeds.torch_generator(SEED, "start", i % count) for i in range(len(observations))]
    found = attack.reconstruct(observations, model, starts)
    print(f"{len(found)} reconstructions in {perf_counter() - began:.0f} s: PSNR, SSIM, noise ratio, distortion")
    for row, name in enumerate(arms):
        guess = torch.cat([f.images for f in found[row * count : (row + 1) * count]])
        decibels = psnr(guess, images).tolist()
        seen = NoiseRatio()(images, guess).mean().item()
        moved = "" if apart is None else f"{fmean(apart[row * count : (row + 1) * count]):7.3f}"
        print(
            f"{name:24} {fmean(decibels):6.2f} ± {stdev(decibels):.2f}  {ssim(guess, images).mean():.3f}  "
            f"{seen:.3f}  {moved}",
            flush=True,
        )


def accuracy(arguments: argparse.Namespace) -> None:
    """One gradient of every client a round, batches of 4, the mean taken with lr 0.1; the same batches in every arm."""
    data = images_of(arguments, 1000)
    train, labels = pixels(data.train_images), torch.from_numpy(data.train_labels)
    parts = torch.randperm(len(labels), generator=seeds.torch_generator(SEED, "parts")).chunk(10)
    test, truth = pixels(data.test_images), torch.from_numpy(data.test_labels)
    arms = BASELINES | RADII
    training = Training(algorithm="fedsgd", batch_size=4)
    for name in arguments.arms:
        model, began = build_model("lenet", {}, (3, 32, 32), 10, SEED), perf_counter()
        update = update_method(training, arms[name])
        for round in range(arguments.rounds):
            tasks = [
                task_of(model, Batch(train[part], labels[part]), 10 * round + client)
                for client, part in enumerate(parts)
            ]
            sent = [update(task).tensors for task in tasks]
            with torch.no_grad():
                for key, weight in model.named_parameters():
                    weight -= 0.1 * torch.stack([tensors[key] for tensors in sent]).mean(0)
        with torch.no_grad():
            right = (model(test).argmax(1) == truth).float().mean().item()
        print(f"{name:24} accuracy {right:.3f} in {perf_counter() - began:.0f} s", flush=True)


def curves(arguments: argparse.Namespace) -> None:
    """What every arm leaks at the untrained weights, and what it trains to; then the figure."""
    data, rows = images_of(arguments, 1000), read(arguments.out)
    done = {(row["arm"], row.get("partition"), row.get("seed")) for row in rows}
    arms = {
        name: stack
        for family in CURVES.values()
        for name, stack in family.items()
        if any(fnmatch(name, pattern) for pattern in arguments.arms)
    }
    with Path(arguments.out).open("a") as file:

        def keep(found: Iterator[dict[str, Any]]) -> None:
            for row in found:
                rows.append(row)
                print(json.dumps(row), file=file, flush=True)

        keep(leaks({name: arms[name] for name in arms if (name, None, None) not in done}, data, arguments))
        for seed in arguments.seeds:
            for partition in arguments.partitions:
                for name, stack in arms.items():
                    if (name, partition, seed) not in done:
                        keep(iter([trained(name, stack, data, partition, seed, arguments)]))
    if arguments.plot:
        draw(rows, arguments.partitions, arguments.plot)


def read(path: str) -> list[dict[str, Any]]:
    """The rows of earlier runs."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()] if Path(path).exists() else []


def leaks(arms: dict[str, list[Defence]], data: Dataset, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row an arm: single images of the test file, the same ones and the same starts for all arms, in one call."""
    count, chosen = arguments.images, slice(arguments.skip, arguments.skip + arguments.images)
    images, labels = pixels(data.test_images[chosen]), torch.from_numpy(data.test_labels[chosen])
    model = build_model("lenet", {}, (3, 32, 32), 10, SEED)
    seen = [observe(model, images[i : i + 1], labels[i : i + 1], s, i) for s in arms.values() for i in range(count)]
    starts = [seeds.torch_generator(SEED, "start", i % count) for i in range(len(seen))]
    attack = InvertingGradients(iterations=arguments.iterations)
    found = attack.reconstruct([observation for observation, _ in seen], model, starts) if seen else []
    for row, name in enumerate(arms):
        mine = slice(row * count, (row + 1) * count)
        guess = torch.cat([f.images for f in found[mine]])
        yield {
            "arm": name,
            "psnr": psnr(guess, images).tolist(),
            "ssim": ssim(guess, images).tolist(),
            "noise_ratio": NoiseRatio()(images, guess).tolist(),
            "distortion": [distance for _, distance in seen[mine]],
        }


def trained(
    name: str, stack: list[Defence], data: Dataset, partition: str, seed: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The test accuracy at every tenth part of a training; clients and batches are the same in every arm."""
    images, labels = pixels(data.train_images), torch.from_numpy(data.train_labels)
    split = build("partitions", partition, {"alpha": 1.0} if partition == "dirichlet" else {}).split
    parts = split(data.train_labels, arguments.clients, seeds.numpy_generator(seed, "parts"))
    clients = [Batch(images[part], labels[part]) for part in map(torch.from_numpy, parts)]
    test, truth = pixels(data.test_images), torch.from_numpy(data.test_labels)
    model, began = build_model("lenet", {}, (3, 32, 32), 10, seed), perf_counter()
    update = update_method(Training(algorithm="fedsgd", batch_size=arguments.batch), stack)
    server, state = ServerOptimiser("adam", arguments.lr), dict[str, Named]()
    weights, accuracy = weights_of(model), []
    for round in range(1, arguments.rounds + 1):
        tasks = [task_of(model, own, 1000 * round + i, seed, weights) for i, own in enumerate(clients)]
        sent = [update(task).tensors for task in tasks]
        step = {key: torch.stack([tensors[key] for tensors in sent]).mean(0) for key in weights}
        weights, state = server.step(weights, step, state)
        if round * 10 % arguments.rounds == 0:
            with torch.no_grad():
                guess = torch.func.functional_call(model, weights, (test,)).argmax(1)
            accuracy.append((guess == truth).float().mean().item())
    seconds = perf_counter() - began
    return {"arm": name, "partition": partition, "seed": seed, "accuracy": accuracy, "seconds": seconds}


def draw(rows: list[dict[str, Any]], partitions: Sequence[str], path: str) -> None:
    """PMM at the end against PSNR, a panel a partition, a line a family; bars are standard deviations."""
    figure = Figure(figsize=(4.6 * len(partitions), 3.8), layout="constrained")
    for partition, axes in zip(
        partitions, np.atleast_1d(figure.subplots(1, len(partitions), sharey=True)), strict=True
    ):
        for family in CURVES:
            if family != "tables":
                panel(axes, family, rows, partition)
        axes.set_title("IID" if partition == "iid" else "Dirichlet(1)", loc="left")
        axes.set_xlabel("PMM: accuracy over that without a defence")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("PSNR (dB)   leaks more →")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def panel(axes: Axes, family: str, rows: list[dict[str, Any]], partition: str) -> None:
    """The line of one family."""
    points = [
        (pmm(rows, name, partition), leak["psnr"])
        for name in CURVES[family]
        for leak in rows
        if leak["arm"] == name and "psnr" in leak
    ]
    points = [point for point in points if point[0]]
    if points:
        xs, ys = zip(*points, strict=True)
        axes.errorbar(
            [fmean(x) for x in xs],
            [fmean(y) for y in ys],
            xerr=[spread(x) for x in xs],
            yerr=[spread(y) for y in ys],
            marker="o",
            markersize=4,
            linewidth=1.4,
            elinewidth=0.5,
            capsize=1.5,
            label=family,
        )


def pmm(rows: list[dict[str, Any]], arm: str, partition: str) -> list[float]:
    """Accuracy over that of the undefended training with the same seed, both means of the last three readings."""
    ends = {(r["arm"], r["seed"]): fmean(r["accuracy"][-3:]) for r in rows if r.get("partition") == partition}
    return [ends[arm, seed] / ends["none", seed] for name, seed in ends if name == arm and ("none", seed) in ends]


def spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def images_of(arguments: argparse.Namespace, test_samples: int) -> Dataset:
    files = {"train": arguments.train, "test": arguments.test, "test_samples": test_samples}
    loaded: Dataset = build("datasets", "parquet", files).load()
    return loaded


def pixels(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).float() / 255


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    costs = commands.add_parser("cost")
    costs.set_defaults(run=cost)
    costs.add_argument("--models", nargs="+", default=["lenet", "resnet10"])
    costs.add_argument("--batch", type=int, default=16)
    costs.add_argument("--repeats", type=int, default=5)
    leaking, accuracies, curving = (commands.add_parser(name) for name in ("leak", "accuracy", "curves"))
    leaking.set_defaults(run=leak)
    accuracies.set_defaults(run=accuracy)
    curving.set_defaults(run=curves)
    for command in (leaking, accuracies, curving):
        command.add_argument("--train", required=True, help="Parquet file with training images")
        command.add_argument("--test", required=True, help="Parquet file with test images")
    leaking.add_argument("--images", type=int, default=6)
    leaking.add_argument("--skip", type=int, default=0)
    leaking.add_argument("--iterations", type=int, default=400)
    leaking.add_argument("--lenet", choices=list(LENETS), default="relu")
    accuracies.add_argument("--rounds", type=int, default=800)
    accuracies.add_argument("--arms", nargs="+", default=["none", "refiner"])
    curving.add_argument("--out", required=True, help="JSON lines, a row for everything that is finished")
    curving.add_argument("--plot", help="file of the figure")
    curving.add_argument(
        "--arms", nargs="+", default=["[!f]*"], help="names or patterns; those of the tables are free*"
    )
    curving.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    curving.add_argument("--partitions", nargs="+", choices=["iid", "dirichlet"], default=["iid", "dirichlet"])
    curving.add_argument("--images", type=int, default=8)
    curving.add_argument("--skip", type=int, default=0)
    curving.add_argument("--iterations", type=int, default=1000)
    curving.add_argument("--clients", type=int, default=4)
    curving.add_argument("--batch", type=int, default=8)
    curving.add_argument("--rounds", type=int, default=120)
    curving.add_argument("--lr", type=float, default=2e-3, help="of Adam at the server")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
