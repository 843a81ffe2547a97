"""What a sweep adds to its trials, and how busy it keeps the cores.

    python -m benchmarks.sweep [--trials 20]

One sweep of so many trials, then each of the same trials alone on the same Ray with the same actors, one after the
other. Printed: the sweep's wall time (from the start of the first trial to the end of the last) over the mean wall time
a core of the trials alone, and the share of the cores' time that was not idle while the sweep went on. Needs a quiet
machine: other load counts as busy.
"""

from __future__ import annotations

import argparse
import tempfile
from time import monotonic
from typing import Any

import psutil
import ray

from actors.actor_pool import ActorPool
from actors.cluster import allot_trial, connected
from actors.executor import TrialExecution
from actors.sweep import on_tune
from rayfed import scenario as scenarios
from rayfed.runs import runner, sweeps
from rayfed.scenario import Scenario
from rayfed.scenario.trials import make_trial_scenario, plan_trials
from rayfed.simulation.progress import Progress, SweepProgress
from rayfed.store.folder import RunFolder


class Watch(SweepProgress):
    """Takes the time and the cores' idle time from the start of a sweep's first trial to the end of its last."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def starting(self, scenario: Any, folder: Any, where: str, trials: int, done: int) -> None:
        self.began = monotonic(), psutil.cpu_times().idle

    def trial_done(self, trial: Any, rows: Any) -> None:
        self.ends.append((monotonic(), psutil.cpu_times().idle))


def workload(trials: int) -> Scenario:
    """Half of the scenario sweep_privacy: noise, so many levels of it."""
    levels = ", ".join(f"{0.001 * 1.3**i:.6f}" for i in range(trials))
    return scenarios.load(
        "scenarios/sweep_privacy.yaml",
        [
            "arms={sigma: [{name: gaussian, sigma: 0.01}]}",
            f"sweep={{fields: {{arms.sigma.defences.gaussian.sigma: [{levels}]}}}}",
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    scenario = workload(parser.parse_args().trials)
    watch, alone = Watch(), []
    with tempfile.TemporaryDirectory() as out, connected(None, scenario):
        cores = int(ray.cluster_resources()["CPU"])
        sweeps.sweep(scenario, out, on_tune(), watch)
        execution = TrialExecution(allot_trial(scenario), ActorPool())
        for trial in plan_trials(scenario):
            before = monotonic()
            folder = RunFolder.create(out, "alone")
            runner.launch_in(folder, make_trial_scenario(scenario, trial), execution, Progress())
            alone.append(monotonic() - before)
    (start, idle), (end, idle_then) = watch.began, watch.ends[-1]
    wall = end - start
    print(f"{len(alone)} trials on {cores} cores")
    print(f"trials alone, one after another   {sum(alone):8.1f} s   (the first, with its start, {alone[0]:.1f} s)")
    print(f"sweep, first start to last end    {wall:8.1f} s")
    print(f"ratio to the trials alone         {wall / sum(alone):8.3f}")
    print(f"ratio to that over the cores      {wall / (sum(alone) / cores):8.3f}")
    print(f"cores busy                        {1 - (idle_then - idle) / (wall * psutil.cpu_count()):8.1%}")


if __name__ == "__main__":
    main()
