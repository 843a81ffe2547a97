"""Reconstruct a single sample from the ratio of two parameters' gradients, such as those of scale and shift.

For y = s * h + b, the gradients of one sample are d * h and d, entry by entry. Their ratio h does not depend on the
label. Pairs of such parameters are detected by test inputs and labels, not by the type of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from rayfed.attacks.closed_form.equations import solve
from rayfed.attacks.closed_form.probe import Probe
from rayfed.update import Named, Observation

_SAME = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Relative difference up to which two ratios are equal."""
_AT_ONCE = 64
"""Number of samples whose gradients are computed in one call."""
_MOST = 2**16
"""Maximum number of entries of a parameter whose ratios are used."""


class Pair(NamedTuple):
    """Two parameters whose ratio of gradients depends only on the sample, not on the label."""

    over: str
    under: str


def pairs(probe: Probe, sent: Named) -> list[Pair]:
    """Return the pairs of parameters whose gradients were sent and suffice for a sample, most known ratios first.

    Of the two orders of a pair, the one with more uniform ratios is kept, because the other divides by values near
    zero.
    """
    names = tuple(name for name, tensor in sent.items() if prod(probe.shape) <= tensor.numel() <= _MOST)
    found: list[Pair] = probe.once(("ratios", names), lambda: list(_pairs(probe, names)))
    return found


def _pairs(probe: Probe, names: Sequence[str]) -> Iterator[Pair]:
    if len(names) < 2:
        return
    (one, other), label = probe.samples(2).split(1), probe.blank(1)
    seen = [probe.gradient(one, label), probe.gradient(one, label + 1), probe.gradient(other, label)]
    same = _SAME[probe.dtype]
    found: dict[Pair, tuple[int, float]] = {}
    for over, under in permutations(names, 2):
        if seen[0][over].numel() != seen[0][under].numel():
            continue
        first, again, elsewhere = (_ratio(gradient, over, under) for gradient in seen)
        known = first.isfinite() & again.isfinite() & elsewhere.isfinite()
        first, again, elsewhere = first[known], again[known], elsewhere[known]
        alike = (first - again).norm() <= same * first.norm()
        if alike and (first - elsewhere).norm() > same * first.norm():
            found[Pair(over, under)] = -int(known.sum()), float(first.abs().max() / first.norm())
    for pair in sorted(found, key=lambda pair: found[pair]):
        back = Pair(pair.under, pair.over)
        if back not in found or found[pair] <= found[back]:
            yield pair


def solved(probe: Probe, observation: Observation, pair: Pair, weighted: bool) -> Tensor:
    """Return the sample (1, *shape) for which the ratios of the pair's gradients fit the observed ratios best.

    If `weighted`, each ratio is weighted by its denominator, because noise affects ratios with a small one more.
    """
    over, under = (observation.gradient[name].to(probe.dtype).flatten() for name in pair)
    known = over.isfinite() & under.isfinite() & (under != 0)
    weight = under[known] if weighted else torch.ones_like(under[known])

    def seen(samples: Tensor) -> Tensor:
        parts = []
        for part in samples.split(_AT_ONCE):
            each = probe.gradients(part, probe.blank(len(part)), pair)
            parts.append(_ratio(each, *pair, len(part))[:, known].nan_to_num(0, 0, 0) * weight)
        return torch.cat(parts)

    wanted = (over / under)[known] * weight
    return solve(seen, wanted[None], (1, *probe.shape), affine=False).samples


def _ratio(gradient: Named, over: str, under: str, samples: int | None = None) -> Tensor:
    """Return the ratios (D,) of two parameters' gradients, or (N, D) for N samples; undefined ones are not finite."""
    shape = (-1,) if samples is None else (samples, -1)
    return gradient[over].double().reshape(shape) / gradient[under].double().reshape(shape)
