"""Find a text whose token vectors span a gradient with fewer rows than tokens, by greedy joint sparse recovery.

The gradient of a matrix with r outputs, such as an adapter's A, has r rows. Each is a sum of the vectors of all tokens.
With n > r tokens, no vector lies in the span of the rows, but the vectors of the text together span the rows. For
vectors in general position in `width` dimensions, no other n vectors do if n < (width + r) / 2. For random sums, n <
width suffices. Each greedy step selects the token whose part outside the selected vectors is closest to the span of the
remaining parts of the rows. The span counts as a space, however small the remaining parts are. After n - r correct
tokens, rows and tokens span all vectors, and the other tokens lie in this span. Each position is then estimated again
from all others, which corrects wrong tokens. One wrong token can mask tokens with small contributions, because this
test only checks a span. A text that does not explain the rows is therefore changed position by position, to reduce the
unexplained part of the rows.

Source: Davies and Eldar 2012, "Rank Awareness in Joint Sparse Recovery", rank-aware order recursive matching pursuit
(RA-ORMP), and the bound on n. Ours: one vector for each position, and the final corrections.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_INSIDE = 1e-3
"""Squared relative distance from the span below which a vector counts as inside."""
_NOTHING = 1e-3
"""Squared relative size of a vector's part outside the span of others below which rounding dominates."""
_COARSE, _FINE = 1e-2, 1e-4
"""Norm of a unit row's part outside the span of others below which it counts as zero. It is coarse at first, because
wrong tokens amplify rounding, and fine later, because a token may contribute as little."""
_EXPLAINED = 1e-3
"""Norm of all rows' parts outside the span of a text below which the text explains them."""
_SWEEPS = 4


class Pursued(NamedTuple):
    """Text that the greedy search (`pursued`) found."""

    tokens: Tensor
    """(L,) int64."""
    distance: float
    """Mean relative distance of each token's vector from the span of the rows and the other tokens' vectors."""
    complete: bool
    """Whether the rows lie in the span of the text's vectors."""


@torch.no_grad()
def pursued(rows: Tensor, vectors: Tensor) -> Pursued:
    """Return the text whose token vectors span rows (r, width). `vectors` (L, V, width) holds all tokens' vectors."""
    norms = torch.linalg.vector_norm(vectors, dim=-1).square()
    left = rows = _spanning(rows.double(), 0.0)
    outside = norms.clone()
    taken, spanned = dict[int, int](), rows[:0]
    while len(taken) < len(vectors) and len(left):
        inside = (vectors @ left.T.to(vectors)).square().sum(-1)
        shares = torch.where(outside > _NOTHING * norms, inside / outside, 0.0)
        shares[list(taken)] = -1.0
        place, token = divmod(int(shares.argmax()), vectors.shape[1])
        if shares[place, token] > 1 - _INSIDE:
            break
        taken[place] = token
        direction = _without(vectors[place, token].double()[None], spanned)
        direction = direction / direction.norm()
        spanned = torch.cat([spanned, direction])
        outside -= (vectors @ direction.T.to(vectors)).square().sum(-1)
        left = _spanning(_without(left, direction), _COARSE)
    basis = torch.cat([spanned, left])
    tokens = torch.stack([_distances(own, sizes, basis).argmin() for own, sizes in zip(vectors, norms, strict=True)])
    for place, token in taken.items():
        tokens[place] = token
    distances = norms.new_zeros(len(tokens))
    for least in (_COARSE, _FINE):
        for _ in range(_SWEEPS):
            before = tokens
            tokens, distances = _read(rows, vectors, norms, tokens, least)
            if torch.equal(before, tokens):
                break
    explained, fitted = _explained(rows, vectors, tokens), tokens
    for _ in range(0 if explained else _SWEEPS):
        fitted = _fitted(rows, vectors, norms, fitted)
        if explained := _explained(rows, vectors, fitted):
            tokens, distances = _read(rows, vectors, norms, fitted, _FINE)
            break
    return Pursued(tokens, float(distances.sqrt().mean()), explained)


def _fitted(rows: Tensor, vectors: Tensor, norms: Tensor, tokens: Tensor) -> Tensor:
    """Return the text (L,) refined position by position with the token that leaves the smallest residual."""
    own, found = vectors[torch.arange(len(tokens)), tokens].double(), tokens.clone()
    for place in range(len(tokens)):
        others = _orthonormal(torch.cat([own[:place], own[place + 1 :]]))
        outside = norms[place] - (vectors[place] @ others.T.to(vectors)).square().sum(-1)
        inside = (vectors[place] @ _without(rows, others).T.to(vectors)).square().sum(-1)
        found[place] = torch.where(outside > _NOTHING * norms[place], inside / outside, 0.0).argmax()
        own[place] = vectors[place, found[place]].double()
    return found


def _explained(rows: Tensor, vectors: Tensor, tokens: Tensor) -> bool:
    """Return whether rows lie in the span of a text's vectors."""
    own = _orthonormal(vectors[torch.arange(len(tokens)), tokens].double())
    return bool(torch.linalg.matrix_norm(_without(rows, own), 2) < _EXPLAINED)


def _read(rows: Tensor, vectors: Tensor, norms: Tensor, tokens: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Return at each position the token (L,) closest to the span of the rows and the text's other vectors.

    Also returns squared relative distances (L,).
    """
    own = vectors[torch.arange(len(tokens)), tokens].double()
    found, distances = tokens.clone(), norms.new_zeros(len(tokens))
    for place in range(len(tokens)):
        others = _orthonormal(torch.cat([own[:place], own[place + 1 :]]))
        basis = torch.cat([others, _spanning(_without(rows, others), least)])
        apart = _distances(vectors[place], norms[place], basis)
        found[place], distances[place] = apart.argmin(), apart.min()
    return found, distances


def _orthonormal(vectors: Tensor) -> Tensor:
    """Return an orthonormal basis (n, width) of the span of independent vectors (n, width)."""
    basis: Tensor = torch.linalg.qr(vectors.T).Q.T
    return basis


def _distances(vectors: Tensor, norms: Tensor, basis: Tensor) -> Tensor:
    """Return the squared relative distances (V,) of vectors from the span of `basis`."""
    apart: Tensor = (1 - (vectors @ basis.T.to(vectors)).square().sum(-1) / norms).clamp_min(0)
    return apart


def _without(vectors: Tensor, basis: Tensor) -> Tensor:
    for _ in range(2):  # repeated to remove rounding errors
        vectors = vectors - (vectors @ basis.T) @ basis
    return vectors


def _spanning(rows: Tensor, least: float) -> Tensor:
    """Return an orthonormal basis (rank, width) of the rows (n, width), without singular values up to `least`."""
    _, sizes, basis = torch.linalg.svd(rows, full_matrices=False)
    kept: Tensor = basis[sizes > least]
    return kept
