"""How a sweep looks for values, and when it gives a trial up: Tune's own searchers and schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial
from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule, TrialScheduler
from ray.tune.search.optuna import OptunaSearch

from rayfed import seeds
from rayfed.analysis.outcomes import MEASURES, held
from rayfed.scenario import Scenario, Sweep
from rayfed.scenario.sweep import Range
from rayfed.scenario.trials import fields_of

_STUDY = "rayfed"


@dataclass(frozen=True)
class Tried:
    """A setting that Optuna has the result of."""

    arm: str
    values: Mapping[str, Any]
    objectives: Sequence[float]


def scheduler(sweep: Sweep, rounds: int) -> TrialScheduler | None:
    """What stops trials early, by their test accuracy."""
    common: dict[str, Any] = {"time_attr": "rounds", "metric": "test_accuracy", "mode": "max"}
    if sweep.scheduler == "asha":
        # what reaches max_t is stopped: no trial does, for each ends by itself
        return ASHAScheduler(**common, max_t=rounds + 1, grace_period=min(sweep.grace, rounds))
    if sweep.scheduler == "median":
        return MedianStoppingRule(**common, grace_period=sweep.grace)
    return None


def search(scenario: Scenario, sweep: Sweep, tried: Mapping[int, Tried], begun: int) -> OptunaSearch:
    """Optuna, which goes on from what was tried: index of a setting -> its result.

    The numbers below `begun` are not given again: a setting without a result counts as failed.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    modes: list[Literal["maximize", "minimize"]] = [
        "maximize" if MEASURES[name].higher_is_better else "minimize" for name in sweep.objectives
    ]
    storage = optuna.storages.InMemoryStorage()
    study = optuna.create_study(storage=storage, study_name=_STUDY, directions=modes)
    for index in range(begun):
        study.add_trial(_known(scenario, tried[index]) if index in tried else create_trial(state=TrialState.FAIL))
    return OptunaSearch(
        _Space(scenario, sweep),
        metric=list(sweep.objectives),
        mode=[mode[:3] for mode in modes],
        sampler=optuna.samplers.TPESampler(seed=seeds.number(scenario.seed, "search", len(tried)) % 2**32),
        storage=storage,
        study_name=_STUDY,
    )


@dataclass(frozen=True)
class _Space:
    """Asks Optuna for one setting; a class, for Tune saves its searchers and a function made here cannot be."""

    scenario: Scenario
    sweep: Sweep

    def __call__(self, trial: optuna.Trial) -> dict[str, Any]:
        arm = trial.suggest_categorical("arm", self.scenario.written_arms)
        values = {path: _suggested(trial, path, v) for path, v in fields_of(self.scenario, arm).items()}
        return {"index": trial.number, "arm": arm, "values": values, "repeats": list(range(self.sweep.repeats))}


def _suggested(trial: optuna.Trial, path: str, values: list[Any] | Range) -> Any:
    """A value from Optuna, under a name without the slashes that Tune reads as nesting."""
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


def _known(scenario: Scenario, tried: Tried) -> FrozenTrial:
    fields = fields_of(scenario, tried.arm)
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
    """Which of these values it is, as a table holds it."""
    return [str(held(one)) for one in values].index(str(value))


def _name(path: str) -> str:
    return path.replace("/", "|")
