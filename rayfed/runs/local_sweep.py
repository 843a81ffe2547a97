"""Sweeps in this process, which run one trial after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayfed.errors import UserError
from rayfed.evidence import outcomes
from rayfed.results.sweep_folder import TRIALS
from rayfed.runs import runner
from rayfed.runs.sweeps import SweepRecorder, get_sweep_section, make_trials, measure_objectives
from rayfed.scenario import Scenario
from rayfed.scenario.trials import make_trial_scenario
from rayfed.simulation.executors.local import local
from rayfed.simulation.gpus import gpus_here
from rayfed.simulation.progress import Progress
from rayfed.store.exits import classify_exit


class LocalSweep:
    """Function object that runs sweeps in this process (`rayfed.runs.sweeps.SweepExecution`)."""

    def num_gpus(self, scenario: Scenario) -> dict[str, int]:
        """Return the number of GPUs of this process for each kind of actor (clients, attackers)."""
        return gpus_here()

    def __call__(self, recorder: SweepRecorder) -> None:
        """Run the remaining trials of a sweep in this process, one after another.

        Raises `UserError` for options that need Ray Tune.
        """
        section = get_sweep_section(recorder.scenario)
        for name, value in (("scheduler", section.scheduler), ("trackers", section.trackers)):
            if value:
                raise UserError(
                    f"sweep.{name} needs Ray Tune, which --executor local does not use: remove sweep.{name} or the "
                    f"option"
                )
        with recorder.recording():
            recorder.starting({"actors": "none: all in this process"}, "all in this process")
            for setting in recorder.settings:
                _play_setting(recorder, setting)
            if recorder.trials is None:
                _search(recorder, section.objectives)


local_sweep = LocalSweep()


def _search(recorder: SweepRecorder, objectives: Sequence[str]) -> None:
    """Run the settings that Optuna suggests, each based on the results of the previous ones."""
    from optuna.trial import TrialState

    found = recorder.search()
    for _ in range(recorder.left):
        trial = found.study.ask()
        reached = _play_setting(recorder, found.setting(trial))
        known = [reached[name] for name in objectives if name in reached]
        if len(known) == len(objectives):
            found.study.tell(trial, known)
        else:
            found.study.tell(trial, state=TrialState.FAIL)


def _play_setting(recorder: SweepRecorder, setting: Mapping[str, Any]) -> dict[str, float]:
    """Run a setting's repeats and return its objectives; empty if a repeat failed."""
    trials, played = make_trials(setting), []
    try:
        for one in trials:
            run = recorder.folder.trial(f"{TRIALS}/{one.name}")
            runner.launch_in(run, make_trial_scenario(recorder.scenario, one), local, Progress())
            played.append(outcomes.compute_outcomes(run))
    except Exception as error:
        if classify_exit(error) != "failed":
            raise  # quitting a debugger stops the sweep
        recorder.end(trials, f"{type(error).__name__}: {error}")
        return {}
    recorder.end(trials, None)
    return measure_objectives(played, get_sweep_section(recorder.scenario).objectives)
