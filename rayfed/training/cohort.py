"""A cohort's updates: client after client, or all clients in one `torch.func.vmap` call, with the same numbers.

Measured on CPU, the loop is the faster one for LeNet; on CUDA one call for the whole cohort keeps the device busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from rayfed.aggregation.base import Aggregation
from rayfed.defences.base import Batch, Defence, GradientMethod, Task
from rayfed.errors import UserError
from rayfed.models.build import is_stochastic, uses_batch_statistics
from rayfed.objective import are_words
from rayfed.scenario import Training
from rayfed.training.local import (
    batches,
    data_method,
    functional_gradient,
    gradient_method,
    returned_buffers,
    trained_samples,
    update_method,
    wrap_updates,
)
from rayfed.training.optimiser import LocalOptimiser
from rayfed.update import Named, Update


def cohort_updates(tasks: Sequence[Task], training: Training, defences: Sequence[Defence]) -> Iterator[Update]:
    """The updates of one cohort, in the order of `tasks`; one at a time, so that a sum over them needs little memory.

    Raises `UserError` when the scenario demands vmap and a link of the chain cannot follow.
    """
    if _vectorised(tasks[0], training, defences):
        return _vmapped(tasks, training, defences)
    update = update_method(training, defences)
    return (update(task) for task in tasks)


def recorded(
    arm: str, updates: Iterable[Update], rule: Aggregation, rows: list[dict[str, Any]], together: float
) -> Iterator[Any]:
    """What is sent of the updates as they come, each checked and noted in `rows`; `together` is a client's part of
    common work (s).

    Raises `UserError` for one that is not finite.
    """
    began = perf_counter()
    for update in updates:
        if not all(bool(torch.isfinite(t).all()) for t in [*update.tensors.values(), *update.buffers.values()]):
            raise UserError(
                f"client {update.client} sent an update that is not finite in round {update.round} of arm '{arm}': "
                f"training has diverged; lower training.lr, or look at the arm's defences"
            )
        sent = rule.sends(update)
        now = perf_counter()
        rows.append(
            {
                "arm": arm,
                "round": update.round,
                "client": update.client,
                "samples": update.samples,
                "loss": update.loss,
                "seconds": together + now - began,
                "sent_bytes": sent.sent_bytes,
                "clipped": rule.clipped(update),
            }
        )
        yield sent
        began = perf_counter()


def _vectorised(task: Task, training: Training, defences: Sequence[Defence]) -> bool:
    if training.vectorise == "loop":
        return False
    obstacle = _obstacle(task, defences)
    if training.vectorise == "vmap":
        if obstacle:
            raise UserError(f"training.vectorise: vmap is not possible: {obstacle}; use auto or loop")
        return True
    return next(iter(task.weights.values())).is_cuda and obstacle is None


def _obstacle(task: Task, defences: Sequence[Defence]) -> str | None:
    """What keeps a cohort from being one call, in words; None when nothing does."""
    for defence in defences:
        if not defence.vectorises:
            return f"the defence {type(defence).__name__} works client by client"
    if task.private:
        return "each client has private layers of its own"
    if are_words(task.data.labels):
        return "CTC, by which words are learnt, takes one batch at a time"
    if uses_batch_statistics(task.model):
        return "batch norm in training mode would see the padding of smaller clients (model.batch_norm: eval would do)"
    if is_stochastic(task.model):
        return "what draws random numbers in the model, such as dropout, has one stream for all clients"
    return None


def _vmapped(tasks: Sequence[Task], training: Training, defences: Sequence[Defence]) -> Iterator[Update]:
    """Train all clients together, then send each result through its own client's `wrap_update` chain."""
    trained = {update.client: update for update in _train_together(tasks, training, defences)}
    update = wrap_updates(lambda task: trained[task.client], defences)
    return (update(task) for task in tasks)


def _train_together(tasks: Sequence[Task], training: Training, defences: Sequence[Defence]) -> Iterator[Update]:
    first = tasks[0]
    local = [data_method(defences)(task) for task in tasks]
    schedules = [list(batches(len(d.labels), training, t.order)) for d, t in zip(local, tasks, strict=True)]
    weights = {name: w.expand(len(tasks), *w.shape).clone() for name, w in first.weights.items()}
    step = vmap(_stepper(first, gradient_method(defences, functional_gradient)))
    optimiser = LocalOptimiser(training)
    sent: Named = {}
    losses = []
    for k in range(max(map(len, schedules))):
        batch, active = _padded(local, schedules, k)
        sent, loss = step(weights, batch.images, batch.labels, batch.mask)
        losses.append(torch.where(active, loss, torch.nan))
        if training.algorithm == "fedavg":
            _step_active(optimiser, weights, sent, active)
    if training.algorithm == "fedavg":
        sent = {name: w - weights[name] for name, w in first.weights.items()}
    mean_losses = torch.stack(losses).nanmean(dim=0).tolist()
    for i, task in enumerate(tasks):
        tensors = {name: t[i] for name, t in sent.items()}
        samples = trained_samples(len(task.data.labels), training)
        yield Update(task.client, task.round, tensors, returned_buffers(task), samples, mean_losses[i])


def _stepper(task: Task, gradient: GradientMethod):  # type: ignore[no-untyped-def]
    """The gradient as a function of tensors alone, which is what vmap can map over."""

    def step(weights: Named, images: Tensor, labels: Tensor, mask: Tensor) -> tuple[Named, Tensor]:
        return gradient(task, weights, Batch(images, labels, mask))

    return step


def _padded(local: Sequence[Batch], schedules: Sequence[Sequence[Tensor]], k: int) -> tuple[Batch, Tensor]:
    """Step k of every client, padded to one size with masked samples; and (clients,) whether it has such a step."""
    device = local[0].images.device
    indices = [schedule[k] if k < len(schedule) else schedule[0][:0] for schedule in schedules]
    size = max(map(len, indices))
    images, labels, masks = [], [], []
    for data, index in zip(local, indices, strict=True):
        padding = index.new_zeros(size - len(index))
        rows = torch.cat([index, padding]).to(device)
        images.append(data.images[rows])
        labels.append(data.labels[rows])
        masks.append((torch.arange(size, device=device) < len(index)).float())
    active = torch.tensor([k < len(schedule) for schedule in schedules], device=device)
    return Batch(torch.stack(images), torch.stack(labels), torch.stack(masks)), active


@torch.no_grad()
def _step_active(optimiser: LocalOptimiser, weights: Named, slope: Named, active: Tensor) -> None:
    """Move the clients that still have a batch; the others keep their weights."""
    before = {name: w.clone() for name, w in weights.items()}
    optimiser.step(weights, slope)
    for name, w in weights.items():
        keep = active.view(-1, *[1] * (w.dim() - 1))
        w.copy_(torch.where(keep, w, before[name]))
