"""Calls from Python: what the commands do, as typed results and exceptions, without a word unless asked."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

import rayfed
from rayfed import registry
from rayfed.errors import RunError, ScenarioError, UserError
from rayfed.evidence.verdicts import Verdict
from rayfed.results.loading import Run, Sweep
from rayfed.runs.api_args import read_source
from rayfed.scenario import parse
from tests.conftest import REPOSITORY
from tests.helpers.command import run as command

TINY: dict[str, Any] = {
    "name": "tiny",
    "data": {"name": "digits", "size": 8, "train_samples": 40, "test_samples": 10},
    "model": {"name": "mlp", "hidden": [8]},
    "federation": {"rounds": 1, "clients": 2},
    "attacks": [{"name": "analytic", "observes": "gradient", "batch_size": 1}],
}


SHORT = rayfed.AuditOptions(batches=[1], images=1, iterations=1)


class Net(nn.Module):
    """A model of the user's, named by its class."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.layer(images.flatten(1))
        return found


PAGE = (REPOSITORY / "docs" / "reference" / "python.md").read_text()
WITH_ATTACKS = ["launch", "attack", "audit"]
"""Functions of `rayfed` whose examples take some seconds."""


def module_of(name: str) -> str:
    """Return the module of what a dotted path names: its longest part that is a file."""
    path = REPOSITORY.joinpath(*name.split("."))
    found = next(one for one in (path, *path.parents) if one.is_dir() or one.with_suffix(".py").is_file())
    return ".".join(found.relative_to(REPOSITORY).parts)


METRICS = {place.partition(":")[0] for place in registry.table("metrics").values()}
"""Modules of metrics, whose examples are their tests."""
MODULES = sorted(METRICS | {module_of(name) for name in re.findall(r"^::: (\S+)$", PAGE, re.MULTILINE)})


def examples(name: str) -> list[doctest.DocTest]:
    """Return the examples in all docstrings of a module."""
    found = doctest.DocTestFinder().find(importlib.import_module(name), globs={})
    return [one for one in found if one.examples]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_come_out_as_written(name: str) -> None:
    for example in examples(name):
        if example.name not in [f"rayfed.{one}" for one in WITH_ATTACKS]:
            assert doctest.DocTestRunner().run(example).failed == 0, example.name


@pytest.mark.engine
@pytest.mark.parametrize("name", WITH_ATTACKS)
def test_examples_of_attacks_come_out_as_written(name: str) -> None:
    [example] = [one for one in examples("rayfed") if one.name == f"rayfed.{name}"]
    results = doctest.DocTestRunner().run(example)
    assert results.attempted > 2
    assert results.failed == 0


def test_the_examples_are_found() -> None:
    assert {"rayfed", "rayfed.attacks.base", "rayfed.registry", "rayfed.models.build"} <= set(MODULES)
    assert {one.name for one in examples("rayfed")} >= {"rayfed.load", "rayfed.record", "rayfed.defend"}
    assert [one.name for one in examples("rayfed.samples")] == ["rayfed.samples.Pixels"]


def rows(run: Run, table: str, *timed: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in timed} for row in run.table(table).to_pylist()]


@pytest.mark.engine
def test_a_launch_is_that_of_the_command_from_any_form_of_a_scenario(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY))
    loaded = parse(yaml.safe_dump(TINY))
    found = [rayfed.launch(one, "seed=3", out=tmp_path / "here") for one in (file, str(file), TINY, loaded)]
    said = capsys.readouterr()
    assert said.out + said.err == ""
    code, output = command(
        "launch", str(file), "--set", "seed=3", "--executor", "local", "--out", str(tmp_path / "there"), "--quiet"
    )
    assert code == 0, output
    [there] = (tmp_path / "there").iterdir()
    printed = rayfed.load(there)
    assert isinstance(printed, Run)
    for table, timed in (("rounds", ["actor_seconds"]), ("attacks", ["seconds"]), ("images", [])):
        assert all(rows(one, table, *timed) == rows(printed, table, *timed) for one in found)
    assert all(isinstance(verdict, Verdict) for verdict in found[0].verdicts())
    assert TINY["federation"] == {"rounds": 1, "clients": 2}, "what was given stays as it is"


@pytest.mark.engine
def test_what_a_run_has_learnt_is_attacked_and_shown_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = rayfed.launch(TINY, out=tmp_path)
    assert capsys.readouterr().out == ""
    attacked = rayfed.attack(TINY, run=trained, out=tmp_path, show=True)
    assert "report.html" in capsys.readouterr().out
    assert attacked.attacks["round"].to_pylist() == [1]
    audited = rayfed.audit(run=trained, defences=[{"name": "prune", "ratio": 0.9}], options=SHORT, out=tmp_path)
    assert [sorted({row["round"] for row in rows(one, "attacks")}) for one in audited] == [[0], [1]]
    assert capsys.readouterr().out == ""


@pytest.mark.engine
def test_a_model_is_a_class_or_a_name(tmp_path: Path) -> None:
    audit = partial(rayfed.audit, data=rayfed.UserData("digits", size=8), defences=[], options=SHORT, out=tmp_path)
    [by_class] = audit(Net)
    model = Net()
    [by_instance] = audit(model)
    weights = torch.load(by_instance.scenario["model"]["state"])
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert [verdict.state for verdict in by_instance.verdicts()] == ["leaks"]
    [by_name] = audit(f"{__name__}:Net")
    assert by_class.scenario["model"] == by_name.scenario["model"]
    assert [verdict.state for verdict in by_class.verdicts()] == ["leaks"]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("inputs", "labels", "name"),
    [
        (torch.rand(20, 1, 8, 8), torch.arange(20) % 10, "arrow"),
        (np.random.default_rng(0).integers(256, size=(20, 8, 8), dtype=np.uint8), np.arange(20) % 10, "arrow"),
        (torch.rand(20, 64), torch.arange(20) % 10, "table"),
    ],
)
def test_data_may_be_in_memory(inputs: Any, labels: Any, name: str, tmp_path: Path) -> None:
    [run] = rayfed.audit(Net, (inputs, labels), defences=[], options=SHORT, out=tmp_path)
    assert run.scenario["data"]["name"] == name
    assert [verdict.state for verdict in run.verdicts()] == ["leaks"]


def test_a_sweep_is_played_by_its_own_function(tmp_path: Path) -> None:
    swept = {**TINY, "attacks": [], "sweep": {"fields": {"training.lr": [0.1, 0.2]}}}
    with pytest.raises(ScenarioError, match=r"rayfed\.sweep"):
        rayfed.launch(swept, out=tmp_path)
    with pytest.raises(ScenarioError, match=r"rayfed\.launch"):
        rayfed.sweep(TINY, out=tmp_path)
    found = rayfed.sweep(swept, out=tmp_path)
    assert isinstance(found, Sweep)
    assert found.outcomes()["training.lr"].to_pylist() == [0.1, 0.2]
    assert found.folder.exists("report.html")


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: rayfed.launch({**TINY, "seeed": 1}), ScenarioError, "seeed"),
        (lambda: rayfed.launch("no_such_scenario"), UserError, "no_such_scenario"),
        (lambda: rayfed.launch(TINY, executor="dask"), UserError, "dask"),
        (lambda: rayfed.attack(TINY, arm="none"), UserError, "give the run"),
        (lambda: rayfed.attack({**TINY, "attacks": []}), ScenarioError, "attacks"),
        (lambda: rayfed.attack(TINY, run="nowhere"), RunError, "nowhere"),
        (lambda: rayfed.audit(data="digits"), UserError, "model"),
        (lambda: rayfed.audit("mlp", "digits", defences=["prunne"]), UserError, "prune"),
        (lambda: rayfed.audit(nn.Sequential(), "digits"), UserError, "Sequential"),
        (lambda: rayfed.audit("mlp", "no_such_data"), UserError, "no_such_data"),
        (lambda: rayfed.audit("mlp", rayfed.UserData("x.csv", label="a", targets=["b"])), UserError, "--target"),
        (lambda: rayfed.audit("mlp", [torch.rand(9, 1, 4, 4), torch.zeros(9).long()]), UserError, "pair"),
        (lambda: rayfed.audit("mlp", (torch.rand(9, 1, 4, 4), torch.zeros(8).long())), UserError, "N labels"),
        (lambda: rayfed.audit("mlp", (torch.rand(9, 1, 4, 4), torch.zeros(9))), UserError, "class numbers"),
        (lambda: rayfed.audit("mlp", (torch.rand(9, 1, 4, 4) - 1, torch.zeros(9).long())), UserError, "normalise"),
    ],
)
def test_mistakes_are_exceptions(
    call: Any, error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=said):
        call()
    assert not (tmp_path / "runs").exists()


def test_public_names_are_imported_on_first_use() -> None:
    assert all(hasattr(rayfed, name) for name in rayfed.__all__)
    with pytest.raises(AttributeError, match="Nothing"):
        rayfed.Nothing  # noqa: B018
    code = "import rayfed, sys; rayfed.component; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_changes_leave_the_mapping_of_the_caller_as_it_is() -> None:
    given = {"name": "x", "federation": {"rounds": 1, "clients": 2}}
    assert read_source(given, ["federation.rounds=3"]).federation.rounds == 3
    assert given["federation"] == {"rounds": 1, "clients": 2}
