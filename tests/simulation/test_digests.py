"""Digests of what clients are sent: of all of it, found once, and by whoever needs it."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from rayfed.simulation.client.server_message import Sent
from rayfed.update import Named, digest_of

WEIGHTS: Named = {"b": torch.ones(2), "a": torch.zeros(3)}


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.ones(2)},
        dict(reversed(WEIGHTS.items())),
        WEIGHTS | {"a": torch.tensor([0.0, 0.0, 1e-40])},
        WEIGHTS | {"a": torch.zeros(3, dtype=torch.int32)},
        WEIGHTS | {"a": torch.zeros(1, 3)},
    ],
)
def test_other_tensors_have_another_digest(other: Named) -> None:
    assert digest_of(other) != digest_of(WEIGHTS) == digest_of({n: t.clone() for n, t in WEIGHTS.items()})


def test_what_is_sent_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = list[Named]()

    def counted(tensors: Named) -> bytes:
        hashed.append(tensors)
        return digest_of(tensors)

    monkeypatch.setattr("rayfed.simulation.client.server_message.digest_of", counted)
    sent = Sent(0, WEIGHTS, {})
    assert len({(sent.digest, sent.content) for _ in range(3)}) == 1
    assert len(hashed) == 2  # weights and buffers


def test_what_is_sent_has_a_digest_of_all_that_clients_have_in_common() -> None:
    sent = Sent(0, WEIGHTS, {})
    sorted_otherwise = replace(sent, weights=dict(reversed(WEIGHTS.items())))
    others = [replace(sent, round=1), replace(sent, keys=b"k"), Sent(0, {}, WEIGHTS)]
    assert sent.digest == sorted_otherwise.digest
    assert len({s.digest for s in (sent, *others)}) == 4
    assert replace(sent, keys=b"k").content == sent.content


def test_what_is_sent_travels_without_its_digest() -> None:
    sent = Sent(0, WEIGHTS, {})
    vars(sent)["digest"] = "a lie"
    assert pickle.loads(pickle.dumps(sent)).digest == Sent(0, WEIGHTS, {}).digest
