"""Reader of SynthText (Gupta, Vedaldi and Zisserman 2016, "Synthetic Data for Text Localisation in Natural Images")."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from scipy.io import loadmat

from rayfed.data.words.base import LocalReader, Word
from rayfed.errors import DataError
from rayfed.registry import component


@component
class SynthText(LocalReader):
    """Words of SynthText: `gt.mat` with `imnames`, `wordBB` (2 x 4 x words, corners) and `txt`; boxes are upright."""

    format: Literal["synthtext"]

    def read(self) -> Iterator[Word]:
        """Read the words picture by picture, in the order of `gt.mat`."""
        listed = self.file("gt.mat")
        truth = loadmat(listed, variable_names=["imnames", "wordBB", "txt"])
        for name, corners, blocks in zip(truth["imnames"][0], truth["wordBB"][0], truth["txt"][0], strict=True):
            texts = " ".join(str(block) for block in np.ravel(blocks)).split()
            boxes = corners.reshape(2, 4, -1)
            if len(texts) != boxes.shape[2]:
                raise DataError(
                    f"{listed}: {name[0]} has {len(texts)} words but {boxes.shape[2]} boxes; download the data set "
                    "again"
                )
            for text, (x, y) in zip(texts, np.moveaxis(boxes, 2, 0), strict=True):
                yield Word(text, listed.parent / str(name[0]), (x.min(), y.min(), x.max(), y.max()))
