"""Reader of ICDAR 2015, challenge 4.3 (Karatzas et al. 2015, "ICDAR 2015 Competition on Robust Reading")."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from rayfed.data.words.base import LocalReader, Word, read_lines
from rayfed.errors import DataError
from rayfed.registry import component


@component
class Icdar2015(LocalReader):
    """Words of ICDAR 2015: images `word_1.png`, ... and a text file with lines `word_1.png, "Genaxis Theatre"`."""

    format: Literal["ic15"]
    truth: str = "gt.txt"
    """Name of the text file; for the test split it is published as `Challenge4_Test_Task3_GT.txt`."""

    def read(self) -> Iterator[Word]:
        """Read the words in the order of the text file."""
        listed = self.file(self.truth)
        for number, line in read_lines(listed):
            name, comma, text = line.partition(",")
            if not comma:
                raise DataError(f"{listed}, line {number}: expected word_1.png, \"TEXT\", found '{line}'")
            yield Word(text.strip().strip('"'), listed.parent / name)
