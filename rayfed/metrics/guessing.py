"""Metrics of a reconstruction relative to baselines that do not use the update.

An image of average brightness, or the nearest of many other images, is close to many images. Reconstructions are
therefore compared with the best of such baselines, and with other samples.
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
"""Weight of a record's error relative to the share of its columns. It breaks ties between equal shares."""


@dataclass(frozen=True, eq=False)
class Others:
    """Samples of the same data set that no victim has, for baselines and comparisons."""

    inputs: Tensor
    """(M, *shape), in the format of the data's `sample`."""
    public: Tensor | None = None
    """(P, *shape), public samples that attackers may have. None: the data have none."""
    median: Tensor | None = None
    """(k,), medians of their targets, the baseline for labels that are numbers. None: labels are classes."""


def above_baseline(sample: SampleSpec, others: Others) -> Score:
    """Return a function that computes the gain of reconstructions over the best baseline, in dB or as a share of parts.

    The function maps true samples (N, *shape) and reconstructions to (N,) float64. Parts are the tokens of a text or
    the columns of a record. For the baselines see `guesses`.
    """
    score = _score(sample)

    def gain(true: Tensor, guess: Tensor) -> Tensor:
        import torch

        return score(true, guess) - torch.stack([score(true, one) for one in guesses(sample, others, true)]).amax(0)

    return gain


def guesses(sample: SampleSpec, others: Others, true: Tensor) -> list[Tensor]:
    """Return the baselines for samples (N, *shape) that do not use the update, each (N, *shape).

    The first is the mean of other samples, or the most common token at each position of texts. For images, the second
    is the true mean of each channel. For records, it is the most common value of each column.
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
    """Return the record (1, 1, F) of best constants for each column, and the share of other records that each matches.

    A continuous value is correct within the tolerance of its column (`Column.near`).
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
    """Return a function that computes the gain of reconstructions over the nearest public sample, in dB or as a share.

    The nearest sample is chosen with the true sample, which no attacker knows, so this baseline is an upper bound. The
    gain is NaN if the data have no public samples.
    """
    pool, score = others.public, _score(sample)

    def gain(true: Tensor, guess: Tensor) -> Tensor:
        import torch

        if pool is None:
            return true.new_full((len(true),), float("nan"), dtype=torch.float64)
        return score(true, guess) - score(true, nearest_of(true, pool, sample))

    return gain


def _score(sample: SampleSpec) -> Score:
    """Return a function that scores samples (N, *shape) against true ones, (N,): in dB, or as a share of parts."""
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
    """Return for each sample (N, *shape) the nearest sample of a pool (M, *shape) that is no copy, (N, *shape).

    Exact copies in the pool are skipped, because a public sample needs no protection. If no other sample is left, the
    result is zeros.
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


def identified(sample: SampleSpec, others: Others) -> Score:
    """Return a function that tests whether reconstructions are closer to their samples than to all other samples.

    The function maps true samples (N, *shape) and reconstructions to (N,) float64, 1 or 0. The other samples include
    the rest of the batch, except copies of the true sample.
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


ABOVE_BASELINE = Metric(
    name="above_baseline",
    description="PSNR minus that of the best baseline without the update (dB); for texts and records, share of tokens "
    "or columns",
    title="above baseline",
    function=above_baseline,
    needs=("sample", "others"),
    higher_is_closer=True,
    modalities=("pixels", "tokens", "records"),
    tables=(),
    outcome=False,
    success="threshold",
)
ABOVE_PUBLIC = Metric(
    name="above_public",
    description="PSNR minus that of the nearest public sample (dB), if any; for texts and records, share of "
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
IDENTIFIED = Metric(
    name="identified",
    description="1 if the reconstruction is closer to its original than to any other sample, 0 otherwise",
    title="identified",
    function=identified,
    needs=("sample", "others"),
    higher_is_closer=True,
    modalities=("pixels", "tokens", "records"),
    format="hit",
    tables=(),
    outcome=False,
    success=None,
)
