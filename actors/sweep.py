"""Execution of sweeps on Ray Tune: parallel trials, stopped early by a scheduler and logged by trackers."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule, TrialScheduler

from actors.cluster import alive, allot_trial, available_gpus, check, check_address, connected
from actors.executor import TrialExecution
from actors.packing import with_measured_shares
from actors.trackers import trackers
from actors.trial import Reporter, own_actor_pool, prepare_process, search_places, with_actors
from rayfed.evidence import outcomes
from rayfed.results.sweep_folder import TRIALS
from rayfed.runs import runner
from rayfed.runs.sweeps import SweepExecution, SweepRecorder, get_sweep_section, make_trials, measure_objectives
from rayfed.scenario import Scenario, Sweep
from rayfed.scenario.trials import Trial, make_trial_scenario, name_columns

if TYPE_CHECKING:
    from ray.tune.search.optuna import OptunaSearch

_LOST_PROCESSES = 3
"""Number of times that a trial is continued after its process has died."""
_TUNE = "tune"
"""Subfolder of the sweep's folder for the files of Tune and TensorBoard."""


@dataclass(frozen=True)
class TuneExecution:
    """Function object that runs sweeps on Ray: a connected cluster, the one at `address`, or a new local Ray."""

    address: str | None = None

    def num_gpus(self, scenario: Scenario) -> dict[str, int]:
        """Return the number of GPUs that each kind of actor may use, in the cluster or on this machine."""
        return available_gpus(self.address, scenario)

    def __call__(self, recorder: SweepRecorder) -> None:
        """Run the remaining trials of a sweep in parallel, and remove Tune's own files."""
        folder = recorder.folder
        with connected(self.address, recorder.scenario), _quiet_tune():
            scenario = with_measured_shares(recorder.scenario, recorder.progress.note)
            allotment = allot_trial(scenario)
            check(allotment, list(alive().values()))
            with recorder.recording():
                recorder.starting(allotment.environment(), f"each has {allotment.describe()}")
                callback = _Recording(recorder)
                for _ in range(1 + _LOST_PROCESSES):  # with Tune's own retries, a trial may wait forever
                    callback.lost = []
                    _tuner(scenario, recorder, callback).fit()
                    if not callback.lost:
                        break
                callback.give_up()
        if "tensorboard" not in get_sweep_section(scenario).trackers:  # Tune's own state is not needed to continue
            folder.files.fs.rm(f"{folder.files.root}/{_TUNE}", recursive=True)


def on_tune(address: str | None = None) -> SweepExecution:
    """Return a function that runs sweeps on Ray: a connected cluster, the one at `address`, or a new local Ray.

    Raises `UserError` for an address of Ray's client.
    """
    check_address(address)
    return TuneExecution(address)


def _tuner(scenario: Scenario, recorder: SweepRecorder, callback: _Recording) -> tune.Tuner:
    """Return a tuner for the trials that have no row yet, each with the scenario's actors."""
    folder, section = recorder.folder, get_sweep_section(scenario)
    planned = recorder.trials is not None
    return tune.Tuner(
        with_actors(_trainable(scenario, recorder), allot_trial(scenario)),
        param_space=make_space(scenario, recorder.settings) if planned else None,
        tune_config=tune.TuneConfig(
            search_alg=None if planned else _search(recorder),
            scheduler=scheduler(section, scenario.federation.rounds),
            num_samples=1 if planned else recorder.left,
            max_concurrent_trials=section.max_concurrent,
            reuse_actors=True,
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name=_TUNE,
            storage_path=folder.files.root,
            storage_filesystem=PyFileSystem(FSSpecHandler(folder.files.fs)),
            callbacks=[callback, *trackers(section, folder)],
            verbose=0,
        ),
    )


def scheduler(sweep: Sweep, rounds: int) -> TrialScheduler | None:
    """Return the scheduler that stops trials early by their test accuracy; None if the sweep names no scheduler."""
    common: dict[str, Any] = {"time_attr": "rounds", "metric": "test_accuracy", "mode": "max"}
    if sweep.scheduler == "asha":
        # Trials are stopped at max_t. None reaches it, as each ends by itself before.
        return ASHAScheduler(**common, max_t=rounds + 1, grace_period=min(sweep.grace, rounds))
    if sweep.scheduler == "median":
        return MedianStoppingRule(**common, grace_period=sweep.grace)
    return None


def _search(recorder: SweepRecorder) -> OptunaSearch:
    from ray.tune.search.optuna import OptunaSearch

    from rayfed.runs.sweep_search import STUDY

    found, scenario = recorder.search(), recorder.scenario

    class Suggesting(OptunaSearch):
        """Search by Optuna whose suggestions have the same columns as planned trials."""

        def suggest(self, trial_id: str) -> dict[str, Any] | None:
            """Return the columns of the next setting."""
            suggested = super().suggest(trial_id)
            return None if suggested is None else make_columns(scenario, suggested)

    return Suggesting(
        found.setting,
        metric=list(get_sweep_section(recorder.scenario).objectives),
        mode=[direction.name[:3].lower() for direction in found.study.directions],
        sampler=found.sampler,
        storage=found.storage,
        study_name=STUDY,
    )


def _trainable(scenario: Scenario, recorder: SweepRecorder) -> Any:
    """Return the function that runs a setting's repeats one after another and reports the objectives."""
    folder, places = recorder.folder, search_places()
    allotment, objectives = allot_trial(scenario), get_sweep_section(scenario).objectives

    def trial(config: dict[str, Any]) -> None:
        prepare_process(places)
        played = []
        try:
            for one in _repeats(scenario, config):
                run = folder.trial(f"{TRIALS}/{one.name}")
                execution = TrialExecution(allotment, own_actor_pool())
                runner.launch_in(run, make_trial_scenario(scenario, one), execution, Reporter())
                played.append(outcomes.compute_outcomes(run))
        except Exception as error:  # not raised, because Tune would repeat a trial that fails again
            tune.report({"rounds": 0, "error": f"{type(error).__name__}: {error}"})
            return
        tune.report({"rounds": scenario.federation.rounds} | measure_objectives(played, objectives))

    return trial


class _Recording(tune.Callback):
    """Tune callback that records the ends of trials."""

    def __init__(self, recorder: SweepRecorder) -> None:
        self._recorder = recorder
        self.lost: list[tuple[list[Trial], str]] = []
        """Trials whose process has died, each with Ray's error message."""

    def __getstate__(self) -> dict[str, Any]:
        return {}  # nothing to save: a sweep continues from its outcomes, not from Tune's state

    def on_trial_complete(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **_: Any) -> None:
        """Record that a trial has finished, failed, or been stopped by a scheduler."""
        self._recorder.end(_repeats(self._recorder.scenario, trial.config), (trial.last_result or {}).get("error"))

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **_: Any) -> None:
        """Record that a trial's process has died, with Ray's error message."""
        error = trial.get_error()  # None if Tune knows only that the process is gone
        said = str(getattr(error, "cause", None) or error) if error else "the trial's process died repeatedly"
        self.lost.append((_repeats(self._recorder.scenario, trial.config), said))

    def give_up(self) -> None:
        """Record the trials whose process has died too often as failed."""
        for repeats, error in self.lost:
            self._recorder.end(repeats, error)


def make_space(scenario: Scenario, settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return Tune's search space of planned trials: a column for each swept field, None if the arm lacks the field."""
    planned = {}
    for setting in settings:
        [repeat] = setting["repeats"]
        name = Trial(setting["index"], setting["arm"], setting["values"], repeat).name
        planned[name] = make_columns(scenario, setting) | {"repeat": repeat}
    names = {column: None for config in planned.values() for column in config}
    return {"trial": tune.grid_search(list(planned))} | {
        column: tune.sample_from(partial(_value, planned, column)) for column in names
    }


def _value(planned: Mapping[str, Mapping[str, Any]], column: str, spec: Any) -> Any:
    return planned[spec["config"]["trial"]].get(column)


def make_columns(scenario: Scenario, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that trackers show for a setting of a sweep."""
    names = name_columns(scenario, setting["arm"])
    values = {names[path]: value for path, value in setting["values"].items()}
    return values | {"setting": setting["index"], "arm": setting["arm"]}


def _repeats(scenario: Scenario, config: Mapping[str, Any]) -> list[Trial]:
    """Return the trials of rayfed that one trial of Tune runs, from its columns. Without a repeat, it runs all."""
    values = {path: config[name] for path, name in name_columns(scenario, config["arm"]).items()}
    repeats = [config["repeat"]] if "repeat" in config else list(range(get_sweep_section(scenario).repeats))
    return make_trials({"index": config["setting"], "arm": config["arm"], "values": values, "repeats": repeats})


@contextmanager
def _quiet_tune() -> Iterator[None]:
    """Turn off Tune's own output, files and handling of interrupts."""
    ours = {
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial may have no value for an objective
        "RAY_AIR_NEW_OUTPUT": "0",
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    logger = logging.getLogger("ray.tune")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
