"""What closed forms read off the gradient of one batch: `python -m benchmarks.closed_forms`.

Untrained models, digits of 8x8 and rows of `diabetes` that are drawn anew for every seed; a minute on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import process_time

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.datasets import load_digits
from torch import Tensor, nn

from rayfed.attacks.base import Attack
from rayfed.attacks.closed_form.analytic import Analytic
from rayfed.attacks.closed_form.peel import Peel
from rayfed.attacks.closed_form.spear import Spear
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.registry import build
from rayfed.samples import Pixels, Records, SampleSpec
from rayfed.update import Observation

SEEDS = range(100, 103)
EXACT = 40.0
"""PSNR, in dB, from which a sample counts as read."""


def digits(count: int, seed: int) -> tuple[Tensor, Tensor, SampleSpec]:
    """Return images (count, 1, 8, 8), labels and what images are."""
    data = load_digits()
    chosen = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))[:count].numpy()
    images = torch.from_numpy(data.images[chosen]).float()[:, None] / 16
    return images, torch.from_numpy(data.target[chosen]).long(), Pixels(1, 8, 8)


def patients(count: int, seed: int) -> tuple[Tensor, Tensor, SampleSpec]:
    """Return records (count, 1, 1, 11), labels and what records are."""
    data = build("datasets", "diabetes", {}).load()
    chosen = np.sort(torch.randperm(300, generator=torch.Generator().manual_seed(seed))[:count].numpy())
    return (
        torch.from_numpy(data.train_images[chosen]).float() / 255,
        torch.from_numpy(data.train_labels[chosen]),
        data.sample,
    )


def perceptron(
    features: int, hidden: tuple[int, ...], classes: int, activation: Callable[[], nn.Module], bias: bool = True
) -> nn.Module:
    """Return fully connected layers, those in front of the last without bias on request."""
    layers: list[nn.Module] = [nn.Flatten()]
    for units in hidden:
        layers += [nn.Linear(features, units, bias=bias), activation()]
        features = units
    return nn.Sequential(*layers, nn.Linear(features, classes))


CASES: list[tuple[str, Attack, int, Callable[[], nn.Module]]] = [
    (f"{name}, ReLU (200, 200), batch {size}", attack, size, lambda: perceptron(64, (200, 200), 10, nn.ReLU))
    for size in (8, 16, 24)
    for name, attack in (("analytic", Analytic()), ("spear", Spear()))
] + [
    (
        "spear, ReLU (200, 200) without bias, batch 8",
        Spear(),
        8,
        lambda: perceptron(64, (200, 200), 10, nn.ReLU, False),
    ),
    ("peel, sigmoid (200, 200), batch 8", Peel(), 8, lambda: perceptron(64, (200, 200), 10, nn.Sigmoid)),
    ("peel, sigmoid (200, 200), batch 16", Peel(), 16, lambda: perceptron(64, (200, 200), 10, nn.Sigmoid)),
    ("peel, GELU (400, 200), batch 24", Peel(), 24, lambda: perceptron(64, (400, 200), 10, nn.GELU)),
    (
        "analytic, ReLU (200, 200) without bias, batch 1",
        Analytic(),
        1,
        lambda: perceptron(64, (200,), 10, nn.ReLU, False),
    ),
]
TABLES: list[tuple[str, Attack, Callable[[], nn.Module]]] = [
    (f"{name}, ReLU {hidden}, batch 8", attack, lambda hidden=hidden: perceptron(11, hidden, 2, nn.ReLU))  # type: ignore[misc]
    for hidden in ((64,), (200, 200))
    for name, attack in (("analytic", Analytic()), ("spear", Spear()))
]


def played(attack: Attack, model: nn.Module, drawn: tuple[Tensor, Tensor, SampleSpec]) -> tuple[Tensor, Tensor]:
    """Return the samples that an attack finds and the true ones, in the same order."""
    inputs, labels, sample = drawn
    weights, buffers = weights_of(model), buffers_of(model)
    update, _ = gradient(model, weights, buffers, inputs, labels)
    classes = int(model(inputs).shape[1])
    seen = Observation(0, 0, weights, buffers, update, 1.0, len(inputs), sample.published(), classes)
    (result,) = attack.reconstruct([seen], model, [torch.Generator().manual_seed(0)])
    errors = (result.images[:, None] - inputs).square().flatten(2).mean(2)
    rows, columns = linear_sum_assignment(errors)
    return result.images[rows], inputs[columns]


def report() -> Iterator[str]:
    """Yield the lines of the tables."""
    yield "| attack, model | read | mean PSNR | s a batch |\n| --- | --- | --- | --- |"
    for name, attack, size, build_one in CASES:
        values, began = [], process_time()
        for seed in SEEDS:
            torch.manual_seed(seed)
            guess, true = played(attack, build_one(), digits(size, seed))
            values.append(-10 * (guess - true).square().flatten(1).mean(1).clamp(min=1e-16).log10())
        psnr, seconds = torch.cat(values), (process_time() - began) / len(SEEDS)
        yield f"| {name} | {int((psnr > EXACT).sum())} of {len(psnr)} | {psnr.mean():.0f} dB | {seconds:.1f} |"
    yield "\n| attack, model on `diabetes` | rows read | features found |\n| --- | --- | --- |"
    for name, attack, build_one in TABLES:
        read, features = [], []
        for seed in SEEDS:
            torch.manual_seed(seed)
            drawn = patients(8, seed)
            guess, true = played(attack, build_one(), drawn)
            assert isinstance(drawn[2], Records)
            read.append((guess - true).square().flatten(1).mean(1) < 10 ** (-EXACT / 10))
            features.append(drawn[2].found(true, guess).double())
        share = torch.cat(features).mean()
        yield f"| {name} | {int(torch.cat(read).sum())} of {8 * len(SEEDS)} | {100 * share:.0f} % |"


if __name__ == "__main__":
    for line in report():
        print(line, flush=True)
