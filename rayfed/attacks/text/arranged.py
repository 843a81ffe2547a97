"""Order of a single text's tokens, by the gradient that a model has of them.

Which tokens a text has, the rows of the table tell; where they stand, the whole gradient does, of any model for which
that counts, such as a recurrent one. So an order is sought at which the model's gradient is the observed one, by
descent: a token is exchanged with another, moved, or replaced by one of the others, where that brings the gradient
nearer. Where nothing does any more, it begins again from another order. Ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor, nn

from rayfed import gradients
from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.update import Observation

Changes = Callable[[Tensor, int, int], Iterator[Tensor]]
"""Yields texts that differ from one (L,) at two places."""

_MATCHED = 1e-6
"""Distance of each part of the gradient, squared, over its square, in the mean: up to this it is the same."""
_MOST, _MOST_NUMBERS = 3000, 2**31
"""Gradients that are tried, at most, and numbers in them all."""


def arranged(observation: Observation, model: nn.Module, table: str, tokens: Tensor) -> Tensor:
    """Return tokens (L,) of a single text in the order, and as often, as the gradient has them.

    All that are given occur. `table` names the weight of which each has a row, which is compared by itself: what is
    read early may move its row little. As they are where a model is too large for one look at every pair of places.
    """
    numbers = sum(weight.numel() for weight in observation.weights.values())
    most = min(_MOST, _MOST_NUMBERS // numbers)
    return _Search(observation, model, table, most).found(tokens) if most >= len(tokens) ** 2 else tokens


class _Search:
    """Descents over texts, until one has the observed gradient."""

    def __init__(self, observation: Observation, model: nn.Module, table: str, most: int) -> None:
        assert observation.labels is not None
        left = {name for name, mask in (observation.extra.get("left") or {}).items() if bool(mask.all())}
        moved = {name: tensor for name, tensor in observation.gradient.items() if bool(tensor.any())}
        seen = {name: tensor for name, tensor in moved.items() if name in left} or moved
        self._table, self._rows = table, observation.gradient[table].any(1)
        self._of_tokens = seen.pop(table)[self._rows] if table in seen else None
        self._seen = seen
        self._most, self._tried = most, 0
        self._device = next(iter(observation.weights.values())).device
        self._model = without_tracking(model).to(self._device)
        self._buffers = buffers_for(self._model, observation)
        self._weights, self._labels = observation.weights, observation.labels.to(self._device)

    def found(self, tokens: Tensor) -> Tensor:
        """Return the nearest text of all descents: each orders the tokens, and then sees how often each occurs.

        As they are where labels that nobody could read leave nothing to compare.
        """
        draw = torch.Generator().manual_seed(0)
        if self._labels.isnan().any():
            return tokens
        best, least = tokens, self._distance(tokens)
        start = tokens
        while least > _MATCHED and self._tried < self._most:
            text, distance = self._descended(start, self._distance(start), _reordered)
            if distance > _MATCHED:
                text, distance = self._descended(text, distance, _changed)
            if distance < least:
                best, least = text, distance
            start = tokens[torch.randperm(len(tokens), generator=draw).to(tokens.device)]
        return best

    def _descended(self, text: Tensor, distance: float, changes: Changes) -> tuple[Tensor, float]:
        """Return a text (L,) that no single change brings nearer, or the last one that there was time for."""
        before = float("inf")
        while _MATCHED < distance < before:
            before = distance
            for place, other in product(range(len(text)), repeat=2):
                for changed in changes(text, place, other):
                    if self._tried >= self._most or distance <= _MATCHED:
                        return text, distance
                    if (apart := self._distance(changed)) < distance:
                        text, distance = changed, apart
        return text, distance

    def _distance(self, text: Tensor) -> float:
        self._tried += 1
        own = gradients.gradient(self._model, self._weights, self._buffers, text[None].to(self._device), self._labels)[
            0
        ]
        parts = [((own[n] - t).norm() / t.norm()).square()[None] for n, t in self._seen.items()]
        if self._of_tokens is not None:
            made = own[self._table][self._rows]
            parts.append(((made - self._of_tokens).norm(dim=1) / self._of_tokens.norm(dim=1)).square())
        return float(torch.cat(parts).mean().nan_to_num(torch.inf))


def _reordered(text: Tensor, place: int, other: int) -> Iterator[Tensor]:
    """Yield a text with the tokens at two places exchanged, and with the first moved to the second."""
    if text[place] == text[other]:
        return
    exchanged, rest = text.clone(), torch.cat([text[:place], text[place + 1 :]])
    exchanged[[place, other]] = text[[other, place]]
    yield exchanged
    yield torch.cat([rest[:other], text[place : place + 1], rest[other:]])


def _changed(text: Tensor, place: int, other: int) -> Iterator[Tensor]:
    """Yield the same texts, and one with the second token at the first place, where its own stands elsewhere, too."""
    yield from _reordered(text, place, other)
    if text[place] != text[other] and int((text == text[place]).sum()) > 1:
        replaced = text.clone()
        replaced[place] = text[other]
        yield replaced
