"""Parts of samples that reconstructions find: columns of records, and tokens of texts.

A sample may be given away in part: of a record all columns but one, of a text most of its words. What is found of it is
set beside what a guess finds, and beside what the same reconstruction finds of other samples. Images have no such
parts: pixels are alike in all images of a class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayfed.metrics.assignment import distances, matched
from rayfed.metrics.guessing import Others, best_constants, guesses
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

    found = feature_accuracy(sample) if isinstance(sample, Records) else token_accuracy
    own, in_others = found(true, guess), _in_others(sample, others.inputs.to(true), guess)
    by_chance = (float(in_others.sum()) + 1) / (len(in_others) + 1)  # the sample could have been one of them
    guessed = torch.stack([found(true, one) for one in guesses(sample, others, true)]).amax(0).clamp(min=by_chance)
    spread = float(in_others.var(correction=0)) if len(in_others) else 0.0
    independent = by_chance * (1 - by_chance) / spread if spread else float("inf")
    counts = [len(sample.columns)] * len(true) if isinstance(sample, Records) else (true >= 0).sum(1).tolist()
    rows = [
        {"parts_found": a, "parts_guessed": b, "parts_independent": min(independent, float(n)), "columns": None}
        for a, b, n in zip(own.tolist(), guessed.tolist(), counts, strict=True)
    ]
    if isinstance(sample, Records):
        names, (_, shares) = [column.name for column in sample.columns], best_constants(sample, others)
        for row, hits in zip(rows, sample.found(true, guess).tolist(), strict=True):
            told = zip(names, hits, shares, strict=True)
            row["columns"] = [{"name": name, "found": hit, "guess": share} for name, hit, share in told]
    return rows


def _in_others(sample: Records | Tokens, others: Tensor, guess: Tensor) -> Tensor:
    """Return the shares of other samples' parts (M', *shape) that reconstructions (N, *shape) find, (M',) float64.

    The others are matched in sets as large as the batch. Of one without parts there is no share.
    """
    import torch

    apart, count = distances(others, guess, sample), len(guess)
    whole = max(len(others) // count, 1) * count
    order = torch.cat([matched(some) for some in apart[:whole].split(count)])
    wrong = apart[:whole].gather(1, order[:, None].to(apart.device))[:, 0].floor()
    if isinstance(sample, Records):
        return 1 - wrong / len(sample.columns)
    there = (others[:whole] >= 0).sum(1)
    hits = ((others[:whole] == guess[order]) & (others[:whole] >= 0)).sum(1)
    return (hits.double() / there)[there > 0]
