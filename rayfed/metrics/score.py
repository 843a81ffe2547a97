"""Score reconstructions: compare each true sample with the reconstruction that matches it best.

Scoring runs in the process that has the true samples, never in that of an attack.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import isnan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayfed.errors import UserError, nearest, noting_errors
from rayfed.metrics.assignment import assign
from rayfed.metrics.guessing import Others
from rayfed.metrics.known import METRICS, metrics_of
from rayfed.metrics.labels import even_guess
from rayfed.metrics.parts import NAMES, parts
from rayfed.samples import Pixels, SampleSpec

_Functions = dict[str, Callable[..., Any]]
_IMAGE = Pixels(1, 1, 1)


@dataclass(frozen=True)
class Scorer:
    """Scorer of reconstructed batches, by named metrics. Raises `UserError` for a metric of other modalities."""

    names: tuple[str, ...]
    lpips_weights: Path | None = None
    """Weights for `Lpips`. Without usable ones its columns stay empty, with one warning."""
    evaluator: Path | None = None
    """File for `NoiseRatio`. Without a usable one its column stays empty, with one warning."""
    recogniser: Path | None = None
    """File for `Identity`. Without a usable one its columns stay empty, with one warning."""
    people: tuple[str, ...] = ()
    """Names of the classes, which are the people in the images."""
    sample: SampleSpec = _IMAGE
    """Description of the samples."""
    others: Others | None = None
    """Samples that no victim holds, for comparison with baselines."""
    failures: dict[str, str] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Reasons for metrics that failed, by name: the first reason over all samples scored so far."""

    def __post_init__(self) -> None:
        known = metrics_of(self.sample.modality)
        for name in self.names:
            if name not in known:
                raise UserError(f"metrics: unknown metric of {self.sample.modality} '{name}': {nearest(name, known)}")

    def unavailable(self) -> list[str]:
        """Return the reasons why columns of metrics stay empty, such as weights that cannot be loaded."""
        return _load(self)[1]

    def score(self, true_images: Tensor, true_labels: Tensor, images: Tensor, labels: Tensor) -> list[dict[str, Any]]:
        """Return one row of metrics for each true image, in order.

        Images are (N, C, H, W) in [0, 1], labels (N,) int64. Reconstructions may be in any order and on any device. If
        a metric raises, its column is empty and the reason is in `failures`. A row contains

        - `sample` and `order`: indices of the true image and of the reconstruction matched to it;
        - `true_label` and `label`, the recovered one. For numbers, `target_error` and `target_baseline`;
        - `label_baseline` (`even_guess`);
        - the named metrics: None if the reconstruction or the metric is not finite, if a network has no weights, and
          for metrics of class labels if labels are numbers;
        - with `others`, the recovered parts (`rayfed.metrics.parts.parts`);
        - with a metric that compares classes, `people`, the number of people that the recogniser distinguishes.
        """
        true_images, images = (self.sample.scored(x) for x in (true_images, images.to(true_images)))
        labels = labels.to(true_labels.device)
        order = assign(true_images, images, self.sample)
        guess = images[order]
        columns = {
            "sample": list(range(len(order))),
            "order": order.tolist(),
            **_stated(true_labels, labels, order, self.others.median if self.others else None),
            **self._guessed_labels(true_labels),
        }
        functions = _functions(self)
        if not _are_classes(true_labels):
            functions = {
                n: function for n, function in functions.items() if METRICS[n].compares in ("samples", "masks")
            }
        if any(METRICS[name].compares == "class" for name in functions):
            columns["people"] = [len(self.people)] * len(order)
        for name in self.names:
            function = functions.get(name)
            match METRICS[name].compares:
                case "labels":
                    columns[name] = self._of_batch(name, function, true_labels, labels)
                case "masks":
                    stated = labels.shape == true_labels.shape and true_labels.ndim == 3
                    columns[name] = self._column(name, function if stated else None, true_labels, labels[order])
                case "class":
                    columns[name] = self._column(name, function, true_labels, guess)
                case "samples":
                    columns[name] = self._column(name, function, true_images, guess)
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        if self.others is None:
            return rows
        told = self._parts(self.others, true_images, guess)
        return [row | found for row, found in zip(rows, told, strict=True)]

    def _parts(self, others: Others, true: Tensor, guess: Tensor) -> list[dict[str, Any]]:
        """Return the columns about parts of the samples, None for reconstructions that are not finite."""
        found: list[dict[str, Any]] = [dict.fromkeys(NAMES) for _ in guess]
        finite = guess.flatten(1).isfinite().all(1)
        if finite.any():
            with noting_errors(partial(self.failures.setdefault, "parts_recovered")):
                told = parts(self.sample, others, true[finite], guess[finite])
                for place, row in zip(finite.nonzero()[:, 0].tolist(), told, strict=True):
                    found[place] = row
        return found

    def _guessed_labels(self, true: Tensor) -> dict[str, list[float | None]]:
        """Return the column about labels guessed without the update, None for numbers and for classes per position."""
        known = even_guess(true, max(len(self.people), int(true.max()) + 1)) if _are_classes(true) else None
        return {"label_baseline": [known] * len(true)}

    def identified(self, others: Tensor, images: Tensor) -> list[float | None]:
        """Return the column `identified` with `others` (N, *shape) as true samples, to estimate chance."""
        function, images = _functions(self).get("identified"), images.to(others)
        return self._column("identified", function, others, images[assign(others, images, self.sample)])

    def _column(
        self, name: str, function: Callable[..., Any] | None, true: Tensor, guess: Tensor
    ) -> list[float | None]:
        """Return a metric of each reconstruction, None if the reconstruction or the metric is not finite."""
        found: list[float | None] = [None] * len(guess)
        if function is None:
            return found
        finite = guess.flatten(1).isfinite().all(1)
        if not finite.any():
            return found
        with noting_errors(partial(self.failures.setdefault, name)):
            values = _numbers(function(true[finite], guess[finite]), int(finite.sum()))
            for place, value in zip(finite.nonzero()[:, 0].tolist(), values, strict=True):
                found[place] = None if isnan(value) else value
        return found

    def _of_batch(
        self, name: str, function: Callable[..., Any] | None, true: Tensor, found: Tensor
    ) -> list[float | None]:
        """Return a metric of a batch's labels, repeated for each of its samples."""
        value = None
        if function is not None:
            with noting_errors(partial(self.failures.setdefault, name)):
                value = float(function(true, found))
        return [None if value is None or isnan(value) else value] * len(true)

    def nothing(self, true_labels: Tensor) -> list[dict[str, Any]]:
        """Return the rows for an attack without a reconstruction: true labels, and None in all other columns."""
        empty = dict.fromkeys(("label", *self.names))
        known = true_labels.tolist() if _are_classes(true_labels) else [None] * len(true_labels)
        return [{"sample": i, "true_label": label} | empty for i, label in enumerate(known)]


def _stated(true: Tensor, found: Tensor, order: Tensor, median: Tensor | None) -> dict[str, list[Any]]:
    """Return the columns about labels: classes (N,), or errors of numbers (N, k). None for labels not recovered.

    Classes per position, (N, ...) int64, have no columns. For numbers, the error of the `median` (k,) of other samples
    is included.
    """
    nothing: list[Any] = [None] * len(true)
    if _are_classes(true):
        named = found.to(true)[order].tolist() if found.shape == true.shape else nothing
        return {"true_label": true.tolist(), "label": named}
    if not true.is_floating_point():
        return {"true_label": nothing, "label": nothing}
    errors = (found[order] - true).abs().mean(1).tolist() if found.shape == true.shape else nothing
    told = [None if error is None or isnan(error) else error for error in errors]
    guessed = nothing if median is None else (median.to(true) - true).abs().mean(1).tolist()
    return {"true_label": nothing, "label": nothing, "target_error": told, "target_baseline": guessed}


def _are_classes(labels: Tensor) -> bool:
    """Return whether each sample has one class, rather than numbers or a class per position."""
    return labels.ndim == 1 and not labels.is_floating_point()


def _numbers(values: Any, count: int) -> list[float]:
    """Return a metric's values as numbers. Raises `ValueError` unless there is one for each sample."""
    found = torch.as_tensor(values, dtype=torch.float64)
    if found.shape != (count,):
        raise ValueError(f"the metric returned shape {tuple(found.shape)} for {count} samples; expected ({count},)")
    return found.tolist()


@lru_cache
def _functions(scorer: Scorer) -> _Functions:
    """Load the metrics' functions once per process. Failures are not repeated."""
    functions, missing = _load(scorer)
    for message in missing:
        warnings.warn(message, stacklevel=3)
    return functions


def _load(scorer: Scorer) -> tuple[_Functions, list[str]]:
    """Load each metric's function. Also returns the reasons for columns that stay empty."""
    functions: _Functions = {}
    reasons: dict[str, str] = {}
    for metric in map(METRICS.__getitem__, scorer.names):
        given = [getattr(scorer, need) for need in metric.needs]
        with noting_errors(partial(reasons.__setitem__, metric.name)):
            functions[metric.name] = metric.function(*given) if given else metric.function
    missing: dict[str, list[str]] = {}
    for name, why in reasons.items():
        missing.setdefault(why, []).append(name)
    return functions, [_stay_empty(names, why) for why, names in missing.items()]


def _stay_empty(columns: list[str], why: str) -> str:
    several = len(columns) > 1
    return f"the column{'s' * several} {', '.join(columns)} stay{'s' * (not several)} empty: {why}"
