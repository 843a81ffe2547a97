"""Secure aggregation's protocol: the sum is exact whoever drops out when, and nothing else can be told."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from rayfed.crypto import masking, shamir
from rayfed.crypto.keys import Stream, derive
from rayfed.crypto.masking import (
    Advertised,
    KeyList,
    MaskingSetting,
    Participant,
    Revealed,
    expand_mask,
    neighbours,
    unmask_sum,
)
from rayfed.errors import ProtectionError

SIZE, MODEL = 50, b"digest of a model"


def participants(count: int, threshold: int, degree: int = 8) -> dict[int, Participant]:
    setting = MaskingSetting(b"run", 0, threshold, degree)
    return {c: Participant(c, derive(b"root", c), setting, {}) for c in range(count)}


def to(client: int, letters: dict[int, dict[int, bytes]]) -> dict[int, bytes]:
    """Those boxes or tags that are for one client, by sender."""
    return {sender: own[client] for sender, own in letters.items() if client in own}


def vectors(count: int) -> dict[int, np.ndarray]:
    draw = np.random.default_rng(0)
    return {c: draw.integers(0, 2**64, SIZE, dtype=np.uint64) for c in range(count)}


def played(
    count: int, degree: int, threshold: int, gone: dict[int, set[int]] | None = None
) -> tuple[np.ndarray, list[int], dict[int, np.ndarray]]:
    """The unmasked sum, whose vectors are in it, and the masked ones; `gone[phase]` drop out before they speak."""
    gone = gone or {}
    everybody = participants(count, threshold, degree)

    def left(phase: int) -> list[int]:
        return [c for c in everybody if not any(c in gone.get(p, ()) for p in range(phase + 1))]

    keys: dict[int, Advertised] = {c: everybody[c].advertise() for c in left(0)}
    boxes = {c: everybody[c].share(keys) for c in left(1)}
    shared, survivors = left(1), left(2)
    agreed = {c: everybody[c].agree(keys, shared, MODEL) for c in survivors}
    masked = {c: everybody[c].mask(vectors(count)[c], keys, shared, MODEL, agreed[c][c]) for c in survivors}
    confirmed = {c: everybody[c].confirm(keys, shared, survivors, to(c, agreed)) for c in left(3)}
    revealed: dict[int, Revealed] = {
        c: everybody[c].reveal(keys, shared, survivors, to(c, confirmed), to(c, boxes)) for c in left(4)
    }
    total, dropped = np.sum([masked[c] for c in survivors], axis=0, dtype=np.uint64), sorted({*shared} - {*survivors})
    near = neighbours(keys, degree)
    return unmask_sum(total, survivors, dropped, near, keys, revealed, threshold), survivors, masked


def expected(count: int, survivors: list[int]) -> np.ndarray:
    return np.sum([vectors(count)[c] for c in survivors], axis=0, dtype=np.uint64)


@pytest.mark.parametrize("phase", range(5))
@pytest.mark.parametrize("lost", range(4))
def test_the_sum_is_exact_while_the_threshold_holds(phase: int, lost: int) -> None:
    total, survivors, _ = played(8, degree=8, threshold=5, gone={phase: set(range(1, 1 + lost))})
    assert len(survivors) == (8 - lost if phase < 3 else 8)
    np.testing.assert_array_equal(total, expected(8, survivors))


@pytest.mark.parametrize(("degree", "threshold"), [(10, 6), (16, 10)])
def test_the_sum_is_exact_on_a_sparse_graph_with_drop_outs_in_every_phase(degree: int, threshold: int) -> None:
    total, survivors, _ = played(20, degree, threshold, gone={0: {3}, 1: {9}, 2: {0, 14}, 3: {6}, 4: {7}})
    assert len(survivors) == 16
    np.testing.assert_array_equal(total, expected(20, survivors))


@pytest.mark.parametrize("phase", range(5))
def test_under_the_threshold_nothing_is_opened(phase: int) -> None:
    with pytest.raises(ProtectionError, match="need"):
        played(6, degree=6, threshold=4, gone={phase: {0, 1, 2}})


def test_a_masked_vector_looks_like_noise_and_so_does_a_sum_that_lacks_one() -> None:
    _, _, masked = played(5, degree=4, threshold=3)
    for c, vector in vectors(5).items():
        assert not np.isin(masked[c], vector).any()
    partial = np.sum([masked[c] for c in range(4)], axis=0, dtype=np.uint64)
    assert not np.isin(partial, expected(5, [0, 1, 2, 3])).any()


def test_each_round_of_the_protocol_masks_afresh() -> None:
    setting = MaskingSetting(b"run", 0, 2, 8)
    one, other = (Participant(0, derive(b"root", 0, round), setting, {}).advertise() for round in (0, 1))
    assert one != other


def test_a_participant_that_has_lost_its_transcript_answers_nothing_more() -> None:
    everybody = participants(3, threshold=2)
    keys = {c: p.advertise() for c, p in everybody.items()}
    for participant in everybody.values():
        participant.share(keys)
    with pytest.raises(ProtectionError, match="lost its transcript"):
        participants(3, threshold=2)[0].agree(keys, [0, 1, 2], MODEL)


@pytest.mark.parametrize(("clients", "degree"), [(10, 4), (11, 6), (5, 4), (3, 8)])
def test_the_graph_is_regular_and_mutual(clients: int, degree: int) -> None:
    near = neighbours({c: Advertised(bytes([c]), b"") for c in range(clients)}, degree)
    assert {len(set(some)) for some in near.values()} == {min(degree, clients - 1)}
    assert all(c in near[other] and c != other for c, some in near.items() for other in some)


def test_any_threshold_of_shares_gives_the_secret_and_fewer_do_not() -> None:
    secret = bytes(range(32))
    shares = shamir.split(secret, 3, range(5), Stream(derive(b"x")))
    for some in combinations(range(5), 3):
        assert shamir.join({h: shares[h] for h in some}, 3, 32) == secret
    with pytest.raises(ProtectionError, match="only 2 of 3 needed shares"):
        shamir.join({h: shares[h] for h in (0, 1)}, 3, 32)
    with pytest.raises(ProtectionError, match="inconsistent"):
        shamir.join({0: shares[0], 1: shares[1], 2: shares[2] ^ 1 << 500}, 3, 32)


def test_masks_are_uniform() -> None:
    drawn = expand_mask(bytes(32), 100_000)
    counts = np.bincount((drawn >> np.uint64(56)).astype(int), minlength=256)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 350  # chi squared, 255 degrees: p < 1e-4


def test_clients_of_a_process_hash_the_list_of_keys_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, digest = Counter[object](), masking._digest

    def counted(*parts: object) -> bytes:
        hashed[parts[0]] += 1
        return digest(*parts)  # type: ignore[arg-type]

    monkeypatch.setattr(masking, "_digest", counted)
    masking._graph.cache_clear()
    everybody = participants(20, threshold=5, degree=4)
    keys = KeyList({c: p.advertise() for c, p in everybody.items()})
    for participant in everybody.values():
        participant.share(keys)
        participant.agree(keys, range(20), MODEL)
    assert (hashed["directory"], hashed["ring"]) == (1, 20)


def test_what_is_remembered_of_a_list_of_keys_is_of_its_contents() -> None:
    draw = np.random.default_rng(0)
    keys = {c: Advertised(draw.bytes(32), draw.bytes(32)) for c in range(20)}
    known = KeyList(keys)
    before, digest = neighbours(known, 4), known.digest
    keys[0] = replace(keys[0], box=draw.bytes(32))  # whoever made the list of this has not changed the list
    assert (KeyList(dict(known)).digest, neighbours(known, 4)) == (digest, before)
    assert KeyList(keys) != known
    assert neighbours(keys, 4) != before
    before.clear()
    assert neighbours(known, 4)


def test_a_list_of_keys_is_sent_without_its_digest() -> None:
    known = KeyList({c: Advertised(bytes([c]) * 32, b"") for c in range(3)})
    vars(known)["digest"] = b"a lie"
    assert pickle.loads(pickle.dumps(known)).digest == KeyList(dict(known)).digest


def test_two_clients_agree_on_a_key_once_for_each_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged, exchange = list[bytes](), masking._exchanged

    def counted(own: X25519PrivateKey, public: bytes) -> bytes:
        exchanged.append(public)
        return exchange(own, public)

    monkeypatch.setattr(masking, "_exchanged", counted)
    everybody = participants(3, threshold=2)
    keys = {c: p.advertise() for c, p in everybody.items()}
    first = [everybody[0]._common(keys, 1, purpose) for purpose in ("tags", "shares", "tags")]
    assert first[0] == first[2] != first[1]
    assert first[0] == everybody[1]._common(keys, 0, "tags")
    assert everybody[0]._common({**keys, 1: keys[2]}, 1, "tags") != first[0]  # of the key, not of who has it
    assert exchanged.count(keys[1].box) == 2
