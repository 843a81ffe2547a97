"""Reader of the idx format of MNIST and Fashion-MNIST, as described by LeCun, Cortes and Burges.

Two zero bytes, the element type (8: unsigned byte), the number of dimensions, each dimension as a big-endian
32-bit integer, then the elements, the last dimension varying fastest.
"""

from __future__ import annotations

import zlib
from math import prod
from pathlib import Path

import numpy as np

from rayfed.errors import DataError

_GZIP = 31
"""zlib's `wbits` for a stream with a gzip header."""


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read a uint8 array with `dimensions` dimensions from an idx file, possibly compressed (`.gz`).

    Raises `DataError` for another format or number of dimensions, and for a length that differs from the header.
    """
    content = _unpacked(path)
    magic = bytes([0, 0, 8, dimensions])
    if content[:4] != magic:
        raise DataError(
            f"{path} starts with 0x{content[:4].hex()}, expected 0x{magic.hex()}: an idx file of "
            f"unsigned bytes in {dimensions} dimension{'s' if dimensions > 1 else ''}"
        )
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(
            f"{path} is truncated: expected a header of {start} bytes, found {len(content)} bytes; download the file "
            "again"
        )
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", dimensions, offset=4))
    expected = start + prod(shape)
    if len(content) != expected:
        raise DataError(
            f"{path} is {'truncated' if len(content) < expected else 'too long'}: the header specifies "
            f"{' x '.join(map(str, shape))}, so expected {expected} bytes (unpacked), found {len(content)}; "
            f"download the file again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _unpacked(path: Path) -> bytearray:
    """Return the file's content, writable; truncated if a compressed file ends early."""
    try:
        content = path.read_bytes()
        return bytearray(zlib.decompressobj(_GZIP).decompress(content) if path.suffix == ".gz" else content)
    except (OSError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; expected an idx file; download the file again") from error
