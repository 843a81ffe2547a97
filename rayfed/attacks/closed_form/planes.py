"""Find planes through the origin that each contain many of a set of points exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_DRAWS = 1024
"""Number of planes through random points per round."""
_STARTS = 256
_STEPS = 20
_ROUNDS = 10
_FLAT = 1e-5
"""Maximum cosine between a point and a normal for a point in the plane, given float32 precision."""
_CELL = 0.9
"""Score of a normal that fits the slopes at one vector exactly; below that of a plane whose points also fit."""
_NEAR = 64
"""Number of vectors closest to such a normal, around which the next round searches."""
_SETS = 8
"""Number of sets of normals per round."""
_MISPLACED = 0.02
"""Maximum share of points on the wrong side due to rounding of slopes close to 0."""


class Sides(NamedTuple):
    """Constraint on planes: each plane contains exactly the points that some vector y maps below 0."""

    map: Tensor
    """(O, b): one row per point."""
    guides: Tensor
    """(G, b): likely vectors y; mixtures of two of them are likely as well."""
    signed: bool
    """Whether the guides' sign is known."""
    slopes: Callable[[Tensor], Tensor] | None
    """Maps vectors (S, b) to K guesses (S, K, O) of the points' products with a normal, up to a factor."""


def planes(points: Tensor, noise: float, sides: Sides | None, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield sets of at most b independent unit normals (b,) of planes that contain many of the points (O, b).

    The search has rounds. The first sets of a round hold the normals with the best scores; later sets are partly
    random. `noise` is the error of a point's entries, in the points' units. Points and normals are float64.
    """
    size = points.norm(dim=1)
    flat = torch.maximum(torch.full_like(size, _FLAT), 10 * noise / len(points) ** 0.5 / size)
    live = flat < 0.1
    rows, flat = points[live] / size[live, None], flat[live]
    if points.shape[1] == 1:
        yield torch.ones_like(points[:1])
        return
    known, scores, near = points[:0], points.new_empty(0, 2), None
    for _ in range(_ROUNDS if len(rows) >= points.shape[1] else 0):
        vectors = None if sides is None else _between(sides, generator)
        likely = None if sides is None or vectors is None else vectors @ sides.map[live].T < 0
        normals = _exact(_candidates(rows, likely, generator), rows, flat)
        below = torch.ones(len(normals), len(points), dtype=torch.bool, device=points.device)
        below[:, live] = (normals @ rows.T).abs() < flat
        score = below.double().mean(1)[:, None].expand(-1, 2)
        if sides is not None and vectors is not None:
            normals, score = _separated(normals, below, points, sides)
            if sides.slopes is not None:
                cells, near = _cells(points, sides, vectors if near is None else _around(near, vectors, generator))
                normals = torch.cat([normals, cells])
                score = torch.cat([score, score.new_tensor([0.0, _CELL]).expand(len(cells), 2)])
        known, scores = _different(torch.cat([known, normals]), torch.cat([scores, score]))
        yield from _sets(known, scores, generator)


def _sets(normals: Tensor, scores: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield sets of independent normals: the best by each score, then partly random ones."""
    for attempt in range(_SETS if len(normals) > normals.shape[1] else 1):
        luck = torch.rand(len(scores), generator=generator).to(scores) if attempt > 1 else 0
        yield normals[_independent(normals, scores[:, min(attempt, 1)] + luck)]


def _around(near: Tensor, vectors: Tensor, generator: torch.Generator) -> Tensor:
    """Return random vectors around `near` (M, b), and the first half of `vectors`.

    The distance from `near` is at most half of that of a random pair of vectors.
    """
    half = len(vectors) // 2
    steps = vectors[:half] - vectors[half : 2 * half]
    size = 0.5 * torch.rand(half, 1, generator=generator).to(steps) ** 2
    return torch.cat([near.repeat(half // len(near) + 1, 1)[:half] + size * steps, vectors[:half]])


def _between(sides: Sides, generator: torch.Generator) -> Tensor:
    """Return vectors between random pairs of guides, (_DRAWS, b)."""
    pairs = torch.randint(len(sides.guides), (2, _DRAWS), generator=generator).to(sides.guides.device)
    share = torch.rand(_DRAWS, 1, generator=generator).to(sides.guides)
    vectors = share * sides.guides[pairs[0]] + (1 - share) * sides.guides[pairs[1]]
    if not sides.signed:
        vectors[::2] *= -1
    return vectors


def _separated(normals: Tensor, below: Tensor, points: Tensor, sides: Sides) -> tuple[Tensor, Tensor]:
    """Return the normals whose points can be separated, with two scores (S, 2).

    The scores are the share of points in the plane, and the fit of the slopes at the separating vector to the points'
    products.
    """
    vectors, misplaced = _separation(sides.map, below)
    right = misplaced <= _MISPLACED
    normals, vectors, share = normals[right], vectors[right], below[right].double().mean(1)
    if sides.slopes is None:
        return normals, share[:, None].expand(-1, 2)
    products, slopes = normals @ points.T, sides.slopes(vectors)
    alike = (slopes @ products[:, :, None])[..., 0].abs() / (products.norm(dim=1)[:, None] * slopes.norm(dim=2))
    return normals, torch.stack([share, alike.nan_to_num(0).amax(1)], 1)


def _cells(points: Tensor, sides: Sides, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normals for which the slopes at a vector equal the points' products, and the next-best vectors.

    `points` have orthonormal columns. All vectors with the same points below 0 have the same slopes, so one of them is
    enough.
    """
    assert sides.slopes is not None
    classes = sides.slopes(vectors[:1]).shape[1]
    vectors = vectors[torch.arange(0, len(vectors), max(1, classes // 2), device=vectors.device)]
    slopes = sides.slopes(vectors)
    normals = slopes @ points
    misses = (slopes - normals @ points.T).norm(dim=2) / slopes.norm(dim=2)
    misses, label = misses.nan_to_num(torch.inf, posinf=torch.inf).min(1)
    normals = normals[torch.arange(len(label)), label][misses <= 10 * _FLAT]
    order = misses.where(misses > 10 * _FLAT, torch.inf).argsort(stable=True)
    return normals / normals.norm(dim=1, keepdim=True), vectors[order[:_NEAR]]


def _candidates(rows: Tensor, likely: Tensor | None, generator: torch.Generator) -> Tensor:
    """Return normals of planes through random points, preferably `likely` ones, and refined versions of some.

    The refinement is iteratively reweighted least squares with weights 1 / distance, which increases the number of
    points in a plane.
    """
    count, size = rows.shape
    order = torch.rand(_DRAWS, count, generator=generator).to(rows)
    weights = torch.ones_like(order)
    if likely is not None:
        order, weights = order - 10 * likely, torch.where(likely, 1.0, 0.02).to(rows)
    picked = rows[order.topk(size - 1, largest=False).indices]
    drawn = _normals(picked.transpose(1, 2) @ picked)
    normals, weights, width = drawn[:_STARTS], weights[:_STARTS], 0.1
    products = (rows[:, :, None] * rows[:, None, :]).flatten(1)
    for _ in range(_STEPS):
        closeness = weights / (normals @ rows.T).abs().clamp(min=width)
        normals = _normals((closeness @ products).view(-1, size, size))
        width = max(0.5 * width, _FLAT / 10)
    return torch.cat([normals, drawn])


def _normals(spans: Tensor) -> Tensor:
    """Return the eigenvector of the smallest eigenvalue of each matrix (S, b, b)."""
    smallest: Tensor = torch.linalg.eigh(spans).eigenvectors[:, :, 0]
    return smallest


def _exact(normals: Tensor, rows: Tensor, flat: Tensor) -> Tensor:
    """Return the distinct planes that contain more points than by chance, each refitted to its points."""
    inside = (normals @ rows.T).abs() < 10 * flat
    inside = torch.unique(inside[inside.sum(1) >= rows.shape[1]], dim=0).to(rows)
    products = (rows[:, :, None] * rows[:, None, :]).flatten(1)
    return _normals((inside @ products).view(-1, rows.shape[1], rows.shape[1]))


def _different(normals: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct normals and their scores; of equal normals, the one with the best first score is kept."""
    order = scores[:, 0].argsort(descending=True, stable=True)
    normals, scores = normals[order], scores[order]
    new = ~((normals @ normals.T).abs() > 1 - 1e-8).tril(-1).any(1)
    return normals[new], scores[new]


def _independent(normals: Tensor, merits: Tensor) -> list[int]:
    """Return the indices of linearly independent normals, best merit first."""
    chosen, basis = [], normals[:0]
    for place in merits.argsort(descending=True, stable=True).tolist():
        rest = normals[place] - (basis @ normals[place]) @ basis
        if rest.norm() > 1e-3:
            chosen.append(place)
            basis = torch.cat([basis, (rest / rest.norm())[None]])
    return chosen


def _separation(map_: Tensor, below: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors (S, b) that map the rows in sets `below` (S, O), and no others, below 0, and the share of errors.

    `map_` is (O, b). The fit is a logistic regression by Newton steps with a small ridge.
    """
    rows = map_ / map_.norm(dim=1, keepdim=True).clamp(min=1e-30)
    signs = torch.where(below, -1.0, 1.0).to(rows)
    fitted = torch.zeros(len(below), rows.shape[1]).to(rows)
    ridge = 1e-6 * len(rows) * torch.eye(rows.shape[1]).to(rows)
    products = (rows[:, :, None] * rows[:, None, :]).flatten(1)
    for _ in range(25):
        miss = torch.sigmoid(-signs * (fitted @ rows.T))
        slope = (miss * signs) @ rows - fitted @ ridge
        curve = ((miss * (1 - miss)) @ products).view(len(below), *ridge.shape) + ridge
        fitted = fitted + torch.linalg.solve(curve, slope)
    return fitted, ((fitted @ rows.T) * signs <= 0).double().mean(1)
