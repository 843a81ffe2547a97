"""Seconds an image, iterations a second and PSNR of the attacks, beside a plain loop and the package `breaching`.

    python -m benchmarks.attacks [--cases lenet convnet] [--data photos] [--images 16] [--singles 2] [--skip 0]
                                 [--iterations 40] [--repeats 3] [--breaching-python PATH] [--sides PATTERN ...]

The plain loop is Inverting Gradients as everyone writes it: one image, a gradient with its graph, `backward`, Adam on
the sign. It has the same weights, gradients, starts, schedule and number of iterations; so has `breaching`, in a
process of its own. One thread; sides take turns, so compare the ratios. `--data` is a data set's name or, for pixels
that no codec has touched, a Parquet file. `--breaching-python` is the interpreter of an environment with `breaching`
0.1.2; without it that side is left out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayfed.attacks.base import Attack
from rayfed.attacks.matching.dlg import Dlg
from rayfed.attacks.matching.gradinversion import GradInversion
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.metrics.images import psnr
from rayfed.models.build import build_model
from rayfed.registry import build
from rayfed.samples import Pixels
from rayfed.update import Observation

TV, LR = 1e-3, 0.1
BREACHING_TV = 0.2
"""Its own weight; it is the mean over all pixels, the last row and column with it, where ours is over the pairs."""

Work = Callable[[int], Tensor]
"""Attacks the first so many images and returns what it found, (n, C, H, W)."""

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "lenet": ("lenet", {"activation": "sigmoid", "init": "uniform"}),
    "convnet": ("convnet", {"width": 64}),
    "convnet16": ("convnet", {"width": 16}),
}


def plain(model: nn.Module, seen: Observation, start: Tensor, iterations: int, tv: float = TV) -> Tensor:
    """Inverting Gradients without a library, for the batch (N, C, H, W) behind an observation with its labels."""
    assert seen.labels is not None
    parameters, targets = list(model.parameters()), list(seen.update.values())
    image = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([image], lr=LR)
    milestones = [iterations * 3 // 8, iterations * 5 // 8, iterations * 7 // 8]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, milestones, gamma=0.1)
    for _ in range(iterations):
        optimiser.zero_grad()
        model.zero_grad()
        slopes = torch.autograd.grad(F.cross_entropy(model(image), seen.labels), parameters, create_graph=True)
        inner = sum((s * t).sum() for s, t in zip(slopes, targets, strict=True))
        ours, theirs = (sum(t.square().sum() for t in ts) for ts in (slopes, targets))
        down = (image[:, :, 1:] - image[:, :, :-1]).abs().mean()
        across = (image[..., 1:] - image[..., :-1]).abs().mean()
        loss = 1 - inner / (ours**0.5 * theirs**0.5) + tv * (down + across)
        loss.backward()
        assert image.grad is not None
        image.grad.sign_()
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            image.clamp_(0, 1)
    return image.detach()


def images_of(name: str, count: int, skip: int) -> tuple[Tensor, Tensor, int]:
    """Images (count, C, H, W) in [0, 1], held out from a set's training, their labels, and how many classes it has."""
    stored = name.endswith(".parquet")
    parameters = {"train": name} if stored else {"size": 32, "test_samples": count + skip}
    data = build("datasets", "parquet" if stored else name, parameters).load()
    rows = slice(skip, skip + count)
    images, labels = torch.from_numpy(data.test_images[rows]), torch.from_numpy(data.test_labels[rows])
    return images.float() / 255, labels, len(data.classes)


def observe(model: nn.Module, images: Tensor, labels: Tensor, classes: int) -> Observation:
    weights, buffers = weights_of(model), buffers_of(model)
    update, _ = gradient(model, weights, buffers, images, labels)
    sample = Pixels(images.shape[1], images.shape[2], images.shape[3])
    return Observation(0, 0, weights, buffers, update, 1.0, len(images), sample, classes, labels=labels)


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(i) for i in range(count)]


@contextmanager
def breaching(
    python: str, model: nn.Module, seen: list[Observation], starts: list[Tensor], iterations: int
) -> Iterator[Callable[[int, float], Tensor]]:
    """The package in a process of its own, which waits while others have their turn."""
    problems = [
        {"gradients": list(o.update.values()), "labels": o.labels, "shape": o.sample.shape, "start": start}
        for o, start in zip(seen, starts, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        saved, found, log = (Path(folder) / name for name in ("problems.pt", "found.pt", "log"))
        torch.save((model, problems), saved)
        command = [python, "-m", "benchmarks.breaching_attack", saved, found, str(iterations)]
        env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        with (
            log.open("w") as errors,
            subprocess.Popen(command, env=env, stdin=-1, stdout=-1, stderr=errors, text=True) as process,
        ):

            def wait() -> None:
                if "done\n" not in (process.stdout or ()):
                    sys.exit(f"breaching failed\n{log.read_text()[-3000:]}")

            def attack(count: int, tv: float) -> Tensor:
                print(count, tv, file=process.stdin, flush=True)
                wait()
                images: Tensor = torch.load(found)
                return images

            wait()
            try:
                yield attack
            finally:
                process.terminate()


def timed(work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    began = perf_counter()
    found = work()
    return perf_counter() - began, found


def sides_of(
    case: str,
    model: nn.Module,
    seen: list[Observation],
    iterations: int,
    singles: int,
    breaching_python: str | None,
    stack: ExitStack,
) -> dict[str, tuple[int, int, Work]]:
    """Every side's images, iterations and work; `stack` closes what they have opened."""
    starts = [o.sample.noise(1, g) for o, g in zip(seen, generators(len(seen)), strict=True)]
    ours = InvertingGradients(iterations=iterations, lr=LR, tv=TV, signed=True)

    def alone(count: int) -> Tensor:
        return torch.cat([plain(model, o, s, iterations) for o, s in zip(seen[:count], starts, strict=False)])

    def attacked(attack: Attack, count: int, together: bool = True) -> Tensor:
        calls = [range(count)] if together else [range(i, i + 1) for i in range(count)]
        found = []
        for call in calls:
            rng = [generators(count)[i] for i in call]
            found += attack.reconstruct([seen[i] for i in call], model, rng)
        return torch.cat([one.images for one in found])

    sides: dict[str, tuple[int, int, Work]] = {
        "plain loop": (singles, iterations, alone),
        "inverting_gradients, one by one": (singles, iterations, lambda n: attacked(ours, n, together=False)),
        "inverting_gradients, together": (len(seen), iterations, lambda n: attacked(ours, n)),
        "the same in bfloat16": (len(seen), iterations, lambda n: attacked(replace(ours, precision="bfloat16"), n)),
        "gradinversion, one seed": (
            singles,
            iterations,
            lambda n: attacked(GradInversion(iterations=iterations, seeds=1), n),
        ),
    }
    if case == "lenet":
        sides["dlg, together"] = (len(seen), 10, lambda n: attacked(Dlg(iterations=10, restarts=1), n))
    if breaching_python:
        peer = stack.enter_context(breaching(breaching_python, model, seen, starts, iterations))
        smooth = replace(ours, tv=BREACHING_TV)
        sides[f"one by one, TV {BREACHING_TV}"] = (singles, iterations, lambda n: attacked(smooth, n, together=False))
        sides[f"breaching, its own TV {BREACHING_TV}"] = (singles, iterations, lambda n: peer(n, BREACHING_TV))
        sides[f"breaching, TV {TV}"] = (singles, iterations, lambda n: peer(n, TV))
    return sides


def compare(case: str, images: Tensor, labels: Tensor, classes: int, chosen: argparse.Namespace) -> None:
    """Print a table: every side's median time an image and, in the same repetition, over the first side's."""
    name, parameters = MODELS[case]
    model = build_model(name, parameters, tuple(images.shape[1:]), classes, seed=11).eval()
    seen = [observe(model, x[None], y[None], classes) for x, y in zip(images, labels, strict=True)]
    with ExitStack() as stack:
        sides = sides_of(case, model, seen, chosen.iterations, chosen.singles, chosen.breaching_python, stack)
        sides = {side: how for side, how in sides.items() if any(fnmatch(side, p) for p in chosen.sides)}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        quality: dict[str, list[float]] = {}
        for _ in range(chosen.repeats):
            for side, (count, _, work) in sides.items():
                taken, found = timed(lambda work=work, count=count: work(count))  # type: ignore[misc]
                seconds[side].append(taken / count)
                quality[side] = psnr(images[:count], found).tolist()
    first = next(iter(sides))
    print(f"\n{case}, {images.shape[1]} channels, {chosen.iterations} iterations; load {os.getloadavg()[0]:.1f}")
    print(f"{'':34}{'images':>7}{'s / image':>11}{'it / s':>8}{'PSNR':>7}   time of '{first}' over its; PSNR of each")
    for side, (count, steps, _) in sides.items():
        ratio = median(p / t for p, t in zip(seconds[first], seconds[side], strict=True))
        each, mean = median(seconds[side]), sum(quality[side]) / count
        single = " ".join(f"{value:.1f}" for value in quality[side])
        print(f"{side:34}{count:7}{each:11.3f}{steps / each:8.1f}{mean:7.1f}   {ratio:.2f}; {single}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="*", choices=MODELS, default=["lenet", "convnet"])
    parser.add_argument("--data", default="photos")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--singles", type=int, default=2, help="images of the sides that take one at a time")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of the first images")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--breaching-python", metavar="PATH")
    parser.add_argument("--sides", nargs="*", metavar="PATTERN", default=["*"], help="which sides, as `breaching*`")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # the first optimiser of a process imports for seconds
    images, labels, classes = images_of(chosen.data, chosen.images, chosen.skip)
    for case in chosen.cases:
        compare(case, images, labels, classes, chosen)


if __name__ == "__main__":
    main()
