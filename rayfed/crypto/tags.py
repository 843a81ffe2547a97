"""Linearly homomorphic tags: with the key, a sum of tagged vectors can be verified; additions need no key.

The tag of a vector is its inner product with secret coefficients modulo a prime, plus an individual mask. Tags can be
added and multiplied by integers like vectors. If a decrypted sum does not match the sum of the tags, it is not the sum
of the tagged vectors: a ciphertext was changed, truncated, omitted, of other keys, or too large for its scheme.

Source: Agrawal and Boneh 2009, 'Homomorphic MACs: MAC-based integrity for network coding', section 3. Integers are
distinguished modulo 2^127 - 1. So the verifier must know, from data that a forger cannot change, that a sum is within
+-2^126 and that every factor is smaller than the prime. A forgery then passes with probability at most 2^-126, because
a coefficient is 128 random bits modulo the prime, so a residue has probability at most 3 in 2^128. With q forgeries the
bound is q times as large, plus the advantage of distinguishing HKDF and ChaCha20 from random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayfed.crypto.keys import Stream, derive

PRIME = (1 << 127) - 1
_BYTES = 16
_BLOCK = 1 << 20
"""Number of values whose products are added at once: their sums of 16-bit digits are exact in floating point."""

Tag = int


@dataclass(frozen=True)
class Tagger:
    """Generator and verifier of tags for vectors of one layout in one round."""

    key: bytes

    def tag(self, vector: np.ndarray, *context: int | str) -> Tag:
        """Return the tag of an integer vector (D,), given the vector's context.

        `context` identifies the vector's owner and must not be used for two vectors: the difference of their tags would
        be a valid tag of their difference.
        """
        return (self._product(vector) + self._mask(context)) % PRIME

    def holds(self, total: np.ndarray, tag: Tag, contexts: Sequence[tuple[int, tuple[int | str, ...]]]) -> bool:
        """Return whether `total` is the weighted sum of the vectors that were tagged with the given contexts.

        Factors and values are compared only modulo the prime.
        """
        masks = sum(factor * self._mask(context) for factor, context in contexts)
        return tag == (self._product(total) + masks) % PRIME

    def _product(self, vector: np.ndarray) -> int:
        """Return the inner product with the secret coefficients."""
        stream, total = Stream(derive(self.key, "coefficients")), 0
        for low in range(0, len(vector), _BLOCK):
            block = vector[low : low + _BLOCK]
            limbs = np.frombuffer(stream.read(_BYTES * len(block)), "<u2").reshape(len(block), -1)
            products = limbs.T.astype(np.float64) @ _limbs(block)
            total += sum(int(p) << 16 * (i + j) for (i, j), p in np.ndenumerate(products))
        return total % PRIME

    def _mask(self, context: Sequence[int | str]) -> int:
        return int.from_bytes(Stream(derive(self.key, "mask", *context)).read(2 * _BYTES), "little") % PRIME


def _limbs(vector: np.ndarray) -> np.ndarray:
    """Return the base-2^16 digits of integers (D,), the highest one signed: (D, L) float64."""
    if vector.dtype != object:
        digits = vector.astype("<i8").view("<u2").reshape(len(vector), 4).astype(np.float64)
    else:
        size = 2 * (max(int(v).bit_length() for v in vector) // 16 + 1)
        data = b"".join(int(v).to_bytes(size, "little", signed=True) for v in vector)
        digits = np.frombuffer(data, "<u2").reshape(len(vector), -1).astype(np.float64)
    digits[:, -1] -= 2.0**16 * (digits[:, -1] >= 2**15)
    return digits


def add_tags(left: Tag, right: Tag) -> Tag:
    """Return the tag of the sum of two vectors, computed from the vectors' tags."""
    return (left + right) % PRIME


def multiply_tag(tag: Tag, factor: int) -> Tag:
    """Return the tag of a vector multiplied by an integer, computed from the vector's tag."""
    return factor * tag % PRIME
