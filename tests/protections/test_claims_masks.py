"""What docs/threat-models.md says of masked updates, tried by a server that lies about everything but keys."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, reduce
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from rayfed import scenario as scenarios
from rayfed.aggregation.fedavg import FedAvg
from rayfed.aggregation.over_channel import SumOverChannel
from rayfed.crypto import shamir
from rayfed.crypto.keys import derive
from rayfed.crypto.masking import (
    Advertised,
    Directory,
    MaskingSetting,
    Participant,
    Revealed,
    Transcript,
    _pairwise,
    expand_mask,
    neighbours,
)
from rayfed.crypto.session import Agree, Confirm, Peers, Reveal, ShareSecrets
from rayfed.errors import ProtectionError, UserError
from rayfed.protections.secure_aggregation import Hosted, MaskedChannel, SecureAggregation
from rayfed.simulation.client.runtime import ClientRuntime
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.inputs import prepare_inputs
from rayfed.update import Named, Update

ROUND, CLIENTS, VICTIM, SIZE = 4, 7, 3, 4
OWN = np.array([VICTIM + 1] * (SIZE - 1) + [1], np.uint64)
"""The victim's vector: what no server may see."""
MODEL: Named = {"w": torch.zeros(SIZE - 1)}


class Member:
    """A client of the round that answers."""

    round = ROUND

    def __init__(self, client: int) -> None:
        self.client = client

    def evaluate(self, *_: object) -> tuple[float, float]:
        raise AssertionError


class Lying:
    """A server that follows the protocol until it has all masked vectors, and the honest clients of a round.

    `lies` are put in place of what it asks before that.
    """

    def __init__(
        self,
        secret: bytes = b"s" * 32,
        clients: int = CLIENTS,
        lies: Callable[[int, Any], Any] = lambda _, payload: payload,
        **parameters: Any,
    ) -> None:
        self.secret, self.members = secret, list(range(clients))
        self.transcripts: dict[int, Transcript] = {}
        protection = SecureAggregation(bits=8, clip=127, clip_buffers=127, **parameters)
        self.rule = SumOverChannel.of(FedAvg(weights="uniform"), protection, clients, clients)
        self.rule.check(clients)
        self.session: Any = self.rule.begin_round(self.members, {})
        while question := self.session.request():
            said = {c: self.ask(c, lies(c, question.payload)) for c in self.members}
            self.session = self.session.receive(said)

    def hosting(self, hosted: Hosted) -> SumOverChannel:
        """The rule where clients are."""
        assert isinstance(self.rule.channel, MaskedChannel)
        return replace(self.rule, channel=replace(self.rule.channel, hosted=hosted))

    @cached_property
    def vectors(self) -> dict[int, np.ndarray]:
        return {c: self.masked(c) for c in self.members}

    def ask(self, client: int, payload: Any, model: Named = MODEL) -> Any:
        hosted = Hosted(self.secret, None, self.members, model, self.transcripts)
        return self.hosting(hosted).answer(payload, Member(client))

    def masked(self, client: int, among: Collection[int] | None = None, model: Named = MODEL) -> np.ndarray:
        """What a client sends that is told that these have shared, and is sent this model."""
        peers = self.session.broadcast()
        assert peers is not None
        peers = replace(peers, shared=tuple(c for c in peers.shared if among is None or c in among))
        update = Update(client, ROUND, {"w": torch.full((SIZE - 1,), float(client + 1))}, {}, 1, 0.0)
        return self.hosting(Hosted(self.secret, peers, self.members, model)).protect(update).vector

    def confirm(self, client: int, survivors: Collection[int]) -> dict[int, bytes]:
        """The tags of a client that is told of these survivors."""
        s = self.session
        question = Confirm(s.advertised, tuple(s.boxes), tuple(survivors), {client: to(client, s.agreed)})
        said: dict[int, bytes] = self.ask(client, question)
        return said

    def confirmed(self, survivors: Collection[int]) -> dict[int, dict[int, bytes]]:
        """The tags of those who confirm these survivors, and were not asked about others before."""
        said = {}
        for client in self.members:
            with suppress(ProtectionError):
                said[client] = self.confirm(client, survivors)
        return said

    def reveal(
        self,
        client: int,
        survivors: Collection[int],
        boxes: Mapping[int, bytes] | None = None,
        confirmed: Mapping[int, Mapping[int, bytes]] | None = None,
    ) -> Revealed:
        """What a client reveals that is told of these survivors, where as many as can be got have confirmed them."""
        s = self.session
        tags = to(client, self.confirmed(survivors) if confirmed is None else confirmed)
        own = boxes or to(client, s.boxes)
        question = Reveal(s.advertised, tuple(s.boxes), tuple(survivors), {client: tags}, {client: own})
        said: Revealed = self.ask(client, question)
        return said

    def unmask(self, seeds: Mapping[int, int], keys: Mapping[int, int]) -> np.ndarray:
        """The victim's vector, by shares of its seed and of its mask key."""
        s, vector = self.session, self.vectors[VICTIM] - expand_mask(self.joined(seeds), SIZE)
        key = X25519PrivateKey.from_private_bytes(self.joined(keys))
        return vector - sum(_pairwise(VICTIM, c, key, s.advertised[c].mask, SIZE) for c in s.near[VICTIM])

    def joined(self, shares: Mapping[int, int]) -> bytes:
        return shamir.join(shares, self.session.threshold, 32)


def to(client: int, letters: Mapping[int, Mapping[int, bytes]]) -> dict[int, bytes]:
    """Those boxes or tags that are for one client, by sender."""
    return {sender: own[client] for sender, own in letters.items() if client in own}


def test_the_attacks_below_would_open_an_update() -> None:
    """By shares that no server gets: as if clients forgot what they have answered."""
    server, others = Lying(), [c for c in range(CLIENTS) if c != VICTIM]
    alive = {c: server.reveal(c, server.members).selves[VICTIM] for c in others}
    server.vectors  # noqa: B018 - before clients forget
    for transcript in server.transcripts.values():
        del transcript["confirm"]
    gone = {c: server.reveal(c, others).masks[VICTIM] for c in others}
    assert (server.unmask(alive, gone) == OWN).all()


def test_a_client_answers_once() -> None:
    """Asked with the victim as survivor, and again with it as dropped."""
    server, others = Lying(), [c for c in range(CLIENTS) if c != VICTIM]
    for client in others:
        first = server.reveal(client, server.members)
        assert first.selves.keys() == set(server.members)
        assert server.reveal(client, server.members) == first
        with pytest.raises(ProtectionError, match="different question in the phase 'confirm'"):
            server.confirm(client, others)
        with pytest.raises(ProtectionError, match="it did not give in the phase 'confirm'"):
            server.reveal(client, others)


def test_a_box_is_for_its_receiver_alone() -> None:
    """The victim's own boxes come back to it as those of others, of which one at least is said to have dropped out."""
    server = Lying()
    survivors = [c for c in server.members if c != 0]
    reflected = {c: server.session.boxes[VICTIM][c] for c in server.members}
    with pytest.raises(ProtectionError, match="box of shares from client 0 to client 3 in round 4 cannot be decrypted"):
        server.reveal(VICTIM, survivors, reflected)
    swapped = to(2, server.session.boxes) | {0: server.session.boxes[0][1]}
    with pytest.raises(ProtectionError, match="box of shares from client 0 to client 2"):
        server.reveal(2, survivors, swapped)
    spoilt = server.session.boxes[0][1]
    with pytest.raises(ProtectionError, match="box of shares from client 0 to client 1"):
        server.reveal(1, survivors, {0: spoilt[:-1] + bytes([spoilt[-1] ^ 1])})


@pytest.mark.parametrize("other", [{"run": b"another arm"}, {"round": ROUND + 1}])
def test_boxes_and_tags_are_of_one_round_and_run(other: dict[str, Any]) -> None:
    """Even where keys are the same, as they never are here."""
    setting, everybody = MaskingSetting(b"run", ROUND, 2, 2), range(3)

    def clients(setting: MaskingSetting) -> list[Participant]:
        return [Participant(c, bytes([c]) * 32, setting, {}) for c in everybody]

    here, there = clients(setting), clients(replace(setting, **other))
    keys: Directory = {c: p.advertise() for c, p in enumerate(here)}
    boxes, foreign = ({c: p.share(keys) for c, p in enumerate(of)} for of in (here, there))
    agreed, others = ({c: p.agree(keys, everybody, b"") for c, p in enumerate(of)} for of in (here, there))
    with pytest.raises(ProtectionError, match="has agreed on other clients or another model"):
        here[0].confirm(keys, everybody, everybody, to(0, agreed) | {1: others[1][0]})
    confirmed = {c: p.confirm(keys, everybody, everybody, to(c, agreed)) for c, p in enumerate(here)}
    with pytest.raises(ProtectionError, match="the box of shares from client 1 to client 0"):
        here[0].reveal(keys, everybody, everybody, to(0, confirmed), to(0, boxes) | {1: foreign[1][0]})


def test_one_survivor_is_no_sum() -> None:
    server = Lying()
    for few in range(1, server.session.threshold):
        survivors = [VICTIM, *(c for c in server.members if c != VICTIM)][:few]
        for client in server.members:
            with pytest.raises(ProtectionError):
                server.confirm(client, survivors)
            with pytest.raises(ProtectionError):
                server.reveal(client, survivors)


@pytest.mark.parametrize("threshold", [4, 5, 6, 7])
def test_no_way_of_telling_clients_otherwise_gives_both_secrets_of_one(threshold: int) -> None:
    """Any clients are told that the victim survived and the others that it is gone, whatever tags they are shown."""
    for first, victim in product(range(CLIENTS), [True, False]):  # who of the others is the same to all
        others = iter([True] * first + [False] * CLIENTS)
        told = [victim if c == VICTIM else next(others) for c in range(CLIENTS)]
        server = Lying(threshold=threshold)
        sets = [server.members if alive else [c for c in server.members if c != VICTIM] for alive in told]
        tags: dict[int, dict[int, bytes]] = {}
        for client, survivors in enumerate(sets):
            with suppress(ProtectionError):
                tags[client] = server.confirm(client, survivors)
        seeds, keys = 0, 0
        for client, survivors in enumerate(sets):
            with suppress(ProtectionError):
                said = server.reveal(client, survivors, confirmed=tags)
                seeds, keys = seeds + (VICTIM in said.selves), keys + (VICTIM in said.masks)
        assert not (seeds and keys), told
        assert max(seeds, keys) in {0, *range(threshold, CLIENTS + 1)}


def test_half_is_no_threshold() -> None:
    """Each client would be asked once, and half of them give one secret of the victim and half the other."""
    with pytest.raises(UserError, match="more than half"):
        Lying(clients=6, threshold=3)
    keys = {c: Participant(c, bytes([c]) * 32, MaskingSetting(b"", 0, 3, 6), {}).advertise() for c in range(6)}
    with pytest.raises(ProtectionError, match="more than half"):
        Participant(0, bytes(32), MaskingSetting(b"", 0, 3, 6), {}).share(keys)


def test_confirmations_are_counted_by_who_made_them_for_whom() -> None:
    """The client's own tags come back to it as others', and others' tags to one another."""
    server = Lying()
    tags = {c: server.confirm(c, server.members) for c in server.members}
    agreed = server.session.agreed
    for shown in (
        {other: {VICTIM: tags[VICTIM][other]} for other in server.members},
        {other: {VICTIM: tags[VICTIM][VICTIM]} for other in server.members},
        {other: {VICTIM: tags[other][(VICTIM + 1) % CLIENTS]} for other in server.members},
        {other: {VICTIM: agreed[other][VICTIM]} for other in server.members},
        {other: {VICTIM: tags[other][VICTIM]} for other in range(server.session.threshold - 1)},
    ):
        with pytest.raises(ProtectionError, match="confirmations of the same survivors by"):
            server.reveal(VICTIM, server.members, confirmed=shown)
    assert server.reveal(VICTIM, server.members, confirmed=tags).selves.keys() == set(server.members)


def test_a_client_that_is_told_of_few_sends_nothing() -> None:
    """What it would send has no mask but its own, and that one is opened with the sum."""

    def lies(client: int, payload: Any) -> Any:
        return replace(payload, shared=(VICTIM, 1)) if client == VICTIM and isinstance(payload, Agree) else payload

    with pytest.raises(ProtectionError, match="2 clients of its neighbourhood"):
        Lying(lies=lies)


def test_a_client_sends_one_vector() -> None:
    """The difference of two under the same keys is that of their masks, or of the updates themselves."""
    server = Lying()
    with pytest.raises(ProtectionError, match="received other clients or another model"):
        server.masked(VICTIM, among=[0, 1, 2, 3, 4])
    with pytest.raises(ProtectionError, match="received other clients or another model"):
        server.masked(VICTIM, model={"w": torch.ones(SIZE - 1)})
    question = Agree(server.session.advertised, (0, 1, 2, 3, 4))
    with pytest.raises(ProtectionError, match="different question in the phase 'agree'"):
        server.ask(VICTIM, question)
    with pytest.raises(ProtectionError, match="different question in the phase 'agree'"):
        server.ask(VICTIM, replace(question, shared=tuple(server.members)), {"w": torch.ones(SIZE - 1)})
    np.testing.assert_array_equal(server.masked(VICTIM), server.vectors[VICTIM])


def test_the_server_cannot_make_the_tag_by_which_a_client_knows_what_it_agreed_to() -> None:
    """With a key of its own in the place of the client's, it would know what this has in common with itself."""
    server, own = Lying(), X25519PrivateKey.generate()
    peers = server.session.broadcast()
    assert peers is not None
    hosted = Hosted(server.secret, peers, server.members, MODEL)
    honest = peers.directory[VICTIM]
    keys = {VICTIM: replace(honest, box=own.public_key().public_bytes_raw())}
    common = own.exchange(X25519PublicKey.from_public_bytes(honest.box))
    setting = MaskingSetting(derive(server.secret, "run"), ROUND, server.session.threshold, CLIENTS)
    forger = Participant(VICTIM, b"", setting, {})
    statement = forger._shared(keys, (VICTIM,), hosted.digest)
    about = forger._about("agree", VICTIM, VICTIM, statement)
    tag = hmac.digest(derive(common, "tags"), about, "sha256")
    forged = replace(hosted, peers=Peers(keys, (VICTIM,), {VICTIM: tag}))
    update = Update(VICTIM, ROUND, {"w": torch.zeros(SIZE - 1)}, {}, 1, 0.0)
    with pytest.raises(ProtectionError, match="received other clients or another model"):
        server.hosting(forged).protect(update)


@pytest.mark.parametrize("what", ["directory", "shared", "model"])
def test_who_was_told_otherwise_is_in_no_sum(what: str) -> None:
    """A victim that masks with other clients than these with it, or trains another model (Pasquini et al. 2022)."""

    class Splitting(Lying):
        def ask(self, client: int, payload: Any, model: Named = MODEL) -> Any:
            if client == VICTIM and what == "model":
                model = {"w": torch.ones(SIZE - 1)}
            if (
                client == VICTIM
                and what == "directory"
                and not isinstance(payload, Confirm)
                and hasattr(payload, "directory")
            ):
                payload = replace(payload, directory={c: k for c, k in payload.directory.items() if c})
            if client == VICTIM and what != "model" and isinstance(payload, Agree):
                payload = replace(payload, shared=tuple(range(1, CLIENTS)))
            return super().ask(client, payload, model)

    server = Splitting()
    for client in server.members:
        if client != VICTIM:
            with pytest.raises(ProtectionError, match="client 3 as a survivor, which has agreed on other clients"):
                server.confirm(client, server.members)


LOW_ORDER = bytes(32)


@pytest.mark.parametrize(
    "change",
    [
        lambda keys: {VICTIM: keys[0]},
        lambda keys: {0: keys[VICTIM]},
        lambda keys: {0: keys[1]},
        lambda keys: {0: replace(keys[0], mask=keys[VICTIM].box)},
        lambda keys: {0: replace(keys[0], box=LOW_ORDER)},
        lambda keys: {0: replace(keys[0], box=b"short")},
        lambda keys: {CLIENTS + c: Advertised(bytes([c]) * 32, bytes([c + 50]) * 32) for c in range(9)},
    ],
)
def test_a_directory_with_false_keys_is_refused(change: Callable[[Directory], dict[int, Advertised]]) -> None:
    """Those that can be told; keys that the server made itself and nobody else has cannot."""

    def lies(client: int, payload: Any) -> Any:
        if client != VICTIM or not isinstance(payload, ShareSecrets):
            return payload
        return ShareSecrets({**payload.directory, **change(payload.directory)})

    with pytest.raises(ProtectionError):
        Lying(lies=lies)


def test_a_mask_key_of_low_order_is_refused() -> None:
    """With it the common mask of the pair would be known to all."""

    def lies(client: int, payload: Any) -> Any:
        if not hasattr(payload, "directory"):
            return payload
        return replace(payload, directory={**payload.directory, 0: replace(payload.directory[0], mask=LOW_ORDER)})

    with pytest.raises(ProtectionError):
        Lying(lies=lies).vectors  # noqa: B018


def test_the_graph_is_not_known_before_the_keys() -> None:
    """Bell et al. 2020, section 3: who is corrupted beforehand must not have chosen its neighbours."""
    one, other = (Lying(secret, clients=20, neighbours=4).session for secret in (b"a" * 32, b"b" * 32))
    assert one.near != other.near
    assert one.near == Lying(b"a" * 32, clients=20, neighbours=4).session.near == neighbours(one.advertised, 4)


def written_otherwise(key: bytes) -> bytes:
    """The same public key for X25519, which looks at 255 bits."""
    return key[:-1] + bytes([key[-1] ^ 0x80])


def plus_a_point_of_order_two(key: bytes) -> bytes:
    """Another public key with the same in common with everybody: private keys are multiples of 8."""
    return pow(int.from_bytes(key, "little"), -1, 2**255 - 19).to_bytes(32, "little")


@pytest.mark.parametrize("alike", [written_otherwise, plus_a_point_of_order_two])
def test_colluders_do_not_take_masks_off_by_keys_like_those_of_others(alike: Callable[[bytes], bytes]) -> None:
    """Clients 0 and 1 advertise what 3 and 4 have, so that 2 would add and subtract the same for each.

    All that is left is its own mask, which is opened with the sum. Of 5 with threshold 4, two colluders are few enough.
    """

    class Colluder(Participant):
        def advertise(self) -> Advertised:
            return replace(super().advertise(), mask=alike(honest[self.client + 3].advertise().mask))

    everybody, setting, victim = range(5), MaskingSetting(b"run", ROUND, 4, 5), 2
    honest = {c: Participant(c, bytes([c]) * 32, setting, {}) for c in (2, 3, 4)}
    clients = honest | {c: Colluder(c, bytes([c]) * 32, setting, {}) for c in (0, 1)}
    keys: Directory = {c: clients[c].advertise() for c in everybody}
    boxes = {c: p.share(keys) for c, p in clients.items()}
    agreed = {c: p.agree(keys, everybody, b"") for c, p in clients.items()}
    sent = clients[victim].mask(OWN, keys, everybody, b"", agreed[victim][victim])
    confirmed = {c: p.confirm(keys, everybody, everybody, to(c, agreed)) for c, p in clients.items()}
    seeds = {
        c: p.reveal(keys, everybody, everybody, to(c, confirmed), to(c, boxes)).selves[victim]
        for c, p in clients.items()
    }
    assert not (sent - expand_mask(shamir.join(seeds, 4, 32), SIZE) == OWN).any()


@pytest.mark.parametrize("number", [-1, shamir.PRIME - 1, -1.0])
def test_no_share_is_the_secret_itself(number: Any) -> None:
    """One client of the server's own has a number for which the polynomial would be looked at in 0."""
    setting = MaskingSetting(b"run", ROUND, 4, 5)
    clients = {c: Participant(c, bytes([i]) * 32, setting, {}) for i, c in enumerate((*range(5), number))}
    keys: Directory = {c: p.advertise() for c, p in clients.items()}
    with pytest.raises(ProtectionError):
        clients[2].share(keys)


TEXT = """
name: t
seed: 31
data: {name: digits, size: 8, train_samples: 200, test_samples: 50}
model: {name: mlp, hidden: [10]}
training: {algorithm: fedsgd}
federation:
  {rounds: 1, clients: 4, aggregation: {name: fedavg, weights: uniform}, protection: secure_aggregation}
"""


@cache
def runtime_and_sent(*changes: str) -> tuple[ClientRuntime, Sent]:
    """All clients of a run, and what an honest server sends them."""
    inputs = prepare_inputs(scenarios.parse(TEXT, changes=list(changes)))
    runtime = ClientRuntime(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"))
    return runtime, Sent(0, runtime.arm("none").weights, runtime.arm("none").buffers)


def seen_by(sent: Mapping[int, Sent], *changes: str) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """What a server has that follows the protocol, and sends each client what it likes: masked vectors and the sum."""
    runtime, _ = runtime_and_sent(*changes)
    rule: Any = runtime.rule("none", sent[0])
    transcripts: dict[int, Transcript] = {c: {} for c in sent}

    def consulted(session: Any) -> Any:
        while question := session.request():
            said = {c: runtime.answer("none", sent[c], question.payload, c, {}, transcripts[c])[1] for c in sent}
            session = session.receive(said)
        return session

    session = consulted(rule.begin_round(list(sent), {}))
    peers = session.broadcast()
    masked = {c: runtime.cohort("none", replace(one, broadcast=peers), [c], {})[0] for c, one in sent.items()}
    total = consulted(session.finalise(reduce(rule.merge, masked.values())))
    return {c: one.vector for c, one in masked.items()}, total.opened


def update_of(client: int, sent: Sent, *changes: str) -> np.ndarray:
    """What a client adds to the sum, in whole steps."""
    runtime, _ = runtime_and_sent(*changes)
    rule: Any = runtime.rule("none", sent)
    update = runtime.updates("none", sent, [client], {})[0]
    vector: np.ndarray = rule.channel._vector(update, rule.weight(update)).view(np.int64)
    return vector


def test_the_sum_is_that_of_all_where_all_are_sent_the_same() -> None:
    _, honest = runtime_and_sent()
    assert (seen_by(dict.fromkeys(range(4), honest))[1] == sum(update_of(c, honest) for c in range(4))).all()


def test_buffers_named_like_weights_are_another_model() -> None:
    """They go before these in the forward pass: the others' updates are 0 but for the last bias."""
    _, honest = runtime_and_sent()
    frozen = {name: w for name, w in honest.weights.items() if name != "fc2.bias"}
    lying = replace(honest, buffers={**honest.buffers, **frozen})
    assert not update_of(1, lying)[:-11].any()
    with pytest.raises(ProtectionError, match="has agreed on other clients or another model"):
        seen_by({0: honest, 1: lying, 2: lying, 3: lying})


def test_weights_in_another_order_are_another_model() -> None:
    """The last layer's weights are 0, so that the first has no gradient: the victim's values meet zeros."""
    _, honest = runtime_and_sent()
    weights = honest.weights | {"fc2.weight": torch.zeros_like(honest.weights["fc2.weight"])}
    one = replace(honest, weights=weights)
    other = replace(honest, weights=dict(reversed(weights.items())))
    own = update_of(0, other)
    assert own[:110].any()
    assert not update_of(1, one)[:110].any()
    with pytest.raises(ProtectionError, match="has agreed on other clients or another model"):
        seen_by({0: other, 1: one, 2: one, 3: one})


def test_two_runs_of_one_seed_have_the_same_masks() -> None:
    """What remains, as docs/threat-models.md says: in the other run clients train with a learning rate of next to 0."""
    vectors = []
    for lr in ("0.1", "1.0e-15"):
        change = f"training={{algorithm: fedavg, epochs: 1, lr: {lr}}}"
        _, sent = runtime_and_sent(change)
        vectors.append(seen_by(dict.fromkeys(range(4), sent), change)[0][1])
    change = "training={algorithm: fedavg, epochs: 1, lr: 0.1}"
    own = update_of(1, runtime_and_sent(change)[1], change)
    assert np.abs(own[:-1]).max() > 1e6
    assert np.abs((vectors[0] - vectors[1]).view(np.int64) - own)[:-1].max() <= 1
