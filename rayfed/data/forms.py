"""What a sample means: pixels, the tokens of a text, or the columns of a record.

Whatever it means, a sample travels as an image of bytes, (C, H, W) uint8 and in [0, 1] once it is trained on, so that
partitions, packing, observations and tables know one kind of data. A text of L tokens is (1, 2, L): the high bytes of
its tokens' numbers, and below them the low ones. A record is (1, 1, F): a byte for each continuous column, and for a
categorical one a byte for each category, 255 for the one that it is in and 0 for the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

Kind = Literal["pixels", "tokens", "records"]
KINDS: tuple[Kind, ...] = ("pixels", "tokens", "records")
MOST_TOKENS = 1 << 16
"""What two bytes can number."""
TOLERANCE = 0.319
"""Standard deviations by which a continuous feature may miss and count as found, as in TabLeak (Vero et al. 2023)."""

_UNLESS_SAID: dict[str, tuple[Kind, ...]] = {
    "attacks": ("pixels", "records"),
    "defences": KINDS,
    "poisonings": KINDS,
    "models": ("pixels", "records"),
}


def taken(kind: str, target: Any) -> tuple[Kind, ...]:
    """The forms that a component of a kind of the registry works on: its class variable `takes`, or what most do.

    A user's own module is no component and says nothing: it may take all of them.
    """
    if kind == "models" and not hasattr(target, "build"):
        return KINDS
    found: tuple[Kind, ...] = getattr(target, "takes", _UNLESS_SAID[kind])
    return found


def held(target: Any) -> Kind:
    """The form of what a data set holds, by its class variable `holds`."""
    found: Kind = getattr(target, "holds", "pixels")
    return found


@dataclass(frozen=True)
class Pixels:
    """A sample is a picture."""

    kind: ClassVar[Kind] = "pixels"


@dataclass(frozen=True)
class Tokens:
    """A sample is a text."""

    kind: ClassVar[Kind] = "tokens"

    vocabulary: tuple[str, ...]
    """What each token reads as, its spaces with it; a token's number is its place."""

    def read(self, images: Tensor) -> list[list[str]]:
        """The tokens of texts (N, 1, 2, L) in words; one that no vocabulary has reads as its number."""
        known = len(self.vocabulary)
        return [
            [self.vocabulary[number] if number < known else f"<{number}>" for number in row]
            for row in token_numbers(images).tolist()
        ]

    def found(self, true: Tensor, guess: Tensor) -> Tensor:
        """Which tokens of some texts (N, 1, 2, L) are right and in their places, (N, L) bool."""
        return token_numbers(true) == token_numbers(guess)


@dataclass(frozen=True)
class Column:
    """A column of a record: continuous between its bounds, or one of its categories."""

    name: str
    categories: tuple[str, ...] = ()
    """Empty for a continuous column."""
    low: float = 0.0
    """What level 0 stands for: the smallest training value."""
    high: float = 1.0
    """What level 255 stands for: the largest one."""
    deviation: float = 0.0
    """The standard deviation of the training values."""

    @property
    def width(self) -> int:
        """How many bytes of a record are the column's."""
        return len(self.categories) or 1

    def values(self, part: Tensor) -> Tensor:
        """What the column's part (N, width) of records in [0, 1] says: values (N,), or indices of categories."""
        if self.categories:
            return part.argmax(1)
        return self.low + part[:, 0].double().clamp(0, 1) * (self.high - self.low)

    def found(self, true: Tensor, guess: Tensor) -> Tensor:
        """Which of some records have the right value, (N,) bool: the category, or one within the tolerance."""
        apart = (self.values(true) - self.values(guess)).abs()
        return apart <= (0 if self.categories else TOLERANCE * self.deviation)

    def read(self, part: Tensor) -> list[str]:
        """The values in words."""
        values = self.values(part).tolist()
        return [f"{self.name} {self.categories[v] if self.categories else f'{v:.4g}'}" for v in values]

    def encode(self, values: np.ndarray) -> np.ndarray:
        """(N,) numbers, or indices of categories, as bytes (N, width); values beyond the bounds lie on them."""
        if self.categories:
            hot: np.ndarray = (np.eye(len(self.categories)) * 255).astype(np.uint8)[values]
            return hot
        share = (values - self.low) / (self.high - self.low)
        levels: np.ndarray = np.rint(255 * share.clip(0, 1)).astype(np.uint8)[:, None]
        return levels


@dataclass(frozen=True)
class Records:
    """A sample is a row of a table."""

    kind: ClassVar[Kind] = "records"

    columns: tuple[Column, ...]

    @cached_property
    def _widths(self) -> list[int]:
        return [column.width for column in self.columns]

    def split(self, images: Tensor) -> list[Tensor]:
        """The columns' parts (N, width) of records (N, 1, 1, F)."""
        return list(images.flatten(1).split(self._widths, dim=1))

    def read(self, images: Tensor) -> list[list[str]]:
        """The columns of records (N, 1, 1, F) in words."""
        told = [column.read(part) for column, part in zip(self.columns, self.split(images), strict=True)]
        return [list(row) for row in zip(*told, strict=True)]

    def found(self, true: Tensor, guess: Tensor) -> Tensor:
        """Which columns of some records (N, 1, 1, F) have the right value, (N, columns) bool."""
        parts = zip(self.columns, self.split(true), self.split(guess), strict=True)
        return torch.stack([column.found(a, b) for column, a, b in parts], dim=1)


Form = Pixels | Tokens | Records
PIXELS = Pixels()
"""What samples are where nothing else is said."""


def token_numbers(images: Tensor) -> Tensor:
    """The tokens' numbers of texts (..., 1, 2, L) in [0, 1], (..., L) int64; what is no whole byte is rounded."""
    high, low = (images[..., 0, row, :].float().clamp(0, 1).mul(255).round().long() for row in (0, 1))
    return 256 * high + low


def token_images(numbers: Tensor) -> Tensor:
    """The inverse: numbers (..., L) below 65,536 as texts (..., 1, 2, L) float32 in [0, 1]."""
    return torch.stack([numbers // 256, numbers % 256], dim=-2).unsqueeze(-3).float() / 255
