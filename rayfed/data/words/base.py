"""Base classes of the formats of word images: pictures, word positions and spelling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from rayfed.core.files import local_path
from rayfed.errors import DataError
from rayfed.registry import component


@dataclass(frozen=True)
class Word:
    """Word in a picture, with the word's spelling and position."""

    text: str
    image: Path | Image.Image
    box: tuple[float, float, float, float] | None = None
    """Left, top, right and bottom of the word in the picture, in pixels. Default: the whole picture."""

    def pixels(self, height: int, width: int, proportional: bool = False) -> np.ndarray:
        """Return the image of the word, (1, height, width) uint8, grey, resized to this height and width.

        With `proportional`, a word keeps its proportions if it is narrower than the width, and the columns to its right
        have the mean grey of its last column. Raises `DataError` for a picture that cannot be decoded, or a box outside
        the picture.
        """
        try:
            with Image.open(self.image) if isinstance(self.image, Path) else self.image as picture:
                cut = picture.crop(_within(self.box, picture.size)) if self.box else picture
                own = min(width, max(1, round(cut.width * height / cut.height))) if proportional else width
                word = np.asarray(cut.convert("L").resize((own, height), Image.Resampling.BILINEAR))
                empty = np.full((height, width - own), round(word[:, -1].mean()), np.uint8)
                return np.concatenate([word, empty], axis=1)[None]
        except Exception as error:  # Pillow's decoders can raise any exception for broken bytes
            raise DataError(
                f"{self.image} with the word '{self.text}' cannot be read: {error}; download the data set again"
            ) from error


def _within(box: tuple[float, float, float, float], size: tuple[int, int]) -> tuple[int, int, int, int]:
    left, top, right, bottom = box
    inside = max(0, int(left)), max(0, int(top)), min(size[0], round(right)), min(size[1], round(bottom))
    if inside[2] <= inside[0] or inside[3] <= inside[1]:
        raise ValueError(f"the word's box {box} is outside the picture of {size[0]}x{size[1]} pixels")
    return inside


@component
class WordReader:
    """Base of all formats of word images."""

    def read(self) -> Iterable[Word]:
        """Read all words in a fixed order; raise `DataError` for missing or broken files."""
        raise NotImplementedError


@component
class LocalReader(WordReader):
    """Base of the formats of word images in a folder."""

    root: Path
    """Folder of the unpacked data set; `~` and environment variables are expanded. Nothing is downloaded."""

    def file(self, name: str) -> Path:
        """Return the path of a file in the folder `root`; raise `DataError` if the file is missing."""
        path = local_path(self.root) / name
        if not path.exists():
            raise DataError(
                f"{path} is missing: set `root` to the folder of the unpacked data set {type(self).__name__}"
            )
        return path


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the non-empty lines of a text file with their line numbers, from 1."""
    for number, line in enumerate(path.read_text(encoding="utf-8-sig", errors="replace").splitlines(), start=1):
        if line.strip():
            yield number, line.strip()
