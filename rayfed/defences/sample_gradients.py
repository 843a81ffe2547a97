"""Checks of defences that need more from a model than the gradient of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rayfed.defences.base import Task
from rayfed.errors import UserError
from rayfed.gradients import per_sample_gradients, vmap_refusal
from rayfed.models.notes import note


@contextmanager
def needing_from_model(defence: str, need: str, fix: str) -> Iterator[None]:
    """Turn an error of the user's model into a `UserError` that names the defence, its need and a fix."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model may raise any type
        raise UserError(
            f"{defence}: the defence needs {need}, and the model fails there: {type(error).__name__}: {error}; {fix}, "
            f"or use another defence"
        ) from error


def check_sample_gradients(defence: str, task: Task) -> None:
    """Raise `UserError`, naming the defence, if the model's loss on a single sample has no gradient.

    `task` has a few samples. If vmap refuses the model, add a note on the model: the loop takes longer.
    """
    inputs, labels = task.data.inputs, task.data.labels
    with needing_from_model(defence, "the gradient of each single sample", "let the model take a batch of one sample"):
        per_sample_gradients(task.model, task.weights, task.buffers, inputs, labels)
    if refused := vmap_refusal(task.model, task.weights, task.buffers, inputs[:1], labels[:1]):
        note(task.model, f"{defence} computes gradients in a loop over samples, as vmap refuses the model: {refused}")
