"""Redacted report of a run or sweep, written from a copy of the folder without data of clients.

In addition to the omissions of a shared copy (`rayfed.report.export.share`), a redacted copy has no labels and no
classes of clients. It keeps only words that rayfed defines, and the names of arms, attacks and the scenario.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from tempfile import TemporaryDirectory
from typing import Any

from rayfed import registry
from rayfed.core.documents import dump_yaml
from rayfed.evidence.verdicts import VERDICTS, read_evidence
from rayfed.report.export.share import copy_shareable, rewrite_columns
from rayfed.report.html.run import write_report
from rayfed.report.html.sweep import write_sweep_report
from rayfed.report.text.formats import LEFT_OUT
from rayfed.results.loading import Results, Sweep
from rayfed.results.sweep_folder import OUTCOMES_FILE, SweepFolder
from rayfed.scenario.editors import json_schema
from rayfed.store.finding import Finding
from rayfed.store.folder import REPORT, SCENARIO, RunFolder
from rayfed.store.typed import table_from

REDACTED = "report-redacted.html"
_DROPPED = ("partition", "scores", "private")
"""Tables on clients' data that a redacted copy leaves out: classes, scores of validators, private layers."""
_WORD = re.compile(r"[^\s,()+]+")
_KEPT = ("arm", "attack", "status", "trial", "run", "verdict", "result", "doubt")
"""Columns of the outcomes with names of the scenario or values of rayfed only."""


def write_redacted(results: Results) -> str:
    """Write a run or sweep as `report-redacted.html` and return its path or URL; raise as `write_report` does."""
    with redact(results) as copy:
        if isinstance(results, Sweep):
            write_sweep_report(SweepFolder(copy), redacted=True)
        else:
            write_report(copy, redacted=True)
        results.folder.write_text(REDACTED, copy.read_text(REPORT))
    return f"{results.folder.url}/{REDACTED}"


@contextmanager
def redact(results: Results) -> Iterator[RunFolder]:
    """Yield a temporary redacted copy of a run or sweep."""
    with TemporaryDirectory() as place, copy_shareable(results, f"{place}/copy") as copy:
        if isinstance(results, Sweep):
            sweep = SweepFolder(copy)
            for name in sweep.trial_names():
                _redact(sweep.trial(f"trials/{name}"))
        _redact(copy)
        yield copy


def _redact(folder: RunFolder) -> None:
    """Remove information on clients' data from a copy.

    Its verdicts are those of the run, because the remaining values can show less leakage.
    """
    verdicts = _verdicts(folder) if folder.parts("attacks") else []
    for name in (name for table in _DROPPED for name in folder.parts(table)):
        folder.remove(name)
    numbers: dict[int, int] = {}
    for name in folder.parts("attacks"):
        same = {column: lambda label: numbers.setdefault(label, len(numbers)) for column in ("true_label", "label")}
        folder.write_bytes(name, rewrite_columns(folder, name, same | {"columns": _numbered}, ["columns"]))
    if folder.exists("status.json"):  # entries of settings that were not run have their values
        known = {key: value for key, value in folder.read_mapping("status.json").items() if key != "unplayed"}
        folder.write_text("status.json", json.dumps(known, indent=2))
    scenario = folder.read_mapping(SCENARIO)
    words = _vocabulary(frozenset(_texts(scenario)))
    if folder.exists(OUTCOMES_FILE):
        columns = [column for column in SweepFolder(folder).outcomes().column_names if column not in _KEPT]
        known = dict.fromkeys(columns, partial(_text, words))
        folder.write_bytes(OUTCOMES_FILE, rewrite_columns(folder, OUTCOMES_FILE, known))
    folder.write_text(SCENARIO, dump_yaml(_known(words, scenario)))
    if verdicts:
        folder.write_part(VERDICTS, 0, table_from(verdicts, Finding))


def _verdicts(folder: RunFolder) -> list[Finding]:
    """Return the verdicts of a run with numbers instead of names of columns, and without baselines of columns."""
    evidence = read_evidence(folder)
    numbers: dict[str, str] = {}
    for row in evidence.attacks:
        columns = row["columns"] or ()
        for column, numbered in zip(columns, _numbered(columns), strict=True):
            numbers.setdefault(column["name"], numbered["name"])
    return [_without_columns(finding, numbers) for finding in evidence.rows]


def _without_columns(finding: Finding, numbers: Mapping[str, str]) -> Finding:
    if finding.part is None or not finding.part.columns:
        return finding
    columns = tuple(column._replace(name=numbers[column.name], baseline=None) for column in finding.part.columns)
    return replace(finding, part=replace(finding.part, columns=columns, baseline=None))


def _numbered(columns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the columns of a record with numbers instead of names, and without baselines."""
    return [{**column, "name": f"column {place}", "guess": None} for place, column in enumerate(columns, 1)]


def _known(words: frozenset[str], value: Any, path: tuple[str, ...] = ()) -> Any:
    """Return a part of a scenario with only these words, and the names of arms and attacks."""
    if isinstance(value, Mapping):
        return {_key(words, key, path): _known(words, inner, (*path, str(key))) for key, inner in value.items()}
    if isinstance(value, list):
        return [_known(words, inner, path) for inner in value]
    named = path in (("name",), ("attacks", "name"), ("attacks", "label"))
    parts = path[:1] + path[2:] if path[:1] == ("arms",) else path
    plain = value is None or isinstance(value, int | float)
    ours = plain and all(_is_ours(words, part) for part in parts)
    return value if named or ours or value in words else LEFT_OUT


def _is_ours(words: frozenset[str], key: str) -> bool:
    """Return whether rayfed defines a key of a scenario, or all parts of the path of a field."""
    return all(part in words or part.isdecimal() for part in key.split("."))


def _key(words: frozenset[str], key: Any, path: tuple[str, ...]) -> Any:
    """Return a key of a scenario if rayfed defines it, or if it names an arm or a swept field; otherwise `LEFT_OUT`."""
    return key if path in (("arms",), ("sweep", "fields")) or _is_ours(words, str(key)) else LEFT_OUT


def _text(words: frozenset[str], value: Any) -> Any:
    """Return a text without words that rayfed does not define; other values are unchanged."""

    def kept(found: re.Match[str]) -> str:
        ours = found[0] in words or re.fullmatch(r"-?[\d.]+(e-?\d+)?|None|True|False|→", found[0])
        return found[0] if ours else LEFT_OUT

    return _WORD.sub(kept, value) if isinstance(value, str) else value


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a document and the parts of its keys."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from (*str(key).split("."), *_texts(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value


@cache
def _vocabulary(named: frozenset[str]) -> frozenset[str]:
    """Return the words of rayfed's scenarios: names of components, fields and enumerated values.

    Fields are those of the components in `named` only, because importing all components takes seconds.
    """
    names = (name for kind in registry.KINDS for name in registry.table(kind))
    return frozenset((*names, *_words(json_schema(named))))


def _words(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        yield from schema.get("properties", {})
        yield from (word for word in (schema.get("const"), *schema.get("enum", ())) if isinstance(word, str))
        for inner in schema.values():
            yield from _words(inner)
    elif isinstance(schema, Sequence) and not isinstance(schema, str):
        for inner in schema:
            yield from _words(inner)
