"""Key derivation, and authenticated encryption of data that is bound to a context.

Source: HKDF, RFC 5869; ChaCha20, RFC 8439; AES-GCM, NIST SP 800-38D.
"""

from __future__ import annotations

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from rayfed.core.seeds import encode_key
from rayfed.errors import ProtectionError

_NONCE = 12


def derive(secret: bytes, *purpose: str | int) -> bytes:
    """Derive a key of 32 bytes for one purpose, from which no other key can be computed."""
    return HKDF(SHA256(), length=32, salt=b"rayfed", info=encode_key(*purpose)).derive(secret)


class Stream:
    """Cryptographic random stream, reproducible on every machine from a key of 32 bytes."""

    def __init__(self, key: bytes) -> None:
        self._keystream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes of the stream."""
        return self._keystream.update(bytes(size))


def lock(key: bytes, data: bytes, about: bytes = b"") -> bytes:
    """Encrypt `data`, authenticated together with the context `about`, which the result does not contain."""
    nonce = secrets.token_bytes(_NONCE)
    return nonce + AESGCM(key).encrypt(nonce, data, about)


def unlock(key: bytes, box: bytes, about: bytes = b"") -> bytes:
    """Decrypt data that `lock` encrypted. Raises `ProtectionError` for a wrong key or context, or modified data."""
    try:
        return AESGCM(key).decrypt(box[:_NONCE], box[_NONCE:], about)
    except (InvalidTag, ValueError):
        raise ProtectionError(
            "a box cannot be decrypted: it was tampered with, or encrypted with another key or context"
        ) from None
