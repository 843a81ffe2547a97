"""Test of the declarations of a user's defences against their code, on samples and random numbers of the attacker.

The code is run in other rounds, for other clients, weights and samples, and twice with the same state. Without noise,
the update must be what `transform` returns. With noise, the residuals of many updates are tested for four
properties of independent noise with the declared density p(u | m):

- The mean of each value is zero.
- For a shift s, the mean of p(u | m + s) / p(u | m) over updates u is 1.
- For the residuals x and y of two updates with d values, x . y / d has mean 0 and variance tr(C^2) / d^2, which is
  1 / d only if the correlations C between values are zero. The same holds for the squares of the values. Instead of
  residuals, these tests use scores, the derivatives of log p(u | m) with respect to m, whose mean is 0 as well.
- Few values occur twice in an update.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from rayfed import gradients
from rayfed.client.local import data_method, gradient_method, wrap_updates
from rayfed.client.observation_model import ObservationModel
from rayfed.defences.base import Batch, Task
from rayfed.gradients import flatten, per_sample_gradients, unflatten
from rayfed.update import Named, Observation, Update

_DRAWS, _FEWER_DRAWS, _MANY_VALUES = 64, 16, 2**20
"""Number of noise samples, and the number for more than `_MANY_VALUES` values."""
_REPEATS = 2
"""Number of runs in each other circumstance."""
_SAME = 1e-4
"""Largest difference of equal values, relative to their root mean square."""
_SIGNIFICANT, _MEAN = 6.0, 6.5
"""Smallest number of standard errors of a significant difference, and of a significant mean of one value."""
_EQUAL = 1e-7
"""Largest relative difference of equal magnitudes."""
_TOLERANCE = 0.05
"""Largest relative error of a density, or of the sum of squared correlations, that does not count."""
_REPEATED = 0.05
"""Largest share of values that occur twice in an update."""
_UNCHANGED = 0.02
"""Largest share of updates in which a noisy value has no noise, as after rounding."""
_LOGARITHM, _HALVINGS = 25.0, 30
"""Largest absolute logarithm of a width, and number of steps of the bisection."""
_ENOUGH = 64
"""Smallest number of values for a test of correlations."""


class Mismatch(StrEnum):
    """Property of a defence that its declaration denies."""

    SAMPLES = "the samples of training differ from `transform_data`"
    VALUES = "the values sent differ from `transform`"
    OTHER_PARTS = "buffers, loss or number of samples are changed"
    MEAN = "the mean of the noise is not zero"
    DENSITY = "the noise does not have the density of `log_likelihood`"
    CORRELATED = "values of the noise depend on each other, or on something other than the task's generator"
    REPEATED = "values of the noise are repeated"


class NotTestable(Exception):
    """The declared density is not one of each value by itself, so that the tests do not apply."""


def find_mismatch(declared: ObservationModel, observation: Observation, model: nn.Module) -> Mismatch | None:
    """Return a property of the defences that differs from their declarations; None if the tests find none.

    Raises `NotTestable` for noise that several values share, and for noise that leaves some values unchanged.
    """
    tasks = list(_tasks(declared, observation, model))
    noisy = declared.noise is not None
    for place, task in enumerate(tasks):
        found = _differs_in_samples(declared, task)
        if found:
            return found
        count = 1 if not noisy else _REPEATS if place else _draws(task)
        found = _differs_in_values(declared, task, observation, model, count)
        if found:
            return found
    return None


def _draws(task: Task) -> int:
    values = sum(tensor.numel() for tensor in task.weights.values())
    return _DRAWS if values <= _MANY_VALUES else _FEWER_DRAWS


def _tasks(declared: ObservationModel, observation: Observation, model: nn.Module) -> Iterator[Task]:
    """Yield tasks with noise as samples, in several circumstances; the first is the observed one."""
    blank = declared.blank_task(observation, model)
    data, drawn = blank.data, torch.Generator().manual_seed(1)
    noise = observation.sample.noise(len(data.labels), drawn).to(data.inputs)
    labels = data.labels
    if labels.ndim == 1 and not labels.is_floating_point():
        labels = torch.randint(observation.classes, labels.shape, generator=drawn).to(labels)
    task = blank.replace(data=data._replace(inputs=noise, labels=labels))
    yield task
    yield blank
    if noise.is_floating_point():
        yield task.replace(data=task.data._replace(inputs=noise / 5))
        yield task.replace(data=task.data._replace(inputs=noise.round()))
    twice = torch.arange(len(labels), device=labels.device).repeat(2)
    changes: list[dict[str, Any]] = [{"round": task.round + later} for later in (1, 2, 10, 100, 1000)]
    changes += [{"client": task.client + later} for later in (1, 2, 10, 100)]
    changes += [{"weights": {name: 2 * tensor + 1e-3 for name, tensor in task.weights.items()}}]
    changes += [{"data": task.data.rows(twice), "batch_size": len(twice)}]
    for change in changes:
        yield task.replace(**change)


def _differs_in_samples(declared: ObservationModel, task: Task) -> Mismatch | None:
    sent = data_method(declared.defences)(_seeded(task, 0))
    expected = declared.train_on(_seeded(task, 0))
    if any(defence.has_latents for defence in declared.defences):
        return None
    same = sent.inputs.shape == expected.inputs.shape and _close(sent.inputs, expected.inputs)
    return None if same and torch.equal(sent.labels, expected.labels) else Mismatch.SAMPLES


def _differs_in_values(
    declared: ObservationModel, task: Task, observation: Observation, model: nn.Module, count: int
) -> Mismatch | None:
    """Return how updates for a task differ from the declarations, in `count` runs; the first is repeated."""
    residuals, first = [], None
    for seed in range(count):
        state: dict[str, Any] = {}
        for again in range(_REPEATS if seed == 0 else 1):
            own = _seeded(task, seed + 1000 * again).replace(state=state)
            batch = declared.train_on(_seeded(own, seed))
            gradient, loss = _gradient(declared, model, own, batch)
            expected = declared.expect(own.replace(data=batch), gradient, observation, all_stages=True)
            update = _sent(declared, own, observation)
            if _changes_other_parts(update, own, loss):
                return Mismatch.OTHER_PARTS
            residual = flatten(update.tensors).double() - flatten(expected).double()
            if declared.noise is None and not residual.norm() <= _SAME * flatten(expected).double().norm():
                return Mismatch.VALUES
            if declared.noise is not None:
                residuals.append(residual)
                first = first or (own, expected)
    if first is None:
        return None
    noise = torch.stack(residuals)
    found = _differs_from_density(declared, *first, noise)
    return found if found or count <= _REPEATS else _has_structure(declared, *first, noise[: len(noise) // 2 * 2])


def _differs_from_density(declared: ObservationModel, task: Task, expected: Named, noise: Tensor) -> Mismatch | None:
    """Test noise samples (M, D) for the declared density, tensor by tensor, by two shifts of each value."""
    assert declared.noise is not None
    _check_form(declared, task, expected, noise)
    sizes = [tensor.numel() for tensor in expected.values()]
    widths = _find_widths(declared, task, expected)
    for name, part in zip(expected, noise.split(sizes, 1), strict=True):
        noisy = (part != 0).any(0)
        if not noisy.any():
            continue
        ratios = []
        for draw in part:
            for shift in (-widths[name], widths[name]):
                ratios.append(_shifted_ratio(declared, task, expected, name, draw, shift)[noisy])
        values = torch.cat(ratios)
        error = values.std() / len(values) ** 0.5
        if not abs(float(values.mean()) - 1) <= _TOLERANCE + _SIGNIFICANT * float(error):
            return Mismatch.DENSITY
    return None


def _check_form(declared: ObservationModel, task: Task, expected: Named, noise: Tensor) -> None:
    """Raise `NotTestable` unless the density is one of each value, and no value has noise only in some updates."""
    assert declared.noise is not None
    values = declared.noise.log_likelihood(task, expected, expected)
    if {name: part.shape for name, part in values.items()} != {name: t.shape for name, t in expected.items()}:
        raise NotTestable("the density of the noise is one of several values together")
    unchanged = noise[:, (noise != 0).any(0)] == 0
    if unchanged.numel() and float(unchanged.double().mean()) > _UNCHANGED:
        raise NotTestable("the noise leaves some values unchanged")


def _find_widths(declared: ObservationModel, task: Task, expected: Named) -> Named:
    """Return the shift of each value that lowers the log density of zero noise by 1 / 2, by bisection."""
    assert declared.noise is not None
    mean = {name: tensor.double() for name, tensor in expected.items()}
    peak = declared.noise.log_likelihood(task, mean, mean)
    low = {name: torch.full_like(tensor, -_LOGARITHM) for name, tensor in mean.items()}
    high = {name: -tensor for name, tensor in low.items()}
    for _ in range(_HALVINGS):
        middle = {name: (low[name] + high[name]) / 2 for name in mean}
        moved = {name: tensor + middle[name].exp() for name, tensor in mean.items()}
        values = declared.noise.log_likelihood(task, mean, moved)
        for name in mean:
            near = values[name] > peak[name] - 0.5
            low[name] = torch.where(near, middle[name], low[name])
            high[name] = torch.where(near, high[name], middle[name])
    return {name: tensor.exp() for name, tensor in high.items()}


def _shifted_ratio(
    declared: ObservationModel, task: Task, expected: Named, name: str, noise: Tensor, shift: Tensor
) -> Tensor:
    """Return p(u | m + shift) / p(u | m) for each value of a tensor, (n,)."""
    assert declared.noise is not None
    sent = {other: tensor.double() for other, tensor in expected.items()}
    mean = sent[name]
    sent[name] = mean + noise.view_as(mean)
    moved = {other: tensor.double() for other, tensor in expected.items()}
    near = declared.noise.log_likelihood(task, sent, moved)[name]
    far = declared.noise.log_likelihood(task, sent, moved | {name: mean + shift})[name]
    return (far - near).double().flatten().exp()


def _has_structure(declared: ObservationModel, task: Task, expected: Named, noise: Tensor) -> Mismatch | None:
    """Test noise samples (M, D) for a mean and for dependent values, in all tensors together and in each."""
    scores = torch.stack([_score(declared, task, expected, draw) for draw in noise])
    if not bool(scores.isfinite().all()):
        return Mismatch.DENSITY
    sizes = [tensor.numel() for tensor in expected.values()]
    for own, drawn in zip((scores, *scores.split(sizes, 1)), (noise, *noise.split(sizes, 1)), strict=True):
        used = (drawn != 0).any(0)
        own, drawn = own[:, used], drawn[:, used]
        if not own.numel():
            continue
        if (own.sum(0).abs() / own.square().sum(0).sqrt()).nan_to_num().max() > _MEAN:
            return Mismatch.MEAN
        if own.shape[1] < _ENOUGH:
            continue
        squares = own.square()
        if _is_correlated(own) or _is_correlated(squares[::2] - squares[1::2]):
            return Mismatch.CORRELATED
        if _is_repeated(drawn[0]):
            return Mismatch.REPEATED
    return None


def _score(declared: ObservationModel, task: Task, expected: Named, noise: Tensor) -> Tensor:
    """Return the derivative of the log density with respect to the expected values, (D,), for one noise sample."""
    assert declared.noise is not None
    mean = {name: tensor.detach().double().requires_grad_() for name, tensor in expected.items()}
    sent = unflatten(flatten(mean).detach() + noise, mean)
    with torch.enable_grad():
        total = torch.stack([part.sum() for part in declared.noise.log_likelihood(task, sent, mean).values()]).sum()
        slopes = torch.autograd.grad(total, list(mean.values()), allow_unused=True, materialize_grads=True)
    return torch.cat([slope.flatten() for slope in slopes])


def _is_correlated(values: Tensor) -> bool:
    """Return whether the inner products of rows (M, D) have another mean or variance than those of independent values.

    Each value has mean 0. The variance of an inner product is then the sum of the squared variances of the values.
    """
    draws = len(values)
    products = (values @ values.T)[~torch.eye(draws, dtype=torch.bool, device=values.device)]
    squares = values.square()
    total = squares.sum(0)
    variance = float((total.square() - squares.square().sum(0)).sum()) / (draws * (draws - 1))
    pairs = len(products) / 2
    mean = float(products.mean()) * (pairs / variance) ** 0.5
    ratio = float(products.square().mean()) / variance
    return bool(mean > _SIGNIFICANT or ratio > 1 + _TOLERANCE + _SIGNIFICANT * (2 / pairs) ** 0.5)


def _is_repeated(values: Tensor) -> bool:
    """Return whether many magnitudes of values (D,) occur twice, more than rounding explains."""
    sizes = values.abs().sort().values
    near = sizes.diff() <= _EQUAL * sizes[1:]
    return bool(near.double().mean() > _REPEATED + _EQUAL * len(sizes))


def _gradient(declared: ObservationModel, model: nn.Module, task: Task, batch: Batch) -> tuple[Named, Tensor]:
    """Return the gradient of a batch, or of each of its samples, and the loss."""
    tensors, loss = gradients.gradient(model, task.weights, dict(task.buffers), batch.inputs, batch.labels)
    if declared.samplewise:
        tensors = per_sample_gradients(model, task.weights, task.buffers, batch.inputs, batch.labels)
    return tensors, loss


def _sent(declared: ObservationModel, task: Task, observation: Observation) -> Update:
    """Return the update that the code of the defences sends for a task, in one local step."""

    def update(own: Task) -> Update:
        batch = data_method(declared.defences)(own)
        tensors, loss = gradient_method(declared.defences)(own, own.weights, batch)
        scaled = {name: observation.scale * tensor for name, tensor in tensors.items()}
        return Update(own.client, own.round, scaled, own.buffers, len(own.data.labels), loss=float(loss))

    return wrap_updates(update, declared.defences)(task)


def _changes_other_parts(update: Update, task: Task, loss: Tensor) -> bool:
    same_loss = abs(update.loss - float(loss)) <= _SAME * max(1.0, abs(float(loss)))
    buffers = all(torch.equal(update.buffers[name], tensor) for name, tensor in task.buffers.items())
    return not (same_loss and buffers and update.samples == len(task.data.labels))


def _seeded(task: Task, seed: int) -> Task:
    """Return a task with copies of its tensors, and with random numbers of a seed."""
    return task.replace(
        weights={name: tensor.clone() for name, tensor in task.weights.items()},
        buffers={name: tensor.clone() for name, tensor in task.buffers.items()},
        generator=torch.Generator().manual_seed(seed),
    )


def _close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    return bool((one - other).norm() <= _SAME * other.norm())
