"""Texts of a batch put together by coordinate descent: one token after the other, each where it brings a text nearest.

How near a text is, a function says of each of its places: the distance of its vectors further on in a model, which
depend on all of its tokens, from the span of the batch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil

import torch
from torch import Tensor

from rayfed.attacks.text.grouping import Grouped

INSIDE = 1e-3
"""Distance of a vector from a span, over its own norm, below which it is in it."""
_SWEEPS = 8
"""Most times that a descent goes through the places."""
_ALIKE = 4
"""Texts that differ in less than one place in so many count as one, unless the second is in the span."""
_FIRST, _LAST = 2, 4
"""The furthest of so many places are tried with all tokens that are likely there, and then that are possible."""

Distance = Callable[[Tensor], Tensor]
"""Function from texts (n, L) to their distance at each place that is seen, (n, L or fewer)."""


def put_together(sought: Iterable[Tensor], distance: Distance, count: int) -> tuple[Tensor, float]:
    """Return the nearest texts (count, L) of those that are found one after the other, and their mean distance.

    The search ends early where as many are in the span.
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
    """Yield texts (count, L) that descents from random ones find, of tokens that may stand at each place."""
    drawn = torch.stack([_drawn(tokens, starts, generator) for tokens in options], 1)
    for some in drawn.split(count):
        yield _descended(some, options, distance)


def from_groups(told: Grouped, starts: int, distance: Distance, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield texts (count, L) that descents from those that were told apart find, the nearest first.

    A token that stands in the batch once is in no other text than one that is in the span. Texts that are not in the
    span are begun again, with every other place drawn anew.
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
    """Descend texts (n, L) by coordinates: the nearest option at one place after the other, until nothing changes."""
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
    """Descend a text (L,) at the places that are furthest from the span alone, one in `share` of all."""
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
