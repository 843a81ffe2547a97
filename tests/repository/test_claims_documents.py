"""What the documents promise: that the tests they name exist, and what of it can be read off the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from rayfed.update import Observation
from tests.conftest import REPOSITORY

PAGES = sorted((REPOSITORY / "docs").glob("*.md"))
NAMED = re.compile(r"(tests/[\w/]+\.py)?::(test_\w+)")
CODE = sorted(path for room in ("rayfed", "actors") for path in (REPOSITORY / room).rglob("*.py"))
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


@cache
def functions_of(path: Path) -> frozenset[str]:
    """The names of the functions of a file, which is not imported."""
    found = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(node.name for node in found if isinstance(node, ast.FunctionDef))


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """The calls of a file's code, by what they call as it is written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_test_that_a_document_names_exists(page: Path) -> None:
    """`tests/file.py::name`; where several follow each other, `::name` is of the file before it."""
    file = None
    for named, test in NAMED.findall(page.read_text(encoding="utf-8")):
        file = named or file
        assert file is not None, f"{page.name}: ::{test} follows no file"
        assert (REPOSITORY / file).is_file(), f"{page.name} names {file}"
        assert test in functions_of(REPOSITORY / file), f"{page.name} names {file}::{test}"


@pytest.mark.engine
def test_nothing_is_unpickled() -> None:
    """By our code: `torch.load` is asked for weights alone, numpy is not asked to unpickle, no pickle is imported but
    by the local executor, which opens what it has pickled itself.
    """
    for path in CODE:
        own = path.as_posix().endswith("rayfed/simulation/executors/local.py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and [alias.name for alias in node.names] != ["UnpicklingError"]:
                names.append(node.module or "")
            assert own or not PICKLES & {name.partition(".")[0] for name in names}, f"{path}: {names}"
        for called, call in calls(tree):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert called != "torch.load" or given.get("weights_only") == "True", f"{path}:{call.lineno}"
            assert given.get("allow_pickle", "False") == "False", f"{path}:{call.lineno}"
            assert not called.endswith(("read_pickle", "yaml.load", "unsafe_load")), f"{path}:{call.lineno}"


def test_an_observation_has_what_the_table_says_and_no_other_field() -> None:
    """A new field is a new grant: docs/threat-models.md has to say who gets it."""
    by_the_protocol = {
        "victim", "round", "weights", "buffers", "update", "returned_buffers", "scale", "batch_size", "sample",
        "classes", "has_numbers", "has_places", "local", "earlier",
    }  # fmt: skip
    granted = {"labels", "extra", "sealed", "shown"}
    assert {field.name for field in fields(Observation)} == by_the_protocol | granted
