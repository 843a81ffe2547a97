"""Descriptions of the kinds of samples (images, texts, records): shapes, storage, random samples, text for users.

A data set stores images and records as bytes, and texts as token numbers. A `SampleSpec` describes the inputs that
models take. Code for more than one modality uses it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

Modality = Literal["pixels", "tokens", "records"]
MODALITIES: tuple[Modality, ...] = ("pixels", "tokens", "records")
MOST_TOKENS = 1 << 16
"""Maximum size of a vocabulary: random tokens are sampled with two bytes."""
TOLERANCE = 0.319
"""Error, in standard deviations, within which a continuous value counts as recovered (TabLeak, Vero et al. 2023)."""

_UNLESS_SAID: dict[str, tuple[Modality, ...]] = {
    "attacks": ("pixels", "records"),
    "defences": MODALITIES,
    "poisonings": MODALITIES,
    "models": ("pixels", "records"),
}


def supported_modalities(kind: str, target: Any) -> tuple[Modality, ...]:
    """Return the modalities that a component supports: its class variable `takes`, or the default of its kind.

    A user's model without `takes` may work on all modalities.
    """
    if kind == "models" and not is_dataclass(target):
        return MODALITIES
    found: tuple[Modality, ...] = getattr(target, "takes", _UNLESS_SAID[kind])
    return found


def dataset_modality(target: Any) -> Modality:
    """Return the modality (pixels, tokens or records) of a data set's samples: its class variable `holds`."""
    found: Modality = getattr(target, "holds", "pixels")
    return found


def in_unit_range(levels: Tensor) -> Tensor:
    """Convert stored integers of 8 or 16 bits to floats in [0, 1]."""
    return levels.float().div_(torch.iinfo(levels.dtype).max)


class SampleSpec(ABC):
    """Base class of the descriptions of model inputs, which are floats in [0, 1] by default."""

    modality: ClassVar[Modality]
    noun: ClassVar[str]
    """Name of samples in messages, in the plural."""
    stored: ClassVar[tuple[type[np.generic], ...]] = (np.uint8,)
    """Number types in which a data set may store samples."""
    axes: ClassVar[tuple[str, ...]] = ("C", "H", "W")
    """Names of a sample's dimensions."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one sample as the model receives it."""

    @property
    @abstractmethod
    def extent(self) -> str:
        """Return the size of one sample, in words, such as its number of pixels or tokens."""

    @property
    def remedy(self) -> str:
        """Return advice for a user whose model does not take these samples."""
        return "choose another model, or other data"

    @property
    def dtype(self) -> torch.dtype:
        """Return the number type (dtype) of the model's inputs."""
        return torch.float32

    @property
    def largest(self) -> int:
        """Return the maximum value that a model input can contain. The minimum is 0."""
        return 1

    def tensor(self, stored: np.ndarray, device: torch.device | None = None) -> Tensor:
        """Convert stored samples of a data set to model inputs (N, *shape)."""
        return in_unit_range(torch.from_numpy(stored).to(device))

    def blank(self, count: int) -> Tensor:
        """Return `count` model inputs of zeros, (count, *shape)."""
        return torch.zeros(count, *self.shape, dtype=self.dtype)

    def trial(self) -> Tensor:
        """Return two inputs to test a model with, (2, *shape): one with minimum and one with maximum values."""
        return torch.stack([self.blank(1)[0], torch.full(self.shape, self.largest, dtype=self.dtype)])

    def noise(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Sample `count` random model inputs, (count, *shape)."""
        return torch.rand(count, *self.shape, generator=generator)

    def scored(self, inputs: Tensor) -> Tensor:
        """Convert model inputs to the form in which metrics compare true and reconstructed samples."""
        return inputs

    def published(self) -> SampleSpec:
        """Return a description of the samples for attackers, without private information."""
        return self

    def describe(self, trained: int, tested: int) -> str:
        """Describe, in words, a data set with the given numbers of training and test samples."""
        return f"{trained} training {self.noun} of {self.extent} and {tested} test {self.noun}"


@dataclass(frozen=True)
class Pixels(SampleSpec):
    """Description of images, (C, H, W) in [0, 1].

    >>> from rayfed.samples import Pixels
    >>> Pixels(channels=3, height=32, width=32).shape
    (3, 32, 32)
    """

    modality: ClassVar[Modality] = "pixels"
    noun: ClassVar[str] = "images"
    stored: ClassVar[tuple[type[np.generic], ...]] = (np.uint8, np.uint16)

    channels: int
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape (C, H, W) of an image."""
        return self.channels, self.height, self.width

    @property
    def extent(self) -> str:
        """Describe, in words, the channels, height and width of an image."""
        return "x".join(map(str, self.shape))

    @property
    def remedy(self) -> str:
        """Return advice for a user whose model does not take these images."""
        return "set `data.size` to the model's image size, or choose another model, or images with other channels"

    def describe(self, trained: int, tested: int) -> str:
        """Describe, in words, a data set with the given numbers of training and test images."""
        return f"{trained} training and {tested} test {self.noun} of {self.extent}"


@dataclass(frozen=True)
class Tokens(SampleSpec):
    """Description of texts, each a row of token numbers (L,) int64."""

    modality: ClassVar[Modality] = "tokens"
    noun: ClassVar[str] = "texts"
    stored: ClassVar[tuple[type[np.generic], ...]] = (np.int64,)
    axes: ClassVar[tuple[str, ...]] = ("L",)

    vocabulary: tuple[str, ...]
    """Text of each token, including spaces. A token's number is its index."""
    length: int
    pad: int | None = None
    """Number of the padding token. None: texts are not padded."""
    mask: int | None = None
    """Number of the mask token. None: there is none."""
    special: tuple[int, ...] = ()
    """Numbers of special tokens, such as marks at the ends of a text."""

    @property
    def unmasked(self) -> tuple[int, ...]:
        """Return the token numbers that are never masked: special tokens and padding."""
        return self.special if self.pad is None else (*self.special, self.pad)

    @property
    def shape(self) -> tuple[int]:
        """Return the shape of a text, (L,): one number per token."""
        return (self.length,)

    @property
    def extent(self) -> str:
        """Describe, in words, the length of a text in tokens."""
        return f"{self.length} tokens"

    @property
    def remedy(self) -> str:
        """Return advice for a user whose model does not take these texts, for example with too small a vocabulary."""
        return f"set its vocabulary to {len(self.vocabulary)} or more, or choose another model"

    @property
    def dtype(self) -> torch.dtype:
        """Return the number type of tokens: int64, as embedding layers expect."""
        return torch.int64

    @property
    def largest(self) -> int:
        """Return the largest token number of the vocabulary."""
        return len(self.vocabulary) - 1

    def tensor(self, stored: np.ndarray, device: torch.device | None = None) -> Tensor:
        """Convert stored texts to token numbers (N, L)."""
        return torch.from_numpy(stored).to(device)

    def noise(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Sample `count` random texts (count, L), with two random bytes per token."""
        high, low = torch.rand(count, 2, self.length, generator=generator).mul(255).round().long().unbind(1)
        return (256 * high + low) % len(self.vocabulary)

    def scored(self, inputs: Tensor) -> Tensor:
        """Return texts (N, L) with padding replaced by -1, which metrics ignore."""
        return inputs if self.pad is None else inputs.masked_fill(inputs == self.pad, -1)

    def read(self, inputs: Tensor) -> list[list[str]]:
        """Decode texts (N, L) to lists of tokens. A token outside the vocabulary is shown as its number."""
        known = len(self.vocabulary)
        return [[self.vocabulary[n] if 0 <= n < known else f"<{n}>" for n in row] for row in inputs.tolist()]

    def found(self, true: Tensor, guess: Tensor) -> Tensor:
        """Return whether true and reconstructed texts (N, L) have equal tokens at each position, (N, L) bool."""
        return true == guess


@dataclass(frozen=True)
class Column:
    """Description of one column of records: categorical, or continuous between bounds."""

    name: str
    categories: tuple[str, ...] = ()
    """Names of the categories. Empty for a continuous column."""
    low: float = 0.0
    """Value of level 0: the minimum training value."""
    high: float = 1.0
    """Value of level 255: the maximum training value."""
    deviation: float = 0.0
    """Standard deviation of the training values."""

    @property
    def width(self) -> int:
        """Return the column's number of values in a record: one per category, or a single one if continuous."""
        return len(self.categories) or 1

    def values(self, part: Tensor) -> Tensor:
        """Decode the column's part (N, width) of records in [0, 1] to values or category indices (N,)."""
        if self.categories:
            return part.argmax(1)
        return self.low + part[:, 0].double().clamp(0, 1) * (self.high - self.low)

    def found(self, true: Tensor, guess: Tensor) -> Tensor:
        """Return whether each record's value is correct, (N,) bool, from the column's parts (N, width) of records."""
        return self.near(self.values(true), self.values(guess))

    def near(self, true: Tensor, guess: Tensor) -> Tensor:
        """Return whether each value (N,) is correct (the true category, or within the `tolerance`), (N,) bool."""
        return (true - guess).abs() <= self.tolerance

    @property
    def tolerance(self) -> float:
        """Return the maximum error of a value that counts as recovered (`TOLERANCE`); 0 for categories."""
        return 0.0 if self.categories else TOLERANCE * self.deviation

    def read(self, part: Tensor) -> list[str]:
        """Describe the column's values in words, one text per record, from the column's parts (N, width) of records."""
        values = self.values(part).tolist()
        return [f"{self.name} {self.categories[v] if self.categories else f'{v:.4g}'}" for v in values]

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Encode values or category indices (N,) as bytes (N, width). Clip values to the column's bounds."""
        if self.categories:
            hot: np.ndarray = (np.eye(len(self.categories)) * 255).astype(np.uint8)[values]
            return hot
        share = (values - self.low) / (self.high - self.low)
        levels: np.ndarray = np.rint(255 * share.clip(0, 1)).astype(np.uint8)[:, None]
        return levels


@dataclass(frozen=True)
class Records(SampleSpec):
    """Description of records, which are rows of a table, (1, 1, F) in [0, 1].

    A continuous column has one number, and a categorical column is one-hot. Records have the shape of an image with one
    row, so that gradient-matching attacks work on both.
    """

    modality: ClassVar[Modality] = "records"
    noun: ClassVar[str] = "records"

    columns: tuple[Column, ...]

    @cached_property
    def _widths(self) -> list[int]:
        return [column.width for column in self.columns]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of a record, (1, 1, F): one channel, one row."""
        return 1, 1, sum(self._widths)

    @property
    def extent(self) -> str:
        """Return the number of columns of a record, in words."""
        inputs = self.shape[-1]
        coded = f" ({inputs} inputs: one per category)" if inputs != len(self.columns) else ""
        return f"{len(self.columns)} column{'s' * (len(self.columns) != 1)}{coded}"

    def published(self) -> Records:
        """Return a description for attackers, without statistics of the training values (bounds and deviations)."""
        return Records(tuple(Column(column.name, column.categories) for column in self.columns))

    def split(self, inputs: Tensor) -> list[Tensor]:
        """Split records (N, 1, 1, F) into one part (N, width) per column."""
        return list(inputs.flatten(1).split(self._widths, dim=1))

    def read(self, inputs: Tensor) -> list[list[str]]:
        """Describe records (N, 1, 1, F) in words, with one text per column and record."""
        told = [column.read(part) for column, part in zip(self.columns, self.split(inputs), strict=True)]
        return [list(row) for row in zip(*told, strict=True)]

    def found(self, true: Tensor, guess: Tensor) -> Tensor:
        """Return whether each column of records (N, 1, 1, F) has the correct value, (N, columns) bool."""
        parts = zip(self.columns, self.split(true), self.split(guess), strict=True)
        return torch.stack([column.found(a, b) for column, a, b in parts], dim=1)
