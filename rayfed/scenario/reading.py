"""From the YAML that a user writes to a scenario, or to all of its mistakes at once, each with its line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rayfed.errors import ScenarioError
from rayfed.scenario.paths import put
from rayfed.scenario.problems import Place, Problem, component_problems, joint_problems, repeated, schema_problems
from rayfed.scenario.sections import Scenario
from rayfed.scenario.sweep_problems import sweep_problems


def load(source: str | Path, changes: Sequence[str] = ()) -> Scenario:
    """Read a scenario file and check it whole.

    `changes` are `path.to.field=value` with the value in YAML, as `--set` gives them. Raises `ScenarioError` with every
    problem of the file.
    """
    try:
        text = Path(source).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ScenarioError(f"{source}: no such scenario file; `rayfed new NAME` writes one to start from") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{source}: cannot be read as a text file: {error}") from error
    return parse(text, str(source), changes)


def parse(text: str, origin: str = "scenario", changes: Sequence[str] = ()) -> Scenario:
    """Check the text of a scenario; see `load`."""
    try:
        raw, found = _read(text)
    except ValueError as error:
        raise ScenarioError(f"{origin}: not valid YAML: {error}") from error
    lines = dict(found)
    if not isinstance(raw, dict):
        raise ScenarioError(f"{origin}: not a scenario: expected `key: value` lines, found {type(raw).__name__}")
    for change in changes:
        _apply(raw, change)
    return check(raw, origin, lines, tuple(repeated(found)))


def check(
    document: dict[str, Any], origin: str, lines: Mapping[Place, int] | None = None, known: Sequence[Problem] = ()
) -> Scenario:
    """The scenario of a document that was read, from a file with these `lines` and problems, or that was made.

    Raises `ScenarioError` with every problem.
    """
    problems = [*known, *schema_problems(document), *component_problems(document)]
    if not problems:
        scenario = Scenario.model_validate(document)
        problems = [*joint_problems(scenario), *sweep_problems(scenario)]
    if problems:
        raise ScenarioError(_report(origin, problems, lines))
    return scenario


def _read(text: str) -> tuple[Any, list[tuple[Place, int]]]:
    """A YAML document, and the lines of its paths; raises `ValueError` for what is none, or refers to itself."""
    try:
        return yaml.safe_load(text), list(_lines(yaml.compose(text, Loader=yaml.SafeLoader)))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError("an anchor refers to itself, or the nesting is too deep") from None


def _lines(node: yaml.Node | None, path: Place = ()) -> Iterator[tuple[Place, int]]:
    """The line, from 1, of every path in the document."""
    if node is None:
        return
    yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line + 1
            yield from (entry for entry in _lines(value, (*path, key.value)) if entry[0] != (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _lines(value, (*path, index))


def _apply(raw: dict[str, Any], change: str) -> None:
    """Set one `path.to.field=value` in the raw document; list items go by their index or name."""
    path, equals, text = change.partition("=")
    if not equals or not path:
        raise ScenarioError(f"--set {change}: expected path.to.field=value, for example training.lr=0.05")
    try:
        value, _ = _read(text)
    except ValueError as error:
        raise ScenarioError(f"--set {change}: the value is not valid YAML: {error}") from error
    try:
        put(raw, path, value)
    except KeyError:
        raise ScenarioError(f"--set {change}: the scenario has no place '{path}' to set") from None


def _report(origin: str, problems: Sequence[Problem], lines: Mapping[Place, int] | None) -> str:
    """All problems, one a line, in the order of the file; of a document that has none, in the order found."""

    def line_of(path: Place) -> int:
        assert lines is not None
        while path and path not in lines:
            path = path[:-1]
        return lines.get(path, 1)

    ordered = problems if lines is None else sorted(problems, key=lambda p: line_of(p.path))
    count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
    places = ["" if lines is None else f"line {line_of(p.path)}: " for p in ordered]
    rows = [
        f"  {place}{'.'.join(map(str, p.path)) or 'scenario'}: {p.message}"
        for place, p in zip(places, ordered, strict=True)
    ]
    return "\n".join([f"{origin}: {count}", *rows])
