"""Rendered word images, with a font and background that may differ between clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from pydantic import Field
from scipy.ndimage import gaussian_filter

from rayfed.core.files import local_path
from rayfed.data.words.base import Word, WordReader
from rayfed.errors import DataError
from rayfed.registry import component

_HEIGHT, _MARGIN = 32, 4


@component
class Rendered(WordReader):
    """Rendered words: random letters in one font, with random contrast from dark on light to light on dark."""

    format: Literal["rendered"]
    font: str | Path = "DejaVuSans"
    """Font of matplotlib (DejaVuSerif-Italic, STIXGeneral, cmr10, ...), or path of a .ttf file."""
    background: Literal["plain", "gradient", "noise"] = "plain"
    """Background of a word: a constant grey, a gradient, or smoothed noise."""
    samples: Annotated[int, Field(ge=1)] = 1000
    """Number of words."""
    letters: Annotated[str, Field(min_length=1)] = "0123456789abcdefghijklmnopqrstuvwxyz"
    """Letters of words, sampled uniformly."""
    length: Annotated[int, Field(ge=1)] = 4
    """Number of letters per word."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Random seed; use different seeds for training and test."""

    def read(self) -> Iterator[Word]:
        """Yield the words; each word is rendered when requested."""
        font, draw = self._font(), np.random.default_rng(self.seed)
        for _ in range(self.samples):
            text = "".join(draw.choice(list(self.letters), self.length))
            yield Word(text, self._drawn(text, font, draw))

    def _font(self) -> ImageFont.FreeTypeFont:
        own = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{self.font}.ttf"
        try:
            return ImageFont.truetype(str(own if own.exists() else local_path(self.font)), 22)
        except OSError as error:
            known = ", ".join(sorted(path.stem for path in own.parent.glob("*.ttf")))
            raise DataError(f"font '{self.font}' is not a .ttf file; give a .ttf file or one of {known}") from error

    def _drawn(self, text: str, font: ImageFont.FreeTypeFont, draw: np.random.Generator) -> Image.Image:
        left, top, right, bottom = font.getbbox(text)
        width = round(right - left) + 2 * _MARGIN
        paper, ink = draw.choice([(200, 30), (60, 230)]) + draw.integers(-25, 26, 2)
        picture = Image.fromarray(self._paper(int(paper), width, draw))
        shift = draw.integers(-2, 3, 2)
        at = _MARGIN - left + int(shift[0]), (_HEIGHT - (top + bottom)) / 2 + int(shift[1])
        ImageDraw.Draw(picture).text(at, text, fill=int(ink), font=font)
        return picture

    def _paper(self, grey: int, width: int, draw: np.random.Generator) -> np.ndarray:
        """Return a random background (32, width) uint8."""
        change = np.zeros((_HEIGHT, width))
        if self.background == "gradient":
            change = np.broadcast_to(np.linspace(-40, 40, width) * draw.choice([-1, 1]), change.shape)
        elif self.background == "noise":
            blotches = gaussian_filter(draw.standard_normal(change.shape), 3)
            change = 20 * blotches / blotches.std()
        return np.clip(grey + change, 0, 255).astype(np.uint8)
