"""Small scenarios of whole runs."""

from __future__ import annotations

from rayfed import scenario as scenarios
from rayfed.scenario import Scenario
from rayfed.store.folder import RunFolder
from tests.helpers.run_fixtures import assert_same_bits, weights

TEXT = """
name: t
seed: 987654321
data: {name: digits, size: 8, train_samples: 400, test_samples: 100}
partition: {name: dirichlet, alpha: 1}
model: {name: mlp, hidden: [16]}
training: {batch_size: 8, momentum: 0.5}
federation: {rounds: 3, clients: 8, clients_per_round: 7, cohort_size: 2, server: {momentum: 0.5}}
arms:
  none: []
  noise: [{name: gaussian, sigma: 0.001}]
resources: {clients: {actors: 2}, attackers: {actors: 1}}
"""


ATTACK = """
attacks:
  - {name: inverting_gradients, rounds: [1], victims: 3, victims_per_call: 2,
     observes: gradient, batch_size: 2, iterations: 5}
"""


def parsed(*changes: str, extra: str = "") -> Scenario:
    return scenarios.parse(TEXT + extra, changes=changes)


BOOSTED = [
    "federation.validation=0.25",
    "arms={mean: [], boosted: {aggregation: {name: fedboosting, smoothing: 0.1}}}",
    "federation.clients_per_round=4",
]


def assert_same_votes(a: RunFolder, b: RunFolder) -> None:
    assert_same_bits(weights(a), weights(b))
    for table in ("weights", "scores"):
        assert a.read_table(table).equals(b.read_table(table))
