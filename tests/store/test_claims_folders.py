"""What is promised of run folders: clients' private files are kept apart, and stay behind when a run is shared."""

from __future__ import annotations

import base64
import json
import re
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import fsspec
import pytest
import torch

from rayfed.errors import RunError
from rayfed.report.export.share import has_private_states
from rayfed.report.export.tables import FORMATS, export_table
from rayfed.report.html.run import write_report
from rayfed.results.loading import open_results
from rayfed.results.sweep_folder import SweepFolder
from rayfed.simulation.client.failures import Failed, attempt
from rayfed.store import checkpoint, run_key
from rayfed.store.checkpoint import Checkpoint
from rayfed.store.folder import RunFolder
from rayfed.store.schemas import TABLES
from rayfed.update import Update
from tests.helpers.command import run
from tests.helpers.report_fixtures import make_run, make_sweep

SECRET = "lock-of-client-1"


@pytest.fixture(params=["local", "memory"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where runs are written: a local folder, or another file system."""
    if request.param == "local":
        yield str(tmp_path / "runs")
    else:
        yield "memory://claims-folders/runs"
        fsspec.filesystem("memory").rm("/claims-folders", recursive=True)


def with_private_state(folder: RunFolder) -> RunFolder:
    """The run with a checkpoint in which a client keeps something."""
    states = {"none": {1: {"lock": torch.ones(3), "of": SECRET}}}
    checkpoint.save(folder, Checkpoint(0, {"weights": torch.zeros(2)}, states))
    return folder


def shared(folder: RunFolder, target: str) -> RunFolder:
    """The copy that `rayfed export --format folder` makes."""
    code, output = run("export", folder.url, "--format", "folder", "--out", target)
    assert code == 0, output
    return RunFolder.open(target)


def every_file(folder: RunFolder) -> dict[str, bytes]:
    found = folder.fs.find(folder.root)
    return {path[len(folder.root) + 1 :]: folder.fs.cat_file(path) for path in found}


def test_the_folder_of_private_states_says_that_it_is_private(out: str) -> None:
    folder = with_private_state(RunFolder.create(out, "t"))
    assert folder.read_text("checkpoint/clients/README.txt").startswith("PRIVATE")
    [latest] = checkpoint.load_states(folder, "none", [1], 1).values()
    assert latest["of"] == SECRET
    assert checkpoint.load(folder) is not None


def test_a_run_without_private_states_has_no_such_folder(out: str) -> None:
    folder = RunFolder.create(out, "t")
    checkpoint.save(folder, Checkpoint(0, {"weights": torch.zeros(2)}, {"none": {}}))
    assert not folder.exists("checkpoint/clients")


def test_on_a_local_disk_only_the_owner_enters_it(tmp_path: Path) -> None:
    folder = RunFolder.create(str(tmp_path), "t")
    private = Path(folder.root) / "checkpoint" / "clients"
    private.mkdir(parents=True, mode=0o755)  # as an earlier version left it
    with_private_state(folder)
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert stat.S_IMODE(private.parent.stat().st_mode) & 0o077  # the rest of the run is as open as it was


@pytest.mark.parametrize("name", sorted(TABLES))
@pytest.mark.parametrize("format", FORMATS)
def test_no_exported_table_has_private_states(format: str, name: str, tmp_path: Path) -> None:
    folder = with_private_state(make_run(str(tmp_path), {"none": []}, {"dlg": 1.0}))
    text = export_table(open_results(folder.url), format, name)
    assert SECRET not in text
    assert "PNG" not in text


@pytest.mark.engine
def test_a_shared_copy_has_no_private_state_and_nobodys_samples(tmp_path: Path) -> None:
    folder = with_private_state(make_run(str(tmp_path), {"none": []}, {"dlg": 1.0}))
    folder.write_text("environment.json", '{"host": "my-machine"}')
    folder.write_text("notes-of-my-own.txt", SECRET)
    assert folder.read_table("images").num_rows
    files = every_file(shared(folder, str(tmp_path / "copy")))
    tables = {name.partition("/")[0] for name in files if "/" in name}
    assert tables <= set(TABLES) - {"images", "texts", "snapshots"}
    assert {name for name in files if "/" not in name} == {"scenario.yaml", "status.json", "report.html"}
    assert not [name for name, data in files.items() if SECRET.encode() in data or b"my-machine" in data]
    write_report(folder)
    pictures = [base64.b64encode(row["true"]) for row in folder.read_table("images").to_pylist()]
    assert any(picture in folder.read_bytes("report.html") for picture in pictures)
    assert not any(picture in files["report.html"] for picture in pictures)
    copy = open_results(str(tmp_path / "copy"))
    assert copy.frame("outcomes").equals(open_results(folder.url).frame("outcomes"))


def test_a_shared_sweep_has_none_either(tmp_path: Path) -> None:
    sweep = make_sweep(str(tmp_path), 2, 1)
    with_private_state(sweep.trial("trials/0000-0"))
    files = every_file(shared(sweep.files, str(tmp_path / "copy")))
    assert "outcomes.parquet" in files
    assert "trials/0001-0/scenario.yaml" in files
    assert not [name for name in files if {"checkpoint", "images", "texts", "snapshots"} & set(name.split("/"))]
    copied, own = (
        open_results(url).frame("outcomes").drop(columns="error") for url in (str(tmp_path / "copy"), sweep.url)
    )
    assert copied.equals(own)


def leaking(client: int) -> Update:
    raise ValueError(f"a sample of\nclient {client} (age 42): {SECRET}")


def test_no_message_of_an_exception_leaves_with_a_copy(tmp_path: Path) -> None:
    """Components may put a client's data into it; its type and place are the code's."""
    folder = make_run(str(tmp_path), {"none": []}, {})
    failed = attempt(2, partial(leaking, 2))
    assert isinstance(failed, Failed)
    row = {"arm": "none", "round": 0, "malicious": False}
    folder.write_part("clients", 0, [row | {"client": 2, "status": failed.reason}, row | {"client": 3, "status": "ok"}])
    folder.write_text("status.json", json.dumps({"state": "failed", "error": str(failed.error("none", 1))}))
    assert SECRET in folder.read_text("status.json")
    copy = shared(folder, str(tmp_path / "copy"))
    said = [row["status"] for row in copy.read_table("clients").to_pylist() if row["round"] == 0]
    assert re.fullmatch(r"raised ValueError \(test_claims_folders\.py, line \d+\)", said[0])
    assert said[1] == "ok"
    assert copy.read_mapping("status.json") == {"state": "failed", "error": "left out of this copy"}
    assert not [name for name, data in every_file(copy).items() if SECRET.encode() in data or b"age 42" in data]


def test_no_message_of_an_exception_leaves_with_a_copy_of_a_sweep(tmp_path: Path) -> None:
    copy = shared(make_sweep(str(tmp_path), 2, 1).files, str(tmp_path / "copy"))
    [failed] = [row for row in SweepFolder(copy).outcomes().to_pylist() if row["status"] == "failed"]
    assert failed["error"] == "left out of this copy"


def test_a_shared_copy_replaces_nothing(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path), {"none": []}, {"dlg": 1.0})
    for target in (folder.url, str(tmp_path)):
        code, output = run("export", folder.url, "--format", "folder", "--out", target)
        assert (code, "--out" in output) == (2, True), output
    code, output = run("export", folder.url, "--format", "folder")
    assert (code, "--out" in output) == (2, True), output


@pytest.mark.parametrize("private", [False, True])
def test_export_warns_where_the_run_holds_private_states(private: bool, tmp_path: Path) -> None:
    folder = make_run(str(tmp_path), {"none": []}, {"dlg": 1.0})
    if private:
        with_private_state(folder)
    code, output = run("export", folder.url, "--out", str(tmp_path / "t.csv"))
    assert (code, "--format folder" in output) == (0, private), output


@pytest.mark.parametrize("of", ["run", "trial"])
def test_a_secure_run_holds_something_private_until_its_key_is_gone(of: str, tmp_path: Path) -> None:
    sweep = make_sweep(str(tmp_path), 2, 1)
    folder = sweep.trial("trials/0000-0")
    results = open_results(sweep.url if of == "trial" else folder.url)
    assert not has_private_states(results)
    run_key.save_key(folder, bytes(32))
    assert has_private_states(results)
    run_key.remove_key(folder)
    assert folder.exists("checkpoint/clients/README.txt")
    assert not has_private_states(results)
    with_private_state(folder)
    assert has_private_states(results)


@pytest.mark.engine
@pytest.mark.parametrize("fails", ["copy", "report"])
def test_a_copy_that_fails_leaves_nothing_and_can_be_made_again(
    fails: str, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(str(tmp_path), {"none": []}, {"dlg": 1.0})
    write = RunFolder.write_bytes

    def broken(copy: RunFolder, name: str, data: bytes) -> None:
        if name == {"copy": "scenario.yaml", "report": "report.html"}[fails]:
            raise RunError("the disk is gone")
        write(copy, name, data)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "write_bytes", broken)
        code, output = run("export", folder.url, "--format", "folder", "--out", f"{out}/copy")
    assert (code, "the disk is gone" in output) == (2, True), output
    assert not RunFolder.at(f"{out}/copy").exists("")
    assert shared(folder, f"{out}/copy").exists("report.html")


def test_an_exported_folder_says_what_the_table_private_is(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path), {"none": []}, {"dlg": 1.0})
    code, output = run("export", folder.url, "--format", "folder", "--out", str(tmp_path / "copy"))
    assert (code, "private layers, without their weights" in output) == (0, True), output
