"""Assemble the texts of a batch by coordinate descent: choose one token at a time to minimise a text's distance.

The distance of a text is given per position. It is the distance of its vectors in later layers, which depend on all its
tokens, from the span of the batch's vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil

import torch
from torch import Tensor

from rayfed.attacks.text.grouping import Grouped

INSIDE = 1e-3
"""Relative distance of a vector from a span below which it counts as inside."""
_SWEEPS = 8
"""Maximum number of passes of a descent over the positions."""
_ALIKE = 4
"""Two texts count as equal if they differ in at most 1 of this many positions, unless both are in the span."""
_FIRST, _LAST = 2, 4
"""Shares, 1 in this many, of the positions to correct: first with the likely tokens, then with all possible tokens."""

Distance = Callable[[Tensor], Tensor]
"""Function from texts (n, L) to distances at each observed position, (n, L or fewer)."""


def put_together(sought: Iterable[Tensor], distance: Distance, count: int) -> tuple[Tensor, float]:
    """Return the texts (count, L) in `sought` with the smallest distances from the span, and their mean distance.

    The search ends early if `count` different texts are in the span.
    """
    found, distances = torch.zeros(0), torch.zeros(0)
    for more in sought:
        found = torch.cat([found.to(more), more])
        distances = torch.cat([distances.to(more.device), distance(more).mean(1)])
        if len(found[distances < INSIDE].unique(dim=0)) >= count:
            break
    chosen: list[int] = []
    for row in distances.argsort(stable=True).tolist():
        alike = 0 if distances[row] < INSIDE else found.shape[1] // _ALIKE
        if all(int((found[row] != found[other]).sum()) > alike for other in chosen):
            chosen.append(row)
    chosen = [chosen[i % len(chosen)] for i in range(count)]
    return found[chosen], float(distances[chosen].mean())


def from_random(
    options: Sequence[Tensor], count: int, starts: int, distance: Distance, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yield texts (count, L) from descents that start at random texts of the possible tokens at each position."""
    drawn = torch.stack([_drawn(tokens, starts, generator) for tokens in options], 1)
    for some in drawn.split(count):
        yield _descended(some, options, distance)


def from_groups(told: Grouped, starts: int, distance: Distance, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield texts (count, L) from descents that start at the grouped texts, texts with the smallest distances first.

    A token that occurs once in the batch is removed from other texts if a text with it is in the span. Texts outside
    the span are started again, with every other position resampled.
    """
    found = told.texts.clone()
    distances = distance(found).mean(1)
    for again in range(ceil(starts / len(found))):
        for row in distances.argsort().tolist():
            others = [text for at, text in enumerate(found) if at != row and distances[at] < INSIDE]
            if distances[row] < INSIDE and not any(torch.equal(found[row], other) for other in others):
                continue
            likely, possible = told.without(others)
            drawn = torch.cat([_drawn(tokens, 1, generator) for tokens in likely])
            anew = torch.tensor([t not in tokens for t, tokens in zip(found[row], possible, strict=True)])
            if again:
                anew |= torch.rand(len(anew), generator=generator) < 0.5
            begun = torch.where(anew.to(drawn.device), drawn, found[row])
            text = _corrected(_corrected(begun, likely, distance, _FIRST), possible, distance, _LAST)
            reached = distance(text[None]).mean()
            if not again or reached < distances[row]:
                found[row], distances[row] = text, reached
        yield found.clone()


def _drawn(tokens: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return tokens[torch.randint(len(tokens), (count,), generator=generator).to(tokens.device)]


def _descended(found: Tensor, options: Sequence[Tensor], distance: Distance) -> Tensor:
    """Minimise the distances of texts (n, L) over one position after the other, until no token changes."""
    for _ in range(_SWEEPS):
        before = found.clone()
        for place, tokens in enumerate(options):
            tried = found[:, None, :].repeat(1, len(tokens), 1)
            tried[:, :, place] = tokens
            best = distance(tried.flatten(0, 1)).mean(1).reshape(len(found), -1).argmin(1)
            found[:, place] = tokens[best]
        if torch.equal(before, found):
            break
    return found


def _corrected(text: Tensor, options: Sequence[Tensor], distance: Distance, share: int) -> Tensor:
    """Minimise the distance of a text (L,) only at the positions furthest from the span, 1 in `share` of all."""
    for _ in range(_SWEEPS):
        before, distances = text, distance(text[None])[0]
        if distances.mean() < INSIDE:
            break
        for place in distances.topk(max(1, len(distances) // share)).indices.tolist():
            tried = text.repeat(len(options[place]), 1)
            tried[:, place] = options[place]
            text = tried[distance(tried).mean(1).argmin()]
        if torch.equal(before, text):
            break
    return text
