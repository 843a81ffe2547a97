"""Grouping of a batch's tokens into texts, by what each token has added to a gradient.

The gradient of weights that multiply a vector x of each token is the sum of x d^T over all tokens of a batch, where d
is the error that comes back. Where x is made of a part for the token and one for its place, every token of a batch lies
at every place in the span of the gradient, which then says what is in the batch and not where. The sum does. What is
orthogonal to the vectors of all others takes out of it what one token has added, or one place. The errors of a place
are a sum of those of the tokens there, and least squares find which: a token that stands in the batch once has 1 at its
place and 0 elsewhere. The errors of one text are alike, as attention gives each of its places a share of the same, and
clusters of them are the texts. Tokens that occur more often are left to a search.

Ours. Source of the clusters: Ward 1963, "Hierarchical Grouping to Optimize an Objective Function".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ONCE = 0.7
"""Share of a token's errors at one place, above which the token is taken to stand there alone."""
_LIKELY = 0.3
"""The same, above which it may."""
_NO_OTHERS = 1e-2
"""Share of a place's errors that a token leaves, below which it stands there in all texts, as a first token does."""
_NOTHING = 1e-12
"""Square of a direction's share of all vectors, over the largest, below which it is rounding."""
_ALONE = 1e-4
"""Share of other vectors in a direction, below which it is orthogonal to them."""


class Grouped(NamedTuple):
    """Texts of a batch that may be right in most places."""

    texts: Tensor
    """Numbers of tokens (count, L) int64."""
    once: Tensor
    """Tokens that stand in the batch once."""
    likely: list[Tensor]
    """For each place tokens that may stand there by what they have added."""
    possible: list[Tensor]
    """For each place all tokens whose vectors lie in the span."""

    def without(self, texts: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return what is likely and possible at each place of other texts than these, where that leaves anything."""

        def left(options: Tensor, place: int) -> Tensor:
            gone = [text[place] for text in texts if text[place] in self.once]
            kept = options[~torch.isin(options, torch.stack(gone))] if gone else options
            return kept if len(kept) else options

        found = [[left(tokens, at) for at, tokens in enumerate(options)] for options in (self.likely, self.possible)]
        return found[0], found[1]


@torch.no_grad()
def grouped(tokens: Tensor, vectors: Tensor, inside: Tensor, gradient: Tensor, count: int) -> Grouped | None:
    """Return `count` texts of tokens (T,) whose vectors (T, L, width) lie in the span of a gradient (width, out).

    `inside` (T, L) says at which places each does. None where vectors at one place are made of those at others, as
    without a part for the place, or where fewer than `count` tokens stand in the batch once.
    """
    from scipy.cluster.hierarchy import fcluster, linkage  # an import of a tenth of a second

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
    """Return of each group of white vectors (groups, n, r) the direction (groups, r) that no other group has; or 0.

    Of several it is the one nearest to the group's mean.
    """
    _, shares, directions = torch.linalg.svd(entering, full_matrices=False)
    means = entering.mean(1)
    alone = torch.where(shares[:, :, None] > 1 - _ALONE, directions, 0.0)
    return torch.nn.functional.normalize(torch.einsum("gkr,gks,gs->gr", alone, alone, means))
