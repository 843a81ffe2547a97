"""Trial of a sweep as a Ray Tune trainable that reports every round."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from ray import tune

from actors.actor_pool import ActorPool
from actors.cluster import Allotment, allot_trial
from actors.executor import TrialExecution
from actors.packing import with_measured_shares
from rayfed import registry
from rayfed import scenario as scenarios
from rayfed.errors import RunError
from rayfed.evidence.spread import measure_spread
from rayfed.metrics.images import PSNR_CEILING
from rayfed.runs import runner
from rayfed.runs.resume import format_differences, select_determining_fields
from rayfed.scenario import Scenario
from rayfed.scenario.trials import Trial, make_trial_scenario
from rayfed.simulation.progress import Progress
from rayfed.store import exits, run_key
from rayfed.store.folder import SCENARIO, RunFolder
from rayfed.store.lease import FOLDER as LEASE

Trainable = Callable[[dict[str, Any]], None]


def trainable(scenario: Scenario) -> Trainable:
    """Return a Ray Tune trainable that runs a scenario with the values of a trial (see `rayfed.tune.trainable`)."""
    scenario = with_measured_shares(scenario)
    allotment, places = allot_trial(scenario), search_places()

    def trial(config: dict[str, Any]) -> None:
        prepare_process(places)
        played = make_trial_scenario(scenario, Trial(0, None, dict(config), 0))
        # Tune copies the trial's own folder at any moment, in which files may be half written
        with TemporaryDirectory(prefix="rayfed-trial-", ignore_cleanup_errors=True) as place:
            folder = RunFolder.at(f"{place}/run")
            if saved := tune.get_checkpoint():
                restore(saved, folder)
                check_unchanged(folder, played)
            reporter = CheckpointReporter(folder)
            runner.launch_in(folder, played, TrialExecution(allotment, own_actor_pool()), reporter)
            reporter.report_end()

    return with_actors(trial, allotment)


def restore(saved: tune.Checkpoint, folder: RunFolder) -> None:
    """Copy the run folder of a Tune checkpoint to a new folder."""
    with saved.as_directory() as directory:
        shutil.copytree(directory, folder.root)


def check_unchanged(folder: RunFolder, scenario: Scenario) -> None:
    """Raise `RunError` if the run in a folder began with other values than those of the scenario.

    Tune restores a checkpoint with other values if a scheduler changes them, as `PopulationBasedTraining` does. Bounds,
    verdicts and the report of a run are computed from one scenario for all rounds, so values cannot change.
    """
    begun = scenarios.parse(folder.read_text(SCENARIO), f"{folder.url}/{SCENARIO}")
    # whether `num_gpus: auto` means a GPU is decided after this
    before, now = (select_determining_fields(one) | {"resources": None} for one in (begun, scenario))
    if before != now:
        raise RunError(
            f"the values of a trial changed between rounds: {format_differences(before, now)}. A run has one scenario "
            "for all rounds, from which its bounds and verdicts are computed. Use a scheduler that does not change "
            "values, such as ASHAScheduler, instead of PopulationBasedTraining"
        )


def with_actors(trial: Trainable, allotment: Allotment) -> Trainable:
    """Reserve resources for a trial and its actors in one placement group, so that two trials cannot deadlock."""
    shares = [allotment.client] * allotment.clients + [allotment.attacker] * allotment.attackers
    if allotment.server.num_cpus:
        shares.append(allotment.server)
    bundles = [share.resources for share in shares]
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

    def starting(self, scenario: Scenario, folder: RunFolder, where: str) -> None:
        """Read the attacks of earlier rounds, if the run is continued."""
        self._add(folder.read_table("attacks").to_pylist())

    def round_done(
        self,
        rows: Sequence[dict[str, Any]],
        attacks: Sequence[dict[str, Any]],
        inferences: Sequence[dict[str, Any]],
    ) -> None:
        """Report a round's losses and accuracy, and the mean scores of attacks, to Tune."""
        self._add(attacks)
        metrics: dict[str, Any] = {"rounds": 1 + max((row["round"] for row in rows), default=0)}
        for row in rows:
            prefix = f"{row['arm']}/" if len(rows) > 1 else ""
            metrics |= {f"{prefix}{name}": value for name, value in self._measured(row).items() if value is not None}
        self._report(metrics)

    def _report(self, metrics: dict[str, Any]) -> None:
        tune.report(metrics)

    def _add(self, attacks: Sequence[dict[str, Any]]) -> None:
        for row in attacks:
            self._attacks.setdefault(row["arm"], []).append(row)

    def _measured(self, row: dict[str, Any]) -> dict[str, float | None]:
        met = self._attacks.get(row["arm"], [])
        names = ("psnr", "ssim", "label_accuracy")  # rows have only the metrics in `metrics.names`
        leaks = {name: measure_spread((a.get(name) for a in met), PSNR_CEILING) for name in names}
        return {name: row.get(name) for name in ("train_loss", "test_loss", "test_accuracy")} | {
            name: leak.mean if leak else None for name, leak in leaks.items()
        }


class CheckpointReporter(Reporter):
    """Reporter that adds the run folder after each round as a Tune checkpoint.

    The last round is reported when the run has ended, so that the last checkpoint is the complete run.
    """

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self._folder = folder
        self._last: dict[str, Any] | None = None

    def report_end(self) -> None:
        """Report the last round with the complete run; nothing if the run had ended before."""
        if self._last is not None:
            self._save(self._last)

    def _report(self, metrics: dict[str, Any]) -> None:
        status = exits.read_status(self._folder)
        if status["rounds_done"] == status["rounds"]:
            self._last = metrics
        else:
            self._save(metrics)

    def _save(self, metrics: dict[str, Any]) -> None:
        """Report metrics with a copy of the run folder that nothing writes to while Tune uploads the copy."""
        with TemporaryDirectory(prefix="rayfed-checkpoint-", ignore_cleanup_errors=True) as place:
            copy = f"{place}/run"
            shutil.copytree(self._folder.root, copy, ignore=self._left_out)
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(copy))

    def _left_out(self, directory: str, names: list[str]) -> list[str]:
        """Return the files of a directory that no checkpoint has: the driver's lease, and the key of a secure run."""
        root = Path(self._folder.root)
        left_out = {root / LEASE, root / run_key.FILE}
        return [name for name in names if Path(directory, name) in left_out]
