"""Values between the driver and its actors: what is put into the object store, and how often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import ray
import torch

from actors.local_ray import most_in_a_message
from actors.transport import Held, fetched
from rayfed.simulation.client.server_message import Sent


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is put into an object store that only counts."""
    values: list[Any] = []
    monkeypatch.setattr(ray, "put", lambda value: values.append(value) or f"reference {len(values)}")
    return values


def _sent(size: int) -> Sent:
    return Sent(0, {"weight": torch.zeros(size, dtype=torch.uint8)}, {})


def test_small_weights_travel_in_the_message_and_larger_ones_are_put_once(put: list[Any]) -> None:
    most = most_in_a_message()
    small, large = _sent(most), _sent(most + 1)
    assert Held(small).argument is small
    assert not put
    held = Held(large)
    assert held.argument == held.argument == "reference 1"
    assert put == [large]


def test_what_is_asked_of_clients_is_put_as_its_size_is_not_known(put: list[Any]) -> None:
    asked = replace(_sent(1), broadcast="anything")
    assert Held(asked).argument == "reference 1"
    assert Held([1.0]).argument == "reference 2"
    assert put == [asked, [1.0]]


def test_what_no_call_takes_stays_in_the_process(put: list[Any]) -> None:
    assert fetched([Held(None), Held(3), 4]) == [None, 3, 4]
    assert not put
