"""Secure aggregation's protocol: the sum is exact whoever drops out when, and nothing else can be told."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from rayfed.crypto import shamir
from rayfed.crypto.keys import Stream, derive
from rayfed.crypto.masking import Advertised, Participant, Revealed, expand, neighbours, unmasked
from rayfed.errors import ProtectionError

SIZE = 50


def participants(count: int) -> dict[int, Participant]:
    return {c: Participant(c, derive(b"root", c)) for c in range(count)}


def vectors(count: int) -> dict[int, np.ndarray]:
    draw = np.random.default_rng(0)
    return {c: draw.integers(0, 2**64, SIZE, dtype=np.uint64) for c in range(count)}


def played(
    count: int, degree: int, threshold: int, gone: dict[int, set[int]] | None = None
) -> tuple[np.ndarray, list[int], dict[int, np.ndarray]]:
    """The unmasked sum, whose vectors are in it, and the masked ones; `gone[phase]` drop out before they speak."""
    gone = gone or {}
    everybody, near = participants(count), neighbours(range(count), degree, np.random.default_rng(1))

    def left(phase: int) -> list[int]:
        return [c for c in everybody if not any(c in gone.get(p, ()) for p in range(phase + 1))]

    def around(client: int, present: list[int]) -> list[int]:
        return [c for c in near[client] if c in present]

    advertised: dict[int, Advertised] = {c: everybody[c].advertise() for c in left(0)}
    boxes = {
        c: everybody[c].share({n: advertised[n] for n in around(c, left(0))}, threshold) for c in left(1)
    }  # fmt: skip
    masked = {
        c: everybody[c].mask(vectors(count)[c], {n: advertised[n] for n in around(c, left(1))}) for c in left(2)
    }  # fmt: skip
    survivors, dropped = left(2), sorted(set(left(1)) - set(left(2)))
    revealed: dict[int, Revealed] = {
        c: everybody[c].reveal({n: boxes[n][c] for n in around(c, left(1))}, advertised, survivors, dropped)
        for c in left(3)
    }
    total = np.sum([masked[c] for c in survivors], axis=0, dtype=np.uint64)
    return unmasked(total, survivors, dropped, near, advertised, revealed, threshold), survivors, masked


def expected(count: int, survivors: list[int]) -> np.ndarray:
    return np.sum([vectors(count)[c] for c in survivors], axis=0, dtype=np.uint64)


@pytest.mark.parametrize("phase", range(4))
@pytest.mark.parametrize("lost", range(4))
def test_the_sum_is_exact_while_the_threshold_holds(phase: int, lost: int) -> None:
    total, survivors, _ = played(8, degree=8, threshold=4, gone={phase: set(range(1, 1 + lost))})
    assert len(survivors) == (8 - lost if phase < 3 else 8)
    np.testing.assert_array_equal(total, expected(8, survivors))


@pytest.mark.parametrize("degree", [6, 10])
def test_the_sum_is_exact_on_a_sparse_graph_with_drop_outs_in_every_phase(degree: int) -> None:
    total, survivors, _ = played(20, degree, threshold=2, gone={0: {3}, 1: {9}, 2: {0, 14}, 3: {6}})
    assert len(survivors) == 16
    np.testing.assert_array_equal(total, expected(20, survivors))


@pytest.mark.parametrize("phase", [1, 2, 3])
def test_under_the_threshold_nothing_is_opened(phase: int) -> None:
    with pytest.raises(ProtectionError, match="needed"):
        played(6, degree=6, threshold=4, gone={phase: {0, 1, 2}})


def test_a_masked_vector_looks_like_noise_and_so_does_a_sum_that_lacks_one() -> None:
    _, _, masked = played(5, degree=4, threshold=3)
    for c, vector in vectors(5).items():
        assert not np.isin(masked[c], vector).any()
    partial = np.sum([masked[c] for c in range(4)], axis=0, dtype=np.uint64)
    assert not np.isin(partial, expected(5, [0, 1, 2, 3])).any()


def test_each_round_of_the_protocol_masks_afresh() -> None:
    one, other = (Participant(0, derive(b"root", 0, round)).advertise() for round in (0, 1))
    assert one != other


def test_a_client_never_gives_both_secrets_of_another() -> None:
    everybody = participants(3)
    advertised = {c: p.advertise() for c, p in everybody.items()}
    boxes = {c: p.share({o: a for o, a in advertised.items() if o != c}, 2) for c, p in everybody.items()}
    with pytest.raises(ProtectionError, match="both secrets of client 1"):
        everybody[0].reveal({c: boxes[c][0] for c in (1, 2)}, advertised, {0, 1, 2}, {1})
    tampered = bytes([boxes[1][0][0] ^ 1]) + boxes[1][0][1:]
    with pytest.raises(ProtectionError, match="tampered"):
        everybody[0].reveal({1: tampered}, advertised, {1}, set())
    with pytest.raises(ProtectionError):  # a box is for its own holder alone
        everybody[2].reveal({1: boxes[1][0]}, advertised, {1}, set())


@pytest.mark.parametrize(("clients", "degree"), [(10, 4), (11, 6), (5, 4), (3, 8)])
def test_the_graph_is_regular_and_mutual(clients: int, degree: int) -> None:
    near = neighbours(range(clients), degree, np.random.default_rng(0))
    assert {len(set(some)) for some in near.values()} == {min(degree, clients - 1)}
    assert all(c in near[other] and c != other for c, some in near.items() for other in some)


def test_any_threshold_of_shares_gives_the_secret_and_fewer_do_not() -> None:
    secret = bytes(range(32))
    shares = shamir.split(secret, 3, range(5), Stream(derive(b"x")))
    for some in combinations(range(5), 3):
        assert shamir.join({h: shares[h] for h in some}, 3, 32) == secret
    with pytest.raises(ProtectionError, match="2 shares of a secret are left, 3 are needed"):
        shamir.join({h: shares[h] for h in (0, 1)}, 3, 32)
    with pytest.raises(ProtectionError, match="do not fit"):
        shamir.join({0: shares[0], 1: shares[1], 2: shares[2] ^ 1 << 500}, 3, 32)


def test_masks_are_uniform() -> None:
    drawn = expand(bytes(32), 100_000)
    counts = np.bincount((drawn >> np.uint64(56)).astype(int), minlength=256)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 350  # chi squared, 255 degrees: p < 1e-4
