"""From defences that promise it nothing is taken off by who has their code: the attacker is spared to find it out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rayfed import registry
from rayfed.client.grants import understood
from rayfed.client.grants.code import KnownCode
from rayfed.client.grants.understood import Rehearsal
from rayfed.client.sent import Sent
from rayfed.client.visit import ObservationRequest
from rayfed.engine.worker import ClientWorker
from tests.component_fixtures import variants
from tests.test_code import observed, prepared

PROMISING: tuple[dict[str, Any], ...] = (
    {"name": "prune", "ratio": 0.9},
    {"name": "prune", "ratio": 0.5, "by": "weight_gradient", "scope": "global"},
    {"name": "prune", "ratio": 0.9, "error_feedback": True},
    {"name": "top_k", "k": 0.01},
    *({"name": "quantise", "bits": bits} for bits in (1, 2, 4, 8)),
    {"name": "quantise", "bits": 4, "rounding": "stochastic"},
    {"name": "gaussian", "sigma": 0.01},
    {"name": "gaussian", "sigma": 0.01, "clip": 0.5},
    {"name": "laplace", "scale": 0.01},
)


def declaring() -> list[dict[str, Any]]:
    """Return `PROMISING` and, with the parameters of other tests, all other defences that declare the same."""
    found = list(PROMISING)
    for name in sorted(registry.table("defences").keys() - {defence["name"] for defence in PROMISING}):
        if registry.find("defences", name).nothing_to_undo:
            found += [{"name": name} | parameters for parameters in variants(name)]
    return found


def told(defence: dict[str, Any]) -> dict[str, Any]:
    seen, _ = observed(defence)
    return {name: seen.extra.get(name) for name in KnownCode.fills}


@pytest.mark.parametrize("defence", declaring(), ids=str)
def test_running_it_finds_nothing_to_undo(defence: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    promised = told(defence)
    monkeypatch.setattr(registry.find("defences", defence["name"]), "nothing_to_undo", False)
    found = told(defence)
    assert found["undone"] is promised["undone"] is None
    assert (found["as_trained"], found["beyond"]) == (promised["as_trained"], promised["beyond"]) == (None, "")
    for name in ("left", "heard"):
        one, other = found[name], promised[name]
        assert (one is None) == (other is None)
        assert one is None or all(torch.equal(one[tensor], other[tensor]) for tensor in one)
    assert (found["noise"] is None) == (promised["noise"] is None)
    assert found["noise"] is None or found["noise"].scales == pytest.approx(promised["noise"].scales, rel=0.5)


def test_an_arm_is_run_once_for_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []
    of = Rehearsal.of

    def counted(answer: Any, like: Any, trusted: bool = False, even: bool = False, *others: Any) -> Rehearsal:
        runs.append(even)
        return of(answer, like, trusted, even, *others)

    monkeypatch.setattr(understood.Rehearsal, "of", counted)
    inputs = prepared({"name": "prune", "ratio": 0.9})
    worker = ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    arm = inputs.accounts[1]
    sent = Sent(0, arm.arm.weights, arm.arm.buffers)
    for client in (0, 1):
        worker.observe(sent, ObservationRequest(arm.name, [client], inputs.scenario.attacks[0]))
    assert runs == [True]
