"""Detect linear layers that receive one vector per sample, from their gradients.

For z = W h + b, one sample's gradients are dL/dW = d h^T and dL/db = d, with d the slope of the loss in z. Two
parameters are such a W and b if these equations hold at a random sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rayfed.attacks.base import NotApplicable
from rayfed.attacks.closed_form.equations import is_affine
from rayfed.attacks.closed_form.probe import Probe, Use
from rayfed.update import Named

_SAME = 1e-5


@dataclass(frozen=True)
class Layer:
    """A linear layer of a model and its position in the forward pass."""

    weight: str
    bias: str | None
    transposed: bool
    """Whether the weight is (F, O), not (O, F)."""
    use: int
    """Index of the layer's operation in the uses that `Probe.run` returns."""
    operand: int
    """Index of the layer's input among the operation's inputs."""
    width: int
    """Number of inputs F; smaller than the weight's width if the weight stacks several layers."""

    def features(self, probe: Probe, inputs: Tensor) -> Tensor:
        """Return the layer's inputs (N, F) for samples `inputs` (N, *shape), with the autograd graph to the samples."""
        return probe.run(inputs)[0][self.use].inputs[self.operand].reshape(len(inputs), -1)

    def matrix(self, gradient: Named) -> Tensor:
        """Return the gradient of the layer's weight as a matrix (O, F)."""
        weight = gradient[self.weight].double()
        return weight.flatten(1).T if self.transposed else weight.reshape(-1, self.width)

    def vector(self, gradient: Named) -> Tensor | None:
        """Return the gradient of the layer's bias, (O,), or None for a layer without a bias."""
        return None if self.bias is None else gradient[self.bias].double().flatten()


def linear_layers(probe: Probe, sent: Named) -> list[Layer]:
    """Return the linear layers whose gradients the client sent, in the order of the forward pass.

    Weights that are applied at several positions of a sample, such as in convolutions and recurrent layers, are
    excluded. Raises `NotApplicable` if the model does not accept a single sample.
    """
    names = tuple(sent)
    found: list[Layer] = probe.once(("linear layers", names), lambda: list(_linear_layers(probe, names)))
    return found


def _linear_layers(probe: Probe, sent: Sequence[str]) -> Iterator[Layer]:
    try:
        gradient = probe.own_gradient
        uses, _, _ = probe.run(probe.samples(1))
        others, _, _ = probe.run(probe.samples(1, seed=1))
    except Exception as error:  # such as from batch norm in training mode
        probe.run(probe.samples(2))  # raises an error that also occurs with larger batches
        reason = str(error).partition("\n")[0]
        message = f"the attack detects layers with a single sample, which the model does not accept: {reason}"
        raise NotApplicable(message, inherent=True) from error
    for place, use in enumerate(uses):
        for name in sorted(use.names & set(sent)):
            for operand, entering in enumerate(use.inputs):
                if _is_fixed(entering, others, place, operand):
                    continue
                yield from _fitting(name, place, operand, entering.detach().flatten().double(), gradient, sent)


def _is_fixed(entering: Tensor, others: Sequence[Use], place: int, operand: int) -> bool:
    """Return whether an operand does not depend on the sample, such as the divisor of a spectral norm."""
    if place >= len(others) or operand >= len(others[place].inputs):
        return False
    return torch.equal(entering, others[place].inputs[operand])


def _fitting(
    name: str, place: int, operand: int, features: Tensor, gradient: Named, sent: Sequence[str]
) -> Iterator[Layer]:
    weight = gradient[name]
    if weight.ndim < 2 or weight.numel() % features.numel() or not weight.any():
        return
    for transposed in (False, True):
        if transposed and len(weight) != features.numel():
            continue
        layer = Layer(name, None, transposed, place, operand, features.numel())
        matrix = layer.matrix(gradient)
        slope = matrix @ features / features.square().sum()
        if _same(matrix, slope[:, None] * features):
            biases = [b for b in sent if gradient[b].numel() == len(slope) and _same(gradient[b].flatten(), slope)]
            yield replace(layer, bias=biases[0] if biases else None)
            return


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= _SAME * other.norm())


def front(probe: Probe, layer: Layer) -> tuple[bool, int]:
    """Return whether a linear layer's input is an affine function of the sample, and the input's number of entries."""
    found: tuple[bool, int] = probe.once(("front", layer), lambda: _front(probe, layer))
    return found


def _front(probe: Probe, layer: Layer) -> tuple[bool, int]:
    samples = probe.samples(2, seed=1)
    with torch.no_grad():
        size = layer.features(probe, samples).shape[1]
    return is_affine(lambda x: layer.features(probe, x), samples), size
