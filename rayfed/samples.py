"""Kinds of samples (images, texts, records): their storage, shapes, random draws and descriptions.

A data set keeps images and records in bytes, and texts in the numbers of their tokens. A `SampleSpec` says what models
take in their place; whatever works on samples of more than one modality asks it.
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
"""Largest vocabulary: what two bytes can number, by which random tokens are drawn."""
TOLERANCE = 0.319
"""Standard deviations by which a continuous feature may miss and count as found, as in TabLeak (Vero et al. 2023)."""

_UNLESS_SAID: dict[str, tuple[Modality, ...]] = {
    "attacks": ("pixels", "records"),
    "defences": MODALITIES,
    "poisonings": MODALITIES,
    "models": ("pixels", "records"),
}


def taken(kind: str, target: Any) -> tuple[Modality, ...]:
    """Return the modalities that a component works on: its class variable `takes`, or its kind's default.

    A user's own module is no component and says nothing: it may take all of them.
    """
    if kind == "models" and not is_dataclass(target):
        return MODALITIES
    found: tuple[Modality, ...] = getattr(target, "takes", _UNLESS_SAID[kind])
    return found


def held(target: Any) -> Modality:
    """Return the modality of a data set's samples: its class variable `holds`."""
    found: Modality = getattr(target, "holds", "pixels")
    return found


def in_unit_range(levels: Tensor) -> Tensor:
    """Return stored values of 8 or 16 bits as floats in [0, 1]."""
    return levels.float().div_(torch.iinfo(levels.dtype).max)


class SampleSpec(ABC):
    """Base of the descriptions of samples as models take them: floats in [0, 1] unless a modality says otherwise."""

    modality: ClassVar[Modality]
    noun: ClassVar[str]
    """Name of samples in messages, plural."""
    stored: ClassVar[tuple[type[np.generic], ...]] = (np.uint8,)
    """Types of the numbers that a data set may keep."""
    axes: ClassVar[tuple[str, ...]] = ("C", "H", "W")
    """Names of a sample's dimensions."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""

    @property
    @abstractmethod
    def extent(self) -> str:
        """Size of a sample, in words."""

    @property
    def remedy(self) -> str:
        """Advice to a user whose model does not take these samples."""
        return "choose another model, or other data"

    @property
    def dtype(self) -> torch.dtype:
        """Type of inputs."""
        return torch.float32

    @property
    def largest(self) -> int:
        """Largest number in an input; the smallest is 0."""
        return 1

    def tensor(self, stored: np.ndarray, device: torch.device | None = None) -> Tensor:
        """Return inputs (N, *shape) from the numbers that a data set stores."""
        return in_unit_range(torch.from_numpy(stored).to(device))

    def blank(self, count: int) -> Tensor:
        """Return inputs (count, *shape) of zeros."""
        return torch.zeros(count, *self.shape, dtype=self.dtype)

    def trial(self) -> Tensor:
        """Return two inputs to try a model with, one of the smallest and one of the largest numbers: (2, *shape)."""
        return torch.stack([self.blank(1)[0], torch.full(self.shape, self.largest, dtype=self.dtype)])

    def noise(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw random inputs (count, *shape)."""
        return torch.rand(count, *self.shape, generator=generator)

    def scored(self, inputs: Tensor) -> Tensor:
        """Return samples in the form that metrics compare."""
        return inputs

    def published(self) -> SampleSpec:
        """Return the description that attackers get, without what only the holder of the samples knows."""
        return self

    def describe(self, trained: int, tested: int) -> str:
        """Describe a data set with so many training and test samples, in words."""
        return f"{trained} training {self.noun} of {self.extent} and {tested} test {self.noun}"


@dataclass(frozen=True)
class Pixels(SampleSpec):
    """Images, (C, H, W) in [0, 1].

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
        """Shape of an image, (C, H, W)."""
        return self.channels, self.height, self.width

    @property
    def extent(self) -> str:
        """Channels, height and width of an image, in words."""
        return "x".join(map(str, self.shape))

    @property
    def remedy(self) -> str:
        """Advice to a user whose model does not take these images: they can be resized."""
        return "set `data.size` to what it takes, or choose another model, or data of other channels"

    def describe(self, trained: int, tested: int) -> str:
        """Describe a data set with so many training and test images, in words."""
        return f"{trained} training and {tested} test {self.noun} of {self.extent}"


@dataclass(frozen=True)
class Tokens(SampleSpec):
    """Texts, each the numbers (L,) int64 of its tokens."""

    modality: ClassVar[Modality] = "tokens"
    noun: ClassVar[str] = "texts"
    stored: ClassVar[tuple[type[np.generic], ...]] = (np.int64,)
    axes: ClassVar[tuple[str, ...]] = ("L",)

    vocabulary: tuple[str, ...]
    """Text of each token, its spaces with it; a token's number is its place."""
    length: int
    pad: int | None = None
    """Number of the token that fills up texts that are shorter; None where none is."""
    mask: int | None = None
    """Number of the token that stands for one which a model is not shown; None where there is none."""
    special: tuple[int, ...] = ()
    """Numbers of the tokens that are no part of a text, such as marks at its ends."""

    @property
    def unmasked(self) -> tuple[int, ...]:
        """Numbers of the tokens that are never masked: special ones, and what fills texts up."""
        return self.special if self.pad is None else (*self.special, self.pad)

    @property
    def shape(self) -> tuple[int]:
        """Shape of a text, (L,): a number for each token."""
        return (self.length,)

    @property
    def extent(self) -> str:
        """Length of a text, in words."""
        return f"{self.length} tokens"

    @property
    def remedy(self) -> str:
        """Advice to a user whose model does not take these texts: its table of tokens may be too small."""
        return f"set its vocabulary to {len(self.vocabulary)} or more, or choose another model"

    @property
    def dtype(self) -> torch.dtype:
        """Type of token numbers, int64, as embedding layers take them."""
        return torch.int64

    @property
    def largest(self) -> int:
        """Number of the last token."""
        return len(self.vocabulary) - 1

    def tensor(self, stored: np.ndarray, device: torch.device | None = None) -> Tensor:
        """Return token numbers (N, L) as models take them."""
        return torch.from_numpy(stored).to(device)

    def noise(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw random texts (count, L), each token of two random bytes."""
        high, low = torch.rand(count, 2, self.length, generator=generator).mul(255).round().long().unbind(1)
        return (256 * high + low) % len(self.vocabulary)

    def scored(self, inputs: Tensor) -> Tensor:
        """Return texts (N, L) with -1 for padding, which no metric counts."""
        return inputs if self.pad is None else inputs.masked_fill(inputs == self.pad, -1)

    def read(self, inputs: Tensor) -> list[list[str]]:
        """Return the texts (N, L) in words; a token outside the vocabulary appears as its number."""
        known = len(self.vocabulary)
        return [[self.vocabulary[n] if 0 <= n < known else f"<{n}>" for n in row] for row in inputs.tolist()]

    def found(self, true: Tensor, guess: Tensor) -> Tensor:
        """Return which tokens of texts (N, L) are right and in their places, (N, L) bool."""
        return true == guess


@dataclass(frozen=True)
class Column:
    """One column of records: continuous between bounds, or categorical."""

    name: str
    categories: tuple[str, ...] = ()
    """Names of the categories; empty for a continuous column."""
    low: float = 0.0
    """Value of level 0: the smallest training value."""
    high: float = 1.0
    """Value of level 255: the largest training value."""
    deviation: float = 0.0
    """Standard deviation of the training values."""

    @property
    def width(self) -> int:
        """Number of the column's bytes in a record."""
        return len(self.categories) or 1

    def values(self, part: Tensor) -> Tensor:
        """Return the values (N,), or indices of categories, of the column's part (N, width) of records in [0, 1]."""
        if self.categories:
            return part.argmax(1)
        return self.low + part[:, 0].double().clamp(0, 1) * (self.high - self.low)

    def found(self, true: Tensor, guess: Tensor) -> Tensor:
        """Return which records have the right value, (N,) bool, by the column's parts (N, width) of two sets."""
        return self.near(self.values(true), self.values(guess))

    def near(self, true: Tensor, guess: Tensor) -> Tensor:
        """Return which `values` (N,) are right, (N,) bool: the category, or a value within the `tolerance`."""
        return (true - guess).abs() <= self.tolerance

    @property
    def tolerance(self) -> float:
        """By how much a value may miss and count as found (`TOLERANCE`); 0 for categories."""
        return 0.0 if self.categories else TOLERANCE * self.deviation

    def read(self, part: Tensor) -> list[str]:
        """Return the values of the column's part (N, width) of records in words."""
        values = self.values(part).tolist()
        return [f"{self.name} {self.categories[v] if self.categories else f'{v:.4g}'}" for v in values]

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Return numbers (N,), or indices of categories, as bytes (N, width); values are clipped to the bounds."""
        if self.categories:
            hot: np.ndarray = (np.eye(len(self.categories)) * 255).astype(np.uint8)[values]
            return hot
        share = (values - self.low) / (self.high - self.low)
        levels: np.ndarray = np.rint(255 * share.clip(0, 1)).astype(np.uint8)[:, None]
        return levels


@dataclass(frozen=True)
class Records(SampleSpec):
    """Records: rows of a table, (1, 1, F) in [0, 1].

    A number for each continuous column, and for a categorical one a number for each category, 1 for the one that it is
    in and 0 for the others. The shape is that of a narrow image, as attacks that match gradients treat both alike.
    """

    modality: ClassVar[Modality] = "records"
    noun: ClassVar[str] = "records"

    columns: tuple[Column, ...]

    @cached_property
    def _widths(self) -> list[int]:
        return [column.width for column in self.columns]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a record, (1, 1, F): one channel, one row."""
        return 1, 1, sum(self._widths)

    @property
    def extent(self) -> str:
        """Number of columns, in words."""
        inputs = self.shape[-1]
        coded = f" ({inputs} inputs: one for each category)" if inputs != len(self.columns) else ""
        return f"{len(self.columns)} column{'s' * (len(self.columns) != 1)}{coded}"

    def published(self) -> Records:
        """Return the columns without statistics of the training values: bounds and deviations."""
        return Records(tuple(Column(column.name, column.categories) for column in self.columns))

    def split(self, inputs: Tensor) -> list[Tensor]:
        """Return the columns' parts (N, width) of records (N, 1, 1, F)."""
        return list(inputs.flatten(1).split(self._widths, dim=1))

    def read(self, inputs: Tensor) -> list[list[str]]:
        """Return the columns of records (N, 1, 1, F) in words."""
        told = [column.read(part) for column, part in zip(self.columns, self.split(inputs), strict=True)]
        return [list(row) for row in zip(*told, strict=True)]

    def found(self, true: Tensor, guess: Tensor) -> Tensor:
        """Return which columns of records (N, 1, 1, F) have the right value, (N, columns) bool."""
        parts = zip(self.columns, self.split(true), self.split(guess), strict=True)
        return torch.stack([column.found(a, b) for column, a, b in parts], dim=1)
