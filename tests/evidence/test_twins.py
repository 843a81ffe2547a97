"""Twins: an attacker that knows more and got less has failed, which is no merit of the defence."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from rayfed.evidence.knowledge_pairs import FailedAttack, failed_attacks, mark_outdone
from rayfed.evidence.settings import group_settings
from rayfed.report.export.tables import export_table
from rayfed.report.html.sweep import write_sweep_report
from rayfed.report.terminal.sweep import SweepView
from rayfed.report.text.knowledge_pairs import failed_attack_text
from rayfed.report.text.tables import grid
from rayfed.results.loading import open_results
from rayfed.results.sweep_folder import SweepFolder
from rayfed.store.folder import RunFolder
from tests.helpers.result_fixtures import NOON, outcome

KNOWN = {"blind": [], "informed": ["defence", "code"]}
SCENARIO = {
    "name": "flips",
    "seed": 0,
    "arms": {"none": {"defences": []}, "flip": {"defences": ["prune"]}, "noise": {"defences": ["gaussian"]}},
    "attacks": [{"name": "dlg", "label": name, "knowledge": known} for name, known in KNOWN.items()],
    "sweep": {"fields": {}, "repeats": 3},
}
FAILED = FailedAttack("informed", "blind", knows_defence=True, measures={"flip": ["psnr", "label_accuracy"]})


def rows() -> list[dict[str, Any]]:
    """The informed twin gets less on `flip`, under two of three seeds on `noise`, and knows no more on `none`."""
    psnr = {
        ("none", "blind"): (30, 30, 30), ("none", "informed"): (29, 29, 29), ("flip", "blind"): (15, 15, 18),
        ("flip", "informed"): (11, 12, 14), ("noise", "blind"): (20, 20, 20), ("noise", "informed"): (19, 19, 21),
    }  # fmt: skip
    found = []
    for (arm, attack), values in psnr.items():
        found_all = arm != "flip" or attack == "blind"
        for seed, value in enumerate(values):
            trial = f"{('none', 'flip', 'noise').index(arm):04d}-{seed}"
            told = {"trial": trial, "run": f"trials/{trial}", "repeat": seed, "seed": seed, "verdict": "leaks"}
            scores = {"psnr": float(value), "label_accuracy": float(found_all), "knowledge": KNOWN[attack]}
            found.append(outcome(arm, attack) | told | scores)
    return found


@pytest.fixture
def sweep(tmp_path: Path) -> SweepFolder:
    files = RunFolder.create(str(tmp_path), "flips", NOON)
    files.write_text("scenario.yaml", yaml.safe_dump(SCENARIO, sort_keys=False))
    files.write_text("status.json", json.dumps({"state": "finished"}))
    sweep = SweepFolder(files)
    sweep.write_outcomes(rows())
    return sweep


def test_a_twin_that_knows_more_and_got_less_under_every_seed_is_outdone() -> None:
    found = mark_outdone(group_settings(rows()), SCENARIO)
    assert {(one.arm, one.attack): set(one.outdone) for one in found if one.outdone} == {
        ("flip", "informed"): {"psnr", "label_accuracy"}
    }
    assert failed_attacks(found) == [FAILED]
    other = {**SCENARIO, "attacks": [{**one, "iterations": i} for i, one in enumerate(SCENARIO["attacks"])]}  # type: ignore[arg-type]
    assert not failed_attacks(mark_outdone(group_settings(rows()), other)), "another search is no twin"


def test_its_figure_is_marked_and_never_bold(sweep: SweepFolder) -> None:
    found = grid(open_results(sweep.url).settings())
    assert [row[2:] for row in found.rows if row[:2] == ["flip", "informed"]] == [["12.3 ± 3.8‖", "0‖"]]
    assert found.best == {(2, 2), (5, 2)}, "best of informed is noise"
    assert r"$^\|$" in export_table(open_results(sweep.url), "latex")


def test_page_and_terminal_say_it(sweep: SweepFolder) -> None:
    page = Path(write_sweep_report(sweep)).read_text()
    assert failed_attack_text(FAILED) in page
    said = StringIO()
    view = SweepView(Console(file=said, width=400), bar=False)
    view._folder = sweep.files
    view.finished(rows(), [], "report.html")
    assert failed_attack_text(FAILED) in said.getvalue()
