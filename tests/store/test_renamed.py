"""Older runs and scenarios are read with the present names of columns, metrics and messages."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayfed import scenario as scenarios
from rayfed.metrics.known import METRICS
from rayfed.metrics.measures import MEASURES
from rayfed.metrics.renamed import NAMES, present
from rayfed.store.folder import RunFolder
from rayfed.store.renamed import OUTCOMES, with_present_names
from rayfed.store.schemas import OUTCOME_COLUMNS, TABLES
from tests.helpers.result_fixtures import attacked

COLUMNS = {name for schema in TABLES.values() for name in schema.names}


def test_every_former_name_has_a_present_one() -> None:
    assert {name for former, name in NAMES.items() if not former.endswith("_worst")} <= COLUMNS | {*OUTCOME_COLUMNS}
    assert set(OUTCOMES.values()) - set(NAMES.values()) <= {*OUTCOME_COLUMNS}
    assert not NAMES.keys() & (COLUMNS | METRICS.keys() | MEASURES.keys())


def older_table(row: dict[str, Any]) -> pa.Table:
    """A table of attacks as versions without `reason`, `family` and lists of knowledge wrote it."""
    table = pa.Table.from_pylist([row], TABLES["attacks"])
    former = {new: old for old, new in NAMES.items()}
    older = table.rename_columns([former.get(name, name) for name in table.column_names])
    older = older.drop_columns(["reason", "family"])
    place = older.column_names.index("knowledge")
    return older.set_column(place, "knowledge", pa.array(["code,labels"]))


def test_a_table_of_an_older_run_is_read(tmp_path: Path) -> None:
    row = attacked("none", "analytic", psnr=30.0, message="other", knowledge=["code", "labels"])
    older = older_table(row)
    assert {"told_apart", "above_guessing", "parts_found"} <= {*older.column_names}
    folder = RunFolder.create(str(tmp_path), "older")
    content = BytesIO()
    pq.write_table(older, content)
    folder.write_bytes("attacks/part-00000.parquet", content.getvalue())
    assert folder.read_table("attacks").to_pylist() == pa.Table.from_pylist([row], TABLES["attacks"]).to_pylist()


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        ("not applicable", "the update is encrypted: there is a ciphertext and no gradient to look at", "encrypted"),
        ("not applicable", "the update is masked: without the other clients' shares it is uniform noise", "masked"),
        ("not applicable", "no layer (the update is masked: False)", None),
        ("ok", "the update is masked: no", None),
        ("ok", "a; the defences could not be run on gradients of one's own (x)", "declaration_not_tested"),
        ("ok", "the attack could not run the defences' code on its own gradients (x)", "declaration_not_tested"),
        ("ok", "these attacks do not use all that the defences' code tells: few", "undeclared"),
        ("ok", "these attacks use only a part of the defences' code: few", "undeclared"),
        (
            "diverged",
            "buffers that clients return are as many numbers as the samples have, and were not solved for them",
            "buffers_not_solved",
        ),
        ("diverged", "the returned buffers could determine the samples: none fits", "buffers_not_solved"),
        ("ok", "other", None),
        ("ok", None, None),
    ],
)
def test_reasons_of_older_messages(status: str, message: str | None, reason: str | None) -> None:
    table = pa.table({"message": pa.array([message], pa.string()), "status": [status]})
    assert with_present_names(table)["reason"].to_pylist() == [reason]


@pytest.mark.parametrize(("text", "names"), [("", []), (None, None), ("code", ["code"]), ("a,b", ["a", "b"])])
def test_knowledge_of_older_tables(text: str | None, names: list[str] | None) -> None:
    table = pa.table({"knowledge": pa.array([text], pa.string())})
    assert with_present_names(table)["knowledge"].to_pylist() == [names]


def test_present_reasons_stay() -> None:
    text = "the returned buffers could determine the samples"
    table = pa.table({"message": [text], "reason": pa.nulls(1, pa.string())})
    assert with_present_names(table)["reason"].to_pylist() == [None]


@pytest.mark.parametrize(
    ("title", "batch_size", "family"),
    [
        *((f"dlg batch 4, {end}", 4, "dlg") for end in ("blind", "informed", "informed, with labels", "given labels")),
        ("dlg batch 4, adaptive, with labels", 4, "dlg"),
        ("dlg batch 4, informed", 1, None),
        ("dlg, informed", 4, None),
    ],
)
def test_families_of_older_audits(title: str, batch_size: int, family: str | None) -> None:
    table = pa.table({"attack": [title], "victim": [0], "batch_size": [batch_size], "status": ["ok"]})
    assert with_present_names(table)["family"].to_pylist() == [family]


def test_former_names_in_a_scenario() -> None:
    text = "name: t\nmodel: mlp\nfederation: {rounds: 1, clients: 2}\n"
    changes = ["metrics.names=[psnr, told_apart]", "sweep={fields: {training.lr: [1]}, objectives: [psnr_worst]}"]
    scenario = scenarios.parse(text, changes=changes)
    assert scenario.metrics.names == ["psnr", "identified"]
    assert scenario.sweep is not None
    assert scenario.sweep.objectives == ["max_psnr"]


@pytest.mark.parametrize(("former", "name"), [("mse_worst", "min_mse"), ("ssim_worst", "max_ssim"), ("psnr", "psnr")])
def test_the_sample_that_leaked_most_has_the_maximum_or_minimum(former: str, name: str) -> None:
    assert present(former) == name
    assert name in MEASURES
