"""DAGER: texts read off the low rank of gradients, exactly.

The gradient of a weight that multiplies a vector of each token is a sum of outer products, one for each token of the
batch, so that it lies in the span of these vectors (`products`). Where a vector is a known function of token and place,
as what enters the first attention mostly is, those in the span are the batch's. A text of a batch of several is one
whose vectors further on, which depend on all of its tokens, lie in the span there; where the first vectors do not
depend on the place, the order of a text is found in the same way. So are whole texts where a layer sees one vector of
each, such as those of all places beside each other.

An adapter's product B A x (LoRA) has two gradients. That of B (out, r) lies in the span of A x, of r numbers of each
token: while there are fewer tokens than r, the same test holds there, for adapters of the same inputs together. That of
A (r, width) is B^T times that of the layer: nothing at the first step, where B is zero, and later r sums of the vectors
x. Of fewer sums than tokens a single text is found by `pursuit`.

Source: Petrov et al. 2024, "DAGER: Exact Gradient Inversion for Large Language Models", sections 3 and 4. Ours: the
weights are found by what they multiply, whatever they are called, and of several places in a model that one is taken
whose gradient has the highest rank and whose vectors have most dimensions; the gradients of all weights that multiply
the same vectors (query, key and value) are taken together, as the key's alone lack one direction for each text (the
rows of the softmax's gradient sum to zero); under noise, where no rank can be seen, the span is that of as many leading
directions as the batch has tokens, and the nearest token counts; texts are put together by coordinate descent in place
of a search over all of them, from those that `grouping` tells apart.
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
from rayfed.attacks.labels import needs_labels
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
"""Most tokens tried at a place: where the span is nearly everything, all tokens are near it."""
_FURTHER = 6
"""Most entrances looked at whose vectors depend on several tokens: those of about two blocks."""
_NO_PRODUCT = "the update has no gradients of weights by which the vector of each token is multiplied alone"
_PROMPTED = "a soft prompt in front of a text moves its tokens to places that this attack does not know of"
_STEPS = "an update of several local steps mixes the spans of several weights: observe the gradient, or a single step"
_FULL = (
    "the batch has {tokens} tokens, and what enters the first weights {room} dimensions: from as many on all vectors "
    "lie in their span"
)
_UNMOVED = (
    "the gradient of {name} and of all that multiplies each token's whole vector is zero, as that of an adapter's A is "
    "at the first step, where its B is zero; B's gradient sees {room} numbers of each token, which tell fewer than "
    "{room} tokens apart: the batch has {tokens}. A later step, when B has moved, or a larger rank tells more"
)
_FEW_SUMS = (
    "the gradient of {name} has {rank} sums of the vectors of {tokens} tokens (an adapter's has as many as its rank): "
    "{why}"
)
_OF_SEVERAL = "of so few a single text is found, and no batch"
_NOT_UNIQUE = "more than one text fits them"
_TOO_LARGE = "the vectors of all tokens at all places, {numbers:.1e} numbers, are too many to keep"
_UNFINISHED = (
    "no text was found that the gradient is sums of: tokens are the nearest, and another search may find more of them"
)
_APART = (
    "no texts were found whose vectors lie in the span further on: tokens are the nearest, and another search may find "
    "more of them"
)
_REPEATED = (
    "fewer different texts were found than the batch has: those that are missing are repeated others, and another "
    "search may find them"
)
_MOST_NUMBERS = 1 << 30
"""Most numbers of all tokens' vectors at all places that a pursuit keeps: 4 GB."""
_NO_ORDER = "no weights tell which tokens are of one text, or in which order"


@component
class Dager:
    """Search for tokens and places whose vectors are nearest to the span of the gradients of their weights.

    Exact for as many different vectors as fit: fewer in the whole batch than what enters the first attention has
    dimensions, which are its inputs, without one behind a norm. Where no weights multiply a vector of each token, a
    layer that sees those of all places beside each other gives whole texts away. Off low-rank adapters: as many tokens
    as their rank has room for at the first step, and later a single text of more, by a greedy search.
    """

    takes: ClassVar[tuple[Modality, ...]] = ("tokens",)
    place_labels: ClassVar[str] = "unneeded"

    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Distance from the span, over a vector's own norm, up to which a token may stand at a place of a batch of several
    texts; at least as many as there are texts may, the nearest ones. A single text has the nearest token everywhere."""
    starts: Annotated[int, Field(ge=1)] = 32
    """Number of texts from which those of a batch of several are sought: random ones, or those that are told apart by
    what tokens have added to the gradient, and again with every other token drawn anew."""

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
        if observation.local.steps > 1:
            return not_applicable(observation, _STEPS)
        if hasattr(model, PROMPT):
            return not_applicable(observation, _PROMPTED)
        if not is_finite(observation):
            images = observation.sample.blank(observation.batch_size)
            return Reconstruction(images=images, labels=labels, status="failed", message="the update is not finite")
        at_places, further = _sorted(_untied(entrances(observation, model), model), observation)
        moved = _moved(observation, model)
        spans = [Span.of(observation, entrance) for entrance in at_places if not moved.isdisjoint(entrance.names)]
        first = _roomiest(_usable(spans))
        if not first:
            whole = _whole(observation, model)
            if whole is None:
                return not_applicable(observation, _why_full(observation, at_places, spans))
            options = [_present(observation, model)] * observation.sample.shape[0]
            sought = from_random(options, observation.batch_size, self.starts, whole.of_places, generator)
            found, loss = put_together(sought, whole.of_places, observation.batch_size)
            return Reconstruction(images=texts(found, observation), labels=labels, loss=loss)
        apart = _together([span.of_tokens(observation.sample.largest + 1) for span in first])
        few = first[0].sums < first[0].room and first[0].rank < observation.batch_size * first[0].length
        if few and int((apart <= self.threshold).sum()) < first[0].rank:
            return _by_pursuit(observation, first[0])
        anywhere = torch.allclose(apart, apart[:, :1].expand_as(apart), rtol=1e-3, atol=1e-6)
        causal, length = is_causal(model), first[0].length
        if observation.batch_size == 1 and not anywhere:
            found, nearest = apart.argmin(0), apart.amin(0)
            inside = (nearest <= self.threshold).nonzero().flatten()  # a place between them may be just outside
            known = int(inside[-1]) + 1 if causal and len(inside) else 0 if causal else length
            if 0 < known < length:
                found, nearest = with_last_tokens(observation, model, found[None], known)[0], nearest[:known]
            return Reconstruction(images=texts(found, observation), labels=labels, loss=float(nearest.mean()))
        behind = _behind([Span.of(observation, entrance) for entrance in further], first[0].rank)
        if not behind:
            return not_applicable(observation, _NO_ORDER)
        least = first[0].rank if anywhere else observation.batch_size
        options = [_options(column, least, self.threshold) for column in apart.unbind(1)]
        if causal:  # no gradient has what enters at the last place
            behind, options[-1] = [replace(span, seen=length - 1) for span in behind], options[-1][:1]
        told = _told_apart(apart <= self.threshold, first[0], options, observation.batch_size)
        # the last depends on other tokens most; it may have room for other texts, which random ones come to
        span = _roomiest(behind)[0] if told is None else behind[-1]
        if told is None:
            sought = from_random(options, observation.batch_size, self.starts, span.of_places, generator)
        else:
            sought = from_groups(told, self.starts, span.of_places, generator)
        if observation.batch_size == 1 and looks_back_only(options, span.inputs):
            sought = chain([grown(options, span.seen, span.entering, span.distance)], sought)
        found, loss = put_together(sought, span.of_places, observation.batch_size)
        repeated = len(found.unique(dim=0)) < len(found)
        if causal:
            found = with_last_tokens(observation, model, found, length - 1)
        unsure = observation.has_places and loss > self.threshold
        message = _APART if unsure else _REPEATED if repeated else ""
        return Reconstruction(images=texts(found, observation), labels=labels, loss=loss, message=message)


@dataclass(frozen=True)
class Span:
    """Span of what entered a product for the batch, as the gradient has it."""

    inputs: Callable[[Tensor], Tensor]
    """Function from token numbers (n, L) to what enters for them, (n, L, width)."""
    basis: Tensor
    """Basis (r, width) float64, orthonormal rows."""
    length: int
    room: int
    """Number of dimensions of the space in which all possible inputs lie."""
    rank: int
    """Rank of the gradient, or the number of tokens of the batch where that is less: it is, under noise."""
    gradient: Tensor
    """The gradient (width, out): sums of the vectors, as many as the weights have outputs."""
    name: str = ""
    """Name of the first of the weights."""
    seen: int | None = None
    """Number of the first places whose vectors gradients have; None: all."""

    @classmethod
    def of(cls, observation: Observation, entrance: Entrance) -> Span:
        """Return the span at an entrance.

        The basis is of as many directions as the batch has tokens; where all vectors lay in the span of so many, of as
        many as the rank: tokens that stand in the batch twice may enter alike.
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
        """Return the span at an entrance of whole texts: of as many directions as the batch has texts."""
        gradient, size = entrance.gradient(observation.gradient).double(), observation.batch_size
        directions = torch.linalg.svd(gradient, full_matrices=False).U.T[:size]
        return cls(entrance.inputs, directions, 1, room=len(gradient), rank=size, gradient=gradient)

    @property
    def sums(self) -> int:
        """Number of sums of the vectors that the gradient is."""
        return self.gradient.shape[1]

    @torch.no_grad()
    def of_tokens(self, vocabulary: int) -> Tensor:
        """Return the distance of every token at every place from the span, over its own norm: (vocabulary, L)."""
        tokens = torch.arange(vocabulary).split(_TOKENS_AT_ONCE)
        return torch.cat([self.distance(self.inputs(some[:, None].expand(-1, self.length))) for some in tokens])

    @torch.no_grad()
    def vectors(self, vocabulary: int) -> Tensor:
        """Return what enters for every token at every place, (L, vocabulary, width)."""
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
        """Return what enters at a place for texts (n, L), (n, width)."""
        return torch.cat([self.inputs(some)[:, place] for some in numbers.split(_TOKENS_AT_ONCE)])

    @torch.no_grad()
    def of_places(self, numbers: Tensor) -> Tensor:
        """Return the distance of texts (n, L) from the span at each place that gradients have, (n, L)."""
        return torch.cat([self.distance(self.inputs(some)[:, : self.seen]) for some in numbers.split(_TOKENS_AT_ONCE)])

    def distance(self, vectors: Tensor) -> Tensor:
        """Return the distance of vectors (..., width) from the span, (...) between 0 and 1."""
        vectors = vectors.double()
        left = vectors - (vectors @ self.basis.T) @ self.basis
        distances: Tensor = left.norm(dim=-1) / vectors.norm(dim=-1).clamp_min(torch.finfo(vectors.dtype).tiny)
        return distances


def _behind(spans: Sequence[Span], rank: int) -> list[Span]:
    """Return the spans of the highest rank, which is at least `rank`, that are not everything."""
    spans = [span for span in spans if span.rank < span.room]
    most = max((span.rank for span in spans), default=0)
    return [span for span in spans if span.rank == most >= rank]


def _told_apart(inside: Tensor, first: Span, options: Sequence[Tensor], count: int) -> Grouped | None:
    """Return the texts that `grouping` tells apart of tokens `inside` (V, L) the first span.

    At places without any, as the last of a causal model, stand the `options`. None where too many tokens are in the
    span to be the batch's.
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
    """Return the tokens that are possible at a place, from their distances (V,)."""
    count = max(least, min(int((distances <= threshold).sum()), _MOST_OPTIONS))
    return distances.topk(min(count, len(distances)), largest=False).indices


def _sorted(found: Sequence[Entrance], observation: Observation) -> tuple[list[Entrance], list[Entrance]]:
    """Return the entrances of vectors that depend on the token at their place alone, and the first others."""
    mixed = torch.arange(observation.sample.shape[0]) % (observation.sample.largest + 1)
    at_places, further = list[Entrance](), list[Entrance]()
    for entrance in found:
        (at_places if entrance.is_by_place(mixed) else further).append(entrance)
        if len(further) == _FURTHER:
            break
    return at_places, further


def _untied(found: Sequence[Entrance], model: nn.Module) -> list[Entrance]:
    """Return the entrances but those of the table of tokens, whose gradient has more than their vectors where tied."""
    table = table_of(model)
    return [entrance for entrance in found if table is None or f"{table[0]}.weight" not in entrance.names]


def _whole(observation: Observation, model: nn.Module) -> Span | None:
    """Return the first span of whole texts' vectors in which each place has entries of its own; None without any."""
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
    """Return the tokens that the batch may have: those whose rows of the table move, or all."""
    table, vocabulary = table_of(model), observation.sample.largest + 1
    rows = observation.gradient.get(f"{table[0]}.weight") if table else None
    if rows is None or len(rows) != vocabulary:
        return torch.arange(vocabulary)
    return tokens_in(rows, observation.batch_size * observation.sample.shape[0])


@torch.no_grad()
def _dimensions(inputs: Callable[[Tensor], Tensor], observation: Observation) -> int:
    """Return the number of dimensions of the space in which all possible inputs lie."""
    generator, length = torch.Generator().manual_seed(0), observation.sample.shape[0]
    vectors = inputs(observation.sample.noise(1, generator)).flatten(0, 1)
    shape = ceil(2 * vectors.shape[1] / length), length
    drawn = torch.randint(observation.sample.largest + 1, shape, generator=generator)
    return int(torch.linalg.matrix_rank(inputs(drawn).flatten(0, 1).double(), rtol=1e-5))


def _roomiest(spans: Sequence[Span]) -> list[Span]:
    """Return the spans with the most dimensions to spare of those of the highest rank: one, or several equals."""
    best = max(((span.rank, span.room) for span in spans), default=None)
    return [span for span in spans if (span.rank, span.room) == best]


def _usable(spans: Sequence[Span]) -> list[Span]:
    """Return the spans that are not everything, and not empty unless all are."""
    nothing = all(span.rank == 0 for span in spans)
    return [span for span in spans if span.rank < span.room and (span.rank or nothing)]


def _together(distances: Sequence[Tensor]) -> Tensor:
    """Return the root mean square of the distances from several spans."""
    return torch.stack(list(distances)).square().mean(0).sqrt()


def _moved(observation: Observation, model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters whose gradient at a text of noise is not zero.

    What a defence adds to the others' tells nothing: those of an adapter's A while B is zero.
    """
    found = gradient_of_noise(observation, model)
    return frozenset(name for name, slope in found.items() if slope.any())


def _why_full(observation: Observation, at_places: Sequence[Entrance], spans: Sequence[Span]) -> str:
    """Return why no span distinguishes tokens."""
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
    """Return the single text of whose vectors the rows of a gradient are sums, fewer than its tokens."""
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
    assert observation.labels is not None
    return Reconstruction(
        images=texts(found.tokens, observation),
        labels=observation.labels.cpu(),
        loss=found.distance,
        message="" if found.complete else _UNFINISHED,
    )
