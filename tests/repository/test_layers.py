"""The floors: imports point down only and never in a circle, and rayfed needs no Ray.

Every file is parsed once. An import counts wherever it is written: at the top, in a function (there to start faster) or
under `TYPE_CHECKING` (there for a type alone). Whoever reads either file has to know the other in all three cases, and
a part cannot be moved or tested without what its functions import. Components named as strings in a `TABLE` do not
count: looking them up by name is how the registry stays below them.
"""

from __future__ import annotations

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest

from tests.conftest import REPOSITORY
from tests.helpers.layers import (
    ARROWS,
    FLOORS,
    LEVELS,
    broken,
    imports,
    modules,
    own_imports,
    room,
)


@pytest.mark.engine
def test_every_room_has_one_floor() -> None:
    named = [name for names in FLOORS for name in names.split()]
    there = {room(module) for module in modules()}
    assert not (new := sorted(there - set(named))), f"say in FLOORS on which floor these are: {new}"
    assert not (gone := sorted(set(named) - there)), f"in FLOORS, but not in the tree: {gone}"
    assert len(named) == len(set(named)), "a room is on two floors"


def test_imports_point_down() -> None:
    wrong = [f"{one.where} imports {one.name}: {rule}" for one in own_imports() if (rule := broken(one))]
    assert not wrong, "imports against the floors:\n" + "\n".join(wrong)


def test_every_exception_is_needed() -> None:
    needed = {(room(one.module), one.name) for one in own_imports() if room(one.module) != room(one.name)}
    listed = {(own, name) for own, names in ARROWS.items() for name in names}
    assert not (spare := sorted(listed - needed)), f"no import needs these ARROWS any more, take them out: {spare}"
    assert all(LEVELS[own] == LEVELS[room(name)] for own, name in listed), "ARROWS are for rooms of one floor"


def test_no_circles() -> None:
    where = {(one.module, one.name): one.where for one in own_imports() if one.module != one.name}
    graph = TopologicalSorter[str]()
    for module, name in where:
        graph.add(module, name)
    try:
        graph.prepare()
    except CycleError as error:
        circle = error.args[1][::-1]  # graphlib names every node before those that need it
        steps = [f"{where[step]} imports {step[1]}" for step in pairwise(circle)]
        pytest.fail("a circle of imports: move what both need to a module of its own\n" + "\n".join(steps))


def test_only_actors_import_ray() -> None:
    wrong = [one.where for one in imports() if one.name.partition(".")[0] == "ray" and room(one.module) != "actors"]
    assert not wrong, f"only `actors` may import ray: {', '.join(wrong)}"


@pytest.mark.engine
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
    from rayfed import registry

    for kind in registry.KINDS:
        for name in registry.table(kind):
            target = registry.find(kind, name)
            assert target.__doc__, f"{kind} {name} has no docstring"
            for parameter in registry.parameters(target):
                assert parameter.doc, f"{kind} {name}: field {parameter.name} is not described"
