"""Which weights a run attacked, as pages, gates and files name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from rayfed.cli import app
from rayfed.report.text.weights import attacked_weights, initial_weights
from rayfed.store.folder import RunFolder

ATTACK = {"kind": "attack", "weights": "initial"}


class Flat(nn.Module):
    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.out = nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x.flatten(1))


def arms(**models: Any) -> dict[str, Any]:
    return {"model": {"name": "my:Net"}, "arms": {name: {"model": model} for name, model in models.items()}}


@pytest.mark.parametrize("state", ["/home/me/fit.pt", "package:somebody/weights/fit.pt", "fit.pt"])
def test_a_file_of_weights_is_named_without_its_folder(state: str) -> None:
    said = initial_weights({"model": {"name": "hf", "state": state}})
    assert said.endswith("fit.pt")
    assert "/" not in said


def test_arms_with_other_weights_are_told_apart() -> None:
    scenario = arms(plain=None, one={"state": "/a/w.pt"}, two={"state": "/a/w.pt"}, three={"state": "/a/v.pt"})
    whole = initial_weights(scenario)
    assert all(part in whole for part in ("plain", "one, two", "three", "w.pt", "v.pt"))
    assert initial_weights(scenario, ["one", "two"]) == initial_weights({"model": {"name": "n", "state": "w.pt"}})
    against = scenario | {"opponents": {"sign_flip": {}}}
    assert initial_weights(against, ["two vs sign_flip"]) == initial_weights(scenario, ["two"])
    both = initial_weights(arms(one={"state": "/a/w.pt"}, two={"state": "/b/w.pt"}))
    assert all(path in both for path in ("/a/w.pt", "/b/w.pt"))


def test_another_architecture_does_not_have_the_file() -> None:
    scenario = {"model": {"name": "mlp", "state": "w.pt"}, "arms": {"a": {"model": {"name": "lenet"}}, "b": {}}}
    assert "w.pt" not in initial_weights(scenario, ["a"])
    assert "w.pt" in initial_weights(scenario, ["b"])


def test_a_file_is_the_origin_of_a_training_and_not_of_anothers_weights() -> None:
    scenario = {"model": {"name": "mlp", "state": "w.pt"}}
    assert attacked_weights(scenario, ATTACK, [{"round": 0}]) == initial_weights(scenario)
    assert attacked_weights(scenario, {"kind": "training"}, [{"round": 0}]) == initial_weights(scenario)
    later = attacked_weights(scenario, {"kind": "training"}, [{"round": 0}, {"round": 3}])
    assert "w.pt" in later
    assert later != initial_weights(scenario)
    for weights in ("given", "trained for 2 rounds (run-1)"):
        assert "w.pt" not in attacked_weights(scenario, {"kind": "attack", "weights": weights}, [{"round": 2}])


QUICK = ("--iterations", "1", "--batch", "1", "--images", "1", "--defence", "{name: gaussian, sigma: 0.1}")
BOUND = ("--fail-above", "15", "--executor", "local")


def run(*arguments: str) -> str:
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code in (0, 3), found.output
    return " ".join(found.output.split())


@pytest.mark.engine
def test_an_audit_and_a_later_gate_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"net": Flat((1, 8, 8), 10).state_dict()}, "other.pt")
    model = ("--model", "tests.report.test_provenance:Flat", "--data", "digits", "--size", "8")
    said = run("audit", *model, "--set", "model.state=other.pt", *QUICK, *BOUND, "--out", "a", "--json", "a.json")
    [folder] = Path("a").iterdir()
    [told] = json.loads(Path("a.json").read_text())["runs"]
    run("gate", str(folder), "--fail-above", "15", "--json", "g.json", "--junit", "g.xml")
    [later] = json.loads(Path("g.json").read_text())["runs"]
    assert "other.pt" in told["weights"] == later["weights"]
    run("statement", str(folder))
    texts = [said, *(Path(name).read_text() for name in ("g.xml", folder / "report.html", folder / "statement.md"))]
    assert all(told["weights"] in text for text in texts)
    assert told["weights"] in RunFolder.open(str(folder)).read_text("log.txt")


@pytest.mark.engine
def test_an_audit_of_a_run_names_the_file_it_began_with_and_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(Flat((1, 8, 8), 10).state_dict(), "begun.pt")
    text = "name: t\ndata: {name: digits, size: 8, train_samples: 16, test_samples: 8}\n"
    text += "model: {name: 'tests.report.test_provenance:Flat', state: begun.pt}\nfederation: {rounds: 1, clients: 2}\n"
    Path("t.yaml").write_text(text)
    run("launch", "t.yaml", "--executor", "local", "--out", "t")
    [trained] = Path("t").iterdir()
    run("audit", "--run", str(trained), *QUICK, *BOUND, "--out", "r", "--json", "r.json")
    begun, learnt = json.loads(Path("r.json").read_text())["runs"]
    assert ("begun.pt" in begun["weights"], trained.name in learnt["weights"]) == (True, True)
    run("gate", learnt["folder"], "--fail-above", "15", "--json", "l.json")
    [later] = json.loads(Path("l.json").read_text())["runs"]
    assert (trained.name in later["weights"], "begun.pt" in later["weights"]) == (True, False)
