"""A metric in one file, of a package of the user's own, is measured, kept, told, bounded and exported as ours are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rayfed.metrics import TABLE
from rayfed.metrics.known import METRICS
from tests.conftest import REPOSITORY

DECLARED = '''
"""How much darker or lighter a reconstruction is as a whole."""

from rayfed.metrics.base import Metric


def apart(true, guess):
    return (true.double().flatten(1).mean(1) - guess.double().flatten(1).mean(1)).abs()


GLOOM = Metric(
    name="gloom", description="distance of the mean brightness, 0..1", title="gloom", function=apart,
    higher_is_closer=False,
)
'''

USED = '''
import json, sys
from io import StringIO
from types import SimpleNamespace

import torch
from rich.console import Console
from typer.testing import CliRunner

from rayfed.report.text.recommendation import measure_bound_text
from rayfed import load
from rayfed.evidence.recommend import parse_bound, recommend_setting
from rayfed.cli import app
from rayfed.metrics.score import Scorer
from rayfed.report.export.tables import export_table
from rayfed.report.html.run import write_report
from rayfed.report.terminal.run import RunView
from rayfed.scenario import parse
from rayfed.store.folder import RunFolder

TEXT = """
name: own
federation: {rounds: 1, clients: 2}
metrics: {names: [psnr, gloom], success: {psnr: 15, gloom: 0.3}}
"""
scenario = parse(TEXT)
true = torch.zeros(2, 1, 4, 4)
guess = torch.tensor([0.25, 0.5]).view(2, 1, 1, 1).expand(2, 1, 4, 4)
scored = Scorer(tuple(scenario.metrics.names)).score(true, torch.tensor([0, 1]), guess, torch.tensor([0, 1]))
for row in scored:
    del row["order"]
key = {"arm": "none", "round": 0, "attack": "dlg", "victim": 0, "repeat": 0, "status": "ok", "seconds": 1.0}
folder = RunFolder.create(sys.argv[1], "own")
folder.write_text("scenario.yaml", scenario.dump())
folder.write_part("attacks", 0, [row | key for row in scored])
folder.write_part("rounds", 0, [{"arm": "none", "round": 0, "test_accuracy": 0.5, "actor_seconds": 1.0}])
run = load(folder.url)
[outcome] = run.outcomes().to_pylist()
found = recommend_setting(run.settings(), [parse_bound("gloom>=0.5")])
write_report(folder)
view = RunView(Console(file=StringIO(), width=200))
view.starting(scenario, folder, SimpleNamespace(clients=1, client="1 CPU", attackers=0, attacker=""))
view.round_done([], run.attacks.to_pylist(), [])
view.finished("report.html")
print(json.dumps({
    "column": run.attacks["gloom"].to_pylist(),
    "mean": outcome["gloom"],
    "worst": outcome["min_gloom"],
    "share": [row["share"] for row in run.success_rates("gloom", thresholds=[0.3]).to_pylist()],
    "bound": measure_bound_text(found.bounds[0]),
    "missed": found.chosen.meets,
    "report": folder.read_text("report.html"),
    "terminal": view._console.file.getvalue(),
    "csv": export_table(run, "csv"),
    "markdown": export_table(run, "markdown"),
    "list": CliRunner().invoke(app, ["list", "metrics"]).output,
    "describe": CliRunner().invoke(app, ["describe", "metric", "gloom"]).output,
}))
'''


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process says in whose environment the package is installed."""
    place: Path = tmp_path_factory.mktemp("own")
    (place / "own_metric.py").write_text(DECLARED)
    (place / "own-1.dist-info").mkdir()
    (place / "own-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1\n")
    (place / "own-1.dist-info" / "entry_points.txt").write_text("[rayfed.metrics]\ngloom = own_metric:GLOOM\n")
    paths = os.pathsep.join([str(place), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", USED, str(place / "runs")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.engine
def test_it_is_measured_and_kept(told: dict[str, Any]) -> None:
    assert told["column"] == [0.25, 0.5]
    assert (told["mean"], told["worst"]) == (0.375, 0.25)  # less is nearer to the truth
    assert told["share"] == [0.5]


@pytest.mark.engine
def test_it_bounds_a_recommendation(told: dict[str, Any]) -> None:
    assert told["bound"] == "gloom ≥ 0.5"
    assert not told["missed"]


@pytest.mark.engine
def test_it_is_told_wherever_ours_are(told: dict[str, Any]) -> None:
    table = told["report"].partition('<table class="leaks">')[2].partition("</table>")[0]
    assert '<th scope="col" class="number">Gloom</th>' in table
    assert "PoRS<small>gloom ≤ 0.3</small>" in table
    assert "0.375, sd 0.177" in table
    assert "at most" in told["report"]  # its chart of success rates


@pytest.mark.engine
def test_it_is_exported(told: dict[str, Any]) -> None:
    assert {"gloom", "min_gloom"} <= set(told["csv"].partition("\n")[0].split(","))
    assert " gloom |" in told["markdown"]
    assert "0.375" in told["markdown"]


@pytest.mark.engine
def test_it_can_be_looked_up(told: dict[str, Any]) -> None:
    assert "Distance of the mean brightness, 0..1." in told["list"]
    assert "gloom  (own_metric:GLOOM)" in told["describe"]
    assert "For pixels." in told["describe"]


def test_names_are_those_of_the_table() -> None:
    assert list(METRICS) == list(TABLE)
    assert [metric.name for metric in METRICS.values()] == list(TABLE)


def test_metrics_are_declared_without_pytorch() -> None:
    code = "import sys, rayfed.scenario, rayfed.metrics.measures; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)
