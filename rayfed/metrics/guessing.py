"""Metrics of a reconstruction relative to guesses without an update.

A blur of average brightness comes near to many images, and so does the nearest of many others. So a reconstruction
is set beside the best of such guesses, and beside samples that are not its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from rayfed.metrics.base import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from rayfed.samples import Records, SampleSpec

Score = Callable[["Tensor", "Tensor"], "Tensor"]
_TIE = 1e-6
"""Weight of a record's error beside the share of its columns: of answers with the same columns right, the nearer."""


@dataclass(frozen=True, eq=False)
class Others:
    """Samples of the same kind that no victim has."""

    inputs: Tensor
    """(M, *shape), as the data's `sample` says."""
    public: Tensor | None = None
    """(P, *shape), the public samples that attackers may have; None where the data have none."""
    median: Tensor | None = None
    """(k,), the medians of their targets, which is what a guess says; None where labels are classes."""


def above_guessing(sample: SampleSpec, others: Others) -> Score:
    """Return a function for how much nearer than the best guess reconstructions are: in dB; of parts a share.

    It takes samples (N, *shape) twice, the true ones first, to (N,) float64. Guesses are what the other samples have in
    common, and the true mean of each channel: the best constant. Parts are a text's tokens or a record's columns.
    """
    score = _score(sample)

    def gain(true: Tensor, guess: Tensor) -> Tensor:
        import torch

        return score(true, guess) - torch.stack([score(true, one) for one in guesses(sample, others, true)]).amax(0)

    return gain


def guesses(sample: SampleSpec, others: Others, true: Tensor) -> list[Tensor]:
    """Return guesses at samples (N, *shape), each (N, *shape): what others have in common, and the best constants.

    In common are the mean, and of texts the commonest token of each place. Constants are an image's true mean of each
    channel, and of records for each column the value that most others have.
    """
    from rayfed.samples import Records

    common = others.inputs.mode(0).values if sample.modality == "tokens" else others.inputs.mean(0)
    found = [common.to(true).expand_as(true)]
    if isinstance(sample, Records):
        found.append(best_constants(sample, others)[0].to(true).expand_as(true))
    elif sample.modality == "pixels":
        found.append(true.mean((2, 3), keepdim=True).expand_as(true))
    return found


@lru_cache(maxsize=4)
def best_constants(sample: Records, others: Others) -> tuple[Tensor, list[float]]:
    """Return the record (1, 1, F) with the values that are right for most others, and for what share each column's is.

    A continuous value is right where it is near enough (`Column.near`).
    """
    import torch

    parts, shares = [], []
    for column, part in zip(sample.columns, sample.split(others.inputs), strict=True):
        values = column.values(part).double()
        ordered, reach = values.sort().values, column.tolerance
        upper = torch.searchsorted(ordered, values + reach, right=True)
        hits = upper - torch.searchsorted(ordered, values - reach)
        parts.append(part[hits.argmax()])
        shares.append(float(hits.max()) / len(values))
    return torch.cat(parts)[None, None], shares


def above_public(sample: SampleSpec, others: Others) -> Score:
    """Return a function for how much nearer than the nearest public sample reconstructions are.

    It is chosen by looking at the truth, which no attacker can: the most that a choice from such samples could come to.
    NaN where the data have none, for nobody could guess at what no attacker holds.
    """
    pool, score = others.public, _score(sample)

    def gain(true: Tensor, guess: Tensor) -> Tensor:
        import torch

        if pool is None:
            return true.new_full((len(true),), float("nan"), dtype=torch.float64)
        return score(true, guess) - score(true, nearest_of(true, pool, sample))

    return gain


def _score(sample: SampleSpec) -> Score:
    """Return a function for the nearness of samples (N, *shape) to true ones, (N,): in dB; of parts a share."""
    from rayfed.metrics.images import PSNR_CEILING, mse, psnr
    from rayfed.metrics.records import feature_accuracy
    from rayfed.metrics.texts import token_accuracy
    from rayfed.samples import Records

    if sample.modality == "tokens":
        return token_accuracy
    if isinstance(sample, Records):
        share = feature_accuracy(sample)
        return lambda true, guess: share(true, guess) - _TIE * (1 - 1 / (1 + mse(true, guess)))
    return lambda true, guess: psnr(true, guess).clamp(max=PSNR_CEILING)


def nearest_of(true: Tensor, pool: Tensor, sample: SampleSpec) -> Tensor:
    """Return for each sample (N, *shape) the nearest one of a pool (M, *shape), (N, *shape).

    Copies are passed over: of a sample that everybody has there is nothing to protect. Where the pool has nothing else,
    it is a sample of zeros.
    """
    import torch

    from rayfed.metrics.assignment import distances

    known, found = pool.to(true), torch.zeros_like(true)
    for place, own in enumerate(true):
        apart = distances(own[None], known, sample)[0]
        apart = torch.where((known != own).flatten(1).any(1), apart, torch.inf)
        if apart.isfinite().any():
            found[place] = known[apart.argmin()]
    return found


def told_apart(sample: SampleSpec, others: Others) -> Score:
    """Return a function for whether reconstructions are nearer to their own samples than to all others.

    It takes samples (N, *shape) twice, the true ones first, to (N,) float64 of 1 and 0. The others are those of the
    batch, too; copies of the true sample are not among them.
    """

    def told(true: Tensor, guess: Tensor) -> Tensor:
        import torch

        from rayfed.metrics.assignment import distances

        known = torch.cat([true, others.inputs.to(true)])
        hits = []
        for own, apart in zip(true, distances(known, guess, sample).unbind(1), strict=True):
            foreign = (known != own).flatten(1).any(1)
            hits.append(not foreign.any() or bool(apart[~foreign].amin() < apart[foreign].amin()))
        return torch.tensor(hits, dtype=torch.float64)

    return told


ABOVE_GUESSING = Metric(
    name="above_guessing",
    description="PSNR less that of the best guess made without the update (dB); of texts and records, share of tokens "
    "or columns",
    title="above guessing",
    function=above_guessing,
    needs=("sample", "others"),
    higher_is_closer=True,
    modalities=("pixels", "tokens", "records"),
    tables=(),
    outcome=False,
    success="threshold",
)
ABOVE_PUBLIC = Metric(
    name="above_public",
    description="PSNR less that of the nearest public sample (dB), if any; of texts and records, share of "
    "tokens or columns",
    title="above the nearest public sample",
    function=above_public,
    needs=("sample", "others"),
    higher_is_closer=True,
    modalities=("pixels", "tokens", "records"),
    tables=(),
    outcome=False,
    success="threshold",
)
TOLD_APART = Metric(
    name="told_apart",
    description="1 where the reconstruction is nearer to its sample than to other samples, 0 where not",
    title="told apart",
    function=told_apart,
    needs=("sample", "others"),
    higher_is_closer=True,
    modalities=("pixels", "tokens", "records"),
    format="hit",
    tables=(),
    outcome=False,
    success=None,
)
