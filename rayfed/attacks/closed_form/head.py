"""Head of a model: compute the residuals of the logits from a gradient, for any kind of last layer.

The slope of cross entropy in the logits is the residual r = p - y, the predicted probabilities minus the label. A
gradient is the mean of J^T r over the batch, where J is the slope of the logits in the parameters. Test inputs, not
names or shapes, distinguish two kinds of heads.

- Linear head: the logits are a matrix W times a layer's input h, up to a factor and constants. The gradient of W is the
  mean of r h^T, and that of its bias is the mean of r.
- Any other head, such as a convolution with a mean, a cosine, or tied weights. Here r is the least-squares solution of
  J^T r = gradient. J is measured on the attacker's own inputs, and parameters whose slope varies less with the input
  have a larger weight. Parameters with a constant slope, such as a bias before pooling, give r exactly. A linear head
  without a bias also uses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.core import losses
from rayfed.gradients import within
from rayfed.update import Named, Observation

_LARGEST = 20_000_000
"""Maximum number of measured values of J; the smallest parameters are measured first."""
_TRIALS = 8
"""Number of test inputs for a head."""
_AT_ONCE = 100
"""Number of inputs per pass without a graph."""
_SAME = 1e-4
"""Maximum relative difference of two float32 results that are algebraically equal."""


@dataclass(frozen=True)
class Head:
    """The head of a model at the weights that clients were sent."""

    model: nn.Module
    state: Named
    layer: str | None
    """Name of the linear layer that takes the features; None if the head is not linear."""
    scale: float
    """Ratio of the logits to the layer's output."""
    slopes: _Slopes | None
    """Slopes from which r is computed if there is no such layer, or if it has no bias."""

    @classmethod
    def of(cls, model: nn.Module, observation: Observation) -> Head:
        """Detect the head (the last layer) of the clients' model at the observed weights."""
        device = next(iter(observation.weights.values())).device
        network = without_tracking(model).to(device)
        state = {**observation.weights, **buffers_for(network, observation)}
        inputs = observation.sample.noise(_TRIALS, torch.Generator().manual_seed(0)).to(device)
        for layer in _candidates(observation):
            scale = _scale(network, state, layer, inputs)
            if scale is None:
                continue
            exact = None if f"{layer}.bias" in observation.update else _Slopes.of(network, state, observation, inputs)
            centred = losses.get_loss(network).takes == "classes"
            return cls(network, state, layer, scale, exact if exact is not None and exact.exact(centred) else None)
        return cls(network, state, None, 1.0, _Slopes.of(network, state, observation, inputs))

    @property
    def device(self) -> torch.device:
        """Return the device of the model's weights."""
        return next(iter(self.state.values())).device

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the logits (n, K) of inputs (n, *shape), with the autograd graph."""
        return _forward(self.model, self.state, None, inputs)[1]

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the features (n, F), or None without a linear head, and the logits (n, K) of inputs (n, *shape)."""
        found = [_forward(self.model, self.state, self.layer, part) for part in inputs.split(_AT_ONCE)]
        features = None if self.layer is None else torch.cat([f for f, _ in found if f is not None])
        return features, torch.cat([logits for _, logits in found])

    def products(self, gradient: Named) -> tuple[Tensor | None, Tensor | None]:
        """Return the batch means of r h^T (K, F) and r (K,) for residuals r and features h; None if unknown."""
        fitted = None if self.slopes is None else self.slopes.residual(gradient)
        if self.layer is None:
            return None, fitted
        bias = gradient.get(f"{self.layer}.bias")
        return gradient[f"{self.layer}.weight"] / self.scale, fitted if bias is None else bias / self.scale


@dataclass(frozen=True)
class _Slopes:
    """Slopes of the logits in the smallest parameters, measured on the attacker's own inputs."""

    names: tuple[str, ...]
    mean: Tensor
    """(K, P) float64"""
    variance: Tensor
    """(P,) float64, variance of the slopes over the inputs."""

    @classmethod
    def of(cls, model: nn.Module, state: Named, observation: Observation, inputs: Tensor) -> _Slopes:
        names = tuple(_smallest(observation))
        return cls(names, *_mean_slopes(model, state, names, inputs))

    @property
    def _rounding(self) -> Tensor:
        """Variance due to rounding of slopes that are constant."""
        return _SAME**2 * self.mean.square().mean(0).max()

    def exact(self, centred: bool) -> bool:
        """Return whether logit derivatives that are the same for all inputs determine the residuals r of the logits.

        If `centred`, r is known to sum to zero over the classes.
        """
        same = self.mean[:, self.variance <= self._rounding]
        if not centred:
            return bool(torch.linalg.matrix_rank(same) == len(same))
        return bool(torch.linalg.matrix_rank(same - same.mean(0)) == len(same) - 1)

    def residual(self, gradient: Named) -> Tensor:
        """Return the residuals r (K,) of the logits for a gradient, by weighted least squares."""
        seen = torch.cat([gradient[name].flatten() for name in self.names]).double().nan_to_num(0, 0, 0)
        weights = 1 / (self.variance + self._rounding).clamp(min=torch.finfo(torch.float64).tiny)
        weighted = self.mean * weights
        found: Tensor = torch.linalg.pinv(weighted @ self.mean.T, hermitian=True) @ (weighted @ seen)
        return found.to(torch.float32)


def _candidates(observation: Observation) -> Iterator[str]:
    """Yield the modules of the update whose weight is a matrix with one row per class, last module first."""
    for name, tensor in reversed(observation.update.items()):
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight" and tensor.ndim == 2 and len(tensor) == observation.classes and layer:
            yield layer


def _forward(model: nn.Module, state: Named, layer: str | None, inputs: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return the layer's input, or None without a layer, and the logits, both in the type of the weights.

    Models may compute in another type internally, such as under `torch.autocast`.
    """
    own = next(iter(state.values())).dtype
    if layer is None:
        return None, functional_call(model, state, (inputs,)).to(own)
    seen: list[Tensor] = []
    hook = model.get_submodule(layer).register_forward_pre_hook(lambda _, entered: seen.append(entered[0]))
    try:
        logits = functional_call(model, state, (inputs,))
    finally:
        hook.remove()
    return (seen[0].to(own) if len(seen) == 1 else None), logits.to(own)


def _scale(model: nn.Module, state: Named, layer: str, inputs: Tensor) -> float | None:
    """Return the factor between the layer's output and the logits, or None if the head is not linear in this layer.

    The check uses the slope of a random combination of the logits in the layer's matrix.
    """
    weight = state[f"{layer}.weight"].detach().requires_grad_()
    features, logits = _forward(model, state | {f"{layer}.weight": weight}, layer, inputs)
    if features is None or features.ndim != 2 or logits.ndim != 2 or features.shape[1] != weight.shape[1]:
        return None
    centred = _centred if losses.get_loss(model).takes == "classes" else torch.Tensor.clone
    mix = centred(torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits))
    (slope,) = torch.autograd.grad(logits, weight, mix, allow_unused=True)
    if slope is None:
        return None
    expected = (mix.T @ features).detach()
    scale = (slope * expected).sum() / expected.square().sum()
    bias = f"{layer}.bias"
    apart = centred(logits - scale * (features @ weight.T + state.get(bias, 0)))
    same = (slope - scale * expected).norm() <= _SAME * slope.norm() and apart.norm() <= _SAME * logits.norm()
    return float(scale) if same and scale != 0 else None


def _centred(logits: Tensor) -> Tensor:
    """Return logits (n, K) minus their mean per sample, because a constant does not change the loss."""
    return logits - logits.mean(1, keepdim=True)


def _smallest(observation: Observation) -> list[str]:
    """Return the names of the parameters whose slopes fit in memory, smallest parameters first."""
    left = _LARGEST // observation.classes
    chosen: list[str] = []
    for name, tensor in sorted(observation.update.items(), key=lambda item: item[1].numel()):
        left -= tensor.numel()
        if left < 0 and chosen:
            break
        chosen.append(name)
    return chosen


def _mean_slopes(model: nn.Module, state: Named, names: tuple[str, ...], inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of J over the inputs (K, P) in float64, and the variance of its columns (P,)."""
    leaves = {name: state[name].detach().requires_grad_() for name in names}

    def rows(module: nn.Module, one: Tensor) -> Tensor:
        logits = module(one[None])[0]
        slopes = [
            torch.autograd.grad(z, list(leaves.values()), retain_graph=True, materialize_grads=True) for z in logits
        ]
        return torch.stack([torch.cat([s.flatten() for s in row]) for row in slopes]).double()

    total = square = torch.zeros((), dtype=torch.float64, device=inputs.device)
    for one in inputs:
        found = within(model, state | leaves, lambda module, one=one: rows(module, one))  # type: ignore[misc]
        total, square = total + found, square + found.square()
    total, square = total.nan_to_num(0, 0, 0), square.nan_to_num(0, 0, 0)
    mean = total / len(inputs)
    return mean, (square / len(inputs) - mean.square()).clamp(min=0).mean(0)
