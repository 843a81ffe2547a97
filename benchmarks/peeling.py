"""Features behind one sample's gradient of inverted residual blocks, exactly, from the network's end on.

MobileNetV2 and EfficientNet-Lite end in a 1x1 convolution, a norm, an activation that is cut at 0 and 6, a mean over
positions and a linear layer. The gradient of the linear layer's bias gives the slope of each pooled channel. Before the
mean a channel has this slope at all positions at which it is not cut, and none elsewhere: the gradient of the norm's
shift counts these positions, and that of the convolution is the sum of what enters it there. A channel that is active
at one position alone gives that vector away; the vector tells which other channels are active there, of which it is
taken off, and so on (as erasures are decoded on sparse graphs). What is found has no order: `arranged` finds it, by how
vectors follow one another in images that anybody has. In order the slope is known one layer further ahead, and so

- the inputs of a projection (1x1, no activation) are least squares, for they have more channels than positions;
- the inputs of an expansion (1x1, then cut) are found as those of the last one, by slopes that now differ by position;
- behind a block with a shortcut its input is the difference.

Norms have to be in evaluation mode. It ends where a map has more positions than channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

_ALIKE = 1e-2
"""Relative distance up to which two vectors that channels give are one."""
_NEAR = 2e-4
"""Relative error of a sum in float32 that is taken for equality."""
_CHAINS, _SWAPS, _WARM, _COLD = 64, 12_000, 10.0, 2.0
"""Annealing of `arranged`: how many at once, their proposals, the first temperature and the last."""
_BESIDE, _BELOW = (0, 1), (1, 0)


@dataclass(frozen=True)
class Cut:
    """A 1x1 convolution, a norm in evaluation mode, and an activation that is linear between 0 and `top`."""

    weight: Tensor
    """(C, F) float64."""
    scale: Tensor
    shift: Tensor
    top: float

    @classmethod
    def of(cls, convolution: nn.Module, norm: nn.Module, top: float = 6.0) -> Cut:
        """Return the layer of a convolution and its norm."""
        return cls(_matrix(convolution), *affine(norm), top)

    def before(self, inputs: Tensor) -> Tensor:
        """Return what enters the activation, (C, P), of inputs (F, P)."""
        return self.scale[:, None] * (self.weight @ inputs) + self.shift[:, None]

    def active(self, inputs: Tensor) -> Tensor:
        """Return where the activation is not cut, 0 or 1, (C, P)."""
        entered = self.before(inputs)
        return ((entered > 0) & (entered < self.top)).double()

    def inputs_of(self, totals: Tensor, sums: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs (F, P), NaN where they are not found, and where each channel is active (C, P).

        Args:
            totals: (C,) the slopes of a channel, added up over the positions at which it is active.
            sums: (C, F) the inputs there, times these slopes.
            slopes: (C, P) the slope that a channel has at a position if it is active there.
        """
        inputs = slopes.new_full((sums.shape[1], slopes.shape[1]), torch.nan)
        active = torch.zeros_like(slopes)
        told = slopes.abs() > 1e-3 * slopes.abs().amax(1, keepdim=True)
        found = True
        while found:
            found = False
            for position in inputs[0].isnan().nonzero().flatten().tolist():
                slope = slopes[:, position]
                rows = (told[:, position] & ((totals - slope).abs() < _NEAR * slope.abs())).nonzero().flatten()
                if len(rows) < 2:
                    continue
                given = sums[rows] / slope[rows, None]
                there = self.active(given.T).T
                alike = torch.cdist(given, given) < _ALIKE * given.norm(dim=1, keepdim=True)
                alike &= (there[torch.arange(len(rows)), rows] > 0)[None]
                best = int(alike.sum(1).argmax())
                if alike[best].sum() < 2:
                    continue
                exact = int((slope[rows].abs() * alike[best]).argmax())
                inputs[:, position], active[:, position] = given[exact], there[exact]
                off = active[:, position] * slope
                totals, sums, found = totals - off, sums - off[:, None] * given[exact], True
        return inputs, self._settled(active, totals, slopes)

    def _settled(self, active: Tensor, rest: Tensor, slopes: Tensor) -> Tensor:
        """Turn round what lies so near to 0 or `top` that rounding decided, where one channel's rest says so."""
        moved = (1 - 2 * active) * slopes
        near = (rest[:, None] - moved).abs() < 1e-2 * moved.abs()
        near &= (rest.abs() > 10 * _NEAR * slopes.abs().amax(1))[:, None]
        return torch.where(near & (near.sum(1, keepdim=True) == 1), 1 - active, active)


def affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return scale and shift, (C,) float64, of a batch norm in evaluation mode."""
    there: Any = norm
    scale = there.weight.detach().double() / (there.running_var.double() + there.eps).sqrt()
    return scale, there.bias.detach().double() - there.running_mean.double() * scale


def _matrix(convolution: nn.Module) -> Tensor:
    weight: Tensor = convolution.weight  # type: ignore[assignment]
    return weight.detach().double().flatten(1)


def unordered(last: Cut, pooled: Tensor, shift: Tensor, weight: Tensor, positions: int) -> Tensor:
    """Return the inputs of the last convolution, (F, P), in no order; NaN where they are not found.

    Args:
        last: The convolution before the mean.
        pooled: (C,) slope of each pooled channel.
        shift: (C,) the gradient of the norm's shift.
        weight: (C, F) that of the convolution.
        positions: How many positions the mean is over.
    """
    slope = pooled / positions
    counts, sums = (shift / slope).round(), weight / (slope * last.scale)[:, None]
    found: list[Tensor] = []
    while True:
        rows = (counts == 1).nonzero().flatten()
        active = last.active(sums[rows].T).T
        fits = (active[torch.arange(len(rows)), rows] > 0) & (counts >= active).all(1)
        if not fits.any():
            break
        first = int(fits.nonzero()[0])
        one = sums[rows[first]].clone()
        found.append(one)
        counts, sums = counts - active[first], sums - active[first][:, None] * one
    missing = [torch.full_like(sums[0], torch.nan)] * (positions - len(found))
    return torch.stack((found + missing)[:positions], 1)


def arranged(items: Tensor, examples: Tensor) -> Tensor:
    """Return the items (F, P) in the order of a square map, by what neighbours are in examples (N, F, H, H).

    Of a vector less the mean of its map two things are normal distributions: what stands at a position, and what stands
    beside and below a vector given it. The order with the largest likelihood is sought by annealing, from the best one
    without neighbours.
    """
    side, n = examples.shape[-1], items.shape[1]
    deviation = examples.double().std((0, 2, 3))
    maps = examples.double().permute(0, 2, 3, 1) / deviation
    maps = maps - maps.mean((1, 2), keepdim=True)
    vectors = (items.T / deviation) - (items.T / deviation).mean(0)

    means = maps.mean(0).flatten(0, 1)
    spread = _whitening((maps - maps.mean(0)).flatten(0, 2))
    place = -((vectors[:, None] - means) @ spread).square().sum(2) / 2
    alone = (vectors @ spread).square().sum(1) / 2
    follows = {}
    for down, right in (_BESIDE, _BELOW):
        one = maps[:, : side - down, : side - right].flatten(0, 2)
        other = maps[:, down:, right:].flatten(0, 2)
        gram = one.T @ one
        told = torch.linalg.solve(gram + 1e-2 * len(one) * torch.eye(len(gram), dtype=gram.dtype), one.T @ other)
        left = _whitening(other - one @ told)
        follows[down, right] = ((vectors[None] - (vectors @ told)[:, None]) @ left).square().sum(2) / 2 - alone
    order = _annealed(place.numpy(), follows[_BESIDE].numpy(), follows[_BELOW].numpy(), side, n)
    return items[:, torch.from_numpy(order)]


def _whitening(rows: Tensor) -> Tensor:
    """Return W with W W^T the inverse of the rows' second moment plus a twentieth of its mean variance."""
    moment = rows.T @ rows / len(rows)
    moment += 0.05 * moment.diagonal().mean() * torch.eye(len(moment), dtype=moment.dtype)
    return torch.linalg.cholesky(torch.linalg.inv(moment))


def _annealed(
    place: NDArray[np.float64], beside: NDArray[np.float64], below: NDArray[np.float64], side: int, n: int
) -> NDArray[np.int64]:
    """Return which item stands at each position, (P,): least cost of neighbours less the likelihoods of places."""
    draw, chains, wide = np.random.default_rng(0), np.arange(_CHAINS), side + 2
    cells = np.array([(y + 1) * wide + x + 1 for y in range(side) for x in range(side)])
    right, down = np.zeros((n + 1, n + 1)), np.zeros((n + 1, n + 1))  # the last is no item: the frame around the map
    right[:n, :n], down[:n, :n] = beside, below
    here = np.zeros((n + 1, wide * wide))
    here[:n, cells] = place
    board = np.full((_CHAINS, wide * wide), n)
    items, at = linear_sum_assignment(-place)
    board[:, cells[at]] = items

    def cost(cell: NDArray[np.int64], item: NDArray[np.int64]) -> NDArray[np.float64]:
        across = right[board[chains, cell - 1], item] + right[item, board[chains, cell + 1]]
        along = down[board[chains, cell - wide], item] + down[item, board[chains, cell + wide]]
        result: NDArray[np.float64] = across + along - here[item, cell]
        return result

    for swap in range(_SWAPS):
        temperature = _WARM * (_COLD / _WARM) ** (swap / _SWAPS)
        one, other = cells[draw.integers(n, size=_CHAINS)], cells[draw.integers(n, size=_CHAINS)]
        a, b = board[chains, one].copy(), board[chains, other].copy()
        first, second = np.where(one < other, a, b), np.where(one < other, b, a)
        apart = np.abs(one - other)
        twice, table = (apart == 1) | (apart == wide), np.where((apart == 1)[:, None, None], right, down)
        before = cost(one, a) + cost(other, b) - twice * table[chains, first, second]
        board[chains, one], board[chains, other] = b, a
        after = cost(one, b) + cost(other, a) - twice * table[chains, second, first]
        worse = after - before
        taken = draw.random(_CHAINS) < np.exp(-np.clip(worse, 0, 50 * temperature) / temperature)
        board[chains, one], board[chains, other] = np.where(taken, b, a), np.where(taken, a, b)

    def total(order: NDArray[np.int64]) -> float:
        grid = order.reshape(side, side)
        across, along = beside[grid[:, :-1], grid[:, 1:]].sum(), below[grid[:-1], grid[1:]].sum()
        return float(across + along - place[order, np.arange(n)].sum())

    return min((row[cells] for row in board), key=total)


@dataclass(frozen=True)
class Block:
    """An inverted residual block of timm by its name in the model: expansion, depthwise convolution, projection."""

    name: str
    module: Any

    @property
    def shortcut(self) -> bool:
        """Whether the block's input is added to its output."""
        return bool(self.module.has_skip)


def blocks(model: nn.Module, side: int) -> Iterator[Block]:
    """Yield the blocks whose output has `side` positions a side, from the last one on: to a stride, and with it."""
    stages: Any = model.blocks
    for stage in reversed(range(len(stages))):
        for number in reversed(range(len(stages[stage]))):
            block = Block(f"blocks.{stage}.{number}.", stages[stage][number])
            yield block
            if block.module.conv_dw.stride[0] > 1:
                return


def peeled(
    model: nn.Module, gradient: Mapping[str, Tensor], features: Tensor, slope: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of a convolution and what enters it, (C, H, W) float64, block after block from the last one on.

    It ends before a block of which a gradient is not there, and where an answer does not give the gradient again.

    Args:
        model: A network of timm in evaluation mode.
        gradient: Of one sample, by name.
        features: (F, H, H) what enters the last convolution.
        slope: (F, H, H) of the loss in it.
    """
    side = features.shape[-1]
    features, slope = features.flatten(1), slope.flatten(1)
    for block in blocks(model, side):
        part = block.module
        if f"{block.name}conv_pwl.weight" not in gradient:
            return
        (spread, _), projection = affine(part.bn3), _matrix(part.conv_pwl)
        leaving = spread[:, None] * slope
        seen = gradient[f"{block.name}conv_pwl.weight"].flatten(1).double()
        narrow = torch.linalg.lstsq(leaving, seen, driver="gelsd").solution.T.contiguous()
        if not _fits(leaving @ narrow.T, seen):
            return
        yield f"{block.name}conv_pwl", narrow.clamp(0, 6).reshape(len(narrow), side, side)
        if part.conv_dw.stride[0] > 1 or f"{block.name}conv_pw.weight" not in gradient:
            return
        expansion = Cut.of(part.conv_pw, part.bn1)
        totals = gradient[f"{block.name}bn1.bias"].double()
        sums = gradient[f"{block.name}conv_pw.weight"].flatten(1).double() / expansion.scale[:, None]
        active = ((narrow > 1e-3) & (narrow < 6 - 1e-3)).double()
        for _ in range(2):  # at what it found the activations say themselves where they are cut
            slopes = _through(part, active * (projection.T @ leaving), side)
            if block.shortcut:
                scale, shift = affine(part.bn3)
                found = features - (scale[:, None] * (projection @ narrow) + shift[:, None])
                wide = expansion.active(found)
            else:
                found, wide = expansion.inputs_of(totals, sums, slopes)
            if found.isnan().any():
                return
            entered = expansion.before(found).clamp(0, 6)
            before = _depthwise(part, entered, side)
            active, narrow = ((before > 0) & (before < 6)).double(), before.clamp(0, 6)
        slopes = _through(part, active * (projection.T @ leaving), side)
        wide = expansion._settled(wide, totals - (wide * slopes).sum(1), slopes)
        if not _fits((wide * slopes) @ found.T, sums):
            return
        yield f"{block.name}conv_pw", found.reshape(len(found), side, side)
        back = expansion.weight.T @ (expansion.scale[:, None] * wide * slopes)
        features, slope = found, back + (slope if block.shortcut else 0)


def _fits(found: Tensor, seen: Tensor) -> bool:
    return bool((found - seen).norm() < 1e-3 * seen.norm())


def _depthwise(part: Any, entered: Tensor, side: int) -> Tensor:
    """Return what enters the second activation, (C, P), of what left the first."""
    scale, shift = affine(part.bn2)
    kernel = part.conv_dw.weight.detach().double()
    padded = F.conv2d(entered.reshape(1, -1, side, side), kernel, padding=kernel.shape[-1] // 2, groups=len(kernel))
    return scale[:, None] * padded.flatten(2)[0] + shift[:, None]


def _through(part: Any, slope: Tensor, side: int) -> Tensor:
    """Return the slope in what leaves the first activation, (C, P), of that in what enters the second."""
    kernel = part.conv_dw.weight.detach().double()
    leaving = (affine(part.bn2)[0][:, None] * slope).reshape(1, -1, side, side)
    return F.conv_transpose2d(leaving, kernel, padding=kernel.shape[-1] // 2, groups=len(kernel)).flatten(2)[0]
