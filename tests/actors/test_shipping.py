"""Which of the user's modules go along to a cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from actors.shipping import runtime_env
from actors.trial import prepare_process
from rayfed import registry, scenario

MINIMAL = "name: t\nfederation: {rounds: 1, clients: 2}\n"
DEFENCE = """
import my_package.parts
from my_helpers import Defence
from rayfed.registry import component


@component
class Mine(Defence):
    pass
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules beside a scenario; one of them nobody imports, and another is the folder's `rayfed`."""
    (tmp_path / "my_defences.py").write_text(DEFENCE)
    (tmp_path / "my_helpers.py").write_text("from rayfed.defences.base import Defence\n")
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    (tmp_path / "my_package" / "parts.py").touch()
    (tmp_path / "my_data.py").touch()
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    monkeypatch.setattr(registry, "SEARCHED", [])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def test_what_dotted_paths_have_imported_goes_along(home: Path) -> None:
    registry.search(str(home))
    loaded = scenario.parse(f"{MINIMAL}defences: ['my_defences:Mine']\n")
    expected = [home / "my_defences.py", home / "my_helpers.py", home / "my_package"]
    assert runtime_env(loaded) == {"py_modules": [str(path.resolve()) for path in expected]}


@pytest.mark.engine
def test_modules_of_pythonpath_do_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(home)
    monkeypatch.setenv("PYTHONPATH", f"{home}:/nowhere:")
    loaded = scenario.parse(f"{MINIMAL}arms: {{mine: ['my_defences:Mine']}}\n")
    assert len(runtime_env(loaded)["py_modules"]) == 3


def test_nothing_goes_along_where_nothing_is_asked_for(home: Path) -> None:
    registry.search(str(home))
    import my_helpers  # type: ignore[import-not-found]

    assert my_helpers
    assert runtime_env(scenario.parse(MINIMAL)) == {}


def test_what_is_installed_does_not(home: Path) -> None:
    registry.search(str(Path(registry.__file__).parent.parent))  # as in a checkout
    registry.search(str(Path(torch.__file__).parent.parent))
    loaded = scenario.parse(f"{MINIMAL}model: 'rayfed.models.mlp:Mlp'\n")
    assert not [
        path
        for path in runtime_env(loaded).get("py_modules", [])
        if Path(path).name in ("rayfed", "actors", "torch", "numpy")
    ]


def test_a_trials_process_searches_folders_in_the_drivers_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/python"])
    monkeypatch.setattr(registry, "SEARCHED", [])
    threads = torch.get_num_threads()
    prepare_process((["/first", "/second", "/python"], ["/first", "/second"], str(Path.cwd())))
    torch.set_num_threads(threads)
    assert registry.SEARCHED == ["/first", "/second"]
