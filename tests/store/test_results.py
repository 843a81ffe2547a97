"""The run folder, its tables, images and checkpoint: round trips, and what a crash leaves behind."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayfed.errors import RunError
from rayfed.store import checkpoint
from rayfed.store.checkpoint import Checkpoint
from rayfed.store.folder import RunFolder
from rayfed.store.images import encode_png
from rayfed.store.schemas import TABLES
from tests.helpers.data_fixtures import decoded

NOON = datetime(2025, 3, 1, 12, 30, 5)


@pytest.fixture(params=["local", "memory"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "runs")
        return
    from fsspec.implementations.memory import MemoryFileSystem

    yield "memory://results-test/runs"
    if MemoryFileSystem().exists("/results-test"):
        MemoryFileSystem().rm("/results-test", recursive=True)


@pytest.fixture
def folder(out: str) -> RunFolder:
    return RunFolder.create(out, "demo", NOON)


class Died(BaseException):
    """Stands for a process that dies: nothing catches it."""


# The folder


def test_create_names_the_folder_and_never_overwrites(out: str) -> None:
    names = [RunFolder.create(out, "demo", NOON).name for _ in range(3)]
    assert names == ["demo-20250301-123005", "demo-20250301-123005-2", "demo-20250301-123005-3"]


def test_create_fails_with_a_reason_where_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match=r"file/demo-20250301-123005.*--out"):
        RunFolder.create(str(tmp_path / "file"), "demo", NOON)
    with pytest.raises(RunError, match="nonsense://"):
        RunFolder.create("nonsense://bucket/runs", "demo", NOON)


def test_open_finds_what_create_made(folder: RunFolder) -> None:
    folder.write_text("scenario.yaml", "name: demo\n")
    again = RunFolder.open(folder.url)
    assert again.root == folder.root
    assert again.read_text("scenario.yaml") == "name: demo\n"
    assert RunFolder.open(folder.url + "/").root == folder.root


def test_open_names_run_folders_nearby(folder: RunFolder, out: str) -> None:
    folder.write_text("scenario.yaml", "name: demo\n")
    with pytest.raises(RunError, match=r"did you mean 'demo-20250301-123005'"):
        RunFolder.open(f"{out}/demo-20250301-12300")
    with pytest.raises(RunError, match=r"give one of these folders: demo-20250301-123005"):
        RunFolder.open(out)


def test_open_of_nowhere_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run folder"):
        RunFolder.open(str(tmp_path / "no" / "such" / "place"))


def test_files_round_trip(folder: RunFolder) -> None:
    assert not folder.exists("a/b.bin")
    folder.write_bytes("a/b.bin", b"\x00\x01")
    folder.write_bytes("a/b.bin", b"\x02")
    folder.write_text("log.txt", "ünïcode\n")
    assert folder.read_bytes("a/b.bin") == b"\x02"
    assert folder.read_text("log.txt") == "ünïcode\n"
    assert folder.files("a") == ["b.bin"]
    folder.remove("a/b.bin")
    assert not folder.exists("a/b.bin")
    assert folder.files("nowhere") == []


def test_missing_file_is_named(folder: RunFolder) -> None:
    with pytest.raises(RunError, match=r"status\.json"):
        folder.read_text("status.json")


def test_folder_can_be_sent_to_another_process(tmp_path: Path) -> None:
    folder = RunFolder.create(str(tmp_path), "demo", NOON)
    pickle.loads(pickle.dumps(folder)).write_text("note", "x")
    assert folder.read_text("note") == "x"


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_crash_before_the_replacement_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    folder = RunFolder.create(str(tmp_path), "demo", NOON)
    folder.write_text("status.json", "old")

    def die(*_: Any) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(os, step, die)
        with pytest.raises(Died):
            folder.write_text("status.json", "new")
    assert folder.read_text("status.json") == "old"
    assert set(os.listdir(folder.root)) == {"lease", "status.json"}


def test_full_disk_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(str(tmp_path), "demo", NOON)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"No space left.*disk is full"):
        folder.write_text("log.txt", "text")


# Tables

SAMPLES: dict[pa.DataType, Any] = {
    pa.string(): "text",
    pa.int32(): 7,
    pa.int64(): 2**40,
    pa.float64(): 0.25,
    pa.binary(): b"\x89PNG",
    pa.bool_(): True,
}


def sample_of_type(type: pa.DataType) -> Any:
    if type in SAMPLES:
        return SAMPLES[type]
    if pa.types.is_list(type):
        return [sample_of_type(type.value_type)]
    return {field.name: sample_of_type(field.type) for field in type}


def full_row(table: str, **changes: Any) -> dict[str, Any]:
    return {field.name: sample_of_type(field.type) for field in TABLES[table]} | changes


@pytest.mark.parametrize("table", TABLES)
def test_table_round_trip(folder: RunFolder, table: str) -> None:
    row = full_row(table)
    folder.write_part(table, 0, [row, row])
    folder.write_part(table, 1, [])
    assert folder.read_table(table).to_pylist() == [row, row]


@pytest.mark.parametrize("table", TABLES)
def test_every_column_is_described(table: str) -> None:
    assert all(len(field.metadata[b"description"]) > 4 for field in TABLES[table])


def test_table_without_parts_has_its_columns(folder: RunFolder) -> None:
    table = folder.read_table("attacks")
    assert len(table) == 0
    assert table.schema == TABLES["attacks"]


def test_parts_come_in_the_order_of_rounds(folder: RunFolder) -> None:
    for round in (100000, 2, 10, 0):
        folder.write_part("rounds", round, [full_row("rounds", round=round)])
    assert folder.read_table("rounds")["round"].to_pylist() == [0, 2, 10, 100000]
    assert "part-00002.parquet" in folder.files("rounds")


def test_columns_left_out_are_null_and_keep_their_type(folder: RunFolder) -> None:
    folder.write_part("rounds", 0, [{"arm": "none", "round": 0}])
    folder.write_part("rounds", 1, [full_row("rounds", round=1)])
    table = folder.read_table("rounds")
    assert table["test_accuracy"].to_pylist() == [None, 0.25]
    assert table.schema.field("test_accuracy").type == pa.float64()


def test_infinity_and_nan_survive(folder: RunFolder) -> None:
    folder.write_part("attacks", 0, [full_row("attacks", psnr=math.inf, mse=math.nan)])
    (row,) = folder.read_table("attacks").to_pylist()
    assert row["psnr"] == math.inf
    assert math.isnan(row["mse"])


def rewrite(folder: RunFolder, without: str) -> None:
    """The first part of secure_sums without a column."""
    name, buffer = "secure_sums/part-00000.parquet", io.BytesIO()
    pq.write_table(pq.read_table(io.BytesIO(folder.read_bytes(name))).drop_columns([without]), buffer)
    folder.write_bytes(name, buffer.getvalue())


def test_columns_that_came_later_are_null_in_older_tables(folder: RunFolder) -> None:
    folder.write_part("secure_sums", 0, [{"arm": "a", "round": 0, "clients": 5, "sent": 4}])
    rewrite(folder, "confirmed")
    [row] = folder.read_table("secure_sums").to_pylist()
    assert (row["clients"], row["sent"], row["confirmed"]) == (5, 4, None)
    rewrite(folder, "round")
    with pytest.raises(RunError, match="part-00000"):
        folder.read_table("secure_sums")


def test_unknown_column_and_missing_key_are_errors(folder: RunFolder) -> None:
    with pytest.raises(ValueError, match=r"no column 'psrn'.*did you mean 'psnr'"):
        folder.write_part("attacks", 0, [full_row("attacks", psrn=1.0)])
    with pytest.raises(ValueError, match="arm"):
        folder.write_part("rounds", 0, [{"round": 0}])
    assert folder.files("attacks") == folder.files("rounds") == []


def test_a_part_is_replaced_when_written_again(folder: RunFolder) -> None:
    folder.write_part("rounds", 0, [full_row("rounds", arm="old")])
    folder.write_part("rounds", 0, [full_row("rounds", arm="new")])
    assert folder.read_table("rounds")["arm"].to_pylist() == ["new"]


def test_leftovers_of_a_crash_are_ignored(folder: RunFolder) -> None:
    folder.write_part("rounds", 0, [full_row("rounds")])
    folder.write_bytes("rounds/.part-00001.parquet.0123456789abcdef.tmp", b"PAR1 half a file")
    assert len(folder.read_table("rounds")) == 1


def test_damaged_part_is_named(folder: RunFolder) -> None:
    folder.write_part("rounds", 3, [full_row("rounds")])
    folder.write_bytes("rounds/part-00003.parquet", folder.read_bytes("rounds/part-00003.parquet")[:-9])
    with pytest.raises(RunError, match=r"part-00003\.parquet"):
        folder.read_table("rounds")


def saved_rounds(folder: RunFolder, rounds: int) -> None:
    """Rounds with their tables and checkpoints, of which the last one's never came."""
    folder.write_part("partition", 0, [full_row("partition")])
    for round in range(rounds + 1):
        folder.write_part("rounds", round, [full_row("rounds", round=round)])
        folder.write_part("clients", round, [full_row("clients", round=round)])
        if round < rounds:
            checkpoint.save(folder, replace(state(round), tables=["rounds", "clients"]))


@pytest.mark.parametrize("rounds", [0, 2])
def test_tables_have_the_rounds_of_the_checkpoint(folder: RunFolder, rounds: int) -> None:
    saved_rounds(folder, rounds)
    checkpoint.begin(folder)
    for table in ("rounds", "clients"):
        assert folder.read_table(table)["round"].to_pylist() == list(range(rounds))
        assert len(folder.files(table)) == rounds
    assert len(folder.read_table("partition")) == 1


def test_a_part_that_is_lost_is_named(folder: RunFolder) -> None:
    saved_rounds(folder, 3)
    folder.remove("clients/part-00001.parquet")
    assert len(folder.read_table("rounds")) == 3
    with pytest.raises(RunError, match=r"clients/part-00001\.parquet' is missing"):
        folder.read_table("clients")


def test_a_lost_state_of_a_client_shows_where_it_is_read(folder: RunFolder) -> None:
    checkpoint.save(folder, state(1))
    [lost] = [name for name in client_files(folder) if "/300." in name]
    folder.remove(lost)
    assert list(checkpoint.load_states(folder, "../arm", [0], 2)) == [0]
    for read in (
        lambda: checkpoint.load_states(folder, "../arm", [0, 300], 2),
        lambda: checkpoint.save(folder, Checkpoint(2, {}, {"../arm": {301: {"key": None}}})),
    ):
        with pytest.raises(RunError, match="client states of arm"):
            read()


def test_parts_are_plain_parquet_for_other_tools(tmp_path: Path) -> None:
    folder = RunFolder.create(str(tmp_path), "demo", NOON)
    for round in range(2):
        folder.write_part("rounds", round, [full_row("rounds", round=round)])
    table = pq.read_table(Path(folder.url) / "rounds")
    assert table["round"].to_pylist() == [0, 1]
    compression = (
        pq.read_metadata(Path(folder.url) / "rounds" / "part-00000.parquet").row_group(0).column(0).compression
    )
    assert compression == "ZSTD"


# Images


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 24), (1, 1, 1)])
def test_png_round_trip_is_exact_to_8_bits(shape: tuple[int, int, int]) -> None:
    image = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    back = decoded(encode_png(image))
    assert back.shape == shape
    assert (back - image).abs().max() <= 0.5 / 255 + 1e-6
    assert torch.equal(decoded(encode_png(back)), back)


def test_png_of_a_diverged_image() -> None:
    image = torch.tensor([[[math.nan, -3.0, 7.0, math.inf]]])
    assert decoded(encode_png(image)).flatten().tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("shape", [(28, 28), (0, 8, 8), (1, 1, 8, 8)])
def test_png_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="an image has shape"):
        encode_png(torch.zeros(shape))


def test_images_of_other_channels_are_shown_side_by_side() -> None:
    bands = torch.arange(4 * 2 * 3).view(4, 2, 3) / 255
    assert torch.equal(decoded(encode_png(bands)), torch.cat(tuple(bands), 1)[None])


# Checkpoint


def state(round: int) -> Checkpoint:
    server = {"weights": {"conv.weight": torch.full((3, 2), float(round))}, "step": round, "lr": 0.1, "name": "sgd"}
    clients = {0: {"key": torch.arange(4) + round, "history": [1.5, None]}, 300: {"nested": {"pair": (1, "a")}}}
    return Checkpoint(round, server, {"../arm": clients})


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def assert_is(folder: RunFolder, expected: Checkpoint) -> None:
    found = checkpoint.load(folder)
    assert found is not None
    assert found.round == expected.round
    assert same(found.server, expected.server)
    for arm, states in expected.clients.items():
        assert same(checkpoint.load_states(folder, arm, states, found.round + 1), states)


def client_files(folder: RunFolder) -> list[str]:
    buckets = [f"checkpoint/clients/{bucket}" for bucket in folder.folders("checkpoint/clients")]
    return [f"{bucket}/{name}" for bucket in buckets for name in folder.files(bucket)]


def test_checkpoint_round_trip_keeps_one(folder: RunFolder) -> None:
    assert checkpoint.load(folder) is None
    for round in (0, 1):
        checkpoint.save(folder, state(round))
        assert_is(folder, state(round))
    assert len(folder.files("checkpoint")) == 2
    assert len(client_files(folder)) == 2


def test_private_state_is_apart_from_the_server_s(folder: RunFolder) -> None:
    checkpoint.save(folder, state(2))
    (server,) = [name for name in folder.files("checkpoint") if ".server." in name]
    data = folder.read_bytes(f"checkpoint/{server}")
    assert torch.load(io.BytesIO(data), weights_only=True).keys() == state(2).server.keys()


def test_clients_that_a_round_leaves_alone_keep_their_files(folder: RunFolder) -> None:
    checkpoint.save(folder, state(2))
    [kept] = [name for name in client_files(folder) if "/300." in name]
    newer = {0: {"key": torch.ones(1)}, 7: {"key": torch.zeros(2)}}
    checkpoint.save(folder, Checkpoint(3, {}, {"../arm": newer, "stateless": {}}))
    assert kept in client_files(folder)
    assert len(client_files(folder)) == 3
    found = checkpoint.load_states(folder, "../arm", [7, 300, 8, 0], before=4)
    assert same(found, newer | {300: state(2).clients["../arm"][300]})
    with pytest.raises(RunError, match="has continued"):
        checkpoint.load_states(folder, "../arm", [7], before=3)
    assert checkpoint.load_states(folder, "stateless", [0], before=4) == {}


@pytest.mark.engine
def test_a_save_goes_with_the_clients_of_the_round_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(str(tmp_path), "demo", NOON)
    checkpoint.save(folder, Checkpoint(0, {}, {"arm": {c: {"key": torch.zeros(2)} for c in range(2000)}}))
    touched = list[str]()
    for name in ("write_bytes", "read_bytes", "remove", "files", "exists"):
        method = getattr(RunFolder, name)

        def noted(self: RunFolder, path: str, *rest: Any, method: Any = method) -> Any:
            touched.append(path)
            return method(self, path, *rest)

        monkeypatch.setattr(RunFolder, name, noted)
    checkpoint.load_states(folder, "arm", [5, 1500], 1)
    checkpoint.save(folder, Checkpoint(1, {}, {"arm": {c: {"key": torch.ones(2)} for c in (5, 1500)}}))
    assert len(touched) < 30
    monkeypatch.undo()
    assert len(client_files(folder)) == 2000


@pytest.mark.parametrize("writes", range(4))
def test_crash_at_any_write_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    folder = RunFolder.create(str(tmp_path), "demo", NOON)
    checkpoint.save(folder, state(6))
    left, replace = writes, os.replace

    def die(*paths: Any) -> None:
        nonlocal left
        if not left:
            raise Died
        left -= 1
        replace(*paths)

    newer = Checkpoint(7, {"weights": torch.ones(2)}, {"../arm": {0: {"key": torch.zeros(3)}, 1: {"key": None}}})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        with pytest.raises(Died):
            checkpoint.save(folder, newer)
    assert_is(folder, state(6))
    checkpoint.begin(folder)
    assert len(client_files(folder)) == 2
    checkpoint.save(folder, newer)
    assert_is(folder, newer)
    assert len(folder.files("checkpoint")) == 2
    assert len(client_files(folder)) == 3


def test_crash_before_tidying_leaves_the_new_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(str(tmp_path), "demo", NOON)
    checkpoint.save(folder, state(6))

    def die(*_: Any) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "remove", die)
        with pytest.raises(Died):
            checkpoint.save(folder, state(7))
    assert_is(folder, state(7))
    assert len(client_files(folder)) == 4  # two versions a client
    checkpoint.begin(folder)
    assert len(client_files(folder)) == 2
    assert_is(folder, state(7))


DAMAGES = [lambda data: data[:-20], lambda data: data[:60] + b"\xff" + data[61:]]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_named(folder: RunFolder, damage: Any) -> None:
    checkpoint.save(folder, state(1))
    (name,) = [name for name in folder.files("checkpoint") if ".server." in name]
    folder.write_bytes(f"checkpoint/{name}", damage(folder.read_bytes(f"checkpoint/{name}")))
    with pytest.raises(RunError, match=name):
        checkpoint.load(folder)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_state_of_a_client_is_named_when_it_is_read(folder: RunFolder, damage: Any) -> None:
    checkpoint.save(folder, state(1))
    (name,) = [name for name in client_files(folder) if "/300." in name]
    folder.write_bytes(name, damage(folder.read_bytes(name)))
    assert list(checkpoint.load_states(folder, "../arm", [0], 2)) == [0]
    with pytest.raises(RunError, match=name):
        checkpoint.load_states(folder, "../arm", [300], 2)


def test_a_lost_state_of_a_client_shows_on_loading(folder: RunFolder) -> None:
    checkpoint.save(folder, state(1))
    lost, _ = client_files(folder)
    data = folder.read_bytes(lost)
    folder.remove(lost)
    with pytest.raises(RunError, match=r"2 client states .*found 1"):
        checkpoint.load(folder)
    folder.write_bytes(lost.replace("/0.1.", "/9.1."), data)
    with pytest.raises(RunError, match=r"2 client states of arm '\.\./arm'"):
        checkpoint.load(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"round": 1, "server": "x", "clients": "y"})])
def test_damaged_pointer_is_named(folder: RunFolder, text: str) -> None:
    folder.write_text("checkpoint/latest.json", text)
    with pytest.raises(RunError, match=r"latest\.json"):
        checkpoint.load(folder)


def test_state_that_could_not_be_loaded_is_refused_before_anything_is_written(folder: RunFolder) -> None:
    with pytest.raises(TypeError, match=r"clients\['arm'\]\[0\]\['model'\] is a Linear"):
        checkpoint.save(folder, Checkpoint(0, {}, {"arm": {0: {"model": torch.nn.Linear(1, 1)}}}))
    assert checkpoint.load(folder) is None


def test_a_view_is_saved_without_the_storage_behind_it(folder: RunFolder) -> None:
    stacked = torch.zeros(1000, 1000)
    checkpoint.save(folder, Checkpoint(0, {}, {"arm": {0: {"key": stacked[3]}}}))
    (name,) = client_files(folder)
    assert len(folder.read_bytes(name)) < 20_000
