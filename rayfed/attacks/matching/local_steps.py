"""Simulate local steps: a client's update as a differentiable function of its images.

Sources: Geiping et al. 2020, "Inverting Gradients", section 6 (federated averaging); Dimitrov et al. 2022, "Data
Leakage in Federated Averaging", section 4 (simulation of the epochs; here without its order-invariant prior).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from rayfed.attacks.matching.second_derivatives import TOGETHER, Way
from rayfed.gradients import clipped
from rayfed.update import LocalTraining, Named


def local_update(
    model: nn.Module,
    weights: Named,
    buffers: Named,
    images: Tensor,
    labels: Tensor,
    local: LocalTraining,
    way: Way = TOGETHER,
) -> Named:
    """Return the update of one client that trains on `images` with the steps `local`, differentiable in the images.

    The update is the weights before training minus the weights after SGD. `images` is (N, C, H, W), `labels` (N,) int64
    or (N, K) probabilities. Every epoch uses the images in the same order, because only the client knows its
    permutations.
    """
    dtype = images.dtype  # passes may have lower precision than the sum of many small steps
    now, velocity = weights, Named()
    for part in batches(len(images), local):
        coarse = {name: t.to(dtype) for name, t in now.items()}
        found = way.gradient(model, coarse, buffers, images[part], labels[part])
        step = {name: g.to(weights[name].dtype) for name, g in found.items()}
        if local.clip_norm is not None:
            step = clipped(step, local.clip_norm)
        if local.weight_decay:
            step = {name: g + local.weight_decay * now[name] for name, g in step.items()}
        if local.momentum:
            step = velocity = {n: local.momentum * velocity[n] + g if velocity else g for n, g in step.items()}
        now = {name: w - local.lr * step[name] for name, w in now.items()}
    return {name: w - now[name] for name, w in weights.items()}


def many_local_updates(
    model: nn.Module,
    weights: Named,
    buffers: Named,
    images: Tensor,
    labels: Tensor,
    local: LocalTraining,
    own: Named | None = None,
    way: Way = TOGETHER,
) -> Named:
    """Return the updates of Q clients with images (Q, N, C, H, W), as `local_update` computes each update.

    Each tensor has a leading dimension Q, including those of `own`, which are buffers that differ between clients.
    """
    one = way.each(lambda b, x, y: local_update(model, weights, buffers | b, x, y, local, way))
    updates: Named = one(own or {}, images, labels)
    return updates


def batches(samples: int, local: LocalTraining) -> Iterator[slice]:
    """Yield the slice of samples in each local step's batch, epoch after epoch."""
    size, low = local.batch_size or samples, 0
    for _ in range(local.steps):
        yield slice(low, min(low + size, samples))
        low = low + size if low + size < samples else 0
