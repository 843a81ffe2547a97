"""scikit-learn's digits: 1,797 handwritten digits of 8x8 pixels, included in the scikit-learn wheel.

Source: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998 (test
part).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from rayfed.data.base import Source, StoredSplit, hold_out_fifth
from rayfed.errors import DataError
from rayfed.registry import component


@component
class Digits(Source):
    """Handwritten digits of scikit-learn, grey, ten classes; a fixed stratified fifth is the test split.

    Needs no files.
    """

    is_public: ClassVar[bool] = True

    size: Annotated[int, Field(ge=1)] | None = 28
    """Height and width in pixels, to which the 8x8 images are resized (bilinear). `null` keeps 8x8."""

    def read(self) -> tuple[StoredSplit, StoredSplit, tuple[str, ...]]:
        """Read 1,438 training and 359 test digits of 8x8 pixels, with their 17 grey levels scaled to 0..255."""
        table = np.loadtxt(_file(), delimiter=",", dtype=np.int64)
        images = np.rint(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
        train, test = hold_out_fifth(StoredSplit(images, table[:, 64]), "digits")
        return train, test, tuple("0123456789")


def _file() -> Path:
    """Return the path of scikit-learn's table without importing its `datasets`, which takes three seconds."""
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise DataError(f"{path} is missing, but it is part of scikit-learn: reinstall scikit-learn")
    return path
