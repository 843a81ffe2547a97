"""The score of a reconstruction: every image against the truth that it was matched to.

Scoring happens where the truth is, never where the attack is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from torch import Tensor

from rayfed.data.forms import PIXELS, Form, Kind, Records
from rayfed.errors import UserError, nearest
from rayfed.metrics.assignment import assign
from rayfed.metrics.bayesian import knowledge_increment, posterior_knowledge
from rayfed.metrics.identity import Identity
from rayfed.metrics.images import mse, psnr, ssim
from rayfed.metrics.labels import label_accuracy
from rayfed.metrics.lpips import Lpips, LpipsUnavailable, Net
from rayfed.metrics.noise import NoiseRatio
from rayfed.metrics.texts import ROUGES, rouge, token_accuracy
from rayfed.metrics.top import TOP
from rayfed.models.pretrained import NetworkUnavailable

Metric = Callable[[Tensor, Tensor], Tensor]

_PIXELS: dict[str, Metric] = {
    "mse": mse,
    "psnr": psnr,
    "ssim": ssim,
    "bp_ki": knowledge_increment,
    "bp_ki_posterior": posterior_knowledge,
}
_LPIPS: dict[str, Net] = {"lpips_alex": "alex", "lpips_vgg": "vgg"}
_TEXTS: dict[str, Metric] = {"token_accuracy": token_accuracy} | {name: rouge(name) for name in ROUGES}
_MEASURED: dict[Kind, tuple[str, ...]] = {
    "pixels": (*_PIXELS, *_LPIPS, "noise_ratio", *TOP, "label_accuracy"),
    "tokens": (*_TEXTS, "label_accuracy"),
    "records": ("feature_accuracy", "mse", "psnr", "label_accuracy"),
}


def metrics_of(kind: Kind) -> tuple[str, ...]:
    """The metrics that mean something of samples of a form."""
    return _MEASURED[kind]


@dataclass(frozen=True)
class Scorer:
    """Scores reconstructed batches by the named metrics; raises `UserError` for one that its form does not have."""

    names: tuple[str, ...]
    lpips_weights: str | None = None
    """As `Lpips` takes it. Without usable weights the LPIPS columns stay empty, with one warning."""
    evaluator: str | None = None
    """As `NoiseRatio` takes it; what is said of LPIPS holds for it, too."""
    recogniser: str | None = None
    """As `Identity` takes it; likewise."""
    people: tuple[str, ...] = ()
    """The names of the classes, which are whom the images show."""
    form: Form = PIXELS
    """What the images mean."""

    def __post_init__(self) -> None:
        known = metrics_of(self.form.kind)
        for name in self.names:
            if name not in known:
                raise UserError(f"metrics: unknown metric of {self.form.kind} '{name}': {nearest(name, known)}")

    def unavailable(self) -> list[str]:
        """For each metric whose weights this machine cannot load: why its column will stay empty."""
        messages = []
        if self._top:
            try:
                Identity(self.recogniser, self.people)
            except NetworkUnavailable as error:
                messages.append(_stay_empty(self._top, error))
        for name in self.names:
            try:
                if name in _LPIPS:
                    Lpips(_LPIPS[name], self.lpips_weights)
                elif name == "noise_ratio":
                    NoiseRatio(self.evaluator)
            except (LpipsUnavailable, NetworkUnavailable) as error:
                messages.append(f"the column {name} stays empty: {error}")
        return messages

    def score(self, true_images: Tensor, true_labels: Tensor, images: Tensor, labels: Tensor) -> list[dict[str, Any]]:
        """One row for each true image, in order.

        Images are (N, C, H, W) in [0, 1], labels (N,) int64; the reconstruction may be in any order and on any
        device. A row holds `sample` (index of the true image), `order` (index of the reconstruction matched to it),
        `true_label`, `label` (the one found with that reconstruction) and the named metrics: None where the
        reconstruction is not finite, or where a metric's network has no weights. With one of `TOP` it holds `people`,
        too, among how many the recogniser chose.
        """
        images, labels = images.to(true_images), labels.to(true_labels)
        order = assign(true_images, images, self.form.kind)
        guess = images[order]
        columns = {
            "sample": list(range(len(order))),
            "order": order.tolist(),
            "true_label": true_labels.tolist(),
            "label": labels[order].tolist(),
        }
        identity = _identity(self.recogniser, self.people, self._top) if self._top else None
        if identity:
            columns["people"] = [len(self.people)] * len(order)
        for name in self.names:
            if name == "label_accuracy":
                columns[name] = [label_accuracy(true_labels, labels)] * len(order)
            elif name in TOP:
                columns[name] = _column(partial(identity.within, TOP[name]) if identity else None, true_labels, guess)
            else:
                columns[name] = _column(self._metric(name), true_images, guess)
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def nothing(self, true_labels: Tensor) -> list[dict[str, Any]]:
        """The rows of an attack that could not strike: the truth, and None for all that was not found."""
        empty = dict.fromkeys(("label", *self.names))
        return [{"sample": i, "true_label": label} | empty for i, label in enumerate(true_labels.tolist())]

    @property
    def _top(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name in TOP)

    def _metric(self, name: str) -> Metric | None:
        if name == "noise_ratio":
            return _noise_ratio(self.evaluator)
        if name == "feature_accuracy":
            assert isinstance(self.form, Records)
            form = self.form
            return lambda true, guess: form.found(true, guess).double().mean(1)
        known = _PIXELS | _TEXTS
        return known[name] if name in known else _lpips(_LPIPS[name], self.lpips_weights)


def _column(metric: Metric | None, true: Tensor, guess: Tensor) -> list[float | None]:
    finite = guess.flatten(1).isfinite().all(1)
    if metric is None or not finite.any():
        return [None] * len(guess)
    values = iter(metric(true[finite], guess[finite]).tolist())
    return [next(values) if usable else None for usable in finite.tolist()]


@lru_cache
def _identity(recogniser: str | None, people: tuple[str, ...], top: tuple[str, ...]) -> Identity | None:
    """As `_lpips`."""
    try:
        return Identity(recogniser, people)
    except NetworkUnavailable as error:
        warnings.warn(_stay_empty(top, error), stacklevel=2)
        return None


def _stay_empty(columns: tuple[str, ...], error: Exception) -> str:
    return f"the column{'s' * (len(columns) > 1)} {', '.join(columns)} stay{'s' * (len(columns) == 1)} empty: {error}"


@lru_cache
def _lpips(net: Net, weights: str | None) -> Lpips | None:
    """One network a process; what fails once is not tried, nor warned about, again."""
    try:
        return Lpips(net, weights)
    except LpipsUnavailable as error:
        warnings.warn(f"the column lpips_{net} stays empty: {error}", stacklevel=2)
        return None


@lru_cache
def _noise_ratio(evaluator: str | None) -> NoiseRatio | None:
    """As `_lpips`."""
    try:
        return NoiseRatio(evaluator)
    except NetworkUnavailable as error:
        warnings.warn(f"the column noise_ratio stays empty: {error}", stacklevel=2)
        return None
