"""What entered a linear layer for a single sample, by the few values of its gradient that a defence left as they were.

The gradient of W is d h^T. Two values of a row that were left as they are have the ratio of two entries of h, in
whatever row. Values that were changed seldom agree with others to five digits, so what agrees was left: the factors of
some rows come from the ratios to one of them, entries of h from rows whose factors are known, and these give more rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayfed.attacks.closed_form.layers import Layer
from rayfed.update import Observation

_SAME = 1e-5
"""Relative difference up to which two values agree."""
_CHANCE = 0.1
"""Number of pairs that may agree by chance, beyond which two values alone say nothing."""
_BEGINNINGS, _FOLLOWED = 32, 8
"""Rows to which others are compared, and those of them with most agreement that are followed up."""
_ROWS, _COLUMNS = 256, 1024
"""Most rows that are looked at, and columns by which their factors are found."""
_ROUNDS = 30
_DISTINCT = 0.5
"""Share of values that differ from each other, below which a defence has cut them to levels."""


def kept(layer: Layer, observation: Observation) -> tuple[Tensor, bool] | None:
    """Return what entered a layer, (F,), by values that agree, and whether its scale is known; None if hardly any do.

    The scale is that of values of the bias that agree, too; otherwise it is known up to scale and sign. Values on a
    few levels agree by chance, and say nothing. An entry on which no rows agree is what one of them says of it:
    in the range of the other entries, the nearest to least squares, drawn to their mean as far as noise goes.
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
    """Return the places of a mask, or so many of them, evenly spread."""
    places = which.nonzero()[:, 0]
    return places[torch.linspace(0, len(places) - 1, min(len(places), most)).long()]


def _factors(weight: Tensor) -> Tensor:
    """Return the factors of rows, (O,), of whose products with numbers of columns most are values; NaN where none."""
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
    """Return for each row of (N, M) the value on which most of its values agree, and how many: NaN and 0 for too few.

    Zeros that are more than two that agree are no accident: the value is 0, or was left out.
    """
    finite = values.where(values.isfinite() & (values != 0), torch.inf).sort(1).values.contiguous()
    ends = torch.searchsorted(finite, finite + _SAME * finite.abs(), right=True)
    agreed = (ends - torch.arange(values.shape[1]).to(ends)).masked_fill(finite.isinf(), 0)
    most, first = agreed.max(1)
    few = 2 if values.shape[1] ** 2 * _SAME < _CHANCE else 3
    enough = (most >= few) & ((most > 2) | ((values == 0).sum(1) <= most))
    middle = finite.gather(1, (first + (most.clamp(min=1) - 1) // 2)[:, None])[:, 0]
    return middle.where(enough, torch.nan), most.where(enough, 0)
