"""Paillier's cryptosystem by the package phe, one number after another: a reference for `rayfed.crypto.paillier`.

Keys and ciphertexts are those of `rayfed.crypto.paillier`. phe is imported only if it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from gmpy2 import mpz

from rayfed.crypto.paillier import KeyPair, PublicKey

if TYPE_CHECKING:
    from phe import EncryptedNumber, PaillierPrivateKey, PaillierPublicKey


def encrypt(key: PublicKey, plaintexts: Sequence[int]) -> list[mpz]:
    """Encrypt residues modulo n, and return the ciphertexts."""
    public = public_key(key)
    return [mpz(public.raw_encrypt(int(plaintext))) for plaintext in plaintexts]


def decrypt(keys: KeyPair, ciphertexts: Sequence[mpz]) -> list[mpz]:
    """Decrypt ciphertexts to residues modulo n."""
    private = private_key(keys)
    return [mpz(private.raw_decrypt(int(ciphertext))) for ciphertext in ciphertexts]


def add(key: PublicKey, left: Sequence[mpz], right: Sequence[mpz]) -> list[mpz]:
    """Add encrypted numbers pairwise, and return the ciphertexts of the sums."""
    pairs = zip(_numbers(key, left), _numbers(key, right), strict=True)
    return [_ciphertext(first + second) for first, second in pairs]


def times(key: PublicKey, ciphertexts: Sequence[mpz], factor: int) -> list[mpz]:
    """Multiply encrypted numbers by a whole number, and return the ciphertexts."""
    return [_ciphertext(number * factor) for number in _numbers(key, ciphertexts)]


@lru_cache(maxsize=8)
def public_key(key: PublicKey) -> PaillierPublicKey:
    """Convert a public key to a public key of phe. Cached."""
    from phe import PaillierPublicKey

    return PaillierPublicKey(int(key.n))


@lru_cache(maxsize=8)
def private_key(keys: KeyPair) -> PaillierPrivateKey:
    """Convert a key pair to a private key of phe. Cached."""
    from phe import PaillierPrivateKey

    return PaillierPrivateKey(public_key(keys.public), int(keys.p), int(keys.q))


def _numbers(key: PublicKey, ciphertexts: Sequence[mpz]) -> list[EncryptedNumber]:
    from phe import EncryptedNumber

    return [EncryptedNumber(public_key(key), int(ciphertext)) for ciphertext in ciphertexts]


def _ciphertext(number: EncryptedNumber) -> mpz:
    # `be_secure` would add new randomness to a sum. This hides nothing from the server, which knows the summands.
    return mpz(number.ciphertext(be_secure=False))
