"""BFV and CKKS encryption of integer vectors for addition, with TenSEAL on Microsoft SEAL.

All clients that encrypt also have the secret key, so encryption is symmetric: its noise is 1/50 of that with a public
key. One prime carries the data (which is only multiplied by public integers, by repeated addition), and one more is
SEAL's own. A ring of dimension 4096 with 109 bits in both is 128-bit secure (Albrecht 2018, 'Homomorphic encryption
security standard', table 1).

Source: Fan and Vercauteren 2012, 'Somewhat practical fully homomorphic encryption'; Cheon 2017, 'Homomorphic encryption
for arithmetic of approximate numbers'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, log2
from typing import Any, Literal

import gmpy2
import numpy as np
import tenseal as ts

from rayfed.errors import ProtectionError

DEGREE = 4096
SIGMAS = 10
"""Standard deviations of noise that must not change an integer; expected failures: one in 10^22 values."""
_DEVIATION = 3.2
"""Standard deviation of a coefficient's noise in a fresh ciphertext."""
_MODULI = {"bfv": (54, 55), "ckks": (56, 53)}
"""Bits of the modulus' two primes, by scheme."""


@dataclass(frozen=True)
class Lattice:
    """Lattice scheme with parameters for integer sums below a bound."""

    scheme: Literal["bfv", "ckks"]
    parameter: int
    """For BFV the plaintext modulus, a prime; for CKKS the bits of the scale."""

    @classmethod
    def bfv(cls, most: int, noise: float) -> Lattice:
        """Return a BFV scheme for exact integer sums of magnitude up to `most`.

        `noise` is the noise of the sum divided by that of one ciphertext. Raises `OverflowError` if the modulus is too
        small.
        """
        modulus = 2 * most + 1
        modulus += -(modulus - 1) % (2 * DEGREE)  # batching needs a prime that is 1 modulo this
        while not gmpy2.is_prime(modulus):
            modulus += 2 * DEGREE
        _check(modulus * 2 * SIGMAS * _DEVIATION * noise, _MODULI["bfv"][0] - 1)
        return cls("bfv", modulus)

    @classmethod
    def ckks(cls, most: int, noise: float) -> Lattice:
        """Return a CKKS scheme for sums up to `most`, with the smallest scale at which rounding removes the noise."""
        bits = ceil(log2(2 * SIGMAS * _DEVIATION * DEGREE**0.5 * noise))
        _check(most << bits, _MODULI["ckks"][0] - 2)
        return cls("ckks", bits)

    @property
    def slots(self) -> int:
        """Return the number of integers in one ciphertext."""
        return DEGREE if self.scheme == "bfv" else DEGREE // 2

    def generate(self) -> bytes:
        """Generate a secret key from the operating system's randomness, which cannot be seeded."""
        return self._made(secret=True)

    def encrypt(self, key: bytes, vector: np.ndarray) -> tuple[bytes, ...]:
        """Encrypt an integer vector (D,) int64, and return the ciphertexts."""
        make = ts.bfv_vector if self.scheme == "bfv" else ts.ckks_vector
        starts = range(0, len(vector), self.slots)
        return tuple(make(_context(key), vector[i : i + self.slots].tolist()).serialize() for i in starts)

    def decrypt(self, key: bytes, ciphertexts: Sequence[bytes]) -> np.ndarray:
        """Decrypt ciphertexts to an integer vector (D,) int64.

        Rounding removes the noise of CKKS, which would otherwise reveal the key (Li and Micciancio 2021, 'On the
        security of homomorphic encryption on approximate numbers'). Raises `ProtectionError` for bytes that are not a
        ciphertext with these parameters.
        """
        with self._intact():
            parts = [np.array(c.decrypt(), np.float64) for c in self._read(key, ciphertexts)]
            return np.rint(np.concatenate(parts)).astype(np.int64)

    def add(self, left: Sequence[bytes], right: Sequence[bytes]) -> tuple[bytes, ...]:
        """Add two encrypted vectors, and return the ciphertexts. Raises `ProtectionError` for damaged ciphertexts."""
        with self._intact():
            pairs = zip(self._read(self._public, left), self._read(self._public, right), strict=True)
            return tuple(a.add_(b).serialize() for a, b in pairs)

    def times(self, ciphertexts: Sequence[bytes], factor: int) -> tuple[bytes, ...]:
        """Multiply an encrypted vector by a factor of at least 1 by doubling and adding; return the ciphertexts."""
        with self._intact():
            return tuple(_multiple(c, factor).serialize() for c in self._read(self._public, ciphertexts))

    @cached_property
    def _public(self) -> bytes:
        """Scheme parameters, which are sufficient for addition."""
        return self._made(secret=False)

    def _made(self, secret: bool) -> bytes:
        kind = ts.SCHEME_TYPE.BFV if self.scheme == "bfv" else ts.SCHEME_TYPE.CKKS
        context = ts.context(
            kind,
            DEGREE,
            plain_modulus=self.parameter if self.scheme == "bfv" else None,
            coeff_mod_bit_sizes=list(_MODULI[self.scheme]),
            encryption_type=ts.ENCRYPTION_TYPE.SYMMETRIC,
            n_threads=1,
        )
        if self.scheme == "ckks":
            context.global_scale = 2.0**self.parameter
        data: bytes = context.serialize(
            save_public_key=False, save_secret_key=secret, save_galois_keys=False, save_relin_keys=False
        )
        return data

    def _read(self, context: bytes, ciphertexts: Sequence[bytes]) -> list[Any]:
        read = ts.bfv_vector_from if self.scheme == "bfv" else ts.ckks_vector_from
        found = [read(_context(context), c) for c in ciphertexts]
        for c in found:  # SEAL checks its part; TenSEAL trusts its header, and would read beyond the slots
            if len(c.ciphertext()) != 1 or not 0 < c.size() <= self.slots:
                raise ValueError("the header is wrong")
        return found

    @contextmanager
    def _intact(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, RuntimeError) as error:  # raised by SEAL for damaged bytes
            raise ProtectionError(
                f"a {self.scheme.upper()} ciphertext cannot be read ({error}): it was tampered with, truncated, or "
                f"made with other parameters; the round is not applied"
            ) from None


@lru_cache(maxsize=16)
def _context(data: bytes) -> Any:
    return ts.context_from(data, n_threads=1)


def _multiple(ciphertext: Any, factor: int) -> Any:
    total = ciphertext
    for bit in f"{factor:b}"[1:]:
        total = total.add(total)
        if bit == "1":
            total = total.add(ciphertext)
    return total


def _check(value: float, bits: int) -> None:
    if value >= 1 << bits:
        raise OverflowError(f"the modulus is {log2(value) - bits:.1f} bits too short for sums")
