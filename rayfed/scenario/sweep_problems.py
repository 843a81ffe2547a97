"""Checks of the section `sweep` of a scenario."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TypeAlias

from rayfed.errors import nearest
from rayfed.metrics.measures import MEASURES
from rayfed.scenario.problems import Problem
from rayfed.scenario.sections import Scenario
from rayfed.scenario.sweep import Range, Sweep
from rayfed.store.schemas import OUTCOME_COLUMNS

Found: TypeAlias = Iterator[tuple[tuple[str, ...], str]]
"""Pairs of a field's path in the section and the error message."""


def sweep_problems(s: Scenario) -> Iterator[Problem]:
    """Yield problems of a scenario's section `sweep` that involve several fields."""
    if s.sweep is None:
        return
    problems = _of_fields(s, s.sweep), _of_samples(s.sweep), _of_objectives(s, s.sweep), _of_company(s, s.sweep)
    for path, message in chain(*problems):
        yield Problem(path=("sweep", *path), message=message)


def _of_fields(s: Scenario, sweep: Sweep) -> Found:
    if not sweep.fields and (sweep.repeats == 1 or sweep.search != "grid"):
        yield (
            ("fields",),
            "no field varies; give a field and a list of values, or set `repeats` for several seeds",
        )
    for path, values in sweep.fields.items():
        if path.startswith("arms.") and s.owner_of(path)[0] is None:
            known = path.removeprefix("arms.") in s.arms
            message = f"unknown arm; {nearest(path.split('.')[1], list(s.arms))}"
            yield (
                ("fields", path),
                "give a field of the arm, such as `defences`" if known else message,
            )
        if "." not in path and path in (*OUTCOME_COLUMNS, "arms", "attacks", "opponents"):
            yield (
                ("fields", path),
                "cannot vary as a whole; give a field of this section, or write an arm for each variant",
            )
        if path.partition(".")[0] in ("sweep", "seed", "name", "output", "resources"):
            yield ("fields", path), "cannot vary; to vary the seed, set `repeats`"
        if isinstance(values, Range):
            for message in _of_range(values, sweep):
                yield ("fields", path), message


def _of_range(values: Range, sweep: Sweep) -> Iterator[str]:
    if values.low >= values.high or (values.scale == "log" and values.low <= 0):
        yield f"found {values.low:g} and {values.high:g}; expected low < high, and low above 0 on a log scale"
    if values.whole and (values.low % 1 or values.high % 1):
        yield f"found {values.low:g} and {values.high:g}; expected whole numbers"
    if sweep.search == "grid":
        yield "a grid needs a list of values; give a list, or set `search` to random or optuna"


def _of_samples(sweep: Sweep) -> Found:
    if (sweep.search == "grid") != (sweep.samples is None):
        yield (
            ("samples",),
            "a grid search tries all settings; remove `samples`"
            if sweep.search == "grid"
            else "required by a random or optuna search; give the number of settings to try",
        )


def _of_objectives(s: Scenario, sweep: Sweep) -> Found:
    for name in sweep.objectives:
        if name not in MEASURES:
            message = f"found '{name}'; {nearest(name, list(MEASURES))}"
        elif name == "pmm" or MEASURES[name].proved:
            message = f"{name} is not available per trial; use test_accuracy, or a measure of leakage"
        elif sweep.search == "optuna" and MEASURES[name].kind == "leakage" and not s.attacks:
            message = f"{name} cannot be measured without attacks; add `attacks` to the scenario"
        else:
            continue
        yield ("objectives",), message


def _of_company(s: Scenario, sweep: Sweep) -> Found:
    """Yield incompatible combinations of trackers and schedulers."""
    if "api_key" in sweep.trackers.get("wandb", {}):
        message = "the key would be written to every report; set the environment variable WANDB_API_KEY instead"
        yield ("trackers", "wandb", "api_key"), message
    if sweep.scheduler and s.opponents:
        yield (
            ("scheduler",),
            "needs one training per trial, but `opponents` gives several; remove `scheduler` or `opponents`",
        )
    if sweep.search == "optuna" and sweep.scheduler and sweep.repeats > 1:
        yield (
            ("scheduler",),
            "optuna uses the mean of all repeats, which a scheduler would stop; remove `scheduler` or `repeats`",
        )
