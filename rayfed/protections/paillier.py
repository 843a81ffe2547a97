"""Paillier encryption of updates, with packed fixed-point integers or the original arithmetic of FedBoosting.

Sources: Ren 2021, 'FedBoosting: federated learning with gradient protected boosting for text recognition', section
'HE aggregation with quantized gradient' (Ren's thesis, section 4.2.2 and equation 4.4); Zhang 2020, 'BatchCrypt',
section 4.2, for packing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, Self

import numpy as np
from gmpy2 import mpz
from pydantic import Field, model_validator

from rayfed.crypto import reference
from rayfed.crypto.encryptor import Encryptor, Load
from rayfed.crypto.factoring import factor
from rayfed.crypto.keys import Stream
from rayfed.crypto.packing import FixedPoint, Lanes
from rayfed.crypto.paillier import SECURE_BITS, KeyPair, PublicKey
from rayfed.errors import ProtectionError, UserError
from rayfed.protections.base import Encryption
from rayfed.registry import component

SCALE = 10**32
WIDEST = 63
"""Maximum number of bits of a lane, which fits a 64-bit integer with its sign."""


@component
class Paillier(Encryption):
    """Encrypt updates as integers under Paillier, several per ciphertext; the server multiplies ciphertexts to add.

    One client creates the key pair, and all clients share it. `encoding: fedboosting` is the arithmetic of the paper:
    each value separately, times 1e32, divided into `pieces_of_weight`, of which the server assigns each client its
    share.
    """

    key_bits: Annotated[int, Field(ge=128, le=4096, multiple_of=2)] = SECURE_BITS
    """Length of the modulus in bits. Below 2048 only with `insecure`: 128 bits, as in the paper, are factored in a
    second."""
    insecure: bool = False
    """Allow insecure key lengths (demonstrations only)."""
    encoding: Literal["packed", "fedboosting"] = "packed"
    """`packed`: many clipped fixed-point integers per plaintext. `fedboosting`: one value per plaintext, as in the
    paper."""
    bits: Annotated[int, Field(ge=2, le=32)] = 16
    """Bits per packed value. The rounding error is at most half a step, clip / (2^bits - 2)."""
    table: bool = True
    """Obfuscate with fixed-base tables: equally secure and five times as fast, with 19 MB per client actor (2048
    bits). Ignored by `phe`."""
    backend: Literal["rayfed", "phe"] = "rayfed"
    """Implementation of the cryptosystem. `phe`: the package phe, a slow reference with the same keys and
    ciphertexts."""

    @model_validator(mode="after")
    def _long_enough(self) -> Self:
        if self.key_bits < SECURE_BITS and not self.insecure:
            raise ValueError(
                f"key_bits: {self.key_bits} can be broken: set {SECURE_BITS} or more, or add `insecure: true`"
            )
        return self

    @property
    def pieces(self) -> int | None:
        """Return the number of pieces into which the server divides the weights; None if clients apply the weights."""
        return self.pieces_of_weight if self.encoding == "fedboosting" else None

    def warning(self) -> str | None:
        """Return a warning if the keys are so short that they can be broken; else None."""
        if self.key_bits >= SECURE_BITS:
            return None
        return f"keys of {self.key_bits} bits can be broken: anyone who sees a ciphertext can decrypt the update"

    def encryptor(self, load: Load) -> Encryptor:
        """Return an encryptor with as many values per plaintext as fit, or one value in the FedBoosting arithmetic."""
        code = FixedPoint(self.bits) if self.encoding == "packed" else Slices(self.pieces_of_weight)
        bounds = [self.clip, self.clip_buffers, *(bound for _, bound in self.layer_bounds)]
        most = code.largest(max(bounds))
        width = (2 * load.units * most).bit_length()
        room = self.key_bits - 1
        if width > (min(room, WIDEST) if self.encoding == "packed" else room):
            raise UserError(
                f"paillier: a sum of {load.clients} updates with a total weight of up to {load.units} needs {width} "
                f"bits per value; a key of {self.key_bits} bits has {room} and packing {WIDEST}: set fewer bits, a "
                f"longer key, or weights: uniform"
            )
        lanes = Lanes(width, room // width) if self.encoding == "packed" else None
        scheme = PheScheme if self.backend == "phe" else PaillierScheme
        made = scheme(self.key_bits, lanes, most, self.table)
        return Encryptor(made, code, self.clip, self.clip_buffers, load, self.layer_bounds)


@dataclass(frozen=True)
class Slices:
    """The FedBoosting paper's integer encoding, g = floor(1e32 G / P), in exact arithmetic."""

    pieces: int

    def largest(self, clip: float) -> int:
        """Return the largest magnitude of an encoded value, given the clip bound."""
        return -(-int(clip * SCALE) // self.pieces) + 1

    def encode(self, values: np.ndarray, clip: np.ndarray) -> np.ndarray:
        """Encode floats (D,) as Python integers (D,), after clipping each value to its clip bound."""
        ratios = (value.as_integer_ratio() for value in np.clip(values, -clip, clip).tolist())
        return np.array([top * SCALE // (bottom * self.pieces) for top, bottom in ratios], object)

    def decode(self, integers: np.ndarray, clip: np.ndarray) -> np.ndarray:
        """Decode sums of all P slices to floats (D,)."""
        return (integers * self.pieces / SCALE).astype(np.float64)


@dataclass(frozen=True)
class PaillierScheme:
    """Encryption of integer vectors under Paillier (`rayfed.crypto.encryptor.Scheme`)."""

    key_bits: int
    lanes: Lanes | None
    """Lanes of a plaintext; None for one integer per plaintext, with negative ones as residues."""
    offset: int
    """Number added to an integer in a lane, per unit of its weight, so that it is never negative."""
    table: bool

    def generate(self, seed: bytes) -> bytes:
        """Generate a key pair (two primes) from a seed."""
        return key_bytes(KeyPair.generate(self.key_bits, Stream(seed)))

    def public(self, pair: bytes) -> bytes:
        """Return the public key, which is the modulus, as bytes."""
        return _number_bytes(parsed(pair)[0].public.n, self.key_bits)

    def crack(self, public: bytes) -> bytes | None:
        """Compute the key pair by factoring the modulus; None if the modulus is too long."""
        primes = factor(int.from_bytes(public, "big"))
        return key_bytes(KeyPair(*map(mpz, primes))) if primes else None

    def encrypt(self, pair: bytes, vector: np.ndarray, units: int) -> tuple[bytes, ...]:
        """Encrypt an integer vector in as many ciphertexts as needed."""
        keys, _ = parsed(pair)
        if self.lanes:
            plaintexts = self.lanes.pack(vector + units * self.offset)
        else:
            plaintexts = [int(v) % keys.public.n for v in vector]
        return self._written(self._encrypt(pair, plaintexts))

    def decrypt(self, pair: bytes, ciphertexts: Sequence[bytes], size: int, units: int) -> np.ndarray:
        """Decrypt ciphertexts to (size,) int64, or to Python integers if values are not packed.

        Raises `ProtectionError` for a wrong number of ciphertexts, and for nonzero bits above the lanes.
        """
        keys, _ = parsed(pair)
        if len(ciphertexts) != -(-size // (self.lanes.count if self.lanes else 1)):
            raise ProtectionError("an encrypted sum is truncated, or has too many parts; the round is not applied")
        plaintexts = self._decrypt(keys, self._read(ciphertexts))
        if not self.lanes:
            half = keys.public.n // 2
            return np.array([int(m) if m <= half else int(m - keys.public.n) for m in plaintexts], object)
        if any(m >> (self.lanes.width * self.lanes.count) for m in plaintexts):
            raise ProtectionError("an encrypted sum exceeds its lanes: it was tampered with, and is not decrypted")
        return self.lanes.unpack([int(m) for m in plaintexts], size) - units * self.offset

    def add(self, public: bytes, left: Sequence[bytes], right: Sequence[bytes]) -> tuple[bytes, ...]:
        """Add two encrypted vectors, with one multiplication per ciphertext."""
        return self._written(self._add(_public_key(public), self._read(left), self._read(right)))

    def times(self, public: bytes, ciphertexts: Sequence[bytes], factor: int) -> tuple[bytes, ...]:
        """Multiply an encrypted vector by a whole number, with one exponentiation per ciphertext."""
        return self._written(self._multiply(_public_key(public), self._read(ciphertexts), factor))

    def _encrypt(self, pair: bytes, plaintexts: Sequence[int]) -> list[mpz]:
        keys, obfuscators = parsed(pair)
        made = (obfuscators() if self.table else keys.obfuscators)(len(plaintexts))
        return keys.encrypt(plaintexts, made)

    def _decrypt(self, keys: KeyPair, ciphertexts: Sequence[mpz]) -> list[mpz]:
        return keys.decrypt(ciphertexts)

    def _add(self, key: PublicKey, left: Sequence[mpz], right: Sequence[mpz]) -> list[mpz]:
        return key.add(left, right)

    def _multiply(self, key: PublicKey, ciphertexts: Sequence[mpz], factor: int) -> list[mpz]:
        return key.times(ciphertexts, factor)

    def _written(self, numbers: Sequence[mpz]) -> tuple[bytes, ...]:
        return tuple(_number_bytes(number, 2 * self.key_bits) for number in numbers)

    def _read(self, ciphertexts: Sequence[bytes]) -> list[mpz]:
        if any(len(c) != (2 * self.key_bits + 7) // 8 for c in ciphertexts):
            raise ProtectionError(
                f"a Paillier ciphertext does not have {2 * self.key_bits} bits: it is truncated, or has another key; "
                f"the round is not applied"
            )
        return [mpz(int.from_bytes(c, "big")) for c in ciphertexts]


@dataclass(frozen=True)
class PheScheme(PaillierScheme):
    """Encryption of integer vectors by the package phe."""

    def _encrypt(self, pair: bytes, plaintexts: Sequence[int]) -> list[mpz]:
        return reference.encrypt(parsed(pair)[0].public, plaintexts)

    def _decrypt(self, keys: KeyPair, ciphertexts: Sequence[mpz]) -> list[mpz]:
        return reference.decrypt(keys, ciphertexts)

    def _add(self, key: PublicKey, left: Sequence[mpz], right: Sequence[mpz]) -> list[mpz]:
        return reference.add(key, left, right)

    def _multiply(self, key: PublicKey, ciphertexts: Sequence[mpz], factor: int) -> list[mpz]:
        return reference.times(key, ciphertexts, factor)


def key_bytes(keys: KeyPair) -> bytes:
    """Convert a key pair to bytes (both primes), the format in which key pairs are stored and sent."""
    return b"".join(_number_bytes(prime, keys.public.bits // 2) for prime in (keys.p, keys.q))


def _public_key(public: bytes) -> PublicKey:
    return PublicKey(mpz(int.from_bytes(public, "big")))


def _number_bytes(number: mpz, bits: int) -> bytes:
    return int(number).to_bytes((bits + 7) // 8, "big")


@lru_cache(maxsize=8)
def parsed(pair: bytes) -> tuple[KeyPair, Callable[[], Callable[[int], list[mpz]]]]:
    """Convert bytes from `key_bytes` to a key pair and a cached function that makes the pair's table. Cached."""
    half = len(pair) // 2
    keys = KeyPair(*(mpz(int.from_bytes(part, "big")) for part in (pair[:half], pair[half:])))
    return keys, lru_cache(maxsize=1)(keys.tabulated)
