"""Whether attackers who run a defence's code use all that it tells, and which values it leaves as they are.

The attacks take a gradient to be sent as it is, in part, times one factor, or under noise of its own for each value. So
a defence is run on gradients of the attacker's own. It is understood if the same randomness adds the same to all of
them, and if what it adds to one value tells nothing of what it adds to another: neither the noise nor its size is
related, and it does not take few values. Of anything else, such as one noise for a whole row, secret factors or a
secret order, somebody who reads the code may make more than these attacks do.

Products of two draws of d independent values of variance 1 have, over d, mean 0 and variance 1 / d, whatever their
distribution. Of related values it is the sum of the squares of all correlations over d^2, which is larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rayfed.update import Named

Answer = Callable[["Tensor", int], "Tensor"]
"""Returns what is sent in place of a gradient (D,), with the randomness of a seed."""

SAMPLES = "what is sent depends on the samples themselves"
RANDOM_SAMPLES = "samples are changed by chance"
LOST_SAMPLES = "samples are changed in a way that was not undone"
LOST = "gradients are changed in a way that was not undone"
CHANGED = "what is done by chance is more than to add noise"
RELATED = "noise is related from value to value"
LEVELS = "noise takes few values"

_SIZES = 1.0, 0.01
"""Standard deviations of the attacker's own gradients."""
_MOST_DRAWS, _FEWEST_DRAWS, _HELD = 64, 16, 2**25
"""Draws of noise, and values in them all."""
_COMPARED = 8
"""Draws whose answers to gradients are compared with those to zeros."""
_SAME = 1e-5
"""Difference up to which values are equal, over the larger of gradient and noise."""
_CLEARLY = 8.0
"""Standard errors from which values are related."""
_OFTEN = 0.01
"""Share of values whose noise came twice, from which noise takes few values."""
_EXPLAINED = 5.0
"""Standard errors above the noise up to which it explains what lies between an update and a gradient."""
_MEDIAN, _OUTLIER = 0.6745, 9.0
"""Median size of normal noise of deviation 1, and the square from which a value counts no more."""
_DROWNED = 2.0
"""Energy of a tensor over that of its noise up to which it is little else."""


@dataclass(frozen=True)
class Noise:
    """Noise of its own on each value of an update, as an attacker who drew it knows it."""

    noisy: Named
    """Bool masks: which values have any."""
    scales: dict[str, float]
    """Its usual size on each tensor that has some."""
    usual: float
    """Mean of `rho` over it."""
    spread: float
    """Standard deviation of that mean, over all values that have noise."""

    def excess(self, seen: Named, gradient: Named) -> float:
        """Return by how many standard errors an update is further from a gradient, times any factor, than noise."""
        sent, way = self._known(seen), self._known(gradient)
        factor = (way @ sent / way.square().sum()).nan_to_num().clamp(min=0)
        return (float(_rho(sent - factor * way).mean()) - self.usual) / self.spread

    def beside(self, seen: Named, gradient: Named, other: Named) -> float:
        """Return how far a gradient is from an update beyond the noise, over another's: 0 where noise explains it."""
        own, others = (self.excess(seen, one) for one in (gradient, other))
        if own <= _EXPLAINED:
            return 0.0
        return sqrt(own / others) if others > own else 1.0

    def _known(self, tensors: Named) -> Tensor:
        """Return the values (n,) that have noise, over its usual size."""
        import torch

        noisy = {name: mask.cpu() for name, mask in self.noisy.items()}
        return torch.cat([tensors[name].cpu().double()[noisy[name]] / self.scales[name] for name in self.scales])


@dataclass(frozen=True)
class Rehearsal:
    """What answers of defences to gradients of the attacker's own tell of an update."""

    quiet: Tensor
    """(D,) bool: which values are sent as they are, all times one factor, or as 0."""
    masks: bool
    """Whether some are sent as 0."""
    fixed: bool
    """Whether all answers to a gradient are alike."""
    beyond: str
    """What is done of which attacks make no use, in words; empty if there is nothing of that kind."""
    energy: dict[str, float]
    """Sum of squares of the noise on each tensor."""
    noise: Noise | None
    """The noise, where gradients are sent as they are, or all times one factor, but for noise that is understood."""

    @classmethod
    def of(cls, answer: Answer, like: Named, draws: int | None = None) -> Rehearsal:
        """Run defences on zeros and on random gradients, of tensors `like` those that are sent.

        It does so `draws` times, by default as often as memory allows.
        """
        import torch

        from rayfed.gradients import flatten, unflatten

        zeros = torch.zeros_like(flatten(like))
        most = max(_FEWEST_DRAWS, min(_MOST_DRAWS, _HELD // len(zeros)))
        noise = torch.stack([answer(zeros, seed) for seed in range(draws or most)])
        given = torch.randn(len(zeros), generator=torch.Generator().manual_seed(0)).to(zeros)
        kept, masks, fixed = torch.ones_like(zeros, dtype=torch.bool), False, bool((noise == noise[0]).all())
        for size in _SIZES:
            gradient = size * given
            first = answer(gradient, 0)
            for seed in range(min(_COMPARED, len(noise))):
                sent = answer(gradient, seed) if seed else first
                masked = sent == 0
                near = _SAME * torch.maximum(noise[seed].abs(), gradient.abs())
                kept &= _copied(sent - noise[seed], gradient, near) | masked
                masks, fixed = masks or bool(masked.any()), fixed and torch.equal(sent, first)
        quiet, whole = kept & (noise == 0).all(0), bool(kept.all())
        beyond = (_beyond(noise, like) if whole else CHANGED) if not fixed else "" if whole else LOST
        noisy = whole and not masks and not fixed
        squares = unflatten(noise.square().mean(0), like)
        return cls(
            quiet=quiet,
            masks=masks,
            fixed=fixed,
            beyond=beyond,
            energy={name: float(t.sum()) for name, t in squares.items()},
            noise=_noise(noise, unflatten(~quiet, like)) if noisy and not beyond else None,
        )

    def left(self, update: Named) -> Named:
        """Return which values of an update are the gradient's own, times one factor for all: bool masks by name."""
        from rayfed.gradients import flatten, unflatten

        return unflatten(self.quiet & (flatten(update) != 0) if self.masks else self.quiet, update)

    def above_noise(self, update: Named) -> Named:
        """Return which values of an update are in tensors that are not almost all noise: bool masks by name."""
        import torch

        above = {name: float(t.square().sum()) > _DROWNED * self.energy[name] for name, t in update.items()}
        return {n: torch.full_like(t, above[n] or not self.energy[n], dtype=torch.bool) for n, t in update.items()}


def _beyond(noise: Tensor, like: Named) -> str:
    """Return of what kind noise (M, D) is of which attacks make no use; empty if it is of none."""
    from rayfed.gradients import unflatten

    by_tensor = [unflatten(draw, like) for draw in noise]
    parts = [noise, *(_stacked(draw[name] for draw in by_tensor) for name in like)]
    if any(map(_related, parts)):
        return RELATED
    return LEVELS if any(map(_levelled, parts)) else ""


def _noise(draws: Tensor, noisy: Named) -> Noise:
    """Return what draws (M, D) tell of noise that is of its own for each value."""
    import torch

    from rayfed.gradients import unflatten

    by_tensor = [unflatten(draw, noisy) for draw in draws]
    drawn = {name: torch.stack([draw[name][mask] for draw in by_tensor]) for name, mask in noisy.items() if mask.any()}
    scales = {name: float(t.abs().median()) / _MEDIAN or 1.0 for name, t in drawn.items()}
    sizes = torch.cat([_rho(t / scales[name]) for name, t in drawn.items()], 1)
    return Noise(noisy, scales, float(sizes.mean()), float(sizes.std()) / sqrt(sizes.shape[1]))


def _rho(values: Tensor) -> Tensor:
    """Return the squares of values, of outliers no more than `_OUTLIER`."""
    return values.square().clamp(max=_OUTLIER)


def _stacked(draws: Iterable[Tensor]) -> Tensor:
    import torch

    return torch.stack([draw.flatten() for draw in draws])


def _copied(sent: Tensor, gradient: Tensor, near: Tensor) -> Tensor:
    """Return which values (D,) are sent as they are, or all times the factor that most have."""
    there = sent.abs() > near
    if not there.any():
        return gradient.abs() <= near
    factor = (sent / gradient)[there].median()
    found = [(sent - one * gradient).abs() <= near * max(1.0, one) for one in (1.0, float(factor))]
    return max(found, key=lambda copied: int(copied.sum()))


def _related(draws: Tensor) -> bool:
    """Return whether random values (M, D), or their sizes, are related."""
    apart = draws[::2] - draws[1::2]  # in whose distribution no value has a sign or a mean
    sizes = apart.abs()
    return any(map(_correlated, (apart, sizes[::2] - sizes[1::2])))


def _correlated(draws: Tensor) -> bool:
    """Return whether values of independent draws (M, D) are correlated, each with a distribution even about 0."""
    import torch

    scale = draws.square().mean(0).sqrt()
    values = (draws / scale)[:, scale > 0]
    pairs, count = len(draws) * (len(draws) - 1) / 2, values.shape[1]
    if not pairs:
        return False
    products = torch.triu(values @ values.T / max(count, 1), diagonal=1)
    return count * float(products.square().sum()) / pairs > 1 + _CLEARLY * sqrt(2 / pairs)


def _levelled(draws: Tensor) -> bool:
    """Return whether random values (M, D) come back too often for those of a density."""
    random = draws[:, (draws != draws[0]).any(0)]
    back = (random.sort(0).values.diff(dim=0) == 0).any(0)
    return bool(back.sum() > _OFTEN * len(back))
