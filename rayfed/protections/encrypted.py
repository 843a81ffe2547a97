"""Channel of encrypted updates: clients encrypt, the server adds and multiplies, and one client decrypts the sum.

Source: Ren's thesis, algorithm 3 and equation 4.4, whose server adds ciphertexts and asks a client to decrypt the sum.
In addition, clients decrypt only one sum per round, no matter which client is asked and how often. It covers all of the
round's clients, which are known from the scenario, and its factors are computed from the encrypted weights. So clients
need not remember which sums they have decrypted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Self

from rayfed.core.questions import Question, RoundSession
from rayfed.crypto.encryptor import Encryptor, Keys
from rayfed.crypto.keys import derive, lock, unlock
from rayfed.crypto.layout import to_single
from rayfed.crypto.packing import apportion
from rayfed.errors import ProtectionError
from rayfed.protections.channel import ClientRound, Opened, SecureChannel
from rayfed.update import Encrypted, Update

Ciphertexts = tuple[Encrypted, ...]
"""One sum; or every client's own ciphertext, if the server multiplies."""


@dataclass(frozen=True)
class Open:
    """Question to a client: decrypt the sum of the updates."""

    sum: Encrypted


@dataclass(frozen=True)
class EncryptedChannel(SecureChannel[Encrypted, Ciphertexts]):
    """Secure channel of updates that are encrypted by an `Encryptor`, with any scheme.

    Clients share one key pair. An honest server learns only the sum of each round, and no single update. A client that
    colludes with the server or intercepts other clients' messages can read all updates.
    """

    encryptor: Encryptor
    keys: Keys | None = None
    """Keys of the clients; None in the server's copy."""
    clients: tuple[int, ...] = ()
    """Clients of the round, which each client knows without the server."""
    drops: bool = False
    """Whether some clients may be missing."""

    def describe(self) -> str:
        """Describe, in words, the encrypted sums and the resolution of their values."""
        return f"encrypts {self.encryptor.describe()}"

    def make_keys(self, secret: bytes) -> bytes:
        """Create the clients' key pair, encrypted such that only clients can decrypt the pair."""
        return lock(derive(secret, "box"), self.encryptor.scheme.generate(derive(secret, "pair")))

    def at_clients(self, round: ClientRound) -> Self:
        """Return the clients' copy with their key pair. Raises `ProtectionError` for a pair not created by clients."""
        try:
            pair = unlock(derive(round.secret, "box"), round.sent.keys)
        except ProtectionError:
            raise ProtectionError(
                "the clients' key pair cannot be decrypted: it was tampered with, or encrypted with another secret; "
                "restart the run"
            ) from None
        keys = Keys(derive(round.secret, "session", round.sent.digest), pair)
        return replace(self, keys=keys, clients=tuple(round.drawn), drops=round.drops)

    def protect(self, update: Update, weight: int) -> Encrypted:
        """Encrypt a client's update with the client's weight."""
        return self.encryptor.encrypt(self._own_keys, update, weight)

    def observed(self, update: Update, weight: int) -> Encrypted:
        """Return a client's encrypted update for attacks, without the tag that a round's sum would need."""
        return replace(self.protect(update, weight), tag=0)

    def clipped(self, update: Update) -> int:
        """Return the number of an update's values that exceed the protection's clip bounds."""
        return self.encryptor.clipped(update)

    def partial(self, messages: Iterable[Encrypted]) -> Ciphertexts:
        """Return the encrypted sum of one cohort's updates."""
        return reduce(self.merge, ((message,) for message in messages))

    def merge(self, left: Ciphertexts, right: Ciphertexts) -> Ciphertexts:
        """Add two encrypted sums. If the server multiplies later, only concatenate the updates."""
        return left + right if self.encryptor.load.multiplied else (self.encryptor.add(left[0], right[0]),)

    def begin_round(self, clients: Sequence[int]) -> EncryptedSession:
        """Begin a round, and return the session. The session has no question before all updates have arrived."""
        return EncryptedSession(self)

    def opened(self, session: EncryptedSession) -> Opened:
        """Return the sums of a finished session, as decrypted by one client."""
        assert session.opened is not None
        return session.opened

    def answer(self, payload: Open, client: int, round: int) -> Opened:
        """Decrypt the round's sum, as a client's reply. Raises `ProtectionError` for any other sum."""
        found = {share.client: share for share in payload.sum.shares}
        self.check_present(found)
        expected = self.factors_for({client: share.weight for client, share in found.items()})
        if {client: share.after for client, share in found.items()} != expected:
            raise ProtectionError(
                "the server has multiplied encrypted updates by factors that differ from their weights: the sum is not "
                "decrypted"
            )
        return self.open(payload.sum, round)

    def open(self, encrypted: Encrypted, round: int, alone: bool = False) -> Opened:
        """Decrypt an encrypted sum of the given round.

        The decrypted sums have 53 bits (`Encryptor.open`) and are returned in single precision.
        """
        if encrypted.round != round:
            raise ProtectionError(
                f"an encrypted sum of round {encrypted.round} was sent in round {round} and is not decrypted"
            )
        tensors, buffers, weight = self.encryptor.open(self._own_keys, encrypted, alone)
        return to_single(tensors), to_single(buffers), weight

    def check_present(self, clients: Collection[int]) -> None:
        """Raise `ProtectionError` unless the clients of a sum are the round's clients.

        All of them must be present, or at least two if some may be missing.
        """
        present, drawn = set(clients), set(self.clients)
        if not present <= drawn or len(present) < 2 or (present != drawn and not self.drops):
            raise ProtectionError(
                f"the server asks for a sum of clients {_listed(present)}, but this round's clients are "
                f"{_listed(drawn)}: differences of such sums could reveal one client's update; the sum is not decrypted"
            )

    def summed(self, total: Ciphertexts) -> Encrypted:
        """Return the weighted encrypted sum of the round's updates, which one client then decrypts."""
        if not self.encryptor.load.multiplied:
            return total[0]
        shares = [encrypted.shares[0] for encrypted in total]
        factors = self.factors_for({share.client: share.weight for share in shares})
        return self.encryptor.weighted(total, [factors[share.client] for share in shares])

    def factors_for(self, weights: Mapping[int, int]) -> dict[int, int]:
        """Return the factor by which the server multiplies each client's encrypted update.

        It depends only on these weights, so that server and clients compute the same factors.
        """
        if not self.encryptor.load.multiplied:
            return dict.fromkeys(weights, 1)
        clients = sorted(weights)
        return dict(zip(clients, _dealt([weights[c] for c in clients], self.encryptor.load.units), strict=True))

    @property
    def _own_keys(self) -> Keys:
        if self.keys is None:
            raise ProtectionError("only clients have the keys to encrypt and to decrypt")
        return self.keys


@dataclass(frozen=True)
class EncryptedSession(RoundSession):
    """Session (the server's state) of a round: the encrypted updates, and the decrypted sum."""

    channel: EncryptedChannel
    total: Ciphertexts | None = None
    opened: Opened | None = None

    def request(self) -> Question | None:
        """Return the question to one client to decrypt the sum; None before the sum and after the reply."""
        if self.total is None or self.opened is not None:
            return None
        return Question(Open(self.channel.summed(self.total)), of="one")

    def receive(self, answers: Mapping[int, Opened]) -> EncryptedSession:
        """Return the session after a client's reply, with the decrypted sum."""
        [opened] = answers.values()
        return replace(self, opened=opened)

    def finalise(self, total: Ciphertexts) -> EncryptedSession:
        """Return the session after all encrypted updates have arrived."""
        return replace(self, total=total)


def _dealt(weights: Sequence[int], pieces: int) -> list[int]:
    """Divide pieces by `apportion`, at least one per client.

    A client without a piece would not be in the sum, and its weight could not be checked.
    """
    dealt = apportion(weights, pieces)
    while 0 in dealt:
        dealt[dealt.index(0)] = 1
        dealt[dealt.index(max(dealt))] -= 1
    return dealt


def _listed(clients: Collection[int]) -> str:
    return ", ".join(map(str, sorted(clients)))
