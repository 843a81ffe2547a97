"""Any weighted sum over any channel; a new channel is a class of its own and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch

from rayfed import scenario as scenarios
from rayfed.attacks.matching.idlg import Idlg
from rayfed.attacks.sealed import attempt
from rayfed.core.questions import RoundSession
from rayfed.crypto.layout import UpdateLayout, flatten_update, to_single
from rayfed.errors import ScenarioError, UserError
from rayfed.protections.base import Protection
from rayfed.protections.channel import ClientRound, Opened, SecureChannel
from rayfed.registry import component
from rayfed.runs import runner
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.client.visit import ClientVisit
from rayfed.simulation.executors.local import local
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress
from rayfed.store import checkpoint
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.update import Named, Update
from tests.helpers import attack_fixtures

STEP = 2.0**-30


@dataclass(frozen=True)
class Integers:
    """Some clients' weighted updates in whole steps, for all to read."""

    layout: UpdateLayout
    vector: np.ndarray
    weight: int

    @property
    def sent_bytes(self) -> int:
        return self.vector.nbytes + 8


@dataclass(frozen=True)
class IntegersSession(RoundSession):
    total: Integers | None = None

    def finalise(self, total: Integers) -> IntegersSession:
        return IntegersSession(total)


@dataclass(frozen=True)
class ClearChannel(SecureChannel[Integers, Integers]):
    def describe(self) -> str:
        return "sends whole numbers in the clear"

    def at_clients(self, round: ClientRound) -> Self:
        return self

    def protect(self, update: Update, weight: int) -> Integers:
        vector = np.rint(flatten_update(update) / STEP).astype(np.int64)
        return Integers(UpdateLayout.from_update(update), weight * vector, weight)

    def observed(self, update: Update, weight: int) -> None:
        return None

    def answer(self, payload: Any, client: int, round: int) -> Any:
        raise AssertionError("nobody is asked")

    def partial(self, messages: Iterable[Integers]) -> Integers:
        return reduce(self.merge, messages)

    def merge(self, left: Integers, right: Integers) -> Integers:
        return replace(left, vector=left.vector + right.vector, weight=left.weight + right.weight)

    def begin_round(self, clients: Any) -> IntegersSession:
        return IntegersSession()

    def opened(self, session: IntegersSession) -> Opened:
        assert session.total is not None
        tensors, buffers = session.total.layout.split_by_name(session.total.vector * STEP)
        return to_single(tensors), to_single(buffers), session.total.weight


@component
class InTheClear(Protection):
    """Whole numbers in the clear, by which everybody sees everything."""

    def warning(self) -> str | None:
        return "it protects nothing"

    def summing(self, clients: int, units: int, step: float | None) -> ClearChannel:
        return ClearChannel()


TEXT = """
name: t
seed: 31
data: {name: digits, size: 8, train_samples: 200, test_samples: 50}
model: {name: lenet, norm: batch}
training: {lr: 0.1, batch_size: 8}
federation: {rounds: 2, clients: 6, clients_per_round: 5, cohort_size: 2, validation: 0.25}
arms: {none: {}}
attacks: [{name: analytic}]
"""
RULES = {
    "samples": "aggregation: fedavg",
    "uniform": "aggregation: {name: fedavg, weights: uniform}",
    "noisy": "defences: [{name: dp_fedavg, clip: 1.0, noise_multiplier: 0.5, delta: 0.00001}]",
}
CHANNELS = {
    "clear": "tests.protections.test_channels:InTheClear",
    "paillier": "{name: paillier, key_bits: 256, insecure: true, bits: 32}",
    "ckks": "ckks",
    "bfv": "bfv",
    "masks": "{name: secure_aggregation, threshold: 4, dropouts: {confirm: 1}}",
}


def parsed(rule: str, channel: str | None) -> scenarios.Scenario:
    protected = f", protection: {channel}" if channel else ""
    return scenarios.parse(TEXT, changes=[f"arms={{one: {{{rule}{protected}}}}}"])


def played(scenario: scenarios.Scenario, folder: Path) -> tuple[Named, list[dict[str, Any]]]:
    """The weights and buffers after a run, and the rows of its clients."""
    run = runner.launch(scenario, str(folder), local, Progress())
    saved = checkpoint.load(run)
    assert saved is not None
    return {**saved.server["one"]["weights"], **saved.server["one"]["buffers"]}, run.read_table("clients").to_pylist()


@pytest.mark.engine
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("channel", CHANNELS)
def test_any_weighted_sum_goes_over_any_channel(rule: str, channel: str, tmp_path: Path) -> None:
    """To what it comes to in plain, but for the last step of values; the noise is drawn once, at the server."""
    (found, rows), (plain, _) = (played(parsed(RULES[rule], kind), tmp_path) for kind in (CHANNELS[channel], None))
    size = sum(t.numel() for t in plain.values())
    for name, tensor in plain.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    assert all(row["sent_bytes"] >= 4 * size for row in rows)
    assert {row["clipped"] for row in rows} == ({None} if channel == "clear" else {0})


def test_what_a_channel_leaves_in_the_clear_is_observed() -> None:
    inputs = prepare_inputs(scenarios.parse(TEXT, changes=[f"arms={{one: {{protection: '{CHANNELS['clear']}'}}}}"]))
    runtime = ClientRuntime(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    sent = Sent(0, runtime.arm("one").weights, runtime.arm("one").buffers)
    observation, _ = ObservationBuilder(runtime).observe(ClientVisit("one", sent, 0), inputs.scenario.attacks[0])
    assert observation.update
    assert observation.sealed is None
    assert inputs.encryption == ["arm one sends whole numbers in the clear", "arm one is INSECURE: it protects nothing"]


class Smoke:
    """What an own channel shows to who looks at one client."""

    unreadable = "the update is smoke"


@pytest.mark.parametrize("factor", [False, True])
def test_a_channel_says_in_its_own_words_why_nothing_is_read(factor: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    seen = attack_fixtures.observed(model, torch.rand(1, 1, 2, 2), torch.tensor([0]))
    [found] = attempt(Idlg(), [replace(seen, update={}, sealed=Smoke())], model, [torch.Generator()], factor)
    assert (found.status, found.message) == ("not applicable", "the update is smoke")


def test_bounds_stand_where_values_are_cut() -> None:
    """A protection whose channel does not clip takes no clip bound, and so nobody believes that it did."""
    with pytest.raises(ScenarioError, match="clip"):
        parsed("aggregation: fedavg", f"{{name: '{CHANNELS['clear']}', clip: 1}}")


def test_a_rule_that_is_no_sum_is_told_what_would_do() -> None:
    with pytest.raises(UserError, match="use a WeightedSumRule, such as fedavg, or fedboosting"):
        prepare_inputs(parsed("aggregation: median", CHANNELS["masks"]))


@pytest.mark.parametrize("rule", ["median", "{name: norm_bounding, norm: 1}", "fedboosting"])
def test_a_channel_that_adds_is_not_enough_for_other_rules(rule: str) -> None:
    for channel in ("clear", "masks"):
        with pytest.raises(UserError, match="not enough for"):
            prepare_inputs(parsed(f"aggregation: {rule}", CHANNELS[channel]))


def test_a_channel_opens_no_sum_of_one() -> None:
    changes = ["federation.clients_per_round=1", "federation.cohort_size=1"]
    scenario = scenarios.parse(TEXT, changes=[f"arms={{one: {{protection: '{CHANNELS['clear']}'}}}}", *changes])
    with pytest.raises(ScenarioError, match="has one client"):
        prepare_inputs(scenario)
