"""Encryption of updates as tagged integers, addition of encrypted updates, and decryption of the sums.

Clients hold `Keys`; an `Encryptor` is public. Anyone can add and multiply, and only holders of the keys can decrypt. A
sum is decrypted only if its tag matches. So data that were tampered with, truncated or encrypted with other keys are
never used as an update. The tag covers everything that identifies the sum: session, round, names and shapes, and each
client's number, weight and factor. The caller of `open` decides which sums may be decrypted
(`rayfed.protections.encrypted`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol

import numpy as np

from rayfed.crypto.keys import derive
from rayfed.crypto.layout import LayerBounds, UpdateLayout, flatten_update
from rayfed.crypto.tags import PRIME, Tagger, add_tags, multiply_tag
from rayfed.errors import ProtectionError, UserError
from rayfed.update import Encrypted, Named, Share, Update

_NONCE = 16
"""Length of a nonce in bytes: among 2^32 encrypted updates, two are equal with probability 2^-65."""


@dataclass(frozen=True)
class Load:
    """Largest sum of encrypted updates that the parameters must support."""

    clients: int
    units: int
    """Sum of the whole numbers by which the clients' updates are multiplied."""
    multiplied: bool = False
    """Whether the server multiplies after encryption; otherwise clients do before."""


class Code(Protocol):
    """Protocol for encoding floats as integers, which can then be encrypted and added."""

    def largest(self, clip: float) -> int:
        """Return the largest magnitude of an encoded value, given the clip bound of the floats."""

    def encode(self, values: np.ndarray, clip: np.ndarray) -> np.ndarray:
        """Encode floats (D,) as integers (D,), after clipping each value to its bound (D,)."""

    def decode(self, integers: np.ndarray, clip: np.ndarray) -> np.ndarray:
        """Decode integers (D,), or sums of encoded integers, to floats (D,)."""


class Scheme(Protocol):
    """Protocol for additively homomorphic encryption of integer vectors, with parameters for one load."""

    def generate(self, seed: bytes) -> bytes:
        """Generate a key pair. The result is deterministic if the scheme supports seeds."""

    def public(self, pair: bytes) -> bytes:
        """Return the public key of a key pair; empty if additions need no public key."""

    def crack(self, public: bytes) -> bytes | None:
        """Compute the key pair from the public key, as an attacker would; None if that is infeasible."""

    def encrypt(self, pair: bytes, vector: np.ndarray, units: int) -> tuple[bytes, ...]:
        """Encrypt an integer vector that was multiplied by `units`, and return the ciphertexts."""

    def decrypt(self, pair: bytes, ciphertexts: Sequence[bytes], size: int, units: int) -> np.ndarray:
        """Decrypt ciphertexts to integers (size,), given the total factor `units` of the added vectors."""

    def add(self, public: bytes, left: Sequence[bytes], right: Sequence[bytes]) -> tuple[bytes, ...]:
        """Add two encrypted vectors, and return the ciphertexts of the sum."""

    def times(self, public: bytes, ciphertexts: Sequence[bytes], factor: int) -> tuple[bytes, ...]:
        """Multiply an encrypted vector by a factor of 1 or more, and return the ciphertexts."""


@dataclass(frozen=True)
class Keys:
    """Secret keys that the clients of an arm share in a round, and the server does not have."""

    secret: bytes
    """Secret from which tags are derived, different in each session
    (`rayfed.protections.encrypted.EncryptedChannel`)."""
    pair: bytes
    """The scheme's secret and public key."""

    def tagger(self, round: int, layout: UpdateLayout) -> Tagger:
        """Return the generator of tags for vectors of one round and one layout."""
        return Tagger(derive(self.secret, "tags", round, repr(layout)))


@dataclass(frozen=True)
class Encryptor:
    """Encryption of updates, addition of encrypted updates, and decryption of the sums."""

    scheme: Scheme
    code: Code
    clip: float
    clip_buffers: float
    load: Load
    clip_layers: LayerBounds = ()

    def __post_init__(self) -> None:
        """Raise `UserError` if tags cannot distinguish all sums of the given load."""
        if 2 * self.load.units * self._largest >= PRIME:
            raise UserError(
                f"a clip bound of {max(self.clip, self.clip_buffers):g} is too large to encrypt: "
                f"lower clip or clip_buffers"
            )

    def encrypt(self, keys: Keys, update: Update, weight: int) -> Encrypted:
        """Return a client's encrypted update, multiplied by the client's weight unless the server multiplies."""
        layout = UpdateLayout.from_update(update)
        before = 1 if self.load.multiplied else weight
        vector = before * self.code.encode(flatten_update(update), self._bounds(layout))
        share = Share(update.client, weight, before, 1, secrets.token_bytes(_NONCE))
        return Encrypted(
            round=update.round,
            shares=(share,),
            tensors=layout.tensors,
            buffers=layout.buffers,
            parameters=self,
            public=self.scheme.public(keys.pair),
            ciphertexts=self.scheme.encrypt(keys.pair, vector, before),
            tag=keys.tagger(update.round, layout).tag(vector, *_context(share)),
        )

    def describe(self) -> str:
        """Describe, in words, the sums that can be encrypted and the resolution of their values."""
        return (
            f"sums of up to {self.load.clients} clients: {describe_resolution(self.code, self.clip, self.clip_buffers)}"
        )

    def clipped(self, update: Update) -> int:
        """Return the number of an update's values that `encrypt` clips."""
        return count_beyond(update, self.clip, self.clip_buffers, self.clip_layers)

    def add(self, left: Encrypted, right: Encrypted) -> Encrypted:
        """Add two encrypted sums. Raises `ProtectionError` unless round, form and public key are equal."""
        self._check(left)
        self._check(right)
        self._check_room(left.shares + right.shares)
        for what in ("round", "tensors", "buffers", "public"):
            if getattr(left, what) != getattr(right, what):
                named = {"tensors": "parameters", "public": "public key"}.get(what, what)
                raise ProtectionError(
                    f"encrypted updates cannot be added: the {named} of clients {_clients(left)} and of clients "
                    f"{_clients(right)} differ; the round is not applied"
                )
        if len(left.ciphertexts) != len(right.ciphertexts):
            raise ProtectionError(
                f"an encrypted update is truncated: clients {_clients(left)} sent {len(left.ciphertexts)} ciphertexts, "
                f"clients {_clients(right)} sent {len(right.ciphertexts)}; the round is not applied"
            )
        return replace(
            left,
            shares=left.shares + right.shares,
            ciphertexts=self.scheme.add(left.public, left.ciphertexts, right.ciphertexts),
            tag=add_tags(left.tag, right.tag),
        )

    def times(self, encrypted: Encrypted, factor: int) -> Encrypted:
        """Multiply an encrypted sum by a public factor of at least 1."""
        self._check(encrypted)
        shares = tuple(share._replace(after=factor * share.after) for share in encrypted.shares)
        self._check_room(shares)
        return replace(
            encrypted,
            shares=shares,
            ciphertexts=self.scheme.times(encrypted.public, encrypted.ciphertexts, factor),
            tag=multiply_tag(encrypted.tag, factor),
        )

    def weighted(self, encrypted: Sequence[Encrypted], pieces: Sequence[int]) -> Encrypted:
        """Return the encrypted weighted sum of vectors. A vector's weight is its number of pieces, possibly 0."""
        return reduce(self.add, (self.times(s, count) for s, count in zip(encrypted, pieces, strict=True) if count))

    def open(self, keys: Keys, encrypted: Encrypted, alone: bool = False) -> tuple[Named, Named, int]:
        """Decrypt a sum: return the weighted sums of tensors and buffers, in float64, and the sum of the weights.

        Raises `ProtectionError` for any data that are not the sum of updates encrypted with these keys. A sum that
        reveals one client's update also raises it, unless `alone` is true.
        """
        self._check(encrypted)
        self._check_shares(encrypted, fewest=1 if alone else 2)
        self._check_room(encrypted.shares)
        if encrypted.public != self.scheme.public(keys.pair):
            raise ProtectionError(
                "an encrypted sum has another public key than the clients and is not decrypted; restart the run"
            )
        total = self._decrypted(keys.pair, encrypted)
        if max(map(abs, total.tolist()), default=0) > _units(encrypted) * self._largest:
            raise ProtectionError(
                f"the encrypted sum of round {encrypted.round} is larger than its clients' updates allow: it was "
                f"tampered with, or encrypted with other keys; the round is not applied"
            )
        contexts = [(share.after, _context(share)) for share in encrypted.shares]
        if not keys.tagger(encrypted.round, _layout(encrypted)).holds(total, encrypted.tag, contexts):
            raise ProtectionError(
                f"the encrypted sum of round {encrypted.round} is not the sum of its clients' updates: it was "
                f"tampered with, or encrypted with other keys; the round is not applied"
            )
        return self._decoded(encrypted, total)

    def broken(self, pair: bytes, encrypted: Encrypted) -> tuple[Named, Named]:
        """Decrypt one client's update and buffers, as an attacker who has computed the key pair.

        The secret of the tags is not needed.
        """
        tensors, buffers, weight = self._decoded(encrypted, self._decrypted(pair, encrypted))
        return _single(tensors, weight), _single(buffers, weight)

    @property
    def _largest(self) -> int:
        """Largest magnitude of an encoded value."""
        bounds = [self.clip, self.clip_buffers, *(bound for _, bound in self.clip_layers)]
        return max(self.code.largest(bound) for bound in bounds)

    def _bounds(self, layout: UpdateLayout) -> np.ndarray:
        return layout.bounds(self.clip, self.clip_buffers, self.clip_layers)

    def _check(self, encrypted: Encrypted) -> None:
        if encrypted.parameters != self:
            raise ProtectionError(
                f"clients {_clients(encrypted)} encrypted their updates with parameters that differ from this arm's: "
                f"the round is not applied"
            )

    def _check_shares(self, encrypted: Encrypted, fewest: int) -> None:
        """Raise `ProtectionError` for too few clients, a repeated client, or factors below 1.

        The tag distinguishes factors only modulo its prime. A factor of at least 1 never removes the update of a listed
        client from the sum.
        """
        clients = {share.client for share in encrypted.shares}
        if len(clients) < max(fewest, len(encrypted.shares)):
            raise ProtectionError(
                f"the sum of clients {_clients(encrypted)} would reveal one client's update and is not decrypted"
            )
        for share in encrypted.shares:
            before, most = (1, self.load.units) if self.load.multiplied else (share.weight, 1)
            exact = all(type(number) is int for number in share[:4])  # no True, 1.0 or NumPy integers
            if not exact or share.weight < 1 or share.before != before or not 1 <= share.after <= most:
                raise ProtectionError(
                    f"client {share.client} is listed with weight {share.weight}, multiplied by {share.before} and "
                    f"{share.after}, which is invalid in an honest run: the sum is not decrypted"
                )

    def _check_room(self, shares: Sequence[Share]) -> None:
        units = sum(share.before * share.after for share in shares)
        if units > self.load.units or len(shares) > self.load.clients:
            raise ProtectionError(
                f"encrypted updates of {len(shares)} clients with total factor {units} exceed the limits of a sum: "
                f"{self.load.clients} clients and total factor {self.load.units}; the round is not applied"
            )

    def _decrypted(self, pair: bytes, encrypted: Encrypted) -> np.ndarray:
        return self.scheme.decrypt(pair, encrypted.ciphertexts, _layout(encrypted).size, _units(encrypted))

    def _decoded(self, encrypted: Encrypted, total: np.ndarray) -> tuple[Named, Named, int]:
        weight, layout = sum(share.weight for share in encrypted.shares), _layout(encrypted)
        bounds = self._bounds(layout)
        return *layout.split_by_name(self.code.decode(total, bounds) * (weight / _units(encrypted))), weight


def describe_resolution(code: Code, clip: float, clip_buffers: float) -> str:
    """Describe, in words, the range and the resolution of encoded values and buffers."""
    step, coarse = code.decode(np.ones(2, np.int64), np.array([clip, clip_buffers]))
    return f"values up to {clip:g} in steps of {step:.1e}, buffers up to {clip_buffers:g} in steps of {coarse:.1e}"


def count_beyond(update: Update, clip: float, clip_buffers: float, clip_layers: LayerBounds = ()) -> int:
    """Return the number of an update's values that exceed the clip bounds of parameters and buffers."""
    return int(
        (
            np.abs(flatten_update(update)) > UpdateLayout.from_update(update).bounds(clip, clip_buffers, clip_layers)
        ).sum()
    )


def _layout(encrypted: Encrypted) -> UpdateLayout:
    return UpdateLayout(encrypted.tensors, encrypted.buffers)


def _units(encrypted: Encrypted) -> int:
    return sum(share.before * share.after for share in encrypted.shares)


def _context(share: Share) -> tuple[int | str, ...]:
    """Return the context of an update, from which its tag's mask is derived."""
    return share.client, share.weight, share.before, share.nonce.hex()


def _clients(encrypted: Encrypted) -> str:
    return ", ".join(str(share.client) for share in encrypted.shares)


def _single(tensors: Named, weight: int) -> Named:
    return {name: (t / weight).float() for name, t in tensors.items()}
