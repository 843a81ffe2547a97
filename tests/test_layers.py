"""The floors of the house: imports point down only, and rayfed needs no Ray."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

FLOORS = {
    "rayfed.cli": 6, "rayfed.__main__": 6, "rayfed.console": 5, "rayfed.tune": 5, "actors": 4, "rayfed.training": 3,
    "rayfed.reproductions": 3,
    "rayfed.scenario": 2, "rayfed.defences": 2, "rayfed.attacks": 2, "rayfed.aggregation": 2, "rayfed.poisoning": 2,
    "rayfed.privacy": 1,
    "rayfed.protections": 2, "rayfed.crypto": 1,
    "rayfed.models": 1, "rayfed.data": 1, "rayfed.metrics": 1, "rayfed.results": 1, "rayfed.report": 1,
    "rayfed.gradients": 1, "rayfed.update": 1, "rayfed.catalogue": 1, "rayfed.seeds": 1, "rayfed.errors": 1,
    "rayfed.objective": 1, "rayfed.subsets": 1, "rayfed": 1,
}  # fmt: skip
SOURCES = sorted(p for folder in ("rayfed", "actors") for p in (REPOSITORY / folder).rglob("*.py"))


def floor(module: str) -> int:
    return next(FLOORS[name] for name in sorted(FLOORS, key=len, reverse=True) if f"{module}.".startswith(f"{name}."))


def imports(path) -> list[str]:  # type: ignore[no-untyped-def]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_imports_point_down(path) -> None:  # type: ignore[no-untyped-def]
    module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    for name in imports(path):
        top = name.partition(".")[0]
        if top == "ray":
            assert floor(module) == 4, f"{module} imports ray"
        if top in ("rayfed", "actors"):
            assert floor(name) <= floor(module), f"{module} imports {name} from a higher floor"


def test_attacks_and_defences_do_not_know_each_other() -> None:
    for room, other in (("attacks", "rayfed.defences"), ("defences", "rayfed.attacks")):
        for path in (REPOSITORY / "rayfed" / room).rglob("*.py"):
            assert not [name for name in imports(path) if name.startswith(other)], path


def test_rayfed_works_with_ray_absent() -> None:
    code = """
import sys
sys.modules["ray"] = None  # importing it raises ImportError
import pkgutil, importlib, rayfed
for found in pkgutil.walk_packages(rayfed.__path__, "rayfed."):
    if found.name != "rayfed.__main__":
        importlib.import_module(found.name)
assert "actors" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)


def test_every_entry_of_every_table_is_there() -> None:
    from rayfed import catalogue

    for kind in catalogue.KINDS:
        for name in catalogue.table(kind):
            target = catalogue.find(kind, name)
            assert target.__doc__, f"{kind} {name} has no docstring"
            for parameter in catalogue.parameters(target):
                assert parameter.doc, f"{kind} {name}: field {parameter.name} is not described"
