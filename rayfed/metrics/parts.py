"""Parts of samples that reconstructions find: columns of records, and tokens of texts.

A sample may be given away in part: of a record all columns but one, of a text most of its words. What is found of it is
set beside what a guess finds, and beside what the same reconstruction finds of other samples. Images have no such
parts: pixels are alike in all images of a class.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rayfed.metrics.assignment import assign
from rayfed.metrics.guessing import Others, guesses
from rayfed.metrics.records import feature_accuracy
from rayfed.metrics.texts import token_accuracy
from rayfed.samples import Records, Tokens

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("parts_found", "parts_guessed", "parts_independent", "columns")
"""Columns of a row on the parts of its sample."""


def parts(sample: Records | Tokens, others: Others, true: Tensor, guess: Tensor) -> list[dict[str, Any]]:
    """Return for each sample the share of its parts that a reconstruction finds, and what is found without the update.

    It takes samples (N, *shape) twice, the true ones first. `parts_guessed` is the most of two shares: of this sample's
    parts that a guess finds, and of the parts of other samples that these reconstructions find, each matched to another
    one as those of the batch are to the true ones. `parts_independent` is to how many independent parts the spread of
    the latter is that of a share of. `columns` are those of a record, each with whether it is `found`, and the share of
    other records in which the best constant is (`guess`); None of other samples.
    """
    import torch

    found = _found(sample)
    own = found(true, guess)
    in_others = _in_others(found, sample, others.inputs.to(true), guess)
    by_chance = (float(in_others.sum()) + 1) / (len(in_others) + 1)  # the sample could have been one of them
    guessed = torch.stack([found(true, one) for one in guesses(sample, others, true)]).amax(0).clamp(min=by_chance)
    counts = _counts(sample, true)
    spread = float(in_others.var(correction=0))
    independent = by_chance * (1 - by_chance) / spread if spread else float("inf")
    rows = [
        {"parts_found": a, "parts_guessed": b, "parts_independent": min(independent, float(n)), "columns": None}
        for a, b, n in zip(own.tolist(), guessed.tolist(), counts, strict=True)
    ]
    if isinstance(sample, Records):
        names, chances = [column.name for column in sample.columns], _constants(sample, others)
        for row, hits in zip(rows, sample.found(true, guess).tolist(), strict=True):
            told = zip(names, hits, chances, strict=True)
            row["columns"] = [{"name": name, "found": hit, "guess": share} for name, hit, share in told]
    return rows


def _found(sample: Records | Tokens) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function for the share of parts found of samples (N, *shape), which is given twice, to (N,) float64."""
    return feature_accuracy(sample) if isinstance(sample, Records) else token_accuracy


def _counts(sample: Records | Tokens, true: Tensor) -> list[int]:
    """Return the number of parts of each sample (N, *shape)."""
    if isinstance(sample, Records):
        return [len(sample.columns)] * len(true)
    counts: list[int] = (true >= 0).sum(1).tolist()
    return counts


def _in_others(
    found: Callable[[Tensor, Tensor], Tensor], sample: Records | Tokens, others: Tensor, guess: Tensor
) -> Tensor:
    """Return the shares of other samples' parts (M', *shape) that reconstructions (N, *shape) find, (M',) float64."""
    import torch

    if len(guess) == 1:  # as below, which would take seconds for hundreds of others
        return found(others, guess.expand_as(others))
    whole = max(len(others) // len(guess), 1) * len(guess)
    sets = others[:whole].split(len(guess))
    order = torch.cat([assign(one, guess, sample) for one in sets])
    return found(others[:whole], guess[order])


@lru_cache(maxsize=4)
def _constants(sample: Records, others: Others) -> list[float]:
    """Return for each column the share of other records that the best constant finds."""
    shares = []
    for column, part in zip(sample.columns, sample.split(others.inputs), strict=True):
        values = column.values(part)
        shares.append(max(float(column.near(values, value).double().mean()) for value in values.unique()))
    return shares
