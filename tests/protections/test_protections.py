"""Protections by themselves: sums as of plain numbers, and everything else refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rayfed.aggregation.fedavg import FedAvg
from rayfed.aggregation.median import Median
from rayfed.aggregation.over_channel import SumOverChannel
from rayfed.crypto.encryptor import Encryptor, Keys, Load
from rayfed.crypto.tags import PRIME
from rayfed.errors import ProtectionError, UserError
from rayfed.protections.base import Encryption
from rayfed.protections.bfv import Bfv
from rayfed.protections.ckks import Ckks
from rayfed.protections.encrypted import EncryptedChannel, Open
from rayfed.protections.paillier import Paillier
from rayfed.update import Encrypted, Update

SHORT = {"key_bits": 256, "insecure": True}
PROTECTIONS: dict[str, Encryption] = {
    "paillier": Paillier(**SHORT),
    "paillier, no table": Paillier(**SHORT, table=False),
    "fedboosting": Paillier(**SHORT, encoding="fedboosting"),
    "phe": Paillier(**SHORT, backend="phe"),
    "ckks": Ckks(),
    "bfv": Bfv(),
}
EACH = pytest.mark.parametrize("name", PROTECTIONS)


def updates(count: int, samples: int = 0) -> list[Update]:
    """Random ones with extremes, zeros and values beyond the clip bound in front."""
    g = torch.Generator().manual_seed(count)
    sent = []
    for c in range(count):
        w = torch.randn(60, 5, generator=g) / 3
        w[0], w[1], w[2, 0], w[2, 1] = 1.0, 0.0, -1.0, (-1.0) ** c
        w[3, 0] = 7.0 * (-1) ** c
        buffers = {"mean": 10 * torch.randn(7, generator=g)}
        sent.append(Update(c, 4, {"w": w, "b": torch.zeros(2)}, buffers, samples or 3 * c + 1, 0.0))
    return sent


def keys_of(encryptor: Encryptor, secret: bytes = b"s" * 32) -> Keys:
    return Keys(secret, encryptor.scheme.generate(secret))


def ruled(name: str, sent: list[Update], weights: str = "samples") -> SumOverChannel:
    server = SumOverChannel.of(FedAvg(weights=weights), PROTECTIONS[name], len(sent), sum(u.samples for u in sent))
    assert isinstance(server.channel, EncryptedChannel)
    keys, clients = keys_of(server.channel.encryptor), tuple(update.client for update in sent)
    return replace(server, channel=replace(server.channel, keys=keys, clients=clients))


def without_keys(rule: SumOverChannel) -> SumOverChannel:
    assert isinstance(rule.channel, EncryptedChannel)
    return replace(rule, channel=replace(rule.channel, keys=None))


class Someone:
    client, round = 0, 4

    def evaluate(self, step: object, buffers: object) -> tuple[float, float]:
        raise AssertionError


def mean_of(rule: SumOverChannel, sent: list[Update], cohort: int = 3):  # type: ignore[no-untyped-def]
    """The round as it is played: cohorts at clients, their sums at a server that has no keys, the total at a client."""
    server, partials = without_keys(rule), []
    for low in range(0, len(sent), cohort):
        partials.append(rule.partial(rule.protect(u) for u in sent[low : low + cohort]))
    total = partials[0]
    for partial in partials[1:]:
        total = server.merge(total, partial)
    session = server.begin_round([u.client for u in sent], {})
    assert session.request() is None
    session = session.finalise(total)
    question = session.request()
    assert question is not None
    assert question.of == "one"
    session = session.receive({0: rule.answer(question.payload, Someone())})
    assert session.request() is None
    return server.combine(session, torch.Generator())


@pytest.mark.engine
@EACH
@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("clients", [2, 5, 100])
def test_means_are_exact_to_half_a_step(name: str, weights: str, clients: int) -> None:
    sent = updates(clients, samples=0 if name != "fedboosting" else 5)  # equal weights: any others P pieces round
    rule = ruled(name, sent, weights)
    step, buffers = mean_of(rule, sent)
    weight = [u.samples if weights == "samples" else 1 for u in sent]
    for found, key, part, clip in ((step, "w", "tensors", 1.0), (buffers, "mean", "buffers", 100.0)):
        values = [np.clip(getattr(u, part)[key].double().numpy(), -clip, clip) for u in sent]
        expected = np.average(values, axis=0, weights=weight)
        half = 1e-30 if name == "fedboosting" else clip / (2**rule.channel.encryptor.code.bits - 2)
        rounding = 3e-7 * np.abs(expected)  # of float32
        assert (np.abs(found[key].numpy() - expected) <= half + rounding).all()
    assert not step["b"].any()


def test_weights_in_pieces_are_off_by_a_piece_at_most() -> None:
    sent = updates(5)
    step, _ = mean_of(ruled("fedboosting", sent), sent)
    values = np.stack([u.tensors["w"].clamp(-1, 1).double().numpy() for u in sent])
    share = np.array([u.samples for u in sent]) / sum(u.samples for u in sent)
    error = np.abs(step["w"].numpy() - np.tensordot(share, values, 1))
    assert (error <= 0.01 * np.abs(values).sum(0) + 1e-6).all()


@EACH
def test_the_heaviest_sum_does_not_overflow(name: str) -> None:
    """As many clients as there is room for, all weights and values at their bounds, at either end and beyond."""
    top = [
        Update(c, 4, {"w": torch.tensor([1.0, -1.0, 1e9, -1e9])}, {"m": torch.tensor([100.0, -1e9])}, 1000, 0.0)
        for c in range(20)
    ]
    rule = ruled(name, top)
    step, buffers = mean_of(rule, top)
    torch.testing.assert_close(step["w"], torch.tensor([1.0, -1.0, 1.0, -1.0]), rtol=0, atol=1e-6)
    torch.testing.assert_close(buffers["m"], torch.tensor([100.0, -100.0]), rtol=1e-6, atol=0)
    assert rule.channel.clipped(top[0]) == 3


@pytest.mark.parametrize("name", ["paillier", "fedboosting", "ckks"])
def test_layers_have_bounds_of_their_own(name: str) -> None:
    """A small layer next to a large one: finer steps, and its values are clipped at its own bound."""
    small, large = torch.linspace(-0.02, 0.02, 41), torch.linspace(-1, 1, 41)
    sent = [Update(c, 4, {"conv.w": small, "fc.w": large}, {}, 5, 0.0) for c in range(2)]
    protection = replace(PROTECTIONS[name], clip_layers={"conv*": 0.01})
    encryptor = protection.encryptor(Load(2, 100, multiplied=name == "fedboosting"))
    keys = keys_of(encryptor)
    sealed = [encryptor.encrypt(keys, update, 5) for update in sent]
    if name == "fedboosting":
        sealed = [encryptor.times(one, 50) for one in sealed]
    tensors, _, weight = encryptor.open(keys, encryptor.add(*sealed))
    torch.testing.assert_close(tensors["conv.w"] / weight, small.double().clamp(-0.01, 0.01), atol=1e-6, rtol=0)
    torch.testing.assert_close(tensors["fc.w"] / weight, large.double(), atol=1e-4, rtol=0)
    assert encryptor.clipped(sent[0]) == 20
    unknown = replace(protection, clip_layers={"dense*": 0.01}).encryptor(Load(2, 10))
    with pytest.raises(UserError):
        unknown.encrypt(keys, sent[0], 5)


@EACH
def test_public_factors_multiply(name: str) -> None:
    """What a rule with weights of the server's needs."""
    sent = updates(2, samples=1)
    rule = ruled(name, sent)
    load = Load(2, 100, multiplied=True)
    encryptor = PROTECTIONS[name].encryptor(load)
    keys = keys_of(encryptor)
    a, b = (encryptor.encrypt(keys, u, rule.rule.weight(u)) for u in sent)
    tensors, _, weight = encryptor.open(keys, encryptor.add(encryptor.times(a, 70), encryptor.times(b, 30)))
    x, y = (u.tensors["w"].clamp(-1, 1).double() for u in sent)
    half = 1e-9 if name == "fedboosting" else 1 / (2**encryptor.code.bits - 2)  # type: ignore[attr-defined]
    torch.testing.assert_close(tensors["w"] / weight, 0.7 * x + 0.3 * y, rtol=0, atol=half)


def sum_of(encryptor: Encryptor, keys: Keys, sent: list[Update]) -> Encrypted:
    first, *rest = (encryptor.encrypt(keys, u, u.samples) for u in sent)
    for sealed in rest:
        first = encryptor.add(first, sealed)
    return first


@EACH
def test_what_is_not_the_sum_of_what_was_sealed_is_not_opened(name: str) -> None:
    sent = updates(3)
    encryptor = PROTECTIONS[name].encryptor(Load(6, 60))
    keys = keys_of(encryptor)
    good = sum_of(encryptor, keys, sent)
    encryptor.open(keys, good)
    other = encryptor.encrypt(keys, updates(4)[3], 4)
    share = good.shares[0]
    bad = {
        "added to": encryptor.add(good, good),
        "replaced": replace(good, ciphertexts=other.ciphertexts),
        "truncated": replace(good, ciphertexts=good.ciphertexts[:-1]),
        "cut": replace(good, ciphertexts=(good.ciphertexts[0][:-1], *good.ciphertexts[1:])),
        "another weight": replace(good, shares=(share._replace(weight=2), *good.shares[1:])),
        "another factor": replace(good, shares=(share._replace(after=2), *good.shares[1:])),
        "another client": replace(good, shares=(share._replace(client=9), *good.shares[1:])),
        "one left out": replace(good, shares=good.shares[1:]),
        "another round": replace(good, round=5),
        "another tag": replace(good, tag=other.tag),
    }
    if name.startswith("paillier"):  # what can be added by who knows the public key alone, to the first value
        n = int.from_bytes(good.public, "big")
        for change in (1, 2**31 - 1, PRIME):
            first = int.from_bytes(good.ciphertexts[0], "big") * (1 + change * n) % n**2
            data = first.to_bytes(len(good.ciphertexts[0]), "big")
            bad[f"{change} more"] = replace(good, ciphertexts=(data, *good.ciphertexts[1:]))
    opened = [what for what, sealed in bad.items() if opens(encryptor, keys, sealed)]
    assert not opened


def opens(encryptor: Encryptor, keys: Keys, sealed: Encrypted) -> bool:
    try:
        encryptor.open(keys, sealed)
    except ProtectionError:
        return False
    return True


@EACH
def test_a_flipped_bit_is_noticed_unless_the_sum_is_the_same(name: str) -> None:
    """A bit of a lattice ciphertext may be noise, which decryption takes away: then nothing has been changed."""
    encryptor = PROTECTIONS[name].encryptor(Load(3, 30))
    keys = keys_of(encryptor)
    good = sum_of(encryptor, keys, updates(3))
    expected, _, _ = encryptor.open(keys, good)
    noticed = 0
    whole = good.ciphertexts[0]
    for place in range(0, len(whole), max(1, len(whole) // 40)):
        flipped = whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :]
        sealed = replace(good, ciphertexts=(flipped, *good.ciphertexts[1:]))
        if not opens(encryptor, keys, sealed):
            noticed += 1
        else:
            assert torch.equal(encryptor.open(keys, sealed)[0]["w"], expected["w"])
    assert noticed >= 20


@EACH
def test_other_keys_do_not_open(name: str) -> None:
    encryptor = PROTECTIONS[name].encryptor(Load(3, 30))
    keys, others = keys_of(encryptor), keys_of(encryptor, b"t" * 32)
    good = sum_of(encryptor, keys, updates(3))
    for wrong in (others, Keys(keys.secret, others.pair), Keys(others.secret, keys.pair)):
        with pytest.raises(ProtectionError):
            encryptor.open(wrong, good)


@EACH
def test_one_clients_update_is_not_opened(name: str) -> None:
    encryptor = PROTECTIONS[name].encryptor(Load(3, 30))
    keys = keys_of(encryptor)
    alone = encryptor.encrypt(keys, updates(1)[0], 1)
    for sealed in (alone, encryptor.add(alone, alone)):
        with pytest.raises(ProtectionError, match="would reveal one client"):
            encryptor.open(keys, sealed)


@EACH
def test_what_does_not_belong_together_is_not_added(name: str) -> None:
    encryptor = PROTECTIONS[name].encryptor(Load(3, 30))
    keys, (a, b, _) = keys_of(encryptor), updates(3)
    left, right = encryptor.encrypt(keys, a, 1), encryptor.encrypt(keys, b, 4)
    for wrong, message in (
        (replace(right, round=5), "the round of clients 0 and of clients 1"),
        (replace(right, tensors=(("v", (60, 5)), ("b", (2,)))), "the parameters of clients"),
        (replace(right, public=b"another"), "the public key of clients"),
        (replace(right, ciphertexts=right.ciphertexts[:-1]), "truncated|cannot be read"),
        (replace(right, parameters=replace(encryptor, clip=2.0)), "with parameters"),
    ):
        with pytest.raises(ProtectionError, match=message):
            encryptor.add(left, wrong)


@EACH
def test_what_there_is_no_room_for_is_not_added(name: str) -> None:
    encryptor = PROTECTIONS[name].encryptor(Load(2, 30))
    keys, (a, b, c) = keys_of(encryptor), updates(3)
    heavy = encryptor.encrypt(keys, b, 30)
    with pytest.raises(ProtectionError, match="total factor 31 exceed"):
        encryptor.add(encryptor.encrypt(keys, a, 1), heavy)
    with pytest.raises(ProtectionError, match="total factor 60 exceed"):
        encryptor.times(heavy, 2)
    pair = encryptor.add(encryptor.encrypt(keys, a, 1), encryptor.encrypt(keys, b, 1))
    with pytest.raises(ProtectionError, match="updates of 3 clients"):
        encryptor.add(pair, encryptor.encrypt(keys, c, 1))


def test_a_server_without_keys_neither_seals_nor_opens() -> None:
    sent = updates(2)
    rule = ruled("paillier", sent)
    server = without_keys(rule)
    with pytest.raises(ProtectionError, match="only clients have the keys"):
        server.protect(sent[0])
    with pytest.raises(ProtectionError, match="only clients have the keys"):
        server.answer(Open(sum_of(rule.channel.encryptor, rule.channel.keys, sent)), Someone())


def test_rules_that_are_no_weighted_sum_are_refused() -> None:
    with pytest.raises(UserError, match="not enough for Median"):
        SumOverChannel.of(Median(), PROTECTIONS["bfv"], 2, 2)


def test_short_keys_must_be_asked_for() -> None:
    with pytest.raises(ValidationError, match="1024 can be broken: set 2048 or more, or add `insecure: true`"):
        Paillier(key_bits=1024)
    assert "can be broken" in str(Paillier(key_bits=1024, insecure=True).warning())
    assert Paillier().warning() is None


@pytest.mark.parametrize(
    ("protection", "message"),
    [
        (Paillier(key_bits=128, insecure=True, bits=32), "set fewer bits, a longer key"),
        (Paillier(key_bits=128, insecure=True, encoding="fedboosting", clip=1e9), "set fewer bits, a longer key"),
        (Ckks(bits=32), "bits too short"),
        (Bfv(bits=32), "bits too short"),
    ],
)
def test_sums_without_room_are_refused(protection: Encryption, message: str) -> None:
    with pytest.raises(UserError, match=message):
        protection.encryptor(Load(1000, 2**100))


def test_lattices_take_as_many_bits_as_there_is_room_for() -> None:
    bits = [Ckks().encryptor(Load(10, units)).code.bits for units in (10, 600, 60_000)]  # type: ignore[attr-defined]
    assert bits == sorted(bits, reverse=True)
    assert bits[0] == 27
    assert bits[-1] >= 16
