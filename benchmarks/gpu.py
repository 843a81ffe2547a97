"""What one card does with this code: cohorts, compiled steps, copies, attacks, networks at 224 pixels, memory.

    python -m benchmarks.gpu [--seconds 8] [--write docs/gpu.md]     # about ten minutes on one card
    python -m benchmarks.gpu --tiny --device cpu                      # all of it at tiny size, to see that it runs

Cohorts are trained as a client actor trains them, with the weights' and samples' way to the card, and beside a plain
loop that does the same on the card. The first shape is that of `benchmarks.engine`, the second that of pfl-research's
public CIFAR-10 configuration (benchmarks/image_classification/configs/baseline.yaml: 50 clients of 50 images, batches
of 10, rate 0.1, two convolutions and a hidden layer) without its dropout, which keeps a cohort from being one call.
Images are noise: what a step costs does not depend on them. Each figure is a median over `--seconds`, after a first
call that is not counted. What needs more memory than there is says so. `--write` puts the tables into a page.

A compiled step is the gradient of one batch, or of a batch of each client under vmap, traced to operations by `make_fx`
and compiled by `torch.compile`, which rayfed does not do; with `--tiny` its backend is one that compiles nothing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import isnan
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from benchmarks.attacks import MODELS, generators, images_of, observe
from rayfed import gradients
from rayfed import scenario as scenarios
from rayfed.attacks.base import Attack
from rayfed.attacks.closed_form.april import April
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.core.memory import copy_to_host
from rayfed.data.base import Dataset
from rayfed.models.build import build_model
from rayfed.simulation.client.runtime import ClientRuntime
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.machine import set_gpu_arithmetic

HEADING = "## Measured"
_GIB = 2**30


class SimpleCnn(nn.Sequential):
    """Two convolutions of 3x3 (32 and 64 channels), a pool, a hidden layer of 128."""

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        channels, height, width = image_shape
        super().__init__(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
            nn.ReLU(),
            nn.Linear(128, classes),
        )


@dataclass(frozen=True)
class Shape:
    """A cohort and what each of its clients does: one epoch of plain SGD."""

    name: str
    model: str
    image: tuple[int, int, int]
    clients: int
    samples: int
    batch: int
    lr: float

    def __str__(self) -> str:
        return f"{self.name}: {self.clients} clients of {self.samples} images, batch {self.batch}"

    def runtime(self, vectorise: str, device: torch.device, precision: str = "float32") -> ClientRuntime:
        """The clients of this shape on a device."""
        training = f"batch_size: {self.batch}, lr: {self.lr}, vectorise: {vectorise}, precision: {precision}"
        scenario = scenarios.parse(
            f"{{name: gpu, model: '{self.model}', training: {{epochs: 1, {training}}}, "
            f"federation: {{rounds: 1, clients: {self.clients}}}}}"
        )
        images, labels = self.data()
        data = Dataset(images, labels, images[:1], labels[:1], tuple("0123456789"))
        return ClientRuntime(scenario, data, np.split(np.arange(len(labels)), self.clients), device)

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Noise (N, C, H, W) uint8 and labels (N,) int64 of all clients, one after another."""
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (self.clients * self.samples, *self.image), dtype=np.uint8)
        return images, rng.integers(0, 10, len(images))


LENET = Shape("LeNet-5", "benchmarks.work:LeNet5", (1, 28, 28), 50, 64, 32, 0.05)
CIFAR10 = Shape("pfl-research's CIFAR-10", "benchmarks.gpu:SimpleCnn", (3, 32, 32), 50, 50, 10, 0.1)


@dataclass(frozen=True)
class Plan:
    """How large everything is, and how long each figure is measured."""

    device: torch.device
    seconds: float
    shapes: tuple[Shape, ...] = (LENET, CIFAR10)
    sizes: tuple[int, ...] = (1, 2, 5, 10, 25, 50, 100, 200)
    processes: tuple[int, ...] = (1, 2, 4, 8)
    images: int = 32
    iterations: int = 50
    attacked: tuple[str, ...] = ("lenet", "convnet")
    """Networks of `benchmarks.attacks`."""
    large: tuple[tuple[str, int], ...] = (("resnet18", 224), ("vit_b_16", 224))
    """Functions below, and how large their images are."""
    large_batch: int = 8
    values: int = 11_000_000
    """Of a copy: those of a ResNet-18."""
    backend: str = "inductor"
    """Of `torch.compile`."""
    compilers: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {"compiled": {}, "compiled, CUDA graphs": {"triton.cudagraphs": True}}
    )
    """Sides that are compiled, with the backend's options."""


def tiny(plan: Plan) -> Plan:
    """The same tables of the smallest sizes, with small networks in place of the large ones."""
    shapes = tuple(replace(shape, clients=2, samples=4, batch=2) for shape in plan.shapes)
    plan = replace(plan, seconds=0.0, shapes=shapes, sizes=(1, 2), processes=(2,), images=2, iterations=2)
    return replace(
        plan,
        attacked=("lenet", "convnet16"),
        large=(("resnet18", 32), ("vit_tiny", 32)),
        large_batch=2,
        values=1000,
        backend="aot_eager",
        compilers={"compiled": {}},
    )


def resnet18(image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """torchvision's ResNet-18."""
    return torchvision.models.resnet18(num_classes=classes)


def vit_b_16(image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """torchvision's ViT-B/16, with a head that is not 0: nothing behind that would have a gradient."""
    made = torchvision.models.vit_b_16(num_classes=classes)
    nn.init.normal_(made.get_parameter("heads.head.weight"), std=0.02)
    return made


def vit_tiny(image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The same of one layer, in patches of 8 pixels."""
    made = torchvision.models.VisionTransformer(image_shape[1], 8, 1, 2, 16, 32, num_classes=classes)
    nn.init.normal_(made.get_parameter("heads.head.weight"), std=0.02)
    return made


@dataclass(frozen=True)
class Figure:
    """What one piece of work takes."""

    seconds: float
    """Median of a call (s)."""
    gib: float
    """Most memory that tensors took at once; NaN where the device does not count it."""


def measured(plan: Plan, work: Callable[[], object]) -> Figure | None:
    """Repeat work for a while and return what it takes; None where memory does not suffice."""
    cuda = plan.device.type == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    taken: list[float] = []
    try:
        work()
        wait()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        until = perf_counter() + plan.seconds
        while not taken or perf_counter() < until:
            began = perf_counter()
            work()
            wait()
            taken.append(perf_counter() - began)
        return Figure(median(taken), torch.cuda.max_memory_allocated() / _GIB if cuda else float("nan"))
    except torch.OutOfMemoryError:
        return None
    finally:
        if cuda:
            torch.cuda.empty_cache()


def trained(shape: Shape, vectorise: str, plan: Plan, precision: str = "float32") -> Callable[[], object]:
    """A round of a cohort, as a client actor does it; each call is another round."""
    runtime, rounds = shape.runtime(vectorise, plan.device, precision), count()
    arm = runtime.arm("none")
    weights = {name: w.cpu() for name, w in arm.weights.items()}  # they come from the server
    clients = [tuple(range(shape.clients))]
    return lambda: runtime.cohorts("none", Sent(next(rounds), weights, arm.buffers), 0, clients, {})


def plain(shape: Shape, plan: Plan) -> Callable[[], object]:
    """A round of the same clients in the loop that everyone writes, on the device."""
    model = build_model(shape.model, {}, shape.image, 10, seed=0).to(plan.device)
    start = {name: w.clone() for name, w in model.state_dict().items()}
    stored = [np.split(part, shape.clients) for part in shape.data()]

    def play() -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for images, labels in zip(*stored, strict=True):
            model.load_state_dict(start)
            optimiser = torch.optim.SGD(model.parameters(), lr=shape.lr)
            inputs = torch.from_numpy(images).to(plan.device).float().div_(255)
            targets = torch.from_numpy(labels).to(plan.device)
            for index in torch.randperm(len(targets)).to(plan.device).split(shape.batch):
                optimiser.zero_grad()
                F.cross_entropy(model(inputs[index]), targets[index]).backward()
                optimiser.step()
            for name, w in model.state_dict().items():
                total[name] = total[name] + w if name in total else w.clone()
        return total

    return play


def cohorts(plan: Plan) -> Iterator[list[str]]:
    """Rows: clients a second of each shape, side by side."""
    yield ["cohort", "side", "clients/s", "over the plain loop", "GiB"]
    for shape in plan.shapes:
        first: Figure | None = None
        sides = {
            "plain loop": plain(shape, plan),
            "client after client": trained(shape, "loop", plan),
            "one call (vmap)": trained(shape, "vmap", plan),
            "one step of all (fused)": trained(shape, "fused", plan),
        }
        for side, work in sides.items():
            figure = measured(plan, work)
            first = first or figure
            ratio = f"{first.seconds / figure.seconds:.2f}" if first and figure else ""
            rate = told(figure, lambda f, n=shape.clients: n / f.seconds)  # type: ignore[misc]
            yield [str(shape), side, rate, ratio, memory(figure)]


def compiled(plan: Plan) -> Iterator[list[str]]:
    """Rows: the gradient of a client's batch, and of all clients' under vmap, as it is and compiled."""
    yield ["gradient", "side", "s", "over as it is", "first call (s)", "same bits twice", "off by", "GiB"]
    for shape in plan.shapes:
        for clients in (1, shape.clients):
            step, given = _step(shape, clients, plan.device)
            expected = step(*given)
            sides = {"as it is": step} | {
                side: _compiled(step, given, plan.backend, options) for side, options in plan.compilers.items()
            }
            first: Figure | None = None
            for side, work in sides.items():
                began = perf_counter()
                found = work(*given)
                off = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
                started = perf_counter() - began
                repeats = all(map(torch.equal, found, work(*given)))
                figure = measured(plan, partial(work, *given))
                first = first or figure
                ratio = f"{first.seconds / figure.seconds:.2f}" if first and figure else ""
                told_s = told(figure, lambda f: f.seconds)
                name = f"{shape.name}, {clients} x {shape.batch} images"
                bits = "yes" if repeats else "no"
                yield [name, side, told_s, ratio, f"{started:.2g}", bits, f"{off:.1g}", memory(figure)]


Step = Callable[..., list[Tensor]]


def _step(shape: Shape, clients: int, device: torch.device) -> tuple[Step, list[Tensor]]:
    """A gradient as a function of inputs, labels and weights, with a dimension of clients if there are several."""
    model = build_model(shape.model, {}, shape.image, 10, seed=0).to(device)
    weights, buffers = gradients.weights_of(model), gradients.buffers_of(model)
    images, labels = (torch.from_numpy(part[: shape.batch]).to(device) for part in shape.data())

    def loss(weights: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        return gradients.batch_loss(model, weights, buffers, inputs, labels)

    def step(inputs: Tensor, labels: Tensor, *tensors: Tensor) -> list[Tensor]:
        slopes, value = grad_and_value(loss)(dict(zip(weights, tensors, strict=True)), inputs, labels)
        return [value, *slopes.values()]

    given = [images.float().div_(255), labels, *weights.values()]
    if clients == 1:
        return step, given
    return vmap(step), [tensor.expand(clients, *tensor.shape).clone() for tensor in given]


def _compiled(step: Step, given: Sequence[Tensor], backend: str, options: dict[str, Any]) -> Step:
    """The same compiled at its first call, for these shapes; what it returns is not written over by the next call."""
    made: list[Step] = []

    def play(*tensors: Tensor) -> list[Tensor]:
        if not made:
            graph = make_fx(step, tracing_mode="fake")(*given)
            made.append(torch.compile(graph, backend=backend, fullgraph=True, dynamic=False, options=options or None))
        torch.compiler.cudagraph_mark_step_begin()
        return [tensor.clone() for tensor in made[0](*tensors)]

    return play


def copies(plan: Plan) -> Iterator[list[str]]:
    """Rows: copies of a large update to the card and back, with memory that is pinned and that is not."""
    yield ["copy", "s", "values"]
    here = torch.ones(plan.values)
    there = here.to(plan.device)
    ways: dict[str, Callable[[], object]] = {
        "to the card": lambda: here.to(plan.device, copy=True),
        "back, not pinned": lambda: there.to("cpu", copy=True),
        "back, as actors send it": lambda: copy_to_host(there),
    }
    for way, work in ways.items():
        yield [way, told(measured(plan, work), lambda f: f.seconds), str(plan.values)]


def packing(plan: Plan) -> Iterator[list[str]]:
    """Rows: how much of a card a cohort takes, by its size."""
    yield ["clients in one call", "clients/s", "GiB", "MiB a client"]
    for size in plan.sizes:
        figure = measured(plan, trained(replace(plan.shapes[-1], clients=size), "vmap", plan))
        yield [str(size), told(figure, lambda f, n=size: n / f.seconds), memory(figure), memory(figure, size / 1024)]  # type: ignore[misc]


def actors(plan: Plan) -> Iterator[list[str]]:
    """Rows: several processes on one card, each with a cohort of its own."""
    yield ["processes on the card", "clients/s of all", "GiB in use on the card"]
    for processes in plan.processes:
        with ProcessPoolExecutor(processes, get_context("spawn"), _prepare, (plan,)) as pool:
            try:
                list(pool.map(_work, [0.0] * processes))  # they start up
                done = list(pool.map(_work, [plan.seconds] * processes))
            except torch.OutOfMemoryError:
                yield [str(processes), "out of memory", "out of memory"]
                continue
        used, rate = max(gib for _, gib in done), sum(rate for rate, _ in done)
        yield [str(processes), f"{rate:.3g}", memory(Figure(0.0, used))]


def _prepare(plan: Plan) -> None:
    global _plan, _play
    torch.set_num_threads(1)
    _plan, _play = plan, trained(plan.shapes[-1], "vmap", plan)


def _work(seconds: float) -> tuple[float, float]:
    """Clients a second of this process, and GiB that all take on the card (NaN on a CPU)."""
    figure = measured(replace(_plan, seconds=seconds), _play)
    if figure is None:
        raise torch.OutOfMemoryError("a cohort needs more memory than is left")
    used = float("nan")
    if _plan.device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        used = (total - free) / _GIB
    return _plan.shapes[-1].clients / figure.seconds, used


def attacks(plan: Plan) -> Iterator[list[str]]:
    """Rows: attacks on several victims together and one by one."""
    yield ["attack", "victims", "iterations/s of all", "over one by one", "GiB"]
    images, labels, classes = images_of("photos", plan.images, 0)
    for case in plan.attacked:
        name, parameters = MODELS[case]
        model = build_model(name, parameters, tuple(images.shape[1:]), classes, seed=11).eval()
        seen = [observe(model, x[None], y[None], classes).to(plan.device) for x, y in zip(images, labels, strict=True)]
        model.to(plan.device)
        attack = InvertingGradients(iterations=plan.iterations)

        def play(victims: int, attack: Attack = attack, seen: list = seen, model: nn.Module = model) -> object:  # type: ignore[type-arg]
            return attack.reconstruct(seen[:victims], model, generators(victims))

        alone, together = (measured(plan, partial(play, victims)) for victims in (1, plan.images))
        for victims, figure in ((1, alone), (plan.images, together)):
            ratio = f"{victims * alone.seconds / figure.seconds:.2f}" if alone and figure else ""
            rate = told(figure, lambda f, n=victims: n * plan.iterations / f.seconds)  # type: ignore[misc]
            yield [f"inverting_gradients, {case}", str(victims), rate, ratio, memory(figure)]


def large(plan: Plan) -> Iterator[list[str]]:
    """Rows: a client's step of large networks by arithmetic, and an attack on each."""
    yield ["network", "work", "arithmetic", "s", "GiB"]
    for name, size in plan.large:
        model = f"benchmarks.gpu:{name}"
        shape = Shape(name, model, (3, size, size), 1, plan.large_batch, plan.large_batch, 0.01)
        for arithmetic in ("float32", "tf32", "bf16"):
            with tf32(arithmetic == "tf32"):
                precision = "bf16" if arithmetic == "bf16" else "float32"
                figure = measured(plan, trained(shape, "loop", plan, precision))
            work = f"step of a client, batch {plan.large_batch} at {size}"
            yield [name, work, arithmetic, told(figure, lambda f: f.seconds), memory(figure)]
        built = build_model(model, {}, shape.image, 10, seed=0).eval()
        [image, *_], [label, *_] = (torch.from_numpy(part) for part in shape.data())
        seen = [observe(built, image[None].float() / 255, label[None], 10).to(plan.device)]
        is_vit = name.startswith("vit")
        attack: Attack = April() if is_vit else InvertingGradients(iterations=plan.iterations)
        figure = measured(plan, partial(attack.reconstruct, seen, built.to(plan.device), generators(1)))
        work = "april, one image" if is_vit else f"inverting_gradients, {plan.iterations} iterations, one image"
        yield [name, work, "float32", told(figure, lambda f: f.seconds), memory(figure)]


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Let the GPU round to TF32 for a while; before and after it does not."""
    set_gpu_arithmetic(on)
    try:
        yield
    finally:
        set_gpu_arithmetic(False)


def told(figure: Figure | None, value: Callable[[Figure], float]) -> str:
    """A value of a figure in three digits, or why there is none."""
    return f"{value(figure):.3g}" if figure else "out of memory"


def memory(figure: Figure | None, share: float = 1.0) -> str:
    """GiB of a figure over `share`, or why there are none."""
    if figure is None:
        return "out of memory"
    return "not measured" if isnan(figure.gib) else f"{figure.gib / share:.2f}"


TABLES = {
    "Cohorts": cohorts,
    "Compiled gradients": compiled,
    "Copies": copies,
    "Memory of a cohort": packing,
    "Several actors on one card": actors,
    "Attacks": attacks,
    "Large networks": large,
}


def section(plan: Plan, command: str) -> str:
    """Measure everything and return the section of the page, in Markdown."""
    device = torch.cuda.get_device_name() if plan.device.type == "cuda" else "a CPU, at sizes that say nothing"
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "an unknown commit"
    versions = f"PyTorch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    lines = [HEADING, "", f"`{command}` at {commit}, on {device}; {versions}."]
    for title, rows in TABLES.items():
        print(f"\n{title}", flush=True)
        table = []
        for row in rows(plan):
            table.append(row)
            print("  " + " | ".join(row), flush=True)
        lines += ["", f"### {title}", "", *markdown(table)]
    return "\n".join(lines) + "\n"


def markdown(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, of which the first row is the head."""
    lines = [f"| {' | '.join(row)} |" for row in table]
    return [lines[0], f"|{' --- |' * len(table[0])}", *lines[1:]]


def replaced(page: str, section: str) -> str:
    """A page with this section in place of the one of the same heading."""
    found = re.search(rf"^{HEADING}\n.*?(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    if not found:
        raise ValueError(f"the page has no section '{HEADING}'")
    left, right = page[: found.start()], page[found.end() :]
    return left + section + ("\n" if right else "") + right


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each figure")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, each figure once")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here; --tiny --device cpu shows that everything runs")
    if given.write and (given.tiny or given.device == "cpu"):
        parser.error("--write is for figures of a GPU at full size")
    set_gpu_arithmetic(False)
    plan = Plan(torch.device(given.device), given.seconds)
    made = section(tiny(plan) if given.tiny else plan, "python -m benchmarks.gpu")
    if given.write:
        given.write.write_text(replaced(given.write.read_text(), made))


if __name__ == "__main__":
    main()
