"""Structure of the noise that defences add to an update, and removal of the noise.

An attacker that has the code applies it to zero gradients, which gives samples of the noise, `draws`. Each class has
methods `find`, which returns None if the noise does not have its structure, and `back`, which removes the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

SAME = 1e-3
"""Maximum relative difference of two equal updates, as in 16 bits."""
_SLIGHT = 1e-2
"""Relative size of noise below which it is not removed."""
_PROPORTIONAL = 1e-5
"""Maximum relative difference of two proportional values."""
_REWEIGHTED = 60
_MOST_ROWS = 1024
"""Maximum number of rows of a tensor for `Cancelling`."""
_MOST_VALUES = 2**18
"""Maximum number of noise values per tensor that are sorted."""
_WHOLE = 0.01
"""Maximum distance from a whole number of steps."""
_CLEARLY = 0.2
"""Maximum mean distance from a step, in steps. Random values have 0.25."""
_MOSTLY = 1.5
"""Maximum size of a tensor, relative to its noise, for `Steps.back`."""
_SETS, _LOOKED = 256, 2**25
"""Number of samples in which two must repeat, and maximum number of values in them."""
_MOST_SETS, _TIMES, _DRAWN = 2**13, 8, 2**30
"""Maximum number of different noises, samples per noise (8 give all except 1 in 3,000), maximum number of values."""
_RIGHT, _NEARER = 0.5, 0.9
"""Maximum absolute sum after removal of the right noise, relative to the mean, and relative to the next best noise."""
_MOST_RANK = 8
_TRIES = 200
"""Number of random choices of rows in `LowRank.back`."""

Sent = Callable[[float], "tuple[Tensor, Tensor]"]
"""Function from the size of a random gradient to one tensor of its update, with and without the defences."""


class Structure(Protocol):
    """Structure of the noise on one tensor."""

    def back(self, tensor: Tensor) -> Tensor:
        """Return a tensor of an update without its structured noise."""


class SharedNoise(NamedTuple):
    """Noise in which several values share a random number, up to a factor."""

    number: Tensor
    """Index of the random number of each value, (D,) int64."""
    factor: Tensor
    """Factor of the random number, (D,); 0 for a value that shares its number with no other value."""

    @classmethod
    def find(cls, draws: Tensor, answer: Callable[[Tensor], Tensor]) -> SharedNoise | None:
        """Find the values of an update that share a random number in all noise samples `draws` (M, D).

        `answer` applies the defences to a gradient, to confirm that they only add this noise.
        """
        import torch

        precise = draws.double()
        sizes = precise.norm(dim=0)
        ways = (precise / sizes.clamp(min=torch.finfo(torch.float64).tiny)).T
        ways = ways * ways.gather(1, ways.abs().argmax(1, keepdim=True)).sign()  # negative factors are allowed
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
        """Return values (D,) minus a multiple of each shared random number, chosen to minimise the absolute sum.

        Very small noise is not removed.
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
    """Noise that cancels in linear combinations of a tensor's rows; only these combinations are kept."""

    sums: Tensor
    """Orthonormal basis of the combinations, (n, q)."""

    @classmethod
    def find(cls, draws: Tensor, sent: Sent) -> Cancelling | None:
        """Find the combinations of a tensor's rows that are zero in all noise samples `draws` (M, n, ...).

        One half of the draws gives them; the other half and the update of a gradient confirm them.
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
        """Return the projection of a tensor (n, ...) onto the noise-free combinations of rows."""
        rows = tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None]
        basis = self.sums.to(rows.device)
        return (basis @ (basis.T @ rows.double())).to(tensor).view_as(tensor)


class Steps(NamedTuple):
    """Noise that is a multiple of a step; if steps are wide, the distance from the nearest step is the value."""

    common: Tensor
    """Noise of one draw, of the tensor's shape."""
    step: float

    @classmethod
    def find(cls, draws: Tensor, sent: Sent) -> Steps | None:
        """Find the step of the noise from noise samples `draws` (M, ...), which are rounded as updates are."""
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
        """Return each value's distance from the nearest step; unchanged if distances look random or noise is small."""
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
        """Find the rank of the noise from noise samples `draws` (M, n, ...)."""
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
        """Return a matrix (n, ...) minus the noise of low rank, estimated from rows that contain only noise.

        The matrix is unchanged if there are too few such rows.
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
"""Functions that find a structure of the noise on one tensor, given unrounded draws (M, *shape)."""


def drawn_again(draw: Callable[[int], Tensor], target: Tensor) -> Tensor | None:
    """Return the noise (D,) in `target`, if the defences have so few noise vectors that all can be sampled.

    `draw` returns the noise of a seed. None if fewer than two vectors repeat among the first `_SETS`, or if no vector
    clearly fits best.
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
    """Return whether two tensors are equal up to rounding to 16 bits."""
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
