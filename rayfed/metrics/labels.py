"""Accuracy of recovered labels, and the accuracy of guessing labels without the update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayfed.metrics.base import Metric

if TYPE_CHECKING:
    from torch import Tensor


def label_accuracy(true: Tensor, found: Tensor) -> float:
    """Return the share of a batch's labels that were recovered, in any order: (N,) int64 twice to a number in [0, 1].

    The order is ignored, but not the counts: for [1, 1, 2], the result [2, 1, 0] recovers two thirds.
    """
    classes = int(max(true.max(), found.max())) + 1
    shared = true.bincount(minlength=classes).minimum(found.bincount(minlength=classes))
    return int(shared.sum()) / len(true)


def even_guess(true: Tensor, classes: int) -> float:
    """Return the mean share of a batch's labels (N,) that guessing every class equally often recovers.

    If N is no multiple of the number of classes, the classes with one more guess are random.
    """
    each, more = divmod(len(true), classes)
    counts = true.bincount(minlength=classes)
    shared = counts.clamp(max=each).sum() + more / classes * (counts > each).sum()
    return float(shared) / len(true)


LABEL_ACCURACY = Metric(
    name="label_accuracy",
    description="share of the batch's labels recovered (multiset), 0..1; one value per batch",
    title="labels recovered",
    short="labels",
    function=label_accuracy,
    compares="labels",
    higher_is_closer=True,
    modalities=("pixels", "tokens", "records"),
    format="share",
    tables=("settings", "run"),
    default_of=("pixels", "tokens", "records"),
    success=None,
)
