"""Simulated local steps: a client's update as a differentiable function of its images.

Sources: Geiping et al. 2020, "Inverting Gradients", section 6 (federated averaging); Dimitrov et al. 2022, "Data
Leakage in Federated Averaging", section 4 (simulation of the epochs; here without its order-invariant prior).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.func import grad, vmap

from rayfed.gradients import batch_loss
from rayfed.update import LocalTraining, Named


def local_update(
    model: nn.Module, weights: Named, buffers: Named, images: Tensor, labels: Tensor, local: LocalTraining
) -> Named:
    """Return the weights before minus those after `local`, SGD on one client's images, with the graph to them.

    `images` is (N, C, H, W), `labels` (N,) int64 or (N, K) probabilities. Every epoch takes the images in the same
    order: which permutation the client drew nobody else knows.
    """
    dtype = images.dtype  # the passes may be coarser than the sum of many small steps
    slope = grad(lambda w, x, y: batch_loss(model, {name: t.to(dtype) for name, t in w.items()}, buffers, x, y))
    now, velocity = weights, Named()
    for part in batches(len(images), local):
        step = slope(now, images[part], labels[part])
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
) -> Named:
    """Return the local updates of Q clients with images (Q, N, C, H, W), in one vectorised call; see `local_update`.

    Each tensor has a leading dimension Q, as the tensors of `own` have: buffers of each client's own.
    """
    one = vmap(lambda b, x, y: local_update(model, weights, buffers | b, x, y, local))
    return one(own or {}, images, labels)


def batches(samples: int, local: LocalTraining) -> Iterator[slice]:
    """Yield the samples of every step's batch, epoch after epoch."""
    size, low = local.batch_size or samples, 0
    for _ in range(local.steps):
        yield slice(low, min(low + size, samples))
        low = low + size if low + size < samples else 0
