"""What docs/threat-models.md says of masked updates, tried by a server that lies about everything but keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from rayfed.aggregation.fedavg import FedAvg
from rayfed.aggregation.secure_sum import SecureSum
from rayfed.crypto import shamir
from rayfed.crypto.masking import Revealed, _pairwise, expand, unmasked
from rayfed.crypto.session import Reveal
from rayfed.errors import ProtectionError, UserError
from rayfed.protections.secure_aggregation import SecureAggregation
from rayfed.update import Update

ROUND, CLIENTS, VICTIM, SIZE = 4, 7, 3, 4
OWN = np.array([VICTIM + 1] * (SIZE - 1) + [1], np.uint64)
"""The victim's vector: what no server may see."""


class Member:
    """A client of the round that answers."""

    round = ROUND

    def __init__(self, client: int) -> None:
        self.client = client

    def evaluate(self, *_: object) -> tuple[float, float]:
        raise AssertionError


class Lying:
    """A server that follows the protocol until it has all masked vectors, and the honest clients of a round."""

    def __init__(self, secret: bytes = b"s" * 32, clients: int = CLIENTS, **parameters: Any) -> None:
        self.secret, self.members = secret, list(range(clients))
        protection = SecureAggregation(bits=8, clip=127, clip_buffers=127, **parameters)
        self.rule = SecureSum.of(FedAvg(weights="uniform"), protection, clients, clients)
        self.rule.check(clients)
        self.session = self.rule.opens(self.members, ROUND)
        while question := self.rule.asks(self.session):
            said = {c: self.ask(c, question.payload) for c in self.members}
            self.session = self.rule.hears(self.session, said)
        self.vectors = {c: self.masked(c) for c in self.members}

    def ask(self, client: int, payload: Any) -> Any:
        return self.rule.at_clients(self.secret, {}, self.members).answer(payload, Member(client))

    def masked(self, client: int, among: Collection[int] | None = None) -> np.ndarray:
        """What a client sends that is told that these have shared."""
        told = self.session.told()[client]
        told = {c: keys for c, keys in told.items() if among is None or c in among}
        update = Update(client, ROUND, {"w": torch.full((SIZE - 1,), float(client + 1))}, {}, 1, 0.0)
        return self.rule.at_clients(self.secret, {client: told}, self.members).sends(update).vector

    def reveal(self, client: int, survivors: Collection[int], boxes: Mapping[int, bytes] | None = None) -> Revealed:
        """What a client reveals that is told of these survivors."""
        own = boxes or {sender: of[client] for sender, of in self.session.boxes.items()}
        dropped = tuple(c for c in self.members if c not in survivors)
        said: Revealed = self.ask(client, Reveal(self.session.told(), {client: own}, tuple(survivors), dropped))
        return said

    def unmask(self, seeds: Mapping[int, int], keys: Mapping[int, int]) -> np.ndarray:
        """The victim's vector, by shares of its seed and of its mask key."""
        s, vector = self.session, self.vectors[VICTIM] - expand(self.joined(seeds), SIZE)
        key = X25519PrivateKey.from_private_bytes(self.joined(keys))
        return vector - sum(_pairwise(VICTIM, c, key, s.advertised[c].mask, SIZE) for c in s.near[VICTIM])

    def joined(self, shares: Mapping[int, int]) -> bytes:
        return shamir.join(shares, self.session.threshold, 32)


def assert_hidden(attack: Callable[[], np.ndarray]) -> None:
    """A client refuses, or too few shares are left, or what is found is no update."""
    try:
        found = attack()
    except ProtectionError:
        return
    assert not (found == OWN).any(), "the victim's update is open"


def test_a_client_answers_once() -> None:
    """Asked with the victim as survivor, and again with it as dropped."""
    server = Lying()

    def attack() -> np.ndarray:
        others = [c for c in server.members if c != VICTIM]
        seeds = {c: server.reveal(c, server.members).selves[VICTIM] for c in others}
        keys = {c: server.reveal(c, others).masks[VICTIM] for c in others}
        return server.unmask(seeds, keys)

    assert_hidden(attack)


def test_a_box_is_for_its_receiver_alone() -> None:
    """The victim's own boxes come back to it as those of others that dropped out."""
    server = Lying()

    def attack() -> np.ndarray:
        others = [c for c in server.members if c != VICTIM]
        reflected = {VICTIM: server.session.boxes[VICTIM][VICTIM]} | {
            c: server.session.boxes[VICTIM][c] for c in others
        }
        keys = server.reveal(VICTIM, [VICTIM], reflected).masks
        return server.unmask({c: server.reveal(c, server.members).selves[VICTIM] for c in others}, keys)

    assert_hidden(attack)


def test_one_survivor_is_no_sum() -> None:
    server = Lying()

    def attack() -> np.ndarray:
        s, others = server.session, [c for c in server.members if c != VICTIM]
        said = {c: server.reveal(c, [VICTIM]) for c in server.members}
        return unmasked(server.vectors[VICTIM], [VICTIM], others, s.near, s.advertised, said, s.threshold)

    assert_hidden(attack)


def test_two_halves_told_otherwise_do_not_open_an_update() -> None:
    """Each client is asked once, and at half of the clients that was enough."""

    def attack() -> np.ndarray:
        server = Lying(clients=6, threshold=3)
        keys = {c: server.reveal(c, [0, 1, 2, 4, 5]).masks[VICTIM] for c in (0, 1, 2)}
        return server.unmask({c: server.reveal(c, server.members).selves[VICTIM] for c in (3, 4, 5)}, keys)

    with pytest.raises(UserError, match="more than half"):
        attack()


def test_a_client_that_is_told_of_nobody_sends_nothing() -> None:
    """What it would send has no mask but its own, and that one is opened with the sum."""
    server = Lying()

    def attack() -> np.ndarray:
        alone = server.masked(VICTIM, among=[VICTIM])
        seed = {c: server.reveal(c, server.members).selves[VICTIM] for c in server.members}
        return alone - expand(server.joined(seed), SIZE)

    assert_hidden(attack)


def test_a_client_sends_one_vector() -> None:
    """The difference of two under the same keys is that of their masks, or of the updates themselves."""
    server = Lying()
    with pytest.raises(ProtectionError):
        server.masked(VICTIM, among=[0, 1, 2, 3, 4])


def test_the_graph_is_not_known_before_the_keys() -> None:
    """Bell et al. 2020, section 3: who is corrupted beforehand must not have chosen its neighbours."""
    one, other = (Lying(secret, clients=20, neighbours=4).session.near for secret in (b"a" * 32, b"b" * 32))
    assert one != other
    assert one == Lying(b"a" * 32, clients=20, neighbours=4).session.near
