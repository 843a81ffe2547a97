"""The gradient of a linear layer as slopes times inputs, of which only the spans are known."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rayfed.attacks.closed_form.layers import Layer
from rayfed.attacks.closed_form.probe import Probe
from rayfed.update import Observation


class Factors(NamedTuple):
    """A gradient dL/d[W b] = D^T [H 1], (O, F [+ 1]), as left @ diag(values) @ right of rank b, by singular values.

    D is the slopes of the loss in the layer's outputs, H its inputs: their spans are those of `left` and `right`.
    """

    left: Tensor
    """(O, b)"""
    values: Tensor
    right: Tensor
    """(b, F [+ 1])"""
    noise: float
    """Error of the entries of `left`, over that of a column: from the singular values that should be 0."""

    def guides(self, biased: bool) -> tuple[Tensor, Tensor]:
        """Return the gradient's rows in the coordinates of `right`, (O', b), and the coordinates' last column (b, 1).

        With a bias the rows are divided by its gradient, where there is any, and so are mixtures of inputs; without,
        they have length 1.
        """
        rows = self.left * self.values
        rows = rows[rows.norm(dim=1) > 1e-6 * rows.norm()]
        one = self.right[:, -1:]
        if not biased:
            return rows / rows.norm(dim=1, keepdim=True) * rows[:, :1].sign(), one
        guides = rows / (rows @ one)
        guides = guides[guides.isfinite().all(1)]  # others have no gradient of their bias left
        if not len(guides):
            return guides, one
        far = (guides - guides.median(0).values).norm(dim=1)
        return guides[far <= 3 * far.median()], one


def factorise(layer: Layer, observation: Observation) -> Factors | str:
    """Return the factors of a layer's gradient, or why they cannot be those of as many samples as the batch has."""
    gradient, bias = layer.matrix(observation.gradient), layer.vector(observation.gradient)
    size = observation.batch_size
    if bias is not None:
        gradient = torch.cat([gradient, bias[:, None]], 1)
    if not gradient.isfinite().all():
        return f"the gradient of '{layer.weight}' is not finite"
    if size > min(gradient.shape):
        return f"'{layer.weight}' has too few inputs or outputs for a batch of {size}"
    left, values, right = torch.linalg.svd(gradient, full_matrices=False)
    noise = max(float(values[size]) if size < len(values) else 0.0, 1e-7 * float(values[0]))
    rank = int((values[:size] > 10 * noise).sum())
    if rank == 0 or (rank < size and noise > 1e-5 * float(values[0])):
        return f"the gradient of '{layer.weight}' shows {rank} of {size} samples above noise and rounding"
    return Factors(left[:, :rank], values[:rank], right[:rank], noise / float(values[rank - 1]))


def outputs_of(probe: Probe, layer: Layer, factors: Factors) -> Tensor | None:
    """Return the map (O, b) from an input's coordinates to the layer's outputs, None if it is not linear.

    A bias that is added later is no part of the outputs.
    """
    samples = probe.samples(1, seed=3)
    with torch.no_grad():
        entering = layer.features(probe, samples)[0].double()
        leaving = probe.run(samples)[0][layer.use].output.flatten().double()
    weight, bias = layer.matrix(probe.weights), layer.vector(probe.weights)
    if bias is not None:
        entering = torch.cat([entering, torch.ones_like(entering[:1])])
        with_bias, without = (torch.cat([weight, b[:, None]], 1) for b in (bias, torch.zeros_like(bias)))
        maps = [with_bias, without]
    else:
        maps = [weight]
    fitting = [map_ @ factors.right.T for map_ in maps if torch.allclose(map_ @ entering, leaving, atol=1e-4)]
    return fitting[0] if fitting else None
