"""Recover the words of a batch in closed form from the gradient of the embedding table.

A token's row is the sum of the gradients at the positions of the token, and zero for tokens that the batch does not
have (Melis et al. 2019, "Exploiting Unintended Feature Leakage in Collaborative Learning", section 4.1). The norm of
its row estimates how often a token occurs. If the model learns a vector for every position, the order of a single text
follows (ours). The gradient of position p equals that of the text there, G_p. Row v of the table's gradient is
therefore E_v = sum_p A_vp G_p, with A_vp = 1 if token v is at p. So A = E G^+ for texts with fewer positions than the
vectors have numbers. A model with a separate row for each token at each position reveals both.

If the table also produces the outputs (tied embeddings), all rows contain sums of the outputs' input vectors. The rows
of tokens that the batch does not have reveal the span of these vectors. The parts outside the span are as above (ours).

Without position vectors, the order of a single text is searched so that the model's gradient equals the observed one
(`arranged`, ours).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.groups import in_groups
from rayfed.attacks.inference.labels import needs_labels
from rayfed.attacks.text.arranged import arranged
from rayfed.attacks.text.last_tokens import is_causal, with_last_tokens
from rayfed.attacks.text.lookups import Lookup, rows_of_places
from rayfed.attacks.text.tokens import NO_TABLE, gradient_of_noise, is_finite, table_of, texts, tokens_in
from rayfed.registry import component
from rayfed.samples import Modality
from rayfed.update import Observation

_RESOLVED = 1e-4
"""Size of a direction, relative to the largest, below which it is rounding."""
_NOTHING = 1e-6
"""Norm of a position's gradient, relative to that of all positions, below which it is rounding."""


@component
class EmbeddingRows:
    """Recover the tokens whose rows of the embedding table have a gradient. With noise, use the rows of largest norm.

    The order of a single text is recovered from position vectors, from tables with rows per position, or by matching
    the gradient. The order in a batch is unknown, so its texts are bags of words.
    """

    takes: ClassVar[tuple[Modality, ...]] = ("tokens",)
    place_labels: ClassVar[str] = "unneeded"

    @needs_labels
    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`)."""
        placed = rows_of_places(observations[0], model)
        if placed is not None:
            return in_groups(lambda group, _: [_by_place(o, placed) for o in group], observations, generators)
        name = _table(model)
        if name not in observations[0].update:
            return [not_applicable(observation, NO_TABLE, inherent=True) for observation in observations]
        return in_groups(lambda group, _: [_reconstruction(o, name, model) for o in group], observations, generators)


def _reconstruction(observation: Observation, name: str, model: nn.Module) -> Reconstruction:
    assert observation.labels is not None
    labels = observation.labels.cpu()
    if not is_finite(observation):
        return _not_finite(observation)
    rows = observation.gradient[name].double()
    length = observation.sample.shape[0]
    most = observation.batch_size * length
    places = _places(observation, name, model)
    spread = outputs_of(rows) if bool(gradient_of_noise(observation, model)[name].any(1).all()) else None
    if spread is not None:
        places = None if places is None else apart_from(places.double(), spread)
    own = rows if spread is None else apart_from(rows, spread)
    tokens = tokens_in(own, most)
    if observation.batch_size == 1 and places is not None:
        found = ordered(own, tokens, places.double())
        if is_causal(model):
            there = (places.norm(dim=1) > _NOTHING * places.norm()).nonzero().flatten()
            known = int(there[-1]) + 1 if len(there) else 0  # a defence may have removed positions before the last
            found = with_last_tokens(observation, model, found[None], known)[0]
    else:
        tokens = torch.cat([tokens, tokens_in(rows, most)]).unique() if spread is not None else tokens
        found = bag(rows, tokens, most)
        if observation.batch_size == 1 and not observation.has_places and bool((rows == 0).all(1).any()):
            found = arranged(observation, model, name, found)
    return Reconstruction(images=texts(found, observation), labels=labels)


def _table(model: nn.Module) -> str:
    """Return the name of the table's weight (of an embedding or a bag), empty if the model has none."""
    table = table_of(model)
    bags = (path for path, module in model.named_modules() if isinstance(module, nn.EmbeddingBag))
    path = next(bags, None) if table is None else table[0]
    return "" if path is None else f"{path}.weight".lstrip(".")


def outputs_of(rows: Tensor) -> Tensor | None:
    """Return an orthonormal basis (r, width) of the terms that tied outputs add to all rows (V, width) of a table.

    The smaller half of the rows contain only these terms, because their tokens are not in the batch. Returns None if
    the terms span the whole space.
    """
    norms = rows.norm(dim=1)
    others = rows[(norms <= norms.median()) & (norms > 0)]
    _, sizes, basis = torch.linalg.svd(others / others.norm(dim=1, keepdim=True), full_matrices=False)
    found: Tensor = basis[sizes > _RESOLVED * sizes[0]]
    return found if len(found) < rows.shape[1] else None


def apart_from(rows: Tensor, basis: Tensor) -> Tensor:
    """Return rows (n, width) minus the rows' projections on the span of an orthonormal basis (r, width)."""
    return rows - (rows @ basis.T) @ basis


def _not_finite(observation: Observation) -> Reconstruction:
    assert observation.labels is not None
    images, labels = observation.sample.blank(observation.batch_size), observation.labels.cpu()
    return Reconstruction(images=images, labels=labels, status="failed", message="the update is not finite")


def _by_place(observation: Observation, lookup: Lookup) -> Reconstruction:
    """Return the tokens with the largest rows at each position."""
    assert observation.labels is not None
    if not is_finite(observation):
        return _not_finite(observation)
    moved = observation.gradient[lookup.parameter].double().reshape(lookup.rows, -1).norm(dim=1)
    found = moved[lookup.numbers].topk(observation.batch_size, dim=0).indices.T
    return Reconstruction(images=texts(found, observation), labels=observation.labels.cpu())


def bag(rows: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Return `count` tokens (count,): each given token once, then copies in proportion to the norms of the rows."""
    norms = rows[tokens].norm(dim=1)
    expected = count * norms / norms.sum()
    counts = torch.ones_like(tokens)
    for _ in range(count - len(tokens)):
        counts[(expected - counts).argmax()] += 1
    return tokens.repeat_interleave(counts)[:count]


def ordered(rows: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """Return a single text's tokens (L,), with table gradients `rows` (V, width) and position gradients (L, width)."""
    shares = rows[tokens] @ torch.linalg.pinv(places)
    return tokens[shares.argmax(0)]


def _places(observation: Observation, table: str, model: nn.Module) -> Tensor | None:
    """Return the gradient of the model's position vectors (L, width).

    Returns None if the model has no such parameter, or if its vectors are too short to separate positions. If it has
    rows for longer texts, as in BERT and GPT-2, the rows are those with a gradient at a noise text.
    """
    width, length = observation.update[table].shape[1], observation.sample.shape[0]
    own = (
        f"{module}.{parameter}".lstrip(".")
        for module, held in model.named_modules()
        if not isinstance(held, nn.Linear | nn.RNNBase)  # their weights may have the same shape
        for parameter, _ in held.named_parameters(recurse=False)
    )
    sizes = {name: observation.update[name].shape for name in own if name in observation.update and name != table}
    if length >= width:
        return None
    found = next((name for name, size in sizes.items() if size == (length, width)), None)
    if found is not None:
        return observation.gradient[found]
    longer = [name for name, size in sizes.items() if len(size) == 2 and size[0] > length and size[1] == width]
    probe = gradient_of_noise(observation, model) if longer else {}
    for name in longer:
        rows = probe[name].any(1).nonzero().flatten()
        if is_causal(model):  # the input at the last position has no gradient
            rows = torch.cat([rows, rows[-1:] + 1])
        if len(rows) == length:
            return observation.gradient[name][rows]
    return None
