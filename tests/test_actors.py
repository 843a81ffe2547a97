"""What the Ray layer decides by itself, tested without Ray."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors import server
from actors.process import Share
from rayfed import scenario as scenarios
from rayfed.scenario import Scenario

TEXT = """
name: t
seed: 987654321
data: {name: digits, size: 8}
model: {name: mlp, hidden: [4]}
federation: {rounds: 1, clients: 2}
"""


def parsed(*changes: str) -> Scenario:
    return scenarios.parse(TEXT, changes=changes)


def test_a_server_with_a_gpu_adds_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "set_up", lambda share: torch.device("meta"))  # stands for a device of its own
    made = server.ServerActor(parsed(), (1, 8, 8), 10, Share(0, 1), {})
    sent, _ = made.sent("none", 0)
    steps: dict[str, Any] = {name: torch.ones_like(w, device="cpu") for name, w in sent.weights.items()}
    made._models["none"].apply(steps, {})
    after, _ = made.sent("none", 1)
    assert all(torch.equal(after.weights[name], w - 1) for name, w in sent.weights.items())
