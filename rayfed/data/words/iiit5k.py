"""Reader of IIIT 5K-word (Mishra 2012, "Scene Text Recognition using Higher Order Language Priors")."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from scipy.io import loadmat

from rayfed.data.words.base import LocalReader, Word
from rayfed.registry import component


@component
class IIIT5K(LocalReader):
    """Words of IIIT 5K: `traindata.mat` and `testdata.mat`, with fields `ImgName` (path) and `GroundTruth`."""

    format: Literal["iiit5k"]
    split: Literal["train", "test"] = "test"
    """Split to read."""

    def read(self) -> Iterator[Word]:
        """Read the words in the order of the `.mat` file."""
        listed = self.file(f"{self.split}data.mat")
        for record in np.ravel(loadmat(listed)[f"{self.split}data"]):
            yield Word(str(record["GroundTruth"][0]), listed.parent / str(record["ImgName"][0]))
