"""Structure of the noise that defences add to an update, and what is left where that is taken off.

Attackers who have the code see what it makes of zeros, as often as they like: noise alone. `draws` are such answers.
Each form of structure has a `find`, which returns None where there is none of it, and a `back`.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

SAME = 1e-3
"""Relative error up to which two answers are the same, as they are in 16 bits."""
_SLIGHT = 1e-2
"""Size of noise beside that of the values below which it is left on them."""
_PROPORTIONAL = 1e-5
"""Relative difference up to which the answers of two values are multiples of each other."""
_REWEIGHTED = 60
_MOST_ROWS = 1024
"""Most rows of a tensor of which sums are looked for."""
_MOST_VALUES = 2**18
"""Most values of noise on one tensor that are sorted."""
_WHOLE = 0.01
"""Distance from a whole number of steps, at most."""
_CLEARLY = 0.2
"""Mean distance of what lies beside a step, in steps, from which on it may be anything: random values have 0.25."""
_MOSTLY = 1.5
"""Size of a tensor beside that of its noise up to which it is noise for the most part."""
_SETS, _LOOKED = 256, 2**25
"""Draws in which two have to come back, and values in them all."""
_MOST_SETS, _TIMES, _DRAWN = 2**13, 8, 2**30
"""Most different draws; draws for each, after which all have been drawn but for one in 3,000; values in them all."""
_RIGHT, _NEARER = 0.5, 0.9
"""Absolute sum of what the right noise leaves, beside the mean of all, at which none is looked for any more; and beside
that of the next one, at most."""
_MOST_RANK = 8
_TRIES = 200
"""Choices of rows that may be noise alone."""

Sent = Callable[[float], "tuple[Tensor, Tensor]"]
"""Returns of a random gradient of this size what is sent of one tensor, and what that is without the defences."""


class Structure(Protocol):
    """Structure of the noise on one tensor."""

    def back(self, tensor: Tensor) -> Tensor:
        """Return what is left of a tensor."""


class SharedNoise(NamedTuple):
    """Values to which multiples of the same random number are added."""

    number: Tensor
    """(D,) int64, which of the random numbers."""
    factor: Tensor
    """(D,), the usual size of what is added, with its sign; 0 where a number is shared with no other value."""

    @classmethod
    def find(cls, draws: Tensor, answer: Callable[[Tensor], Tensor]) -> SharedNoise | None:
        """Return which values share a random number in all draws (M, D).

        The `answer` to a gradient confirms that nothing else is done to it.
        """
        import torch

        precise = draws.double()
        sizes = precise.norm(dim=0)
        ways = (precise / sizes.clamp(min=torch.finfo(torch.float64).tiny)).T
        ways = ways * ways.gather(1, ways.abs().argmax(1, keepdim=True)).sign()  # opposite noise is the same
        seen = ways @ torch.randn(ways.shape[1], generator=torch.Generator().manual_seed(0)).to(ways)
        order = seen.argsort()
        apart = (ways[order][1:] - ways[order][:-1]).norm(dim=1) > _PROPORTIONAL
        number = torch.zeros_like(order)
        number[order[1:]] = apart.cumsum(0)
        several = (number.bincount()[number] > 1) & (sizes > _PROPORTIONAL * sizes.max())
        if not several.any():
            return None
        usual = sizes / len(draws) ** 0.5
        found = cls(number, usual * (precise * ways.T).sum(0).sign() * several)
        given = torch.randn(len(order), generator=torch.Generator().manual_seed(0)).to(draws) * usual.max().to(draws)
        sent, wanted = (found.back(values)[several] for values in (answer(given), given))
        return found if alike(sent, wanted) else None

    def back(self, values: Tensor) -> Tensor:
        """Return values (D,) less the multiples that leave the smallest absolute sum with each number.

        Where they are next to nothing beside the values, they stay: less would be left without them than with them.
        """
        import torch

        number, factor, precise = self.number.cpu(), self.factor.cpu(), values.double().cpu()
        known = precise.isfinite() & (factor != 0)
        size = precise[known].norm()
        if factor[known].norm() <= _SLIGHT * size:
            return values
        precise, factor = precise.nan_to_num(0, 0, 0), factor * known
        zeros, tiny = precise.new_zeros(int(number.max()) + 1), torch.finfo(torch.float64).tiny
        weights, left = known.double(), precise
        for _ in range(_REWEIGHTED):
            sizes = zeros.scatter_add(0, number, weights * factor * factor)
            found = zeros.scatter_add(0, number, weights * factor * precise) / sizes.clamp(min=tiny)
            left = precise - found[number] * factor
            weights = known / left.abs().clamp(min=max(1e-9 * float(size), tiny))
        return torch.where(known.to(values.device), left.to(values), values)


class Cancelling(NamedTuple):
    """Sums of rows in which the noise cancels; they are all that is left."""

    sums: Tensor
    """(n, q), orthonormal."""

    @classmethod
    def find(cls, draws: Tensor, sent: Sent) -> Cancelling | None:
        """Return the sums of rows to which no draw (M, n, ...) adds anything.

        Half of the draws propose them. The other half confirms them, for a few have such sums by chance, and so does
        the answer to a gradient: what is sent in its place has none of its sums.
        """
        import torch

        if draws.ndim < 2 or draws.shape[1] > _MOST_ROWS:
            return None
        rows = draws.double().flatten(2) if draws.ndim > 2 else draws.double()[..., None]
        half, other = (part.movedim(0, 1).flatten(1) for part in (rows[::2], rows[1::2]))
        sizes, sums = torch.linalg.eigh(half @ half.T)
        sums = sums[:, sizes <= 1e-10 * sizes[-1]]
        if not (half.any() and sums.numel() and (sums.T @ other).norm() <= 1e-5 * other.norm()):
            return None
        made, wanted = (sums.T @ values.double().reshape(len(values), -1) for values in sent(1.0))
        return cls(sums) if alike(made, wanted) else None

    def back(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor (n, ...) in the sums."""
        rows = tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None]
        basis = self.sums.to(rows.device)
        return (basis @ (basis.T @ rows.double())).to(tensor).view_as(tensor)


class Steps(NamedTuple):
    """Noise in whole steps: what lies beside the next one is what it was added to, where steps are wide."""

    common: Tensor
    """Shape of the tensor, noise of one draw."""
    step: float

    @classmethod
    def find(cls, draws: Tensor, sent: Sent) -> Steps | None:
        """Return the step between the noise of draws (M, ...), rounded as they are sent."""
        apart = (draws[1:].double() - draws[0].double()).flatten()[:_MOST_VALUES].unique()
        gaps = apart.diff()
        gaps = gaps[gaps > _PROPORTIONAL * apart.abs().max()]
        if not len(gaps):
            return None
        steps = apart / gaps.min()
        if (steps - steps.round()).abs().max() > _WHOLE:
            return None
        found = cls(draws[0], float(gaps.min()))
        made, given = sent(found.step / 16)
        return found if alike(found.back(made), given) else None

    def back(self, tensor: Tensor) -> Tensor:
        """Return what lies beside the next step; all of it where that may be anything, or noise is not most of it."""
        beside = tensor.double() - self.common.to(tensor.device).double()
        left = beside - (beside / self.step).round() * self.step
        some = left[left.abs() > _PROPORTIONAL * self.step].abs()
        told = len(some) == 0 or bool(some.mean() <= _CLEARLY * self.step)
        mostly = bool(tensor.norm() <= _MOSTLY * self.common.to(tensor.device).norm())
        return left.to(tensor) if told and mostly else tensor


class LowRank(NamedTuple):
    """Noise of low rank on a matrix, estimated from rows whose gradient is zero."""

    rank: int

    @classmethod
    def find(cls, draws: Tensor, sent: Sent) -> LowRank | None:
        """Return the rank of draws (M, n, ...) of noise."""
        import torch

        if draws.ndim < 3 or not draws.any() or draws[0].numel() > _MOST_VALUES:
            return None
        matrices = draws[:4].double().flatten(2)
        rank = int(torch.linalg.matrix_rank(matrices, rtol=_PROPORTIONAL).max())
        if rank > min(_MOST_RANK, *(size // 4 for size in matrices.shape[1:])):
            return None
        made, given = (values.double().flatten(1) for values in sent(1.0))
        return cls(rank) if torch.linalg.matrix_rank(made - given, rtol=_PROPORTIONAL) <= rank else None

    def back(self, tensor: Tensor) -> Tensor:
        """Return a matrix (n, ...) without noise of low rank, by least absolute deviations from rows of noise alone.

        All of it where no more than a few rows are noise alone.
        """
        import torch

        matrix = tensor.double().flatten(1)
        rows = matrix[matrix.norm(dim=1) > 0]
        rows = rows / rows.norm(dim=1, keepdim=True)
        if not rows.isfinite().all() or torch.linalg.matrix_rank(rows, rtol=_PROPORTIONAL) <= self.rank:
            return tensor
        draw = torch.Generator().manual_seed(0)
        chosen = torch.stack([torch.randperm(len(rows), generator=draw)[: self.rank] for _ in range(_TRIES)])
        bases = torch.linalg.qr(rows[chosen].mT).Q  # (T, m, r)
        outside = 1 - (rows @ bases).square().sum(2)
        alone = (outside < _PROPORTIONAL**2).sum(1)
        basis = bases[alone.argmax()]
        if alone.max() < max(3 * self.rank, self.rank + len(rows) // 20):
            return tensor
        left: Tensor = (matrix - least_absolute(basis, matrix.T).T @ basis.T).to(tensor).view_as(tensor)
        return left


BY_TENSOR: tuple[Callable[[Tensor, Sent], Structure | None], ...] = (Cancelling.find, LowRank.find)
"""Finds a structure of the noise on one tensor, from draws (M, *shape), unrounded, and what is sent of gradients."""


def drawn_again(draw: Callable[[int], Tensor], target: Tensor) -> Tensor | None:
    """Return the noise (D,) in `target` where it is one of so few that each can be drawn; None where it is not.

    `draw` returns the noise of a seed. Few they are where two of them come back among `_SETS` draws, or as many as fit.
    """
    import torch

    seen: dict[bytes, float] = {}
    back: set[bytes] = set()
    nearest, closest, looked = target, torch.inf, min(_SETS, _LOOKED // len(target))
    for number in range(1, min(_TIMES * _MOST_SETS, _DRAWN // len(target)) + 1):
        noise = draw(number)
        values = noise.detach().cpu().contiguous().view(torch.uint8)
        mark = blake2b(values.numpy().tobytes(), digest_size=16).digest()
        if mark in seen:
            back.add(mark)
        else:
            seen[mark] = float((target - noise).abs().sum())
            if seen[mark] < closest:
                nearest, closest = noise, seen[mark]
        if number == looked and len(back) < 2:
            return None
        if number >= looked and closest < _RIGHT * sum(seen.values()) / len(seen):
            return nearest
        if number >= looked and number >= _TIMES * len(seen):
            others = [size for size in seen.values() if size > closest]
            return nearest if others and closest < _NEARER * min(others) else None
    return None


def alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors differ by no more than rounding to 16 bits."""
    return bool((one - other).norm() <= SAME * other.norm())


def least_absolute(directions: Tensor, values: Tensor) -> Tensor:
    """Return coefficients (R,) or (R, N) that minimise sum |values - directions @ c|, by iterative reweighting.

    `directions` are (D, R), orthonormal, `values` (D,) or (D, N).
    """
    import torch

    many = values if values.ndim > 1 else values[:, None]
    coefficients, floor = directions.T @ many, 1e-9 * float(values.abs().max())
    for _ in range(_REWEIGHTED):
        weights = 1 / (many - directions @ coefficients).abs().clamp(min=floor)
        normal = directions.T[None] * weights.T[:, None]  # (N, R, D)
        coefficients = torch.linalg.solve(normal @ directions, normal @ many.T[..., None])[..., 0].T
    return coefficients if values.ndim > 1 else coefficients[:, 0]
