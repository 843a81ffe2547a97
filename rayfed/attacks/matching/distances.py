"""Distances between gradients: squared L2, and one minus the cosine.

Sources: Zhu et al. 2019, "Deep Leakage from Gradients", equation 2 (squared L2); Geiping et al. 2020, "Inverting
Gradients", equation 4 (one minus cosine).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from rayfed.update import Named

Distance = Callable[[Named, Named], Tensor]
"""Distance of gradients from targets, (Q,). Each tensor has a leading dimension Q."""


def squared_l2(gradients: Named, targets: Named) -> Tensor:
    """Return the squared Euclidean distance between gradients, summed over all layers, (Q,)."""
    return inner(difference := {name: g - targets[name] for name, g in gradients.items()}, difference)


def one_minus_cosine(gradients: Named, targets: Named) -> Tensor:
    """Return one minus the cosine of the angle between gradients, with all layers as one vector, (Q,).

    Supports first derivatives with respect to the gradients only.
    """
    distance: Tensor = _OneMinusCosine.apply(*gradients.values(), *(targets[name].detach() for name in gradients))
    return distance


def inner(left: Named, right: Named) -> Tensor:
    """Return the inner products (Q,) of two sets of gradients, summed over all layers."""
    products = [torch.linalg.vecdot(t.reshape(len(t), -1), right[name].reshape(len(t), -1)) for name, t in left.items()]
    return torch.stack(products).sum(0)


class _OneMinusCosine(torch.autograd.Function):
    """One minus the cosine, |d|^2 / 2|g|^2 with d = g - t |g|/|t|, and its derivative (d - (1 - cos) g) / |g|^2.

    This form avoids cancellation when g and t are nearly equal. It also reads memory a third as often as the products
    of autograd, which take as long as the convolutions of large networks.
    """

    @staticmethod
    def forward(ctx: Any, *both: Tensor) -> Tensor:
        gradients, targets = both[: len(both) // 2], both[len(both) // 2 :]
        length = _lengths(gradients)
        ratio = length / _lengths(targets)
        apart = [torch.addcmul(g, t, _column(ratio, t), value=-1) for g, t in zip(gradients, targets, strict=True)]
        distance = (_lengths(apart) / length).square() / 2
        ctx.save_for_backward(length, distance, *gradients, *apart)
        return distance

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        length, distance, *both = ctx.saved_tensors
        gradients, apart = both[: len(both) // 2], both[len(both) // 2 :]
        factor = slope / length.square()
        slopes = [
            torch.addcmul(d, g, _column(distance, g), value=-1).mul_(_column(factor, g))
            for g, d in zip(gradients, apart, strict=True)
        ]
        return *slopes, *(None for _ in gradients)


def _lengths(tensors: Iterable[Tensor]) -> Tensor:
    """Return the lengths (Q,) of Q vectors given in parts (Q, ...)."""
    lengths: Tensor = vector_norm(torch.stack([vector_norm(t.reshape(len(t), -1), dim=1) for t in tensors]), dim=0)
    return lengths


def _column(numbers: Tensor, like: Tensor) -> Tensor:
    """Return numbers (Q,) reshaped to broadcast over a tensor (Q, ...)."""
    return numbers.reshape(-1, *(1 for _ in like.shape[1:]))
