"""Planted leaks: their keys read the samples, and the audit finds them without the keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml

from rayfed import scenario
from rayfed.simulation.client.arm import build_arm
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.client.visit import ObservationRequest
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.inputs import make_scorer, prepare_inputs
from rayfed.store.finding import State
from tests.helpers.planted.plants import CONTROLS, MODELS, PLANTS, UNSOUND, Plant, audit


def observe_plant(plant: Plant, seed: int = 3) -> tuple[Any, Any, Any, Any]:
    """Return the observation of the plant's first client, the truth, the model of an attacker, and the scorer."""
    attack = "embedding_rows" if plant.data["name"] == "text" else "analytic"
    document = {
        "name": "planted",
        "seed": seed,
        "data": plant.data,
        "model": {"name": f"{MODELS}:{plant.model}", **plant.options},
        "loss": plant.loss,
        "federation": {"rounds": 1, "clients": 4},
        "defences": plant.pipeline,
        "attacks": [{"name": attack, "observes": "gradient", "batch_size": plant.batch}],
        "metrics": {"names": [*plant.criterion.names]},
    }
    inputs = prepare_inputs(scenario.parse(yaml.safe_dump(document)))
    worker = ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    arm = inputs.accounts[0].arm
    sent = Sent(0, arm.weights, arm.buffers)
    _, [seen], [truth] = worker.observe(sent, ObservationRequest(arm.spec.name, [1], inputs.scenario.attacks[0]))
    model = build_arm(arm.spec, inputs.data.sample, len(inputs.data.classes), 0).model
    model.load_state_dict({**seen.weights, **seen.buffers}, strict=False)
    return seen, truth, model, make_scorer(inputs.scenario, inputs.data)


@pytest.mark.parametrize("plant", [*PLANTS, *UNSOUND], ids=lambda plant: plant.name)
def test_a_key_reads_the_sample_of_every_plant(plant: Plant) -> None:
    seen, truth, model, score = observe_plant(plant)
    assert plant.key is not None
    samples = plant.key(seen, model)
    samples = samples if plant.data["name"] == "text" else samples.clamp(0, 1)
    rows = score.score(truth.inputs, truth.labels, samples, truth.labels)
    part = plant.criterion.part([{**row, "attack": "the key", "round": 0, "victim": 0} for row in rows])
    assert all(plant.criterion.leaks(row) for row in rows) or part, rows


def test_names_are_unique() -> None:
    plants = (*PLANTS, *UNSOUND, *CONTROLS)
    assert len({plant.name for plant in plants}) == len(plants)


QUICK = (PLANTS[0], CONTROLS[0])


@pytest.mark.engine
@pytest.mark.parametrize("plant", QUICK, ids=lambda plant: plant.name)
def test_the_audit_of_a_user_tells_a_plant_from_a_control(plant: Plant) -> None:
    check_audit(plant)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [*PLANTS, *CONTROLS], ids=lambda plant: plant.name)
def test_the_audit_finds_plants_and_no_controls(plant: Plant) -> None:
    check_audit(plant)


@pytest.mark.slow
@pytest.mark.parametrize("plant", UNSOUND, ids=lambda plant: plant.name)
def test_a_defence_without_a_correct_declaration_is_not_acquitted(plant: Plant) -> None:
    finding = audit(plant, minutes=0.4, seed=0).finding
    assert finding is None or finding.state in (State.LEAKS, State.NOT_MEASURED)


def check_audit(plant: Plant) -> None:
    result = audit(plant, minutes=0.4, seed=0)
    assert (result.seconds is not None) == (plant.key is not None), result
