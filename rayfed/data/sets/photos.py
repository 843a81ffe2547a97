"""Patches of natural colour photographs in the wheels of scikit-learn and scikit-image.

The label of a patch is its photograph. Grey, medical and synthetic pictures are excluded, and so are the Hubble deep
field (mostly black) and the second stereo view (same scene).
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfed.data.base import Source, StoredSplit, hold_out_fifth
from rayfed.data.images import Encoded, decode_images
from rayfed.errors import DataError
from rayfed.registry import component

Photograph = Literal["astronaut", "cat", "coffee", "flower", "motorcycle", "rocket", "temple"]
PHOTOGRAPHS: dict[Photograph, tuple[str, str]] = {
    "astronaut": ("skimage.data", "astronaut.png"),
    "cat": ("skimage.data", "chelsea.png"),
    "coffee": ("skimage.data", "coffee.png"),
    "flower": ("sklearn.datasets.images", "flower.jpg"),
    "motorcycle": ("skimage.data", "motorcycle_left.png"),
    "rocket": ("skimage.data", "rocket.jpg"),
    "temple": ("sklearn.datasets.images", "china.jpg"),
}
"""Class name -> package and file."""


@component
class Photos(Source):
    """Patches of seven RGB photographs, cut on a grid without overlap; a stratified fifth is the test split."""

    is_public: ClassVar[bool] = True

    size: Annotated[int, Field(ge=8)] = 32
    """Height and width of a patch in pixels; the photographs are cut, not resized."""
    photographs: Annotated[list[Photograph], Field(min_length=1)] | None = None
    """Photographs to cut. Default: all seven."""

    def read(self) -> tuple[StoredSplit, StoredSplit, tuple[str, ...]]:
        """Cut all complete patches of the grid, photo by photo, row by row: 1,723 patches at the default size."""
        chosen = self.photographs or list(PHOTOGRAPHS)
        patches = [_patches(*PHOTOGRAPHS[name], self.size) for name in chosen]
        labels = np.repeat(np.arange(len(patches)), [len(p) for p in patches])
        train, test = hold_out_fifth(StoredSplit(np.concatenate(patches), labels), f"photos at size {self.size}")
        return train, test, tuple(chosen)


def _patches(package: str, name: str, size: int) -> np.ndarray:
    """Cut a photograph into patches (N, 3, size, size) uint8."""
    path = Path(str(files(package) / name))
    if not path.is_file():
        raise DataError(f"{path} is missing, but it is part of {package.partition('.')[0]}: reinstall that package")
    photo = decode_images([Encoded(str(path), path)], None)[0]
    down, across = photo.shape[1] // size, photo.shape[2] // size
    if not down * across:
        raise DataError(
            f"size {size} exceeds the size of {path}: {photo.shape[1]}x{photo.shape[2]} (height x width); "
            f"use a smaller size"
        )
    grid = photo[:, : down * size, : across * size].reshape(3, down, size, across, size)
    tiles: np.ndarray = grid.transpose(1, 3, 0, 2, 4).reshape(-1, 3, size, size)
    return tiles
