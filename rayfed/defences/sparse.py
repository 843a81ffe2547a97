"""Shared functions of sparsifying defences: score the values of tensors, and set the lowest-scored ones to zero."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rayfed.defences.base import Task
from rayfed.gradients import flatten, unflatten
from rayfed.update import Named

Importance = Literal["magnitude", "weight", "weight_gradient"]
"""Score of a value: abs(update), abs(weight), or abs(weight * update) as in Refiner (Fan 2024), section 3.2.2."""


def importance(by: Importance, task: Task, tensors: Named) -> Named:
    """Return the importance score of every value of the tensors, by name."""
    if by == "magnitude":
        return {name: t.abs() for name, t in tensors.items()}
    if by == "weight":
        return {name: task.weights[name].abs().to(t) for name, t in tensors.items()}
    return {name: (task.weights[name] * t).abs() for name, t in tensors.items()}


def pruned(tensor: Tensor, scores: Tensor, count: int) -> Tensor:
    """Return the tensor with exactly `count` values set to zero: the values with the smallest scores.

    Ties are resolved by position, so that constant tensors keep some values. Values with a NaN score are never removed.
    """
    if count == 0:
        return tensor
    flat = scores.flatten()
    threshold = flat.kthvalue(count).values  # at least ten times as fast as a sort
    drop = flat < threshold
    ties = (flat == threshold).nonzero().flatten()
    drop[ties[: count - int(drop.sum())]] = True
    return tensor.masked_fill(drop.view_as(tensor), 0.0)


def pruned_together(tensors: Named, scores: Named, count: int) -> Named:
    """Return the tensors with exactly `count` values set to zero: the smallest scores over all tensors."""
    return unflatten(pruned(flatten(tensors), flatten(scores), count), tensors)


def size(tensors: Named) -> int:
    """Return the total number of values in all tensors."""
    return sum(t.numel() for t in tensors.values())
