"""Test of the declarations of a user's defences against their code, on samples and random numbers of the attacker.

The code of each defence is run in other rounds, for other clients, weights and samples, and twice with the same state.
It is also run on the samples of each observed client, and the noise of the observed update is tested as well
(`find_mismatch_on_client`).
Without noise, the update must equal the result of `transform`. With noise, the distribution function F of each value is
computed from `log_likelihood`. Several updates are then tested for these properties of independent noise with the
declared density:

- F(value) is uniform in [0, 1] (Kolmogorov-Smirnov).
- The mean of F(value) - 1/2 is 0 for each value.
- Let x and y be the vectors of F - 1/2 of two updates. Then x . y has mean 0 and variance tr(C^2), with the covariance
  matrix C of the values. It equals that of independent values only if C is diagonal. The squares are tested as well.
- No values are the same as others in each update, up to the sign.
- Each value, row and column has noise, and no sum of rows or of columns has none.

Values that are rounded at random, with two outcomes each, have the declared frequencies instead of the first property.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from enum import StrEnum
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rayfed import gradients
from rayfed.core import seeds
from rayfed.defences.base import Task
from rayfed.gradients import flatten, per_sample_gradients, unflatten
from rayfed.models.build import is_stochastic
from rayfed.simulation.client.local import data_method, gradient_method, wrap_updates
from rayfed.threat_model.observation_model import ObservationModel
from rayfed.update import Named, Observation, Update

_DRAWS, _FEWER_DRAWS, _MANY_VALUES = 64, 16, 2**20
"""Number of updates with noise, and the number for more than `_MANY_VALUES` values."""
_JITTER = 1e-6
"""Size of the test of rounding errors, in units of the range of a pixel."""
_REPEATS = 3
"""Number of runs in each other circumstance."""
_SAME = 1e-4
"""Largest difference of equal values, relative to their root mean square."""
_ROUNDING = 1e-5
"""Largest rounding error of a value without noise, relative to the root mean square of its tensor."""
_SIGNIFICANT, _MEAN = 6.0, 6.5
"""Smallest number of standard errors of a significant difference, and of a significant mean of one value."""
_DISTANCE, _SIGNIFICANT_DISTANCE = 0.02, 3.0
"""Largest distance of two distribution functions that does not count, and the smallest significant distance, times the
root of the number of values: 3 has the probability 3e-8."""
_EQUAL = 4e-7
"""Largest relative difference of equal magnitudes."""
_TOLERANCE = 0.05
"""Largest relative error of a sum of squared correlations that does not count."""
_REPEATED = 3
"""Largest number of values that are the same as another one by chance, in `_REPEATS` updates."""
_COMPARED, _ENOUGH_STEPS = 2000, 10
"""Largest number of values that are searched for steps, and smallest number of equal ones that shows steps."""
_QUIET = 0.5
"""Largest eigenvalue of a correlation matrix that shows a sum without noise, relative to the smallest expected one."""
_SIDE, _SAMPLES, _LEAST_SAMPLES = 1024, 4, 1024
"""Largest size of a correlation matrix, and smallest number of samples for each of its rows, and of all."""
_ENOUGH = 64
"""Smallest number of values for a test of correlations."""
_TESTED, _TESTED_AGAIN = 2**17, 2**14
"""Largest number of values whose noise is tested, the first ones of each tensor, and in other circumstances."""
_POINTS, _RANGE, _CENTRE = 128, 8.0, 0.05
"""Number of points at which a density is computed. In standard deviations, they are `_CENTRE` sinh(x) for evenly spaced
x within `_RANGE` of 0, so their distances are 1/8 of their size, and the largest is 75."""
_UNLIKELY = 1e-9
"""Largest probability of an outcome that contradicts a declaration if it occurs."""


class Mismatch(StrEnum):
    """Property of a defence that its declaration denies."""

    SAMPLES = "the samples of training differ from `transform_data`"
    VALUES = "the values sent differ from `transform`"
    MASK = "`exposed` is False for values that are sent, and must be True wherever the update is not 0"
    OTHER_PARTS = "buffers, loss or number of samples are changed"
    MEAN = "the mean of the noise is not zero"
    DENSITY = "the noise does not have the density of `log_likelihood`"
    CORRELATED = "values of the noise depend on each other, or on something other than the generator of the task"
    REPEATED = "values of the noise are repeated"
    DERIVATIVE = "the derivative of `transform` is 0 everywhere: return `straight_through(values, tensor)`"
    FEW_SEEDS = "all noise follows from one random number of 32 bits, so the noise can be found by trying them"


class NotTestable(Exception):
    """The declared density is not one of each value by itself, so the tests do not apply."""


def find_mismatch(declared: ObservationModel, observation: Observation, model: nn.Module) -> Mismatch | None:
    """Return a property of the defences that differs from their declarations; None if the tests find none.

    A defence without a declaration, or with a declaration that ignores something (`has_latents`), is not tested.
    """
    plain = replace(observation, local=replace(observation.local, clip_norm=None, weight_decay=0.0))
    for defence in declared.defences:
        if defence.has_latents or not defence.is_declared:
            continue
        alone = replace(declared, defences=(defence,))
        if _lacks_derivative(alone, plain, model):
            return Mismatch.DERIVATIVE
        found = _find_mismatch_of_one(alone, plain, model)
        if found:
            return found
    return None


def _lacks_derivative(declared: ObservationModel, observation: Observation, model: nn.Module) -> bool:
    """Return whether the derivative of `transform` is zero although its values are not, so searches cannot use it."""
    if not declared.stages or declared.samplewise:
        return False
    task = _with_seed(next(_tasks(declared, observation, model)), 0)
    gradient, _ = _gradient(declared, model, task)
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in gradient.items()}
    with torch.enable_grad():
        sent = flatten(declared.expect(task, leaves, observation, all_stages=True))
        if not bool(sent.any()):
            return False
        if not sent.requires_grad:
            return True
        slopes = torch.autograd.grad(sent.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    return not any(bool(slope.any()) for slope in slopes)


def find_mismatch_on_client(
    declared: ObservationModel, observation: Observation, model: nn.Module, inputs: Tensor, labels: Tensor
) -> Mismatch | None:
    """Return a property of the defences that differs from their declarations on the samples of an observed client.

    The result depends on the samples, so it is for verdicts and not for attackers.
    """
    plain = replace(observation, scale=1.0, local=replace(observation.local, clip_norm=None, weight_decay=0.0))
    for defence in declared.defences:
        if defence.has_latents:
            continue
        alone = replace(declared, defences=(defence,))
        task = alone.task(plain, model, inputs, labels)
        found = _find_mismatch_of_one(alone, plain, model, [task, next(_tasks(alone, plain, model))])
        if found:
            return found
    return _find_mismatch_of_update(declared, observation, model, inputs, labels)


def _find_mismatch_of_update(
    declared: ObservationModel, observation: Observation, model: nn.Module, inputs: Tensor, labels: Tensor
) -> Mismatch | None:
    """Return a property that the noise of the observed update does not have, as code may act differently in a test."""
    if declared.noise is None or declared.of_gradients or not declared.is_exact or is_stochastic(model):
        return None
    task = declared.task(observation, model, inputs, labels)
    task = task.replace(data=declared.train_on(task))
    gradient, _ = _gradient(declared, model, task)
    expected = declared.expect(declared.fresh(task), gradient, observation)
    simulated = [declared.send_noisy(task, expected, seed) for seed in range(_REPEATS)]
    rows = torch.stack([flatten(tensors).double() for tensors in (observation.update, *simulated)])
    noise = rows - flatten(expected).double()
    masks = flatten(declared.sent_values(observation.update, observation))
    tests = _Noise(declared, observation, task, expected)
    if not bool((noise[0].abs() > tests.rounding)[masks].any()):
        return Mismatch.DENSITY
    if tests.has_two_outcomes(noise[1:]):
        return None
    return tests.mismatch_of_first(noise, masks)


def _find_mismatch_of_one(
    declared: ObservationModel, observation: Observation, model: nn.Module, tasks: Iterable[Task] | None = None
) -> Mismatch | None:
    rounded, removal = False, _Removal()
    for place, task in enumerate(tasks or _tasks(declared, observation, model)):
        if _differs_in_samples(declared, task):
            return Mismatch.SAMPLES
        own, loss, expected = _expect(declared, task, observation, model)
        if place and not _is_stable(declared, model, own):
            continue
        draws = _draws(declared, task) if place == 0 else _REPEATS
        updates = []
        for update in _updates(declared, task, observation, draws):
            if _changes_other_parts(update, own, loss):
                return Mismatch.OTHER_PARTS
            updates.append(flatten(update.tensors).double())
            if declared.only_removes and _hides_values(declared, update, observation):
                return Mismatch.MASK
        exact = flatten(expected).double()
        noise = torch.stack(updates) - exact
        if declared.noise is None:
            equal = bool(noise.norm(dim=1).max() <= _SAME * exact.norm())
            if not (equal or (declared.only_removes and removal.is_random(updates, exact))):
                return Mismatch.VALUES
            continue
        _check_form(declared, own, expected)
        tests = _Noise(declared, observation, own, expected)
        if place == 0:
            rounded = tests.has_two_outcomes(noise)
            if _draws_once(declared, task, observation):
                return Mismatch.FEW_SEEDS
        found = tests.mismatch(noise, rounded)
        if found:
            return found
    return None


class _Removal:
    """Removal of values at random, in the same places for other samples and the same random numbers."""

    def __init__(self) -> None:
        self._first: list[tuple[Tensor, Tensor]] = []

    def is_random(self, updates: Sequence[Tensor], expected: Tensor) -> bool:
        """Return whether the sent values (D,) are the expected ones, and do not depend on the samples."""
        absent = expected == 0
        removed = [update == 0 for update in updates]
        if any(not _close(u[~gone], expected[~gone]) for u, gone in zip(updates, removed, strict=True)):
            return False
        self._first = self._first or [(gone, absent) for gone in removed]
        pairs = zip(removed, self._first, strict=False)
        return all(bool(((gone == first) | absent | unknown).all()) for gone, (first, unknown) in pairs)


def _draws(declared: ObservationModel, task: Task) -> int:
    """Return the number of updates in the observed circumstances."""
    if declared.noise is None:
        return _REPEATS
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
    doubled = task.data.rows(twice)._replace(places=torch.arange(len(twice), device=labels.device))
    changes: list[dict[str, Any]] = [{"round": task.round + later} for later in (1, 2, 10, 100, 1000)]
    changes += [{"client": task.client + later} for later in (1, 2, 10, 100)]
    changes += [{"weights": {name: 2 * tensor + 1e-3 for name, tensor in task.weights.items()}}]
    changes += [{"data": doubled, "batch_size": len(twice)}]
    for change in changes:
        yield task.replace(**change)


def _differs_in_samples(declared: ObservationModel, task: Task) -> bool:
    sent = data_method(declared.defences)(_with_seed(task, 0))
    expected = declared.train_on(_with_seed(task, 0))
    same = sent.inputs.shape == expected.inputs.shape and _close(sent.inputs, expected.inputs)
    return not (same and torch.equal(sent.labels, expected.labels))


def _expect(
    declared: ObservationModel, task: Task, observation: Observation, model: nn.Module
) -> tuple[Task, Tensor, Named]:
    """Return the task with the samples of training, their loss, and the declared update without noise."""
    own = _with_seed(task, 0)
    own = own.replace(data=declared.train_on(own))
    gradient, loss = _gradient(declared, model, own)
    return own, loss, declared.expect(own, gradient, observation, all_stages=True)


def _updates(declared: ObservationModel, task: Task, observation: Observation, draws: int) -> Iterator[Update]:
    """Yield updates of the defences' code with other random numbers. The first two clients share their state."""
    state: dict[str, Any] = {}
    for seed in range(draws):
        yield _run_code(declared, _with_seed(task, seed).replace(state=state if seed < 2 else {}), observation)


def _draws_once(declared: ObservationModel, task: Task, observation: Observation) -> bool:
    """Return whether a defence takes only one number of 32 bits from the generator of the task."""
    own, once = _with_seed(task, 0), torch.Generator().manual_seed(0)
    _run_code(declared, own, observation)
    torch.randint(2, (), generator=once)
    return torch.equal(own.generator.get_state(), once.get_state())


def _is_stable(declared: ObservationModel, model: nn.Module, task: Task) -> bool:
    """Return whether rounding errors of samples hardly change the gradient, unlike with a norm of blank images."""
    inputs = task.data.inputs
    if not inputs.is_floating_point():
        return True
    noise = torch.rand(inputs.shape, generator=torch.Generator().manual_seed(0)).to(inputs)
    moved = task.replace(data=task.data._replace(inputs=inputs + _JITTER * noise))
    (one, _), (other, _) = (_gradient(declared, model, _with_seed(own, 0)) for own in (task, moved))
    return _close(flatten(other), flatten(one))


def _check_form(declared: ObservationModel, task: Task, expected: Named) -> None:
    """Raise `NotTestable` unless the declared density is one of each value."""
    assert declared.noise is not None
    values = declared.noise.log_likelihood(task, expected, expected)
    if {name: part.shape for name, part in values.items()} != {name: t.shape for name, t in expected.items()}:
        raise NotTestable("the density of the noise is one of several values together")


class _Part(NamedTuple):
    """Numbers of mean 0 and variance 1 for each value, if the declared density is right."""

    numbers: Tensor
    """(M, D)"""
    tensor: Tensor
    """Index of each value's tensor, (D,)."""


class _Noise:
    """Test of the noise of one task."""

    def __init__(self, declared: ObservationModel, observation: Observation, task: Task, expected: Named) -> None:
        self.declared, self.observation, self.task = declared, observation, task
        self.expected = {name: tensor.detach().double() for name, tensor in expected.items()}
        sizes = [tensor.numel() for tensor in expected.values()]
        self.tensor = torch.repeat_interleave(torch.tensor(sizes)).to(flatten(self.expected).device)
        squares = [tensor.square().mean().expand(tensor.numel()) for tensor in self.expected.values()]
        self.rounding = _ROUNDING * torch.cat(squares).sqrt()
        self.places = torch.cat([torch.arange(size) for size in sizes]).to(self.tensor.device)

    def mismatch(self, noise: Tensor, rounded: bool) -> Mismatch | None:
        """Return a property that samples of noise (M, D) do not have; None if the tests find none.

        If `rounded`, each value has two outcomes.
        """
        noisy = noise.abs().amax(0) > self.rounding
        if not noisy.any():
            return Mismatch.DENSITY if self._lacks_noise(~noisy) else None
        tested = noisy & self._tested(_TESTED if len(noise) > _REPEATS else _TESTED_AGAIN)
        if rounded:
            part = self._by_outcomes(noise, tested)
        elif self._lacks_noise(~noisy):
            return Mismatch.DENSITY
        else:
            part = self._by_distribution(noise, tested)
        if part is None:
            return Mismatch.DENSITY
        if len(noise) <= _REPEATS or not part.numbers.numel():
            return None
        if rounded:
            return _find_structure(part)
        loud = (noise[:_REPEATS].abs() > self.rounding).all(0)
        if _is_repeated(noise[:_REPEATS, loud]) or self._has_steps(noise, tested):
            return Mismatch.REPEATED
        return _find_structure(part) or self._find_silence(part, tested)

    def _has_steps(self, noise: Tensor, tested: Tensor) -> bool:
        """Return whether values of the noise (M, D) repeat up to rounding, as integers do, unlike the values sent.

        The values sent then show the digits below the steps of the noise.
        """
        values = noise[:, tested].flatten()[:_COMPARED]
        exact = flatten(self.expected)[tested].expand(len(noise), -1).flatten()[:_COMPARED]
        sent = exact + values
        rounding = _EQUAL * torch.maximum(exact.abs(), sent.abs())
        used = rounding * _COMPARED < 0.01 * values.std()
        steps, nearly = (_count_equal(values[used], width * rounding[used]) for width in (1, 10))
        return steps > max(_ENOUGH_STEPS, nearly / 2, 2 * _count_equal(sent[used], rounding[used]))

    def mismatch_of_first(self, noise: Tensor, sent: Tensor) -> Mismatch | None:
        """Return a property that the first sample of noise (M, D) does not have in the values `sent`, (D,) bool."""
        noisy = noise.abs().amax(0) > self.rounding
        if self._lacks_noise(sent & ~noisy):
            return Mismatch.DENSITY
        tested = noisy & sent & self._tested(_TESTED)
        part = self._by_distribution(noise, tested)
        if part is None or _is_not_uniform(part.numbers[0] / sqrt(12) + 0.5):
            return Mismatch.DENSITY
        return self._find_silence(part._replace(numbers=part.numbers[:1]), tested)

    def _find_silence(self, part: _Part, tested: Tensor) -> Mismatch | None:
        """Return a mismatch if a value, row or column has little noise, or if the noise of several ones cancels."""
        if _is_silent(part.numbers):
            return Mismatch.DENSITY
        numbers = torch.zeros(len(part.numbers), len(tested), dtype=torch.float64, device=tested.device)
        numbers[:, tested] = part.numbers
        whole = [numbers, tested.expand_as(numbers)]
        sizes = [tensor.numel() for tensor in self.expected.values()]
        pieces = zip(self.expected.values(), *(values.split(sizes, dim=1) for values in whole), strict=True)
        for tensor, values, known in pieces:
            if tensor.ndim < 2 or not known.all():
                continue
            matrix = values.reshape(len(values), len(tensor), -1)
            for lines in (matrix.transpose(0, 1).flatten(1), matrix.permute(2, 0, 1).flatten(1)):
                if _is_silent(lines.T):
                    return Mismatch.DENSITY
                if _cancels(lines):
                    return Mismatch.CORRELATED
        return None

    def _tested(self, most: int) -> Tensor:
        """Return a mask (D,) of all values, or of the first ones of each tensor if there are more than `most`."""
        if len(self.places) <= most:
            return torch.ones_like(self.places, dtype=torch.bool)
        return self.places < most // (int(self.tensor.max()) + 1)

    def has_two_outcomes(self, noise: Tensor) -> bool:
        """Return whether values have one or two outcomes each in samples of noise (M, D), as by random rounding."""
        least, most = noise.amin(0), noise.amax(0)
        equal = torch.minimum(noise - least, most - noise) <= self.rounding
        return bool((most - least > 2 * self.rounding).any()) and bool(equal.all())

    def _lacks_noise(self, silent: Tensor) -> bool:
        """Return whether values that are sent exactly, (D,) bool, are declared to have noise."""
        distance = 10 * self.rounding
        centre, far = self._log_densities(torch.zeros_like(distance)), self._log_densities(distance)
        return bool((silent & (distance > 0) & (centre - far < 1)).any())

    def _by_distribution(self, noise: Tensor, noisy: Tensor) -> _Part | None:
        """Return F - 1/2 of each noisy value, over its deviation; None if F is not uniform."""
        deviations = torch.where(noisy, noise.square().mean(0).sqrt(), 0.0)
        step = 2 * _RANGE / _POINTS
        points = (torch.arange(_POINTS, device=noise.device, dtype=torch.float64) + 0.5) * step - _RANGE
        rows = [self._log_densities(_CENTRE * point.sinh() * deviations)[noisy] for point in points]
        logs = torch.stack(rows).nan_to_num(nan=-torch.inf)
        masses = (logs - logs.amax(0)).exp() * points.cosh()[:, None]
        distribution = torch.cat([torch.zeros_like(masses[:1]), masses.cumsum(0)])
        distribution = distribution / distribution[-1]
        places = (torch.asinh(noise[:, noisy] / deviations[noisy] / _CENTRE) + _RANGE) / step
        places = places.clamp(0, _POINTS - 1e-6)
        below = places.long()
        low, high = distribution.gather(0, below), distribution.gather(0, below + 1)
        shares = low + (places - below) * (high - low)
        if not bool(shares.isfinite().all()):
            return None
        tensor = self.tensor[noisy]
        groups = [shares, *(shares[:, tensor == one] for one in tensor.unique())]
        if any(_is_not_uniform(group.flatten()) for group in groups):
            return None
        return _Part((shares - 0.5) * sqrt(12), tensor)

    def _by_outcomes(self, noise: Tensor, noisy: Tensor) -> _Part | None:
        """Return the standardised outcomes of values with two of them; None if their frequencies are wrong."""
        least, most = noise.amin(0), noise.amax(0)
        log_odds = (self._log_densities(most) - self._log_densities(least)).clamp(-50, 50)
        odds = log_odds.sigmoid()
        both = noisy & (most - least > 2 * self.rounding)
        if bool((torch.minimum(odds, 1 - odds)[both] < _UNLIKELY).any()):
            return None
        # For other odds, it is likely that only one outcome occurred, which then does not show the second one.
        used = both & (odds > 0.25) & (odds < 0.75)
        share = odds[used]
        numbers = ((most - noise < noise - least)[:, used].double() - share) / (share * (1 - share)).sqrt()
        if len(noise) > _REPEATS and used.any():
            excess = float((numbers.sum(0).square() / len(noise)).mean()) - 1
            if excess > 2 * _TOLERANCE + _SIGNIFICANT * sqrt(2 / int(used.sum())):
                return None
        return _Part(numbers, self.tensor[used])

    def _log_densities(self, noise: Tensor) -> Tensor:
        """Return the declared log density of each value, (D,), for values of the noise (D,)."""
        sent = unflatten(flatten(self.expected) + noise, self.expected)
        return flatten(self.declared.log_densities(self.task, sent, self.expected, self.observation)).double()


def _count_equal(values: Tensor, rounding: Tensor) -> int:
    """Return the number of sorted values (n,) that equal the next one, up to a rounding error of each (n,)."""
    order = values.argsort()
    return int((values[order].diff() <= rounding[order][1:]).sum())


def _find_structure(part: _Part) -> Mismatch | None:
    """Test standardised values for their mean and dependence, in all tensors together and in each."""
    if bool((part.numbers.sum(0).abs() > _MEAN * sqrt(len(part.numbers))).any()):
        return Mismatch.MEAN
    for numbers in (part.numbers, *(part.numbers[:, part.tensor == one] for one in part.tensor.unique())):
        if numbers.shape[1] < _ENOUGH:
            continue
        squares = numbers.square()
        pairs = len(squares) // 2
        if _is_correlated(numbers) or _is_correlated(squares[:pairs] - squares[pairs : 2 * pairs]):
            return Mismatch.CORRELATED
    return None


def _is_not_uniform(shares: Tensor) -> bool:
    """Return whether numbers (n,) are not uniform in [0, 1], by the test of Kolmogorov and Smirnov."""
    count = len(shares)
    steps = torch.arange(1, count + 1, device=shares.device, dtype=shares.dtype) / count
    apart = (shares.sort().values - steps).abs().max()
    return float(apart) > _DISTANCE + _SIGNIFICANT_DISTANCE / sqrt(count)


def _is_correlated(values: Tensor) -> bool:
    """Return whether products of vectors (M, D) have another mean or variance than those of independent values.

    Each value has mean 0. The variance of an inner product is then the sum of the squared variances of the values.
    """
    draws = len(values)
    products = (values @ values.T)[~torch.eye(draws, dtype=torch.bool, device=values.device)]
    squares = values.square()
    total = squares.sum(0)
    variance = float((total.square() - squares.square().sum(0)).sum()) / (draws * (draws - 1))
    pairs = len(products) / 2
    mean = float(products.mean()) * sqrt(pairs / variance)
    ratio = float(products.square().mean()) / variance
    return mean > _SIGNIFICANT or ratio > 1.0 + _TOLERANCE + _SIGNIFICANT * sqrt(2 / pairs)


def _is_repeated(noise: Tensor) -> bool:
    """Return whether values have the same magnitude as another one, the same one in each of some updates (M, D)."""
    order = noise[0].abs().argsort()
    sizes = noise[:, order].abs()
    same = (sizes.diff(dim=1).abs() <= _EQUAL * sizes[:, 1:]).all(0)
    return int(same.sum()) > _REPEATED


def _is_silent(numbers: Tensor) -> bool:
    """Return whether numbers of mean 0 and variance 1, uniform if the density is right, are small in a column."""
    count = len(numbers)  # (N, D)
    if count < _ENOUGH or not numbers.numel():
        return False
    return bool((numbers.square().sum(0) < count - _MEAN * sqrt(0.8 * count)).any())


def _cancels(lines: Tensor) -> bool:
    """Return whether a sum of lines, with a factor each, has little noise. Lines are (R, N) of N independent samples.

    The eigenvalues of independent ones are at least (1 - sqrt(R / N))^2 (Marchenko and Pastur 1967).
    """
    rows, count = lines.shape
    if rows > _SIDE or count < max(_SAMPLES * rows, _LEAST_SAMPLES):
        return False
    least = float(torch.linalg.eigvalsh(lines @ lines.T / count)[0])
    return least < _QUIET * (1 - sqrt(rows / count)) ** 2


def _gradient(declared: ObservationModel, model: nn.Module, task: Task) -> tuple[Named, Tensor]:
    """Return the gradient of the samples, together or of each, and the loss."""
    inputs, labels, *_ = task.data
    with _random_numbers():
        tensors, loss = gradients.gradient(model, task.weights, task.buffers, inputs, labels)
    if declared.samplewise:
        tensors = per_sample_gradients(model, task.weights, task.buffers, inputs, labels)
    return tensors, loss


def _run_code(declared: ObservationModel, task: Task, observation: Observation) -> Update:
    """Return the update that the code of the defences sends for a task, in one local step."""

    def update(own: Task) -> Update:
        batch = data_method(declared.defences)(own)
        with _random_numbers():
            tensors, loss = gradient_method(declared.defences)(own, own.weights, batch)
        scaled = {name: observation.scale * tensor for name, tensor in tensors.items()}
        return Update(own.client, own.round, scaled, own.buffers, len(own.data.labels), loss=float(loss))

    return wrap_updates(update, declared.defences)(task)


def _random_numbers() -> AbstractContextManager[None]:
    """Return a context in which a model with dropout uses the same random numbers every time."""
    return seeds.global_stream("declaration")


def _hides_values(declared: ObservationModel, update: Update, observation: Observation) -> bool:
    """Return whether the mask of `exposed` leaves out values that are not 0."""
    masks = declared.exposed_values(update.tensors, observation)
    return any(bool((tensor[~masks[name]] != 0).any()) for name, tensor in update.tensors.items())


def _changes_other_parts(update: Update, task: Task, loss: Tensor) -> bool:
    """Return whether the loss, the number of samples, or the buffers differ from those of a task after its gradient."""
    same_loss = abs(update.loss - float(loss)) <= _SAME * max(1.0, abs(float(loss)))
    buffers = all(_close(update.buffers[name], tensor) for name, tensor in task.buffers.items())
    return not (same_loss and buffers and update.samples == len(task.data.labels))


def _with_seed(task: Task, seed: int) -> Task:
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
