"""Base of the lattice protections (BFV and CKKS): fixed-point integers that use the whole modulus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfed.crypto.encryptor import Encryptor, Load
from rayfed.crypto.lattice import Lattice
from rayfed.crypto.packing import FixedPoint
from rayfed.errors import ProtectionError, UserError
from rayfed.protections.base import Encryption
from rayfed.registry import component

_MOST_BITS = 27


@component
class LatticeProtection(Encryption):
    """Base of the protections that use lattice encryption."""

    scheme: ClassVar[Literal["bfv", "ckks"]]

    bits: Annotated[int, Field(ge=2, le=32)] | None = None
    """Bits per value. The rounding error is at most half a step, clip / (2^bits - 2). Null: as many as sums allow, up
    to 27."""

    def encryptor(self, load: Load) -> Encryptor:
        """Return an encryptor for sums of the given load, with as many bits per value as fit unless `bits` is set."""
        noise = float(load.units) if load.multiplied else load.clients**0.5
        for bits in (self.bits,) if self.bits else range(_MOST_BITS, 1, -1):
            code = FixedPoint(bits)
            try:
                lattice = getattr(Lattice, self.scheme)(load.units * code.most, noise)
            except OverflowError as error:
                reason = error
                continue
            return Encryptor(LatticeScheme(lattice), code, self.clip, self.clip_buffers, load, self.layer_bounds)
        raise UserError(
            f"{self.scheme}: {reason} for {load.clients} updates with a total weight of up to {load.units}: set fewer "
            f"bits, or weights: uniform"
        )


@dataclass(frozen=True)
class LatticeScheme:
    """Encryption of integer vectors under BFV or CKKS (`rayfed.crypto.encryptor.Scheme`)."""

    lattice: Lattice

    def generate(self, seed: bytes) -> bytes:
        """Generate a key pair from the operating system's randomness, which ignores the seed."""
        return self.lattice.generate()

    def public(self, pair: bytes) -> bytes:
        """Return empty bytes, because additions need no public key."""
        return b""

    def crack(self, public: bytes) -> bytes | None:
        """Return None, because the scheme has no public key to break."""
        return None

    def encrypt(self, pair: bytes, vector: np.ndarray, units: int) -> tuple[bytes, ...]:
        """Encrypt an integer vector, with one value per slot of a ciphertext."""
        return self.lattice.encrypt(pair, vector)

    def decrypt(self, pair: bytes, ciphertexts: Sequence[bytes], size: int, units: int) -> np.ndarray:
        """Decrypt ciphertexts to (size,) int64. Raises `ProtectionError` for a different number of values."""
        vector = self.lattice.decrypt(pair, ciphertexts)
        if len(vector) != size:
            raise ProtectionError("an encrypted sum is truncated; the round is not applied")
        return vector

    def add(self, public: bytes, left: Sequence[bytes], right: Sequence[bytes]) -> tuple[bytes, ...]:
        """Add two encrypted vectors, and return the ciphertexts of the sum."""
        return self.lattice.add(left, right)

    def times(self, public: bytes, ciphertexts: Sequence[bytes], factor: int) -> tuple[bytes, ...]:
        """Multiply an encrypted vector by a whole number, by repeated addition."""
        return self.lattice.times(ciphertexts, factor)
