"""A cohort of small models trained together beside the loop: processor milliseconds a client, on one thread.

    python -m benchmarks.fused [--clients 2 5 13] [--repeats 12]

The engine's own `cohort_updates` by each way of `training.vectorise`: two steps of SGD on 32 noise images each, no
defence. The largest difference between a way's updates and the loop's is printed: sums run in another order.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from time import process_time
from typing import Literal

import torch
from torch import Tensor, nn

from actors.process import keep_freed_memory
from benchmarks.work import BATCH, LR, SAMPLES, LeNet5
from rayfed.defences.base import Batch, Task
from rayfed.gradients import flatten, weights_of
from rayfed.scenario import Training
from rayfed.simulation.client.cohort import cohort_updates
from rayfed.simulation.client.failures import Failed

WAYS: tuple[Literal["loop", "vmap", "fused"], ...] = ("loop", "vmap", "fused")


def mlp(*hidden: int) -> nn.Sequential:
    sizes = (784, *hidden, 10)
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "LeNet-5": LeNet5,
    "MLP 200-200": lambda: mlp(200, 200),
    "MLP 16": lambda: mlp(16),
}


def tasks(model: nn.Module, clients: int) -> list[Task]:
    weights, batch = weights_of(model), (SAMPLES, 1, 28, 28)
    return [
        Task(
            client=client,
            round=0,
            model=model,
            weights=weights,
            buffers={},
            data=Batch(torch.rand(batch), torch.randint(10, batch[:1])),
            generator=torch.Generator(),
            order=client,
        )
        for client in range(clients)
    ]


def train(cohort: list[Task], way: Literal["loop", "vmap", "fused"]) -> Tensor:
    """Return the cohort's updates, (clients, values)."""
    made = cohort_updates(cohort, Training(batch_size=BATCH, lr=LR, vectorise=way), [])
    return torch.stack([flatten(one.tensors) for one in made if not isinstance(one, Failed)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 5, 13])
    parser.add_argument("--repeats", type=int, default=12)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for title, build in MODELS.items():
        for clients in chosen.clients:
            torch.manual_seed(0)
            cohort = tasks(build(), clients)
            taken: dict[str, list[float]] = {way: [] for way in WAYS}
            sent: dict[str, Tensor] = {}
            for _ in range(chosen.repeats):
                for way in WAYS:
                    began = process_time()
                    sent[way] = train(cohort, way)
                    taken[way].append(1e3 * (process_time() - began) / clients)
            for way, times in taken.items():
                ratio = median(one / other for one, other in zip(taken["loop"][2:], times[2:], strict=True))
                apart = float((sent[way] - sent["loop"]).abs().max())
                milliseconds = f"{median(times[2:]):7.2f} ms"
                print(f"{title:12}{clients:3} {way:6}{milliseconds}  {ratio:5.2f}  {apart:.0e}", flush=True)


if __name__ == "__main__":
    main()
