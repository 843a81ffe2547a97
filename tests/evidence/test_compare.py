"""Runs and sweeps beside each other."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rayfed.cli.tables import TerminalTable, make_terminal_table
from rayfed.errors import UserError
from rayfed.evidence.compare import Comparison, Unpaired, changed_attacks, compare_results
from rayfed.report.text.compare import scenario_value_text
from rayfed.results.loading import open_results
from tests.helpers.command import run
from tests.helpers.result_fixtures import attacked, small_run, small_sweep

SCENARIO: dict[str, Any] = {
    "data": {"name": "digits", "size": 28},
    "training": {"lr": 0.1, "batch_size": 1},
    "attacks": [{"name": "dlg", "iterations": 10}, {"name": "idlg", "iterations": 10}],
}


def two(tmp_path: Path, **changes: Any) -> Comparison:
    names = ("first", "second")
    folders = [
        small_run(str(tmp_path), scenario, name)
        for name, scenario in zip(names, (SCENARIO, SCENARIO | changes), strict=True)
    ]
    for folder, psnr in zip(folders, (30.0, 10.0), strict=True):
        folder.write_part("attacks", 0, [attacked("none", "dlg", psnr=psnr, ssim=0.5)])
    return compare_results([open_results(folder.url) for folder in folders])


def test_settings_come_in_the_order_given_with_their_run(tmp_path: Path) -> None:
    found = two(tmp_path)
    assert [(s.source, s.measures["psnr"].mean) for s in found.settings] == list(
        zip(found.names, (30, 10), strict=True)
    )
    assert [name.partition("-")[0] for name in found.names] == ["first", "second"]
    assert (found.differences, found.unfinished) == ({}, {})


def test_only_what_differs_is_named_with_its_values(tmp_path: Path) -> None:
    attacks = [{"name": "dlg", "iterations": 10}, {"name": "idlg", "iterations": 99}]
    found = two(tmp_path, training={"lr": 0.5, "batch_size": 1}, attacks=attacks, arms={"noise": ["gaussian"]})
    assert {section: [(one.path, one.values) for one in changed] for section, changed in found.differences.items()} == {
        "training": [("training.lr", [0.1, 0.5])],
        "attacks": [("attacks.idlg.iterations", [10, 99])],
        "arms": [("arms", [None, {"noise": ["gaussian"]}])],
    }
    assert scenario_value_text({"noise": ["gaussian"], "none": []}) == "{noise: [gaussian]}"


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 5},
        {"data": {"name": "mnist"}},
        {"attacks": [{"name": "dlg"}, {"name": "dlg"}]},
        {"partition": {"name": "shards"}},
    ],
)
def test_sections_that_differ_are_listed(change: dict[str, Any], tmp_path: Path) -> None:
    assert two(tmp_path, **change).differences.keys() == change.keys()


def test_the_fields_in_which_victims_differ_are_named_and_rounds_are_none_of_them(tmp_path: Path) -> None:
    both = [small_run(str(tmp_path), SCENARIO | {"federation": {"clients": 2, "rounds": n}}, f"r{n}") for n in (4, 5)]
    for folder in both:
        folder.write_part("attacks", 0, [attacked("none", "dlg", psnr=9.0, victim=client) for client in range(2)])
    longer = compare_results([open_results(folder.url) for folder in both])
    assert (longer.unpaired, {one.pairs for one in longer.paired}) == (None, {2})
    attacks = [{"name": "dlg", "iterations": 99}]
    found = two(tmp_path, data={"name": "digits", "size": 8}, attacks=attacks, model={"name": "mlp"})
    assert (found.paired, found.unpaired) == ([], Unpaired(("data.size",), ("dlg",)))
    assert "model" in found.differences


def test_it_warns_of_a_run_that_is_not_finished(tmp_path: Path) -> None:
    first, second = small_run(str(tmp_path), {}, "a"), small_run(str(tmp_path), {}, "b")
    second.write_text("status.json", json.dumps({"state": "failed"}))
    assert compare_results([open_results(first.url), open_results(second.url)]).unfinished == {second.name: "failed"}


def test_names_that_two_share_become_addresses(tmp_path: Path) -> None:
    first, second = small_run(str(tmp_path / "a"), {}), small_run(str(tmp_path / "b"), {})
    assert first.name == second.name
    assert compare_results([open_results(first.url), open_results(second.url)]).names == [first.url, second.url]


def test_one_is_not_enough(tmp_path: Path) -> None:
    one = open_results(small_run(str(tmp_path), {}).url)
    with pytest.raises(UserError, match="at least two"):
        compare_results([one, one])


def test_the_command_mixes_runs_and_sweeps(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {"seed": 1}, "plain")
    folder.write_part("attacks", 0, [attacked("none", "dlg", psnr=12.345, label_accuracy=0.5)])
    sweep = small_sweep(tmp_path)
    code, output = run("compare", folder.url, sweep.url)
    assert code == 0, output


def printed(table: TerminalTable, width: int) -> list[str]:
    page = Console(file=StringIO(), width=width, emoji=False, highlight=False)
    page.print(table)
    return page.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [*range(60, 132, 7), 80, 120, 200])
@pytest.mark.parametrize("names", [1, 3, 5])
def test_no_name_and_no_figure_is_broken(names: int, width: int) -> None:
    words = ["t-20261121-213220", "none", "64", "0.01", "inverting_gradients"], ["defences-20261121-213516", *"abcd"]
    rows = [[*some[:names], *(f"{i}{j}.63 ± 0.012†" for i in range(10))] for j, some in enumerate(words)]
    headings = ["run", "arm", "batch_size", "sigma", "attack"][:names] + [f"PSNR, worst {i} (dB)" for i in range(10)]
    lines = printed(make_terminal_table("settings", headings, rows, words=names), width)
    assert max(map(len, lines)) <= width
    whole = {cell for line in lines for cell in re.split(r"\s{2,}", line.strip())}
    assert {cell for row in rows for cell in row} <= whole
    assert [line.strip() for line in lines].count("settings") == 1
    numbered = sum(line.split()[:1] == ["#"] for line in lines)
    repeated = sum(line.split()[:1] == ["run"] for line in lines)
    assert min(numbered, repeated) == 0 < max(numbered, repeated), "each table begins with the names, or numbers"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_runs_that_are_headings_are_whole(width: int) -> None:
    runs = ["t-20261121-213220", "defences-20261121-213516", "choose-20261121-213517", "noniid-20261121-213518"]
    rows = [["arms.noise.defences.gaussian.sigma", *"0123"], ["arms", "{noise: [gaussian], other: [prune]}", *"---"]]
    lines = printed(make_terminal_table("", ["field", *runs], rows), width)
    assert max(map(len, lines)) <= width
    assert all(any(name in line for line in lines) for name in [*runs, rows[0][0]])


def test_the_users_mistakes_end_with_2(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {})
    code, output = run("compare", folder.url)
    assert (code, "at least two" in output) == (2, True)
    code, output = run("compare", folder.url, folder.url + "x")
    assert (code, "not a run folder" in output) == (2, True)


def test_attacks_of_one_name_that_are_set_otherwise_make_no_pairs() -> None:
    few, many = ({"attacks": [{"name": "dlg", "iterations": n}, {"name": "idlg"}]} for n in (1, 2))
    assert changed_attacks([few, many]) == ["dlg"]
    assert changed_attacks([few, few | {"attacks": few["attacks"][:1]}]) == [], "what one lacks is in no pair"
    assert changed_attacks([few, {}]) == []
