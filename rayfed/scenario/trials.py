"""Trials of a sweep, each a scenario with one arm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, floor, log, prod
from typing import Any

import numpy as np

from rayfed.errors import ScenarioError
from rayfed.scenario.paths import find_place, set_field
from rayfed.scenario.reading import check_scenario
from rayfed.scenario.sections import Scenario
from rayfed.scenario.sweep import Range, Sweep

Values = dict[str, Any]
"""Path of a swept field -> its value."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: a setting of the swept fields, and a repeat (seed)."""

    index: int
    """Number of the setting in the sweep, from 0; equal for all repeats of a setting."""
    arm: str | None
    """Name of the arm; None: all arms of the scenario."""
    values: Values
    repeat: int

    @property
    def name(self) -> str:
        """Return the name of the trial's run folder."""
        return f"{self.index:04d}-{self.repeat}"


def plan_trials(scenario: Scenario) -> list[Trial]:
    """Return all trials of a sweep by grid or random search, without duplicate settings.

    Raises `ScenarioError` with all problems of a setting whose values are invalid in the scenario.
    """
    sweep = _sweep(scenario)
    drawn = _grid(scenario) if sweep.search == "grid" else _draws(scenario, sweep.samples or 1)
    settings = list({repr(setting): setting for setting in drawn}.values())
    trials = [
        Trial(index, arm, values, repeat)
        for index, (arm, values) in enumerate(settings)
        for repeat in range(sweep.repeats)
    ]
    for trial in trials[:: sweep.repeats]:
        make_trial_scenario(scenario, trial)
    return trials


def check_values(scenario: Scenario) -> None:
    """Raise `ScenarioError` if a listed value, or an end of a range, of a swept field is invalid in the scenario."""
    for arm in scenario.written_arms:
        for path, values in select_fields(scenario, arm).items():
            for value in values if isinstance(values, list) else [_as(values, values.low), _as(values, values.high)]:
                make_trial_scenario(scenario, Trial(0, arm, {path: value}, 0))


def plan_largest(scenario: Scenario) -> list[Trial]:
    """Return trials of all arms together with the largest number of each swept field, for measuring memory.

    Values that are not numbers are all included, in each combination. If a search tries fewer settings than there are
    combinations, each value is included once. A scenario without a sweep is one trial.
    """
    sweep = Sweep() if scenario.sweep is None else scenario.sweep
    each = [_largest(values) for values in sweep.fields.values()]
    chosen: Iterable[Sequence[Any]] = product(*each)
    if sweep.samples is not None and prod(map(len, each)) > sweep.samples:
        chosen = _each_value_once(each)
    return [Trial(i, None, dict(zip(sweep.fields, values, strict=True)), 0) for i, values in enumerate(chosen)]


def _each_value_once(each: Sequence[list[Any]]) -> Iterator[list[Any]]:
    """Yield combinations in which each value of each field occurs; the last values of shorter lists are repeated."""
    for index in range(max(map(len, each))):
        yield [values[min(index, len(values) - 1)] for values in each]


def _largest(values: list[Any] | Range) -> list[Any]:
    if isinstance(values, Range):
        return [_as(values, values.high)]
    numbers = [value for value in values if type(value) in (int, float)]
    return [value for value in values if type(value) not in (int, float)] + ([max(numbers)] if numbers else [])


def make_trial_scenario(scenario: Scenario, trial: Trial) -> Scenario:
    """Return the scenario of one trial of a sweep, with the trial's arm, field values and seed.

    Raises `ScenarioError` if the values are invalid in the scenario.
    """
    document = scenario.model_dump(mode="json") | {"sweep": None, "seed": scenario.seed + trial.repeat}
    if scenario.arms and trial.arm is not None:
        document["arms"] = {trial.arm: document["arms"][trial.arm]}
    for path, value in trial.values.items():
        arm, rest = scenario.owner_of(path)
        try:
            set_field(document["arms"][arm] if arm is not None else document, rest, value)
        except KeyError as error:
            raise ScenarioError(f"sweep.fields: '{path}' not found in the scenario; {error.args[0]}") from None
    return check_scenario(document, f"sweep trial with {_said(trial)}")


def select_fields(scenario: Scenario, arm: str) -> dict[str, list[Any] | Range]:
    """Return the swept fields that affect an arm, by path: fields of this arm, and fields of all arms."""
    return {path: v for path, v in _sweep(scenario).fields.items() if scenario.owner_of(path)[0] in (None, arm)}


def name_columns(scenario: Scenario, arm: str) -> dict[str, str]:
    """Return a short name of each swept field of an arm, such as `gaussian.sigma`, by the field's path.

    Fields with the same short name keep their paths. Names have no slashes, which Ray Tune interprets as nesting.
    """
    document = scenario.model_dump(mode="json")
    names = {path: _short_name(scenario, document, path) for path in select_fields(scenario, arm)}
    number = Counter(names.values())
    return {path: (name if number[name] == 1 else path).replace("/", "|") for path, name in names.items()}


def _short_name(scenario: Scenario, document: dict[str, Any], path: str) -> str:
    """Return a field's path within its arm, in which the label or name of a list entry replaces list and index."""
    arm, rest = scenario.owner_of(path)
    held: Any = document if arm is None else document["arms"][arm]
    words: list[str] = []
    for key in find_place(held, rest):
        held = held[key]
        if isinstance(key, int):
            words[-1] = held.get("label") or held["name"]
        else:
            words.append(key)
    return ".".join(words)


def _sweep(scenario: Scenario) -> Sweep:
    if scenario.sweep is None:
        raise ScenarioError(f"the scenario {scenario.name} has no `sweep`; add the section, with the fields to vary")
    return scenario.sweep


def _grid(scenario: Scenario) -> Iterator[tuple[str, Values]]:
    for arm in scenario.written_arms:
        fields = {path: v for path, v in select_fields(scenario, arm).items() if not isinstance(v, Range)}
        for chosen in product(*fields.values()):
            yield arm, dict(zip(fields, chosen, strict=True))


def _draws(scenario: Scenario, samples: int) -> Iterator[tuple[str, Values]]:
    generator = np.random.default_rng((scenario.seed, 0x5EEE))
    arms = scenario.written_arms
    for index in range(samples):
        arm = arms[index % len(arms)]
        yield arm, {path: _draw(values, generator) for path, values in select_fields(scenario, arm).items()}


def _draw(values: list[Any] | Range, generator: np.random.Generator) -> Any:
    if not isinstance(values, Range):
        return values[int(generator.integers(len(values)))]
    if values.scale == "log":
        drawn = exp(generator.uniform(log(values.low), log(values.high + values.whole)))
    else:
        drawn = generator.uniform(values.low, values.high + values.whole)
    return min(_as(values, drawn), _as(values, values.high))


def _as(values: Range, drawn: float) -> float:
    return floor(drawn) if values.whole else float(drawn)


def _said(trial: Trial) -> str:
    arm = [f"arm {trial.arm}"] if trial.arm is not None else []
    return ", ".join([*arm, *(f"{path} = {value}" for path, value in trial.values.items())])
