"""A linearly homomorphic tag: whoever knows the key can check a sum, whoever adds need not.

The tag of a vector is its inner product with secret coefficients modulo a prime, hidden behind a mask of its own. Tags
add (and are multiplied by integers) as vectors do, so a decrypted sum that does not fit the sum of the tags is not the
sum of what was tagged: a ciphertext was changed, cut, left out, of other keys, or went beyond what its scheme can hold.

Source: Agrawal and Boneh 2009, 'Homomorphic MACs: MAC-based integrity for network coding', section 3. Four tags modulo
2^31 - 1, where products fit 64 bits: a forgery passes with probability 2^-124.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rayfed.crypto.keys import Stream, derive

PRIME = (1 << 31) - 1
COUNT = 4

Tag = tuple[int, ...]


@dataclass(frozen=True)
class Tagger:
    """Tags the vectors of one round."""

    key: bytes

    def tag(self, vector: np.ndarray, *context: int) -> Tag:
        """The tag of (D,) integers, of any size; `context` says whose they are and must not be used for two vectors."""
        return _mod(p + m for p, m in zip(self._product(vector), self._mask(context), strict=True))

    def holds(self, total: np.ndarray, tag: Tag, contexts: Sequence[tuple[int, tuple[int, ...]]]) -> bool:
        """Whether a vector is the sum of those that were tagged with these contexts, each times its factor."""
        masks = [(factor, self._mask(context)) for factor, context in contexts]
        expected = self._product(total)
        return tag == _mod(expected[i] + sum(f * mask[i] for f, mask in masks) for i in range(COUNT))

    def _product(self, vector: np.ndarray) -> list[int]:
        stream, residues = Stream(derive(self.key, "coefficients")), (vector % PRIME).astype(np.uint64)
        return [int((_draw(stream, len(residues)) * residues % PRIME).sum()) for _ in range(COUNT)]

    def _mask(self, context: Sequence[int]) -> list[int]:
        return [int(m) for m in _draw(Stream(derive(self.key, "mask", *context)), COUNT)]


def added(left: Tag, right: Tag) -> Tag:
    """The tag of the sum of two vectors."""
    return _mod(a + b for a, b in zip(left, right, strict=True))


def multiplied(tag: Tag, factor: int) -> Tag:
    """The tag of a vector times an integer."""
    return _mod(factor * t for t in tag)


def _mod(values: Iterable[int]) -> Tag:
    return tuple(int(v) % PRIME for v in values)


def _draw(stream: Stream, count: int) -> np.ndarray:
    return np.frombuffer(stream.read(4 * count), "<u4").astype(np.uint64) % PRIME
