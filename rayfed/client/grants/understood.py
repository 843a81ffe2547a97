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

from collections.abc import Callable, Sequence
from itertools import chain
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from rayfed.update import Named

Answer = Callable[["Tensor", int], "Tensor"]
"""Returns what is sent in place of a gradient (D,), with the randomness of a seed."""

SAMPLES = "what is sent depends on the samples themselves"
RANDOM_SAMPLES = "samples are changed by chance"
LOST_SAMPLES = "samples are changed in a way that was not undone"
LABELS = "labels are changed"
MODEL = "the model is changed"
PRIVATE = "a part of the model stays with the client"
STATE = "what is sent depends on earlier rounds"
OTHERS = "not just one gradient is taken, or at other weights, or of some samples more than of others"
ELSEWHERE = "what is sent depends on the round, the client, its number of samples, or the weights"
STEPS = "gradients of several local steps are changed"
CHOSEN = "which values are left out depends on more than their own sizes"
LOST = "gradients are changed in a way that was not undone"
CHANGED = "what is done by chance is more than to add noise"
RELATED = "noise is related from value to value"
LEVELS = "noise takes few values"
OFFSET = "noise has a part that is the same each time"
SIZES = "noise is larger on some values of a tensor than on others"
DENSITY = "noise is neither normal nor Laplace's"
FEW = "noise follows from fewer random numbers than it is added to"
UNDRAWN = "noise is not one number drawn normal for each value, times a factor"
BESIDE = "what is sent beside the values is changed"

_SIZES = 1.0, 0.01
"""Standard deviations of the attacker's own gradients."""
_MOST_DRAWS, _FEWER_DRAWS, _FEW_DRAWS, _LARGE = 64, 32, 4, 2**20
"""Draws of noise, of many values, of noise that is known but for its size, and how many values are many."""
_LOOKED_AT = 2**19
"""Values that are compared with each other, at most."""
_COMPARED, _SELDOM_COMPARED = 8, 2
"""Draws whose answers to gradients are compared with those to zeros, and of noise that is known but for its size."""
_TRIED_ON_OTHERS = 2
"""Draws whose answers to gradients other than random ones are compared."""
_OFTEN_SENT = 4
"""Comparisons in which a value was sent, from which it counts as one that has no noise where others have."""
_SAME, _ROUNDING = 1e-5, 1e-6
"""Difference up to which values are equal, over the larger of gradient and noise, and over the usual noise."""
_CLEARLY = 8.0
"""Standard errors from which values are related."""
_WIDEST = 0.3
"""Variance of the squares of noise over values, over their mean squared, up to which it is of one size."""
_SEVERAL = 64
"""Fewest values whose sizes are compared."""
_LIKE = 0.02
"""Distance of Kolmogorov and Smirnov from a density up to which noise has it, where there are countless draws."""
_COUNTED = 20_000
"""Draws whose density is looked at."""
_SIDE = 256
"""Rows and columns of a matrix whose covariances are looked at."""
_EDGE = 2.0
"""Factor from the edges of Marchenko and Pastur beyond which an eigenvalue is not that of independent values."""
_OFTEN = 0.01
"""Share of values whose noise came twice, from which noise takes few values."""
_MEDIAN, _OUTLIER = 0.6745, 9.0
"""Median size of normal noise of deviation 1, and the square from which a value is an outlier."""
_FITTED = 5
"""Times that the factor between a gradient and an update is fitted, without outliers, at last on all values."""
_FEW_FITTED = 2**20
"""About how many values it is fitted on before."""
_AS_DRAWN = 5e-7
"""Relative error up to which noise is what was drawn times a factor, after a few roundings."""
_DROWNED = 2.0
"""Energy of a tensor over that of its noise up to which it is little else."""


class Noise(NamedTuple):
    """Noise of its own on each value of an update, as an attacker who drew it knows it."""

    noisy: Named
    """Bool masks: which values have any."""
    scales: dict[str, float]
    """Its usual size on each tensor that has some."""

    def nats(self, seen: Named, gradient: Named) -> float:
        """Return by how many nats an update is less likely than without noise, if it is of a gradient, times a factor.

        Noise counts as normal, and its outliers as Laplace's, in proportion to their size. The factor is the one that
        fits best.
        """
        import torch
        from torch.nn.functional import huber_loss

        sent, way = self._known(seen), self._known(gradient)
        few = slice(None, None, max(1, len(sent) // _FEW_FITTED))
        factor = torch.zeros(()).to(sent)
        for part in (*[few] * (_FITTED - 1), slice(None)):
            own, other = way[part], sent[part]
            counted = (other - factor * own).square() < _OUTLIER
            factor = ((own * other)[counted].sum() / own[counted].square().sum()).nan_to_num().clamp(min=0)
        return float(huber_loss(factor * way, sent, reduction="sum", delta=sqrt(_OUTLIER)))

    def _known(self, tensors: Named) -> Tensor:
        """Return the values (n,) that have noise, over its usual size."""
        import torch

        noisy = {name: mask.cpu() for name, mask in self.noisy.items()}
        return torch.cat([tensors[name].cpu().double()[noisy[name]] / self.scales[name] for name in self.scales])


class Rehearsal(NamedTuple):
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
    noisy: int
    """Number of values with noise."""
    noise: Noise | None
    """The noise, where gradients are sent as they are, or all times one factor, but for noise that is understood."""

    @classmethod
    def of(
        cls, answer: Answer, like: Named, trusted: bool = False, even: bool = False, others: Sequence[Tensor] = ()
    ) -> Rehearsal:
        """Run defences on zeros, on random gradients, and on `others` (D,), of tensors `like` those that are sent.

        Noise that is `trusted` to be of its own for each value is drawn a few times, to see its size; twice where it is
        trusted to be on all values or on none (`even`).
        """
        import torch

        from rayfed.gradients import flatten, unflatten

        zeros = torch.zeros_like(flatten(like))
        many = _MOST_DRAWS if len(zeros) <= _LARGE else _FEWER_DRAWS
        draws, compared = (2, 1) if even else (_FEW_DRAWS, _SELDOM_COMPARED) if trusted else (many, _COMPARED)
        places = _places(like).to(zeros.device)
        silent, energy = torch.ones_like(zeros, dtype=torch.bool), zeros.double()
        looked: list[Tensor] = []
        first: list[Tensor] = []
        for seed in range(draws):
            noise = answer(zeros, seed)
            silent, energy = silent & (noise == 0), energy + noise.double().square() / draws
            looked.append(noise[places])
            first += [noise] * (seed < compared)
        known = torch.stack(looked)
        kept, times = torch.ones_like(silent), torch.zeros_like(zeros)
        chosen, masks = False, False
        fixed = bool((known == known[0]).all()) and all(torch.equal(one, first[0]) for one in first)
        draw = torch.Generator().manual_seed(0)
        for seed, noise in enumerate(first):
            drawn = (size * torch.randn(len(zeros), generator=draw).to(zeros) for size in _SIZES[: 1 if even else None])
            before: tuple[Tensor, Tensor] | None = None  # the first gradient, and what of it was left out
            for gradient in chain(drawn, others if seed < _TRIED_ON_OTHERS else ()):
                sent = answer(gradient, seed)
                near = _SAME * torch.maximum(noise.abs(), gradient.abs()) + _ROUNDING * energy.sqrt().to(zeros)
                masked = sent == 0
                before = before or (gradient, masked)
                chosen = chosen or not (
                    _as_before(gradient, masked, *before) or _smallest(gradient, masked, before[1], like)
                )
                kept, times = kept & (_copied(sent - noise, gradient, near) | masked), times + ~masked
                masks, fixed = masks or bool(masked.any()), fixed and torch.equal(sent, answer(gradient, seed + 1))
        whole, loud = bool(kept.all()), not bool(silent.all())
        quiet = kept & silent & ((times >= _OFTEN_SENT) if loud or not whole else torch.ones_like(silent))
        beyond = CHOSEN * chosen if whole else LOST if fixed else CHANGED
        if whole and not fixed and not trusted:
            beyond = beyond or _beyond(known, places, like)
        clear = whole and loud and not masks and not fixed and not beyond
        return cls(
            quiet=quiet,
            masks=masks,
            fixed=fixed,
            beyond=beyond,
            energy={name: float(t.sum()) for name, t in unflatten(energy, like).items()},
            noisy=int((~silent).sum()),
            noise=_noise(known, places, unflatten(~silent, like)) if clear else None,
        )

    def left(self, update: Named) -> Named:
        """Return which values of an update are the gradient's own, times one factor for all: bool masks by name."""
        from rayfed.gradients import flatten, unflatten

        values = flatten(update)
        quiet = self.quiet.to(values.device)
        return unflatten(quiet & (values != 0) if self.masks else quiet, update)

    def above_noise(self, update: Named) -> Named:
        """Return which values of an update are in tensors that are not almost all noise: bool masks by name."""
        import torch

        def above(name: str, tensor: Tensor) -> bool:
            noise = self.energy[name]
            return not noise or float(tensor.square().sum()) > _DROWNED * noise

        return {name: torch.full_like(t, above(name, t), dtype=torch.bool) for name, t in update.items()}


def is_drawn(noise: Named, drawn: Sequence[Tensor]) -> bool:
    """Return whether the noise on each tensor is what was drawn for it, times a factor.

    It is drawn in one piece for a tensor, and then for no other, or for all of them together.
    """
    left, start = [one.flatten() for one in drawn], 0
    for tensor in noise.values():
        values, place = tensor.flatten(), start
        start += len(values)
        if not values.any():
            continue
        whole = next((n for n, one in enumerate(left) if len(one) == len(values) and _is_multiple(values, one)), None)
        if whole is not None:
            del left[whole]
        elif not any(len(one) >= start and _is_multiple(values, one[place:start]) for one in left):
            return False
    return True


def _is_multiple(values: Tensor, drawn: Tensor) -> bool:
    """Return whether values (n,) are 0 or as drawn, times one factor, up to rounding."""
    there, expected = values != 0, drawn.to(values.device).double()
    expected = (values / expected)[there].median() * expected
    return bool(((values - expected).abs() <= _AS_DRAWN * expected.abs())[there].all())


def _places(like: Named) -> Tensor:
    """Return the places, among the values of all tensors, of those that are compared: the first of each tensor."""
    import torch

    sizes = [t.numel() for t in like.values()]
    most = sum(sizes) if sum(sizes) <= _LOOKED_AT else max(1, _LOOKED_AT // len(sizes))
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    parts = [torch.arange(start, start + min(size, most)) for start, size in zip(starts, sizes, strict=True)]
    return torch.cat(parts)


def _by_tensor(draws: Tensor, places: Tensor, like: Named) -> dict[str, Tensor]:
    """Return the draws (M, n) at `places` as those of each tensor (M, n_t), by name."""
    ends, found = 0, {}
    for name, tensor in like.items():
        start, ends = ends, ends + tensor.numel()
        found[name] = draws[:, (places >= start) & (places < ends)]
    return found


def _beyond(draws: Tensor, places: Tensor, like: Named) -> str:
    """Return of what kind noise (M, n) at `places` is of which attacks make no use; empty if it is of none."""
    parts = _by_tensor(draws, places, like)
    loud = [part[:, part.any(0)] for part in parts.values() if part.any()]
    if _related(draws) or any(map(_related, loud)):
        return RELATED
    if any(map(_shifted, loud)):
        return OFFSET
    if any(_spread(parts[name], tensor) for name, tensor in like.items()):
        return RELATED
    kinds = (_levelled, LEVELS), (_uneven, SIZES), (_of_other_density, DENSITY)
    return next((said for told, said in kinds if any(map(told, loud))), "")


def _noise(draws: Tensor, places: Tensor, noisy: Named) -> Noise:
    """Return what draws (M, n) at `places` tell of noise that is of its own for each value."""
    drawn = _by_tensor(draws, places, noisy)
    scales = {name: float(t[t != 0].abs().median()) / _MEDIAN for name, t in drawn.items() if t.any()}
    return Noise({name: mask for name, mask in noisy.items() if name in scales}, scales)


def _copied(sent: Tensor, gradient: Tensor, near: Tensor) -> Tensor:
    """Return which values (D,) are sent as they are, or all times the factor that most have."""
    there = sent.abs() > near
    if not there.any():
        return gradient.abs() <= near
    factor = (sent / gradient)[there].median()
    found = [(sent - one * gradient).abs() <= near * max(1.0, one) for one in (1.0, float(factor))]
    return max(found, key=lambda copied: int(copied.sum()))


def _as_before(gradient: Tensor, masked: Tensor, other: Tensor, of_other: Tensor) -> bool:
    """Return whether the same values (D,) of two gradients are left out, of those that neither has as 0."""
    return bool(((masked == of_other) | (gradient == 0) | (other == 0)).all())


def _smallest(gradient: Tensor, masked: Tensor, of_other: Tensor, like: Named) -> bool:
    """Return whether the smallest values (D,) are left out, of each tensor or of all, as many as of another gradient.

    Other choices, and how many there are, may tell of the values. What is 0 in the gradient counts among them.
    """
    from rayfed.gradients import unflatten

    sizes, out, other = (unflatten(one, like) for one in (gradient.abs(), masked, of_other))
    return _are_smallest(gradient.abs(), masked, of_other) or all(
        _are_smallest(sizes[name], out[name], other[name]) for name in out
    )


def _are_smallest(sizes: Tensor, masked: Tensor, of_other: Tensor) -> bool:
    as_many = int(masked.sum()) == max(int(of_other.sum()), int((sizes == 0).sum()))
    some = bool(masked.any()) and not bool(masked.all())
    return as_many and (not some or bool(sizes[masked].max() <= sizes[~masked].min()))


def _related(draws: Tensor) -> bool:
    """Return whether random values (M, D), or their sizes, are related."""
    draws = draws[: len(draws) // 4 * 4]
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


def _spread(draws: Tensor, tensor: Tensor) -> bool:
    """Return whether rows or columns of the noise (M, n) on a tensor's first values have sums with less or more noise.

    Of N draws of p independent values the eigenvalues of their covariance lie within (1 -+ sqrt(p / N))^2, where p and
    N are large (Marchenko and Pastur 1967).
    """
    import torch

    if tensor.ndim < 2 or not draws.any():
        return False
    columns = tensor[0].numel()
    matrices = draws[:, : draws.shape[1] // columns * columns].view(len(draws), -1, columns)[:, :_SIDE, :_SIDE]
    scale = matrices.square().mean(0).sqrt()
    matrices = torch.where(scale > 0, matrices / scale, 0).double()
    for values in (matrices.movedim(1, 2).flatten(0, 1), matrices.flatten(0, 1)):
        values = values[:, values.any(0)]
        count, size = values.shape
        if size < 2 or count < 4 * size:
            continue
        found = torch.linalg.eigvalsh(values.T @ values / count)
        low, high = ((1 + side * sqrt(size / count)) ** 2 for side in (-1, 1))
        if float(found[0]) < low / _EDGE or float(found[-1]) > high * _EDGE:
            return True
    return False


def _shifted(draws: Tensor) -> bool:
    """Return whether the mean of random values (M, D) over draws is further from 0 than chance has it."""
    means = draws.double().mean(0).square() / (draws.double().var(0) / len(draws)).clamp(min=1e-300)
    return float(means.clamp(max=1e6).mean()) > 1.1 + _CLEARLY * sqrt(2 / len(means))


def _uneven(draws: Tensor) -> bool:
    """Return whether random values (M, D) are of several sizes."""
    sizes = draws.double().square().mean(0)
    return len(sizes) >= _SEVERAL and float(sizes.var() / sizes.mean().square()) > _WIDEST


def _of_other_density(draws: Tensor) -> bool:
    """Return whether random values (M, D) of one size are neither normal nor of Laplace's distribution."""
    import torch

    values = draws.double().flatten().sort().values
    values = values[:: max(1, len(values) // _COUNTED)] / values.square().mean().sqrt()
    places = (torch.arange(len(values), device=values.device) + 0.5) / len(values)
    tail = 0.5 * torch.exp(-(2**0.5) * values.abs())
    laws = torch.special.ndtr(values), torch.where(values < 0, tail, 1 - tail)
    return min(float((law - places).abs().max()) for law in laws) > _LIKE + 2 / sqrt(len(values))
