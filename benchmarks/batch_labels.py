"""Labels of batches, found in gradients of untrained and trained models: the share that is right, beside guessing.

python -m benchmarks.batch_labels --data mnist --root DATA/mnist --model lenet --epochs 6
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.attacks.closed_form.head import Head
from rayfed.attacks.inference.labels import LabelReader
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.models.build import build_model
from rayfed.registry import build
from rayfed.samples import Pixels
from rayfed.update import Observation

TRAINED, PUBLIC, BATCHES = 4000, 500, 24


def observed(model: nn.Module, images: Tensor, labels: Tensor) -> Observation:
    """Return what a server sees of one gradient."""
    weights, buffers = weights_of(model), buffers_of(model)
    update, _ = gradient(model, weights, buffers, images, labels)
    sample = Pixels(*images.shape[1:])
    return Observation(0, 0, weights, buffers, update, 1.0, len(images), sample, classes=10)


def batches(labels: Tensor, size: int, skew: float | None, seed: int) -> Iterator[Tensor]:
    """Yield indices of batches, the classes evenly drawn or with shares of a Dirichlet draw."""
    random = np.random.default_rng(seed)
    for _ in range(BATCHES):
        shares = np.full(10, 0.1) if skew is None else random.dirichlet(np.full(10, skew))
        classes = random.choice(10, size, p=shares)
        yield torch.tensor([random.choice(np.flatnonzero(labels.numpy() == k)) for k in classes])


def right(found: Tensor, true: Tensor) -> float:
    """Return the share of labels found, as a multiset."""
    return float(torch.minimum(found.bincount(minlength=10), true.bincount(minlength=10)).sum()) / len(true)


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> nn.Module:
    """Train with SGD; return the model in evaluation mode."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for _ in range(epochs):
        for index in torch.randperm(len(images)).split(64):
            loss = nn.functional.cross_entropy(model.train()(images[index]), labels[index])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return model.eval()


def main() -> None:
    """Print a row for each size of batch and way to draw classes."""
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ("data", "root", "model"):
        parser.add_argument(f"--{option}", required=True)
    parser.add_argument("--epochs", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    settings = {"root": options.root, "size": 16, "train_samples": TRAINED + PUBLIC, "test_samples": 2000}
    data = build("datasets", options.data, settings).load()
    images, test = (torch.from_numpy(np.array(i)).float() / 255 for i in (data.train_images, data.test_images))
    labels, true = (torch.from_numpy(np.array(y)).long() for y in (data.train_labels, data.test_labels))
    torch.manual_seed(options.seed)
    model = build_model(options.model, {}, tuple(images.shape[1:]), 10, options.seed)
    model = train(model, images[:TRAINED], labels[:TRAINED], options.epochs)
    seen = observed(model, test[:2], true[:2])
    public = {"public": (images[TRAINED:], labels[TRAINED:])}
    readers = [LabelReader(Head.of(model, o), o) for o in (seen, replace(seen, extra=public))]
    for size in (8, 32):
        for skew in (None, 0.5):
            drawn = [true[index] for index in batches(true, size, skew, options.seed)]
            guess = np.mean([right(torch.arange(size) % 10, y) for y in drawn])
            found = [
                np.mean(
                    [
                        right(reader.read(observed(model, test[i], true[i])).numbers, true[i])
                        for i in batches(true, size, skew, options.seed)
                    ]
                )
                for reader in readers
            ]
            print(f"batch {size}, skew {skew}: own {found[0]:.0%}, public {found[1]:.0%}, guessing {guess:.0%}")


if __name__ == "__main__":
    main()
