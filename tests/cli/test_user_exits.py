"""Code of the user that ends the process: a user error with the file's name, and never exit code 0."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import rayfed
from rayfed import registry
from rayfed.cli import app
from rayfed.errors import UserError
from rayfed.store.folder import RunFolder
from tests.helpers.faulty import EXITS

SMALL = {
    "name": "t",
    "data": {"name": "digits", "size": 4, "train_samples": 12, "test_samples": 4},
    "model": {"name": "tests.helpers.faulty:Net"},
    "training": {"batch_size": 2, "steps": 1},
    "federation": {"rounds": 1, "clients": 2},
    "attacks": [{"name": "analytic", "observes": "gradient"}],
}
MODULES = {
    "main": "import sys\nfrom torch import nn\nclass Net(nn.Linear): pass\nsys.exit(0)\n",
    "quits": "quit()\n",
    "nested": "import tests.helpers.exiting_import\n",
    "parser": "import argparse\nargparse.ArgumentParser().parse_args()\n",
    "clicks": "import typer\napp = typer.Typer()\n@app.command()\ndef main() -> None: pass\napp()\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with modules that end the process when they are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(registry, "SEARCHED", [str(tmp_path)])
    for name, text in MODULES.items():
        (tmp_path / f"exits_{name}.py").write_text(text)
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(f"exits_{name}", None)


def write(folder: Path, **changes: object) -> str:
    (folder / "s.yaml").write_text(yaml.safe_dump(SMALL | changes))
    return str(folder / "s.yaml")


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("command", ["validate", "launch", "audit"])
def test_a_module_that_exits_when_it_is_imported_is_a_user_error(name: str, command: str, folder: Path) -> None:
    file = write(folder, model={"name": f"exits_{name}:Net"})
    options = {"validate": [file], "launch": [file, "--executor", "local"]}
    options["audit"] = ["--model", f"exits_{name}.py:Net", "--data", "digits", "--fail-above", "15"]
    done = CliRunner().invoke(app, [command, *options[command]])
    assert done.exit_code == 2
    assert f"exits_{name}" in done.output


@pytest.mark.parametrize("kind", ["defence", "loss"])
def test_other_files_of_an_audit_that_exit_are_user_errors(kind: str, folder: Path) -> None:
    options = ["--model", "mlp", "--data", "digits", "--fail-above", "15", f"--{kind}", "exits_main.py:Net"]
    assert CliRunner().invoke(app, ["audit", *options]).exit_code == 2


@pytest.mark.parametrize("fault", EXITS)
@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"name": "tests.helpers.faulty:Net", "stage": "init"}},
        {"model": {"name": "tests.helpers.faulty:Net", "stage": "training"}},
        {"model": {"name": "tests.helpers.faulty:Net", "stage": "late"}},
        {"defences": [{"name": "tests.helpers.faulty:Shaky", "stage": "check"}]},
        {"defences": [{"name": "tests.helpers.faulty:Shaky", "stage": "wrap"}]},
        {"defences": [{"name": "tests.helpers.faulty:Shaky", "stage": "update"}]},
    ],
)
def test_code_that_exits_during_a_run_is_a_user_error(changes: dict, fault: str, tmp_path: Path) -> None:  # type: ignore[type-arg]
    [(section, value)] = changes.items()
    value = [{**value[0], "fault": fault}] if isinstance(value, list) else {**value, "fault": fault}
    file = write(tmp_path, **{section: value})
    done = CliRunner().invoke(app, ["launch", file, "--executor", "local", "--out", str(tmp_path)])
    if fault == "typer.Exit" and value == {**SMALL["model"], "stage": "late", "fault": fault}:  # type: ignore[dict-item]
        return  # an `Exception`: the attack that meets it has failed
    assert done.exit_code == 2, done.output
    for status in tmp_path.glob("t-*/status.json"):
        assert yaml.safe_load(status.read_text())["state"] == "failed"


@pytest.mark.parametrize("fault", [*EXITS, "ValueError", "AssertionError"])
def test_an_attack_that_exits_or_raises_has_no_result(fault: str, tmp_path: Path) -> None:
    file = write(tmp_path, attacks=[{"name": "tests.helpers.faulty:Guess", "fault": fault, "observes": "gradient"}])
    done = CliRunner().invoke(app, ["launch", file, "--executor", "local", "--out", str(tmp_path)])
    [run] = tmp_path.glob("t-*")
    rows = RunFolder.open(str(run)).read_table("attacks").to_pylist()
    if done.exit_code == 0:
        assert {row["status"] for row in rows} == {"failed"}
    else:
        assert (done.exit_code, rows) == (2, [])
    assert CliRunner().invoke(app, ["gate", str(run), "--fail-above", "15"]).exit_code in (2, 3)


def test_functions_raise_a_user_error_too(tmp_path: Path) -> None:
    model = {"name": "tests.helpers.faulty:Net", "stage": "training", "fault": "sys.exit(0)"}
    with pytest.raises(UserError):
        rayfed.launch(SMALL | {"model": model}, out=tmp_path)
    with pytest.raises(UserError):
        rayfed.audit(model | {"stage": "init"}, rayfed.UserData("digits", size=4), out=tmp_path)


@pytest.mark.parametrize("fault", ["GeneratorExit", "CancelledError", "Own"])
def test_what_is_no_exception_is_a_user_error_too(fault: str, folder: Path) -> None:
    own = "class Own(BaseException): pass"
    made = f"from asyncio import CancelledError\n{own}\ndef net(image_shape, classes):\n    raise {fault}\n"
    (folder / f"raises_{fault.lower()}.py").write_text(made)
    file = write(folder, model={"name": f"raises_{fault.lower()}:net"})
    done = CliRunner().invoke(app, ["launch", file, "--executor", "local"])
    assert (done.exit_code, f"raises_{fault.lower()}" in done.output) == (2, True)


@pytest.mark.engine
@pytest.mark.parametrize("call", ["os._exit(0)", "sys.exit(0)", "atexit.register(os._exit, 0); raise ValueError"])
def test_no_process_ends_with_0_before_its_command_has_returned(call: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"import atexit, os, sys\n{call}\n")
    write(tmp_path, model={"name": "own:Net"})
    done = subprocess.run(
        [sys.executable, "-m", "rayfed", "validate", "s.yaml"], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode in (1, 2), done.stderr


@pytest.mark.engine
@pytest.mark.usefixtures("ray_session")
def test_an_exit_in_an_actor_is_a_user_error(tmp_path: Path) -> None:
    """Ray takes it for an order to end the actor, and the call would be made again by others."""
    model = {"name": "tests.helpers.faulty:Net", "stage": "late", "fault": "sys.exit(0)"}
    with pytest.raises(UserError):
        rayfed.launch(SMALL | {"model": model}, out=tmp_path, executor="ray")
