"""Priors from batch-norm statistics: the mean and variance of a batch at the input of each batch norm.

A client returns the running statistics after its local steps. Let b_j be the batch mean in step j. A batch norm of
momentum m updates its running mean to r_j = (1 - m) r_(j-1) + m b_j. The running variance is updated with the unbiased
batch variance. After one step, the batch's mean and variance therefore follow from the sent and returned statistics, up
to rounding. After k steps, only their weighted mean over the batches follows, in which step j has weight (1 - m)^(k -
j).

Source: Yin et al. 2021, "See through Gradients", section 3 (fidelity regularisation), for the prior, which compares a
batch's statistics with those of earlier batches.
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
"""Name of a batch norm -> mean and unbiased variance (C,) of its input batch."""


def batch_norm_prior(model: nn.Module, observation: Observation) -> Prior | None:
    """Return the prior: distances of the images' batch-norm mean and variance (over N) from the running statistics.

    Returns None if the model has no running statistics, if they still have their initial values, or if the client
    returned statistics of its batch. All victims of the problem must have received the observation's weights.
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
    """Return the mean and variance of a client's batches at each batch norm whose statistics the local steps changed.

    See the module docstring for the derivation.
    """
    found: Moments = {}
    for name, module in _tracking(model):
        kept = _kept(module, observation, name)
        if kept == 1 or f"{name}.running_mean" not in observation.returned_buffers:  # frozen (eval mode) or private
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
    """Distance of the images' batch-norm statistics from those that V clients returned (`returned_moments`)."""

    targets: dict[str, tuple[Tensor, Tensor]]
    """Name of a batch norm -> means and variances (V, C)."""
    probe: _Probe
    state: Named
    each: Callable[..., Callable[..., Moments]]
    """Function that maps a function of one batch over many batches (`Way.each`)."""
    shares: tuple[tuple[slice, float], ...]
    """Samples of each step's batch, and the weight of its moments in their mean."""

    @classmethod
    def of(
        cls, observations: Sequence[Observation], model: nn.Module, network: nn.Module, state: Named, each: Any = vmap
    ) -> MovedStatistics | None:
        """Return the distance for a group of observations (`in_groups`), or None if no batch-norm statistics changed.

        `model` is the clients' model, `network` the copy from `without_tracking`, and `state` the copy's tensors.
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
        """Return the distance (Q,) of images (Q, N, C, H, W) from victims' (Q,) batch-norm statistics, differentiable.

        The distance is the mean over channels and batch norms of squared differences of means and standard deviations,
        in units of the returned standard deviation.
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
"""Share of the mean variance of all channels that is added to each variance, to avoid division by zero."""


class _Probe:
    """Measures the inputs of the batch norms of a network."""

    def __init__(self, network: nn.Module, names: Sequence[str], correction: int) -> None:
        self._network, self._names, self._correction = network, names, correction

    def __call__(self, state: Named, images: Tensor) -> Moments:
        """Return the moments of the batch norms' inputs for images (N, C, H, W)."""
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
    """Yield names and modules of the batch norms that track running statistics."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            yield name, module


def _has_moved(observation: Observation, name: str) -> bool:
    """Return whether a batch norm's statistics differ from their initial values 0 and 1.

    Federated averaging leaves out the batch counter, so only the values show this.
    """
    mean, variance = (observation.buffers[f"{name}.{part}"] for part in ("running_mean", "running_var"))
    return not (bool((mean == 0).all()) and bool((variance == 1).all()))


def _steps_before(observation: Observation, name: str) -> int | None:
    """Return the number of batches that updated a batch norm's statistics earlier, or None if not counted."""
    counted = observation.buffers.get(f"{name}.num_batches_tracked")
    return None if counted is None else int(counted)


def _kept(module: _BatchNorm, observation: Observation, name: str) -> float:
    """Return the weight of the sent statistics in the returned ones."""
    steps = observation.local.steps if module.training else 0
    if module.momentum is None:  # cumulative mean over all batches
        before = _steps_before(observation, name) or 0
        return before / (before + steps) if steps else 1.0
    return float((1 - module.momentum) ** steps)


def _shares(samples: int, local: LocalTraining, momentum: float | None) -> Iterator[tuple[slice, float]]:
    """Yield each step's samples, and the weight of its batch in the mean of `returned_moments`."""
    kept = 1.0 if momentum is None else 1 - momentum
    weights = [kept ** (local.steps - 1 - step) for step in range(local.steps)]
    for at, weight in zip(batches(samples, local), weights, strict=True):
        yield at, weight / sum(weights)
