"""Limits on what is no client's local round: an attack that hangs is a row, anything else ends the run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from actors.executor import on_ray
from rayfed import scenario as scenarios
from rayfed.aggregation.fedavg import FedAvg
from rayfed.aggregation.weighted_sum import WeightedSum
from rayfed.attacks.base import Reconstruction
from rayfed.errors import OverdueError, UserError
from rayfed.registry import component
from rayfed.runs import runner
from rayfed.simulation.executors.base import Call, Done, Execution, Overdue, Ref
from rayfed.simulation.executors.local import LocalExecution, LocalExecutor, local
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress
from rayfed.store.folder import RunFolder
from rayfed.update import Named, Observation
from tests.helpers.run_fixtures import Noting, assert_same_bits, weights

TEXT = """
name: t
data: {name: digits, size: 8, train_samples: 60, test_samples: 20}
model: {name: mlp, hidden: [8]}
training: {batch_size: 8, steps: 1}
federation: {rounds: 2, clients: 3}
attacks:
  - {name: idlg, rounds: [0], victims: 3, victims_per_call: 2, observes: gradient, iterations: 3}
  - {name: membership, rounds: [1], observes: update, knowledge: [candidates]}
resources: {clients: {actors: 1}, attackers: {actors: 1}}
"""
LIMIT = "resources.timeout=7"


def parsed(*changes: str) -> scenarios.Scenario:
    return scenarios.parse(TEXT, changes=changes)


def hanging(method: str) -> Execution:
    """Plays here, and does as if every call of a method that has a limit hung until its actor was ended."""

    class Hanging(LocalExecutor):
        def _run(self, worker: Any, resources: Any, calls: Sequence[Call]) -> Iterator[Done]:
            for call in calls:
                if call.method == method and call.limit is not None:
                    assert call.limit == 7 * (len(call.args[3]) if method == "attack" else 1)
                    yield Done(call, Overdue(), [])
                else:
                    yield from super()._run(worker, resources, [call])

        def get(self, refs: Sequence[Ref], limit: float | None = None) -> list[Any]:
            if method == "get" and limit is not None:
                raise OverdueError("the server", limit)
            return super().get(refs)

    return LocalExecution(Hanging)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return runner.launch(parsed(), str(tmp_path_factory.mktemp("runs")), local, Progress())


@pytest.mark.usefixtures("reports")
def test_an_attack_that_takes_too_long_is_a_row(undisturbed: RunFolder, tmp_path: Path) -> None:
    folder = runner.launch(parsed(LIMIT), str(tmp_path), hanging("attack"), Progress())
    assert_same_bits(weights(folder), weights(undisturbed))
    for table in ("attacks", "inferences"):
        rows, expected = (f.read_table(table).to_pylist() for f in (folder, undisturbed))
        assert [row["victim"] for row in rows] == [row["victim"] for row in expected]
        assert {row["status"] for row in rows} == {"failed"}
        assert {row["message"] for row in rows} == {"not finished within 7 s per victim (resources.timeout)"}
        assert {row.get("psnr") or row.get("value") for row in rows} == {None}


@pytest.mark.parametrize(
    ("method", "said"), [("evaluate", "client actor's `evaluate`"), ("score", "`score`"), ("get", "the server took")]
)
def test_anything_else_that_takes_too_long_ends_the_run(method: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(OverdueError, match=f"{said}.*resources\\.timeout"):
        runner.launch(parsed(LIMIT), str(tmp_path), hanging(method), Progress())
    [path] = tmp_path.iterdir()
    assert RunFolder.open(str(path)).read_mapping("status.json")["state"] == "failed"


def test_one_process_says_which_limits_it_keeps(tmp_path: Path) -> None:
    noting = Noting()
    runner.launch(parsed(LIMIT), str(tmp_path), local, noting)
    assert any("resources.timeout" in note for note in noting.notes)


@component
class Sleeper:
    """An attack that never ends."""

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        time.sleep(3600)
        raise AssertionError


@component
class Stuck(FedAvg):
    """A rule whose second step never ends."""

    def combine(self, total: WeightedSum, generator: torch.Generator) -> tuple[Named, Named]:
        time.sleep(3600)
        raise AssertionError


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_what_hangs_on_actors_is_ended(undisturbed: RunFolder, tmp_path: Path) -> None:
    own = "attacks=[{name: 'tests.simulation.test_timeouts:Sleeper', rounds: [0], observes: gradient}]"
    folder = runner.launch(parsed("resources.timeout=30", own), str(tmp_path), on_ray(), Progress())
    assert [row["status"] for row in folder.read_table("attacks").to_pylist()] == ["failed"]
    assert_same_bits(weights(folder), weights(undisturbed))
    rule = "federation.aggregation=tests.simulation.test_timeouts:Stuck"
    with pytest.raises(OverdueError, match="the server took longer"):
        runner.launch(parsed("resources.timeout=30", "attacks=[]", rule), str(tmp_path), on_ray(), Progress())


@component
class Uneven:
    """Gives the last clients nothing, or leaves them out."""

    without: int = 0
    missing: int = 0

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        holding = clients - self.without
        parts = np.array_split(rng.permutation(len(labels)), holding) + [np.empty(0, np.int64)] * self.without
        return parts[: clients - self.missing]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("without: 2", r"gives no sample to client 1 \(2 of 3 clients have none\)"),
        ("missing: 1", "splits samples among 2 clients, but federation.clients is 3"),
    ],
)
def test_clients_without_samples_are_refused(how: str, said: str) -> None:
    with pytest.raises(UserError, match=f"partition 'tests.simulation.test_timeouts:Uneven' {said}"):
        prepare_inputs(parsed(f"partition={{name: 'tests.simulation.test_timeouts:Uneven', {how}}}"))
