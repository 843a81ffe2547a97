"""The site: its reference names all that there is, and it is built without a broken link and asks no other host."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rayfed import registry
from rayfed.cli import app
from rayfed.store.schemas import OUTCOME_COLUMNS, TABLES
from tests.conftest import REPOSITORY, missing

DOCS = REPOSITORY / "docs"
COMMANDS = (DOCS / "reference" / "commands.md").read_text()


def sections(page: str) -> dict[str, str]:
    """Heading in backticks -> the text under it."""
    _, *parts = re.split(r"^#{2,3} `(.+)`$", (DOCS / page).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("kind", registry.KINDS)
def test_every_component_is_in_the_reference(kind: str) -> None:
    told = (DOCS / "scenario.md").read_text().partition(f"\n## {kind.capitalize()}\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### `(.+)`$", told, re.MULTILINE) == sorted(registry.table(kind))


def test_every_column_of_every_table_is_in_the_reference() -> None:
    columns = {name: tuple(schema.names) for name, schema in TABLES.items()} | {"outcomes": OUTCOME_COLUMNS}
    for name, told in sections("reference/tables.md").items():
        rows = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in told.splitlines() if line.startswith("| `")]
        assert tuple(row[0].strip("`") for row in rows) == columns.pop(name)
        assert all(len(row[-1]) > 4 for row in rows), f"{name} has a column without a meaning"
    assert not columns


def test_every_scenario_is_in_the_reference_with_its_command() -> None:
    told = sections("reference/scenarios.md")
    assert sorted(told) == sorted(path.stem for path in (REPOSITORY / "scenarios").glob("*.yaml"))
    for name, text in told.items():
        assert f"scenarios/{name}.yaml" in text
        assert re.search(rf"^(\S+=\S+ )?rayfed [a-z-]+ scenarios/{name}\.yaml", text, re.MULTILINE), name


@pytest.mark.engine
def test_every_command_and_option_is_in_the_reference() -> None:
    """By what `--help` prints, which typer makes by itself."""
    told = sections("reference/commands.md")
    wide = {"COLUMNS": "300", "TERMINAL_WIDTH": "300", "NO_COLOR": "1"}
    listed = CliRunner().invoke(app, ["--help"], env=wide).output
    names = re.findall(r"^│ ([a-z][a-z-]+) ", listed, re.MULTILINE)
    assert sorted(told) == sorted(["rayfed", *(f"rayfed {name}" for name in names)])
    for name in names:
        shown = CliRunner().invoke(app, [name, "--help"], env=wide).output
        options = set(re.findall(r"(?<=[ │])--[a-z][a-z-]*(?= )", shown)) - {"--help"}
        assert len(options) > 0, name
        lines = [line.split(" | ")[0] for line in told[f"rayfed {name}"].splitlines() if line.startswith("| `")]
        assert options == set(re.findall(r"--[a-z][a-z-]*", "".join(lines))), name


def test_every_exit_code_is_in_the_reference() -> None:
    """By what commands give to `typer.Exit`."""
    told = set(re.findall(r"^\| ([\dN+ ]+) \|", (DOCS / "reference" / "exit-codes.md").read_text(), re.MULTILINE))
    used = {code for path in (REPOSITORY / "rayfed" / "cli").glob("*.py") for code in _codes(path)}
    assert {"1", "2", "3", "130", "141"} <= used
    assert used <= told


def _codes(path: Path) -> Iterator[str]:
    module = importlib.import_module(f"rayfed.cli.{path.stem}" if path.stem != "__init__" else "rayfed.cli")
    for call in ast.walk(ast.parse(path.read_text())):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "typer.Exit" and call.args:
            for node in _alternatives(call.args[0]):
                text = ast.unparse(node)
                yield "128 + N" if text.startswith("128 +") else str(eval(text, vars(module)))


def _alternatives(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.IfExp):
        yield from (*_alternatives(node.body), *_alternatives(node.orelse))
    else:
        yield node


class Loaded(HTMLParser):
    """What a page makes a browser load by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        loads = tag in ("script", "img", "iframe", "source", "video") or given.get("rel") in ("stylesheet", "icon")
        if loads or given.get("rel") in ("preconnect", "preload", "prefetch"):
            self.addresses += [given.get("src") or given.get("href") or ""]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("material") is None:
        missing("mkdocs-material is not installed: pip install 'rayfed[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.engine
def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        loaded = Loaded(page.read_text()).addresses
        assert loaded, page
        assert not [one for one in loaded if re.match(r"(https?:)?//", one)], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", sheet.read_text()), sheet


@pytest.mark.engine
def test_links_that_leave_docs_lead_to_pages_of_the_site(site: Path) -> None:
    """Where GitHub shows a file of the repository, the site has a page with its text."""
    page = (site / "architecture.html").read_text()
    assert 'href="source/rayfed/simulation/rounds/round.py.html"' in page
    shown = (site / "source" / "rayfed" / "simulation" / "rounds" / "round.py.html").read_text()
    assert "class" in shown
    assert "Round" in shown
    assert 'href="existing-federations.html"' in (site / "readme.html").read_text()
    assert 'href="../contributing.html"' not in page
    assert 'id="quick-start"' in (site / "readme.html").read_text()


def test_every_page_is_in_the_navigation() -> None:
    """But those of reproductions, which their own list leads to."""
    text = re.sub(r"!!python\S+", "", (REPOSITORY / "mkdocs.yml").read_text())
    told = set(re.findall(r"[\w/-]+\.md", str(yaml.safe_load(text)["nav"])))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert told - {"changelog.md", "contributing.md"} == {
        page for page in pages if not page.startswith("reproductions/") or page.endswith("README.md")
    }
