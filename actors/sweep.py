"""Many runs of one scenario: Ray Tune over its own fields, a row for every trial; on from where it was broken off."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.search.optuna import OptunaSearch

from actors import launch
from actors.cluster import allot_trial, check_trial, connected
from actors.progress import SweepProgress
from actors.search import Tried, scheduler, search
from actors.trackers import trackers
from actors.trial import Reporter, own_crew, prepare_process, search_places, with_actors
from rayfed import scenario as scenarios
from rayfed.analysis import outcomes
from rayfed.analysis.robustness import VERSUS
from rayfed.analysis.settings import estimate
from rayfed.analysis.sweep_folder import TRIALS, SweepFolder
from rayfed.errors import RunError
from rayfed.scenario import Scenario, Sweep
from rayfed.scenario.trials import Trial, check_values, fields_of, planned, scenario_of
from rayfed.store import run_key
from rayfed.store.folder import RunFolder

_LOST_PROCESSES = 3
"""Times that a trial goes on after its process has died."""
_TUNE = "tune"
"""Where Tune and TensorBoard write, in the sweep's folder."""


def sweep(scenario: Scenario, out: str | None, address: str | None, progress: SweepProgress) -> SweepFolder:
    """Play all trials of a scenario's `sweep` into a new folder and return it.

    Raises `UserError` for what the user can mend, before anything is played; a trial that fails is a row with its
    error.
    """
    trials = _planned(scenario)
    files = RunFolder.create(out or scenario.output.folder, scenario.name)
    files.write_text("scenario.yaml", scenario.dump())
    folder = SweepFolder(files)
    _play(scenario, folder, trials, [], address, progress)
    return folder


def resume(path: str, failed: bool, address: str | None, progress: SweepProgress) -> SweepFolder:
    """Play what is missing of a sweep, and with `failed` once more what has failed.

    Raises `RunError` where there is nothing to play.
    """
    folder = SweepFolder.open(path)
    launch.check_streams(folder.files)
    scenario = scenarios.parse(folder.files.read_text("scenario.yaml"), f"{folder.url}/scenario.yaml")
    trials, rows = _planned(scenario), folder.outcomes().to_pylist()
    again = [row for row in rows if row["status"] == "failed"] if failed else []
    if again and trials is None:
        raise RunError(f"{folder.url}: to Optuna a setting that failed is tried; raise `samples` to try others")
    rows = [row for row in rows if row not in again]
    if not _left(scenario, trials, rows):
        hint = "" if failed else "; `--failed` plays again what has failed"
        raise RunError(f"{folder.url}: all trials are played; nothing to resume{hint}")
    for run in {row["run"] for row in again}:
        if folder.trial(run).exists("status.json"):
            folder.trial(run).remove("status.json")
    _play(scenario, folder, trials, rows, address, progress)
    return folder


def _planned(scenario: Scenario) -> list[Trial] | None:
    """All trials, where they are known before; values are checked in any case."""
    if _section(scenario).search != "optuna":
        return planned(scenario)
    check_values(scenario)
    return None


def _play(
    scenario: Scenario,
    folder: SweepFolder,
    trials: Sequence[Trial] | None,
    rows: list[dict[str, Any]],
    address: str | None,
    progress: SweepProgress,
) -> None:
    """The trials that have no row yet; `trials` is None where Optuna makes them."""
    table = _Table(scenario, folder, rows, progress)
    with connected(address, scenario), _quiet_tune(), table.recorded():
        allotment = allot_trial(scenario)
        check_trial(allotment)
        folder.files.write_text("environment.json", json.dumps(launch.environment(scenario, allotment), indent=2))
        done = len({row["trial"] for row in rows})
        left = _left(scenario, trials, rows) * (_section(scenario).repeats if trials is None else 1)
        progress.starting(scenario, folder, allotment, left, done)
        for _ in range(1 + _LOST_PROCESSES):  # Tune's own way to try again may wait without end for a place
            table.lost = []
            _tuner(scenario, folder, trials, table).fit()
            if not table.lost:
                break
        table.give_up()
    if "tensorboard" not in _section(scenario).trackers:  # what Tune notes to continue by itself is of no use
        folder.files.fs.rm(f"{folder.files.root}/{_TUNE}", recursive=True)


def _left(scenario: Scenario, trials: Sequence[Trial] | None, rows: Sequence[dict[str, Any]]) -> int:
    """Trials without a row; settings, where Optuna makes them, for one with a repeat missing is tried anew."""
    done = {row["trial"] for row in rows}
    if trials is not None:
        return sum(trial.name not in done for trial in trials)
    return max(0, (_section(scenario).samples or 0) - len({name.partition("-")[0] for name in done}))


def _tuner(scenario: Scenario, folder: SweepFolder, trials: Sequence[Trial] | None, table: _Table) -> tune.Tuner:
    """Tune, with what has no row in the table."""
    section, done = _section(scenario), {row["trial"] for row in table.rows}
    left = [t for t in trials or () if t.name not in done]
    configs = [{"index": t.index, "arm": t.arm, "values": t.values, "repeats": [t.repeat]} for t in left]
    return tune.Tuner(
        with_actors(_trainable(scenario, folder), allot_trial(scenario)),
        param_space=None if trials is None else {"trial": tune.grid_search(configs)},
        tune_config=tune.TuneConfig(
            search_alg=_search(scenario, folder, table.rows) if trials is None else None,
            scheduler=scheduler(section, scenario.federation.rounds),
            num_samples=_left(scenario, None, table.rows) if trials is None else 1,
            max_concurrent_trials=section.max_concurrent,
            reuse_actors=True,
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name=_TUNE,
            storage_path=folder.files.root,
            storage_filesystem=PyFileSystem(FSSpecHandler(folder.files.fs)),
            callbacks=[table, *trackers(section, folder)],
            verbose=0,
        ),
    )


def _search(scenario: Scenario, folder: SweepFolder, rows: Sequence[dict[str, Any]]) -> OptunaSearch:
    """Optuna behind all settings that have a row or a folder."""
    names = [*folder.trial_names(), *(row["trial"] for row in rows)]
    begun = max((int(name.partition("-")[0]) + 1 for name in names), default=0)
    return search(scenario, _section(scenario), _tried(scenario, rows), begun)


def _trainable(scenario: Scenario, folder: SweepFolder) -> Any:
    """A setting with its repeats, one after another; at the end it reports the objectives."""
    allotment, places = allot_trial(scenario), search_places()
    objectives = _section(scenario).objectives

    def trial(config: dict[str, Any]) -> None:
        prepare_process(places)
        runs = []
        try:
            for one in _repeats(config):
                run = folder.trial(f"{TRIALS}/{one.name}")
                launch.launch_in(run, scenario_of(scenario, one), launch.Staff(allotment, own_crew()), Reporter())
                runs.append(outcomes.outcomes(run))
        except Exception as error:  # Tune would try again, and it would fail again
            tune.report({"rounds": 0, "error": f"{type(error).__name__}: {error}"})
            return
        tune.report({"rounds": scenario.federation.rounds} | _judged(runs, objectives))

    return trial


def _judged(runs: Sequence[Sequence[dict[str, Any]]], objectives: Sequence[str]) -> dict[str, float]:
    """Each objective: of the attack that gets most, mean over the repeats; none that was not measured."""
    means = {
        name: estimate([outcomes.for_the_attacker([row.get(name) for row in rows], name) for rows in runs])
        for name in objectives
    }
    return {name: found.mean for name, found in means.items() if found}


class _Table(tune.Callback):
    """Writes a row for every trial that ends, and says how the sweep stands."""

    def __init__(
        self, scenario: Scenario, folder: SweepFolder, rows: list[dict[str, Any]], progress: SweepProgress
    ) -> None:
        self._scenario, self._folder, self.rows, self._progress = scenario, folder, rows, progress
        self.lost: list[tuple[list[Trial], str]] = []
        """Trials whose process has died, and what was said of it."""
        self._document = scenario.model_dump(mode="json")

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves its callbacks to continue by itself; a sweep continues from its outcomes

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep status.json true however the sweep ends."""
        self._status("running")
        try:
            yield
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            self._status("interrupted" if interrupted else "failed", None if interrupted else str(error))
            raise
        self._status("finished")

    def on_trial_complete(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **_: Any) -> None:
        """A trial has ended, well or not, or a scheduler has stopped it."""
        self._ended(_repeats(trial.config), (trial.last_result or {}).get("error"))

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **_: Any) -> None:
        """A trial's process has died."""
        error = trial.get_error()  # Tune may have none: all that it knows is that the process is gone
        said = str(getattr(error, "cause", None) or error) if error else "the trial's process died, time and again"
        self.lost.append((_repeats(trial.config), said))

    def give_up(self) -> None:
        """Note what has lost its process again and again as failed."""
        for repeats, error in self.lost:
            self._ended(repeats, error)

    def _ended(self, repeats: Sequence[Trial], error: str | None) -> None:
        for one in repeats:
            rows = self._outcome(one, error)
            if rows[0]["status"] != "failed":  # it will not go on; what has failed may be played again
                run_key.remove(self._folder.trial(rows[0]["run"]))
            self.rows = [row for row in self.rows if row["trial"] != one.name] + rows
            self._progress.trial_done(one, rows)
        self.rows.sort(key=lambda row: (*map(int, row["trial"].split("-")), row["attack"] or ""))
        self.rows = outcomes.with_pmm(self.rows, self._document, self._all_else)
        self._folder.write_outcomes(self.rows)
        self._status("running")

    def _all_else(self, row: Any) -> Any:
        """The seed, and the values of the fields beside an arm's defences."""
        owned = [(path, *self._scenario.owner_of(path)) for path in _section(self._scenario).fields]
        values = [(rest, str(row.get(path))) for path, arm, rest in owned if arm in (None, row["arm"])]
        return row["repeat"], tuple(sorted(value for value in values if not value[0].startswith("defences")))

    def _outcome(self, trial: Trial, error: str | None) -> list[dict[str, Any]]:
        run = f"{TRIALS}/{trial.name}"
        folder = self._folder.trial(run)
        status = folder.read_mapping("status.json") if folder.exists("status.json") else {}
        ended = status.get("state") == "finished" or 0 < status.get("rounds", 0) == status.get("rounds_done")
        known = {
            "trial": trial.name,
            "repeat": trial.repeat,
            "seed": self._scenario.seed + trial.repeat,
            "status": "finished" if ended else "failed" if error else "stopped",
            "error": None if ended else status.get("error") or error if error else None,
            "run": run,
            **{path: outcomes.held(value) for path, value in trial.values.items()},
        }
        found = outcomes.outcomes(folder) if folder.exists("scenario.yaml") else []
        return [row | known for row in found] or [{"arm": trial.arm, "attack": None} | known]

    def _status(self, state: str, error: str | None = None) -> None:
        done = len({row["trial"] for row in self.rows})
        status = {"kind": "sweep", "state": state, "trials_done": done, "error": error}
        self._folder.files.write_text("status.json", json.dumps(status, indent=2))


def _repeats(config: dict[str, Any]) -> list[Trial]:
    """The trials behind one of Tune's."""
    setting = config.get("trial", config)
    return [Trial(setting["index"], setting["arm"], setting["values"], repeat) for repeat in setting["repeats"]]


def _tried(scenario: Scenario, rows: Sequence[dict[str, Any]]) -> dict[int, Tried]:
    """What Optuna knew: index of a setting -> its values and objectives, where all repeats have ended well."""
    section = _section(scenario)
    settings: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        settings.setdefault(int(row["trial"].partition("-")[0]), {}).setdefault(row["trial"], []).append(row)
    found = {}
    for index, repeats in settings.items():
        judged = _judged(list(repeats.values()), section.objectives)
        every = [row for trial in repeats.values() for row in trial]
        if len(judged) == len(section.objectives) and all(row["status"] == "finished" for row in every):
            arm = every[0]["arm"].partition(VERSUS)[0]
            values = {path: every[0].get(path) for path in fields_of(scenario, arm)}
            found[index] = Tried(arm, values, [judged[name] for name in section.objectives])
    return found


def _section(scenario: Scenario) -> Sweep:
    assert scenario.sweep is not None
    return scenario.sweep


@contextmanager
def _quiet_tune() -> Iterator[None]:
    """Tune's own lines and files are not about the user's sweep; an interruption is ours to tell of."""
    ours = {
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial may have nothing to say of an objective
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
