"""Paillier against phe, packing against plain arithmetic, tags against forgeries."""

from __future__ import annotations

import math
from fractions import Fraction

import gmpy2
import numpy as np
import phe
import pytest

from rayfed.crypto import reference
from rayfed.crypto.encryptor import Load
from rayfed.crypto.factoring import factor
from rayfed.crypto.keys import Stream, derive, lock, unlock
from rayfed.crypto.packing import FixedPoint, Lanes, apportion
from rayfed.crypto.paillier import KeyPair
from rayfed.crypto.tags import PRIME, Tagger, add_tags, multiply_tag
from rayfed.errors import ProtectionError
from rayfed.protections.paillier import Paillier, Slices


def key_pair(bits: int = 512, seed: bytes = b"seed") -> KeyPair:
    return KeyPair.generate(bits, Stream(derive(seed, "pair")))


def plaintexts(n: int, count: int = 20) -> list[int]:
    state = gmpy2.random_state(count)
    return [0, 1, n - 1, n // 2, *(int(gmpy2.mpz_random(state, n)) for _ in range(count))]


@pytest.mark.parametrize("bits", [128, 130, 512, 1024])
def test_keys_have_the_length_asked_for_and_follow_from_the_seed(bits: int) -> None:
    keys = key_pair(bits)
    assert keys.public.bits == bits
    assert keys == key_pair(bits)
    assert keys != key_pair(bits, b"another")
    assert all(gmpy2.is_prime(prime, 50) for prime in (keys.p, keys.q))


@pytest.mark.parametrize("way", ["plain", "crt", "table"])
def test_phe_decrypts_what_is_encrypted(way: str) -> None:
    keys = key_pair()
    numbers = plaintexts(int(keys.public.n))
    encrypt = {
        "plain": keys.public.encrypt,
        "crt": keys.encrypt,
        "table": lambda m: keys.encrypt(m, keys.tabulated()(len(m))),
    }[way]
    ciphertexts = encrypt(numbers)
    assert reference.decrypt(keys, ciphertexts) == numbers
    assert len(set(ciphertexts) | set(encrypt(numbers))) == 2 * len(numbers)  # obfuscated afresh every time


def test_what_phe_encrypts_is_decrypted() -> None:
    public, private = phe.generate_paillier_keypair(n_length=512)
    keys = KeyPair(gmpy2.mpz(private.p), gmpy2.mpz(private.q))
    for number in (0, 7, -7, 0.375, -1e-3):
        encrypted = public.encrypt(number) + 1
        [residue] = keys.decrypt([gmpy2.mpz(encrypted.ciphertext())])
        assert phe.EncodedNumber(public, int(residue), encrypted.exponent).decode() == pytest.approx(number + 1)


@pytest.mark.parametrize("encoding", ["packed", "fedboosting"])
@pytest.mark.parametrize("backends", [("rayfed", "phe"), ("phe", "rayfed")])
def test_backends_have_the_same_keys_and_ciphertexts(encoding: str, backends: tuple[str, str]) -> None:
    values, clip, load = np.array([0, 1, -1, 0.375, -1e-3, 1 / 3] * 20), np.ones(120), Load(2, 4, multiplied=True)
    first, second = (
        Paillier(key_bits=512, insecure=True, encoding=encoding, backend=backend).encryptor(load)
        for backend in backends
    )
    pair, vector = first.scheme.generate(b"s" * 32), first.code.encode(values, clip)
    assert pair == second.scheme.generate(b"s" * 32)
    public = first.scheme.public(pair)
    tripled = second.scheme.times(public, first.scheme.encrypt(pair, vector, 1), 3)
    total = first.scheme.add(public, tripled, second.scheme.encrypt(pair, -vector, 1))
    for one in (first, second):
        assert (one.scheme.decrypt(pair, total, 120, 4) == 2 * vector).all()


def test_sums_and_multiples_are_those_of_the_plaintexts() -> None:
    keys, public = key_pair(), key_pair().public
    a, b = plaintexts(int(public.n)), plaintexts(int(public.n))[::-1]
    found = keys.decrypt(public.add(public.times(keys.encrypt(a), 73), keys.encrypt(b)))
    assert found == [(73 * x + y) % public.n for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("table", [False, True])
def test_obfuscators_are_nth_powers_of_every_residue_alike(table: bool) -> None:
    """A key so small that all n-th powers modulo n squared can be listed."""
    keys = KeyPair(gmpy2.mpz(11), gmpy2.mpz(17))
    n = int(keys.public.n)
    powers = {pow(r, n, n * n) for r in range(1, n) if math.gcd(r, n) == 1}
    drawn = (keys.tabulated() if table else keys.obfuscators)(40 * len(powers))
    counts = [drawn.count(power) for power in powers]
    assert set(map(int, drawn)) == powers
    assert np.std(counts) < 2 * 40**0.5  # Poisson with mean 40


@pytest.mark.parametrize(("width", "count"), [(1, 7), (8, 3), (23, 89), (63, 2)])
def test_lanes_hold_sums_side_by_side(width: int, count: int) -> None:
    lanes, draw = Lanes(width, count), np.random.default_rng(width)
    size = 2 * count + 1
    summands = 100 if width > 7 else 1
    terms = [draw.integers(0, 2**width // summands, size) for _ in range(summands)]
    packed = [lanes.pack(term) for term in terms]
    assert all(len(p) == 3 and max(p) < 2 ** (width * count) for p in packed)
    assert packed[0][0] == sum(int(v) << (width * i) for i, v in enumerate(terms[0][:count]))
    np.testing.assert_array_equal(lanes.unpack([sum(column) for column in zip(*packed, strict=True)], size), sum(terms))


def test_full_lanes_come_back() -> None:
    lanes = Lanes(63, 3)
    values = np.array([2**63 - 1, 0, 2**63 - 1, 1])
    np.testing.assert_array_equal(lanes.unpack(lanes.pack(values), 4), values)


@pytest.mark.parametrize("bits", [2, 8, 16, 27])
def test_fixed_point_is_exact_to_half_a_step_within_the_bound_and_symmetric(bits: int) -> None:
    code, clip = FixedPoint(bits), np.full(1001, 0.7)
    values = np.linspace(-0.7, 0.7, 1001)
    found = code.decode(code.encode(values, clip), clip)
    assert np.abs(found - values).max() <= 0.7 / (2**bits - 2) * (1 + 1e-9)
    np.testing.assert_array_equal(code.encode(-values, clip), -code.encode(values, clip))
    np.testing.assert_array_equal(code.encode(values * 1e9, clip)[[0, -1]], [-code.most, code.most])


def test_slices_are_the_papers_integers() -> None:
    values = np.array([0.0, 0.1, -0.1, 1 / 3, -1e-30, 1.0, 5.0])
    found = Slices(100).encode(values, np.ones(7))
    clipped = [Fraction(min(v, 1.0)) for v in values.tolist()]
    assert found.tolist() == [math.floor(v * 10**32 / 100) for v in clipped]
    np.testing.assert_allclose(
        Slices(100).decode(found * 100, np.ones(7)) / 100, [float(v) for v in clipped], atol=1e-29
    )


@pytest.mark.parametrize("clients", [1, 3, 7, 30, 100])
def test_pieces_sum_to_all_of_them(clients: int) -> None:
    weights = np.random.default_rng(clients).integers(1, 1000, clients).tolist()
    for each in (weights, [1.0] * clients):
        pieces = apportion(each, 100)
        assert sum(pieces) == 100
        assert all(abs(piece - 100 * w / sum(each)) < 1 for piece, w in zip(pieces, each, strict=True))
    assert sum(100 // 30 for _ in range(30)) == 90  # what rounding down would have left


def test_a_tag_fits_its_sum_and_no_other() -> None:
    tagger, draw = Tagger(b"k" * 32), np.random.default_rng(0)
    a, b = draw.integers(-(2**40), 2**40, 500), np.array([10**30 * int(v) for v in draw.integers(-9, 9, 500)], object)
    tag = add_tags(multiply_tag(tagger.tag(a, 1, 5), 3), tagger.tag(b, 2, 5))
    contexts = [(3, (1, 5)), (1, (2, 5))]
    assert tagger.holds(3 * a + b, tag, contexts)
    wrong = 3 * a + b
    wrong[17] += 1
    assert not tagger.holds(wrong, tag, contexts)
    assert not tagger.holds(3 * a, tag, contexts)
    assert not tagger.holds(3 * a + b, tag, [(3, (1, 5)), (1, (3, 5))])
    assert not tagger.holds(3 * a + b, tag, [(2, (1, 5)), (1, (2, 5))])
    assert not Tagger(b"j" * 32).holds(3 * a + b, tag, contexts)
    assert not tagger.holds(3 * a + b, (tag + 1) % PRIME, contexts)


@pytest.mark.parametrize("vector", [
    np.random.default_rng(0).integers(-(2**62), 2**62, 1000),
    np.array([-(2**63), 2**63 - 1, 0, -1]),
    np.array([(-1) ** i * 10 ** (i % 37) for i in range(100)], object),
    np.random.default_rng(1).integers(-9, 9, (1 << 20) + 7),
], ids=["64 bits", "extremes", "large", "more than a block"])  # fmt: skip
def test_a_tag_is_an_exact_inner_product_behind_a_mask(vector: np.ndarray) -> None:
    tagger = Tagger(b"k" * 32)
    stream = Stream(derive(tagger.key, "coefficients")).read(16 * len(vector))
    terms = (int.from_bytes(stream[16 * i : 16 * i + 16], "little") * int(v) for i, v in enumerate(vector))
    mask = tagger.tag(np.zeros(1, np.int64), 7)
    assert tagger.tag(vector, 7) == (sum(terms) + mask) % PRIME


def test_a_box_opens_with_its_key_alone() -> None:
    box = lock(b"a" * 32, b"secret")
    assert unlock(b"a" * 32, box) == b"secret"
    for key, data in (
        (b"b" * 32, box),
        (b"a" * 32, box[:-1]),
        (b"a" * 32, bytes([box[0] ^ 1]) + box[1:]),
        (b"a" * 32, b""),
    ):
        with pytest.raises(ProtectionError, match="cannot be decrypted"):
            unlock(key, data)


def test_the_keys_of_the_paper_are_factored() -> None:
    keys = key_pair(128)
    assert factor(int(keys.public.n)) == tuple(sorted((int(keys.p), int(keys.q))))
    assert factor(int(key_pair(512).public.n)) is None
