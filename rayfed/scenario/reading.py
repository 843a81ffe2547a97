"""Reading of scenarios: parse YAML, apply `--set` changes, and report all problems with their lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from types import MappingProxyType
from typing import Any

from rayfed.core.documents import Place, read_yaml
from rayfed.core.shipped import scenario_names
from rayfed.errors import ScenarioError, nearest
from rayfed.registry import DOTTED_PATH, FILE_PATH
from rayfed.scenario.components import expand_model, write_out_models
from rayfed.scenario.inputs import Note, find_inputs
from rayfed.scenario.modalities import modality_problems, with_loss, with_metrics, with_tokenizer
from rayfed.scenario.paths import set_field
from rayfed.scenario.problems import (
    JOINT,
    Problem,
    component_problems,
    drop_invalid,
    find_repeated_keys,
    schema_problems,
)
from rayfed.scenario.sections import Scenario
from rayfed.scenario.sweep_problems import sweep_problems

_CODE = DOTTED_PATH, FILE_PATH


def load(source: str | Path, changes: Sequence[str] = (), note: Note = lambda _: None) -> Scenario:
    """Read and check a scenario file, and return the scenario.

    `changes` are strings `path.to.field=value` with the value in YAML, as in `--set`. File names in the scenario are
    relative to its folder, or else to the current folder, for which `note` is called. File names in `changes` are
    relative to the current folder. Raises `ScenarioError` with all problems of the file and the changes.
    """
    raw, found = _document(read_text(source), str(source))
    here = Path.cwd()
    find_inputs(raw, (Path(source).resolve().parent, here), note)
    changed = _change(raw, changes)
    find_inputs(raw, (here,))
    return check_scenario(raw, str(source), dict(found), tuple(find_repeated_keys(found)), changed)


def read_text(source: str | Path) -> str:
    """Return the text of a scenario file; raises `ScenarioError` if the file is missing or not a text file."""
    try:
        return Path(source).read_text(encoding="utf-8")
    except FileNotFoundError:
        named = Path(source).name == str(source) and not Path(source).suffix
        known = f", and no such built-in scenario: {nearest(str(source), scenario_names())}" if named else ""
        shipped = Path(source).stem
        ours = f"`rayfed launch {shipped}` runs the built-in scenario, and " if shipped in scenario_names() else ""
        raise ScenarioError(
            f"{source}: no such scenario file{known}; {ours}`rayfed new NAME` writes a new scenario"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{source}: cannot be read as a text file: {error}") from error


def dotted_paths(text: str, changes: Sequence[str] = ()) -> list[str]:
    """Return all dotted paths and `FILE.py:Name` values in a scenario's text, without importing the modules."""
    try:
        values = [read_yaml(part)[0] for part in (text, *(c.partition("=")[2] for c in changes))]
    except ValueError:
        return []  # `parse` reports it
    found = {text for value in values for text in _texts(value) if any(p.fullmatch(text) for p in _CODE)}
    return sorted(text for text in found if expand_model(text) == text)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def parse(text: str, origin: str = "scenario", changes: Sequence[str] = ()) -> Scenario:
    """Parse and check a scenario's text, and return the scenario; relative paths are not resolved."""
    raw, found = _document(text, origin)
    return check_scenario(raw, origin, dict(found), tuple(find_repeated_keys(found)), _change(raw, changes))


def has_form(text: str, changes: Sequence[str] = ()) -> bool:
    """Return whether a scenario's text follows the schema. Components are not checked, as their import is slow."""
    try:
        return not schema_problems(with_changes(_document(text, "scenario")[0], changes))
    except ScenarioError:
        return False


def _document(text: str, origin: str) -> tuple[dict[str, Any], list[tuple[Place, int]]]:
    """Return the document in a text, and pairs of a path and its line."""
    try:
        raw, found = read_yaml(text)
    except ValueError as error:
        raise ScenarioError(f"{origin}: not valid YAML: {error}") from error
    if raw is None:
        raise ScenarioError(f"{origin}: the file is empty; `rayfed new NAME` writes a new scenario")
    if not isinstance(raw, dict):
        kind = "a list" if isinstance(raw, list) else f"'{shorten(str(raw), 40, placeholder=' ...')}'"
        raise ScenarioError(f"{origin}: not a scenario: expected `key: value` lines, found {kind}")
    return raw, found


def with_changes(document: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Apply `--set` changes to a document, and return the document; raises `ScenarioError` for invalid changes."""
    _change(document, changes)
    return document


def _change(document: dict[str, Any], changes: Sequence[str]) -> dict[Place, str]:
    """Apply changes to a document in place, and return path -> its `--set` text; raises `ScenarioError` if invalid."""
    made: dict[Place, str] = {}
    wrong = []
    for change in changes:
        try:
            made[_apply(document, change)] = f"--set {change}"
        except ScenarioError as error:
            wrong.append(str(error))
    if wrong:
        raise ScenarioError("\n".join(wrong))
    return made


def check_scenario(
    document: dict[str, Any],
    origin: str,
    lines: Mapping[Place, int] | None = None,
    known: Sequence[Problem] = (),
    changed: Mapping[Place, str] = MappingProxyType({}),
) -> Scenario:
    """Check a scenario document, and return the scenario.

    `lines` contains the line of each path, and `known` the problems found earlier. `changed` contains the `--set` text
    of each path that the file did not set. Raises `ScenarioError` with all problems.
    """
    write_out_models(document)
    problems = [*schema_problems(document), *component_problems(document)]
    wrong = bool(problems or known)
    whole = with_loss(with_metrics(with_tokenizer(document)))
    scenario = drop_invalid(whole, [problem.path for problem in problems]) if wrong else Scenario.model_validate(whole)
    if scenario is not None:
        problems += _together(scenario, partial=wrong)
    if scenario is None or problems or known:
        every = [(problem.path, problem.text) for problem in (*known, *problems)]
        raise ScenarioError(_report(origin, known, problems, lines, changed), every)
    return scenario


def _together(scenario: Scenario, partial: bool) -> list[Problem]:
    """Return problems that involve several fields, as far as the valid fields allow."""
    found: list[Problem] = []
    for check_together in (*JOINT, modality_problems, sweep_problems):
        try:
            found.extend(check_together(scenario))
        except AttributeError:  # the check reads a removed field, see `drop_invalid`
            if not partial:
                raise
    return found


def _apply(raw: dict[str, Any], change: str) -> Place:
    """Apply one `path.to.field=value` to a document, and return the path."""
    path, equals, text = change.partition("=")
    if not equals or not path:
        raise ScenarioError(f"--set {change}: expected path.to.field=value, for example training.lr=0.05")
    try:
        value, _ = read_yaml(text)
    except ValueError as error:
        raise ScenarioError(f"--set {change}: the value is not valid YAML: {error}") from error
    try:
        return set_field(raw, path, value)
    except KeyError as error:
        raise ScenarioError(f"--set {change}: '{path}' not found; {error.args[0]}") from None


def _report(
    origin: str,
    known: Sequence[Problem],
    problems: Sequence[Problem],
    lines: Mapping[Place, int] | None,
    changed: Mapping[Place, str],
) -> str:
    """Return a message with one problem per line, in the order of the file.

    Problems of `--set` changes come last, after the text of the change.
    """

    def change(path: Place) -> str:
        inside = (changed[place] for place in changed if path[: len(place)] == place)
        made = (changed[place] for place in changed if place[: len(path)] == path and path not in (lines or ()))
        return next(inside, "") or next(made, "")

    def line_of(path: Place) -> int:
        assert lines is not None
        while path and path not in lines:
            path = path[:-1]
        return lines.get(path, 1)

    found = [(problem, "") for problem in known] + [(problem, change(problem.path)) for problem in problems]
    found.sort(key=lambda one: (one[1] != "", 0 if lines is None or one[1] else line_of(one[0].path)))
    rows = []
    for problem, made in found:
        place = made or ("" if lines is None else f"line {line_of(problem.path)}")
        field = ".".join(map(str, problem.path)) or "scenario"
        wanted = f" (or --set {field}=VALUE): {problem.wanted}" if problem.wanted else ""
        rows.append(f"  {place}{': ' * bool(place)}{field}: {problem.message}{wanted}")
    after = f" after {', '.join(dict.fromkeys(changed.values()))}" if changed else ""
    return "\n".join([f"{origin}{after}: {len(rows)} problem{'s' * (len(rows) > 1)}", *rows])
