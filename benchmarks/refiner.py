"""What Refiner costs, what it leaves to Inverting Gradients, and what it does to accuracy, beside other defences.

    python -m benchmarks.refiner cost [--models lenet resnet10] [--batch 16] [--repeats 5]
    python -m benchmarks.refiner leak --train FILE --test FILE [--images 6] [--skip 0] [--iterations 400]
                                      [--lenet relu]
    python -m benchmarks.refiner accuracy --train FILE --test FILE [--rounds 800] [--arms none refiner]

`cost` compares a client's gradient with its floor: so many times two gradients of the model and one forward and
backward pass of the evaluation network as there are iterations. `leak` attacks single images of the test file under an
untrained LeNet, PyTorch's (`relu`) or DLG's (`sigmoid`). `accuracy` trains the former with 10 IID clients, of whom each
sends one gradient a round. One thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import fmean, median, stdev
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn

from rayfed import seeds
from rayfed.attacks.inverting_gradients import InvertingGradients
from rayfed.catalogue import build
from rayfed.data.base import Dataset
from rayfed.defences.base import Batch, Defence, Task
from rayfed.defences.gaussian import Gaussian
from rayfed.defences.prune import Prune
from rayfed.defences.quantise import Quantise
from rayfed.defences.refiner import Refiner
from rayfed.gradients import buffers_of, gradient, norm, weights_of
from rayfed.metrics.images import psnr, ssim
from rayfed.metrics.noise import NoiseRatio
from rayfed.models.build import build_model
from rayfed.models.pretrained import load_evaluator
from rayfed.scenario import Training
from rayfed.training.local import gradient_method, update_method
from rayfed.update import Observation

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
KNOWN = ("none", "refiner", f"refiner epsilon {FAR:g}")
"""Arms that an attacker is tried on who knows the evaluation network."""


def task_of(model: nn.Module, data: Batch, order: int = 0) -> Task:
    generator = seeds.torch_generator(SEED, order)
    return Task(0, 0, model, weights_of(model), buffers_of(model), data, generator, order)


def cost(arguments: argparse.Namespace) -> None:
    """Medians of sides that take turns."""
    refiner, network = Refiner(), load_evaluator(None, CPU)
    for name in arguments.models:
        model = build_model(name, {}, (3, 32, 32), 10, SEED).train()
        batch = Batch(torch.rand(arguments.batch, 3, 32, 32), torch.arange(arguments.batch) % 10)
        task = task_of(model, batch)
        method = gradient_method([refiner])

        def evaluate(images: Tensor = batch.images) -> None:
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
    seen = Observation(0, 0, task.weights, task.buffers, sent, 1.0, 1, (3, 32, 32), 10, labels=label)
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
    leaks, accuracies = commands.add_parser("leak"), commands.add_parser("accuracy")
    leaks.set_defaults(run=leak)
    accuracies.set_defaults(run=accuracy)
    for command in (leaks, accuracies):
        command.add_argument("--train", required=True, help="Parquet file with training images")
        command.add_argument("--test", required=True, help="Parquet file with test images")
    leaks.add_argument("--images", type=int, default=6)
    leaks.add_argument("--skip", type=int, default=0)
    leaks.add_argument("--iterations", type=int, default=400)
    leaks.add_argument("--lenet", choices=list(LENETS), default="relu")
    accuracies.add_argument("--rounds", type=int, default=800)
    accuracies.add_argument("--arms", nargs="+", default=["none", "refiner"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
