"""Updates of a cohort: clients train one after another, or all together (`training.vectorise`).

Joint training is one `torch.func.vmap` call, which is fast on CUDA, or fuses the layers, which is fast on CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap

from rayfed.aggregation.base import AnyAggregation
from rayfed.aggregation.over_channel import OverChannel
from rayfed.core import losses
from rayfed.core.memory import Fitting
from rayfed.core.objective import are_words
from rayfed.core.vectorised import find_refusal
from rayfed.defences.base import MEASURED, Batch, Defence, Task
from rayfed.errors import UserError
from rayfed.models.build import is_stochastic, uses_batch_statistics
from rayfed.models.private_conv import sent_out_names
from rayfed.scenario import Failures, Training
from rayfed.simulation.client.failures import Attempt, Failed, Made, attempt
from rayfed.simulation.client.fused import fused_gradient, fused_gradient_in_vmap
from rayfed.simulation.client.local import (
    batches,
    data_method,
    functional_gradient,
    gradient_method,
    mixed_precision,
    returned_buffers,
    trained_samples,
    update_method,
    wrap_updates,
)
from rayfed.simulation.client.optimiser import LocalOptimiser
from rayfed.update import Named, Update

_FITTING: WeakKeyDictionary[nn.Module, Fitting] = WeakKeyDictionary()
"""Number of clients that fit in one call, by model."""


def cohort_updates(tasks: Sequence[Task], training: Training, defences: Sequence[Defence]) -> Iterator[Made]:
    """Train a cohort's clients, and yield the update or failure of each, in the order of `tasks`.

    Raises `UserError` if the scenario requires vmap or fused, and the model or a defence does not support it.
    """
    if works_together(tasks[0], training, defences):
        return _together(tasks, training, defences)
    update = update_method(training, defences)
    return (attempt(task.client, partial(update, task)) for task in tasks)


@dataclass(frozen=True)
class CohortRecord:
    """Table rows and states of a cohort's clients, recorded as the clients finish."""

    arm: str
    rule: AnyAggregation
    failures: Failures
    cache: Callable[[int, Update], None]
    """Cache a client's update, if it is needed again in the round."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    """New states by client, without the clients that failed."""

    def sent(self, attempts: Iterable[Attempt], together: float) -> Iterator[Any]:
        """Yield each client's update as soon as it is computed; `together` is the joint training time per client, in s.

        Raises `ClientError` for a client that failed, unless the scenario drops such clients.
        """
        began = perf_counter()
        for task, made in attempts:
            key = {"arm": self.arm, "round": task.round, "client": task.client}
            if isinstance(made, Failed):
                if self.failures.then == "stop":
                    raise made.error(self.arm, task.round)
                self.rows.append(key | {"status": made.reason})
            else:
                finished = perf_counter()
                self.cache(task.client, made)
                began += perf_counter() - finished  # not the client's work
                hidden = self.rule if isinstance(self.rule, OverChannel) else None
                sent = hidden.protect(made) if hidden else made
                known = {"samples": made.samples, "loss": made.loss, "seconds": together + perf_counter() - began}
                size = {"sent_bytes": sent.sent_bytes, "clipped": hidden.channel.clipped(made) if hidden else None}
                measured = task.state.pop(MEASURED, {})
                self.rows.append(key | known | size | measured | {"status": "ok"})
                if task.state:
                    self.states[task.client] = task.state
                yield sent
            began = perf_counter()


def works_together(task: Task, training: Training, defences: Sequence[Defence]) -> bool:
    """Return whether a cohort's clients are trained together; raises `UserError` if this is required but impossible."""
    if training.vectorise == "auto":
        return next(iter(task.weights.values())).is_cuda and obstacle(task, training, defences) is None
    if training.trains_together and (reason := obstacle(task, training, defences)):
        raise UserError(f"training.vectorise: {training.vectorise} is not possible: {reason}; use auto or loop")
    return training.trains_together


def obstacle(task: Task, training: Training, defences: Sequence[Defence]) -> str | None:
    """Return the reason why the clients of a cohort cannot be trained together; None if they can."""
    for defence in defences:
        if not defence.vectorises and defence.overrides("wrap_gradient", "wrap_update"):
            return f"the defence {type(defence).__name__} supports only one client at a time"
    if task.private or sent_out_names(task.model):
        return "each client has its own private layers"
    if losses.get_loss(task.model).takes == "classes" and are_words(task.data.labels):
        return "the CTC loss (for labels that are words) supports only one batch at a time"
    if uses_batch_statistics(task.model):
        return "batch norm in training mode would include the padding of smaller batches (model.batch_norm: eval works)"
    if is_stochastic(task.model):
        return "random layers of the model, such as dropout, would share one random stream"
    if refused := _refusal(task, training, defences):
        return f"the model cannot be vectorised over clients ({refused})"
    return None


def _refusal(task: Task, training: Training, defences: Sequence[Defence]) -> str:
    """Return the error of a trial gradient of two clients in one call, cached by model; "" if it works."""

    def blank(tensor: Tensor) -> Tensor:
        return tensor.new_zeros(2, 2, *tensor.shape[1:])

    def trial() -> None:
        own = task.replace(buffers={name: b.clone() for name, b in task.buffers.items()})
        weights = {name: w.expand(2, *w.shape).clone() for name, w in task.weights.items()}
        inputs, labels = blank(task.data.inputs), blank(task.data.labels)
        with mixed_precision(task.model, training):
            _stepper(own, training, defences)(weights, inputs, labels, torch.ones(2, 2, device=inputs.device))

    return find_refusal(task.model, ("cohort", training.vectorise, training.precision, repr(defences)), trial)


def _together(tasks: Sequence[Task], training: Training, defences: Sequence[Defence]) -> Iterator[Made]:
    """Train all clients together, then apply each client's `wrap_update` chain to its update."""
    try:
        trained = {update.client: update for update in _train_together(tasks, training, defences)}
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception:
        culprits = _culprits(tasks, training, defences)
        if not culprits:
            raise
        left = [task for task in tasks if task.client not in culprits]
        made = culprits | {one.client: one for one in (_together(left, training, defences) if left else ())}
        return (made[task.client] for task in tasks)
    update = wrap_updates(lambda task: trained[task.client], defences)
    return (attempt(task.client, partial(update, task)) for task in tasks)


def _culprits(tasks: Sequence[Task], training: Training, defences: Sequence[Defence]) -> dict[int, Made]:
    """Train each client separately after the joint call raised, and return the failures by client."""

    def alone(task: Task) -> Update:
        [update] = _train_together([task.replace(state=copy.deepcopy(task.state))], training, defences)
        return update

    tried = [attempt(task.client, partial(alone, task)) for task in tasks]
    return {one.client: one for one in tried if isinstance(one, Failed)}


def _train_together(tasks: Sequence[Task], training: Training, defences: Sequence[Defence]) -> Iterator[Update]:
    """Train clients in one call, or in as few calls as memory allows, with equal padding.

    Defences of the data run once, before the calls.
    """
    local = [data_method(defences)(task) for task in tasks]
    schedules = [list(batches(len(d.labels), training, t.order)) for d, t in zip(local, tasks, strict=True)]
    steps = range(max(map(len, schedules)))
    sizes = [max(len(own[k]) if k < len(own) else 0 for own in schedules) for k in steps]

    def trained(part: slice) -> list[Update]:
        return _trained(tasks[part], local[part], schedules[part], sizes, training, defences)

    fitting = _FITTING.setdefault(tasks[0].model, Fitting())
    for updates in fitting.in_parts(trained, len(tasks), "clients in one call"):
        yield from updates


def _trained(
    tasks: Sequence[Task],
    local: Sequence[Batch],
    schedules: Sequence[Sequence[Tensor]],
    sizes: Sequence[int],
    training: Training,
    defences: Sequence[Defence],
) -> list[Update]:
    """Train clients in one call on their `local` data; the batches of step k are padded to `sizes[k]`."""
    first = tasks[0]
    weights = {name: w.expand(len(tasks), *w.shape).clone() for name, w in first.weights.items()}
    step = _stepper(first, training, defences)
    optimiser = LocalOptimiser(training, together=True)
    sent: Named = {}
    losses = []
    for k in range(max(map(len, schedules))):
        (inputs, labels, mask), active = _padded(local, schedules, k, sizes[k])
        with mixed_precision(first.model, training):
            sent, loss = step(weights, inputs, labels, mask)
        losses.append(torch.where(active, loss, torch.nan))
        if training.algorithm == "fedavg":
            _step_active(optimiser, weights, sent, active)
    if training.algorithm == "fedavg":
        sent = {name: w - weights[name] for name, w in first.weights.items()}
    mean_losses = torch.stack(losses).nanmean(dim=0).tolist()
    updates = []
    for i, task in enumerate(tasks):
        tensors = {name: t[i] for name, t in sent.items()}
        samples = trained_samples(len(task.data.labels), training)
        updates.append(Update(task.client, task.round, tensors, returned_buffers(task), samples, mean_losses[i]))
    return updates


def _stepper(
    task: Task, training: Training, defences: Sequence[Defence]
) -> Callable[[Named, Tensor, Tensor, Tensor], tuple[Named, Tensor]]:
    """Return a function from stacked weights, inputs, labels and masks to the clients' gradients and losses."""
    plain = fused_gradient_in_vmap if training.vectorise == "fused" else functional_gradient
    gradient = gradient_method(defences, plain)
    alone = gradient is fused_gradient_in_vmap  # without a defence, the slower vmap is not needed

    def step(weights: Named, inputs: Tensor, labels: Tensor, mask: Tensor) -> tuple[Named, Tensor]:
        return (fused_gradient if alone else gradient)(task, weights, Batch(inputs, labels, mask))

    return step if alone else vmap(step)


def _padded(
    local: Sequence[Batch], schedules: Sequence[Sequence[Tensor]], k: int, size: int
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return inputs, labels and masks of step k, padded to `size`, and whether each client has a step k, (clients,)."""
    device = local[0].inputs.device
    indices = [schedule[k] if k < len(schedule) else schedule[0][:0] for schedule in schedules]
    inputs, labels, masks = [], [], []
    for data, index in zip(local, indices, strict=True):
        padding = index.new_zeros(size - len(index))
        rows = torch.cat([index, padding]).to(device)
        inputs.append(data.inputs[rows])
        labels.append(data.labels[rows])
        masks.append((torch.arange(size, device=device) < len(index)).float())
    active = torch.tensor([k < len(schedule) for schedule in schedules], device=device)
    return (torch.stack(inputs), torch.stack(labels), torch.stack(masks)), active


@torch.no_grad()
def _step_active(optimiser: LocalOptimiser, weights: Named, slope: Named, active: Tensor) -> None:
    """Take a step for the clients that have a batch, in place; other weights are unchanged."""
    if active.all():
        return optimiser.step(weights, slope)
    before = {name: w.clone() for name, w in weights.items()}
    optimiser.step(weights, slope)
    for name, w in weights.items():
        keep = active.view(-1, *[1] * (w.dim() - 1))
        w.copy_(torch.where(keep, w, before[name]))
