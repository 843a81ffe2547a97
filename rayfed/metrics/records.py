"""Accuracy of reconstructed records, by column."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rayfed.metrics.base import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from rayfed.samples import Records


def feature_accuracy(sample: Records) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that computes the share of a record's columns that were recovered, within tolerances.

    The function maps true records (N, 1, 1, F) and reconstructions to (N,) float64 in [0, 1]. Continuous columns have
    the tolerance `rayfed.samples.TOLERANCE`.
    """
    return lambda true, guess: sample.found(true, guess).double().mean(1)


FEATURE_ACCURACY = Metric(
    name="feature_accuracy",
    description="share of a record's columns recovered, 0..1; continuous ones within a tolerance",
    title="features found",
    short="features",
    function=feature_accuracy,
    needs=("sample",),
    higher_is_closer=True,
    modalities=("records",),
    format="share",
    tables=("run",),
    default_of=("records",),
    leads=True,
    success="threshold",
    threshold=0.9,
)
