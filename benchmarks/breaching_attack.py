"""Inverting Gradients as the package `breaching` 0.1.2 has it, for `attacks.py`, which starts it, and `peers.py`.

    python -m benchmarks.breaching_attack PROBLEMS FOUND ITERATIONS

Says `done` once it has loaded. For each line `COUNT TV` on standard input it attacks the first COUNT of the problems
saved in PROBLEMS, writes their images (COUNT, C, H, W) to FOUND and says `done` again. Settings are its own: cosine,
Adam on the sign with 0.1, decay by ten at 3/8, 5/8 and 7/8, the box; only iterations, start and the weight of the total
variation are given.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any

import breaching
import torch
from breaching.attacks import prepare_attack
from torch import Tensor, nn


def attack(model: nn.Module, problem: dict[str, Any], iterations: int, tv: float | None = None) -> Tensor:
    """Return the images (N, C, H, W) behind a problem's gradients; `breaching` draws the start where it has none."""
    overrides = [f"optim.max_iterations={iterations}"]
    if tv is not None:
        overrides.append(f"regularization.total_variation.scale={tv}")
    with redirect_stdout(sys.stderr):  # it says what it loads
        config = breaching.get_attack_config("invertinggradients", overrides)
    place = {"dtype": torch.float32, "device": next(model.parameters()).device}
    attacker = prepare_attack(model, nn.CrossEntropyLoss(), config, place)
    payload = {
        "parameters": list(model.parameters()),
        "buffers": list(model.buffers()),
        "metadata": SimpleNamespace(shape=problem["shape"], modality="vision"),
    }
    known = {"num_data_points": len(problem["labels"]), "labels": problem["labels"], "local_hyperparams": None}
    shared = {"gradients": problem["gradients"], "buffers": None, "metadata": known}
    found, _ = attacker.reconstruct([payload], [shared], {}, initial_data=problem.get("start"))
    images: Tensor = found["data"]
    return images


def main() -> None:
    path, found, iterations = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    model, problems = torch.load(path, weights_only=False)
    print("done", flush=True)
    for line in sys.stdin:
        count, tv = line.split()
        images = [attack(model, problem, iterations, float(tv)) for problem in problems[: int(count)]]
        torch.save(torch.cat(images), found)
        print("done", flush=True)


if __name__ == "__main__":
    main()
