"""Documents that can be checked: the generated reference, the schema against the scenarios, README's code."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from rayfed import registry
from rayfed.cli import app
from rayfed.scenario import json_schema
from tests.conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text()


def test_the_reference_is_up_to_date() -> None:
    generate = runpy.run_path(str(REPOSITORY / "docs" / "generate.py"))
    for page, made in generate["PAGES"].items():
        assert (REPOSITORY / "docs" / page).read_text() == made(), f"{page}: run: python docs/generate.py"


@pytest.fixture(scope="module")
def schema() -> Any:
    return jsonschema.validators.validator_for(json_schema())(json_schema())


def test_scenarios_fit_the_json_schema(schema: Any) -> None:
    for path in sorted((REPOSITORY / "scenarios").glob("*.yaml")):
        assert not [f"{path.name}: {error.message}" for error in schema.iter_errors(yaml.safe_load(path.read_text()))]


def test_the_json_schema_refuses_what_the_loader_refuses(schema: Any) -> None:
    raw = yaml.safe_load((REPOSITORY / "scenarios" / "noniid.yaml").read_text())
    assert schema.is_valid(raw)
    for change in ({"data": {"name": "digits", "sise": 28}}, {"federation": {"rounds": 0, "clients": 1}}, {"sed": 1}):
        assert not schema.is_valid({**raw, **change})


def test_links_of_the_documents_lead_somewhere() -> None:
    for page in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.engine
def test_readmes_defence_works_as_written(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    [defence] = [b for b in blocks if "class SignOnly" in b]
    (tmp_path / "my_defences.py").write_text(defence)
    [yaml_block] = [b for b in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if "my_defences" in b]
    (tmp_path / "s.yaml").write_text("name: s\nfederation: {rounds: 1, clients: 2}\n" + yaml_block)
    done = subprocess.run(
        [sys.executable, "-m", "rayfed", "validate", "s.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "my_defences:SignOnly" in done.stdout


def test_readme_fits_on_two_screens_and_counts_right() -> None:
    assert len(README.splitlines()) < 150
    [attacks] = re.findall(r"\| (\d+): images", README)
    [(defences, protections)] = re.findall(r"\| (\d+), and (\d+) protected channels", README)
    counts = {"attacks": attacks, "defences": defences, "protections": protections}
    assert counts == {kind: str(len(registry.table(kind))) for kind in counts}


def test_readmes_commands_are_commands() -> None:
    """By typer's own parser: commands, options and, of scenarios, the file."""
    group = typer.main.get_command(app)
    text = README.replace("<time>", "TIME")
    lines = re.findall(r"(?:^|&& |`)(rayfed [a-z][^#`\n]*)", text, re.MULTILINE)
    assert len(lines) >= 8
    for line in lines:
        _, name, *arguments = shlex.split(line)
        command = group.get_command(group.make_context("rayfed", [name]), name)
        assert command is not None, line
        command.make_context(name, arguments)
        for path in re.findall(r"scenarios/\S+", line):
            assert (REPOSITORY / path).exists()


def test_every_scenario_has_a_question() -> None:
    page = (REPOSITORY / "docs" / "scenarios.md").read_text()
    linked = re.findall(r"\[`(\w+)`\]\(\.\./scenarios/(\w+)\.yaml\)", page)
    assert all(name == file for name, file in linked)
    assert sorted(name for name, _ in linked) == sorted(path.stem for path in (REPOSITORY / "scenarios").glob("*.yaml"))


@pytest.mark.engine
def test_the_python_of_from_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (REPOSITORY / "docs" / "python.md").read_text()
    namespace: dict[str, Any] = {}
    for example in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(example, namespace)
        if "Dlg()" in example:  # a gradient of one's own, and the update of another federation
            found, secret = namespace["found"], namespace["secret"]
            assert (found.images - secret).abs().max() < 0.01
            assert found.labels.tolist() == [3]
    assert namespace["given"].remarks == ()
    assert len(namespace["run"].verdicts()) == 1
