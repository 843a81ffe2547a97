"""What comes from somebody else is shown as text, and stays where it was told to be."""

from __future__ import annotations

import csv
import json
import sys
from io import StringIO
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rayfed import registry
from rayfed import scenario as scenarios
from rayfed.cli import app
from rayfed.errors import ScenarioError, UserError
from rayfed.report.export.tables import export_table
from rayfed.report.html.run import write_report
from rayfed.report.html.sweep import write_sweep_report
from rayfed.results.loading import open_results
from rayfed.runs.scenario_loading import search_where
from rayfed.store.folder import RunFolder
from tests.helpers.report_fixtures import Page, make_run, make_sweep

pytestmark = pytest.mark.usefixtures("reports")

MINIMAL = "name: t\ndata: {name: digits, size: 8}\nmodel: mlp\nfederation: {rounds: 1, clients: 2}\n"
HOSTILE = [
    "<script>alert(1)</script>", "</script><script>alert(1)//", '"><img src=x onerror=alert(1)>', "' onload='alert(1)",
    "{{ 7 * 7 }}", "{% raw %}", "javascript:alert(1)", "<!--", "a|b", "=cmd|' /C calc'!A0", "@SUM(1)", "\\input{/etc}",
    "a\\|b",
]  # fmt: skip


def text_of(page: Page) -> str:
    """That nothing runs, and what is to be read."""
    page.check_that_it_stands_alone()
    names = [name for name, _ in page.attributes]
    assert not [name for name in names if name.startswith("on")]
    assert not [value for name, value in page.attributes if name in ("href", "src") and "script:" in (value or "")]
    return page.text


def hostile_run(out: Path, text: str) -> RunFolder:
    """Somebody else's text wherever a run has any."""
    folder = make_run(str(out), {text: [], f"{text}2": [{"name": text, "of": text}]}, {text: 1.0})
    folder.write_text("status.json", json.dumps({"state": text, "error": text, "rounds": 5, "rounds_done": 1}))
    folder.write_text("environment.json", json.dumps({text: {"nested": text}}))
    rows = folder.read_table("partition").to_pylist()
    folder.write_part("partition", 0, [row | {"class_name": text} for row in rows])
    for round in (0, 4):
        rows = [row for row in folder.read_table("attacks").to_pylist() if row["round"] == round]
        folder.write_part("attacks", round, [row | {"status": "diverged", "message": text} for row in rows])
    guarantee = {"arm": text, "rounds": 1, "note": text, "defence": text, "mechanism": text}
    folder.write_part("privacy", 0, [guarantee, guarantee | {"epsilon": 1.0, "delta": 1e-5, "accountant": text}])
    return folder


@pytest.mark.engine
@pytest.mark.parametrize("text", HOSTILE)
def test_reports_and_notebooks_show_text_as_text(text: str, tmp_path: Path) -> None:
    folder = hostile_run(tmp_path, text)
    write_report(folder)
    shown = text_of(Page(folder.read_text("report.html")))
    assert " ".join(text.split()) in shown
    notebook = Page(open_results(folder.url)._repr_html_())
    assert not {"script", "iframe", "object"} & set(notebook.tags)
    assert not [name for name, _ in notebook.attributes if name.startswith("on")]
    assert " ".join(text.split()) in notebook.text


@pytest.mark.parametrize("text", HOSTILE[:5])
def test_reports_of_sweeps_do_too(text: str, tmp_path: Path) -> None:
    sweep = make_sweep(str(tmp_path), 2, 1)
    rows = sweep.outcomes().to_pylist()
    sweep.write_outcomes([row | {"arm": text, "attack": text, "error": text, "defences": text} for row in rows])
    write_sweep_report(sweep)
    assert " ".join(text.split()) in text_of(Page(sweep.files.read_text("report.html")))


@pytest.mark.engine
@pytest.mark.parametrize("text", HOSTILE)
def test_exports_keep_text_in_its_cell(text: str, tmp_path: Path) -> None:
    found = open_results(hostile_run(tmp_path, text).url)
    cells = {cell for row in csv.reader(StringIO(export_table(found, "csv"))) for cell in row}
    assert not {cell for cell in cells if cell.startswith(("=", "@", "+", "\t"))}
    assert {text, f"'{text}"} & cells
    lines = [line for line in export_table(found, "markdown").splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert not [line for line in lines if "<" in line]
    assert "\\input{" not in export_table(found, "latex")


def validated(path: Path, *changes: str) -> str:
    return CliRunner().invoke(app, ["validate", str(path), *(p for c in changes for p in ("--set", c))]).output


PLACES = [
    "model: 'loud_module:Thing'", "attacks: [{name: 'loud_module:Thing'}]", "arms: {a: ['loud_module:Thing']}",
    "sweep: {fields: {model.name: ['loud_module:Thing']}}", "nonsense: {deep: [{er: 'loud_module:Thing'}]}",
]  # fmt: skip


@pytest.mark.parametrize("line", PLACES)
def test_validate_shows_dotted_paths_before_it_imports_them(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "loud_module", raising=False)
    (tmp_path / "loud_module.py").write_text("print('imported')\n")
    (tmp_path / "s.yaml").write_text(f"{MINIMAL.replace('model: mlp', '')}{line}\n")
    output = validated(tmp_path / "s.yaml")
    assert "loud_module:Thing" in output.partition("imported\n")[0]


@pytest.mark.parametrize("name", ["loud-1:Thing", "1loud:Thing", "loud 1:Thing", "loud/1:Thing", "loud:Thing\n"])
def test_only_what_is_shown_is_imported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{name.partition(':')[0].replace('/', '_')}.py").write_text("raise AssertionError('imported')")
    assert not scenarios.dotted_paths(f"model: {json.dumps(name)}")
    with pytest.raises(UserError, match="unknown model"):
        registry.find("models", name)


def test_validate_shows_those_of_set(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(MINIMAL)
    assert "when it runs: no_such:Thing" in validated(tmp_path / "s.yaml", "model=no_such:Thing")


def test_validate_says_where_results_go(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(f"{MINIMAL}output: {{folder: /somewhere/else}}\n")
    assert "results: /somewhere/else" in validated(tmp_path / "s.yaml")


@pytest.mark.parametrize("name", ["..", ".", "../x", "a/b", "a\\b", "/etc", "~", "a\n", "", "$HOME", "%2e%2e", "-x"])
def test_a_runs_name_stays_in_the_output_folder(name: str) -> None:
    with pytest.raises(ScenarioError, match="name"):
        scenarios.parse(f"{MINIMAL.replace('name: t', f'name: {json.dumps(name)}')}")


@pytest.mark.engine
def test_names_from_scenarios_and_data_write_inside_the_run_folder(tmp_path: Path) -> None:
    """Arms, labels of attacks, classes and files of images that look like paths."""
    from PIL import Image

    odd = "..%2f..%2fout"
    for label in (odd, "-rf ~"):
        for i in range(10):
            (tmp_path / "images" / label).mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), 20 * i).save(tmp_path / "images" / label / f"..{i}.png")
    text = f"""
name: t
data: {{name: image_folder, root: {tmp_path / "images"}}}
model: {{name: mlp, hidden: [4]}}
federation: {{rounds: 1, clients: 2}}
arms: {{"../../arm": [], "/tmp/arm": [{{name: gaussian, sigma: 0.1}}]}}
attacks: [{{name: idlg, label: "../../attack", iterations: 2, observes: gradient}}]
resources: {{clients: {{actors: 1}}, attackers: {{actors: 1}}}}
"""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "s.yaml").write_text(text)
    before = set(tmp_path.rglob("*"))
    arguments = ["launch", str(tmp_path / "in/s.yaml"), "--out", str(tmp_path / "out/runs"), "--executor", "local"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    made = set(tmp_path.rglob("*")) - before - {tmp_path / "out"}
    assert made
    assert all(path.is_relative_to(tmp_path / "out" / "runs") for path in made)


def searched(run: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """What `search_where` makes of `sys.path`, and what it notes for who resumes the run."""
    monkeypatch.setattr(sys, "path", [*sys.path, "/installed"])
    monkeypatch.setattr(registry, "SEARCHED", [])
    search_where(run)
    return sys.path, registry.SEARCHED


@pytest.mark.parametrize(("model", "used"), [("mlp", []), ("my_module:Net", ["/one", "/two"])])
def test_a_runs_folders_are_searched_last_and_only_for_dotted_paths(
    model: str, used: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "evil"
    run.mkdir()
    (run / "scenario.yaml").write_text(MINIMAL.replace("mlp", model))
    places = ["/one", "evil", ".", "", str(run), f"{run}/lib", f"{run}/../evil/lib", "/two"]
    (run / "environment.json").write_text(json.dumps({"search_path": places}))
    before = [str(tmp_path), *sys.path, "/installed"]
    assert searched("evil", monkeypatch) == ([*before, *used], [str(tmp_path), *used])
