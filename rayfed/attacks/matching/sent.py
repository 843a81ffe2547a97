"""Infer which gradient values a client sent from the update's zeros and magnitudes, without knowing the defence.

A gradient has zeros without any defence: rows for units that no sample activates, and columns for inputs that are zero
in all samples. Zeros from a defence are recognised because the gradient of N samples cannot have them.

- A linear layer's gradient is a sum of products of two vectors, one for each vector that enters it. For r such vectors,
  at most 2^r - 1 patterns of zeros occur among its non-zero rows, and among its columns. A random mask produces more
  patterns, and its zeros carry no information. The attacker measures r on the model. It exceeds the number of samples
  if a layer processes each sample at several positions.
- Values from a density leave no gap between zero and the smallest value. A gap indicates a threshold, and a zero then
  means that the value is below it.

Any other zero also means that its value is at most the smallest magnitude that was sent. This bound is correct for
every kind of zero. It is nearly zero for a gradient's natural zeros, exact for a threshold, and the cell width for a
quantiser. These cases need no separate treatment.

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
"""Nats above which a gap between zero and the smallest value counts as a threshold: a chance of one in a million."""
_ROUNDING = 1e-3
"""Ratio of the norms of bounds and gradient below which bounds do not change the cosine in float32."""
_ENOUGH = 20_000
"""Number of values from which a density is estimated."""
_SIDE = 1024
"""Maximum number of rows and columns whose patterns are counted. A subset has at most as many patterns as all."""
_LEVELS = 2**16
"""Maximum number of evenly spaced magnitudes that count as levels of a quantiser."""


@dataclass(frozen=True)
class Sent:
    """Evidence on which gradient values V victims sent. Each tensor has a leading dimension V."""

    bounds: Named
    """Magnitudes up to which a value costs nothing: 0 for matched values, infinite for unknown ones."""
    thinned: Tensor
    """(V,) bool: whether zeros show that values are missing, so that the others may be scaled by any factor."""
    signs: Tensor | None
    """(V,) bool: whether the update contains signs only. None: no update does."""

    @classmethod
    def of(
        cls,
        observations: Sequence[Observation],
        names: Sequence[str],
        dtype: torch.dtype,
        model: nn.Module,
        alone: bool = True,
    ) -> Self | None:
        """Return the evidence in observations of one batch size on the tensors `names`; None if all values were sent.

        Unless `alone` (without other rounds), zeros of a quantiser count as values. An adaptive attacker also has masks
        of the values that the defence left unchanged: all other values are unknown.
        """
        gradients = [observation.step for observation in observations]  # the input of defences
        entering = cache(lambda: vectors_entering(model, observations[0]))  # slow, and rarely needed
        seen = [bounds(g, o.weights, entering, alone) for g, o in zip(gradients, observations, strict=True)]
        known = [_both(o.extra.get("defence"), _above_noise(o, model)) for o in observations]
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
        """Return whether each victim's values are neither the exact gradient nor the gradient plus noise, (V,) bool."""
        return self.thinned if self.signs is None else self.thinned | self.signs

    @property
    def ways(self) -> tuple[Self, ...]:
        """Return copies of this evidence, one for each way to match a sign-only update: by signs, and as a gradient."""
        return (self,) if self.signs is None else (self, replace(self, signs=None))

    def matched(self, targets: Named) -> Named:
        """Return the observed gradients `targets` (V, ...) with unknown values set to zero."""
        return {name: target.masked_fill(self.bounds[name].isinf(), 0) for name, target in targets.items()}

    def like(self, gradients: Named, targets: Named, victims: Tensor) -> Named:
        """Return the gradients of victims (Q,), moved as close to the observed gradients as the bounds allow.

        If values are missing, each gradient is first scaled to the norm of its target over the values that were sent.
        """
        bounds = {name: bound[victims] for name, bound in self.bounds.items()}
        sent = {name: g.masked_fill(bounds[name] > 0, 0) for name, g in gradients.items()}
        scale = torch.where(self.thinned[victims], _norms(targets) / _norms(sent), 1.0)
        scaled = {name: g * scale.view(-1, *[1] * (g.ndim - 1)) for name, g in gradients.items()}
        return {name: g - g.clamp(-bounds[name], bounds[name]) for name, g in scaled.items()}


def _known_bound(gradient: Named, seen: Named | None, known: Named | None, name: str) -> Tensor:
    """Return the allowed error of each value of a tensor: bounds from `seen`, infinite if masks mark it unknown."""
    sent = gradient[name]
    bound = torch.zeros_like(sent) if seen is None else seen[name]
    if known is None:
        return bound
    spoilt = ~known[name].to(sent.device)
    return bound.masked_fill(spoilt if seen is None else spoilt & (sent != 0), torch.inf)


def _above_noise(observation: Observation, model: nn.Module) -> Named | None:
    """Return masks of tensors that are not mostly noise; None without knowledge of the noise."""
    declared = observation.extra.get("observation_model")
    return None if declared is None else declared.above_noise(observation, model)


def _both(one: Named | None, other: Named | None) -> Named | None:
    """Return the intersection of both masks, or the only one."""
    if one is None or other is None:
        return other if one is None else one
    return {name: mask & other[name].to(mask.device) for name, mask in one.items()}


def _norms(tensors: Named) -> Tensor:
    """Return the Euclidean norms of Q gradients, (Q,), clamped above 0."""
    squares: Tensor = torch.stack([t.reshape(len(t), -1).square().sum(1) for t in tensors.values()]).sum(0)
    return squares.clamp(min=torch.finfo(torch.float32).tiny).sqrt()


def vectors_entering(model: nn.Module, observation: Observation) -> dict[str, int]:
    """Return the number of vectors that multiply each weight matrix (O, I) for an observation's samples, by name.

    Matrices whose use is not observed are missing. The result is empty for a model that cannot be probed.
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
    """Return an upper bound on the magnitude of each gradient value that was not sent; 0 for values that were sent.

    The bound is infinite if a zero carries no information. Returns None if all zeros can be those of a gradient: whole
    rows and columns of each tensor, or bounds too small to matter. `entering` counts the vectors that enter each
    matrix. Unless the gradient is matched `alone`, zeros of a quantiser count as values. Otherwise, the mean over
    rounds of stochastic rounding would be biased.
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
    """Return the bound of a tensor's values: its threshold if it has one, or the smallest magnitude that was sent.

    Infinite if zeros are `silent`, and for a tensor of zeros.
    """
    sent = tensor != 0
    if threshold is None:
        nothing = silent or not sent.any()
        threshold = torch.full_like(tensor, torch.inf if nothing else float(tensor[sent].abs().min()))
    return threshold.masked_fill(sent, 0)


def signs_alone(gradient: Named) -> bool:
    """Return whether an update contains only signs of most values: every tensor has a single magnitude."""
    cores = [core for tensor in gradient.values() if (core := _core(tensor)).numel()]
    sent = [core[core != 0].abs() for core in cores]
    most = sum(map(len, sent)) > sum(core.numel() for core in cores) / 2
    return most and len(sent) < sum(map(len, sent)) and all(bool(s.amin() == s.amax()) for s in sent)


def wrong_signs(gradients: Named, targets: Named) -> Tensor:
    """Return the share (Q,) of the gradients' squared norm in values whose sign differs from the target's sign.

    Each tensor has a leading dimension Q. Tensors are weighted by their number of values, because signs do not reveal
    the norm of a tensor.
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
    """Return the nats n H(d) that encode which of n signs are wrong in Q gradients, (Q,), d being the wrong share."""
    told = torch.stack([(t != 0).reshape(len(t), -1).sum(1) for t in targets.values()]).sum(0)
    right = torch.stack([(gradients[name] * t > 0).reshape(len(t), -1).sum(1) for name, t in targets.items()]).sum(0)
    share = (1 - right / told.clamp(min=1)).clamp(max=0.5)
    nats: Tensor = told * (torch.special.entr(share) + torch.special.entr(1 - share))
    return nats


def _threshold(tensor: Tensor, weight: Tensor) -> Tensor | None:
    """Return the bound of each value of a tensor below a threshold on magnitudes, or on magnitudes times weights.

    Returns None if there is no threshold.
    """
    if tensor.ndim < 2:  # a few values may be nearly equal by chance
        return None
    scores = (tensor, tensor * weight)
    by_size, by_weight = (_sharpness(_core(score)) for score in scores)
    if by_weight > max(by_size, _SHARP) and bool((scores[1] != 0).eq(tensor != 0).all()):
        threshold: Tensor = scores[1][tensor != 0].abs().min() / weight.abs()
        return threshold
    return tensor[tensor != 0].abs().min().expand_as(tensor) if by_size > _SHARP else None


def _core(tensor: Tensor) -> Tensor:
    """Return the non-zero rows and columns (R, C) of a tensor, or one row without zeros for a vector."""
    if tensor.ndim < 2:
        return tensor[tensor != 0][None]
    matrix = tensor.flatten(1)
    sent = matrix != 0
    return matrix[sent.any(1)][:, sent.any(0)]


def _denied(gradient: Named) -> list[str]:
    """Return the non-zero tensors with a zero row whose bias is not zero, which a single vector cannot cause."""
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
    """Return whether the zeros of a core (R, C) can come neither from the vectors that enter nor from levels."""
    patterns = core != 0
    if patterns.all() or _even(core):
        return False
    most = max(len(side.unique(dim=0)) for side in (patterns, patterns.T))
    return most > 1 and log2(most) >= entering().get(name, inf)


def _magnitudes(core: Tensor) -> Tensor:
    """Return distinct non-zero magnitudes of a core, sorted: those of a subset of values, and the smallest of all."""
    sent = core[core != 0].abs().double()
    some = sent[:: max(1, len(sent) // _ENOUGH)]
    distinct: Tensor = torch.cat([some, sent.amin(0, keepdim=True)]).unique() if len(sent) else sent
    return distinct


def _sharpness(core: Tensor) -> float:
    """Return the improbability, in nats, that the smallest magnitude of a core (R, C) is so large by chance.

    For m values of a density that is uniform near zero, the smallest exceeds a share s of the largest with probability
    (1 - s)^(m - 1). A layer's values are products of R and C numbers, so at most R + C - 1 are independent.
    """
    distinct = _magnitudes(core)
    half = min(len(distinct), sum(core.shape) - 1) // 2
    if half < 1:
        return 0.0
    share = float(distinct[0] / distinct[len(distinct) // 2])
    return -half * log1p(-share) if share < 1 else inf


def _levelled(cores: Sequence[Tensor]) -> bool:
    """Return whether the magnitudes of all cores come from a quantiser: few multiples of one step for each core."""
    sent = [core for core in cores if bool(core.any())]
    few = sum(len(_magnitudes(core)) for core in sent) < sum(int((core != 0).sum()) for core in sent)
    return few and all(map(_even, sent))


def _even(core: Tensor) -> bool:
    """Return whether all magnitudes of a core are multiples of one step, as after a quantiser."""
    distinct = _magnitudes(core)
    levels = distinct / distinct.diff(prepend=distinct.new_zeros(1)).min()
    return bool((levels - levels.round()).abs().max() < 0.01 and levels.max() < _LEVELS)
