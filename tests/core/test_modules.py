"""Files of the user's with imports of their own packages, named by their path."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors.shipping import runtime_env
from rayfed import registry, scenario
from rayfed.cli import app
from rayfed.errors import UserError
from rayfed.runs import scenario_loading

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, image_shape, classes):
        super().__init__()
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x):
        return self.head(x.flatten(1))
"""
DEFENCE = """
from rayfed.defences.base import Defence
from rayfed.registry import component
from .sizes import WIDTH


@component
class Mine(Defence):
    width: int = WIDTH
"""
LOSS = """
from torch.nn.functional import cross_entropy
from . import sizes


def mine(outputs, targets):
    return cross_entropy(outputs, targets) * sizes.WIDTH / 64


def broken(outputs, targets):
    return {}[sizes.WIDTH]
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory; modules and folders of a test are forgotten after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    monkeypatch.setattr(registry, "SEARCHED", [])
    registry.search(str(tmp_path))
    return tmp_path


def write(folder: Path, **texts: str) -> None:
    """Write Python files, `__init` for `__init__.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name.replace('__init', '__init__')}.py").write_text(text)


def imported(path: str) -> str:
    """Import what a path names, and return its dotted path."""
    name = scenario_loading.to_dotted_path(path)
    assert registry.find("models", name).__name__ == path.rpartition(":")[2]
    return name


def test_a_file_with_relative_imports_is_in_its_package(home: Path) -> None:
    write(home / "plain_app", __init="", task=f"from .sizes import WIDTH\n{NET}", sizes="WIDTH = 64\n")
    assert imported("plain_app/task.py:Net") == "plain_app.task:Net"
    write(home / "deep" / "inner", __init="", task=f"from ..sizes import WIDTH\n{NET}")
    write(home / "deep", __init="", sizes="from .inner import __name__ as n\nWIDTH = 64\n")
    assert imported(f"{home}/deep/inner/task.py:Net") == "deep.inner.task:Net"
    write(home / "whole", __init=f"from .sizes import WIDTH\n{NET}", sizes="WIDTH = 64\n")
    assert imported("whole/__init__.py:Net") == "whole:Net"


def test_a_package_needs_no_init_file(home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    write(home / "bare", task=f"from .sizes import WIDTH\n{NET}", sizes="WIDTH = 64\n")
    assert imported("bare/task.py:Net") == "bare.task:Net"
    write(home / "far" / "near", task=f"from .sizes import WIDTH\n{NET}", sizes="from ..all import WIDTH\n")
    write(home / "far", all="WIDTH = 64\n")
    assert imported("far/near/task.py:Net") == "far.near.task:Net"
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write(elsewhere / "outside", task=f"from .sizes import WIDTH\n{NET}", sizes="WIDTH = 64\n")
    assert imported(f"{elsewhere}/outside/task.py:Net") == "outside.task:Net"
    assert str(elsewhere) in registry.SEARCHED


def test_a_package_that_names_itself_is_found_from_anywhere(
    home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write(elsewhere / "named_app", __init="", task=f"from named_app.sizes import WIDTH\n{NET}", sizes="WIDTH = 64\n")
    assert imported(f"{elsewhere}/named_app/task.py:Net") == "task:Net"


def test_a_file_that_works_by_itself_stays_by_itself(home: Path) -> None:
    write(home / "fails", __init="raise RuntimeError")
    either = "try:\n    from .beside import WIDTH\nexcept ImportError:\n    from beside import WIDTH\n"
    write(home / "fails", either=either + NET, beside="WIDTH = 64\n")
    assert imported("fails/either.py:Net") == "either:Net"
    typed = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from .beside import WIDTH\nWIDTH = 64\n"
    write(home / "fails", typed=typed + NET)
    assert imported("fails/typed.py:Net") == "typed:Net"


def test_what_cannot_be_imported_names_what_to_write(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / "an_app", __init="", task=f"from .sizes import WIDTH\n{NET}", sizes="WIDTH = 64\n")
    monkeypatch.chdir(home / "an_app")
    registry.search(str(home / "an_app"))
    with pytest.raises(UserError, match=r"an_app\.task:Net"):
        registry.find("models", "task:Net")
    write(home / "with-dash", task=f"from .sizes import WIDTH\n{NET}", sizes="WIDTH = 64\n")
    with pytest.raises(UserError, match="with-dash"):
        scenario_loading.to_dotted_path(f"{home}/with-dash/task.py:Net")


def test_another_package_of_the_name_is_no_substitute(home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    write(home / "same", __init="", task=f"from .sizes import WIDTH\n{NET}", sizes="WIDTH = 64\n")
    imported("same/task.py:Net")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write(elsewhere / "same", __init="", task=f"from .sizes import WIDTH\n{NET}", sizes="WIDTH = 64\n")
    with pytest.raises(UserError, match="'same'"):
        scenario_loading.to_dotted_path(f"{elsewhere}/same/task.py:Net")


SCENARIO = """
name: packaged
data: {name: digits, size: 8, train_samples: 24, test_samples: 12}
model: {name: "../parts/nets/task.py:Net"}
loss: {name: "../parts/losses.py:mine"}
arms: {own: ["../parts/defences.py:Mine"]}
training: {batch_size: 8}
federation: {rounds: 1, clients: 2}
"""


@pytest.fixture
def packaged(home: Path) -> Path:
    """A scenario in one folder, and a package in another."""
    write(home / "parts", losses=LOSS, defences=DEFENCE, sizes="WIDTH = 64\n")
    write(home / "parts" / "nets", task=f"from ..sizes import WIDTH\n{NET}")
    (home / "scenarios").mkdir()
    (home / "scenarios" / "s.yaml").write_text(SCENARIO)
    return home / "scenarios" / "s.yaml"


def test_a_run_notes_where_its_packages_are(
    packaged: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = CliRunner().invoke(app, ["launch", str(packaged), "--executor", "local", "--out", "out", "--quiet"])
    assert found.exit_code == 0, found.output
    [run] = Path("out").resolve().iterdir()
    assert str(packaged.parents[1]) in json.loads((run / "environment.json").read_text())["search_path"]
    (run / "scenario.yaml").write_text((run / "scenario.yaml").read_text().replace("rounds: 1", "rounds: 2"))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "parts"]:
        del sys.modules[name]
    monkeypatch.setattr(registry, "SEARCHED", [])
    sys.path[:] = [folder for folder in sys.path if folder not in (str(packaged.parents[1]), str(packaged.parent))]
    found = CliRunner().invoke(app, ["resume", str(run), "--extend", "--executor", "local", "--quiet"])
    assert found.exit_code == 0, found.output


def test_a_mistake_in_a_package_is_its_owners(packaged: Path) -> None:
    (packaged.parent / "t.yaml").write_text(SCENARIO.replace("losses.py:mine", "losses.py:broken"))
    found = CliRunner().invoke(app, ["launch", str(packaged.parent / "t.yaml"), "--executor", "local"])
    assert (found.exit_code, "KeyError" in found.output) == (2, True), found.output


def test_a_package_goes_along_to_other_machines(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    loaded = scenario_loading.load_scenario_file(packaged, (), lambda line: None)
    assert runtime_env(loaded) == {"py_modules": [str(packaged.parents[1] / "parts")]}
    assert set(scenario.dotted_paths(loaded.dump())) == {
        "parts.nets.task:Net",
        "parts.losses:mine",
        "parts.defences:Mine",
    }
