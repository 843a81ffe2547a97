"""Remove weight norm: compute a weight's gradient from the gradients of its length and of its direction.

An update does not contain the gradient of a weight `w = g v / |v|`, only those of g and v. Row by row, they are
`dL/dg = dL/dw . v/|v|` and `dL/dv = g/|v| (dL/dw - dL/dg v/|v|)`, and they determine `dL/dw`. So closed forms can study
the model without weight norm.

Source: Salimans and Kingma 2016, "Weight Normalization", equation 3; the solution for `dL/dw` is our own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from rayfed.models.copying import copy_model
from rayfed.update import Named, Observation


@dataclass(frozen=True)
class _Norm:
    """Names of the tensors of one weight norm of a model."""

    path: str
    """Path of the module."""
    name: str
    """Name of the weight in its module."""
    length: str
    direction: str
    dimension: int
    """Dimension along which each slice has its own length; -1 if the whole weight has one length."""

    @property
    def weight(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")

    def value(self, weights: Named) -> Tensor:
        """Return the weight that the weight norm computes from length and direction."""
        return torch._weight_norm(weights[self.direction], weights[self.length], self.dimension)

    def gradient(self, weights: Named, gradient: Named) -> Tensor:
        """Return the gradient with respect to the weight, from the gradients of its length and direction."""
        length, direction = (weights[name].double() for name in (self.length, self.direction))
        of_length, of_direction = (gradient[name].double() for name in (self.length, self.direction))
        norm = torch.norm_except_dim(direction, 2, self.dimension)
        unit = direction / norm
        others = [dim for dim in range(unit.ndim) if dim != self.dimension]
        along = (of_direction * unit).sum(others, keepdim=True)  # 0 except for noise
        return ((of_direction - along * unit) * norm / length + of_length * unit).to(weights[self.direction].dtype)


def without_weight_norm(
    model: nn.Module, observations: Sequence[Observation]
) -> tuple[nn.Module, Sequence[Observation]]:
    """Return a model without weight norm and the observations of that model; unchanged if there is no weight norm.

    A weight norm is kept if its length or its direction was not sent.
    """
    norms = [
        norm for norm in _norms(model) if all({norm.length, norm.direction} <= o.update.keys() for o in observations)
    ]
    if not norms:
        return model, observations
    plain = copy_model(model)
    for norm in norms:
        _remove(plain.get_submodule(norm.path), norm.name)
    return plain, [_without(norms, observation) for observation in observations]


def _remove(module: nn.Module, name: str) -> None:
    """Replace a weight norm by a parameter, in place."""
    if not parametrize.is_parametrized(module, name):
        nn.utils.remove_weight_norm(module, name)
        return
    weight = getattr(module, name).detach()
    # `remove_parametrizations` would change the class, and thereby the module that this one is a copy of
    module.__class__ = parametrize.type_before_parametrizations(module)
    del module.parametrizations
    module.register_parameter(name, nn.Parameter(weight))


def _norms(model: nn.Module) -> Iterator[_Norm]:
    """Yield the weight norms of a model, both of PyTorch's older and of its newer implementation."""
    for path, module in model.named_modules():
        start = f"{path}.".lstrip(".")
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                whole = f"{start}{hook.name}"
                yield _Norm(path, hook.name, f"{whole}_g", f"{whole}_v", hook.dim)
        parametrized = list(getattr(module, "parametrizations", {}).items())
        for name, parts in parametrized if len(parametrized) == 1 else []:
            if len(parts) == 1 and isinstance(parts[0], _WeightNorm):
                whole = f"{start}parametrizations.{name}.original"
                yield _Norm(path, name, f"{whole}0", f"{whole}1", parts[0].dim)


def _without(norms: Sequence[_Norm], observation: Observation) -> Observation:
    gradient, weights = observation.gradient, observation.weights
    made = {norm.weight: norm.gradient(weights, gradient) for norm in norms}
    values = {norm.weight: norm.value(weights) for norm in norms}
    gone = {name for norm in norms for name in (norm.length, norm.direction)}
    return replace(
        observation,
        weights={name: tensor for name, tensor in weights.items() if name not in gone} | values,
        update={name: tensor * observation.scale for name, tensor in (gradient | made).items() if name not in gone},
        local=replace(observation.local, weight_decay=0.0),  # `gradient` excludes weight decay
    )
