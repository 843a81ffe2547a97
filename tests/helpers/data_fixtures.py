"""Helpers that write small files in the formats of data sets, independently of rayfed's readers."""

import gzip
import io
import json
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from rayfed.store.images import decode_png


def random_images(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_idx_set(folder: Path, count: int = 20, packed: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Write the four files of an MNIST-like data set, and return their arrays by file name."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {}
    for split, n in (("train", count), ("t10k", count // 2)):
        content[f"{split}-images-idx3-ubyte"] = random_images(n, 6, 5, seed=seed)
        content[f"{split}-labels-idx1-ubyte"] = np.arange(n, dtype=np.uint8) % 10
    for name, array in content.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
        else:
            (folder / name).write_bytes(idx_bytes(array))
    return content


def png(pixels: np.ndarray) -> bytes:
    """Encode a grey (H, W) or colour (H, W, 3) image as PNG."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def write_parquet(
    path: Path,
    images: list[bytes | None],
    labels: list[object],
    names: list[str] | None = None,
    image_column: str = "image",
    label_column: str = "label",
    label_type: pa.DataType | None = None,
) -> Path:
    """Write a Parquet file in the Hugging Face image layout."""
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = pa.array([{"bytes": data, "path": None} for data in images], kind)
    table = pa.table({image_column: rows, label_column: pa.array(labels, label_type or pa.int64())})
    if names is not None:
        features = {image_column: {"_type": "Image"}, label_column: {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def decoded(png: bytes) -> torch.Tensor:
    """Decode an image of a table to (C, H, W) float32 in [0, 1]."""
    return torch.from_numpy(decode_png(png)).permute(2, 0, 1).float() / 255
