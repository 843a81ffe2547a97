"""Pack floats as short integers into large integers, such that sums of the short integers do not overlap.

Source: Zhang 2020, 'BatchCrypt: efficient homomorphic encryption for cross-silo federated learning', sections 4.2 and
4.3: symmetric clipping, quantisation, guard bits. Lanes here hold values with an offset instead of two's complement, so
that no borrow crosses from one lane to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

_BLOCK = 1 << 20
"""Number of values converted to bits at once: 64 MB."""


@dataclass(frozen=True)
class FixedPoint:
    """Encoding of values within a clip bound as signed integers of a fixed number of bits, symmetric around zero."""

    bits: int

    @property
    def most(self) -> int:
        """Return the integer that represents the clip bound."""
        return (1 << (self.bits - 1)) - 1

    def largest(self, clip: float) -> int:
        """Return the largest magnitude of an encoded value, which does not depend on the clip bound."""
        return self.most

    def encode(self, values: np.ndarray, clip: np.ndarray) -> np.ndarray:
        """Encode floats as the nearest integers, (D,) int64, after clipping each value to its clip bound."""
        integers: np.ndarray = np.rint(np.clip(values / clip, -1, 1) * self.most).astype(np.int64)
        return integers

    def decode(self, integers: np.ndarray, clip: np.ndarray) -> np.ndarray:
        """Decode integers, or sums of encoded integers, to floats, (D,) float64.

        The error is at most half a step of clip / most per summand.
        """
        return integers.astype(np.float64) * (clip / self.most)


@dataclass(frozen=True)
class Lanes:
    """Packing of unsigned integers into lanes of larger integers."""

    width: int
    """Width of a lane in bits, sufficient for all sums of its values; at most 63."""
    count: int
    """Number of lanes in one plaintext."""

    def pack(self, values: np.ndarray) -> list[int]:
        """Pack D values below 2^width into ceil(D / count) large integers, with the first value in the lowest bits."""
        return [number for block in self._blocks(values) for number in self._packed(block)]

    def unpack(self, numbers: Sequence[int], size: int) -> np.ndarray:
        """Unpack large integers, or sums of packed integers, to the values of all lanes, (size,) int64."""
        length = (self.width * self.count + 7) // 8
        data = np.frombuffer(b"".join(int(n).to_bytes(length, "little") for n in numbers), np.uint8)
        rows = np.unpackbits(data.reshape(-1, length), axis=1, bitorder="little", count=self.width * self.count)
        lanes = np.zeros((rows.shape[0] * self.count, 64), np.uint8)
        lanes[:, : self.width] = rows.reshape(-1, self.width)
        return np.packbits(lanes, axis=1, bitorder="little").view("<i8").ravel()[:size]

    def _blocks(self, values: np.ndarray) -> Iterator[np.ndarray]:
        step = self.count * max(1, _BLOCK // self.count)
        return (values[low : low + step] for low in range(0, len(values), step))

    def _packed(self, values: np.ndarray) -> Iterator[int]:
        padded = np.zeros(-(-len(values) // self.count) * self.count, "<i8")
        padded[: len(values)] = values
        bits = np.unpackbits(padded.view(np.uint8).reshape(-1, 8), axis=1, bitorder="little", count=self.width)
        rows = np.packbits(bits.reshape(-1, self.count * self.width), axis=1, bitorder="little")
        return (int.from_bytes(row.tobytes(), "little") for row in rows)


def apportion(weights: Sequence[float], pieces: int) -> list[int]:
    """Divide `pieces` into whole numbers in proportion to the weights, by the largest-remainder method.

    They sum to `pieces`. Rounding each one down, as in the thesis (equation 4.4), loses up to a piece per client: 10 of
    100 pieces with 30 equal clients.
    """
    shares = [pieces * w / sum(weights) for w in weights]
    whole = [int(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: whole[i] - shares[i])
    for i in order[: pieces - sum(whole)]:
        whole[i] += 1
    return whole
