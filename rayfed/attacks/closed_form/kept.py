"""Recover a linear layer's input for one sample from the few gradient values that a defence left unchanged.

The gradient of W is d h^T, so two unchanged values of any row have the ratio of two entries of h. Changed values rarely
agree to five digits, so values that agree are taken as unchanged. Ratios to one row give the factors of other rows,
these give entries of h, and those give the factors of further rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayfed.attacks.closed_form.layers import Layer
from rayfed.update import Observation

_SAME = 1e-5
"""Relative difference up to which two values agree."""
_CHANCE = 0.1
"""Expected number of pairs that agree by chance from which on three values must agree."""
_BEGINNINGS, _FOLLOWED = 32, 8
"""Number of reference rows, and number of those with most agreement that are refined."""
_ROWS, _COLUMNS = 256, 1024
"""Maximum numbers of rows, and of columns to compute their factors."""
_ROUNDS = 30
_DISTINCT = 0.5
"""Minimum share of distinct values; below, a defence has quantised the gradient."""


def kept(layer: Layer, observation: Observation) -> tuple[Tensor, bool] | None:
    """Return a layer's input (F,) from unchanged gradient values, and whether the input's scale is known, or None.

    Returns None if too few values agree. The scale follows from agreeing values of the bias; without these, the input
    is known up to scale and sign.
    Quantised gradients are rejected, because their values agree by chance. An entry without agreeing rows is set to one
    row's value within the range of the other entries: the closest to a regularised least-squares estimate.
    """
    weight, bias = layer.matrix(observation.gradient), layer.vector(observation.gradient)
    rows = _even(weight.isfinite().sum(1) > 1, _ROWS)
    weight, bias = weight[rows].nan_to_num(0, 0, 0), None if bias is None else bias[rows]
    if len(rows) < 2 or len(weight.unique()) < _DISTINCT * weight.count_nonzero() or not weight.any():
        return None
    factors = _factors(weight[:, _even((weight != 0).any(0), _COLUMNS)])
    features, known = _commonest((weight / factors[:, None]).T)[0], factors.isfinite()
    if features.isfinite().sum() < 2 or known.sum() < 2:
        return None
    scale = factors.new_tensor([torch.nan]) if bias is None else _commonest((bias / factors)[None])[0]
    if scaled := bool(scale.isfinite()):
        factors, features = factors * scale, features / scale
    weight, factors, found = weight[known], factors[known], features.isfinite()
    precision = factors.square().sum()
    noise = (weight - factors[:, None] * features)[:, found].square().mean() / precision
    spread, mean = torch.var_mean(features[found])
    rest = mean + spread / (spread + noise) * (factors @ weight / precision - mean)
    said = weight / factors[:, None]
    away = (said - rest).abs().masked_fill((said < features[found].min()) | (said > features[found].max()), torch.inf)
    nearest, row = away.min(0)
    rest = said.gather(0, row[None])[0].where(nearest.isfinite(), rest)
    return features.where(found, rest.where((weight != 0).all(0), 0.0)), scaled


def _even(which: Tensor, most: int) -> Tensor:
    """Return at most `most` indices of a mask's true entries, evenly spread."""
    places = which.nonzero()[:, 0]
    return places[torch.linspace(0, len(places) - 1, min(len(places), most)).long()]


def _factors(weight: Tensor) -> Tensor:
    """Return the row factors (O,) whose products with column values match most entries; NaN if a row has none."""
    begun = []
    for row in weight[:_BEGINNINGS]:
        factors, agreed = _commonest(weight / row.where(row != 0, torch.nan))
        begun.append((int(agreed.sum()), factors))
    best, found = 0, weight.new_full((len(weight),), torch.nan)
    for _, factors in sorted(begun, key=lambda one: -one[0])[:_FOLLOWED]:
        most, rows = 0, factors
        for _ in range(_ROUNDS):
            columns, _ = _commonest((weight / rows[:, None]).T)
            rows, agreed = _commonest(weight / columns)
            if int(agreed.sum()) <= most:
                break
            most = int(agreed.sum())
        if most > best:
            best, found = most, rows
    return found


def _commonest(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most common value of each row of (N, M), and its count; NaN and 0 if too few values agree.

    If only two values agree and there are more zeros, the result is also NaN: the value is probably 0.
    """
    finite = values.where(values.isfinite() & (values != 0), torch.inf).sort(1).values.contiguous()
    ends = torch.searchsorted(finite, finite + _SAME * finite.abs(), right=True)
    agreed = (ends - torch.arange(values.shape[1]).to(ends)).masked_fill(finite.isinf(), 0)
    most, first = agreed.max(1)
    few = 2 if values.shape[1] ** 2 * _SAME < _CHANCE else 3
    enough = (most >= few) & ((most > 2) | ((values == 0).sum(1) <= most))
    middle = finite.gather(1, (first + (most.clamp(min=1) - 1) // 2)[:, None])[:, 0]
    return middle.where(enough, torch.nan), most.where(enough, 0)
