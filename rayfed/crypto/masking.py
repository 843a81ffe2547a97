"""Masks that vanish in a sum: what clients and server do so that nobody sees a single vector, and who drops out may.

Source: Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", figure 4 (for an
honest but curious server: without its consistency check and signatures); Bell et al. 2020, "Secure Single-Server
Aggregation with (Poly)Logarithmic Overhead", section 3 (a client has masks with k neighbours only).

Phases: clients advertise keys; share secrets among neighbours; send masked vectors; reveal what unmasks the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from rayfed.crypto import shamir
from rayfed.crypto.keys import Stream, derive, lock, unlock
from rayfed.errors import ProtectionError

_SECRET = 32


@dataclass(frozen=True)
class Advertised:
    """A client's two public keys."""

    box: bytes
    """Under which others send it shares."""
    mask: bytes
    """From which pairs make their common masks."""


@dataclass(frozen=True)
class Revealed:
    """What a client gives away in the last phase: for each other client a share of one of its two secrets."""

    selves: Mapping[int, int]
    """Of the seeds of those whose vectors are in the sum."""
    masks: Mapping[int, int]
    """Of the mask keys of those who dropped out after they had shared."""


def neighbours(clients: Sequence[int], degree: int, order: np.random.Generator) -> dict[int, list[int]]:
    """Each client's neighbours in a ring of a random order, half of them on either side; all others where so few are.

    `degree` is even; the order is public.
    """
    if len(clients) <= degree + 1:
        return {c: [other for other in clients if other != c] for c in clients}
    ring = [clients[i] for i in order.permutation(len(clients))]
    near = range(1, degree // 2 + 1)
    return {c: sorted(ring[(i + s * d) % len(ring)] for d in near for s in (1, -1)) for i, c in enumerate(ring)}


@dataclass(frozen=True)
class Participant:
    """One client in one round; all that is secret follows from `secret`, which is its own and the round's."""

    client: int
    secret: bytes

    def advertise(self) -> Advertised:
        """Phase 0."""
        return Advertised(_public(self._key("box")), _public(self._key("mask")))

    def share(self, directory: Mapping[int, Advertised], threshold: int) -> dict[int, bytes]:
        """Phase 1: for each neighbour in the directory, a share of both secrets in a box that it alone can open.

        Raises `ProtectionError` where so few neighbours advertised that the threshold cannot be met.
        """
        if len(directory) < threshold:
            raise ProtectionError(f"client {self.client} has {len(directory)} neighbours left, {threshold} are needed")
        holders, stream = sorted(directory), Stream(derive(self.secret, "polynomials"))
        selves = shamir.split(self._seed, threshold, holders, stream)
        masks = shamir.split(self._secret("mask"), threshold, holders, stream)
        size = shamir.SHARE_BYTES
        return {
            holder: lock(self._box_key(directory[holder]), selves[holder].to_bytes(size) + masks[holder].to_bytes(size))
            for holder in holders
        }

    def mask(self, vector: np.ndarray, directory: Mapping[int, Advertised]) -> np.ndarray:
        """Phase 2: (D,) uint64 plus its own mask and those with the neighbours that have shared, modulo 2^64."""
        masked: np.ndarray = vector + expand(self._seed, len(vector))
        for other, advertised in directory.items():
            masked += _pairwise(self.client, other, self._key("mask"), advertised.mask, len(vector))
        return masked

    def reveal(
        self,
        boxes: Mapping[int, bytes],
        directory: Mapping[int, Advertised],
        survivors: Iterable[int],
        dropped: Iterable[int],
    ) -> Revealed:
        """Phase 3: the shares that unmask the sum of the survivors' vectors.

        Raises `ProtectionError` for a server that asks for both secrets of a client, and for boxes that were tampered
        with.
        """
        survivors, dropped = set(survivors), set(dropped)
        if survivors & dropped:
            raise ProtectionError(
                f"the server asks client {self.client} for both secrets of client {min(survivors & dropped)}, which "
                f"would show its vector: nothing is revealed"
            )
        opened = {c: unlock(self._box_key(directory[c]), box) for c, box in boxes.items() if c in survivors | dropped}
        size = shamir.SHARE_BYTES
        return Revealed(
            {c: int.from_bytes(opened[c][:size]) for c in opened if c in survivors},
            {c: int.from_bytes(opened[c][size:]) for c in opened if c in dropped},
        )

    @property
    def _seed(self) -> bytes:
        return self._secret("self")

    def _secret(self, purpose: str) -> bytes:
        return derive(self.secret, purpose)

    def _key(self, purpose: str) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self._secret(purpose))

    def _box_key(self, other: Advertised) -> bytes:
        return derive(_agreed(self._key("box"), other.box), "shares")


def unmasked(
    total: np.ndarray,
    survivors: Sequence[int],
    dropped: Sequence[int],
    near: Mapping[int, Sequence[int]],
    directory: Mapping[int, Advertised],
    revealed: Mapping[int, Revealed],
    threshold: int,
) -> np.ndarray:
    """The server's last step: the sum of the survivors' vectors, (D,) uint64, from that of their masked ones.

    `dropped` had shared but sent no vector; `near` and `directory` are of all who shared; `revealed` is by who gave it.
    Raises `ProtectionError` where fewer than `threshold` shares of a secret came.
    """
    total = total.copy()
    for client in survivors:
        shares = {holder: said.selves[client] for holder, said in revealed.items() if client in said.selves}
        total -= expand(_joined(client, shares, threshold), len(total))
    for client in dropped:
        shares = {holder: said.masks[client] for holder, said in revealed.items() if client in said.masks}
        key = X25519PrivateKey.from_private_bytes(_joined(client, shares, threshold))
        for other in set(near[client]) & set(survivors):
            total += _pairwise(client, other, key, directory[other].mask, len(total))
    return total


def _joined(client: int, shares: Mapping[int, int], threshold: int) -> bytes:
    try:
        return shamir.join(shares, threshold, _SECRET)
    except ProtectionError as error:
        raise ProtectionError(f"the sum cannot be unmasked: of client {client}, {error}") from None


def expand(seed: bytes, size: int) -> np.ndarray:
    """A seed's mask: (size,) uint64, uniform; AES-256 in counter mode."""
    stream = Cipher(AES(seed), CTR(bytes(16))).encryptor().update(bytes(8 * size))
    return np.frombuffer(stream, "<u8").copy()


def _pairwise(client: int, other: int, own: X25519PrivateKey, public: bytes, size: int) -> np.ndarray:
    """What a client adds for its pair with another, who adds the negative."""
    mask = expand(derive(_agreed(own, public), "mask"), size)
    return mask if client < other else -mask


def _agreed(own: X25519PrivateKey, public: bytes) -> bytes:
    return own.exchange(X25519PublicKey.from_public_bytes(public))


def _public(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()
