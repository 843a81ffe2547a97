"""Measurements of a reproduction: our values of a paper's figures, by seed, from a finished sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from rayfed.core.documents import load_yaml
from rayfed.errors import UserError, nearest
from rayfed.evidence.settings import Estimate, estimate
from rayfed.metrics.known import METRICS
from rayfed.reproductions.reading import Figure, Group
from rayfed.results.loading import Sweep
from rayfed.store.schemas import TABLES

Row = Mapping[str, Any]


def measure(groups: Sequence[Group], sweep: Sweep) -> Measured:
    """Return our values of all figures of some groups, by seed. A figure whose trials failed has no value.

    label: str
    printed: float
    """The figure as the paper prints it."""
    paper: float
    """The paper's figure, divided by that of the reference if the group is relative."""
    ours: Estimate | None
    """Our estimate; None if not measured, see `why`."""
    ours_true: float | None = None
    """Our mean in true arithmetic (`Group.true_measure`); None if `ours` is in true arithmetic already."""
    default_attack: float | None = None
    """Mean of `Figure.default_attack` in true arithmetic; None if the figure has none."""
    why: str = ""
    by_seed: Mapping[int, float] = field(default_factory=dict)
    """Repeat -> our value. Equal repeats of two figures have the same seed, weights and attacked clients."""


def measured(group: Group, sweep: Sweep) -> list[Finding]:
    """Return the findings of a group: each value of the paper with our estimate, in order.

    A figure whose trials failed has no estimate. Raises `UserError` if no trial has finished, or if no row fits the
    `where` of a figure.
    """
    ended = sweep.outcomes().to_pylist()
    if not any(row["status"] == "finished" for row in ended):
        said = next((row["error"] for row in ended if row["error"]), "they are not finished")
        raise UserError(f"none of the sweep's trials has finished: {said}")
    found = [_by_repeat(group, figure, sweep) for figure in group.figures]
    reference = dict(zip((f.label for f in group.figures), zip(group.figures, found, strict=True), strict=True))
    beneath = reference.get(group.relative_to or "")
    findings = [_finding(group, figure, values, beneath) for figure, values in zip(group.figures, found, strict=True)]
    return [_with_context(group, figure, sweep, each) for figure, each in zip(group.figures, findings, strict=True)]


def _finding(
    group: Group, figure: Figure, values: Mapping[int, float], beneath: tuple[Figure, Mapping[int, float]] | None
) -> Finding:
    paper = figure.paper
    if beneath is not None:
        paper /= beneath[0].paper
        values = {repeat: v / beneath[1][repeat] for repeat, v in values.items() if beneath[1].get(repeat)}
    ours = estimate([values[repeat] for repeat in sorted(values)])
    if ours is None:
        why = f"the reference '{group.relative_to}' has no finished trial, or is 0"
        why = "not measured: no trial has finished" if beneath is None else why
        return Finding(figure.label, figure.paper, paper, None, why=why)
    return Finding(figure.label, figure.paper, paper, ours, by_seed=values)


def _with_context(group: Group, figure: Figure, sweep: Sweep, finding: Finding) -> Finding:
    """Return the finding with our mean in true arithmetic and that of the default attack, if there are any."""
    true = group.model_copy(update={"measure": group.true_measure or group.measure})
    default = figure.model_copy(update={"where": figure.where | figure.default_attack})
    return replace(
        finding,
        ours_true=_mean_of_repeats(true, figure, sweep) if group.true_measure else None,
        default_attack=_mean_of_repeats(true, default, sweep) if figure.default_attack else None,
    )


def _mean_of_repeats(group: Group, figure: Figure, sweep: Sweep) -> float | None:
    """Return our mean over the seeds, None if nothing was measured."""
    values = _by_repeat(group, figure, sweep)
    return fmean(values.values()) if values else None


def _by_repeat(group: Group, figure: Figure, sweep: Sweep) -> dict[int, float]:
    """Return the value of each repeat."""
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


def _counted(group: Group, row: Row) -> float | None:
    """Return a row's value, or None without one. A metric is limited to its ceiling."""
    value = row[group.measure]
    if group.at_least is not None:
        return float(value is not None and value >= group.at_least)
    if column == group.measure and group.at_most is not None:
        return float(value is not None and value <= group.at_most)
    if value is None:
        return None
    return min(float(value), METRICS[group.measure].ceiling) if group.measure in METRICS else float(value)


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
