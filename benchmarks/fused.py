"""A cohort of small models in one fused step beside the loop: processor milliseconds a client, on one thread.

    python -m benchmarks.fused [--clients 4 16] [--repeats 12]

Two steps of SGD on 32 noise images each, no defence. `fused` stacks the clients' weights: linear layers as one batched
product, convolutions as one with a group for each client; its losses are added, so one backward pass has all gradients.
The largest difference between its weights and the loop's is printed: sums run in another order.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from time import process_time

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from actors.process import keep_freed_memory
from benchmarks.work import BATCH, LR, LeNet5
from rayfed.update import Named

STEPS = 2
Side = Callable[[nn.Sequential, Named, Tensor, Tensor], Named]
"""Trains clients with images (K, STEPS, BATCH, C, H, W) from the same weights; returns theirs, stacked."""


def mlp(*hidden: int) -> nn.Sequential:
    sizes = (784, *hidden, 10)
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


MODELS = {"LeNet-5": LeNet5, "MLP 200-200": lambda: mlp(200, 200), "MLP 16": lambda: mlp(16)}


def loop(model: nn.Sequential, start: Named, images: Tensor, labels: Tensor, channels_last: bool = False) -> Named:
    ends = []
    for own, targets in zip(images, labels, strict=True):
        weights = {name: w.clone().requires_grad_() for name, w in start.items()}
        if channels_last:
            weights = {n: w.detach().contiguous(memory_format=_layout(w)).requires_grad_() for n, w in weights.items()}
        for x, y in zip(own, targets, strict=True):
            loss = F.cross_entropy(functional_call(model, weights, (x,)), y)
            _descend(weights, dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True)))
        ends.append(weights)
    return {name: torch.stack([one[name].detach() for one in ends]) for name in start}


def vmapped(model: nn.Sequential, start: Named, images: Tensor, labels: Tensor) -> Named:
    weights = {name: w.expand(len(images), *w.shape).clone() for name, w in start.items()}
    slope = vmap(grad(lambda w, x, y: F.cross_entropy(functional_call(model, w, (x,)), y)))
    for step in range(STEPS):
        _descend(weights, slope(weights, images[:, step], labels[:, step]))
    return weights


def fused(model: nn.Sequential, start: Named, images: Tensor, labels: Tensor, channels_last: bool = False) -> Named:
    weights = {name: w.expand(len(images), *w.shape).clone().requires_grad_() for name, w in start.items()}
    for step in range(STEPS):
        logits = _stacked(model, weights, images[:, step], channels_last)
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, step].flatten(), reduction="sum") / BATCH
        _descend(weights, dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True)))
    return {name: w.detach() for name, w in weights.items()}


def _stacked(model: nn.Sequential, weights: Named, x: Tensor, channels_last: bool) -> Tensor:
    """Return logits (K, BATCH, classes) of K models; between convolutions the clients are groups of channels."""
    clients = len(x)
    hidden = x.transpose(0, 1).flatten(1, 2)
    for name, layer in model.named_children():
        if isinstance(layer, nn.Conv2d):
            w = weights[f"{name}.weight"].flatten(0, 1)
            if channels_last:
                w, hidden = (t.contiguous(memory_format=torch.channels_last) for t in (w, hidden))
            hidden = F.conv2d(hidden, w, weights[f"{name}.bias"].flatten(), padding=layer.padding, groups=clients)
        elif isinstance(layer, nn.Flatten):
            hidden = hidden.reshape(len(hidden), clients, -1).transpose(0, 1)
        elif isinstance(layer, nn.Linear):
            w = weights[f"{name}.weight"].transpose(1, 2)
            hidden = torch.baddbmm(weights[f"{name}.bias"].unsqueeze(1), hidden, w)
        else:
            hidden = layer(hidden)
    return hidden


def _layout(tensor: Tensor) -> torch.memory_format:
    return torch.channels_last if tensor.dim() == 4 else torch.contiguous_format


@torch.no_grad()
def _descend(weights: Named, slope: Named) -> None:
    for name, g in slope.items():
        weights[name].sub_(g, alpha=LR)


SIDES: dict[str, Side] = {
    "loop": loop,
    "loop, channels last": lambda *work: loop(*work, channels_last=True),
    "vmap": vmapped,
    "fused": fused,
    "fused, channels last": lambda *work: fused(*work, channels_last=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--repeats", type=int, default=12)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for title, build in MODELS.items():
        for clients in chosen.clients:
            torch.manual_seed(0)
            model = build()
            start = {name: p.detach().clone() for name, p in model.named_parameters()}
            images, labels = torch.rand(clients, STEPS, BATCH, 1, 28, 28), torch.randint(10, (clients, STEPS, BATCH))
            taken: dict[str, list[float]] = {side: [] for side in SIDES}
            ends: dict[str, Named] = {}
            for _ in range(chosen.repeats):
                for side, train in SIDES.items():
                    began = process_time()
                    ends[side] = train(model, start, images, labels)
                    taken[side].append(1e3 * (process_time() - began) / clients)
            for side, times in taken.items():
                ratio = median(one / other for one, other in zip(taken["loop"][2:], times[2:], strict=True))
                apart = max(float((w - ends["loop"][name]).abs().max()) for name, w in ends[side].items())
                print(
                    f"{title:12}{clients:3} {side:22}{median(times[2:]):7.2f} ms  {ratio:5.2f}  {apart:.0e}", flush=True
                )


if __name__ == "__main__":
    main()
