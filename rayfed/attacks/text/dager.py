"""DAGER: recover texts exactly from the low rank of gradients.

The gradient of a weight that multiplies a vector of each token is a sum of outer products, one for each token of the
batch. It therefore lies in the span of these vectors (`products`). The input of the first attention is usually a known
function of token and position. The vectors in the span are then those of the batch. In a batch of several texts, the
vectors of later layers depend on all tokens of a text. They lie in the span there only for texts of the batch. If the
first vectors do not depend on the position, the later layers also reveal the order. They reveal whole texts if a layer
receives one vector per text, such as the concatenated vectors of all positions.

A low-rank adapter's product B A x (LoRA) has two gradients. The gradient of B (out, r) lies in the span of A x, which
has r numbers per token. With fewer tokens than r, the same test applies there, jointly for adapters with the same
inputs. The gradient of A (r, width) is B^T times that of the layer. It is zero at the first step, when B is zero, and
later r sums of the vectors x. If there are fewer sums than tokens, `pursuit` recovers a single text.

Source: Petrov et al. 2024, "DAGER: Exact Gradient Inversion for Large Language Models", sections 3 and 4. Ours:

- Weights are identified by the vectors that they multiply, whatever their names.
- Of several layers, the attack uses the one whose gradient has the highest rank, and then whose vectors have most
  dimensions.
- Gradients of all weights that multiply the same vectors (query, key and value) are combined, because the key's
  gradient lacks one direction per text (the rows of the softmax's gradient sum to zero).
- With noise, the rank is unknown. The span then has as many leading directions as the batch has tokens, and the token
  at the smallest distance is used.
- Coordinate descent assembles texts instead of an exhaustive search, starting from the texts of `grouping`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.groups import in_groups
from rayfed.attacks.inference.labels import needs_labels
from rayfed.attacks.text.descent import from_groups, from_random, put_together
from rayfed.attacks.text.grouping import Grouped, grouped
from rayfed.attacks.text.last_tokens import is_causal, with_last_tokens
from rayfed.attacks.text.prefixes import grown, looks_back_only
from rayfed.attacks.text.products import Entrance, entrances
from rayfed.attacks.text.pursuit import pursued
from rayfed.attacks.text.tokens import gradient_of_noise, is_finite, table_of, texts, tokens_in
from rayfed.models.prompt import NAME as PROMPT
from rayfed.registry import component
from rayfed.samples import Modality
from rayfed.update import Observation

_TOKENS_AT_ONCE = 2048
_MOST_OPTIONS = 24
"""Maximum number of tokens to try at a position. If the span is almost the whole space, all tokens are near it."""
_FURTHER = 6
"""Maximum number of inputs to use whose vectors depend on several tokens: those of about two blocks."""
_NO_PRODUCT = "the update has no gradient of weights that multiply each token's vector, which the attack needs"
_PROMPTED = "the model has a soft prompt, which moves the text's tokens to positions that this attack does not support"
_STEPS = (
    "the update sums several local steps, but the attack needs the gradient of one step; observe the gradient, or "
    "train with one local step"
)
_FULL = (
    "the batch has {tokens} tokens, but the attack needs fewer tokens than the first layer's inputs have dimensions "
    "({room}); use a smaller batch or shorter texts"
)
_UNMOVED = (
    "the gradient of {name} is zero, as for a low-rank adapter's A while B is zero, and B's gradient identifies fewer "
    "than {room} tokens, but the batch has {tokens}; attack a later step, or an adapter of larger rank"
)
_FEW_SUMS = "the gradient of {name} has rank {rank} for {tokens} tokens (a low-rank adapter's rank is the limit): {why}"
_OF_SEVERAL = "with a rank below the number of tokens, the attack can recover a single text, but not a batch"
_NOT_UNIQUE = "several different texts fit the gradient"
_TOO_LARGE = "the vectors of all tokens at all positions ({numbers:.1e} values) do not fit in memory"
_UNFINISHED = (
    "the search found no text that explains the gradient; the result has the best tokens found, another attack may "
    "recover more"
)
_APART = (
    "the search found no texts whose vectors lie in the span of later layers; the result has the best tokens found, "
    "another seed may recover more"
)
_REPEATED = (
    "the search found fewer different texts than the batch has; copies replace the missing texts, another seed may "
    "recover them"
)
_MOST_NUMBERS = 1 << 30
"""Maximum number of values in all tokens' vectors at all positions for a pursuit: 4 GB."""
_NO_ORDER = "no observed gradient reveals which tokens belong to one text, or the order of the tokens"


@component
class Dager:
    """Recover texts by searching for tokens and positions whose vectors lie in the span of the weight gradients.

    Exact if the batch has fewer different vectors than the inputs of the first attention have dimensions (one less
    after a norm). If no weights multiply a vector of each token, a layer on the concatenated vectors of all positions
    reveals whole texts. At the first step, low-rank adapters reveal as many tokens as their rank allows. At later
    steps, a greedy search recovers a single longer text.
    """

    takes: ClassVar[tuple[Modality, ...]] = ("tokens",)
    place_labels: ClassVar[str] = "unneeded"

    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Maximum distance of a token's vector from the span, relative to its norm, to consider the token in a batch of
    several texts. At least as many tokens per position are considered as there are texts. A single text takes the
    nearest token at each position."""
    starts: Annotated[int, Field(ge=1)] = 32
    """Number of starts of the search for a batch of several texts. Starts are texts from grouping tokens by their
    gradient contributions, then with half of the tokens resampled, or random texts if grouping fails."""

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
        if observation.local.steps > 1:
            return not_applicable(observation, _STEPS)
        if hasattr(model, PROMPT):
            return not_applicable(observation, _PROMPTED)
        if not is_finite(observation):
            images, labels = observation.sample.blank(observation.batch_size), observation.labels.cpu()
            return Reconstruction(images=images, labels=labels, status="failed", message="the update is not finite")
        at_places, further = _sorted(_untied(entrances(observation, model), model), observation)
        moved = _moved(observation, model)
        spans = [Span.of(observation, entrance) for entrance in at_places if not moved.isdisjoint(entrance.names)]
        first = _roomiest(_usable(spans))
        if not first:
            return self._whole_texts(observation, model, _why_full(observation, at_places, spans), generator)
        apart = _together([span.of_tokens(observation.sample.largest + 1) for span in first])
        few = first[0].sums < first[0].room and first[0].rank < observation.batch_size * first[0].length
        if few and int((apart <= self.threshold).sum()) < first[0].rank:
            return _by_pursuit(observation, first[0])
        anywhere = torch.allclose(apart, apart[:, :1].expand_as(apart), rtol=1e-3, atol=1e-6)
        if observation.batch_size == 1 and not anywhere:
            return self._nearest_tokens(observation, model, apart)
        behind = _behind([Span.of(observation, entrance) for entrance in further], first[0].rank)
        if not behind:
            return not_applicable(observation, _NO_ORDER)
        least = first[0].rank if anywhere else observation.batch_size
        options = [_options(column, least, self.threshold) for column in apart.unbind(1)]
        return self._ordered_tokens(observation, model, _Tokens(apart, first[0], behind, options), generator)

    def _whole_texts(
        self, observation: Observation, model: nn.Module, why_full: str, generator: torch.Generator
    ) -> Reconstruction:
        """Reconstruct texts from a layer that receives one vector per text; without one, `why_full` is the reason."""
        whole = _whole(observation, model)
        if whole is None:
            return not_applicable(observation, why_full)
        options = [_present(observation, model)] * observation.sample.shape[0]
        starts = from_random(options, observation.batch_size, self.starts, whole.of_places, generator)
        found, loss = put_together(starts, whole.of_places, observation.batch_size)
        return _result(found, observation, loss)

    def _nearest_tokens(self, observation: Observation, model: nn.Module, apart: Tensor) -> Reconstruction:
        """Reconstruct a single text with the nearest token at each position, by the distances `apart` (V, L)."""
        found, nearest = apart.argmin(0), apart.amin(0)
        length = len(found)
        known = length
        if is_causal(model):  # no gradient contains the last inputs; positions before may be just outside the span
            inside = (nearest <= self.threshold).nonzero().flatten()
            known = int(inside[-1]) + 1 if len(inside) else 0
        if 0 < known < length:
            found, nearest = with_last_tokens(observation, model, found[None], known)[0], nearest[:known]
        return _result(found, observation, float(nearest.mean()))

    def _ordered_tokens(
        self, observation: Observation, model: nn.Module, tokens: _Tokens, generator: torch.Generator
    ) -> Reconstruction:
        """Reconstruct texts whose tokens a first layer reveals, and whose order later layers reveal."""
        size, length = observation.batch_size, tokens.first.length
        behind, options, causal = tokens.behind, tokens.options, is_causal(model)
        if causal:  # no gradient contains the input at the last position
            behind = [replace(span, seen=length - 1) for span in behind]
            options = [*options[:-1], options[-1][:1]]
        told = _told_apart(tokens.apart <= self.threshold, tokens.first, options, size)
        # The last layer depends most on other tokens. With random starts, the layer with most dimensions is safer.
        if told is None:
            span = _roomiest(behind)[0]
            starts = from_random(options, size, self.starts, span.of_places, generator)
        else:
            span = behind[-1]
            starts = from_groups(told, self.starts, span.of_places, generator)
        if size == 1 and looks_back_only(options, span.inputs):
            starts = chain([grown(options, span.seen, span.entering, span.distance)], starts)
        found, loss = put_together(starts, span.of_places, size)
        message = _REPEATED if len(found.unique(dim=0)) < len(found) else ""
        if observation.has_places and loss > self.threshold:
            message = _APART
        if causal:
            found = with_last_tokens(observation, model, found, length - 1)
        return _result(found, observation, loss, message)


def _result(tokens: Tensor, observation: Observation, loss: float, message: str = "") -> Reconstruction:
    """Return a reconstruction with texts of these tokens (N, L)."""
    assert observation.labels is not None
    images, labels = texts(tokens, observation), observation.labels.cpu()
    return Reconstruction(images=images, labels=labels, loss=loss, message=message)


@dataclass(frozen=True)
class _Tokens:
    """Possible tokens of a batch, by their distances from the span of a first layer."""

    apart: Tensor
    """Distance of each token at each position, (V, L)."""
    first: Span
    behind: Sequence[Span]
    """Spans of later layers, whose vectors depend on several tokens."""
    options: Sequence[Tensor]
    """Possible tokens at each position."""


@dataclass(frozen=True)
class Span:
    """Span of the vectors that a layer's weights multiply for a batch, computed from the weights' gradient."""

    inputs: Callable[[Tensor], Tensor]
    """Function from token numbers (n, L) to the product's inputs, (n, L, width)."""
    basis: Tensor
    """Orthonormal basis (r, width) float64 in rows."""
    length: int
    room: int
    """Dimension of the space of all possible inputs."""
    rank: int
    """Rank of the gradient, at most the number of tokens in the batch, which it reaches with noise."""
    gradient: Tensor
    """Gradient (width, out): sums of the input vectors, one for each output of the weights."""
    name: str = ""
    """Name of the first weight that multiplies the vectors."""
    seen: int | None = None
    """Number of leading positions whose vectors are in gradients. None: all."""

    @classmethod
    def of(cls, observation: Observation, entrance: Entrance) -> Span:
        """Return the span of a product's input vectors, one vector for each token.

        The basis has as many directions as the batch has tokens. If all possible vectors would lie in a span of that
        size, the basis has the gradient's rank, which is lower if repeated tokens have equal vectors.
        """
        length, gradient = observation.sample.shape[0], entrance.gradient(observation.gradient)
        room = _dimensions(entrance.inputs, observation)
        tokens = observation.batch_size * length
        rank = min(tokens, int(torch.linalg.matrix_rank(gradient)))
        directions = torch.linalg.svd(gradient.double(), full_matrices=False).U.T
        basis = directions[: tokens if tokens < room else rank]
        return cls(entrance.inputs, basis, length, room, rank, gradient, entrance.factors[0].name)

    @classmethod
    def of_whole(cls, observation: Observation, entrance: Entrance) -> Span:
        """Return the span of a product's input vectors, one vector for each text."""
        gradient, size = entrance.gradient(observation.gradient).double(), observation.batch_size
        directions = torch.linalg.svd(gradient, full_matrices=False).U.T[:size]
        return cls(entrance.inputs, directions, 1, room=len(gradient), rank=size, gradient=gradient)

    @property
    def sums(self) -> int:
        """Return the number of sums of input vectors that the gradient contains: its number of columns."""
        return self.gradient.shape[1]

    @torch.no_grad()
    def of_tokens(self, vocabulary: int) -> Tensor:
        """Return the relative distance of each token's vector at each position from the span, (vocabulary, L)."""
        tokens = torch.arange(vocabulary).split(_TOKENS_AT_ONCE)
        return torch.cat([self.distance(self.inputs(some[:, None].expand(-1, self.length))) for some in tokens])

    @torch.no_grad()
    def vectors(self, vocabulary: int) -> Tensor:
        """Return the input vector of the weights for each token at each position, (L, vocabulary, width)."""
        found: Tensor | None = None
        for some in torch.arange(vocabulary).split(_TOKENS_AT_ONCE):
            entering = self.inputs(some[:, None].expand(-1, self.length)).transpose(0, 1)
            if found is None:
                found = entering.new_empty(self.length, vocabulary, entering.shape[2])
            found[:, int(some[0]) : int(some[-1]) + 1] = entering
        assert found is not None
        return found

    @torch.no_grad()
    def entering(self, numbers: Tensor, place: int) -> Tensor:
        """Return the weights' input vectors at position `place` of texts (n, L), (n, width)."""
        return torch.cat([self.inputs(some)[:, place] for some in numbers.split(_TOKENS_AT_ONCE)])

    @torch.no_grad()
    def of_places(self, numbers: Tensor) -> Tensor:
        """Return the distances of the texts' vectors from the span at each position that gradients contain, (n, L)."""
        return torch.cat([self.distance(self.inputs(some)[:, : self.seen]) for some in numbers.split(_TOKENS_AT_ONCE)])

    def distance(self, vectors: Tensor) -> Tensor:
        """Return the distances of vectors (..., width) from the span, relative to their norms: (...) in [0, 1]."""
        vectors = vectors.double()
        left = vectors - (vectors @ self.basis.T) @ self.basis
        distances: Tensor = left.norm(dim=-1) / vectors.norm(dim=-1).clamp_min(torch.finfo(vectors.dtype).tiny)
        return distances


def _behind(spans: Sequence[Span], rank: int) -> list[Span]:
    """Return the spans of the highest rank that do not fill the space, or none if that rank is below `rank`."""
    spans = [span for span in spans if span.rank < span.room]
    most = max((span.rank for span in spans), default=0)
    return [span for span in spans if span.rank == most >= rank]


def _told_apart(inside: Tensor, first: Span, options: Sequence[Tensor], count: int) -> Grouped | None:
    """Return the texts that `grouping` forms from the tokens in the first span, a mask `inside` (V, L).

    Positions without such tokens, such as the last in a causal model, get the `options`. Returns None if the span
    contains more tokens than the batch has.
    """
    tokens, places = inside.any(1).nonzero().flatten(), inside.any(0)
    numbers = len(tokens) * first.length * first.basis.shape[1]
    if not 0 < len(tokens) <= count * first.length or numbers > _MOST_NUMBERS // 8:
        return None
    with torch.no_grad():
        vectors = first.inputs(tokens[:, None].expand(-1, first.length))
    told = grouped(tokens, vectors[:, places], inside[tokens][:, places], first.gradient, count)
    if told is None or places.all():
        return told
    texts = torch.stack([some[0] for some in options]).repeat(count, 1)
    texts[:, places] = told.texts
    likely, possible = list(options), list(options)
    for at, place in enumerate(places.nonzero().flatten().tolist()):
        likely[place], possible[place] = told.likely[at], told.possible[at]
    return Grouped(texts, told.once, likely, possible)


def _options(distances: Tensor, least: int, threshold: float) -> Tensor:
    """Return the possible tokens at a position, by their distances (V,)."""
    count = max(least, min(int((distances <= threshold).sum()), _MOST_OPTIONS))
    return distances.topk(min(count, len(distances)), largest=False).indices


def _sorted(found: Sequence[Entrance], observation: Observation) -> tuple[list[Entrance], list[Entrance]]:
    """Return the inputs that depend only on the token at their position, and the first of the other inputs."""
    mixed = torch.arange(observation.sample.shape[0]) % (observation.sample.largest + 1)
    at_places, further = list[Entrance](), list[Entrance]()
    for entrance in found:
        (at_places if entrance.is_by_place(mixed) else further).append(entrance)
        if len(further) == _FURTHER:
            break
    return at_places, further


def _untied(found: Sequence[Entrance], model: nn.Module) -> list[Entrance]:
    """Return all inputs except that of the token table, whose gradient has further terms if it is tied to outputs."""
    table = table_of(model)
    return [entrance for entrance in found if table is None or f"{table[0]}.weight" not in entrance.names]


def _whole(observation: Observation, model: nn.Module) -> Span | None:
    """Return the first span of whole texts whose inputs have separate entries for each position, or None."""
    length, size = observation.sample.shape[0], observation.batch_size
    one, other = observation.sample.noise(2, torch.Generator().manual_seed(1))
    changed = torch.where(
        torch.eye(length, dtype=torch.bool), (other + (one == other)) % observation.sample.largest, one
    )
    for entrance in entrances(observation, model, whole=True):
        moved = entrance.inputs(changed) != entrance.inputs(one[None])
        if size < len(entrance.gradient(observation.gradient)) and moved.any(2).all() and moved.sum(0).max() == 1:
            return Span.of_whole(observation, entrance)
    return None


def _present(observation: Observation, model: nn.Module) -> Tensor:
    """Return the tokens whose rows of the embedding table move, or all tokens if the table is not in the update."""
    table, vocabulary = table_of(model), observation.sample.largest + 1
    rows = observation.gradient.get(f"{table[0]}.weight") if table else None
    if rows is None or len(rows) != vocabulary:
        return torch.arange(vocabulary)
    return tokens_in(rows, observation.batch_size * observation.sample.shape[0])


@torch.no_grad()
def _dimensions(inputs: Callable[[Tensor], Tensor], observation: Observation) -> int:
    """Return the dimension of the space of all possible inputs."""
    generator, length = torch.Generator().manual_seed(0), observation.sample.shape[0]
    vectors = inputs(observation.sample.noise(1, generator)).flatten(0, 1)
    shape = ceil(2 * vectors.shape[1] / length), length
    drawn = torch.randint(observation.sample.largest + 1, shape, generator=generator)
    return int(torch.linalg.matrix_rank(inputs(drawn).flatten(0, 1).double(), rtol=1e-5))


def _roomiest(spans: Sequence[Span]) -> list[Span]:
    """Return the spans with the highest rank and, among those, the most dimensions: one span, or several equal ones."""
    best = max(((span.rank, span.room) for span in spans), default=None)
    return [span for span in spans if (span.rank, span.room) == best]


def _usable(spans: Sequence[Span]) -> list[Span]:
    """Return the spans that do not fill the space. Empty spans are included only if all are empty."""
    nothing = all(span.rank == 0 for span in spans)
    return [span for span in spans if span.rank < span.room and (span.rank or nothing)]


def _together(distances: Sequence[Tensor]) -> Tensor:
    """Return the root mean square of distances from several spans."""
    return torch.stack(list(distances)).square().mean(0).sqrt()


def _moved(observation: Observation, model: nn.Module) -> frozenset[str]:
    """Return the names of parameters whose gradient is not zero at a noise text.

    Other gradients contain only what a defence added, for example those of an adapter's A while B is zero.
    """
    found = gradient_of_noise(observation, model)
    return frozenset(name for name, slope in found.items() if slope.any())


def _why_full(observation: Observation, at_places: Sequence[Entrance], spans: Sequence[Span]) -> str:
    """Return the reason why no span distinguishes tokens."""
    tokens = observation.batch_size * observation.sample.shape[0]
    if not spans:
        return _NO_PRODUCT
    widest = max(spans, key=lambda span: (span.rank, span.room))
    known = {span.name for span in spans}
    still = [entrance.factors[0].name for entrance in at_places if entrance.factors[0].name not in known]
    if still:
        return _UNMOVED.format(name=still[0], room=widest.room, tokens=tokens)
    return _FULL.format(tokens=tokens, room=widest.room)


def _by_pursuit(observation: Observation, span: Span) -> Reconstruction:
    """Return the single text whose vectors add up to the rows of a gradient that has fewer rows than tokens."""
    vocabulary = observation.sample.largest + 1
    numbers = float(vocabulary * span.length * span.basis.shape[1])
    tokens = observation.batch_size * span.length
    why = None
    if observation.batch_size > 1:
        why = _OF_SEVERAL
    elif tokens >= span.room:
        why = _NOT_UNIQUE
    elif numbers > _MOST_NUMBERS:
        why = _TOO_LARGE.format(numbers=numbers)
    if why is not None:
        return not_applicable(observation, _FEW_SUMS.format(name=span.name, rank=span.rank, tokens=tokens, why=why))
    found = pursued(span.basis[: span.rank], span.vectors(vocabulary))
    return _result(found.tokens, observation, found.distance, "" if found.complete else _UNFINISHED)
