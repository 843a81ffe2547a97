"""scikit-learn's digits: 1,797 real handwritten digits of 8x8, shipped in its wheel.

Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998 (its test
part).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from sklearn.datasets import load_digits

from rayfed.catalogue import component
from rayfed.data.base import Source, Split, hold_out_fifth


@component
class Digits(Source):
    """Ten classes, grey; a stratified fifth, always the same one, is the test split. Needs no files."""

    size: Annotated[int, Field(ge=1)] | None = 28
    """Height and width in pixels, to which the 8x8 originals are enlarged (bilinear). None keeps 8x8."""

    def read(self) -> tuple[Split, Split, tuple[str, ...]]:
        """1,438 training and 359 test digits of 8x8; their 17 levels of grey are spread over 0 to 255."""
        digits = load_digits()
        images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None]
        train, test = hold_out_fifth(Split(images, digits.target.astype(np.int64)), "digits")
        return train, test, tuple(map(str, digits.target_names))
