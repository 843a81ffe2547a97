"""The first page of the findings is what its records make, and a run adds a defence to it."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import rayfed
from rayfed import registry
from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
FINDINGS = runpy.run_path(str(DOCS / "findings.py"))
RECORDS = json.loads((DOCS / "findings" / "records.json").read_text())


def test_page_json_and_parquet_are_what_the_records_make() -> None:
    page, rows, table = FINDINGS["made"](RECORDS)
    assert (DOCS / "findings" / "index.md").read_text() == page, "run: python docs/findings.py"
    assert json.loads((DOCS / "findings" / "defences.json").read_text()) == rows
    assert pq.read_table(DOCS / "findings" / "defences.parquet").equals(table)


def test_every_defence_and_protection_has_one_row() -> None:
    names = [record["name"] for record in RECORDS["defences"]]
    assert sorted(names) == sorted([*registry.table("defences"), *registry.table("protections")])


def test_every_cell_names_its_run_or_says_that_nobody_measured() -> None:
    page, rows, table = FINDINGS["made"](RECORDS)
    headings = set(re.findall(r"^### `(.+)`$", page, re.MULTILINE))
    for row in rows:
        for column in FINDINGS["COLUMNS"]:
            cell = row[column]
            if cell["run"] is None:
                assert cell["text"] == "not measured"
                assert cell["value"] is None
            else:
                assert cell["run"] in headings
                assert cell["command"].startswith(("rayfed ", "python -m benchmarks."))
                assert cell["commit"]
    assert headings == {cell["run"] for row in rows for cell in row.values() if isinstance(cell, dict)} - {None}
    assert table.num_rows == len(rows) * (1 + len(FINDINGS["COLUMNS"]))


def test_a_figure_of_a_reproduction_is_that_of_its_record() -> None:
    """The record of DCS2's table 1, by hand."""
    record = json.loads((DOCS / "reproductions" / "dcs2-table-1.json").read_text())
    [figure] = [f for f in record["groups"][0]["figures"] if f["label"] == "DCS2"]
    [row] = [row for row in FINDINGS["made"](RECORDS)[1] if row["name"] == "dcs2"]
    assert row["replayed"]["value"] == figure["ours"]["mean"]
    assert f"paper {figure['paper']:.3g}" in row["replayed"]["text"]
    assert row["replayed"]["commit"] == "0.1.0"


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


def test_a_run_adds_the_defences_that_have_no_row(played: rayfed.Run, tmp_path: Path) -> None:
    (tmp_path / "records.json").write_text(json.dumps(RECORDS))
    folder = Path(played.folder.root)
    records = FINDINGS["added"](RECORDS, folder, "Somebody 2026", "that nothing leaks")
    assert [record["name"] for record in records["defences"][len(RECORDS["defences"]) :]] == ["mine"]  # prune has one
    page, rows, _ = FINDINGS["made"](records)
    row, outcomes = rows[-1], played.outcomes().to_pandas().set_index(["arm", "attack"])
    assert row["replayed"]["value"] == outcomes.loc[("mine", "blind"), "psnr"]
    assert row["informed"]["value"] == outcomes.loc[("mine", "told"), "psnr"]
    plain = outcomes.loc[("none", "blind")]
    assert row["accuracy"]["value"] == pytest.approx(
        100 * (outcomes.loc[("mine", "blind"), "test_accuracy"] - plain["test_accuracy"])
    )
    assert row["bytes"]["value"] == outcomes.loc[("mine", "blind"), "bytes_up"] / plain["bytes_up"]
    assert row["bytes"]["run"] == folder.name
    assert "| `mine`, Somebody 2026 | that nothing leaks | blind `blind`: " in page
    assert f"### `{folder.name}`" in page


@pytest.mark.engine
def test_one_command_adds_a_run_and_writes_all_three_files(played: rayfed.Run, tmp_path: Path) -> None:
    (tmp_path / "records.json").write_text(json.dumps(RECORDS))
    options = ["--add", played.folder.root, "--paper", "Somebody 2026", "--folder", str(tmp_path)]
    subprocess.run([sys.executable, str(DOCS / "findings.py"), *options], check=True, cwd=REPOSITORY)
    assert "| `mine`, Somebody 2026 | not stated | blind `blind`: " in (tmp_path / "index.md").read_text()
    assert [row["name"] for row in json.loads((tmp_path / "defences.json").read_text())][-1] == "mine"
    assert pq.read_table(tmp_path / "defences.parquet").column("defence").to_pylist()[-1] == "mine"


def test_what_a_run_did_not_measure_is_not_measured(played: rayfed.Run) -> None:
    """Of an arm whose attackers were all told, nothing is known of blind ones."""
    outcomes: Any = played.outcomes().to_pandas()
    mine = outcomes[outcomes["arm"] == "mine"]
    cells = FINDINGS["_measured"](mine[mine["attack"] == "told"].assign(bytes_up=float("nan")), mine, "run")
    assert cells["replayed"] is None
    assert cells["bytes"] is None
    assert cells["informed"] is not None
