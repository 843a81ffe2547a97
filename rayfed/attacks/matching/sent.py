"""Evidence on the gradient in an update's zeros and magnitudes, without knowledge of the defence.

A gradient has zeros of its own: a unit that no sample switches on has a row of them, an input that no sample has a
column. A defence's are told apart by what a gradient of N samples cannot have.

- A linear layer's gradient is a sum of products of two vectors, one for each vector that enters it: for r of these at
  most 2^r - 1 patterns of zeros occur among its rows that are not zero, and among its columns. A mask drawn at random
  has more: its zeros say nothing. How many vectors enter, more than samples where a layer sees each at several places,
  the attacker counts on the model.
- Values that come from a density leave no gap between zero and the smallest of them. A gap is a threshold. A zero then
  says that the value is below it.

Every other zero says that, too: that its value is no larger than the smallest that was sent. Of a gradient's own zeros
this is next to nothing away from the truth, of a threshold's it is the truth itself, of a quantiser's it is its cell,
so that these need no telling apart.

Sources: David and Nagaraja 2003, "Order Statistics", section 2 (spacings); Jacques et al. 2013, "Robust 1-Bit
Compressive Sensing via Binary Stable Embeddings of Sparse Vectors", section 4 (one-sided consistency of signs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, log1p, log2
from typing import Self

import torch
from torch import Tensor, nn

from rayfed.attacks.base import NotApplicable
from rayfed.attacks.closed_form.probe import probe
from rayfed.gradients import norm
from rayfed.update import Named, Observation

_SHARP = 14.0
"""Nats from which a gap between zero and the smallest value is a threshold: a chance of one in a million."""
_ROUNDING = 1e-3
"""Norm of all bounds over that of the gradient below which the cosine, in float32, is the same without them."""
_ENOUGH = 20_000
"""Number of values that tell a density."""
_SIDE = 1024
"""Largest number of rows and columns whose patterns are counted: a part of them has no more than all."""
_LEVELS = 2**16
"""Number of levels up to which evenly spaced magnitudes count as those of a quantiser."""


@dataclass(frozen=True)
class Sent:
    """What was sent of the gradients of V victims, each tensor with a leading dimension V."""

    bounds: Named
    """Magnitudes up to which a value costs nothing: 0 where it is matched, infinite where nothing is known of it."""
    thinned: Tensor
    """(V,) bool: whose zeros show that not all was sent, so that what was may have been raised by any factor."""
    signs: Tensor | None
    """(V,) bool: whose update tells signs alone; None: nobody's."""

    @classmethod
    def of(
        cls,
        observations: Sequence[Observation],
        names: Sequence[str],
        dtype: torch.dtype,
        model: nn.Module,
        alone: bool = True,
    ) -> Self | None:
        """Return what observations of one batch size show of the tensors `names`; None where all was sent as it was.

        Unless they are matched `alone`, without other rounds, a quantiser's zeros count as they are.
        Who knows the defence has masks of what it has left to match, besides: the rest may be anything.
        """
        gradients = [observation.step for observation in observations]  # what a defence had before it
        entering = cache(lambda: vectors_entering(model, observations[0]))  # takes a while, and is seldom asked for
        seen = [bounds(g, o.weights, entering, alone) for g, o in zip(gradients, observations, strict=True)]
        known = [_both(o.extra.get("defence"), o.extra.get("heard")) for o in observations]
        signs = torch.tensor([signs_alone(gradient) for gradient in gradients])
        if not any(seen) and not any(known) and not signs.any():
            return None
        parts = list(zip(gradients, seen, known, strict=True))
        device = gradients[0][names[0]].device
        return cls(
            bounds={name: torch.stack([_known_bound(*part, name) for part in parts]).to(dtype) for name in names},
            thinned=torch.tensor([bound is not None for bound in seen], device=device),
            signs=signs.to(device) if signs.any() else None,
        )

    @property
    def altered(self) -> Tensor:
        """(V,) bool: whose values are not the gradient's own, as they are or in noise."""
        return self.thinned if self.signs is None else self.thinned | self.signs

    @property
    def ways(self) -> tuple[Self, ...]:
        """The same with each way in which an update is matched that tells signs alone: by signs, and as it is."""
        return (self,) if self.signs is None else (self, replace(self, signs=None))

    def matched(self, targets: Named) -> Named:
        """Return the targets (V, ...) without what is not matched."""
        return {name: target.masked_fill(self.bounds[name].isinf(), 0) for name, target in targets.items()}

    def like(self, gradients: Named, targets: Named, victims: Tensor) -> Named:
        """Return gradients of victims (Q,) less what the bounds leave open, as near to the targets as that allows.

        Where not all was sent each is brought to the norm of its target before that, in the values that were.
        """
        bounds = {name: bound[victims] for name, bound in self.bounds.items()}
        sent = {name: g.masked_fill(bounds[name] > 0, 0) for name, g in gradients.items()}
        scale = torch.where(self.thinned[victims], _norms(targets) / _norms(sent), 1.0)
        scaled = {name: g * scale.view(-1, *[1] * (g.ndim - 1)) for name, g in gradients.items()}
        return {name: g - g.clamp(-bounds[name], bounds[name]) for name, g in scaled.items()}


def _known_bound(gradient: Named, seen: Named | None, known: Named | None, name: str) -> Tensor:
    """Return the error allowed at each value of one tensor: what is seen, and infinite where masks say it is spoilt."""
    sent = gradient[name]
    bound = torch.zeros_like(sent) if seen is None else seen[name]
    if known is None:
        return bound
    spoilt = ~known[name].to(sent.device)
    return bound.masked_fill(spoilt if seen is None else spoilt & (sent != 0), torch.inf)


def _both(one: Named | None, other: Named | None) -> Named | None:
    """Return what both masks have, or the one that there is."""
    if one is None or other is None:
        return other if one is None else one
    return {name: mask & other[name].to(mask.device) for name, mask in one.items()}


def _norms(tensors: Named) -> Tensor:
    """Return the Euclidean norms of Q gradients, (Q,), not 0."""
    squares: Tensor = torch.stack([t.reshape(len(t), -1).square().sum(1) for t in tensors.values()]).sum(0)
    return squares.clamp(min=torch.finfo(torch.float32).tiny).sqrt()


def vectors_entering(model: nn.Module, observation: Observation) -> dict[str, int]:
    """Return how many vectors enter each matrix (O, I) of a model for an observation's samples, by name.

    None of a matrix whose use is not seen, or of a model that cannot be studied, and then nothing follows of it.
    """
    try:
        probed = probe(model, observation)
    except NotApplicable:
        return {}
    found: dict[str, int] = {}
    for use in probed.run(probed.samples(observation.batch_size))[0]:
        for name in use.names & observation.update.keys():
            shape = observation.update[name].shape
            fitting = [t.numel() // n for t in use.inputs for n in shape if t.numel() % n == 0 and t.shape[-1] == n]
            if len(shape) == 2 and fitting:
                found[name] = found.get(name, 0) + max(fitting)
    return {name: count * observation.local.steps for name, count in found.items()}


def bounds(gradient: Named, weights: Named, entering: Callable[[], dict[str, int]], alone: bool = True) -> Named | None:
    """Return how large each value that was not sent can have been; 0 for values that were sent.

    It is infinite where a zero says nothing. None where all zeros can be those of a gradient, in whole rows and columns
    of each tensor or too near to zero to count. `entering` counts the vectors that enter each matrix. Unless the
    gradient is matched `alone`, a quantiser's zeros are values like its others: where it rounded by chance, the mean
    over rounds is right with them and not without.
    """
    cores = {name: _core(tensor) for name, tensor in gradient.items()}
    if not alone and _levelled(list(cores.values())) and not signs_alone(gradient):
        return None
    denied = any(entering().get(name) == 1 for name in _denied(gradient))
    whole = {name for name, core in cores.items() if core.numel() and bool((core != 0).all())}
    if len(whole) == len(cores) and not denied:
        return None
    thresholds = {name: _threshold(tensor, weights[name]) for name, tensor in gradient.items()}
    unexplained = [name for name, bound in thresholds.items() if bound is None and gradient[name].ndim == 2]
    silent = denied or any(_drawn(cores[name], name, entering) for name in unexplained)
    found = {name: _bound(tensor, thresholds[name], silent) for name, tensor in gradient.items()}
    telling = {name: bound for name, bound in found.items() if name not in whole or bound.isinf().any()}
    return found if float(norm(telling)) > _ROUNDING * float(norm(gradient)) else None


def _bound(tensor: Tensor, threshold: Tensor | None, silent: bool) -> Tensor:
    """Return the bound of a tensor's values: a threshold, where there is one, or the smallest magnitude that was sent.

    Infinite where zeros are `silent`, and for a tensor of zeros.
    """
    sent = tensor != 0
    if threshold is None:
        nothing = silent or not sent.any()
        threshold = torch.full_like(tensor, torch.inf if nothing else float(tensor[sent].abs().min()))
    return threshold.masked_fill(sent, 0)


def signs_alone(gradient: Named) -> bool:
    """Return whether an update shows only the signs of most values: every tensor has a single magnitude."""
    cores = [core for tensor in gradient.values() if (core := _core(tensor)).numel()]
    sent = [core[core != 0].abs() for core in cores]
    most = sum(map(len, sent)) > sum(core.numel() for core in cores) / 2
    return most and len(sent) < sum(map(len, sent)) and all(bool(s.amin() == s.amax()) for s in sent)


def wrong_signs(gradients: Named, targets: Named) -> Tensor:
    """Return the share (Q,) of the gradients' squared norm in values whose sign is not that of the targets.

    Each tensor has a leading dimension Q, and counts as much as it has values: who sees signs knows no tensor's norm.
    """
    values = sum(target[0].numel() for target in targets.values())
    shares = []
    for name, target in targets.items():
        own = gradients[name].reshape(len(target), -1)
        wrong = torch.where(own * target.reshape(len(target), -1) > 0, 0.0, own).square().sum(1)
        squares = own.square().sum(1).clamp(min=torch.finfo(own.dtype).tiny)
        shares.append(target[0].numel() / values * wrong / squares)
    total: Tensor = torch.stack(shares).sum(0)
    return total


def sign_nats(gradients: Named, targets: Named) -> Tensor:
    """Return the nats that tell which of n signs are wrong in Q gradients, (Q,): n H(d), d the share of these."""
    told = torch.stack([(t != 0).reshape(len(t), -1).sum(1) for t in targets.values()]).sum(0)
    right = torch.stack([(gradients[name] * t > 0).reshape(len(t), -1).sum(1) for name, t in targets.items()]).sum(0)
    share = (1 - right / told.clamp(min=1)).clamp(max=0.5)
    nats: Tensor = told * (torch.special.entr(share) + torch.special.entr(1 - share))
    return nats


def _threshold(tensor: Tensor, weight: Tensor) -> Tensor | None:
    """Return the bound of every value of a tensor below a threshold of magnitudes, or of these times the weights'.

    None where there is no threshold.
    """
    if tensor.ndim < 2:  # a few values may well be nearly equal
        return None
    scores = (tensor, tensor * weight)
    by_size, by_weight = (_sharpness(_core(score)) for score in scores)
    if by_weight > max(by_size, _SHARP) and bool((scores[1] != 0).eq(tensor != 0).all()):
        threshold: Tensor = scores[1][tensor != 0].abs().min() / weight.abs()
        return threshold
    return tensor[tensor != 0].abs().min().expand_as(tensor) if by_size > _SHARP else None


def _core(tensor: Tensor) -> Tensor:
    """Return a tensor's rows and columns (R, C) that are not zero; of a vector one full row."""
    if tensor.ndim < 2:
        return tensor[tensor != 0][None]
    matrix = tensor.flatten(1)
    sent = matrix != 0
    return matrix[sent.any(1)][:, sent.any(0)]


def _denied(gradient: Named) -> list[str]:
    """Return the tensors, not zero, of which a row is zero whose bias is not: no single vector gives that."""
    found = []
    for name, tensor in gradient.items():
        bias = gradient.get(f"{name.removesuffix('weight')}bias") if name.endswith("weight") else None
        if bias is None or tensor.ndim < 2 or bias.shape != tensor.shape[:1]:
            continue
        silent = (tensor.flatten(1) == 0).all(1)
        if not silent.all() and bool((bias[silent] != 0).any()):
            found.append(name)
    return found


def _drawn(core: Tensor, name: str, entering: Callable[[], dict[str, int]]) -> bool:
    """Return whether the zeros of a core (R, C) follow neither from the vectors that enter nor from levels."""
    patterns = core != 0
    if patterns.all() or _even(core):
        return False
    most = max(len(side.unique(dim=0)) for side in (patterns, patterns.T))
    return most > 1 and log2(most) >= entering().get(name, inf)


def _magnitudes(core: Tensor) -> Tensor:
    """Return the distinct magnitudes of a core that are not zero, in their order: the smallest, and of some values."""
    sent = core[core != 0].abs().double()
    some = sent[:: max(1, len(sent) // _ENOUGH)]
    distinct: Tensor = torch.cat([some, sent.amin(0, keepdim=True)]).unique() if len(sent) else sent
    return distinct


def _sharpness(core: Tensor) -> float:
    """Return how improbable it is that the smallest magnitude of a core (R, C) is so large by chance, in nats.

    Of m values of a density that is even near zero, the smallest is above a share s of the largest with probability
    (1 - s)^(m - 1). The values of a layer are products of R and C numbers, no more of which are independent.
    """
    distinct = _magnitudes(core)
    half = min(len(distinct), sum(core.shape) - 1) // 2
    if half < 1:
        return 0.0
    share = float(distinct[0] / distinct[len(distinct) // 2])
    return -half * log1p(-share) if share < 1 else inf


def _levelled(cores: Sequence[Tensor]) -> bool:
    """Return whether the magnitudes of all cores are a quantiser's: multiples of a step each, and fewer than values."""
    sent = [core for core in cores if bool(core.any())]
    few = sum(len(_magnitudes(core)) for core in sent) < sum(int((core != 0).sum()) for core in sent)
    return few and all(map(_even, sent))


def _even(core: Tensor) -> bool:
    """Return whether all magnitudes of a core are multiples of one step, as a quantiser's are."""
    distinct = _magnitudes(core)
    levels = distinct / distinct.diff(prepend=distinct.new_zeros(1)).min()
    return bool((levels - levels.round()).abs().max() < 0.01 and levels.max() < _LEVELS)
