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
_DROWNED = 2.0
"""Energy of a tensor over that of its noise up to which it is little else."""


@dataclass(frozen=True)
class Rehearsal:
    """Answers of defences to gradients of the attacker's own, of D values."""

    noise: Tensor
    """(M, D), answers to zeros."""
    kept: Tensor
    """(D,) bool: which values are sent, less the noise, as they are, all times one factor, or as 0."""
    masks: bool
    """Whether some are sent as 0."""
    fixed: bool
    """Whether all answers to a gradient are alike."""

    @classmethod
    def of(cls, answer: Answer, zeros: Tensor, draws: int | None = None) -> Rehearsal:
        """Run defences on zeros (D,) and on random gradients; `draws` times, by default as often as memory allows."""
        import torch

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
        return cls(noise, kept, masks, fixed)

    def left(self, update: Named) -> Named:
        """Return which values of an update are the gradient's own, times one factor for all: bool masks by name."""
        from rayfed.gradients import flatten, unflatten

        quiet = self.kept & (self.noise == 0).all(0)
        return unflatten(quiet & (flatten(update) != 0) if self.masks else quiet, update)

    def above_noise(self, update: Named) -> Named:
        """Return which values of an update are in tensors that are not almost all noise: bool masks by name."""
        import torch

        from rayfed.gradients import unflatten

        noise = {name: float(t.sum()) for name, t in unflatten(self.noise.square().mean(0), update).items()}
        above = {
            name: float(t.square().sum()) > _DROWNED * noise[name] or not noise[name] for name, t in update.items()
        }
        return {name: torch.full_like(t, above[name], dtype=torch.bool) for name, t in update.items()}

    def beyond(self, like: Named) -> str:
        """Return what defences do of which attacks make no use, in words; empty if there is nothing of that kind.

        `like` are the tensors that are sent, by name.
        """
        from rayfed.gradients import unflatten

        if not self.kept.all():
            return LOST if self.fixed else CHANGED
        if self.fixed:
            return ""
        by_tensor = [unflatten(draw, like) for draw in self.noise]
        parts = [self.noise, *(_stacked(draw[name] for draw in by_tensor) for name in like)]
        if any(map(_related, parts)):
            return RELATED
        return LEVELS if any(map(_levelled, parts)) else ""


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
    products = torch.triu(values @ values.T / max(count, 1), diagonal=1)
    return count * float(products.square().sum()) / pairs > 1 + _CLEARLY * sqrt(2 / pairs)


def _levelled(draws: Tensor) -> bool:
    """Return whether random values (M, D) come back too often for those of a density."""
    random = draws[:, (draws != draws[0]).any(0)]
    back = (random.sort(0).values.diff(dim=0) == 0).any(0)
    return bool(back.sum() > _OFTEN * len(back))
