"""Defences of users with a mistake that gives samples away, and controls that send nothing of the samples.

`transform` and `transform_data` serve both the defence itself and its declaration. Random defences override
`add_noise`, and declare it with `log_likelihood`.
"""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any, ClassVar

import torch
from torch import Tensor

from rayfed import gradients
from rayfed.defences.base import Batch, DataMethod, Defence, Task, UpdateMethod
from rayfed.defences.declarations import normal_log_likelihood, straight_through
from rayfed.registry import component
from rayfed.update import Named, Update

DISCRETE = 1e-6
"""Width of the density of values without noise, relative to their root mean square."""


def seeded(seed: int) -> torch.Generator:
    """Return a generator with a known seed."""
    return torch.Generator().manual_seed(seed)


def draw_like(tensors: Named, seed: int) -> Named:
    """Return standard normal numbers of the tensors' shapes, from one seed."""
    generator = seeded(seed)
    return {name: torch.randn(tensor.shape, generator=generator).to(tensor) for name, tensor in tensors.items()}


def width_of(sent: Tensor) -> Tensor:
    """Return the width of the density of a tensor without noise."""
    return DISCRETE * sent.square().mean().sqrt().clamp(min=1e-30)


def exact(sent: Tensor, expected: Tensor) -> Tensor:
    """Return the log density of values without noise."""
    return normal_log_likelihood({"": sent}, {"": expected}, 0.0)[""]


def normal(residual: Tensor, sigma: float) -> Tensor:
    """Return the log density of normal noise, up to a constant."""
    return -(residual / sigma).double().square() / 2


class OnUpdate(Defence):
    """Base class of the defences that change the update. Noise is drawn after `transform`."""

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        def method(task: Task) -> Update:
            update = next(task)
            return replace(update, tensors=self.add_noise(task, self.transform(task, update.tensors)))

        return method

    def add_noise(self, task: Task, tensors: Named) -> Named:
        """Return the tensors with noise."""
        return tensors

    def transform(self, task: Task, tensors: Named) -> Named:
        return {name: self.change(name, tensor, task) for name, tensor in tensors.items()}

    def change(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        """Return one tensor, changed without noise."""
        return tensor


class OnData(Defence):
    """Base class of the defences that change the samples."""

    def wrap_data(self, next: DataMethod) -> DataMethod:
        return lambda task: self.transform_data(task, next(task))


# Known changes of the update.


@component
class KnownNoise(OnUpdate):
    """Add noise whose seed is the client's number."""

    def transform(self, task: Task, tensors: Named) -> Named:
        drawn = draw_like(tensors, task.client)
        return {name: tensor + drawn[name] for name, tensor in tensors.items()}


@component
class Clipped(OnUpdate):
    """Clip each tensor, without noise."""

    bound: float = 1e-3

    def change(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        return tensor * (self.bound / tensor.norm().clamp(min=1e-30)).clamp(max=1)


@component
class Zeroed(OnUpdate):
    """Send zeros for biases."""

    def change(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        return torch.zeros_like(tensor) if name.endswith(".bias") else tensor


@component
class Steps(OnUpdate):
    """Round each tensor to 8 bits."""

    def change(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        unit = 2 * tensor.abs().max().clamp(min=1e-30) / 255
        return straight_through((tensor / unit).round() * unit, tensor)


@component
class SignsOf(OnUpdate):
    """Send only the signs of all tensors except the first layer."""

    def change(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        if name.startswith("first"):
            return tensor
        return straight_through(tensor.sign() * tensor.abs().mean(), tensor)


@component
class Shuffled(OnUpdate):
    """Permute the values within each tensor, with a known seed."""

    def change(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        order = torch.randperm(tensor.numel(), generator=seeded(7))
        return tensor.flatten()[order].view_as(tensor)


@component
class Mirrored(OnUpdate):
    """Reflect each tensor at a known plane."""

    def change(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        plane = torch.randn(tensor.shape, generator=seeded(11)).to(tensor)
        return tensor - 2 * plane * (plane * tensor).sum() / plane.square().sum()


@component
class NewWeights(OnUpdate):
    """Send the weights after a step instead of the gradient."""

    def change(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        return task.weights[name] - 0.1 * tensor


@component
class Cubed(OnUpdate):
    """Send the cube of each value."""

    def change(self, name: str, tensor: Tensor, task: Task) -> Tensor:
        return tensor**3


@component
class PlusPublic(OnUpdate):
    """Add the gradient of a black image of class 0."""

    def transform(self, task: Task, tensors: Named) -> Named:
        black, label = torch.zeros_like(task.data.inputs[:1]), torch.zeros_like(task.data.labels[:1])
        public = gradient_of(task, black, label)
        return {name: tensor + public[name] for name, tensor in tensors.items()}


def gradient_of(task: Task, inputs: Tensor, labels: Tensor) -> Named:
    """Return the gradient of other samples at the task's weights."""
    buffers = {name: buffer.clone() for name, buffer in task.buffers.items()}
    return gradients.gradient(task.model, task.weights, buffers, inputs, labels)[0]


# Known changes of samples.


@component
class Pixels(OnData):
    """Shuffle pixels with a known seed, or brighten them."""

    brighten: bool = False

    def transform_data(self, task: Task, batch: Batch) -> Batch:
        return batch._replace(inputs=repaint(batch.inputs, self.brighten))


def repaint(images: Tensor, brighten: bool, back: bool = False) -> Tensor:
    """Return images (N, C, H, W) as changed by `Pixels`, or the images before the change."""
    if brighten:
        return images.clamp(min=0) ** (2.5 if back else 0.4)
    order = torch.randperm(images[0].numel(), generator=seeded(3))
    return images.flatten(1)[:, order.argsort() if back else order].view_as(images)


# Noise.


@component
class NoiseOn(OnUpdate):
    """Add noise to a share of the values of some tensors: all layers but the first, only biases, or all tensors."""

    to: str = "all"
    share: float = 1.0

    def has_noise(self, name: str) -> bool:
        """Return whether a tensor gets noise."""
        chosen = {"all": True, "biases": name.endswith(".bias"), "not first": not name.startswith("first")}
        return chosen[self.to]

    def add_noise(self, task: Task, tensors: Named) -> Named:
        found = {}
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=task.generator)
            chosen = torch.rand(tensor.shape, generator=task.generator) < self.share
            found[name] = tensor + noise * chosen if self.has_noise(name) else tensor
        return found

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        found = {}
        for name, tensor in sent.items():
            clean, noisy = exact(tensor, expected[name]), normal(tensor - expected[name], 1.0)
            if not self.has_noise(name):
                found[name] = clean
            elif self.share == 1:
                found[name] = noisy
            else:
                found[name] = torch.logaddexp(log(1 - self.share) + clean, log(self.share) + noisy)
        return found


@component
class Masked(OnUpdate):
    """Set half of the values to zero, at random."""

    def add_noise(self, task: Task, tensors: Named) -> Named:
        return {n: t * (torch.rand(t.shape, generator=task.generator) < 0.5) for n, t in tensors.items()}

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        return {n: torch.where(t == 0, 0.0, exact(t, expected[n])) for n, t in sent.items()}


@component
class Signs(OnUpdate):
    """Multiply the values of matrices by random signs."""

    def add_noise(self, task: Task, tensors: Named) -> Named:
        draw = task.generator
        return {n: t * torch.randn(t.shape, generator=draw).sign() if t.ndim > 1 else t for n, t in tensors.items()}

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        found = {}
        for name, tensor in sent.items():
            own = exact(tensor, expected[name])
            found[name] = own if tensor.ndim < 2 else torch.logaddexp(own, exact(tensor, -expected[name]))
        return found


@component
class OneNumber(OnUpdate):
    """Add one random number to all values."""

    def add_noise(self, task: Task, tensors: Named) -> Named:
        number = torch.randn(1, generator=task.generator)
        return {name: tensor + number for name, tensor in tensors.items()}

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        values = gradients.flatten(sent)
        residual = values - gradients.flatten(expected)
        number = residual.mean()
        return {"number": normal(number, 1.0), "differences": exact(values, values - residual + number)}


@component
class NoiseOfRows(OnUpdate):
    """Add the same noise to all rows of a tensor."""

    def add_noise(self, task: Task, tensors: Named) -> Named:
        return {n: t + torch.randn(t.shape[1:], generator=task.generator) for n, t in tensors.items()}

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        found = {}
        for name, tensor in sent.items():
            noise = (tensor - expected[name]).mean(0)
            found[f"noise of {name}"] = normal(noise, 1.0)
            found[f"differences of {name}"] = exact(tensor, expected[name] + noise)
        return found


@component
class NoiseOfColumns(OnUpdate):
    """Add a random number to each row of a matrix, multiplied by a known factor of each column."""

    def add_noise(self, task: Task, tensors: Named) -> Named:
        found = {}
        for name, tensor in tensors.items():
            numbers = torch.randn(len(tensor), 1, generator=task.generator)
            found[name] = tensor + numbers * column_factors(tensor) if tensor.ndim > 1 else tensor
        return found

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        found = {}
        for name, tensor in sent.items():
            if tensor.ndim > 1:
                factors = column_factors(tensor)
                numbers = (tensor - expected[name]) @ factors / factors.square().sum()
                found[f"numbers of {name}"] = normal(numbers, 1.0)
                found[f"differences of {name}"] = exact(tensor, expected[name] + numbers[:, None] * factors)
            else:
                found[name] = exact(tensor, expected[name])
        return found


def column_factors(matrix: Tensor) -> Tensor:
    """Return the known factors of a matrix's columns."""
    return torch.rand(matrix.shape[1], generator=seeded(0)).to(matrix) + 0.5


@component
class Opposite(OnUpdate):
    """Add noise to the layer `one`, and subtract the same noise from the layer `other` of a `GatedUnit`."""

    def add_noise(self, task: Task, tensors: Named) -> Named:
        noise = {name: torch.randn(t.shape, generator=task.generator) for name, t in tensors.items()}
        for end in ("weight", "bias"):
            noise[f"other.{end}"] = -noise[f"one.{end}"]
        return {name: tensor + noise[name] for name, tensor in tensors.items()}

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        found = {}
        for end in ("weight", "bias"):
            one, other, head = f"one.{end}", f"other.{end}", f"head.{end}"
            found[one] = normal(sent[one] - expected[one], 1.0)
            found[f"sum of {end}"] = exact(sent[one] + sent[other], expected[one] + expected[other])
            found[head] = normal(sent[head] - expected[head], 1.0)
        return found


@component
class Cancelling(OnUpdate):
    """Add noise with a sum of zero over the rows of a tensor."""

    def add_noise(self, task: Task, tensors: Named) -> Named:
        noise = {name: torch.randn(t.shape, generator=task.generator) for name, t in tensors.items()}
        return {name: t + noise[name] - noise[name].mean(0) for name, t in tensors.items()}

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        found = {}
        for name, tensor in sent.items():
            found[f"noise of {name}"] = normal(tensor - expected[name], 1.0)
            found[f"sums of {name}"] = exact(tensor.sum(0), expected[name].sum(0))
        return found


@component
class InProportion(OnUpdate):
    """Multiply each value by 1 plus a tenth of normal noise."""

    def add_noise(self, task: Task, tensors: Named) -> Named:
        return {n: t * (1 + 0.1 * torch.randn(t.shape, generator=task.generator)) for n, t in tensors.items()}

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        found = {}
        for name, tensor in sent.items():
            deviation = (0.1 * expected[name].abs()).clamp(min=width_of(tensor))
            found[name] = -((tensor - expected[name]) / deviation).double().square() / 2 - deviation.log()
        return found


@component
class FewSeeds(OnUpdate):
    """Add noise from one of 32 seeds."""

    seeds: ClassVar[int] = 32

    def add_noise(self, task: Task, tensors: Named) -> Named:
        drawn = draw_like(tensors, int(torch.randint(self.seeds, (), generator=task.generator)))
        return {name: tensor + drawn[name] for name, tensor in tensors.items()}

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        densities, values = [], gradients.flatten(sent)
        for seed in range(self.seeds):
            drawn = gradients.flatten(draw_like(sent, seed))
            densities.append(exact(values, gradients.flatten(expected) + drawn).sum())
        return {"seed": torch.stack(densities).logsumexp(0)}


@component
class LastDigits(OnUpdate):
    """Add noise in steps of one half, which are larger than the values."""

    def add_noise(self, task: Task, tensors: Named) -> Named:
        return {n: t + (2 * torch.randn(t.shape, generator=task.generator)).round() / 2 for n, t in tensors.items()}

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        found = {}
        for name, tensor in sent.items():
            noise = (2 * (tensor - expected[name]).detach()).round() / 2
            found[name] = exact(tensor, expected[name] + noise) + normal(noise, 1.0)
        return found


@component
class LowRankNoise(OnUpdate):
    """Add noise of rank two to matrices."""

    def add_noise(self, task: Task, tensors: Named) -> Named:
        found = {}
        for name, tensor in tensors.items():
            if tensor.ndim > 1:
                left, right = (torch.randn(size, 2, generator=task.generator) for size in tensor.shape)
                tensor = tensor + left @ right.T
            found[name] = tensor
        return found

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        found = {}
        for name, tensor in sent.items():
            if tensor.ndim > 1:
                beyond = torch.linalg.svdvals(tensor - expected[name])[2:]
                found[f"rank of {name}"] = normal(beyond / width_of(tensor), 1.0)
            else:
                found[name] = exact(tensor, expected[name])
        return found


@component
class ColumnsShuffled(OnUpdate):
    """Shuffle the values of each column at random."""

    def add_noise(self, task: Task, tensors: Named) -> Named:
        draw = task.generator
        return {n: t.gather(0, torch.randn(t.shape, generator=draw).argsort(0)) for n, t in tensors.items()}

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        return {f"values of {n}": exact(t.sort(0).values, expected[n].sort(0).values) for n, t in sent.items()}


# Missing and wrong declarations.


class WithoutDeclaration(OnUpdate):
    """Base class of defences whose own code is not declared: `wrap_update` hides the declaration of the base class."""

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        return super().wrap_update(next)


@component
class UndeclaredRows(WithoutDeclaration, NoiseOfRows):
    """Add the same noise to all rows of a tensor, without a declaration."""


@component
class UndeclaredOrder(WithoutDeclaration, Shuffled):
    """Permute values with a known seed, without a declaration."""


@component
class NoisyImages(Defence):
    """Train on slightly noisy images, without a declaration."""

    def wrap_data(self, next: DataMethod) -> DataMethod:
        def method(task: Task) -> Batch:
            batch = next(task)
            noise = 0.03 * torch.randn(batch.inputs.shape, generator=task.generator)
            return batch._replace(inputs=(batch.inputs + noise).clamp(0, 1))

        return method


@component
class WrongNoise(KnownNoise):
    """Declare normal noise of unknown seeds, and add noise of a known seed."""

    def transform(self, task: Task, tensors: Named) -> Named:
        return tensors

    def add_noise(self, task: Task, tensors: Named) -> Named:
        return super().transform(task, tensors)

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        return normal_log_likelihood(sent, expected, 1.0)


@component
class WrongOrder(Shuffled):
    """Declare that values are unchanged, and permute them with a known seed."""

    def transform(self, task: Task, tensors: Named) -> Named:
        return tensors

    def add_noise(self, task: Task, tensors: Named) -> Named:
        return super().transform(task, tensors)


@component
class WrongPixels(Pixels):
    """Declare that samples are unchanged, and shuffle their pixels with a known seed."""

    def wrap_data(self, next: DataMethod) -> DataMethod:
        return lambda task: Pixels.transform_data(self, task, next(task))

    def transform_data(self, task: Task, batch: Batch) -> Batch:
        return batch


# Controls.


@component
class Nothing(OnUpdate):
    """Send nothing of the samples, except that "labels" sends the gradient of the last tensor."""

    what: str

    def transform(self, task: Task, tensors: Named) -> Named:
        if self.what != "labels":
            return {name: 0 * tensor for name, tensor in tensors.items()}
        last = list(tensors)[-1]
        return {name: tensor if name == last else 0 * tensor for name, tensor in tensors.items()}


@component
class Noise(Nothing):
    """Send pure noise."""

    what: str = "zeros"

    def add_noise(self, task: Task, tensors: Named) -> Named:
        return {name: t + torch.randn(t.shape, generator=task.generator) for name, t in tensors.items()}

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        return normal_log_likelihood(sent, expected, 1.0)


@component
class Unrelated(WithoutDeclaration):
    """Send the gradient of another sample, or all values in a random order."""

    shuffle: bool = False

    def add_noise(self, task: Task, tensors: Named) -> Named:
        if not self.shuffle:
            count: Any = len(task.data.labels)
            assert task.others is not None
            return gradient_of(task, task.others.inputs[:count], task.others.labels[:count])
        orders = {name: torch.randperm(t.numel(), generator=task.generator) for name, t in tensors.items()}
        return {name: t.flatten()[orders[name]].view_as(t) for name, t in tensors.items()}
