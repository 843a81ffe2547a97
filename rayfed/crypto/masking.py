"""Protocol of secure aggregation: pairwise masks that cancel in the sum, with clients that drop out.

Sources: Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", figure 4, with
the consistency check but without a public-key infrastructure. Instead of the signatures of figure 4, pairs of clients
authenticate with the keys that they agree on. A server that distributes forged keys is therefore not detected. Bell et
al. 2020, "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", section 3, for the sparse graph. Clients
compare models because of Pasquini et al. 2022, "Eluding Secure Aggregation in Federated Learning via Model
Inconsistency".

Phases: clients advertise keys (0) and share secrets with their neighbours (1). They agree on the clients that have
shared and on the model, and send masked vectors (2). They confirm whose vectors arrived (3), and reveal shares that
unmask the sum (4).
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from rayfed.crypto import shamir
from rayfed.crypto.keys import Stream, derive, lock, unlock
from rayfed.errors import ProtectionError

TAG_BYTES = 32
_SECRET = 32
_NUMBERS = 1 << 63
"""Exclusive upper bound of client numbers, which start at 0: a share for -1 would be the secret."""


@dataclass(frozen=True)
class Advertised:
    """Public keys that a client advertises for secure aggregation."""

    box: bytes
    """Key with which other clients encrypt shares for this client."""
    mask: bytes
    """Key from which pairs of clients derive their common masks."""


Directory = Mapping[int, Advertised]
"""Public keys of all clients that advertised keys; every client receives all of them."""
Transcript = dict[str, bytes]
"""Digests of the questions to which a client has replied in a round, by phase."""


@dataclass(frozen=True)
class Revealed:
    """Secret shares that a client reveals in the last phase: one per other client, of its seed or of its mask key."""

    selves: Mapping[int, int]
    """Shares of the seeds of clients whose vectors are in the sum."""
    masks: Mapping[int, int]
    """Shares of the mask keys of clients that dropped out after sharing."""


@dataclass(frozen=True)
class MaskingSetting:
    """Public parameters of a round that a client knows before it begins."""

    run: bytes
    """Public bytes that are unique to an arm of a run."""
    round: int
    threshold: int
    """Minimum number of a client and its neighbours that must stay."""
    degree: int
    """Number of a client's neighbours if enough clients are present: even, or at least that of the complete graph."""


class KeyList(Mapping[int, Advertised]):
    """Immutable directory of public keys with a cached digest.

    The digest is not pickled: each client hashes the keys that it receives, and trusts no other digest.
    """

    def __init__(self, keys: Directory) -> None:
        self._keys = dict(keys)

    @classmethod
    def from_directory(cls, directory: Directory) -> KeyList:
        """Convert a directory of public keys to a key list. A key list is returned unchanged."""
        return directory if type(directory) is cls else cls(directory)

    def __getitem__(self, client: int) -> Advertised:
        return self._keys[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, client: object) -> bool:
        return client in self._keys

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, KeyList) else self._keys == other

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[type[KeyList], tuple[dict[int, Advertised]]]:
        return KeyList, (self._keys,)

    @cached_property
    def digest(self) -> bytes:
        """Return a collision-resistant digest of the directory, 32 bytes."""
        return _digest("directory", *((c, keys.box, keys.mask) for c, keys in sorted(self._keys.items())))


def neighbours(directory: Directory, degree: int) -> dict[int, tuple[int, ...]]:
    """Return each client's neighbours: half on either side of a ring or, in small rounds, all other clients.

    The order of the ring is derived from all public keys. So it is unknown before these are advertised, and clients
    with the directory can check it.
    """
    return dict(_graph(KeyList.from_directory(directory), degree))


@lru_cache(maxsize=8)
def _graph(directory: KeyList, degree: int) -> dict[int, tuple[int, ...]]:
    """Return `neighbours`, cached by the digest for all clients of a process."""
    clients = sorted(directory)
    if len(clients) <= degree + 1:
        return {c: tuple(other for other in clients if other != c) for c in clients}
    ring = sorted(clients, key=lambda client: _digest("ring", directory.digest, client))
    near = range(1, degree // 2 + 1)
    return {c: tuple(sorted(ring[(i + s * d) % len(ring)] for d in near for s in (1, -1))) for i, c in enumerate(ring)}


def hash_directory(directory: Directory) -> bytes:
    """Return a collision-resistant digest of a directory of public keys, 32 bytes."""
    return KeyList.from_directory(directory).digest


@dataclass(frozen=True)
class Participant:
    """One client's side of the secure aggregation protocol in one round.

    All secrets are derived from `secret`, which is unique to the client and round. The `transcript` is empty when the
    round begins, and the client keeps it until the round ends.

    Every phase raises `ProtectionError` and reveals nothing if a question contradicts an earlier one or would not come
    from an honest server. A repeated question gets the same reply.
    """

    client: int
    secret: bytes
    setting: MaskingSetting
    transcript: Transcript

    def advertise(self) -> Advertised:
        """Return the client's public keys (phase 0)."""
        return Advertised(_public(self._box_key), _public(self._mask_key))

    def share(self, directory: Directory) -> dict[int, bytes]:
        """Return encrypted shares of the client's two secrets, for itself and each neighbour (phase 1).

        Only the receiver can decrypt its box.
        """
        directory = KeyList.from_directory(directory)
        keys = [key for each in directory.values() for key in (each.box, each.mask)]
        if directory.get(self.client) != self.advertise() or len(set(keys)) < len(keys):
            raise self._refusal("received a directory with wrong keys of this client, or with one key twice")
        if not all(type(client) is int and 0 <= client < _NUMBERS for client in directory):
            raise self._refusal("received a directory with invalid client numbers")
        holders, needed = self._around(directory, directory), self.setting.threshold
        if not needed <= len(holders) < 2 * needed:
            raise self._refusal(
                f"has {len(holders)} clients in its neighbourhood (including itself), but needs {needed}, which must "
                f"be more than half of them"
            )
        root = hash_directory(directory)
        self._answers_once("share", root)
        # Bound to this directory, because shares for two directories are inconsistent.
        stream = Stream(derive(self.secret, "polynomials", root.hex()))
        selves = shamir.split(self._seed, needed, holders, stream)
        masks = shamir.split(self._secret("mask"), needed, holders, stream)
        size = shamir.SHARE_BYTES
        return {
            holder: lock(
                self._common(directory, holder, "shares"),
                selves[holder].to_bytes(size) + masks[holder].to_bytes(size),
                self._about("box", self.client, holder, root),
            )
            for holder in holders
        }

    def agree(self, directory: Directory, shared: Collection[int], model: bytes) -> dict[int, bytes]:
        """Return tags that confirm the clients to mask with, by receiver (phase 2, before training).

        The tag proves to a neighbour with which clients, and for which model (a digest), this client masks.
        """
        directory = KeyList.from_directory(directory)
        self._goes_on("share", directory.digest)
        around = self._around(directory, shared)
        self._check_among(shared, directory, around)
        statement = self._shared(directory, shared, model)
        self._answers_once("agree", statement)
        self.transcript["model"] = model
        return self._tags("agree", directory, around, statement)

    def mask(
        self, vector: np.ndarray, directory: Directory, shared: Collection[int], model: bytes, agreed: bytes
    ) -> np.ndarray:
        """Return the client's masked vector of values, (D,) uint64 modulo 2^64 (phase 2).

        The masks are its own one and those shared with the neighbours that have sent shares. `agreed` is the tag that
        the client made for itself. It ensures that the client masks only for this model and with these neighbours.
        """
        directory = KeyList.from_directory(directory)
        statement = self._shared(directory, shared, model)
        if self.client not in directory or not self._holds("agree", directory, self.client, agreed, statement):
            raise self._refusal("received other clients or another model than it has agreed on")
        masked: np.ndarray = vector + expand_mask(self._seed, len(vector))
        for other in self._around(directory, shared):
            if other != self.client:
                masked += _pairwise(self.client, other, self._mask_key, directory[other].mask, len(vector))
        return masked

    def confirm(
        self, directory: Directory, shared: Collection[int], survivors: Collection[int], agreed: Mapping[int, bytes]
    ) -> dict[int, bytes]:
        """Return tags that confirm the list of survivors (clients whose vectors were added), by receiver (phase 3).

        `agreed` has the tags that other clients made for this client in phase 2, by sender. All survivors in its
        neighbourhood must have masked with the same clients, and for the same model.
        """
        directory = KeyList.from_directory(directory)
        around, statement = self._around(directory, survivors), self._agreed(directory, shared)
        self._check_among(survivors, shared, around)
        for other in around:
            if not self._holds("agree", directory, other, agreed.get(other, b""), statement):
                raise self._refusal(
                    f"received client {other} as a survivor, which has agreed on other clients or another model"
                )
        statement = _digest("survivors", statement, *sorted(survivors))
        self._answers_once("confirm", statement)
        return self._tags("confirm", directory, around, statement)

    def reveal(
        self,
        directory: Directory,
        shared: Collection[int],
        survivors: Collection[int],
        confirmed: Mapping[int, bytes],
        boxes: Mapping[int, bytes],
    ) -> Revealed:
        """Return the client's shares that the server needs to unmask the sum of the survivors' vectors (phase 4).

        The shares are from the `boxes` that were sent to this client, by sender. `confirmed` has the tags that other
        clients made for this client in phase 3. A threshold of its neighbourhood, including itself, must have confirmed
        the same survivors.
        """
        directory = KeyList.from_directory(directory)
        statement = _digest("survivors", self._agreed(directory, shared), *sorted(survivors))
        self._goes_on("confirm", statement)
        around = self._around(directory, survivors)
        agreeing = [c for c in around if self._holds("confirm", directory, c, confirmed.get(c, b""), statement)]
        if len(agreeing) < self.setting.threshold:
            raise self._refusal(
                f"has confirmations of the same survivors by {len(agreeing)} clients in its neighbourhood (including "
                f"itself), but needs {self.setting.threshold}"
            )
        senders, root = self._around(directory, shared), hash_directory(directory)
        opened = {c: self._opened(directory, root, c, box) for c, box in boxes.items() if c in senders}
        size = shamir.SHARE_BYTES
        return Revealed(
            {c: int.from_bytes(shares[:size]) for c, shares in opened.items() if c in survivors},
            {c: int.from_bytes(shares[size:]) for c, shares in opened.items() if c not in survivors},
        )

    def _around(self, directory: Directory, present: Collection[int]) -> list[int]:
        """Return which of this client and its neighbours are still present."""
        near = _graph(KeyList.from_directory(directory), self.setting.degree)[self.client]
        return sorted({self.client, *near}.intersection(present))

    def _check_among(self, present: Collection[int], known: Collection[int], around: Sequence[int]) -> None:
        if not {self.client} <= set(present) <= set(known):
            raise self._refusal("received a list with clients that were not present before, or without itself")
        if len(around) < self.setting.threshold:
            raise self._refusal(
                f"received a list with {len(around)} clients of its neighbourhood (including itself), but needs "
                f"{self.setting.threshold}"
            )

    def _shared(self, directory: Directory, shared: Collection[int], model: bytes) -> bytes:
        return _digest("shared", hash_directory(directory), model, *sorted(shared))

    def _agreed(self, directory: Directory, shared: Collection[int]) -> bytes:
        """Return the agreed list of clients if the server continues with it; raise `ProtectionError` otherwise."""
        statement = self._shared(directory, shared, self.transcript.get("model", b""))
        self._goes_on("agree", statement)
        return statement

    def _answers_once(self, phase: str, question: bytes) -> None:
        if self.transcript.setdefault(phase, question) != question:
            raise self._refusal(f"has already replied to a different question in the phase '{phase}'")

    def _goes_on(self, phase: str, question: bytes) -> None:
        if self.transcript.get(phase) != question:
            raise self._refusal(f"received a question that assumes a reply it did not give in the phase '{phase}'")

    def _tags(self, phase: str, directory: Directory, receivers: Sequence[int], statement: bytes) -> dict[int, bytes]:
        return {other: self._tag(phase, directory, self.client, other, statement) for other in receivers}

    def _holds(self, phase: str, directory: Directory, sender: int, tag: bytes, statement: bytes) -> bool:
        """Return whether a tag for this client is valid for its sender."""
        return hmac.compare_digest(tag, self._tag(phase, directory, sender, self.client, statement))

    def _tag(self, phase: str, directory: Directory, sender: int, receiver: int, statement: bytes) -> bytes:
        other = receiver if sender == self.client else sender
        key = self._common(directory, other, "tags")
        return hmac.digest(key, self._about(phase, sender, receiver, statement), "sha256")

    def _opened(self, directory: Directory, root: bytes, sender: int, box: bytes) -> bytes:
        about = self._about("box", sender, self.client, root)
        try:
            return unlock(self._common(directory, sender, "shares"), box, about)
        except ProtectionError:
            raise ProtectionError(
                f"the box of shares from client {sender} to client {self.client} in round {self.setting.round} cannot "
                f"be decrypted: it was tampered with, or is for another receiver, round, run or directory of keys; "
                f"nothing is revealed"
            ) from None

    def _about(self, what: str, sender: int, receiver: int, statement: bytes) -> bytes:
        """Return the context to which boxes and tags are bound."""
        return _digest(what, self.setting.run, self.setting.round, sender, receiver, statement)

    def _refusal(self, why: str) -> ProtectionError:
        return ProtectionError(
            f"client {self.client} stops replying to the server in round {self.setting.round}: it {why}; the server "
            f"does not follow the protocol, or the client was restarted and has lost its transcript"
        )

    @property
    def _seed(self) -> bytes:
        return self._secret("self")

    def _secret(self, purpose: str) -> bytes:
        return derive(self.secret, purpose)

    @cached_property
    def _box_key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self._secret("box"))

    @cached_property
    def _mask_key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self._secret("mask"))

    @cached_property
    def _agreements(self) -> dict[tuple[bytes, str], bytes]:
        """Cached keys of `_common`, by the other client's public key and the purpose."""
        return {}

    def _common(self, directory: Directory, other: int, purpose: str) -> bytes:
        """Return the key that only this client and another (or itself) can compute."""
        if other == self.client:  # not from the directory, in which the server may have inserted its own key
            return derive(self.secret, "own", purpose)
        about = directory[other].box, purpose
        if about not in self._agreements:
            self._agreements[about] = derive(_exchanged(self._box_key, about[0]), purpose)
        return self._agreements[about]


def unmask_sum(
    total: np.ndarray,
    survivors: Sequence[int],
    dropped: Sequence[int],
    near: Mapping[int, Sequence[int]],
    directory: Directory,
    revealed: Mapping[int, Revealed],
    threshold: int,
) -> np.ndarray:
    """Unmask the sum of the survivors' vectors, (D,) uint64. This is the server's last step.

    `dropped` are the clients that sent shares but no vector. `near` and `directory` cover all clients that sent shares,
    and `revealed` is by sender. Raises `ProtectionError` if fewer than `threshold` shares of a secret arrived.
    """
    total = total.copy()
    for client in survivors:
        shares = {holder: said.selves[client] for holder, said in revealed.items() if client in said.selves}
        total -= expand_mask(_joined(client, shares, threshold), len(total))
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
        raise ProtectionError(f"the sum cannot be unmasked: client {client}: {error}") from None


def expand_mask(seed: bytes, size: int) -> np.ndarray:
    """Expand a seed into a uniform mask, (size,) uint64, by AES-256 in counter mode."""
    stream = Cipher(AES(seed), CTR(bytes(16))).encryptor().update(bytes(8 * size))
    return np.frombuffer(stream, "<u8").copy()


def _pairwise(client: int, other: int, own: X25519PrivateKey, public: bytes, size: int) -> np.ndarray:
    """Return the mask that a client adds for a pair of clients; the other client adds its negative.

    The mask depends on both client numbers. Otherwise a client that advertises a copy of another's key could remove
    that client's masks.
    """
    mask = expand_mask(derive(_exchanged(own, public), "mask", *sorted((client, other))), size)
    return mask if client < other else -mask


def _exchanged(own: X25519PrivateKey, public: bytes) -> bytes:
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # wrong length, or a point of low order, which gives all clients the same key
        raise ProtectionError("an advertised public key is invalid; no message is encrypted with this key") from None


def _public(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def _digest(*parts: str | int | bytes | tuple[int, bytes, bytes]) -> bytes:
    """Return the SHA-256 of parts in an unambiguous encoding."""
    return sha256(repr(parts).encode()).digest()
