"""Hashes of what a run is made of, in its environment.json: the same for the same things alone."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rayfed import registry, scenario
from rayfed.runs import runner
from rayfed.runs.hashes import NOT_HASHED, _of_samples
from rayfed.simulation.executors.local import local
from rayfed.simulation.progress import Progress
from rayfed.store import checkpoint
from tests.helpers.progress_fixtures import Noting

TEXT = """
name: hashed
data: {name: digits, size: 8, train_samples: 40, test_samples: 10}
model: {name: mlp, hidden: [4]}
federation: {rounds: 1, clients: 2}
arms: {none: [], own: ["hashed_defences:Mine"]}
attacks: [{name: analytic, rounds: [0], victims: 1, observes: gradient}]
"""
DEFENCE = """
from rayfed.defences.base import Defence
from rayfed.registry import component


@component
class Mine(Defence):
    '''Nothing.'''
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    file = tmp_path / "hashed_defences.py"
    file.write_text(DEFENCE)
    registry.search(str(tmp_path))
    return file


def played(out: Path, *changes: str, of: str | None = None) -> Any:
    loaded = scenario.parse(TEXT, changes=changes)
    if of is None:
        return runner.launch(loaded, str(out), local, Progress())
    return runner.attack(loaded, of, str(out), local, Progress())


@pytest.mark.engine
def test_the_same_scenario_has_the_same_hashes_and_other_data_and_seeds_have_others(
    tmp_path: Path, module: Path
) -> None:
    first, again, reseeded, fewer = (
        played(tmp_path, *changes).read_mapping("environment.json")["hashes"]
        for changes in ((), (), ("seed=1",), ("data.train_samples=39",))
    )
    assert first == again
    assert first["code"]["hashed_defences"] == hashlib.sha256(module.read_bytes()).hexdigest()
    assert len(set(first["weights"].values())) == 1, "all arms begin alike"
    assert reseeded["weights"] != first["weights"] == fewer["weights"]
    assert fewer["data"]["train"] != first["data"]["train"]
    assert {len(digest) for part in first.values() for digest in part.values()} == {64}


def test_the_weights_that_are_attacked_are_those_that_the_run_ended_with(tmp_path: Path, module: Path) -> None:
    trained = played(tmp_path)
    saved = checkpoint.load(trained)
    assert saved is not None
    attacked = played(tmp_path, of=trained.url).read_mapping("environment.json")["hashes"]["weights"]
    digest = hashlib.sha256()
    for name, tensor in saved.server["none"]["weights"].items():
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode() + tensor.numpy().tobytes())
    assert attacked["none"] == digest.hexdigest()


def test_data_that_lie_in_a_file_are_not_read_to_be_hashed() -> None:
    class Lying:
        def __getitem__(self, rows: object) -> None:
            raise AssertionError("read")

    assert _of_samples(Lying(), torch.zeros(1).numpy()) == NOT_HASHED  # type: ignore[arg-type]


@pytest.mark.engine
def test_a_run_that_goes_on_with_other_code_says_so(
    tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "hashed_defences", raising=False)  # that of another test's folder
    folder = played(tmp_path / "runs")
    notes = []
    for rounds, code in ((2, DEFENCE), (3, DEFENCE + "\n# edited\n")):
        module.write_text(code)
        folder.write_text(
            "scenario.yaml", folder.read_text("scenario.yaml").replace(f"rounds: {rounds - 1}", f"rounds: {rounds}")
        )
        progress = Noting()
        runner.resume(folder.url, local, progress, True)
        notes.append([note for note in progress.notes if "has changed" in note])
    assert notes[0] == []
    assert [note.partition(" has changed")[0] for note in notes[1]] == ["the code of hashed_defences"]
