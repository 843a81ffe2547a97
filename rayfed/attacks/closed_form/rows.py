"""What entered a linear layer for a single sample, by the rows of its gradient.

For `W h + b` the gradient of row j is `dL/dW_j = (dL/db_j) h`: every row says all of h, so that they can be put
together in more ways than one, as a defence has changed few of the values or nearly all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayfed.attacks.closed_form.layers import Layer
from rayfed.update import Observation

_NEIGHBOURS = 3
"""Rows that have to say nearly the same of an entry, so that it is not by chance."""


def least_squares(layer: Layer, observation: Observation) -> Tensor:
    """Return the input (F,) of the layer by least squares over all rows; without a bias, up to scale and sign.

    Entries that are 0 were left out by a defence, or are 0 in all rows; those that are not finite count as such,
    without a bias their rows.
    """
    weight, bias = layer.matrix(observation.gradient), layer.vector(observation.gradient)
    if bias is None:
        finite = weight[weight.isfinite().all(1)]
        return torch.linalg.svd(finite, full_matrices=False)[2][0] if len(finite) else weight[0] * torch.nan
    weight, bias = weight.nan_to_num(0, 0, 0), bias.nan_to_num(0, 0, 0)
    sent = (weight != 0) * bias[:, None]
    return (weight * sent).sum(0) / sent.square().sum(0).clamp(min=torch.finfo(torch.float64).tiny)


def middle(layer: Layer, observation: Observation) -> Tensor:
    """Return what entered a layer with a bias, (F,), where a few values are far off: the medians over the rows."""
    return _ratios(layer, observation).nanmedian(0).values.nan_to_num(0)


def alike(layer: Layer, observation: Observation) -> Tensor | None:
    """Return the input (F,) of a layer with a bias by the values on which a few rows agree, where most are far off.

    Noise seldom says the same thrice. None where a layer has too few rows.
    """
    ratios = _ratios(layer, observation).nan_to_num(torch.inf).sort(0).values
    if len(ratios) < _NEIGHBOURS:
        return None
    apart = (ratios[_NEIGHBOURS - 1 :] - ratios[: 1 - _NEIGHBOURS]).nan_to_num(torch.inf)
    found: Tensor = ratios[1:-1].gather(0, apart.argmin(0)[None])[0]
    return found.nan_to_num(0, 0, 0)


def inside(layer: Layer, observation: Observation) -> Tensor | None:
    """Return the input (F,) of a layer with a bias by the row nearest to [0, 1]; None if no row is finite.

    It is what noise on all other rows leaves.
    """
    ratios = _ratios(layer, observation)
    ratios = ratios[ratios.isfinite().all(1)]
    if not len(ratios):
        return None
    return ratios[(ratios - ratios.clamp(0, 1)).norm(dim=1).argmin()]


def _ratios(layer: Layer, observation: Observation) -> Tensor:
    """Return the input that each row gives by itself, (O, F); NaN where it gives none."""
    weight, bias = layer.matrix(observation.gradient), layer.vector(observation.gradient)
    assert bias is not None
    ratios = weight / bias[:, None]
    return ratios.masked_fill(~ratios.isfinite(), torch.nan)
