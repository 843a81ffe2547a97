"""Reader of SCUT-FORU (Flickr OCR universal database).

Source: Zhang et al. 2016, "Character proposal network for robust text extraction".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from rayfed.data.files import ENDINGS
from rayfed.data.words.base import LocalReader, Word, read_lines
from rayfed.errors import DataError
from rayfed.registry import component


@component
class ScutForu(LocalReader):
    """Words of SCUT-FORU: one text file per picture, with the same name and a line `x, y, w, h, label` per word."""

    format: Literal["scut_foru"]
    images: str = "word_img"
    """Folder of the pictures in `root`."""
    annotations: str = "word_annotation"
    """Folder of the text files in `root`."""

    def read(self) -> Iterator[Word]:
        """Read the words picture by picture, sorted by name."""
        pictures = {p.stem: p for p in self.file(self.images).iterdir() if p.suffix.lower() in ENDINGS}
        for listed in sorted(self.file(self.annotations).glob("*.txt")):
            if listed.stem not in pictures:
                raise DataError(f"{listed} has no picture with the same name in {self.file(self.images)}")
            for number, line in read_lines(listed):
                try:
                    *box, label = line.split(",", 4)
                    x, y, width, height = map(float, box)
                except ValueError as error:
                    raise DataError(f"{listed}, line {number}: expected x, y, w, h, label, found '{line}'") from error
                yield Word(label.strip().strip('"'), pictures[listed.stem], (x, y, x + width, y + height))
