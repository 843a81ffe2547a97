"""Scenarios that come with rayfed, by name and as what a new one starts from; names of new scenarios."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayfed import scenario
from rayfed.core.shipped import find_shipped, scenario_names
from tests.helpers.command import run


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [" ", "ä", "-", ".hidden", "..", "a:b", "a\n", "", "a" * 201, "dir/#"])
def test_names_that_no_run_folder_can_have(name: str) -> None:
    code, output = run("new", "--", name)
    assert (code, "cannot name a scenario" in output) == (2, True), output
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    "name", ["a.b", "1.5", "true", "null", "2026-11-23", "dir/mine", "mine.yaml", "0x1F", "1e3", "NAME"]
)
@pytest.mark.parametrize("origin", [(), ("--from", "undefended")])
def test_odd_names_are_written_so_that_they_are_read(name: str, origin: tuple[str, ...]) -> None:
    Path("dir").mkdir()
    code, output = run("new", name, *origin)
    assert code == 0, output
    own = Path(name).name.removesuffix(".yaml")
    assert scenario.load(Path(name).parent / f"{own}.yaml").name == own


@pytest.mark.parametrize("origin", [(), ("--from", "undefended")])
def test_blanks_in_a_name_are_hyphens(origin: tuple[str, ...]) -> None:
    code, output = run("new", "a b c", *origin)
    assert code == 0, output
    assert "note: 'a b c' is renamed to a-b-c" in output
    assert scenario.load("a-b-c.yaml").name == "a-b-c"


def test_a_folder_that_is_not_there() -> None:
    code, output = run("new", "nowhere/mine")
    assert (code, "cannot write nowhere/mine.yaml" in output) == (2, True), output
    assert "Errno" not in output


def test_what_a_scenario_needs_comes_with_its_copy() -> None:
    code, output = run("new", "mine", "--from", "user_model")
    assert (code, "wrote user_model.py" in output, "wrote user_data" in output) == (0, True, True), output
    assert "rayfed launch mine.yaml" in Path("mine.yaml").read_text()
    code, output = run("validate", "mine.yaml")
    assert (code, "mine.yaml: valid" in output) == (0, True), output
    code, output = run("new", "other", "--from", "nonid")
    assert (code, "did you mean 'noniid'? (valid: adapters, attacks" in output) == (2, True), output


def test_a_name_is_a_scenario_that_comes_with_rayfed_unless_a_file_has_it() -> None:
    shipped_one = f"{find_shipped('scenarios') / 'toy.yaml'}: valid"
    Path("toy").mkdir()
    code, output = run("validate", "toy")
    assert (code, shipped_one in output, "note:" in output) == (0, True, False), output
    run("new", "toy")
    code, output = run("validate", "toy")
    assert shipped_one in output
    assert "note: using the built-in scenario toy; to use your file, write toy.yaml" in output
    Path("toy").rmdir()
    Path("toy.yaml").rename("toy")
    assert "toy: valid data: digits" in run("validate", "toy")[1]


def test_a_name_that_none_has() -> None:
    code, output = run("launch", "toi", "--executor", "local")
    assert code == 2
    assert "toi: no such scenario file, and no such built-in scenario: did you mean 'toy'?" in output
    assert all(name in output for name in scenario_names())


def test_reproductions_come_with_rayfed() -> None:
    code, output = run("reproduce", "grnn-table-3-44")
    assert (code, "did you mean 'grnn-table-3-4'" in output) == (2, True), output
