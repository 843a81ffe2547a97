"""Train the face recogniser on augmented images: moved, mirrored, blurred and noisy images.

Source: Ren 2023 (thesis), section 3.3.4. The thesis trains its recognisers on the attacked images. Here, training uses
the public data if there are any: other images of the same people.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from math import ceil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from rayfed.core import seeds
from rayfed.data.base import Dataset, load_in_memory
from rayfed.errors import DataError
from rayfed.metrics.identity import Identity
from rayfed.metrics.top import TOP
from rayfed.models.pretrained import RECOGNISER, Origin, is_trained, save_recogniser
from rayfed.models.recogniser import Recogniser
from rayfed.samples import in_unit_range
from rayfed.scenario import DataSpec

_BATCH = 64
_STEPS = 500
_LR, _DECAY, _SMOOTHING = 3e-3, 1e-2, 0.1
_ANGLE, _SCALE, _SHIFT = 0.15, 0.15, 0.125
"""Maximum rotation (radians), enlargement (share) and shift (share of half the side)."""
_MIRRORED, _BLURRED = 0.5, 0.3
"""Shares of a batch to mirror and to blur."""
_NOISE = 0.2
"""Maximum standard deviation of noise, for pixels in [0, 1]."""

Progress = Callable[[int, int, float], None]
"""(epochs done, total epochs, mean loss)"""


def train(
    images: np.ndarray,
    labels: np.ndarray,
    people: int,
    *,
    seed: int,
    epochs: int,
    device: torch.device | None = None,
    progress: Progress = lambda *_: None,
) -> Recogniser:
    """Train a face recogniser, and return the recogniser in evaluation mode, on the CPU. Deterministic.

    `images` is (N, C, H, W), `labels` (N,) int64. An epoch leaves out the last, incomplete batch of 64. Raises
    `DataError` if a person has no image.
    """
    if missing := people - len(np.unique(labels)):
        raise DataError(f"a recogniser needs images of all {people} classes; {missing} have no image, so add images")
    device = device or torch.device("cpu")
    # The global random state determines the initial weights and the dropout.
    with seeds.global_stream(seed, "recogniser", cuda=device.type == "cuda"):
        network = Recogniser(people).to(device)
        size = min(_BATCH, len(images))
        batches = len(images) // size
        optimiser = AdamW(network.parameters(), _LR, weight_decay=_DECAY)
        schedule = OneCycleLR(optimiser, _LR, total_steps=epochs * batches)
        draws = seeds.torch_generator(seed, "train-recogniser")
        for epoch in range(1, epochs + 1):
            losses = []
            for index in torch.randperm(len(images), generator=draws)[: batches * size].split(size):
                pixels = in_unit_range(torch.from_numpy(images[index.numpy()]))
                logits = network(varied(pixels, draws).to(device))
                target = torch.from_numpy(labels)[index].to(device)
                loss = F.cross_entropy(logits, target, label_smoothing=_SMOOTHING)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                schedule.step()
                losses.append(loss.detach())
            progress(epoch, epochs, float(torch.stack(losses).mean()))
    return network.cpu().eval()


def varied(images: Tensor, draws: torch.Generator) -> Tensor:
    """Augment images (N, C, H, W) in [0, 1]: rotation, shift, mirroring, blur and noise."""
    count = len(images)
    images = torch.where(_chosen(count, _MIRRORED, draws), images.flip(3), images)
    grid = F.affine_grid(_moves(count, draws), list(images.shape), align_corners=False)
    images = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    blurred = F.interpolate(F.avg_pool2d(images, 2), images.shape[2:], mode="bilinear")
    images = torch.where(_chosen(count, _BLURRED, draws), blurred, images)
    noise = _NOISE * torch.rand(count, 1, 1, 1, generator=draws) * torch.randn(images.shape, generator=draws)
    return (images + noise).clamp(0, 1)


def _chosen(count: int, share: float, draws: torch.Generator) -> Tensor:
    return (torch.rand(count, generator=draws) < share)[:, None, None, None]


def _moves(count: int, draws: torch.Generator) -> Tensor:
    """Return random affine maps (N, 2, 3)."""
    angle, scale, right, down = 2 * torch.rand(4, count, generator=draws) - 1
    angle, scale = _ANGLE * angle, 1 + _SCALE * scale
    turned = torch.stack([scale * angle.cos(), -scale * angle.sin(), scale * angle.sin(), scale * angle.cos()], 1)
    return torch.cat([turned.view(count, 2, 2), _SHIFT * torch.stack([right, down], 1)[..., None]], 2)


def make(
    spec: DataSpec, path: Path, epochs: int | None, seed: int, progress: Progress = lambda *_: None
) -> tuple[bool, Dataset]:
    """Train a recogniser on `faces` and save the file. Returns whether a training was needed, and the data.

    Without `epochs`, it takes about 500 steps. Raises `UserError` if `path` holds another recogniser, or if labels are
    words.
    """
    data = spec.load()
    if data.has_words:
        raise DataError("a recogniser needs one class per image, but the data set's labels are words; use other data")
    images, labels = faces(data)
    epochs = epochs or ceil(_STEPS / max(1, len(images) // _BATCH))
    origin = Origin(spec.model_dump(mode="json"), sha256(images.tobytes()).hexdigest(), seed, epochs)
    if is_trained(path, origin, RECOGNISER):
        return False, data
    network = train(images, labels, len(data.classes), seed=seed, epochs=epochs, progress=progress)
    save_recogniser(path, network, data.classes, origin)
    return True, data


def faces(data: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return a recogniser's training data: public images (N, C, H, W) and their labels (N,).

    If no data are public, these are all training images of the clients.
    """
    if data.public_images is None or data.public_labels is None:
        return load_in_memory(data.train_images), data.train_labels
    return load_in_memory(data.public_images), data.public_labels


def held_out(path: Path, data: Dataset) -> dict[str, float]:
    """Return the top-k metrics (`TOP`), 0..1, of a file's recogniser on the test images."""
    asked, labels = Identity(str(path), data.classes), torch.from_numpy(data.test_labels)
    places = asked(labels, data.sample.tensor(load_in_memory(data.test_images)))
    return {name: float((places <= k).double().mean()) for name, k in TOP.items()}
