"""Linear layers that see one vector of each sample, found by their gradients.

For z = W h + b the gradients of one sample are dL/dW = d h^T and dL/db = d, with d the slope of the loss in z. A
parameter is such a W, and another its b, where that holds at a random sample of the attacker's own.
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
    """A linear layer of a model, and its place in the forward pass."""

    weight: str
    bias: str | None
    transposed: bool
    """Whether the weight is (F, O), not (O, F)."""
    use: int
    """Which of the probe's uses it is."""
    operand: int
    """Which of that use's inputs it sees."""
    width: int
    """Numbers of a sample that enter it, F: the weight may be a stack of several layers', of which each takes some."""

    def features(self, probe: Probe, inputs: Tensor) -> Tensor:
        """Return what enters the layer, (N, F), with its graph to inputs (N, *shape)."""
        return probe.run(inputs)[0][self.use].inputs[self.operand].reshape(len(inputs), -1)

    def matrix(self, gradient: Named) -> Tensor:
        """Return the layer's part of a gradient as (O, F)."""
        weight = gradient[self.weight].double()
        return weight.flatten(1).T if self.transposed else weight.reshape(-1, self.width)

    def vector(self, gradient: Named) -> Tensor | None:
        """Return the bias's part of a gradient, (O,), None if there is no bias."""
        return None if self.bias is None else gradient[self.bias].double().flatten()


def linear_layers(probe: Probe, sent: Named) -> list[Layer]:
    """Return the linear layers whose gradients are sent, in the order of the forward pass.

    A weight that is read at several places of a sample, as a convolution's or a recurrent layer's is, is none. Raises
    `NotApplicable` where the model takes no single sample.
    """
    names = tuple(sent)
    found: list[Layer] = probe.once(("linear layers", names), lambda: list(_linear_layers(probe, names)))
    return found


def _linear_layers(probe: Probe, sent: Sequence[str]) -> Iterator[Layer]:
    try:
        gradient = probe.own_gradient
        uses, _, _ = probe.run(probe.samples(1))
        others, _, _ = probe.run(probe.samples(1, seed=1))
    except Exception as error:  # such as batch norm's in training mode
        probe.run(probe.samples(2))  # an error of larger batches, too, is raised: it is no matter of single samples
        reason = str(error).partition("\n")[0]
        message = f"layers are found by a single sample, which the model does not take: {reason}"
        raise NotApplicable(message, inherent=True) from error
    for place, use in enumerate(uses):
        for name in sorted(use.names & set(sent)):
            for operand, entering in enumerate(use.inputs):
                if _is_fixed(entering, others, place, operand):
                    continue
                yield from _fitting(name, place, operand, entering.detach().flatten().double(), gradient, sent)


def _is_fixed(entering: Tensor, others: Sequence[Use], place: int, operand: int) -> bool:
    """Return whether an operand is the same for another sample, such as the norm that a spectral norm divides by."""
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
    """Return whether a layer's input is affine in the sample, and how many numbers it has."""
    found: tuple[bool, int] = probe.once(("front", layer), lambda: _front(probe, layer))
    return found


def _front(probe: Probe, layer: Layer) -> tuple[bool, int]:
    samples = probe.samples(2, seed=1)
    with torch.no_grad():
        size = layer.features(probe, samples).shape[1]
    return is_affine(lambda x: layer.features(probe, x), samples), size
