"""The head of a model: what a gradient shows of the logits' residuals, whatever the model ends in.

Cross entropy's slope in the logits is the residual r = p - y: what the model gives each class, less the label. A
gradient is the mean of J^T r over the batch, J the slope of the logits in the parameters. Two kinds of heads are told
apart by trials, not by names or shapes:

- A matrix W whose product with some layer's input is what the logits are made of (times a number, plus a constant,
  plus anything that is the same for all classes, as a logarithm of softmax adds): its gradient is the mean of r h^T,
  h the features, and that of a bias behind it is the mean of r itself.
- Anything else (a convolution and a mean, a cosine, several matrices, tied or normalised weights), and a matrix without
  a bias behind parameters whose slopes are the same for all inputs, such as a norm's shift: r is that for which
  J^T r fits the gradient best. J is measured on inputs of the attacker's own, and every parameter counts by how little
  its slope varies with the input: those that do not vary, as a bias in front of a pooling, give r exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rayfed import losses
from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.gradients import within
from rayfed.update import Named, Observation

_LARGEST = 20_000_000
"""Values of a J that is measured, the smallest parameters first."""
_TRIALS = 8
"""Inputs on which a head is tried."""
_AT_ONCE = 100
"""Inputs of one pass without its graph."""
_SAME = 1e-4
"""Relative difference of two float32 results that are the same by algebra."""


@dataclass(frozen=True)
class Head:
    """A model as far as its head goes, at the weights that clients were sent."""

    model: nn.Module
    state: Named
    layer: str | None
    """The module that takes the features; None where no matrix of the update makes the logits of them."""
    scale: float
    """The logits are this times the layer's output."""
    slopes: _Slopes | None
    """What shows r where there is no such layer, or none with a bias."""

    @classmethod
    def of(cls, model: nn.Module, observation: Observation) -> Head:
        """Find the head of the clients' model."""
        device = next(iter(observation.weights.values())).device
        network = without_tracking(model).to(device)
        state = {**observation.weights, **buffers_for(network, observation)}
        inputs = observation.sample.noise(_TRIALS, torch.Generator().manual_seed(0)).to(device)
        for layer in _candidates(observation):
            scale = _scale(network, state, layer, inputs)
            if scale is None:
                continue
            exact = None if f"{layer}.bias" in observation.update else _Slopes.of(network, state, observation, inputs)
            centred = losses.of(network).takes == "classes"
            return cls(network, state, layer, scale, exact if exact is not None and exact.exact(centred) else None)
        return cls(network, state, None, 1.0, _Slopes.of(network, state, observation, inputs))

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(iter(self.state.values())).device

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the logits (n, K) of inputs (n, *shape), with their graph."""
        return _forward(self.model, self.state, None, inputs)[1]

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the features (n, F), where a layer takes them, and the logits (n, K) of inputs (n, *shape)."""
        found = [_forward(self.model, self.state, self.layer, part) for part in inputs.split(_AT_ONCE)]
        features = None if self.layer is None else torch.cat([f for f, _ in found if f is not None])
        return features, torch.cat([logits for _, logits in found])

    def products(self, gradient: Named) -> tuple[Tensor | None, Tensor | None]:
        """Return what a gradient shows of the means of r h^T (K, F) and of r (K,), each None where it does not."""
        fitted = None if self.slopes is None else self.slopes.residual(gradient)
        if self.layer is None:
            return None, fitted
        bias = gradient.get(f"{self.layer}.bias")
        return gradient[f"{self.layer}.weight"] / self.scale, fitted if bias is None else bias / self.scale


@dataclass(frozen=True)
class _Slopes:
    """Slopes of the logits in the smallest parameters, measured on inputs of the attacker's own."""

    names: tuple[str, ...]
    mean: Tensor
    """(K, P) float64"""
    variance: Tensor
    """(P,) float64, how much they vary with the input."""

    @classmethod
    def of(cls, model: nn.Module, state: Named, observation: Observation, inputs: Tensor) -> _Slopes:
        names = tuple(_smallest(observation))
        return cls(names, *_mean_slopes(model, state, names, inputs))

    @property
    def _rounding(self) -> Tensor:
        """Variance of slopes that do not vary."""
        return _SAME**2 * self.mean.square().mean(0).max()

    def exact(self, centred: bool) -> bool:
        """Return whether those that do not vary tell all of r, which sums to nothing over classes (`centred`)."""
        same = self.mean[:, self.variance <= self._rounding]
        if not centred:
            return bool(torch.linalg.matrix_rank(same) == len(same))
        return bool(torch.linalg.matrix_rank(same - same.mean(0)) == len(same) - 1)

    def residual(self, gradient: Named) -> Tensor:
        """Return the r (K,) that fits a gradient best."""
        seen = torch.cat([gradient[name].flatten() for name in self.names]).double().nan_to_num(0, 0, 0)
        weights = 1 / (self.variance + self._rounding).clamp(min=torch.finfo(torch.float64).tiny)
        weighted = self.mean * weights
        found: Tensor = torch.linalg.pinv(weighted @ self.mean.T, hermitian=True) @ (weighted @ seen)
        return found.to(torch.float32)


def _candidates(observation: Observation) -> Iterator[str]:
    """Yield the modules with a matrix of a row for each class in the update, the last first."""
    for name, tensor in reversed(observation.update.items()):
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight" and tensor.ndim == 2 and len(tensor) == observation.classes and layer:
            yield layer


def _forward(model: nn.Module, state: Named, layer: str | None, inputs: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return the layer's input, where there is one, and the logits, both in the type of the weights.

    A model may compute in another type within, as under `torch.autocast`.
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
    """Return by what the layer's product with its input is multiplied to make the logits; None where it does not.

    The slope of some combination of the logits in the layer's matrix tells: nothing else than this product may read it.
    """
    weight = state[f"{layer}.weight"].detach().requires_grad_()
    features, logits = _forward(model, state | {f"{layer}.weight": weight}, layer, inputs)
    if features is None or features.ndim != 2 or logits.ndim != 2 or features.shape[1] != weight.shape[1]:
        return None
    centred = _centred if losses.of(model).takes == "classes" else torch.Tensor.clone
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
    """Return logits (n, K) less their mean: what is added to all of a sample's changes no loss."""
    return logits - logits.mean(1, keepdim=True)


def _smallest(observation: Observation) -> list[str]:
    """Return the names of parameters whose slopes can be held, the smallest before the others."""
    left = _LARGEST // observation.classes
    chosen: list[str] = []
    for name, tensor in sorted(observation.update.items(), key=lambda item: item[1].numel()):
        left -= tensor.numel()
        if left < 0 and chosen:
            break
        chosen.append(name)
    return chosen


def _mean_slopes(model: nn.Module, state: Named, names: tuple[str, ...], inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of J over the inputs, (K, P) float64, and the variance of its columns, (P,)."""
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
