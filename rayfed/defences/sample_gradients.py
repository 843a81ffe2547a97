"""Check that a model supports the per-sample gradients and derivatives that a defence needs."""

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
    """Raise `UserError` with the defence, its requirement and a fix if the user's model fails in the block."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model may raise any type
        raise UserError(
            f"{defence}: the defence needs {need}, but computing them fails: {type(error).__name__}: {error}; {fix}, "
            f"or use another defence"
        ) from error


def check_sample_gradients(defence: str, task: Task) -> None:
    """Raise `UserError` with the defence's name if the gradient of one sample's loss cannot be computed.

    `task` has a few samples of a client. If vmap refuses the model, a note says that the slower loop is used.
    """
    inputs, labels = task.data.inputs, task.data.labels
    with needing_from_model(defence, "per-sample gradients", "make the model accept a batch of one sample"):
        per_sample_gradients(task.model, task.weights, task.buffers, inputs, labels)
    if refused := vmap_refusal(task.model, task.weights, task.buffers, inputs[:1], labels[:1]):
        note(task.model, f"{defence} computes gradients in a slower loop, because vmap refuses the model: {refused}")
