"""That the samples themselves explain what defences send: nobody else is asked to do better."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml

from rayfed import scenario
from rayfed.analysis.audit import EXPLAINS
from rayfed.attacks.base import Reconstruction
from rayfed.attacks.fit import fit_of, judged
from rayfed.attacks.forward_probe import without_tracking
from rayfed.attacks.undone import undone
from rayfed.client.sent import Sent
from rayfed.engine.inputs import prepare
from rayfed.engine.worker import ClientWorker

DEFENCES: list[list[dict[str, Any]]] = [
    [{"name": "gaussian", "sigma": 0.1}],
    [{"name": "gaussian", "sigma": 0.001}],
    [{"name": "laplace", "scale": 0.1}],
    [{"name": "prune", "ratio": 0.9}],
    [{"name": "top_k", "k": 0.1}],
    [{"name": "quantise", "bits": 1}],
    [{"name": "quantise", "bits": 4}],
    [{"name": "quantise", "bits": 8}],
    [{"name": "gaussian", "sigma": 0.01}, {"name": "top_k", "k": 0.1}],
    [{"name": "laplace", "scale": 0.1}, {"name": "prune", "ratio": 0.5}],
    [{"name": "gaussian", "sigma": 0.1}, {"name": "gaussian", "sigma": 1.0}],
    [{"name": "dp_sgd", "clip": 1.0, "noise_multiplier": 1.0}],
    [{"name": "dp_sgd", "clip": 1.0, "noise_multiplier": 0.001}],
    [{"name": "soteria", "ratio": 0.5}],
    [{"name": "outpost"}],
    [{"name": "tests.test_understood:LastAlone"}],
    [{"name": "tests.test_understood:RowNumbers"}],
    [{"name": "tests.test_understood:RandomMask"}],
    [{"name": "tests.test_understood:RandomFactor"}],
]


@pytest.mark.engine
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
@pytest.mark.parametrize("defences", DEFENCES, ids=lambda found: " ".join(map(str, found)))
def test_the_samples_explain_what_is_sent_of_them(defences: list[dict[str, Any]], algorithm: str, batch: int) -> None:
    document = {
        "name": "t",
        "data": {"name": "digits", "size": 8, "train_samples": 40, "test_samples": 20},
        "model": {"name": "mlp", "hidden": [64]},
        "federation": {"rounds": 1, "clients": 4},
        "training": {"algorithm": algorithm, "lr": 0.1} | ({"batch_size": 10} if algorithm == "fedavg" else {}),
        "arms": {"defended": defences},
        "attacks": [
            {"name": "dlg", "observes": "gradient", "batch_size": batch, "knowledge": ["defence", "code", "labels"]}
        ],
    }
    inputs = prepare(scenario.parse(yaml.safe_dump(document)))
    worker = ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    [account] = inputs.accounts
    sent = Sent(0, account.arm.weights, account.arm.buffers)
    _, [seen], [truth] = worker.observe(account.name, sent, [1], inputs.scenario.attacks[0], {}, 0)
    network = without_tracking(account.arm.model)
    noise = torch.rand(truth.inputs.shape, generator=torch.Generator().manual_seed(0))
    for images, right in ((truth.inputs, True), (noise, False)):
        fit, nats = fit_of(images, truth.labels, undone(seen), network)
        found = Reconstruction(images, truth.labels, fit=fit, nats=nats)
        told = judged(found, truth.fit, truth.nats)
        assert told is None or not right or told <= EXPLAINS
        if not right and defences[0] in (DEFENCES[1][0], DEFENCES[3][0], {"name": "tests.test_understood:LastAlone"}):
            assert algorithm == "fedavg" or (told is not None and told > EXPLAINS), "it is told from the samples"
