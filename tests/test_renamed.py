"""Older runs and scenarios are read with the present names of columns, metrics and messages."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayfed import scenario as scenarios
from rayfed.metrics.known import METRICS
from rayfed.metrics.measures import MEASURES
from rayfed.metrics.renamed import NAMES, present
from rayfed.reasons import Reason
from rayfed.store.folder import RunFolder
from rayfed.store.renamed import MESSAGES, OUTCOMES, with_present_names
from rayfed.store.schemas import OUTCOME_COLUMNS, TABLES
from tests.result_fixtures import attacked

COLUMNS = {name for schema in TABLES.values() for name in schema.names}


def test_every_former_name_has_a_present_one() -> None:
    assert {name for former, name in NAMES.items() if not former.endswith("_worst")} <= COLUMNS | {*OUTCOME_COLUMNS}
    assert set(OUTCOMES.values()) - set(NAMES.values()) <= {*OUTCOME_COLUMNS}
    assert not NAMES.keys() & (COLUMNS | METRICS.keys() | MEASURES.keys())


def test_a_table_of_an_older_run_is_read(tmp_path: Path) -> None:
    row = attacked(
        "none",
        "analytic",
        psnr=30.0,
        message=f"{next(iter(MESSAGES))}of 3",
        reason=next(iter(MESSAGES.values())),
        knowledge=["code", "labels"],
    )
    table = pa.Table.from_pylist([row], TABLES["attacks"])
    former = {new: old for old, new in NAMES.items()}
    older = table.rename_columns([former.get(name, name) for name in table.column_names]).drop_columns(
        ["reason", "family"]
    )
    place = older.column_names.index("knowledge")
    older = older.set_column(place, "knowledge", pa.array(["code,labels"]))
    assert {"told_apart", "above_guessing", "parts_found"} <= {*older.column_names}
    folder = RunFolder.create(str(tmp_path), "older")
    content = BytesIO()
    pq.write_table(older, content)
    folder.write_bytes("attacks/part-00000.parquet", content.getvalue())
    [read] = folder.read_table("attacks").to_pylist()
    [expected] = table.to_pylist()
    assert read == expected


def test_reasons_of_older_messages() -> None:
    messages = ["a; the defences could not be run on gradients of one's own (x)", None, "other"]
    table = pa.table({"message": messages, "told_apart": [1.0, 0.0, None]})
    assert with_present_names(table).to_pydict() == {
        "message": messages, "identified": [1.0, 0.0, None], "reason": [Reason.CODE_NOT_RUN, None, None],
    }  # fmt: skip


def test_present_reasons_stay() -> None:
    table = pa.table({"message": [next(iter(MESSAGES))], "reason": pa.nulls(1, pa.string())})
    assert with_present_names(table)["reason"].to_pylist() == [None]


@pytest.mark.parametrize(
    ("title", "batch_size", "family"),
    [("dlg batch 4, informed", 4, "dlg"), ("dlg batch 4, informed", 1, None), ("dlg, informed", 4, None)],
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
