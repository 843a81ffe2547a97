"""Documents that can be checked: the generated reference, the schema against the scenarios, README's commands."""

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

from rayfed.cli import app
from rayfed.scenario import json_schema
from rayfed.store.finding import State
from tests.conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text()


def test_the_reference_is_up_to_date() -> None:
    generate = runpy.run_path(str(REPOSITORY / "docs" / "generate.py"))
    assert [path for path, _ in generate["changed"]()] == [], "run: python docs/generate.py"


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
def test_readmes_sweep_is_valid_in_a_new_scenario(tmp_path: Path) -> None:
    [addition] = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    rayfed = [sys.executable, "-m", "rayfed"]
    subprocess.run([*rayfed, "new", "mine"], cwd=tmp_path, capture_output=True, check=True)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | yaml.safe_load(addition)))
    subprocess.run([*rayfed, "validate", "mine.yaml"], cwd=tmp_path, capture_output=True, check=True)


def test_readme_is_short() -> None:
    assert len(README.splitlines()) < 170
    assert len(README.split()) < 1100


def test_readmes_commands_are_commands() -> None:
    """By typer's own parser: commands, options and, of scenarios, the file."""
    group = typer.main.get_command(app)
    blocks = re.findall(r"```(?:bash|text)\n(.*?)```", README, re.DOTALL)
    code = "\n".join(blocks).replace("<time>", "TIME")
    lines = re.findall(r"(?:^ *|&& )(rayfed [a-z][^#\n]*)", code, re.MULTILINE)
    assert len(lines) >= 12
    for line in lines:
        _, name, *arguments = shlex.split(line)
        command = group.get_command(group.make_context("rayfed", [name]), name)
        assert command is not None, line
        command.make_context(name, arguments)
        for path in re.findall(r"scenarios/\S+", line):
            assert (REPOSITORY / path).exists()


def test_entries_of_the_changelog_are_short() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    assert len(text.split()) < 2000
    sections = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert sections <= {"Breaking", "Security", "Added", "Changed", "Deprecated", "Fixed"}
    entries = re.findall(r"^- (.+)$", text, re.MULTILINE)
    assert len(entries) > 100
    assert not [entry for entry in entries if len(entry.split()) > 15]


def test_the_glossary_has_every_verdict() -> None:
    page = (REPOSITORY / "docs" / "glossary.md").read_text()
    terms = {term.lower() for term in re.findall(r"^\*\*([^*]+?)\.?\*\*", page, re.MULTILINE)}
    assert terms >= set(State)


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
