"""The first page of the findings is what its records make, and a run adds a defence to it."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
import pytest

import rayfed
from rayfed import registry
from rayfed.errors import UserError
from rayfed.metrics import roc
from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
FINDINGS = runpy.run_path(str(DOCS / "findings.py"))
RECORDS = json.loads((DOCS / "findings" / "records.json").read_text())
OTHERS: set[str] = set()
"""Rows of defences that rayfed does not have, as `python docs/findings.py --add` writes them."""


def test_page_json_and_parquet_are_what_the_records_make() -> None:
    page, rows, table = FINDINGS["made"](RECORDS)
    assert (DOCS / "findings" / "index.md").read_text() == page, "run: python docs/findings.py"
    assert json.loads((DOCS / "findings" / "defences.json").read_text()) == rows
    assert pq.read_table(DOCS / "findings" / "defences.parquet").equals(table)


def test_a_record_is_of_one_defence_or_protection() -> None:
    """A defence may lack a record, because nobody has measured it yet."""
    names = [record["name"] for record in RECORDS["defences"]]
    assert len(names) == len(set(names))
    assert set(names) - OTHERS <= {*registry.table("defences"), *registry.table("protections")}


def test_every_part_of_a_cell_names_its_run_or_says_that_nobody_measured() -> None:
    page, rows, table = FINDINGS["made"](RECORDS)
    headings = set(re.findall(r"^### `(.+)`$", page, re.MULTILINE))
    columns = FINDINGS["COLUMNS"]
    parts = [(column, part) for row in rows for column in columns for part in row[column]]
    for column, part in parts:
        if part["run"] is None:
            assert part == dict.fromkeys(part) | {"text": "not measured"}
        else:
            assert part["run"] in headings
            assert part["command"] is None or part["command"].startswith(("rayfed ", "python -m benchmarks."))
            assert (part["attacker"] is not None) == (column in {"replayed", "blind", "informed"})
            assert f"{part['text']} [{(part['commit'] or 'commit not recorded').split(',')[0]}](#" in page
    assert headings == {part["run"] for _, part in parts} - {None}
    assert table.num_rows == len(rows) + len(parts)


def test_a_claim_has_its_place_in_the_paper_or_says_that_nobody_looked() -> None:
    page, rows, table = FINDINGS["made"](RECORDS)
    places = {row["defence"]: row["place"] for row in table.to_pylist() if row["column"] == "claim"}
    assert places == {row["name"]: row["place"] for row in rows}
    assert (places["dcs2"], places["instahide"]) == ("table 1", "not looked up")
    assert "accuracy within a point (table 1) |" in page
    assert "minor effect on accuracy (place not looked up) |" in page
    assert "| `grad_defense`, Wang 2022 | not looked up |" in page


def test_a_figure_of_a_reproduction_is_that_of_its_record() -> None:
    """The record of DCS2's table 1, by hand."""
    record = json.loads((DOCS / "reproductions" / "dcs2-table-1.json").read_text())
    seeds = record["sizes"]["reduced"]["seeds"].values()
    mean = fmean(seed["values"]["PSNR (dB)"]["DCS2"] for seed in seeds)
    [row] = [row for row in FINDINGS["made"](RECORDS)[1] if row["name"] == "dcs2"]
    [part] = row["replayed"]
    assert (part["value"], part["attacker"], part["commit"]) == (pytest.approx(mean), "inverting_gradients", "record")
    assert f"{mean:.3g} dB" in part["text"]


def test_no_interval_goes_past_what_is_possible() -> None:
    """A squared error ends at 0; a share of images has the exact interval of its hits."""
    rows = {row["name"]: row for row in FINDINGS["made"](RECORDS)[1]}
    assert "0.00479 (0 to 0.0247)" in rows["dldp_a"]["replayed"][0]["text"]
    gradients, idlg = rows["vae"]["replayed"][1:]
    assert gradients["text"] == "Inverting Gradients: 0 of 15 (0 to 22 %), undefended 12 of 15"
    high = roc.share(2, 15).high
    assert idlg["text"] == f"iDLG: 2 of 15 (2 to {100 * high:.0f} %), undefended 15 of 15"
    assert idlg["value"] == pytest.approx(100 * 2 / 15)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> rayfed.Run:
    attack = {"name": "analytic", "rounds": [0], "victims": 1, "observes": "gradient", "batch_size": 1}
    scenario = {
        "name": "new",
        "data": {"name": "digits", "size": 8, "train_samples": 60, "test_samples": 60},
        "model": {"name": "mlp", "hidden": [8]},
        "federation": {"rounds": 1, "clients": 2},
        "arms": {"none": [], "prune": [{"name": "prune", "ratio": 0.9}], "mine": [{"name": "gaussian", "sigma": 0.01}]},
        "attacks": [{**attack, "label": "blind"}, {**attack, "label": "told", "knowledge": ["defence"]}],
    }
    return rayfed.launch(scenario, out=tmp_path_factory.mktemp("runs"))


def test_a_run_adds_the_arm_that_is_named(played: rayfed.Run) -> None:
    folder = Path(played.folder.root)
    records = FINDINGS["added"](RECORDS, folder, "mine", "Somebody 2026", "that nothing leaks")
    assert [record["name"] for record in records["defences"][len(RECORDS["defences"]) :]] == ["mine"]
    page, rows, _ = FINDINGS["made"](records)
    row = {column: rows[-1][column][0] for column in FINDINGS["COLUMNS"]}
    outcomes = played.outcomes().to_pandas().set_index(["arm", "attack"])
    assert row["replayed"]["text"] == "not measured"
    assert row["blind"]["value"] == outcomes.loc[("mine", "blind"), "psnr"]
    assert row["informed"]["value"] == outcomes.loc[("mine", "told"), "psnr"]
    assert row["informed"]["attacker"] == "told"
    plain = outcomes.loc[("none", "blind")]
    assert row["accuracy"]["value"] == pytest.approx(
        100 * (outcomes.loc[("mine", "blind"), "test_accuracy"] - plain["test_accuracy"])
    )
    assert row["bytes"]["value"] == outcomes.loc[("mine", "blind"), "bytes_up"] / plain["bytes_up"]
    assert row["bytes"]["run"] == folder.name
    assert "| `mine`, Somebody 2026 | that nothing leaks (place not looked up) | not measured | `blind`: " in page
    assert f"### `{folder.name}`" in page


@pytest.mark.parametrize(
    ("arm", "error"),
    [("prune", "'prune' has a row already"), ("other", "no arm 'other': name one of none, prune, mine")],
)
def test_an_arm_that_cannot_be_added_is_refused(played: rayfed.Run, arm: str, error: str) -> None:
    with pytest.raises(UserError, match=error):
        FINDINGS["added"](RECORDS, Path(played.folder.root), arm, "Somebody 2026", "that nothing leaks")


@pytest.mark.engine
def test_one_command_adds_a_run_and_writes_all_three_files(played: rayfed.Run, tmp_path: Path) -> None:
    (tmp_path / "records.json").write_text(json.dumps(RECORDS))
    command = [sys.executable, str(DOCS / "findings.py"), "--add", played.folder.root, "--folder", str(tmp_path)]
    refused = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "--add needs --arm" in refused.stderr
    subprocess.run([*command, "--arm", "mine", "--paper", "Somebody 2026"], check=True, cwd=REPOSITORY)
    assert "| `mine`, Somebody 2026 | not looked up | not measured | `blind`: " in (tmp_path / "index.md").read_text()
    assert [row["name"] for row in json.loads((tmp_path / "defences.json").read_text())][-1] == "mine"
    assert pq.read_table(tmp_path / "defences.parquet").column("defence").to_pylist()[-1] == "mine"


def test_what_a_run_did_not_measure_is_not_measured(played: rayfed.Run) -> None:
    """Of an arm whose attackers were all told, nothing is known of blind ones."""
    outcomes: Any = played.outcomes().to_pandas()
    mine = outcomes[outcomes["arm"] == "mine"]
    cells = FINDINGS["_measured"](mine[mine["attack"] == "told"].assign(bytes_up=float("nan")), mine, "run")
    assert cells["blind"] is None
    assert cells["bytes"] is None
    assert cells["informed"] is not None
