"""Check the labels that a user gives with samples, and convert them to targets of the model's loss."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from rayfed.core.arrays import to_tensor
from rayfed.core.losses import BinaryCrossEntropy, Loss
from rayfed.errors import UserError


def to_targets(labels: Any, loss: Loss, count: int, outputs: int) -> Tensor:
    """Convert the labels of `count` samples to targets of the loss: class indices (N,) int64 or numbers (N, outputs).

    `labels` may be tensors, arrays or lists. Class indices of shape (N, 1), whole floats and one-hot rows (N, outputs)
    become (N,) int64. One number per sample, (N,), becomes (N, 1) float32. Raises `UserError` for other labels.

    >>> from rayfed.core.losses import CrossEntropy
    >>> from rayfed.core.targets import to_targets
    >>> to_targets([[2], [0]], CrossEntropy(), count=2, outputs=3)
    tensor([2, 0])
    """
    if loss.takes not in ("classes", "numbers", "either"):
        raise UserError(
            f"labels: {type(loss).__name__} needs a label per position of a sample, which cannot be recorded: record "
            f"with truth=False"
        )
    given = to_tensor("labels", labels).cpu()
    numbers = loss.takes == "numbers" or (loss.takes == "either" and given.is_floating_point())
    expected = _described(loss, numbers, count, outputs)
    if given.is_complex() or not given.isfinite().all():
        raise UserError(f"labels: found complex, NaN or infinite values; expected {expected}")
    if given.ndim == 0 or len(given) != count:
        raise UserError(f"labels: shape {tuple(given.shape)} for {count} inputs; expected {expected}")
    return _numbers(given, loss, outputs, expected) if numbers else _classes(given, outputs, expected)


def _described(loss: Loss, numbers: bool, count: int, outputs: int) -> str:
    """Describe the labels that a loss takes."""
    if not numbers:
        return f"class indices 0 to {outputs - 1}, integers of shape ({count},), for {type(loss).__name__}"
    among = "from 0 to 1" if isinstance(loss, BinaryCrossEntropy) else "floats"
    return f"numbers ({among}) of shape ({count}, {outputs}), one per output of the model, for {type(loss).__name__}"


def _numbers(given: Tensor, loss: Loss, outputs: int, expected: str) -> Tensor:
    """Convert labels to one number per output of the model, (N, outputs) float32."""
    found = given[:, None] if given.ndim == 1 and outputs == 1 else given
    if found.shape != (len(given), outputs):
        raise UserError(f"labels: shape {tuple(given.shape)}; expected {expected}")
    if isinstance(loss, BinaryCrossEntropy) and not ((found >= 0) & (found <= 1)).all():
        raise UserError(f"labels: values from {float(found.min()):g} to {float(found.max()):g}; expected {expected}")
    found = found.float()
    if not found.isfinite().all():
        raise UserError(f"labels: values beyond the range of float32; expected {expected}")
    return found


def _classes(given: Tensor, outputs: int, expected: str) -> Tensor:
    """Convert labels to class indices (N,) int64."""
    found = given
    if given.ndim == 2 and given.shape[1] == 1:
        found = given[:, 0]
    elif given.ndim == 2 and given.shape[1] == outputs and _is_one_hot(given):
        warnings.warn("labels: one-hot rows are converted to class indices", stacklevel=4)
        found = given.double().argmax(1)
    if found.ndim != 1:
        raise UserError(
            f"labels: shape {tuple(given.shape)}; expected {expected}. If your loss has other targets, give it: "
            f"record(..., loss='binary_cross_entropy')"
        )
    if found.is_floating_point() and (found != found.round()).any():
        raise UserError(
            f"labels: floats such as {float(found[found != found.round()][0]):g}; expected {expected}. If your loss "
            f"has other targets, give it: record(..., loss='mean_squared_error')"
        )
    outside = (found.double() < 0) | (found.double() >= outputs)
    if outside.any():
        place = int(outside.nonzero()[0])
        raise UserError(f"labels: the label at index {place} is {found[place].item():g}; expected {expected}")
    return found.long()


def _is_one_hot(rows: Tensor) -> bool:
    """Return whether each row consists of one 1 and zeros."""
    return bool(((rows == 0) | (rows == 1)).all() and (rows.double().sum(1) == 1).all())
