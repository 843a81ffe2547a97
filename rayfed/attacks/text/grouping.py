"""Group a batch's tokens into texts, by the contribution of each token to a gradient.

If weights multiply a vector x of each token, their gradient is the sum of x d^T over all tokens of a batch, where d is
the backpropagated error. If x is the sum of a token part and a position part, every token of the batch is in the span
at every position. The span then reveals which tokens the batch has, but not their positions. The sum does. A direction
orthogonal to the vectors of all other tokens extracts the contribution of one token, and the same works for one
position. The errors of a position are a sum of the errors of the tokens there, and least squares assign them. A token
that occurs once in the batch has weight 1 at its position and 0 elsewhere. The errors of one text are similar, because
attention gives each of its positions a share of the same error. Clustering them yields the texts. Tokens that occur
more often are left to a search.

This method is ours. Source of the clustering: Ward 1963, "Hierarchical Grouping to Optimize an Objective Function".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ONCE = 0.7
"""Minimum share of a token's errors at one position for a token that occurs only there."""
_LIKELY = 0.3
"""Minimum share of a token's errors at a position for a token that may occur there."""
_NO_OTHERS = 1e-2
"""Maximum share of a position's errors that a token leaves, for a token in all texts, such as a first token."""
_NOTHING = 1e-12
"""Squared share of a direction in all vectors, relative to the largest, below which it is rounding."""
_ALONE = 1e-4
"""Share of other vectors in a direction below which it counts as orthogonal to them."""


class Grouped(NamedTuple):
    """Texts of a batch that grouping recovered; most positions may be correct."""

    texts: Tensor
    """Token numbers (count, L) int64."""
    once: Tensor
    """Tokens that occur once in the batch."""
    likely: list[Tensor]
    """Likely tokens for each position, by their contributions."""
    possible: list[Tensor]
    """For each position, all tokens whose vectors lie in the span."""

    def without(self, texts: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return `likely` and `possible` minus the tokens of `texts` that occur once, but never an empty list."""

        def left(options: Tensor, place: int) -> Tensor:
            gone = [text[place] for text in texts if text[place] in self.once]
            kept = options[~torch.isin(options, torch.stack(gone))] if gone else options
            return kept if len(kept) else options

        found = [[left(tokens, at) for at, tokens in enumerate(options)] for options in (self.likely, self.possible)]
        return found[0], found[1]


@torch.no_grad()
def grouped(tokens: Tensor, vectors: Tensor, inside: Tensor, gradient: Tensor, count: int) -> Grouped | None:
    """Return `count` texts of tokens (T,) whose vectors (T, L, width) lie in a gradient's span (width, out), or None.

    `inside` (T, L) marks the positions at which they do. Returns None if vectors at one position are combinations of
    those at others, as without position vectors. Also returns None if fewer than `count` tokens occur once in the
    batch.
    """
    from scipy.cluster.hierarchy import fcluster, linkage  # takes 0.1 s to import

    entering = torch.where(inside[:, :, None], vectors.double(), 0.0)
    values, directions = torch.linalg.eigh(torch.einsum("tli,tlj->ij", entering, entering))
    kept = values > _NOTHING * values[-1]
    white = directions[:, kept] / values[kept].sqrt()
    entering, added = entering @ white, white.T @ gradient.double()
    by_token, by_place = _alone(entering), _alone(entering.transpose(0, 1))
    if not by_place.any(1).all():
        return None
    of_tokens, of_places = (entering @ by_token[:, :, None])[:, :, 0], (entering * by_place).sum(2)
    errors, sums = by_token @ added, by_place @ added
    parts = torch.linalg.lstsq(errors.T.cpu(), sums.T.cpu(), driver="gelsd").solution.to(errors)
    shares = torch.where(inside, parts * of_tokens / of_places, 0.0).nan_to_num(0.0, 0.0, 0.0)
    strongest = shares.argmax(0)
    others = sums - parts.gather(0, strongest[None]).T * errors[strongest]
    alone = others.norm(dim=1) < _NO_OTHERS * sums.norm(dim=1)
    once = shares.amax(1) > _ONCE
    once[strongest[alone]] = False
    if int(once.sum()) < count:
        return None
    unit = torch.nn.functional.normalize(errors[once] * of_tokens[once].sum(1, keepdim=True).sign())
    text = torch.from_numpy(fcluster(linkage(unit.cpu().numpy(), "ward"), count, "maxclust")).to(once.device) - 1
    often = torch.where(alone, strongest, shares.masked_fill(once[:, None], -torch.inf).argmax(0))
    texts = tokens[often].repeat(count, 1)
    share, place = shares[once].max(1)
    for at in share.argsort().tolist():
        texts[text[at], place[at]] = tokens[once][at]
    may = inside & (~once[:, None] | (shares > _LIKELY))
    likely = [tokens[at_place if at_place.any() else column] for at_place, column in zip(may.T, inside.T, strict=True)]
    return Grouped(texts, tokens[once], likely, [tokens[column] for column in inside.T])


def _alone(entering: Tensor) -> Tensor:
    """Return for each group of white vectors (groups, n, r) the direction that no other group has, (groups, r), or 0.

    If there are several directions, it is the one closest to the group's mean.
    """
    _, shares, directions = torch.linalg.svd(entering, full_matrices=False)
    means = entering.mean(1)
    alone = torch.where(shares[:, :, None] > 1 - _ALONE, directions, 0.0)
    return torch.nn.functional.normalize(torch.einsum("gkr,gks,gs->gr", alone, alone, means))
