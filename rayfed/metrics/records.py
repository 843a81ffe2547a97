"""How much of a record an attack has found."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rayfed.metrics.base import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from rayfed.data.forms import Records


def feature_accuracy(form: Records) -> Callable[[Tensor, Tensor], Tensor]:
    """The share of columns found, of continuous ones within `rayfed.data.forms.TOLERANCE`.

    What it returns takes records (N, 1, 1, F) twice, the true ones first, to (N,) float64 in [0, 1].
    """
    return lambda true, guess: form.found(true, guess).double().mean(1)


FEATURE_ACCURACY = Metric(
    name="feature_accuracy",
    description="share of a record's columns found, 0..1; continuous ones within bounds",
    title="features found",
    short="features",
    function=feature_accuracy,
    needs=("form",),
    higher_is_closer=True,
    forms=("records",),
    format="share",
    tables=("run",),
    default_of=("records",),
    leads=True,
    success="threshold",
    threshold=0.9,
)
