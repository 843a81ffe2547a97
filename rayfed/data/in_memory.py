"""Files of a user's tensors or arrays, so that every process can read them: packed images, or a table."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayfed.core.arrays import to_tensor
from rayfed.data.base import Source, StoredSplit, hold_out_fifth
from rayfed.data.packing import pack_dataset
from rayfed.errors import UserError
from rayfed.registry import component


@component
class _Images(Source):
    """Images in memory; a stratified fifth is the test split."""

    images: np.ndarray
    labels: np.ndarray

    def read(self) -> tuple[StoredSplit, StoredSplit, tuple[str, ...]]:
        """Return both splits; the classes are numbered from 0."""
        train, test = hold_out_fifth(StoredSplit(self.images, self.labels), "data: the pair")
        return train, test, tuple(map(str, range(int(self.labels.max()) + 1)))


def file_of_arrays(pair: tuple[Any, ...]) -> dict[str, Any]:
    """Write inputs and labels to a temporary file, and return the file's section `data`.

    Images (N, C, H, W) or (N, H, W) are in [0, 1] or of type uint8, with class numbers (N,) as labels. They are stored
    with 8 bits per value if these suffice, else with 16. Rows (N, D) become a table, whose labels are class numbers
    (N,), or floats (N,) or (N, k) to predict. Raises `UserError` for other arrays.
    """
    if len(pair) != 2:
        raise UserError(f"data: found a tuple of length {len(pair)}; give a path, a name, or a pair (inputs, labels)")
    inputs = to_tensor("data: inputs", pair[0]).cpu().numpy()
    labels = to_tensor("data: labels", pair[1]).cpu().numpy()
    if inputs.ndim not in (2, 3, 4) or not inputs.size or labels.shape[:1] != inputs.shape[:1]:
        raise UserError(
            f"data: found inputs of shape {inputs.shape} and labels of shape {labels.shape}; give images "
            f"(N, C, H, W) or rows (N, D), and N labels"
        )
    folder = Path(mkdtemp(prefix="rayfed-data-"))
    return _table(inputs, labels, folder) if inputs.ndim == 2 else _packed(inputs, labels, folder)


def _packed(images: np.ndarray, labels: np.ndarray, folder: Path) -> dict[str, Any]:
    """Write images to a packed file."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or labels.min() < 0:
        raise UserError(
            f"data: found labels of type {labels.dtype} and shape {labels.shape}; images in memory need class numbers "
            f"(N,) from 0. Save images with other labels as a Parquet file"
        )
    images = _stored(images if images.ndim == 4 else images[:, None])
    file = folder / "images.arrow"
    pack_dataset(_Images(images=images, labels=labels.astype(np.int64)), file, lambda done, count: None)
    return {"name": "arrow", "path": str(file)}


def _stored(images: np.ndarray) -> np.ndarray:
    """Return images as integers of 8 bits, or of 16 bits if floats in [0, 1] need them."""
    if images.dtype == np.uint8:
        return images
    if images.dtype.kind != "f" or not (images.min() >= 0 and images.max() <= 1):
        raise UserError(
            f"data: found images of type {images.dtype} from {images.min():.3g} to {images.max():.3g}; give floats in "
            f"[0, 1] or uint8. Images must not be normalised: set the mean and std of your transform by the change "
            f"'model.normalise={{mean: [...], std: [...]}}'"
        )
    levels = images.astype(np.float64) * 255
    if np.abs(levels - levels.round()).max() < 1e-3:
        return levels.round().astype(np.uint8)
    return (images.astype(np.float64) * 65535).round().astype(np.uint16)


def _table(rows: np.ndarray, labels: np.ndarray, folder: Path) -> dict[str, Any]:
    """Write rows to a Parquet file with the columns `x1`, `x2` and so on; the labels are `label`, or `y1` and so on."""
    columns = {f"x{number}": column for number, column in enumerate(rows.T, 1)}
    if labels.dtype.kind == "f":
        targets = {f"y{number}": column for number, column in enumerate(labels.reshape(len(labels), -1).T, 1)}
        section: dict[str, Any] = {"targets": list(targets)}
    else:
        targets, section = {"label": labels.reshape(len(labels))}, {"label": "label"}
    file = folder / "table.parquet"
    pq.write_table(pa.table(columns | targets), file)
    return {"name": "table", "path": str(file), **section}
