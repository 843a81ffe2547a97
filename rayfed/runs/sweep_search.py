"""Search for a sweep's settings with Optuna."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from rayfed.core import seeds
from rayfed.evidence.outcomes import table_value
from rayfed.metrics.measures import MEASURES
from rayfed.scenario import Scenario, Sweep
from rayfed.scenario.sweep import Range
from rayfed.scenario.trials import select_fields

STUDY = "rayfed"


@dataclass(frozen=True)
class TriedSetting:
    """Finished setting of a sweep, with the measured objectives."""

    arm: str
    values: Mapping[str, Any]
    objectives: Sequence[float]


@dataclass(frozen=True)
class Search:
    """Optuna study that continues from earlier trials, with a function that suggests the next setting."""

    study: optuna.Study
    storage: optuna.storages.InMemoryStorage
    sampler: optuna.samplers.BaseSampler
    setting: Callable[[optuna.Trial], dict[str, Any]]


def make_search(scenario: Scenario, tried: Mapping[int, TriedSetting], begun: int) -> Search:
    """Return an Optuna search that continues from the settings `tried` (index -> setting with its objectives).

    New settings are numbered from `begun`. Earlier settings without a result count as failed.
    """
    assert scenario.sweep is not None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    better = [MEASURES[name].higher_is_better for name in scenario.sweep.objectives]
    directions = [StudyDirection.MAXIMIZE if higher else StudyDirection.MINIMIZE for higher in better]
    sampler = optuna.samplers.TPESampler(seed=seeds.derive_integer(scenario.seed, "search", len(tried)) % 2**32)
    storage = optuna.storages.InMemoryStorage()
    study = optuna.create_study(storage=storage, study_name=STUDY, directions=directions, sampler=sampler)
    for index in range(begun):
        study.add_trial(_known(scenario, tried[index]) if index in tried else create_trial(state=TrialState.FAIL))
    return Search(study, storage, sampler, _Space(scenario, scenario.sweep))


@dataclass(frozen=True)
class _Space:
    """Callable that asks Optuna for one setting. It is a class, so that Tune can pickle it."""

    scenario: Scenario
    sweep: Sweep

    def __call__(self, trial: optuna.Trial) -> dict[str, Any]:
        arm = trial.suggest_categorical("arm", self.scenario.written_arms)
        values = {path: _suggested(trial, path, v) for path, v in select_fields(self.scenario, arm).items()}
        return {"index": trial.number, "arm": arm, "values": values, "repeats": list(range(self.sweep.repeats))}


def _suggested(trial: optuna.Trial, path: str, values: list[Any] | Range) -> Any:
    """Return a suggested value; its name has no slashes, because Tune would interpret them as nesting."""
    distribution, name = _distribution(values), _name(path)
    if isinstance(distribution, CategoricalDistribution):
        return values[trial.suggest_categorical(name, distribution.choices)]  # type: ignore[index]
    suggest = trial.suggest_int if isinstance(distribution, IntDistribution) else trial.suggest_float
    return suggest(name, distribution.low, distribution.high, log=distribution.log)  # type: ignore[attr-defined]


def _distribution(values: list[Any] | Range) -> BaseDistribution:
    if not isinstance(values, Range):
        return CategoricalDistribution(range(len(values)))
    log = values.scale == "log"
    if values.whole:
        return IntDistribution(round(values.low), round(values.high), log=log)
    return FloatDistribution(values.low, values.high, log=log)


def _known(scenario: Scenario, tried: TriedSetting) -> FrozenTrial:
    fields = select_fields(scenario, tried.arm)
    params = {
        _name(path): _index(values, tried.values[path]) if isinstance(values, list) else tried.values[path]
        for path, values in fields.items()
    }
    distributions = {_name(path): _distribution(values) for path, values in fields.items()}
    return create_trial(
        values=list(tried.objectives),
        params={"arm": tried.arm, **params},
        distributions={"arm": CategoricalDistribution(scenario.written_arms), **distributions},
    )


def _index(values: list[Any], value: Any) -> int:
    """Return the index of a stored value in a list of values."""
    return [str(table_value(one)) for one in values].index(str(value))


def _name(path: str) -> str:
    return path.replace("/", "|")
