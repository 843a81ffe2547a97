"""How the fuzz tests spoil documents, tables and files, and how they explore."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 1e308, float("nan"), float("inf"), -float("inf"), 0.5,
    "", "x", "../../etc", "a.b", "1", "ünï\u202e", "<script>", "os:system", "rayfed.errors:UserError", "no_such:Thing",
    [], {}, [[]], [None], {"name": None}, {"name": "x"}, {1: 2}, {None: None}, {"name": ["a"]}, {"name": "gaussian"},
    [1, 2], ["a"], b"bytes", date(2020, 1, 1), "x" * 500, {"low": 1, "high": "a"}, {"a": {"a": {"a": []}}},
]  # fmt: skip
CELLS: list[Any] = [None, "", "<b>", float("nan"), float("inf"), -1, 2**31 - 1, b"\xff", "../..", "trials/0000-0", True]


def examples(count: int) -> pytest.MarkDecorator:
    """So many of them."""
    return pytest.mark.parametrize("examples", [count])


def explore(examples: int, one: Callable[[random.Random], None]) -> None:
    """Run a check so many times, with always the same random numbers."""
    config = settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=timedelta(seconds=60),  # longer is a hang
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    config(given(r=st.integers(0, 2**32).map(random.Random))(lambda r: one(r)))()


def spoil(document: Any, r: random.Random) -> None:
    """Replace, drop, copy or add a few keys and values of a document in place."""
    for _ in range(r.choice([1, 1, 2, 4])):
        with suppress(KeyError, IndexError, TypeError, ValueError):  # what an earlier change has taken away
            _change(document, r)


def _change(document: Any, r: random.Random) -> None:
    places = list(_places(document))
    *above, last = r.choice(places)
    parent = _at(document, above)
    match r.choice(["replace", "replace", "replace", "drop", "copy", "add"]):
        case "replace":
            parent[last] = r.choice(ODD)
        case "drop":
            del parent[last]
        case "copy":
            parent[last] = json.loads(json.dumps(_at(document, r.choice(places)), default=str))
        case _ if isinstance(parent, dict):
            parent[r.choice(["x", 1, None, "name", True, "arms", "sweep"])] = r.choice(ODD)
        case _:
            parent.append(r.choice(ODD))


def _places(document: Any, path: tuple[Any, ...] = ()) -> Any:
    entries = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in entries:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from _places(value, (*path, key))


def _at(document: Any, path: Any) -> Any:
    for key in path:
        document = document[key]
    return document


def damage(path: Path, r: random.Random) -> None:
    """Truncate, flip or remove a file, or write another content of its kind into it."""
    content = path.read_bytes()
    match r.choice(["cut", "flip", "remove", "inside", "inside", "inside", "inside"]):
        case "cut":
            path.write_bytes(content[: r.randrange(len(content) + 1)])
        case "flip":
            path.write_bytes(flipped(content, r))
        case "remove":
            path.unlink()
        case _ if path.suffix == ".parquet":
            _spoil_table(path, r)
        case _ if path.suffix in (".json", ".yaml"):
            document = yaml.safe_load(content)
            spoil(document, r)
            as_json = json.dumps(document, default=str, skipkeys=True)
            path.write_text(as_json if path.suffix == ".json" else dumped(document))
        case _:
            path.write_bytes(b"")


def dumped(document: Any) -> str:
    return str(yaml.safe_dump(document, allow_unicode=True, sort_keys=False))


def flipped(content: bytes, r: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(r.choice([1, 5, 50]) if changed else 0):
        changed[r.randrange(len(changed))] = r.randrange(256)
    return bytes(changed)


def _spoil_table(path: Path, r: random.Random) -> None:
    table = pq.read_table(path)
    place = r.randrange(table.num_columns)
    name, count = table.column_names[place], len(table)
    match r.choice(["drop", "rename", "empty", "type", "text", "values", "values"]):
        case "drop":
            table = table.drop_columns([name])
        case "rename":
            table = table.rename_columns([f"{each}?" if each == name else each for each in table.column_names])
        case "empty":
            table = table.slice(0, 0)
        case "type":
            value = r.choice([None, "a", 1, [1], {"a": 1}, b"\xff", float("nan")])
            table = table.set_column(place, name, pa.array([value] * count))
        case "text":
            broken = pa.Array.from_buffers(pa.string(), count, pa.array([b"\xff\xfe"] * count).buffers())
            table = table.set_column(place, name, broken)
        case _:
            rows = table.to_pylist()
            for row in rows if r.random() < 0.5 else rows[:1]:
                row[name] = r.choice(CELLS)
            with suppress(pa.ArrowException, OverflowError):
                table = pa.Table.from_pylist(rows, schema=table.schema)
    pq.write_table(table, path)
