"""Recover the order of a single text's tokens by matching the model's gradient.

The rows of the embedding table reveal which tokens a text has. The whole gradient reveals their positions in models
that depend on order, such as recurrent ones. The search descends to an order whose gradient equals the observed one. It
exchanges two tokens, moves one, or replaces one by another if that reduces the distance. If no change helps, it starts
again from another order. This attack is ours.
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
"""Function that yields variants of a text (L,), changed at two positions."""

_MATCHED = 1e-6
"""Maximum mean, over the parts of the gradient, of the squared relative distance for a match."""
_MOST, _MOST_NUMBERS = 3000, 2**31
"""Maximum number of gradients to compute, and of numbers in all of them."""


def arranged(observation: Observation, model: nn.Module, table: str, tokens: Tensor) -> Tensor:
    """Return a single text (L,) of the given tokens, in the order and with the counts that match the gradient best.

    All given tokens occur. The rows of the weight `table` are compared separately, because early tokens may hardly move
    the other gradients. The tokens are returned unchanged if the model is too large to try every pair of positions
    once.
    """
    numbers = sum(weight.numel() for weight in observation.weights.values())
    most = min(_MOST, _MOST_NUMBERS // numbers)
    return _Search(observation, model, table, most).found(tokens) if most >= len(tokens) ** 2 else tokens


class _Search:
    """Descents over texts that end when one has the observed gradient."""

    def __init__(self, observation: Observation, model: nn.Module, table: str, most: int) -> None:
        assert observation.labels is not None
        declared = observation.extra.get("observation_model")
        masks = {} if declared is None else declared.noise_free(observation, model)
        left = {name for name, mask in masks.items() if bool(mask.all())}
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
        """Return the best text of all descents. Each descent orders the tokens and then adjusts the counts.

        The tokens are returned unchanged if the labels are unknown, because gradients cannot be compared without them.
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
        """Return a text (L,) that no single change improves, or the last text when the budget is spent."""
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
    """Yield a text with the tokens at two positions exchanged, and with the first one moved to the second position."""
    if text[place] == text[other]:
        return
    exchanged, rest = text.clone(), torch.cat([text[:place], text[place + 1 :]])
    exchanged[[place, other]] = text[[other, place]]
    yield exchanged
    yield torch.cat([rest[:other], text[place : place + 1], rest[other:]])


def _changed(text: Tensor, place: int, other: int) -> Iterator[Tensor]:
    """Yield these texts, and one with the second token copied to the first position if that loses no token."""
    yield from _reordered(text, place, other)
    if text[place] != text[other] and int((text == text[place]).sum()) > 1:
        replaced = text.clone()
        replaced[place] = text[other]
        yield replaced
