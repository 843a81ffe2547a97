"""Paillier's cryptosystem with generator n + 1, with the Chinese remainder theorem if p and q are known.

Source: Paillier 1999, 'Public-key cryptosystems based on composite degree residuosity classes', scheme 1 and section 7;
Damgard, Jurik and Nielsen 2010, 'A generalization of Paillier's public-key system', section 4 (fixed-base tables).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import gmpy2
from gmpy2 import mpz

from rayfed.crypto.keys import Stream

SECURE_BITS = 2048
"""Minimum key length that NIST SP 800-57 still allows (112 bits of security)."""
_WINDOW = 8
"""Number of exponent bits per entry of a fixed-base table: a byte."""
_COFACTOR = 16
"""Maximum number of bits of (p - 1) / r, with r the large prime factor."""
_SURPLUS = 16
"""Number of bytes by which a random number is longer than its modulus, so that all residues are equally likely."""


@dataclass(frozen=True)
class PublicKey:
    """Paillier public key, which is sufficient to encrypt and to add."""

    n: mpz

    @cached_property
    def square(self) -> mpz:
        """Return the modulus of ciphertexts, n squared."""
        return self.n**2

    @property
    def bits(self) -> int:
        """Return the key length in bits."""
        return int(self.n.bit_length())

    def encrypt(self, plaintexts: Sequence[int]) -> list[mpz]:
        """Encrypt residues modulo n, and return the ciphertexts."""
        obfuscators = gmpy2.powmod_base_list(_random(self.n, len(plaintexts)), self.n, self.square)
        return [(1 + m * self.n) * r % self.square for m, r in zip(plaintexts, obfuscators, strict=True)]

    def add(self, left: Sequence[mpz], right: Sequence[mpz]) -> list[mpz]:
        """Add encrypted numbers pairwise, and return the ciphertexts of the sums."""
        return [a * b % self.square for a, b in zip(left, right, strict=True)]

    def times(self, ciphertexts: Sequence[mpz], factor: int) -> list[mpz]:
        """Multiply encrypted numbers by a whole number, and return the ciphertexts."""
        return list(gmpy2.powmod_base_list(list(ciphertexts), factor, self.square))


@dataclass(frozen=True)
class KeyPair:
    """Paillier key pair: the two primes, which are the only secret."""

    p: mpz
    q: mpz

    @classmethod
    def generate(cls, bits: int, stream: Stream) -> KeyPair:
        """Generate a key pair: two primes of equal length from a secret stream, with a product of `bits` bits."""
        while True:
            p, q = _prime(bits // 2, stream), _prime(bits // 2, stream)
            if p != q and gmpy2.gcd(p * q, (p - 1) * (q - 1)) == 1:
                return cls(p, q)

    @cached_property
    def public(self) -> PublicKey:
        """Return the public key of the pair."""
        return PublicKey(self.p * self.q)

    def encrypt(self, plaintexts: Sequence[int], obfuscators: Iterable[mpz] | None = None) -> list[mpz]:
        """Encrypt residues modulo n, each with a fresh or precomputed obfuscator, and return the ciphertexts."""
        made = self.obfuscators(len(plaintexts)) if obfuscators is None else obfuscators
        n, square = self.public.n, self.public.square
        return [(1 + m * n) * r % square for m, r in zip(plaintexts, made, strict=False)]

    def obfuscators(self, count: int) -> list[mpz]:
        """Sample `count` random n-th powers modulo n squared, with which plaintexts are hidden.

        Modulo p squared these are the p-th powers, and a^p depends only on a modulo p. So exponents and numbers have
        half the length.
        """
        modulo_p = gmpy2.powmod_base_list(_random(self.p, count), self.p, self.p**2)
        modulo_q = gmpy2.powmod_base_list(_random(self.q, count), self.q, self.q**2)
        return self._joined(modulo_p, modulo_q)

    def tabulated(self) -> Callable[[int], list[mpz]]:
        """Return a function that does the same as `obfuscators` in a fifth of the time, with tables of powers.

        The tables generate all p-th powers, so the result is as uniform, and no assumption is added to Paillier's.
        """
        tables = [_Table.from_base(prime) for prime in (self.p, self.q)]
        return lambda count: self._joined(*(table.random(count) for table in tables))

    def decrypt(self, ciphertexts: Sequence[mpz]) -> list[mpz]:
        """Decrypt ciphertexts to residues modulo n."""
        n = self.public.n
        modulo = [
            [(power - 1) // prime * scale % prime for power in powers]
            for prime, scale, powers in (
                (prime, self._scale(prime), gmpy2.powmod_base_list(list(ciphertexts), prime - 1, prime**2))
                for prime in (self.p, self.q)
            )
        ]
        inverse = gmpy2.invert(self.p, self.q)
        return [(m + self.p * ((k - m) * inverse % self.q)) % n for m, k in zip(*modulo, strict=True)]

    def _scale(self, prime: mpz) -> mpz:
        """Return Paillier's h: the inverse of ((n + 1)^(prime - 1) - 1) / prime."""
        return gmpy2.invert((gmpy2.powmod(self.public.n + 1, prime - 1, prime**2) - 1) // prime, prime)

    def _joined(self, modulo_p: Sequence[mpz], modulo_q: Sequence[mpz]) -> list[mpz]:
        """Return the residues modulo n squared from those modulo the squares of p and q."""
        p, q = self.p**2, self.q**2
        inverse = gmpy2.invert(p, q)
        return [a + p * ((b - a) * inverse % q) for a, b in zip(modulo_p, modulo_q, strict=True)]


@dataclass(frozen=True)
class _Table:
    """Table of powers g^(i 256^j) of one p-th power g modulo p squared."""

    prime: mpz
    rows: list[list[mpz]]

    @classmethod
    def from_base(cls, prime: mpz) -> _Table:
        modulus = prime**2
        base = gmpy2.powmod(_generator(prime), prime, modulus)
        rows = []
        for _ in range((prime.bit_length() + 7) // 8 + _SURPLUS):
            row = [mpz(1)]
            for _ in range((1 << _WINDOW) - 1):
                row.append(row[-1] * base % modulus)
            rows.append(row)
            base = row[-1] * base % modulus
        return cls(prime, rows)

    def random(self, count: int) -> list[mpz]:
        """Sample `count` powers of g. The random exponents are so long that the powers are statistically uniform."""
        return [self._power(secrets.token_bytes(len(self.rows))) for _ in repeat(None, count)]

    def _power(self, exponent: bytes) -> mpz:
        modulus, power = self.prime**2, mpz(1)
        for row, digit in zip(self.rows, exponent, strict=True):
            power = power * row[digit] % modulus
        return power


def _random(modulus: mpz, count: int) -> list[mpz]:
    """Sample nonzero residues."""
    size = (modulus.bit_length() + 7) // 8 + _SURPLUS
    return [1 + mpz(int.from_bytes(secrets.token_bytes(size), "little")) % (modulus - 1) for _ in repeat(None, count)]


def _prime(bits: int, stream: Stream) -> mpz:
    """Generate a prime p = 2kr + 1 with r prime and small k, so that the factors of p - 1 are known.

    Its two highest bits are set, so that the product of two such primes has twice the bits.
    """
    low, high = mpz(3) << (bits - 2), mpz(1) << bits
    while True:
        drawn = int.from_bytes(stream.read((bits + 7) // 8), "little") & ((1 << (bits - _COFACTOR - 1)) - 1)
        r = gmpy2.next_prime(drawn | 1 << (bits - _COFACTOR - 1))
        for k in range(int(low // (2 * r)) + 1, int(high // (2 * r))):
            if gmpy2.is_prime(2 * k * r + 1):
                return 2 * k * r + 1


def _generator(prime: mpz) -> mpz:
    """Return a generator of the multiplicative group modulo a prime."""
    factors, rest = set[int](), prime - 1
    for divisor in range(2, 1 << _COFACTOR):
        while rest % divisor == 0:
            factors.add(divisor)
            rest //= divisor
    tried = [(prime - 1) // factor for factor in {*factors, rest} - {1}]
    if not gmpy2.is_prime(rest) and rest > 1:
        raise ValueError("the factors of p - 1 are unknown: use primes from `KeyPair.generate`")
    while True:
        candidate = _random(prime, 1)[0]
        if all(gmpy2.powmod(candidate, exponent, prime) != 1 for exponent in tried):
            return candidate
