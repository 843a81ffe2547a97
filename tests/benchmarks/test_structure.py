"""The figures of the code's structure, on a small tree whose figures are known, and on this one."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.architecture import drawn
from benchmarks.structure import Code, circles, main, reached
from tests.conftest import REPOSITORY
from tests.helpers.layers import LEVELS, own_imports, room

FILES = {
    "tests/helpers/layers.py": 'FLOORS = (\n    "rayfed.low rayfed.side",\n    "rayfed.high",\n    "actors",\n)\n',
    "rayfed/low.py": "class Thing:\n    def of(self, a, b, /, c, d, *e, f, **g): ...\n\n\ndef _hidden(): ...\n",
    "rayfed/side.py": "from rayfed import low\n\n\ndef late():\n    from rayfed.high.one import Thing\n",
    "rayfed/high/__init__.py": "",
    "rayfed/high/one.py": "import torch\nfrom . import two\n\n\nclass Thing: ...\n\n\ndef _hidden(): ...\n",
    "rayfed/high/two.py": "from ..side import late\n\nif True:\n    def long():\n" + "        1\n\n" * 40,
    "actors/__init__.py": "import rayfed.low\n",
}


@pytest.fixture
def small(tmp_path: Path) -> Code:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Code(tmp_path)


def test_imports_count_wherever_they_are_written(small: Code) -> None:
    assert small.modules == {
        "rayfed.low": set(),
        "rayfed.side": {"rayfed.low", "rayfed.high.one"},
        "rayfed.high": set(),
        "rayfed.high.one": {"rayfed.high.two"},
        "rayfed.high.two": {"rayfed.side"},
        "actors": {"rayfed.low"},
    }
    assert small.arrows(1) == ["rayfed.side -> rayfed.high"]
    assert small.arrows(0) == ["rayfed.side -> rayfed.low"]
    assert small.arrows(-1) == ["actors -> rayfed.low", "rayfed.high -> rayfed.side"]


def test_circles_are_found_between_modules_and_rooms(small: Code) -> None:
    assert circles(small.modules) == [("rayfed.high.one", "rayfed.high.two", "rayfed.side")]
    assert circles(small.rooms) == [("rayfed.high", "rayfed.side")]
    assert reached(small.rooms, "rayfed.high") == {"rayfed.side", "rayfed.low", "rayfed.high"}
    assert not reached(small.rooms, "rayfed.high", without="rayfed.side")


def test_functions_are_measured_where_they_are(small: Code) -> None:
    longest = small.functions[0]
    assert (longest.name, longest.lines) == ("rayfed.high.two.long", 80)  # to the last statement, blank lines too
    assert {f.name: f.parameters for f in small.functions}["rayfed.low.Thing.of"] == 7


def test_names_that_stand_for_several_things(small: Code) -> None:
    assert small.ambiguous == {"Thing": ["rayfed.high.one", "rayfed.low"]}


def test_the_table_has_a_column_for_each_checkout(
    small: Code, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bare := tmp_path / "bare" / "actors").mkdir(parents=True)
    (bare / "one.py").write_text("def f():\n\n    return 1\n")
    main([str(small.root), str(bare.parent), "--list"])
    printed = capsys.readouterr().out
    rows = {line[:40].strip(): line[40:].split() for line in printed.splitlines()}
    assert rows["lines of rayfed and actors"] == ["54", "2"]
    assert rows["functions over 40 lines"] == ["1", "0"]
    assert rows["floors"] == ["3", "none"]
    assert rows["arrows up"] == ["1", "-"]
    assert "2 times Thing: rayfed.high.one, rayfed.low" in printed


def test_the_picture_has_all_rooms_and_lines(small: Code) -> None:
    svg = drawn(small)
    assert svg == drawn(Code(small.root))
    tree = ElementTree.fromstring(svg)
    tags = [(element.tag.rpartition("}")[2], element.get("class")) for element in tree]
    assert tags.count(("rect", "room")) == len(small.rooms) == 4
    kinds = {kind: tags.count(("path", kind)) for kind in ("strong", "faint", "up")}
    assert kinds == {"strong": 3, "faint": 0, "up": 1}
    (small.root / "rayfed" / "new.py").write_text("")
    with pytest.raises(SystemExit, match=r"does not name rayfed\.new"):
        drawn(Code(small.root))


@pytest.mark.engine
def test_this_checkout_is_read_as_the_tests_of_its_floors_read_it() -> None:
    here = Code(REPOSITORY)
    assert here.floors == LEVELS
    assert {(a, b) for a, others in here.rooms.items() for b in others} == {
        (room(one.module), room(one.name)) for one in own_imports() if room(one.module) != room(one.name)
    }
    drawn(here)
