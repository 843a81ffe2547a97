"""Train the evaluation network, which estimates the share of uniform noise in images.

Source: Fan et al. 2024, "Refiner", section 3.3 (interpolation of images and noise, with the share as target) and
appendix D (eleven shares for every batch, Adam, batches of 128). The paper does not name the loss. Here it is the cross
entropy, which follows from equation 5 for shares between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from math import ceil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam

from rayfed.core import seeds
from rayfed.data.base import load_in_memory
from rayfed.data.images import resize
from rayfed.errors import DataError
from rayfed.models.evaluator import Evaluator
from rayfed.models.pretrained import EVALUATOR, Origin, is_trained, save_evaluator
from rayfed.scenario import DataSpec

_LR = 1e-4
_BATCH = 128
_SHARES = 11
"""Number of noise shares: 0, 0.1, ..., 1."""
_STEPS = 500
_SIDE = 32
"""Side of the tiles, in pixels."""
_GREY, _TWO_TONE = 0.25, 0.25
"""Share of a batch in grey, including the noise, and share in pure black and white, as in scripts."""

FREE_PHOTOGRAPHS = DataSpec.model_validate(
    {"name": "photos", "size": 128, "photographs": ["astronaut", "cat", "coffee", "flower", "rocket", "temple"]}
)
"""Photographs in the public domain or under attribution-only licences, on which the shipped network was trained."""

Progress = Callable[[int, int, float], None]
"""(epochs done, total epochs, mean loss)"""


def train(
    tiles: np.ndarray,
    *,
    seed: int,
    epochs: int,
    device: torch.device | None = None,
    progress: Progress = lambda *_: None,
) -> Evaluator:
    """Train an evaluation network, and return the network in evaluation mode, on the CPU. Deterministic.

    `tiles` is (N, 3, H, W) uint8. In an epoch, every tile is used at each of the eleven noise shares. A batch contains
    all shares. Raises `DataError` for fewer tiles than one batch.
    """
    if len(tiles) < _BATCH:
        raise DataError(
            f"training an evaluation network needs at least {_BATCH} tiles of {_SIDE} pixels, found {len(tiles)}; use "
            f"more or larger images"
        )
    device = device or torch.device("cpu")
    with seeds.global_stream(seed, "evaluator"):
        network = Evaluator().to(device)
    optimiser, draws = Adam(network.parameters(), _LR), seeds.torch_generator(seed, "train-evaluator")
    pixels = torch.from_numpy(tiles)
    for epoch in range(1, epochs + 1):
        losses = []
        for index in torch.randperm(len(pixels), generator=draws)[: len(pixels) // _BATCH * _BATCH].split(_BATCH):
            first = torch.randint(_SHARES, (_BATCH,), generator=draws)
            for turn in range(_SHARES):
                shares = (first + turn) % _SHARES / (_SHARES - 1)
                images = noisy(varied(pixels[index].float() / 255, draws), shares, draws).to(device)
                loss = F.binary_cross_entropy_with_logits(network.logits(images), shares.to(device))
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(loss.detach())
        progress(epoch, epochs, float(torch.stack(losses).mean()))
    return network.cpu().eval()


def make(
    specs: Sequence[DataSpec], path: Path, epochs: int | None, seed: int, progress: Progress = lambda *_: None
) -> bool:
    """Train an evaluation network on data sets and save the file. Returns False if `path` has this network already.

    Without `epochs`, it takes about 500 steps, on a subset if there are many tiles. Raises `UserError` if `path` holds
    another network.
    """
    tiles = np.concatenate([pyramid(public_images(spec)) for spec in specs])
    if epochs is None:
        most = _STEPS // _SHARES * _BATCH
        tiles = tiles[:: ceil(len(tiles) / most)]
        epochs = ceil(most / len(tiles))
    source = {"data": [spec.model_dump(mode="json") for spec in specs]}
    origin = Origin(source, sha256(tiles.tobytes()).hexdigest(), seed, epochs)
    if is_trained(path, origin, EVALUATOR):
        return False
    save_evaluator(path, train(tiles, seed=seed, epochs=epochs, progress=progress), origin)
    return True


def public_images(spec: DataSpec) -> np.ndarray:
    """Return the public training images (N, C, H, W) as uint8, or all training images if none are public."""
    data = spec.load()
    images = load_in_memory(data.train_images if data.public_images is None else data.public_images)
    return images if images.dtype == np.uint8 else (images >> 8).astype(np.uint8)


def pyramid(images: np.ndarray) -> np.ndarray:
    """Cut images (N, C, H, W) uint8 into tiles (M, 3, 32, 32) at full and repeatedly halved resolution.

    Halving adds detail per tile, because large photographs are smooth at full resolution. Images below 32 pixels are
    enlarged.
    """
    if min(images.shape[2:]) < _SIDE:
        images = resize(images, _SIDE)
    count, channels, height, width = images.shape
    down, across = height // _SIDE, width // _SIDE
    grid = images[..., : down * _SIDE, : across * _SIDE].reshape(count, channels, down, _SIDE, across, _SIDE)
    tiles = grid.transpose(0, 2, 4, 1, 3, 5).reshape(-1, channels, _SIDE, _SIDE).repeat(3 // channels, axis=1)
    if min(height, width) < 2 * _SIDE:
        return tiles
    halved = F.avg_pool2d(torch.from_numpy(images).float(), 2).round().byte().numpy()
    return np.concatenate([tiles, pyramid(halved)])


def varied(images: Tensor, draws: torch.Generator) -> Tensor:
    """Convert a quarter of the images (N, 3, H, W) in [0, 1] to pure black and white, like drawings."""
    two_tone = _drawn(len(images), _TWO_TONE, draws)
    return torch.where(two_tone, (images > images.mean((1, 2, 3), keepdim=True)).float(), images)


def noisy(images: Tensor, shares: Tensor, draws: torch.Generator) -> Tensor:
    """Mix images (N, 3, H, W) with shares (N,) of uniform noise, and convert a quarter of the results to grey."""
    noise = torch.rand(images.shape, generator=draws)
    shares = shares[:, None, None, None]
    mixed, grey = (1 - shares) * images + shares * noise, _drawn(len(images), _GREY, draws)
    without_colour = (1 - shares) * images.mean(1, keepdim=True) + shares * noise[:, :1]
    return torch.where(grey, without_colour, mixed)


def _drawn(count: int, share: float, draws: torch.Generator) -> Tensor:
    return (torch.rand(count, generator=draws) < share)[:, None, None, None]
