"""DAGER: texts read off the low rank of attention's gradients, exactly.

The gradient of a linear layer's weight is a sum of outer products, one for each token of the batch, so that its rows
lie in the span of the layer's inputs. The inputs of the first attention are known functions of token and place: those
in the span are the batch's. A text of a batch of several is one whose inputs of the second attention, which depend on
all of its tokens, lie in the span there.

Source: Petrov et al. 2024, "DAGER: Exact Gradient Inversion for Large Language Models", sections 3 and 4. Ours: the
gradients of query, key and value are taken together, as the key's alone lack one direction for each text (the rows of
the softmax's gradient sum to zero); under noise, where no rank can be seen, the span is that of as many leading
directions as the batch has tokens, and the nearest token counts; texts are put together by coordinate descent in place
of a search over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.attacks.groups import in_groups
from rayfed.attacks.labels import needs_labels
from rayfed.attacks.text.tokens import is_finite, table_of, texts
from rayfed.models.front import Front
from rayfed.registry import component
from rayfed.samples import Modality
from rayfed.update import Named, Observation

_PARTS = ("query", "key", "value", "q_proj", "k_proj", "v_proj")
_TOKENS_AT_ONCE = 2048
_SWEEPS = 8
_MOST_OPTIONS = 24
"""Most tokens tried at a place: where the span is nearly everything, all tokens are near it."""
_NO_ATTENTION = (
    f"the update has no gradients of attention's linear layers (modules called {', '.join(_PARTS[:3])}, or q_proj, ...)"
)
_STEPS = "an update of several local steps mixes the spans of several weights: observe the gradient, or a single step"
_FULL = (
    "the batch has {tokens} tokens, and what enters the first attention {room} dimensions: from as many tokens on all "
    "vectors lie in their span"
)
_MIXED = "what enters the first attention at a place depends on the tokens at other places"


@component
class Dager:
    """Search for tokens and places whose vectors are nearest to the span of the first attention's gradients.

    Exact for as many tokens as fit: fewer in the whole batch than what enters the attention has dimensions, which
    are its inputs, without one behind a norm.
    """

    takes: ClassVar[tuple[Modality, ...]] = ("tokens",)

    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Distance from the span, over a vector's own norm, up to which a token may stand at a place of a batch of several
    texts; at least as many as there are texts may, the nearest ones. A single text has the nearest token everywhere."""
    starts: Annotated[int, Field(ge=1)] = 32
    """Number of random texts from which those of a batch of several are sought."""

    @needs_labels
    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`)."""
        return in_groups(
            lambda group, drawn: [self._one(o, model, g) for o, g in zip(group, drawn, strict=True)],
            observations,
            generators,
        )

    def _one(self, observation: Observation, model: nn.Module, generator: torch.Generator) -> Reconstruction:
        assert observation.labels is not None
        labels = observation.labels.cpu()
        obstacle, table, blocks = _obstacle(observation, model), table_of(model), _attentions(observation)
        if obstacle is not None or table is None:
            return not_applicable(observation, obstacle or _NO_ATTENTION)
        if not is_finite(observation):
            images = observation.sample.blank(observation.batch_size)
            return Reconstruction(images=images, labels=labels, status="diverged", message="the update is not finite")
        first = Span.of(observation, model, blocks[0])
        if not first.is_by_place(observation.sample.shape[0], table[1].num_embeddings):
            return not_applicable(observation, _MIXED)
        length, vocabulary = observation.sample.shape[0], table[1].num_embeddings
        tokens, room = observation.batch_size * length, first.dimensions(length, vocabulary)
        if tokens >= room:
            return not_applicable(observation, _FULL.format(tokens=tokens, room=room))
        apart = first.of_tokens(table[1].num_embeddings, observation.sample.shape[0])
        if observation.batch_size == 1:
            found = apart.argmin(0)
            return Reconstruction(images=texts(found, observation), labels=labels, loss=float(apart.amin(0).mean()))
        if len(blocks) == 1:
            return not_applicable(observation, "a model with one attention does not tell the texts of a batch apart")
        second = Span.of(observation, model, blocks[1])
        found, loss = self._assembled(apart, second, observation.batch_size, generator)
        return Reconstruction(images=texts(found, observation), labels=labels, loss=loss)

    def _assembled(self, apart: Tensor, second: Span, count: int, generator: torch.Generator) -> tuple[Tensor, float]:
        """Return texts (count, L) that the second span knows best, and their mean distance from it.

        `apart` (V, L) are the tokens' distances from the first span at each place.
        """
        options = [_options(column, count, self.threshold) for column in apart.unbind(1)]
        drawn = [o[torch.randint(len(o), (self.starts,), generator=generator).to(o.device)] for o in options]
        found = descended(torch.stack(drawn, dim=1), options, lambda numbers: second.of_texts(numbers))
        distances = second.of_texts(found)
        order = distances.argsort(stable=True)
        chosen: list[int] = []
        for row in order.tolist():
            if all(not torch.equal(found[row], found[other]) for other in chosen):
                chosen.append(row)
        chosen = [chosen[i % len(chosen)] for i in range(count)]
        return found[chosen], float(distances[chosen].mean())


@dataclass(frozen=True)
class Span:
    """Span of the inputs of an attention, as its gradients have it."""

    inputs: Callable[[Tensor], Tensor]
    """Function from token numbers (n, L) to the attention's inputs (n, L, width)."""
    basis: Tensor
    """Basis (tokens of the batch, width) float64, orthonormal rows."""

    @classmethod
    def of(cls, observation: Observation, model: nn.Module, layers: Sequence[str]) -> Span:
        """Return the span of the layers of one attention."""
        device = next(iter(observation.weights.values())).device
        model = without_tracking(model).to(device)
        front = Front(model, layers[0], before=True)
        state = {**observation.weights, **buffers_for(model, observation)}
        gradient = observation.gradient
        stacked = torch.cat([gradient[f"{layer}.weight"] for layer in layers]).double()
        directions = torch.linalg.svd(stacked, full_matrices=False).Vh
        tokens = observation.batch_size * observation.sample.shape[0]
        return cls(lambda numbers: front(state, numbers.to(device)), directions[:tokens])

    @torch.no_grad()
    def is_by_place(self, length: int, vocabulary: int) -> bool:
        """Return whether the input at a place depends on the token there alone."""
        mixed = torch.arange(length) % vocabulary
        alone = torch.stack([self.inputs(token.expand(1, length))[0, place] for place, token in enumerate(mixed)])
        return torch.allclose(self.inputs(mixed[None])[0], alone, rtol=1e-4, atol=1e-5)

    @torch.no_grad()
    def dimensions(self, length: int, vocabulary: int) -> int:
        """Return the number of dimensions of the space in which all possible inputs lie."""
        shape = ceil(2 * self.basis.shape[1] / length), length
        drawn = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))
        return int(torch.linalg.matrix_rank(self.inputs(drawn).flatten(0, 1).double(), rtol=1e-5))

    @torch.no_grad()
    def of_tokens(self, vocabulary: int, length: int) -> Tensor:
        """Return the distance of every token at every place from the span, over its own norm: (vocabulary, L)."""
        tokens = torch.arange(vocabulary).split(_TOKENS_AT_ONCE)
        return torch.cat([self.distance(self.inputs(some[:, None].expand(-1, length))) for some in tokens])

    @torch.no_grad()
    def of_texts(self, numbers: Tensor) -> Tensor:
        """Return the distance of whole texts (n, L) from the span, the mean over their places: (n,)."""
        return torch.cat([self.distance(self.inputs(some)).mean(1) for some in numbers.split(_TOKENS_AT_ONCE)])

    def distance(self, vectors: Tensor) -> Tensor:
        """Return the distance of vectors (..., width) from the span, (...) between 0 and 1."""
        vectors = vectors.double()
        left = vectors - (vectors @ self.basis.T) @ self.basis
        distances: Tensor = left.norm(dim=-1) / vectors.norm(dim=-1)
        return distances


def descended(found: Tensor, options: Sequence[Tensor], distance: Callable[[Tensor], Tensor]) -> Tensor:
    """Descend texts (n, L) by coordinates: the nearest option at one place after the other, until nothing changes."""
    for _ in range(_SWEEPS):
        before = found.clone()
        for place, tokens in enumerate(options):
            tried = found[:, None, :].repeat(1, len(tokens), 1)
            tried[:, :, place] = tokens
            best = distance(tried.flatten(0, 1)).reshape(len(found), -1).argmin(1)
            found[:, place] = tokens[best]
        if torch.equal(before, found):
            break
    return found


def _options(distances: Tensor, least: int, threshold: float) -> Tensor:
    """Return the tokens that may stand at a place, from their distances (V,)."""
    count = max(least, min(int((distances <= threshold).sum()), _MOST_OPTIONS))
    return distances.topk(min(count, len(distances)), largest=False).indices


def _obstacle(observation: Observation, model: nn.Module) -> str | None:
    if table_of(model) is None or not _attentions(observation):
        return _NO_ATTENTION
    if observation.local.steps > 1:
        return _STEPS
    return None


def _attentions(observation: Observation) -> list[list[str]]:
    """Return the linear layers that read the input of each attention, in the order of the model."""
    found: Named = {n: t for n, t in observation.update.items() if n.endswith(".weight") and t.ndim == 2}
    blocks: dict[str, list[str]] = {}
    for name in found:
        layer = name.removesuffix(".weight")
        parent, _, part = layer.rpartition(".")
        if part in _PARTS:
            blocks.setdefault(parent, []).append(layer)
    return list(blocks.values())
