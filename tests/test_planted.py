"""The planted leaks: none is empty, and the audit finds what it finds by measuring, not by knowing them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml

from benchmarks.planted import EMPTY, PLANTS, Plant, audited
from rayfed import scenario
from rayfed.client.arm import build_arm
from rayfed.client.sent import Sent
from rayfed.client.visit import ObservationRequest
from rayfed.engine.inputs import prepare, scorer
from rayfed.engine.worker import ClientWorker


def observed(plant: Plant, seed: int = 3) -> tuple[Any, Any, Any, Any]:
    """The observation of the plant's first client, the truth, the model as an attacker has it, and the scorer."""
    attack = {"name": "analytic", "observes": "gradient", "batch_size": plant.batch}
    if plant.data["name"] == "text":
        attack["name"] = "embedding_rows"
    document = {
        "name": "planted",
        "seed": seed,
        "data": plant.data,
        "model": {"name": plant.module, **plant.options},
        "loss": plant.loss,
        "federation": {"rounds": 1, "clients": 4},
        "defences": plant.pipeline,
        "attacks": [attack],
        "metrics": {"names": [*plant.criterion.names]},
    }
    inputs = prepare(scenario.parse(yaml.safe_dump(document)))
    worker = ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    arm = inputs.accounts[0].arm
    sent = Sent(0, arm.weights, arm.buffers)
    _, [seen], [truth] = worker.observe(sent, ObservationRequest(arm.spec.name, [1], inputs.scenario.attacks[0]))
    model = build_arm(arm.spec, inputs.data.sample, len(inputs.data.classes), 0).model
    model.load_state_dict({**seen.weights, **seen.buffers}, strict=False)
    return seen, truth, model, scorer(inputs.scenario, inputs.data)


@pytest.mark.engine
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_planter_reads_the_sample_out_of_what_is_sent(plant: Plant) -> None:
    seen, truth, model, score = observed(plant)
    assert plant.key is not None
    samples = plant.key(seen, model)
    samples = samples if plant.data["name"] == "text" else samples.clamp(0, 1)
    rows = score.score(truth.inputs, truth.labels, samples, truth.labels)
    told = plant.criterion.part([{**row, "attack": "the key", "round": 0, "victim": 0} for row in rows])
    assert all(plant.criterion.leaks(row) for row in rows) or told, rows


def test_names_are_many_and_each_has_one_meaning() -> None:
    assert len(PLANTS) >= 40
    assert len(EMPTY) >= 10
    assert len({plant.name for plant in (*PLANTS, *EMPTY)}) == len(PLANTS) + len(EMPTY)


QUICK = ("mlp, ReLU", "noise on all layers but the first", "records, a quantity", "transformer on tokens")
"""Found by closed forms, so that they take seconds."""


@pytest.mark.engine
@pytest.mark.parametrize("name", [*QUICK, "control: zeros", "control: another sample's gradient"])
def test_the_audit_answers_as_a_user_runs_it(name: str) -> None:
    [plant] = [plant for plant in (*PLANTS, *EMPTY) if plant.name == name]
    result = audited(plant, minutes=0.5, seed=1)
    assert (result.seconds is not None) == (plant.key is not None), result
