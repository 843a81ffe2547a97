"""DCS2 against its paper: what attackers still see, what accuracy and what time it costs.

    python -m benchmarks.dcs2 leak --data FOLDER [--case lenet|convnet] [--arms dcs2 ...] [--attacks gs ...]
                                   [--images 20] [--first 3000] [--iterations 1000] [--steps 1200]
    python -m benchmarks.dcs2 accuracy --data FOLDER [--case lenet|convnet] [--arms none dcs2] [--iterations 30]
                                   [--clients 10] [--protected 1] [--samples 192] [--rounds 40] [--seeds 11 12]
    python -m benchmarks.dcs2 length --data FOLDER [the same]
    python -m benchmarks.dcs2 cost --data FOLDER [--case lenet|convnet]

FOLDER holds `mnist` and `fashion-mnist` (IDX files), and `lossless-train.parquet` and `lossless-test.parquet` in
`cifar10`. `leak`: one sensitive image a victim, the gradient of a batch of one at an untrained model; `gs_informed` is
the attack of one who knows which values the defence has set to zero. `accuracy`: all samples of the protected clients
are sensitive, and the other clients defend nothing, as in the paper. `length`: how long a step it makes of one.
`cost`: CPU seconds an iteration beside those of the two passes that it needs, so many iterations that what comes before
them does not count. One thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from statistics import mean, median, stdev
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rayfed.attacks.adaptive.two_images import TwoImages
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.defences.base import Batch, Defence, Task
from rayfed.defences.dcs2 import Dcs2
from rayfed.defences.gaussian import Gaussian
from rayfed.defences.prune import Prune
from rayfed.defences.soteria import Soteria
from rayfed.gradients import buffers_of, flatten, norm, per_sample_gradients, weights_of
from rayfed.metrics.images import psnr, ssim
from rayfed.models.build import build_model
from rayfed.registry import build
from rayfed.samples import Pixels
from rayfed.scenario import Training
from rayfed.simulation.client.local import gradient_method, update_method
from rayfed.update import Named, Observation

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lenet": ("lenet", {"activation": "sigmoid", "init": "uniform"}),
    "convnet": ("convnet", {"width": 8}),
}
TRAINED: dict[str, dict[str, Any]] = {"lenet": {}, "convnet": {"width": 8, "norm": "group"}}
"""The models of `accuracy`, which can be trained: ReLU, and no statistics of a batch."""
NOISE = {"lenet": 1e-2, "convnet": 1e-3}
"""Deviations and, below, shares of pruning and of Soteria of the authors' published settings."""
PRUNED = {"lenet": 0.7, "convnet": 0.9}
SOTERIA = {"lenet": 0.2, "convnet": 0.5}
CLIENT = 64
"""Samples of a victim."""


def images_of(folder: str, case: str, split: str = "train") -> Batch:
    """All images of the case's data set."""
    if case == "convnet":
        files = {part: f"{folder}/cifar10/lossless-{part}.parquet" for part in ("train", "test")}
        data = build("datasets", "parquet", files | {"test_samples": 1000})
    else:
        data = build("datasets", "mnist", {"root": f"{folder}/{'fashion-mnist' if case == 'fashion' else 'mnist'}"})
    loaded = data.load()
    images, labels = getattr(loaded, f"{split}_images"), getattr(loaded, f"{split}_labels")
    rows = slice(0, 10_000)
    return Batch(torch.from_numpy(images[rows]).float() / 255, torch.from_numpy(labels[rows]))


def arms(case: str, iterations: int) -> dict[str, list[Defence]]:
    """By their names on the command line."""

    def dcs2(**changes: Any) -> Dcs2:
        return Dcs2(iterations=iterations, **changes)

    prune = Prune(ratio=PRUNED[case])
    return {
        "none": [],
        "gaussian": [Gaussian(sigma=NOISE[case])],
        "prune": [prune],
        "soteria": [Soteria(ratio=SOTERIA[case])],
        "soteria estimated": [Soteria(ratio=SOTERIA[case], jacobian="estimated")],
        "dcs2": [dcs2()],
        "unoptimised": [Dcs2(iterations=1, lr=1e-9)],
        "lambda_g=0.5": [dcs2(lambda_g=0.5)],
        "lambda_g=1": [dcs2(lambda_g=1)],
        "mixup": [dcs2(mixup=0.3)],
        "noise": [dcs2(start="noise")],
        "noise+mixup": [dcs2(start="noise", mixup=0.3)],
        "public": [dcs2(start="public")],
        "prune+dcs2": [dcs2(), prune],
    }


def task(model: nn.Module, weights: Named, data: Batch, seed: int) -> Task:
    generator = torch.Generator().manual_seed(seed)
    placed = data._replace(places=torch.arange(len(data.labels)))
    return Task(
        0, 0, model, weights, buffers_of(model), placed, generator, seed, batch_size=len(data.labels), classes=10
    )


def victims(model: nn.Module, data: Batch, public: Batch, first: int, count: int) -> Iterator[Task]:
    """Tasks on one sample each; it and the next ones are the client's."""
    for i in range(first, first + count):
        work = task(model, weights_of(model), data.rows(torch.arange(i, i + CLIENT)), seed=i)
        own = work.data
        yield work.replace(data=own.rows(torch.tensor([0])), others=own.rows(torch.arange(1, CLIENT)), public=public)


def together(stack: Sequence[Defence], works: Sequence[Task]) -> list[Defence]:
    """The same stack, the concealed samples of all victims made in one call: the same numbers sooner."""

    def hurried(defence: Dcs2) -> Dcs2:
        starts = [defence._start(work, work.data) for work in works]
        start, chosen = (
            Batch(torch.cat([b.inputs for b in batches]), torch.cat([b.labels for b in batches]))
            for batches in (starts, [work.data for work in works])
        )
        images = defence._concealed(works[0], works[0].weights, chosen, start).split(1)
        made = dict(zip((work.order for work in works), images, strict=True))

        class Hurried(Dcs2):
            def _concealed(self, task: Task, weights: Named, chosen: Batch, start: Batch) -> Tensor:
                return made[task.order]

        return Hurried(**asdict(defence))

    return [hurried(defence) if isinstance(defence, Dcs2) else defence for defence in stack]


def leak(chosen: argparse.Namespace) -> None:
    """A line for every arm and attack: what is found of the sensitive images."""
    data = images_of(chosen.data, chosen.case)
    name, parameters = MODELS[chosen.case]
    shape = tuple(data.inputs.shape[1:])
    model = build_model(name, parameters, shape, 10, seed=chosen.first).eval()
    domain = data if chosen.case == "convnet" else images_of(chosen.data, "fashion")
    known = (data.inputs[: chosen.first], data.labels[: chosen.first])
    gs = InvertingGradients(iterations=chosen.steps)
    attacks = {
        "gs": gs,
        "gs_informed": gs,
        "class_average": replace(gs, start="class_average"),
        "two_images": TwoImages(iterations=chosen.steps),
        "two_images_narrow": TwoImages(iterations=chosen.steps, width=1),
        "two_images_average": TwoImages(iterations=chosen.steps, start="class_average"),
    }
    true = data.inputs[chosen.first : chosen.first + chosen.images]
    for arm in chosen.arms:
        began = perf_counter()
        works = list(victims(model, data, domain, chosen.first, chosen.images))
        stack = together(arms(chosen.case, chosen.iterations)[arm], works)
        send = update_method(Training(algorithm="fedsgd", batch_size=None), stack)
        plain = update_method(Training(algorithm="fedsgd", batch_size=None), [])
        seen, informed, cosines = [], [], []
        for work in victims(model, data, domain, chosen.first, chosen.images):
            update = send(work)
            sent = update.tensors
            cosines.append(float(torch.cosine_similarity(flatten(sent), flatten(plain(work).tensors), dim=0)))
            labels = work.data.labels
            observation = Observation(0, 0, work.weights, work.buffers, sent, 1.0, 1, Pixels(*shape), 10, labels=labels)  # type: ignore[arg-type]
            exposed = {name: torch.ones_like(g, dtype=torch.bool) for name, g in sent.items()}
            for defence in stack:
                exposed |= defence.exposed(update) or {}
            seen.append(replace(observation, extra={"public": known}))
            informed.append(replace(observation, extra={"defence": exposed}))
        defended = perf_counter() - began
        for title in chosen.attacks:
            found = attacks[title].reconstruct(
                informed if title == "gs_informed" else seen,
                model,
                [torch.Generator().manual_seed(i) for i in range(len(seen))],
            )
            images = torch.cat([one.images for one in found])
            quality = [(float(p), float(s)) for p, s in zip(psnr(true, images), ssim(true, images), strict=True)]
            p, s = zip(*quality, strict=True)
            print(
                f"{chosen.case} {arm:14} {title:20} {len(p)} images: PSNR {mean(p):.2f} +- {stdev(p):.2f} "
                f"(max {max(p):.2f}), SSIM {mean(s):.3f} +- {stdev(s):.3f}; cosine to the plain gradient "
                f"{mean(cosines):.3f}; defence {defended / len(p):.2f} s an image; "
                f"objective {mean(one.loss for one in found):.4f}",
                flush=True,
            )


def accuracy(chosen: argparse.Namespace) -> None:
    """A line for every arm and seed: accuracy on the protected data and on the test data after a short training."""
    data, test = (images_of(chosen.data, chosen.case, split) for split in ("train", "test"))
    training = Training(epochs=1, batch_size=chosen.batch, lr=chosen.lr, momentum=0.9)
    plain = update_method(training, [])
    for seed in chosen.seeds:
        drawn = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(seed))
        parts = [data.rows(index) for index in drawn[: chosen.clients * chosen.samples].split(chosen.samples)]
        protected = data.rows(drawn[: chosen.protected * chosen.samples])
        for arm in chosen.arms:
            model = build_model(chosen.case, TRAINED[chosen.case], tuple(data.inputs.shape[1:]), 10, seed=seed)  # type: ignore[arg-type]
            weights = weights_of(model)
            send = update_method(training, arms(chosen.case, chosen.iterations)[arm])
            for round in range(chosen.rounds):
                sent = [
                    (send if client < chosen.protected else plain)(
                        task(model, weights, part, seed=10_000 * seed + 100 * round + client)
                    ).tensors
                    for client, part in enumerate(parts)
                ]
                weights = {n: w - torch.stack([s[n] for s in sent]).mean(0) for n, w in weights.items()}
            print(
                f"{arm:14} seed {seed}: Acc_S {right(model, weights, protected):.2%}, "
                f"Acc_T {right(model, weights, test):.2%}",
                flush=True,
            )


def length(chosen: argparse.Namespace) -> None:
    """A line every tenth round of an undefended training: the first client's step on one batch, with and without."""
    data, test = (images_of(chosen.data, chosen.case, split) for split in ("train", "test"))
    model = build_model(chosen.case, TRAINED[chosen.case], tuple(data.inputs.shape[1:]), 10, seed=chosen.first)  # type: ignore[arg-type]
    weights = weights_of(model)
    drawn = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(chosen.first))
    parts = [data.rows(index) for index in drawn[: chosen.clients * chosen.samples].split(chosen.samples)]
    send = update_method(Training(epochs=1, batch_size=chosen.batch, lr=chosen.lr, momentum=0.9), [])
    defended = gradient_method(arms(chosen.case, chosen.iterations)["dcs2"])
    for round in range(chosen.rounds + 1):
        if round % 10 == 0:
            work = task(model, weights, parts[0], seed=round)
            batch = work.data.rows(torch.arange(chosen.batch))
            own, loss = gradient_method([])(work, weights, batch)
            step, _ = defended(work, weights, batch)
            cosine = float(torch.cosine_similarity(flatten(step), flatten(own), dim=0))
            print(
                f"round {round}: Acc_T {right(model, weights, test):.2%}, loss {loss:.2f}, "
                f"step {norm(step) / norm(own):.1f} times as long, cosine {cosine:.2f}",
                flush=True,
            )
        sent = [send(task(model, weights, part, seed=100 * round + i)).tensors for i, part in enumerate(parts)]
        weights = {n: w - torch.stack([s[n] for s in sent]).mean(0) for n, w in weights.items()}


@torch.no_grad()
def right(model: nn.Module, weights: Named, data: Batch) -> float:
    """Share of the data that is classified right."""
    logits = functional_call(model, weights, (data.inputs,))
    return float((logits.argmax(1) == data.labels).float().mean())


def cost(chosen: argparse.Namespace) -> None:
    """CPU seconds of an iteration over those of its floor: the samples' gradients with their graph, one pass back."""
    data = images_of(chosen.data, chosen.case)
    name, parameters = MODELS[chosen.case]
    model = build_model(name, parameters, tuple(data.inputs.shape[1:]), 10, seed=1).eval()  # type: ignore[arg-type]
    work = task(model, weights_of(model), data.rows(torch.arange(chosen.images)), seed=1)
    batch = work.data
    defence = Dcs2(iterations=chosen.iterations)
    start = defence._start(work, batch)

    def floor() -> None:
        images = start.inputs.clone().requires_grad_()
        for _ in range(chosen.iterations):
            gradients = per_sample_gradients(model, work.weights, work.buffers, images, start.labels)
            torch.autograd.grad(sum(g.square().sum() for g in gradients.values()), images)

    sides: dict[str, Callable[[], Any]] = {
        "dcs2": lambda: defence._concealed(work, work.weights, batch, start),
        "floor": floor,
        "none": lambda: update_method(Training(algorithm="fedsgd", batch_size=None), [])(work),
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(chosen.repeats):
        for side, act in sides.items():
            began = process_time()
            act()
            seconds[side].append((process_time() - began) / (1 if side == "none" else chosen.iterations))
    ratios = [a / b for a, b in zip(seconds["dcs2"], seconds["floor"], strict=True)]
    print(
        f"{chosen.case}, {chosen.images} samples: {median(seconds['dcs2']):.4f} s an iteration, floor "
        f"{median(seconds['floor']):.4f} s, ratio {median(ratios):.2f}; a plain gradient of the batch "
        f"{median(seconds['none']):.4f} s",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("leak", "accuracy", "length", "cost"))
    parser.add_argument("--data", required=True)
    parser.add_argument("--case", choices=MODELS, default="lenet")
    parser.add_argument("--arms", nargs="*", default=["none", "gaussian", "prune", "soteria", "dcs2"])
    parser.add_argument("--attacks", nargs="*", default=["gs"])
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--first", type=int, default=3000, help="place of the first image; the model's seed, too")
    parser.add_argument("--iterations", type=int, default=1000, help="of dcs2")
    parser.add_argument("--steps", type=int, default=1200, help="of the attack")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--protected", type=int, default=1, help="clients that defend themselves")
    parser.add_argument("--samples", type=int, default=192, help="of a client")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, nargs="*", default=[11, 12])
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    {"leak": leak, "accuracy": accuracy, "length": length, "cost": cost}[chosen.what](chosen)


if __name__ == "__main__":
    main()
