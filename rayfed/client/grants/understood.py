"""Tests of whether the attacks use everything that a defence's code reveals, and which values it does not change.

The attacks assume that the update is the gradient, or a part of it, times a factor, plus independent noise. Therefore
the defence is run on gradients of the attacker. It is understood if equal random numbers add equal noise to all
gradients, and if the noise of different values is independent and continuous. Other defences use one noise for a row,
for example, secret factors or a secret order. Someone who reads their code may reconstruct more than these attacks.

Let x and y be two samples of d independent values with variance 1. Then x . y / d has mean 0 and variance 1 / d. For
correlated values the variance is larger: the sum of all squared correlations over d^2.
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
"""Function from a gradient (D,) and a seed to the update."""

SAMPLES = "the update depends on the samples themselves"
RANDOM_SAMPLES = "samples are changed at random"
LOST_SAMPLES = "samples are changed in a way that was not undone"
LABELS = "labels are changed"
MODEL = "the model is changed"
PRIVATE = "a part of the model stays with the client"
STATE = "the update depends on earlier rounds"
OTHERS = "the defence uses several gradients, other weights, or unequal weights of samples"
ELSEWHERE = "the update depends on the round, the client, its number of samples, or the weights"
STEPS = "gradients of several local steps are changed"
CHOSEN = "the choice of removed values depends on more than their sizes"
LOST = "gradients are changed in a way that was not undone"
CHANGED = "the random change of gradients is more than added noise"
RELATED = "noise is correlated between values"
LEVELS = "noise takes few values"
OFFSET = "noise has a constant part"
SIZES = "noise has different sizes within a tensor"
DENSITY = "noise is not normal and not Laplacian"
FEW = "there are fewer random numbers than noisy values"
UNDRAWN = "noise is not one normal random number per value, times a factor"
BESIDE = "buffers, loss or sample count of the update are changed"

_SIZES = 1.0, 0.01
"""Standard deviations of the attacker's gradients."""
_MOST_DRAWS, _FEWER_DRAWS, _FEW_DRAWS, _LARGE = 64, 32, 4, 2**20
"""Number of noise samples: by default, for more than `_LARGE` values, and for trusted noise."""
_LOOKED_AT = 2**19
"""Maximum number of values that are compared."""
_COMPARED, _SELDOM_COMPARED = 8, 2
"""Number of noise samples for which gradients and zeros are compared: by default, and for trusted noise."""
_TRIED_ON_OTHERS = 2
"""Number of noise samples for which other gradients are also used."""
_OFTEN_SENT = 4
"""Minimum number of comparisons in which a value without noise was sent."""
_SAME, _ROUNDING = 1e-5, 1e-6
"""Maximum difference of equal values, relative to the larger of gradient and noise, and to the usual noise."""
_CLEARLY = 8.0
"""Minimum number of standard errors for a significant correlation."""
_WIDEST = 0.3
"""Maximum relative variance of squared noise, for noise of one size."""
_SEVERAL = 64
"""Minimum number of values for a comparison of sizes."""
_LIKE = 0.02
"""Maximum Kolmogorov-Smirnov distance from a density, for many samples."""
_COUNTED = 20_000
"""Maximum number of values for the test of the density."""
_SIDE = 256
"""Maximum number of rows and columns for the test of covariances."""
_EDGE = 2.0
"""Maximum factor between an eigenvalue and the Marchenko-Pastur edges, for independent values."""
_OFTEN = 0.01
"""Share of values with repeated noise from which noise takes few values."""
_MEDIAN, _OUTLIER = 0.6745, 9.0
"""Median absolute value of standard normal noise, and minimum square of an outlier."""
_FITTED = 5
"""Number of fits of the factor between gradient and update, without outliers."""
_FEW_FITTED = 2**20
"""Approximate number of values for all fits except the last."""
_AS_DRAWN = 5e-7
"""Maximum relative error of noise that is a random number times a factor."""
_DROWNED = 2.0
"""Maximum energy of a tensor that is mostly noise, relative to the noise."""


class Noise(NamedTuple):
    """Independent noise on the values of an update, as measured by an attacker."""

    noisy: Named
    """Bool masks of the noisy values."""
    scales: dict[str, float]
    """Standard deviation of the noise on each noisy tensor."""

    def nats(self, seen: Named, gradient: Named) -> float:
        """Return the decrease of an update's log-likelihood under a gradient, in nats, compared with zero noise.

        The update is assumed to be a gradient times the best-fitting factor, plus normal noise with Laplacian outliers.
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
        """Return the noisy values (n,), divided by the standard deviation of the noise."""
        import torch

        noisy = {name: mask.cpu() for name, mask in self.noisy.items()}
        return torch.cat([tensors[name].cpu().double()[noisy[name]] / self.scales[name] for name in self.scales])


class Rehearsal(NamedTuple):
    """Result of running defences on the attacker's own gradients."""

    quiet: Tensor
    """Values that are sent without noise, times a common factor, or as 0, (D,) bool."""
    masks: bool
    """Whether some values are sent as 0."""
    fixed: bool
    """Whether the defences are deterministic."""
    beyond: str
    """Description of an effect that the attacks do not use; empty if there is none."""
    energy: dict[str, float]
    """Sum of squares of the noise on each tensor."""
    noisy: int
    """Number of noisy values."""
    noise: Noise | None
    """The noise, if the defences only add independent noise (and multiply by a factor); else None."""

    @classmethod
    def of(
        cls, answer: Answer, like: Named, trusted: bool = False, even: bool = False, others: Sequence[Tensor] = ()
    ) -> Rehearsal:
        """Run defences on a zero gradient, on random gradients and on `others` (D,), with tensors shaped as `like`.

        For noise that is `trusted` to be independent, few samples are taken; two if it is on all values or none
        (`even`).
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
            before: tuple[Tensor, Tensor] | None = None  # the first gradient, and the mask of its removed values
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
        """Return bool masks, by name, of the values of an update that equal the gradient up to a common factor."""
        from rayfed.gradients import flatten, unflatten

        values = flatten(update)
        quiet = self.quiet.to(values.device)
        return unflatten(quiet & (values != 0) if self.masks else quiet, update)

    def above_noise(self, update: Named) -> Named:
        """Return bool masks, by name, that are True for tensors of an update that are not mostly noise."""
        import torch

        def above(name: str, tensor: Tensor) -> bool:
            noise = self.energy[name]
            return not noise or float(tensor.square().sum()) > _DROWNED * noise

        return {name: torch.full_like(t, above(name, t), dtype=torch.bool) for name, t in update.items()}


def is_drawn(noise: Named, drawn: Sequence[Tensor]) -> bool:
    """Return whether the noise on each tensor is a factor times random numbers sampled for this tensor.

    They are sampled for each tensor, or at once for all tensors.
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
    """Return whether values (n,) are 0 or a common factor times `drawn`, up to rounding."""
    there, expected = values != 0, drawn.to(values.device).double()
    expected = (values / expected)[there].median() * expected
    return bool(((values - expected).abs() <= _AS_DRAWN * expected.abs())[there].all())


def _places(like: Named) -> Tensor:
    """Return the positions of the values to compare: the first ones of each tensor."""
    import torch

    sizes = [t.numel() for t in like.values()]
    most = sum(sizes) if sum(sizes) <= _LOOKED_AT else max(1, _LOOKED_AT // len(sizes))
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    parts = [torch.arange(start, start + min(size, most)) for start, size in zip(starts, sizes, strict=True)]
    return torch.cat(parts)


def _by_tensor(draws: Tensor, places: Tensor, like: Named) -> dict[str, Tensor]:
    """Split draws (M, n) at `places` into those of each tensor (M, n_t), by name."""
    ends, found = 0, {}
    for name, tensor in like.items():
        start, ends = ends, ends + tensor.numel()
        found[name] = draws[:, (places >= start) & (places < ends)]
    return found


def _beyond(draws: Tensor, places: Tensor, like: Named) -> str:
    """Return a description of a structure of noise (M, n) that attacks do not use; empty if there is none."""
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
    """Estimate independent noise from draws (M, n) at `places`."""
    drawn = _by_tensor(draws, places, noisy)
    scales = {name: float(t[t != 0].abs().median()) / _MEDIAN for name, t in drawn.items() if t.any()}
    return Noise({name: mask for name, mask in noisy.items() if name in scales}, scales)


def _copied(sent: Tensor, gradient: Tensor, near: Tensor) -> Tensor:
    """Return which values (D,) equal the gradient, or the gradient times the median factor."""
    there = sent.abs() > near
    if not there.any():
        return gradient.abs() <= near
    factor = (sent / gradient)[there].median()
    found = [(sent - one * gradient).abs() <= near * max(1.0, one) for one in (1.0, float(factor))]
    return max(found, key=lambda copied: int(copied.sum()))


def _as_before(gradient: Tensor, masked: Tensor, other: Tensor, of_other: Tensor) -> bool:
    """Return whether the same values (D,) of two gradients are removed, ignoring zeros of the gradients."""
    return bool(((masked == of_other) | (gradient == 0) | (other == 0)).all())


def _smallest(gradient: Tensor, masked: Tensor, of_other: Tensor, like: Named) -> bool:
    """Return whether the smallest values (D,) of each tensor or of all are removed, as many as for another gradient.

    Other choices, or a varying number, may reveal values. Zeros of the gradient count as removed.
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
    """Return whether random values (M, D), or their absolute values, are correlated."""
    draws = draws[: len(draws) // 4 * 4]
    apart = draws[::2] - draws[1::2]  # differences have a symmetric distribution with mean 0
    sizes = apart.abs()
    return any(map(_correlated, (apart, sizes[::2] - sizes[1::2])))


def _correlated(draws: Tensor) -> bool:
    """Return whether the columns of independent draws (M, D), symmetric about 0, are correlated."""
    import torch

    scale = draws.square().mean(0).sqrt()
    values = (draws / scale)[:, scale > 0]
    pairs, count = len(draws) * (len(draws) - 1) / 2, values.shape[1]
    if not pairs:
        return False
    products = torch.triu(values @ values.T / max(count, 1), diagonal=1)
    return count * float(products.square().sum()) / pairs > 1 + _CLEARLY * sqrt(2 / pairs)


def _levelled(draws: Tensor) -> bool:
    """Return whether random values (M, D) repeat too often for a continuous distribution."""
    random = draws[:, (draws != draws[0]).any(0)]
    back = (random.sort(0).values.diff(dim=0) == 0).any(0)
    return bool(back.sum() > _OFTEN * len(back))


def _spread(draws: Tensor, tensor: Tensor) -> bool:
    """Return whether rows or columns of the noise (M, n) on a tensor's first values are correlated.

    For independent values and large p and N, the eigenvalues of the covariance are within (1 -+ sqrt(p / N))^2
    (Marchenko and Pastur 1967). Here p is the number of values and N that of samples.
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
    """Return whether the mean of random values (M, D) over draws differs significantly from 0."""
    means = draws.double().mean(0).square() / (draws.double().var(0) / len(draws)).clamp(min=1e-300)
    return float(means.clamp(max=1e6).mean()) > 1.1 + _CLEARLY * sqrt(2 / len(means))


def _uneven(draws: Tensor) -> bool:
    """Return whether the variance of random values (M, D) differs between values."""
    sizes = draws.double().square().mean(0)
    return len(sizes) >= _SEVERAL and float(sizes.var() / sizes.mean().square()) > _WIDEST


def _of_other_density(draws: Tensor) -> bool:
    """Return whether random values (M, D) of equal variance are not normal and not Laplacian."""
    import torch

    values = draws.double().flatten().sort().values
    values = values[:: max(1, len(values) // _COUNTED)] / values.square().mean().sqrt()
    places = (torch.arange(len(values), device=values.device) + 0.5) / len(values)
    tail = 0.5 * torch.exp(-(2**0.5) * values.abs())
    laws = torch.special.ndtr(values), torch.where(values < 0, tail, 1 - tail)
    return min(float((law - places).abs().max()) for law in laws) > _LIKE + 2 / sqrt(len(values))
