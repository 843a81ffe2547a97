"""Reader of Synth90K (MJSynth), synthetic word images.

Source: Jaderberg et al. 2014, "Synthetic Data and Artificial Neural Networks for Natural Scene Text Recognition".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from rayfed.data.words.base import LocalReader, Word, read_lines
from rayfed.errors import DataError
from rayfed.registry import component


@component
class Synth90K(LocalReader):
    """Words of Synth90K: `annotation_train.txt` has lines `./2425/1/115_Lube_45484.jpg 45484`, with the word `Lube`."""

    format: Literal["synth90k"]
    split: Literal["train", "val", "test"] = "train"
    """Split to read."""

    def read(self) -> Iterator[Word]:
        """Read the words in the order of the annotation file."""
        listed = self.file(f"annotation_{self.split}.txt")
        for number, line in read_lines(listed):
            path = line.split()[0]
            parts = path.rpartition("/")[2].split("_")
            if len(parts) != 3:
                raise DataError(f"{listed}, line {number}: expected PATH/NUMBER_WORD_NUMBER.jpg, found '{line}'")
            yield Word(parts[1], listed.parent / path)
