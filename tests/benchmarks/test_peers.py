"""The benchmark against peers: iterations that fill a budget, and the same problem for every side."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from torch import Tensor, nn

from benchmarks.attacks import observe
from benchmarks.peers import iterations_in, played
from rayfed.models.build import build_model
from rayfed.update import Observation


@pytest.mark.parametrize(("fixed", "each", "fitting"), [(2, 0.5, 96), (0.1, 0.01, 4990), (1, 30, 2), (1, 90, 1)])
def test_iterations_fill_the_budget_beside_what_a_call_costs_anyway(fixed: float, each: float, fitting: int) -> None:
    calls = count()
    assert iterations_in(50, lambda n: fixed + each * n + (5 if next(calls) == 0 else 0)) == fitting


def test_images_of_a_batch_are_scored_in_their_best_order() -> None:
    images = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model = build_model("lenet", {}, (3, 8, 8), 10, seed=0)
    seen = [observe(model, x, torch.arange(2), 10) for x in images.split(2)]

    def swapped(model: nn.Module, one: Observation, iterations: int, seed: int) -> Tensor:
        return images[2 * seed : 2 * seed + 2].flip(0) + 0.1

    _, quality = played(swapped, model, images, seen, 1)
    assert quality == pytest.approx([20.0] * 4, abs=1e-3)
