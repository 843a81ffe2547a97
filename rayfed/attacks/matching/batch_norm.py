"""Batch-norm statistics: what a batch looks like to every batch norm, as the protocol shows it to an attacker.

A client returns the running statistics that its local steps have moved. In step j a batch norm of momentum m makes its
running mean r_j = (1 - m) r_(j-1) + m b_j from the batch's mean b_j, and of the batch's unbiased variance alike. So
after one step the batch's own mean and variance follow from what was sent and what came back, but for rounding; after k
steps their mean over the batches, in which step j counts (1 - m)^(k - j), does.

Source: Yin et al. 2021, "See through Gradients", section 3 (fidelity regularisation), for the prior, which holds a
batch's statistics against those of earlier batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.linalg import vector_norm
from torch.nn.modules.batchnorm import _BatchNorm

from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.attacks.matching.local_steps import batches
from rayfed.attacks.matching.priors import Prior
from rayfed.update import LocalTraining, Named, Observation

Moments = dict[str, tuple[Tensor, Tensor]]
"""Name of a batch norm -> mean and unbiased variance (C,) of a batch that enters it."""


def batch_norm_prior(model: nn.Module, observation: Observation) -> Prior | None:
    """Return the prior: distances of mean and variance (divided by N) to the running ones, summed over batch norms.

    None for a model without running statistics, whose statistics are still those that it began with, or whose client
    returned its batch's own. All victims of the problem were sent the observation's weights.
    """
    names = [name for name, _ in _tracking(model) if _has_moved(observation, name)]
    if not names or returned_moments(model, observation):
        return None
    network = without_tracking(model).to(next(iter(observation.weights.values())).device)
    state = observation.weights | buffers_for(network, observation)
    moments = _Probe(network, names, correction=0)

    def of_one(images: Tensor) -> Tensor:
        distances = [
            vector_norm(mean - observation.buffers[f"{name}.running_mean"])
            + vector_norm(variance - observation.buffers[f"{name}.running_var"])
            for name, (mean, variance) in moments(state, images).items()
        ]
        return torch.stack(distances).sum()

    return vmap(of_one)


def returned_moments(model: nn.Module, observation: Observation) -> Moments:
    """Return the mean moments of a client's batches for every batch norm whose statistics its steps changed.

    Source: this module's first lines.
    """
    found: Moments = {}
    for name, module in _tracking(model):
        kept = _kept(module, observation, name)
        if kept == 1 or f"{name}.running_mean" not in observation.returned_buffers:  # private, or in evaluation mode
            continue
        sent, returned = (
            [tensors[f"{name}.{part}"].double() for part in ("running_mean", "running_var")]
            for tensors in (observation.buffers, observation.returned_buffers)
        )
        if not all(map(torch.equal, sent, returned)):
            mean, variance = ((r - kept * s) / (1 - kept) for r, s in zip(returned, sent, strict=True))
            found[name] = mean, variance.clamp(min=0)
    return found


@dataclass(frozen=True)
class MovedStatistics:
    """Distance of images' moments from those that V clients returned (`returned_moments`)."""

    targets: dict[str, tuple[Tensor, Tensor]]
    """Name of a batch norm -> means and variances (V, C)."""
    probe: _Probe
    state: Named
    each: Callable[..., Callable[..., Moments]]
    """Maps a function of one batch over many (`Way.each`)."""
    shares: tuple[tuple[slice, float], ...]
    """Samples of every step's batch, and the share of its moments in their mean."""

    @classmethod
    def of(
        cls, observations: Sequence[Observation], model: nn.Module, network: nn.Module, state: Named, each: Any = vmap
    ) -> MovedStatistics | None:
        """Return the distance of observations that `in_groups` puts together; None where no statistics moved.

        `model` is the clients', `network` is what `without_tracking` made of it, and `state` its tensors.
        """
        moments = [returned_moments(model, observation) for observation in observations]
        names = [name for name in moments[0] if all(name in of for of in moments)]
        if not names:
            return None
        device, dtype = next((t.device, t.dtype) for t in state.values() if t.is_floating_point())
        targets = {
            name: (
                torch.stack([of[name][0] for of in moments]).to(device, dtype),
                torch.stack([of[name][1] for of in moments]).to(device, dtype),
            )
            for name in names
        }
        first = observations[0]
        momentum = next(module.momentum for name, module in _tracking(model) if name == names[0])
        shares = tuple(_shares(first.batch_size, first.local, momentum))
        return cls(targets, _Probe(network, names, correction=1), state, each, shares)

    def __call__(self, images: Tensor, victims: Tensor) -> Tensor:
        """Return how far images (Q, N, C, H, W) of victims (Q,) are from what these returned, (Q,), with its graph.

        Squared differences of means and deviations, in units of the returned deviation, are averaged over channels and
        batch norms.
        """
        parts = [(self.each(lambda x: self.probe(self.state, x))(images[:, at]), share) for at, share in self.shares]
        distances = []
        for name, (mean, variance) in self.targets.items():
            own_mean = torch.stack([share * of[name][0] for of, share in parts]).sum(0)
            own_variance = torch.stack([share * of[name][1] for of, share in parts]).sum(0)
            scale, own_scale = (v + _LEAST * variance.mean() for v in (variance[victims], own_variance))
            apart = (own_mean - mean[victims]).square() + (own_scale.sqrt() - scale.sqrt()).square()
            distances.append((apart / scale).mean(-1))
        return torch.stack(distances).mean(0)


_LEAST = 1e-3
"""Share of the channels' mean variance that a channel's own is raised by: a dead one has none to divide by."""


class _Probe:
    """Measures what enters the batch norms of a network."""

    def __init__(self, network: nn.Module, names: Sequence[str], correction: int) -> None:
        self._network, self._names, self._correction = network, names, correction

    def __call__(self, state: Named, images: Tensor) -> Moments:
        """Return the moments of images (N, C, H, W)."""
        found: Moments = {}
        hooks = [
            self._network.get_submodule(name).register_forward_pre_hook(self._measuring(name, found))
            for name in self._names
        ]
        try:
            functional_call(self._network, state, (images,))
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def _measuring(self, name: str, found: Moments) -> Callable[..., None]:
        def measure(_: nn.Module, inputs: tuple[Tensor]) -> None:
            over = [axis for axis in range(inputs[0].ndim) if axis != 1]
            found[name] = inputs[0].mean(over), inputs[0].var(over, correction=self._correction)

        return measure


def _tracking(model: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Yield the names of the batch norms that keep running statistics, and these."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            yield name, module


def _has_moved(observation: Observation, name: str) -> bool:
    """Return whether a batch norm's statistics are others than 0 and 1, with which all begin.

    Federated averaging leaves out what counts them, so that only the values tell.
    """
    mean, variance = (observation.buffers[f"{name}.{part}"] for part in ("running_mean", "running_var"))
    return not (bool((mean == 0).all()) and bool((variance == 1).all()))


def _steps_before(observation: Observation, name: str) -> int | None:
    """Return how many batches have moved a batch norm's statistics before; None if they were not counted."""
    counted = observation.buffers.get(f"{name}.num_batches_tracked")
    return None if counted is None else int(counted)


def _kept(module: _BatchNorm, observation: Observation, name: str) -> float:
    """Return the share of the sent statistics in the returned ones."""
    steps = observation.local.steps if module.training else 0
    if module.momentum is None:  # the mean over all batches so far
        before = _steps_before(observation, name) or 0
        return before / (before + steps) if steps else 1.0
    return float((1 - module.momentum) ** steps)


def _shares(samples: int, local: LocalTraining, momentum: float | None) -> Iterator[tuple[slice, float]]:
    """Yield every step's samples and the share of its batch in the mean of `returned_moments`."""
    kept = 1.0 if momentum is None else 1 - momentum
    weights = [kept ** (local.steps - 1 - step) for step in range(local.steps)]
    for at, weight in zip(batches(samples, local), weights, strict=True):
        yield at, weight / sum(weights)
