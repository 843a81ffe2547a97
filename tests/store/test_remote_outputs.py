"""Results on an object store: a local server that speaks S3, as any fsspec URL."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from importlib import import_module
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner

import rayfed
from rayfed.cli import app
from rayfed.errors import LeaseError
from rayfed.store.folder import RunFolder
from rayfed.store.lease import hold_lease
from tests.conftest import imported
from tests.helpers.cluster_fixtures import document
from tests.helpers.run_fixtures import assert_same_bits, weights

moto = imported("moto.server", "test")
imported("s3fs", "test")

ONE_ACTOR = {"resources": {"clients": {"actors": 1}, "attackers": {"actors": 1}}}
LOCAL = ("--executor", "local")
ATTACK = [{"name": "idlg", "iterations": 2, "observes": "gradient"}]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    found = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    found.start()
    host, port = found.get_host_and_port()
    yield f"http://{host}:{port}"
    found.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket, with what the environment has to say to reach it."""
    import fsspec

    known = {"AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret"}
    for name, value in {**known, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    store = fsspec.get_filesystem_class("s3")
    store.clear_instance_cache()
    files = fsspec.filesystem("s3")
    files.mkdir("results")
    yield "s3://results/runs"
    files.rm("results", recursive=True)
    store.clear_instance_cache()


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return str(result.output)


def only(out: str) -> RunFolder:
    import fsspec

    fs = fsspec.filesystem("s3")
    fs.invalidate_cache()
    [path] = fs.ls(out, detail=False)
    return RunFolder.open(f"s3://{path}")


@pytest.mark.engine
def test_a_run_on_an_object_store(bucket: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(document(attacks=ATTACK, **ONE_ACTOR))
    assert f"Report: {bucket}" in run("launch", str(tmp_path / "s.yaml"), "--out", bucket, *LOCAL)
    run("launch", str(tmp_path / "s.yaml"), "--out", str(tmp_path / "here"), *LOCAL)
    folder, [here] = only(bucket), (tmp_path / "here").iterdir()
    assert_same_bits(weights(folder), weights(RunFolder.open(str(here))))
    assert run("report", folder.url).strip() == f"{folder.url}/report.html"
    assert rayfed.load(folder.url).attacks.num_rows == 1
    assert "idlg" in run("export", folder.url)
    assert "idlg" in run("compare", folder.url, str(here))
    refused = CliRunner().invoke(app, ["recommend", folder.url, "--min-accuracy", "0"])
    assert (refused.exit_code, "accuracy" in refused.output) == (2, True)  # after one round
    attacked = run("attack", str(tmp_path / "s.yaml"), "--run", folder.url, "--out", str(tmp_path / "third"), *LOCAL)
    assert "report.html" in attacked


@pytest.mark.engine
@pytest.mark.slow
def test_a_killed_run_goes_on_from_an_object_store(bucket: str, tmp_path: Path) -> None:
    text = document(federation={"rounds": 30, "clients": 4}, **ONE_ACTOR)
    (tmp_path / "s.yaml").write_text(text)
    command = [sys.executable, "-m", "rayfed"]
    process = subprocess.Popen([*command, "launch", str(tmp_path / "s.yaml"), "--out", bucket, "-q"])
    deadline = time.monotonic() + 120
    import fsspec

    files = fsspec.filesystem("s3")
    while True:
        files.invalidate_cache()
        if files.glob("results/runs/*/rounds/part-00003.parquet"):
            break
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    folder = only(bucket)
    done = folder.read_mapping("status.json")["rounds_done"]
    assert 3 <= done < 30
    subprocess.run([*command, "resume", folder.url, "-q"], check=True, timeout=120)
    whole = subprocess.run([*command, "launch", str(tmp_path / "s.yaml"), "--out", str(tmp_path / "whole"), "-q"])
    assert whole.returncode == 0
    [path] = (tmp_path / "whole").iterdir()
    again, undisturbed = only(bucket), RunFolder.open(str(path))
    assert_same_bits(weights(again), weights(undisturbed))
    assert again.read_table("rounds")["round"].to_pylist() == list(range(30))


@pytest.mark.slow
def test_a_sweep_on_an_object_store(bucket: str, tmp_path: Path) -> None:
    trained = {"sweep": {"fields": {"training.lr": [0.5, 1.0]}}, "federation": {"rounds": 20, "clients": 4}}
    (tmp_path / "s.yaml").write_text(document(**trained, attacks=ATTACK, **ONE_ACTOR))
    run("sweep", str(tmp_path / "s.yaml"), "--out", bucket, *LOCAL)
    folder = only(bucket)
    found = rayfed.load(folder.url)
    assert {row["status"] for row in found.outcomes().to_pylist()} == {"finished"}
    assert folder.exists("report.html")
    assert "scenario.yaml" in run("recommend", folder.url, "--min-accuracy", "0")
    assert "idlg" in run("export", folder.url, "--format", "markdown")
    again = CliRunner().invoke(app, ["resume", folder.url])
    assert (again.exit_code, "nothing to resume" in again.output) == (2, True)


def test_two_launches_in_the_same_second_have_two_folders(bucket: str) -> None:
    noon = datetime(2025, 3, 1, 12, 30, 5)
    made = list[str]()
    threads = [Thread(target=lambda: made.append(RunFolder.create(bucket, "t", noon).name)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == ["t-20250301-123005", *(f"t-20250301-123005-{number}" for number in (2, 3, 4))]


def test_one_driver_at_a_time_on_an_object_store(bucket: str) -> None:
    folder = RunFolder.create(bucket, "t")
    with hold_lease(folder, print) as held:
        held.write_text("note", "mine")
        with pytest.raises(LeaseError), hold_lease(folder, print):
            pass
        with hold_lease(folder, print, told=True) as other:
            other.write_text("note", "its")
            for change in (lambda: held.write_text("note", "mine"), lambda: held.remove("note")):
                with pytest.raises(LeaseError):
                    change()
    assert folder.read_text("note") == "its"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["launch", "{scenario}", "--out", "s3://no-such-bucket/runs"], "--out"),
        (["report", "s3://no-such-bucket/x"], "not a run folder"),
    ],
)
def test_a_bucket_that_is_not_there(command: list[str], expected: str, bucket: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(document())
    result = CliRunner().invoke(app, [part.format(scenario=tmp_path / "s.yaml") for part in command])
    assert result.exit_code == 2, result.output
    assert result.output.count("error:") == 1
    assert expected in result.output
    assert "no-such-bucket" in result.output


@pytest.mark.parametrize("lacking", ["credentials", "s3fs"])
def test_what_is_missing_is_said(lacking: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    (tmp_path / "s.yaml").write_text(document())
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    if lacking == "s3fs":
        monkeypatch.setitem(sys.modules, "s3fs", None)
        monkeypatch.delitem(import_module("fsspec.registry")._registry, "s3")
    else:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["launch", str(tmp_path / "s.yaml"), "--out", bucket])
    assert result.exit_code == 2, result.output
    assert lacking in result.output.lower()
    assert "Traceback" not in result.output
