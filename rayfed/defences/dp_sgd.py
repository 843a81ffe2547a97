"""DP-SGD: clip every sample's gradient and add noise to their sum, in every local step.

Source: Abadi et al. 2016, 'Deep learning with differential privacy', algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor, nn

from rayfed.core.vectorised import map_over_samples
from rayfed.defences.base import Batch, GradientMethod, Task
from rayfed.defences.declarations import normal_log_likelihood
from rayfed.defences.noise import clip_factors, sample_norms, scaled_sum
from rayfed.defences.private import Private
from rayfed.defences.sample_gradients import check_sample_gradients
from rayfed.errors import UserError
from rayfed.gradients import vmap_refusal
from rayfed.models.build import uses_batch_statistics
from rayfed.privacy.accountant import Release
from rayfed.privacy.printing import format_lower
from rayfed.privacy.sampling import add_noise, sample_gaussian
from rayfed.privacy.spending import ClientWork, PrivacySetting, Spending
from rayfed.registry import component
from rayfed.update import Named

_NUMBERS_AT_ONCE = 16_000_000
"""Maximum number of values in the per-sample gradients of one vectorised call; a larger limit only uses more memory."""


@component
class DpSgd(Private):
    """Clip every sample's gradient and add Gaussian noise to the sum, which hides single samples of a client.

    The guarantee holds against anyone who sees the client's updates, including the server. The sum of a step's clipped
    gradients gets Gaussian noise of standard deviation `noise_multiplier * clip` and is divided by the expected batch
    size. With `training.sampling: poisson`, sampling amplifies privacy. With `shuffle`, every use of a sample counts in
    full. The participation of a client and its number of samples are not hidden.
    """

    samplewise: ClassVar[bool] = True
    title: ClassVar[str] = "dp_sgd"
    bounded: ClassVar[str] = "the clip bound"

    def check(self, model: nn.Module) -> None:
        """Raise `UserError` if the model has batch norm in training mode, which mixes the samples of a batch."""
        if uses_batch_statistics(model):
            raise UserError(
                "dp_sgd and fed_cdp clip per-sample gradients, but batch norm mixes the samples of a batch: use group "
                "norm (`norm: group` of convnet and the resnets, `nn.GroupNorm` in your own module), or fix the "
                "statistics with `model.batch_norm: eval`, which changes the model of all arms, including the "
                "undefended one"
            )

    def check_gradient(self, task: Task) -> None:
        """Raise `UserError` if the model's per-sample gradients cannot be computed."""
        check_sample_gradients(self.title, task)

    def wrap_gradient(self, next: GradientMethod) -> GradientMethod:
        """Clip each sample's gradient, add the clipped gradients, and add noise to the sum."""

        def gradient(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
            sums = {name: torch.zeros_like(w) for name, w in weights.items()}
            losses = []
            for part in _parts(batch, weights):
                each, loss = _each(next, task, weights, part)
                for name, total in self.clipped_sum(each, task).items():
                    sums[name] += total
                losses.append(loss)
            sums = add_noise(sums, self.noise(task), sample_gaussian, task.generator)
            mean = {name: s / task.batch_size for name, s in sums.items()}
            return mean, torch.cat(losses).mean() if losses else torch.tensor(torch.nan, device=batch.inputs.device)

        return gradient

    @property
    def adds_noise(self) -> bool:
        """Return whether the noise has a deviation above 0."""
        return self.noise_multiplier != 0

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the sum of the clipped sample gradients (N, ...), divided by the expected batch size."""
        return {name: total / task.batch_size for name, total in self.clipped_sum(tensors, task).items()}

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        """Return the log density of each sent value: normal around the mean of the clipped sample gradients."""
        return normal_log_likelihood(sent, expected, self.noise(task) / task.batch_size)

    def clipped_sum(self, each: Named, task: Task) -> Named:
        """Return the sum over samples of gradients (N, ...), each clipped to a joint norm over all layers."""
        factors = clip_factors(torch.stack([sample_norms(g) for g in each.values()]).norm(dim=0), self.clip)
        return {name: scaled_sum(g, factors) for name, g in each.items()}

    def noise(self, task: Task) -> float:
        """Return the standard deviation of the noise that is added to the sum of clipped gradients."""
        return self.deviation

    def released(self, setting: PrivacySetting, multiplier: float) -> tuple[Release, ...]:
        """Return one release per kind of client, which covers all local steps of the client in the run."""
        if setting.sample_sampling == "poisson":
            return tuple(
                Release("gaussian", multiplier, work.rounds * work.steps, work.batch_size / work.samples)
                for work in setting.works
            )
        return tuple(Release("gaussian", multiplier, work.rounds * _uses(work)) for work in setting.works)

    def spends(self, setting: PrivacySetting) -> Spending:
        """Return the privacy accounting of the client with the largest epsilon."""
        assert self.noise_multiplier is not None
        poisson = setting.sample_sampling == "poisson"
        return Spending(
            self.released(setting, self.noise_multiplier),
            self.delta,
            unit="sample",
            adjacency="each single sample (zero-out adjacency)",
            against="anyone who sees the client's updates, including the server",
            mechanism=f"Gaussian noise of {format_lower(self.noise_multiplier)} times {self.bounded} in every local "
            "step, " + ("Poisson sampling" if poisson else "shuffled batches, no amplification by sampling"),
        )


def _uses(work: ClientWork) -> int:
    """Return the maximum number of times that a sample is used in one round."""
    return ceil(work.steps / ceil(work.samples / work.batch_size))


def _parts(batch: Batch, weights: Named) -> Iterator[Batch]:
    """Yield parts of a batch whose per-sample gradients fit into one call; none for an empty batch."""
    size = max(1, _NUMBERS_AT_ONCE // sum(w.numel() for w in weights.values()))
    for start in range(0, len(batch.labels), size):
        yield Batch(batch.inputs[start : start + size], batch.labels[start : start + size])


def _each(next: GradientMethod, task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
    """Return every sample's gradient, (N, ...) by name, and the losses (N,)."""

    def one(image: Tensor, label: Tensor) -> tuple[Named, Tensor]:
        return next(task, weights, Batch(image[None], label[None]))

    refused = vmap_refusal(task.model, weights, task.buffers, batch.inputs[:1], batch.labels[:1])
    found: tuple[Named, Tensor] = map_over_samples(one, together=not refused)(batch.inputs, batch.labels)
    return found
