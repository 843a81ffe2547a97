"""Estimate a linear layer's input for a single sample from the rows of its gradient.

For `W h + b`, the gradient of row j is `dL/dW_j = (dL/db_j) h`, so every row determines h. The estimators differ in how
they combine rows if a defence has changed few or nearly all of the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayfed.attacks.closed_form.layers import Layer
from rayfed.update import Observation

_NEIGHBOURS = 3
"""Number of rows that must agree on an entry."""


def least_squares(layer: Layer, observation: Observation) -> Tensor:
    """Return a linear layer's input (F,) by least squares over all rows; without a bias, up to scale and sign.

    Entries that are 0 or not finite are ignored, because a defence may have removed them. Without a bias, only rows
    that are not finite are ignored.
    """
    weight, bias = layer.matrix(observation.gradient), layer.vector(observation.gradient)
    if bias is None:
        finite = weight[weight.isfinite().all(1)]
        return torch.linalg.svd(finite, full_matrices=False)[2][0] if len(finite) else weight[0] * torch.nan
    weight, bias = weight.nan_to_num(0, 0, 0), bias.nan_to_num(0, 0, 0)
    sent = (weight != 0) * bias[:, None]
    return (weight * sent).sum(0) / sent.square().sum(0).clamp(min=torch.finfo(torch.float64).tiny)


def middle(layer: Layer, observation: Observation) -> Tensor:
    """Return the input (F,) of a layer with a bias as the median over gradient rows, despite a few wrong values."""
    return _ratios(layer, observation).nanmedian(0).values.nan_to_num(0)


def alike(layer: Layer, observation: Observation) -> Tensor | None:
    """Return the input (F,) of a layer with a bias from the values on which three gradient rows agree best.

    Return None if the layer has too few rows.
    """
    ratios = _ratios(layer, observation).nan_to_num(torch.inf).sort(0).values
    if len(ratios) < _NEIGHBOURS:
        return None
    apart = (ratios[_NEIGHBOURS - 1 :] - ratios[: 1 - _NEIGHBOURS]).nan_to_num(torch.inf)
    found: Tensor = ratios[1:-1].gather(0, apart.argmin(0)[None])[0]
    return found.nan_to_num(0, 0, 0)


def inside(layer: Layer, observation: Observation) -> Tensor | None:
    """Return the input (F,) of a layer with a bias from the gradient row whose input is closest to [0, 1], or None.

    The estimate is right even if noise has changed all other rows. Returns None if no row is finite.
    """
    ratios = _ratios(layer, observation)
    ratios = ratios[ratios.isfinite().all(1)]
    if not len(ratios):
        return None
    return ratios[(ratios - ratios.clamp(0, 1)).norm(dim=1).argmin()]


def _ratios(layer: Layer, observation: Observation) -> Tensor:
    """Return the input according to each row, (O, F); NaN if undefined."""
    weight, bias = layer.matrix(observation.gradient), layer.vector(observation.gradient)
    assert bias is not None
    ratios = weight / bias[:, None]
    return ratios.masked_fill(~ratios.isfinite(), torch.nan)
