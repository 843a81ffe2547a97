"""Trial of a sweep as a Ray Tune trainable that reports every round."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from ray import tune

from actors.actor_pool import ActorPool
from actors.cluster import Allotment, allot_trial
from actors.executor import TrialExecution
from actors.packing import with_measured_shares
from rayfed import registry
from rayfed.evidence.spread import measure_spread
from rayfed.metrics.images import PSNR_CEILING
from rayfed.runs import runner
from rayfed.scenario import Scenario
from rayfed.scenario.trials import Trial, make_trial_scenario
from rayfed.simulation.progress import Progress
from rayfed.store.folder import RunFolder

Trainable = Callable[[dict[str, Any]], None]


def trainable(scenario: Scenario) -> Trainable:
    """Return a Ray Tune trainable that runs a scenario with the values of a trial (see `rayfed.tune.trainable`)."""
    scenario = with_measured_shares(scenario)
    allotment, places = allot_trial(scenario), search_places()

    def trial(config: dict[str, Any]) -> None:
        prepare_process(places)
        played = make_trial_scenario(scenario, Trial(0, None, dict(config), 0))
        folder = RunFolder.at(str(Path(tune.get_context().get_trial_dir()) / "run"))
        runner.launch_in(folder, played, TrialExecution(allotment, own_actor_pool()), Reporter())

    return with_actors(trial, allotment)


def with_actors(trial: Trainable, allotment: Allotment) -> Trainable:
    """Reserve resources for a trial and its actors in one placement group, so that two trials cannot deadlock."""
    shares = [allotment.client] * allotment.clients + [allotment.attacker] * allotment.attackers
    if allotment.server.num_cpus:
        shares.append(allotment.server)
    bundles = [{"CPU": s.num_cpus} | ({"GPU": s.num_gpus} if s.num_gpus else {}) for s in shares]
    placed: Callable[[dict[str, Any]], None] = tune.with_resources(trial, tune.PlacementGroupFactory([{}, *bundles]))
    return placed


@cache
def own_actor_pool() -> ActorPool:
    """Return the actor pool of this process, which successive trials share."""
    return ActorPool()


Places = tuple[list[str], list[str], str]
"""The folders in which a process finds modules and files: Python's path, folders of scenarios, working directory."""


def search_places() -> Places:
    """Return the folders in which this process finds modules and files, for the processes of trials."""
    return list(sys.path), list(registry.SEARCHED), str(Path.cwd())


def prepare_process(places: Places) -> None:
    """Set up a trial's process: one PyTorch thread, and the driver's folders of modules and files.

    Tune changes to the trial's own folder, in which the scenario's relative paths do not exist.
    """
    path, searched, directory = places
    if Path(directory).is_dir():  # another node may not have it
        os.chdir(directory)
    sys.path += [folder for folder in path if folder not in sys.path]
    for folder in reversed(searched):  # each is inserted at the front
        registry.search(folder)
    torch.set_num_threads(1)


class Reporter(Progress):
    """Progress display that reports every round of a run to Tune."""

    def __init__(self) -> None:
        self._attacks: dict[str, list[dict[str, Any]]] = {}

    def round_done(
        self,
        rows: Sequence[dict[str, Any]],
        attacks: Sequence[dict[str, Any]],
        inferences: Sequence[dict[str, Any]],
    ) -> None:
        """Report a round's losses and accuracy, and the mean scores of attacks, to Tune."""
        for row in attacks:
            self._attacks.setdefault(row["arm"], []).append(row)
        metrics: dict[str, Any] = {"rounds": 1 + max((row["round"] for row in rows), default=0)}
        for row in rows:
            prefix = f"{row['arm']}/" if len(rows) > 1 else ""
            metrics |= {f"{prefix}{name}": value for name, value in self._measured(row).items() if value is not None}
        tune.report(metrics)

    def _measured(self, row: dict[str, Any]) -> dict[str, float | None]:
        met = self._attacks.get(row["arm"], [])
        names = ("psnr", "ssim", "label_accuracy")  # rows have only the metrics in `metrics.names`
        leaks = {name: measure_spread((a.get(name) for a in met), PSNR_CEILING) for name in names}
        return {name: row.get(name) for name in ("train_loss", "test_loss", "test_accuracy")} | {
            name: leak.mean if leak else None for name, leak in leaks.items()
        }
