"""Measurements of a reproduction: our values of a paper's figures, by seed, from a finished sweep."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

from rayfed.core.documents import load_yaml
from rayfed.errors import UserError, nearest
from rayfed.metrics.known import METRICS
from rayfed.reproductions.reading import Figure, Group, Where
from rayfed.reproductions.records import Value
from rayfed.results.loading import Sweep
from rayfed.store.schemas import TABLES

Row = Mapping[str, Any]
Measured = dict[int, dict[str, dict[str, Value]]]
"""Seed -> key of a group -> label of a figure -> our value."""


def measure(groups: Sequence[Group], sweep: Sweep) -> Measured:
    """Return our values of all figures of some groups, by seed. A figure whose trials failed has no value.

    Raises `UserError` if no trial has finished, or if no row fits the `where` of a figure.
    """
    outcomes = sweep.outcomes().to_pylist()
    if not any(row["status"] == "finished" for row in outcomes):
        reason = next((row["error"] for row in outcomes if row["error"]), "they are not finished")
        raise UserError(f"none of the sweep's trials has finished: {reason}")
    measured: Measured = {row["seed"]: {} for row in outcomes if row["status"] == "finished"}
    for group in groups:
        for figure in group.figures:
            for seed, value in _by_seed(group, figure, sweep, outcomes).items():
                measured[seed].setdefault(group.key, {})[figure.label] = value
    return measured


def _by_seed(group: Group, figure: Figure, sweep: Sweep, outcomes: Sequence[Row]) -> Mapping[int, Value]:
    """Return a figure's value of each seed: a number, or the points of a curve that have both coordinates."""
    if group.along is None:
        return _numbers(group, figure, figure.where, group.measure, sweep, outcomes)
    curves: dict[int, list[tuple[float, float]]] = {}
    for point in figure.points:
        where = {**figure.where, **point}
        across = _numbers(group, figure, where, group.along, sweep, outcomes)
        up = _numbers(group, figure, where, group.measure, sweep, outcomes)
        for seed in across.keys() & up.keys():
            curves.setdefault(seed, []).append((across[seed], up[seed]))
    return {seed: tuple(sorted(points)) for seed, points in curves.items()}


def _numbers(
    group: Group, figure: Figure, where: Where, column: str, sweep: Sweep, outcomes: Sequence[Row]
) -> dict[int, float]:
    """Return the value of a column in the selected rows, by seed."""
    columns = {*outcomes[0], *(TABLES[group.table].names if group.table in TABLES else ())}
    for name in where:
        if name not in columns:
            known_as = nearest(name, sorted(columns))
            raise UserError(f"figure '{figure.label}': there is no column or swept field '{name}': {known_as}")
    selected = [row for row in outcomes if _fits(row, where, outcomes[0].keys())]
    if not selected:
        raise UserError(f"figure '{figure.label}' fits no row of the sweep: {_nearest(where, outcomes)}")
    rows = [row for row in selected if row["status"] == "finished"]
    if group.table != "outcomes":
        rows = _rows_of_trials(group.table, where, sweep, rows)
    by_seed: dict[int, list[Row]] = {}
    for row in rows:
        if _counted(group, column, row) is not None:
            by_seed.setdefault(row["seed"], []).append(row)
    scale = group.scale if column == group.measure else 1.0
    return {seed: scale * _reduced(group, column, mine) for seed, mine in by_seed.items()}


def _rows_of_trials(table: str, where: Where, sweep: Sweep, rows: Sequence[Row]) -> list[Row]:
    """Return the selected rows of a table of the trials, each with the outcome and the seed of its trial."""
    found: list[Row] = []
    for outcome in {row["run"]: row for row in rows}.values():
        for row in sweep.trial_of(outcome["run"]).table(table).to_pylist():
            if _fits(row, where, row.keys()):
                found.append({**outcome, **row, "seed": outcome["seed"]})
    return found


def _reduced(group: Group, column: str, rows: Sequence[Row]) -> float:
    if group.take in ("first", "last"):
        end = (min if group.take == "first" else max)(row["round"] for row in rows)
        rows = [row for row in rows if row["round"] == end]
    values = [value for row in rows if (value := _counted(group, column, row)) is not None]
    return {"min": min, "max": max}.get(group.take, fmean)(values)


def _counted(group: Group, column: str, row: Row) -> float | None:
    """Return a row's value, or None without one. A metric is limited to its ceiling."""
    value = row[column]
    if column == group.measure and group.at_least is not None:
        return float(value is not None and value >= group.at_least)
    if column == group.measure and group.at_most is not None:
        return float(value is not None and value <= group.at_most)
    if value is None:
        return None
    return min(float(value), METRICS[column].ceiling) if column in METRICS else float(value)


def _fits(row: Row, where: Mapping[str, Any], columns: Collection[str]) -> bool:
    """Return whether a row has all values of `where` in the columns of its table."""
    return all(_is(row[column], value) for column, value in where.items() if column in columns)


def _is(value: Any, wanted: Any) -> bool:
    """Return whether a value is the wanted one. A section, stored as text, must contain all wanted fields."""
    if not isinstance(wanted, dict):
        return bool(value == wanted)
    section = load_yaml(value) if isinstance(value, str) else None
    return isinstance(section, dict) and all(section.get(key) == one for key, one in wanted.items())


def _nearest(where: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return an error message for wanted values that no row has."""
    for column, value in where.items():
        known = {row.get(column) for row in rows}
        if not any(_is(one, value) for one in known):
            return f"no row has {column} '{value}': {nearest(str(value), sorted(map(str, known)))}"
    return "no row has all of " + ", ".join(f"{column} {value}" for column, value in where.items())
