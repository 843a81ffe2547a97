"""Factorise the gradient of a linear layer into its inputs and output gradients, up to a change of basis."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rayfed.attacks.closed_form.layers import Layer
from rayfed.attacks.closed_form.probe import Probe
from rayfed.update import Observation


class Factors(NamedTuple):
    """Singular value decomposition left @ diag(values) @ right of a gradient dL/d[W b] = D^T [H 1] of rank b.

    D holds the slopes of the loss in the layer's outputs and H its inputs. They span the same spaces as `left` and
    `right`. The gradient has shape (O, F [+ 1]).
    """

    left: Tensor
    """(O, b)"""
    values: Tensor
    right: Tensor
    """(b, F [+ 1])"""
    noise: float
    """Error of the columns of `left`, estimated from the largest singular value that should be 0."""

    def guides(self, biased: bool) -> tuple[Tensor, Tensor]:
        """Return the gradient's rows in the coordinates of `right`, (O', b), and the last coordinate's column (b, 1).

        With a bias, rows are divided by the bias gradient and are thus mixtures of inputs. Without, they have length 1.
        """
        rows = self.left * self.values
        rows = rows[rows.norm(dim=1) > 1e-6 * rows.norm()]
        one = self.right[:, -1:]
        if not biased:
            return rows / rows.norm(dim=1, keepdim=True) * rows[:, :1].sign(), one
        guides = rows / (rows @ one)
        guides = guides[guides.isfinite().all(1)]  # the other rows have a bias gradient of 0
        if not len(guides):
            return guides, one
        far = (guides - guides.median(0).values).norm(dim=1)
        return guides[far <= 3 * far.median()], one


def factorise(layer: Layer, observation: Observation) -> Factors | str:
    """Return the singular vectors of a layer's gradient, or the reason why they cannot be those of the whole batch."""
    gradient, bias = layer.matrix(observation.gradient), layer.vector(observation.gradient)
    size = observation.batch_size
    if bias is not None:
        gradient = torch.cat([gradient, bias[:, None]], 1)
    if not gradient.isfinite().all():
        return f"the gradient of '{layer.weight}' is not finite"
    if size > min(gradient.shape):
        return f"layer '{layer.weight}' has fewer inputs or outputs than the batch has samples ({size})"
    left, values, right = torch.linalg.svd(gradient, full_matrices=False)
    noise = max(float(values[size]) if size < len(values) else 0.0, 1e-7 * float(values[0]))
    rank = int((values[:size] > 10 * noise).sum())
    if rank == 0 or (rank < size and noise > 1e-5 * float(values[0])):
        return f"the gradient of '{layer.weight}' has rank {rank}, above noise and rounding, for {size} samples"
    return Factors(left[:, :rank], values[:rank], right[:rank], noise / float(values[rank - 1]))


def outputs_of(probe: Probe, layer: Layer, factors: Factors) -> Tensor | None:
    """Return the matrix (O, b) from an input's coordinates to the layer's outputs, or None if no matrix fits.

    The outputs do not include a bias that is added later.
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
