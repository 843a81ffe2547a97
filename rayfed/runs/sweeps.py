"""Sweeps, which run one scenario with varied fields, write one row per trial, and can be resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from rayfed import scenario as scenarios
from rayfed.errors import LeaseError, RunError, plain, require_extra
from rayfed.evidence import outcomes
from rayfed.evidence.settings import Setting, estimate_mean
from rayfed.results.sweep_folder import TRIALS, SweepFolder
from rayfed.runs.environment import note_environment
from rayfed.runs.preflight import find_unreachable
from rayfed.runs.resume import check_begun, check_streams, same_gpus, select_determining_fields
from rayfed.scenario import Scenario, Sweep
from rayfed.scenario.trials import Trial, check_values, plan_trials, select_fields
from rayfed.simulation.gpus import with_devices
from rayfed.simulation.machine import check_arithmetic
from rayfed.simulation.progress import SweepProgress
from rayfed.store import exits, run_key
from rayfed.store.arms import name_pairs
from rayfed.store.folder import RunFolder
from rayfed.store.lease import hold_lease

if TYPE_CHECKING:
    from rayfed.runs.sweep_search import Search, TriedSetting

BEGUN = "begun.json"
"""File with the fields of the scenario, at the start of the sweep, that determine results."""

NAMED = 20
"""Maximum number of settings without a finished trial that status.json lists."""


class SweepExecution(Protocol):
    """Interface that runs the trials of sweeps."""

    def num_gpus(self, scenario: Scenario) -> Mapping[str, int]:
        """Return the number of GPUs that the trials could use, by kind of actor."""

    def __call__(self, recorder: SweepRecorder) -> None:
        """Run all trials of a sweep that have no row yet, within `SweepRecorder.recording`."""


def sweep(scenario: Scenario, out: str | None, execution: SweepExecution, progress: SweepProgress) -> SweepFolder:
    """Run all trials of a scenario's section `sweep`, and return the new folder with the results.

    Whether trials use GPUs (`num_gpus: auto`) is decided here and stored, so that it is the same in all trials. Raises
    `UserError` for invalid input before the first trial. The row of a failed trial has its error.
    """
    trials = _planned(scenario)
    scenario = with_devices(scenario, execution.num_gpus(scenario))
    files = RunFolder.create(out or scenario.output.folder, scenario.name)
    with hold_lease(files, progress.note) as held:
        held.write_text("scenario.yaml", scenario.dump())
        held.write_text(BEGUN, json.dumps(_what_counts(scenario), indent=2))
        if scenario.sweep and not scenario.sweep.fields:  # the check does not cover varied fields
            for line in find_unreachable(scenario):
                progress.note(line)
        execution(SweepRecorder(scenario, SweepFolder(held), trials, [], progress))
    return SweepFolder(files)


def resume(path: str, failed: bool, execution: SweepExecution, progress: SweepProgress) -> SweepFolder:
    """Continue a sweep: run the missing trials and, with `failed`, rerun the failed trials.

    Raises `RunError` if no trials are left, or if finished trials had another scenario, and `LeaseError` if the sweep's
    driver is alive. Raises `ResourceError` if the sweep began on GPUs, and there are none.
    """
    folder = SweepFolder.open(path)
    check_streams(folder.files)
    with hold_lease(folder.files, progress.note) as held:
        _resume(SweepFolder(held), failed, execution, progress)
    return folder


def _resume(folder: SweepFolder, failed: bool, execution: SweepExecution, progress: SweepProgress) -> None:
    scenario = scenarios.parse(folder.files.read_text("scenario.yaml"), f"{folder.url}/scenario.yaml")
    if folder.files.exists(BEGUN):
        begun = folder.files.read_mapping(BEGUN)
        scenario = with_devices(scenario, same_gpus(begun, scenario, execution.num_gpus(scenario)))
        check_begun(folder.files, begun, _what_counts(scenario))
    trials, rows = _planned(scenario), folder.outcomes().to_pylist()
    again = [row for row in rows if row["status"] == "failed"] if failed else []
    if again and trials is None:
        raise RunError(
            f"{folder.url}: Optuna does not suggest failed settings again; raise `samples` to try other settings"
        )
    recorder = SweepRecorder(scenario, folder, trials, [row for row in rows if row not in again], progress)
    if not recorder.left:
        hint = "" if failed else "; use `--failed` to rerun failed trials"
        raise RunError(f"{folder.url}: all trials have ended; nothing to resume{hint}")
    for run in {row["run"] for row in again}:
        if folder.trial(run).exists("status.json"):
            folder.trial(run).remove("status.json")
    execution(recorder)


def _what_counts(scenario: Scenario) -> dict[str, Any]:
    """Return the part of a sweep's scenario that determines trials and results, except their number, as JSON."""
    free = {"samples", "max_concurrent", "trackers"}
    return select_determining_fields(scenario) | {
        "sweep": json.loads(get_sweep_section(scenario).model_dump_json(exclude=free))
    }


def _planned(scenario: Scenario) -> list[Trial] | None:
    """Check the swept values, and return all trials; None if Optuna chooses them."""
    check_arithmetic(scenario.resources.deterministic)
    if get_sweep_section(scenario).search != "optuna":
        return plan_trials(scenario)
    require_extra("search", "`sweep.search: optuna`", "optuna")
    check_values(scenario)
    return None


def get_sweep_section(scenario: Scenario) -> Sweep:
    """Return the section `sweep` of a scenario, which must have this section."""
    assert scenario.sweep is not None
    return scenario.sweep


def make_trials(setting: Mapping[str, Any]) -> list[Trial]:
    """Return the trials of one setting of a sweep, one trial per repeat, from the setting's JSON form."""
    return [Trial(setting["index"], setting["arm"], setting["values"], repeat) for repeat in setting["repeats"]]


def measure_objectives(runs: Sequence[Sequence[Mapping[str, Any]]], objectives: Sequence[str]) -> dict[str, float]:
    """Return the measured objectives of a setting: the values under the strongest attack, averaged over the repeats."""
    means = {
        name: estimate_mean([outcomes.select_most_leaking([row.get(name) for row in rows], name) for rows in runs])
        for name in objectives
    }
    return {name: found.mean for name, found in means.items() if found}


class SweepRecorder:
    """Writer of a sweep's results: a row per finished trial, and the status."""

    def __init__(
        self,
        scenario: Scenario,
        folder: SweepFolder,
        trials: Sequence[Trial] | None,
        rows: list[dict[str, Any]],
        progress: SweepProgress,
    ) -> None:
        """Start with the `rows` of earlier trials; `trials` is None if Optuna chooses the settings."""
        self.scenario, self.folder, self.trials, self.rows = scenario, folder, trials, rows
        self.progress, self._document = progress, scenario.model_dump(mode="json")

    @property
    def left(self) -> int:
        """Return the number of trials without a result; if Optuna chooses the settings, the number of settings left."""
        done = {row["trial"] for row in self.rows}
        if self.trials is not None:
            return sum(trial.name not in done for trial in self.trials)
        return max(0, (get_sweep_section(self.scenario).samples or 0) - len({name.partition("-")[0] for name in done}))

    @property
    def settings(self) -> list[dict[str, Any]]:
        """Return the planned trials without a result, each as one setting."""
        done = {row["trial"] for row in self.rows}
        left = [t for t in self.trials or () if t.name not in done]
        return [{"index": t.index, "arm": t.arm, "values": t.values, "repeats": [t.repeat]} for t in left]

    def search(self) -> Search:
        """Return an Optuna search that continues from all settings that have been started."""
        from rayfed.runs.sweep_search import make_search

        names = [*self.folder.trial_names(), *(row["trial"] for row in self.rows)]
        begun = max((int(name.partition("-")[0]) + 1 for name in names), default=0)
        return make_search(self.scenario, _tried(self.scenario, self.rows), begun)

    @property
    def total(self) -> int:
        """Return the total number of trials of the sweep."""
        if self.trials is not None:
            return len(self.trials)
        return (get_sweep_section(self.scenario).samples or 0) * get_sweep_section(self.scenario).repeats

    def starting(self, machine: Mapping[str, object], where: str) -> None:
        """Write the sweep's environment.json, and report the start of the sweep."""
        note_environment(self.folder.files, self.scenario, machine)
        left = self.left * (get_sweep_section(self.scenario).repeats if self.trials is None else 1)
        self.progress.starting(self.scenario, self.folder, where, left, len({row["trial"] for row in self.rows}))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Update status.json at the start and at the end of the sweep, also after an error."""
        self._status("running")
        try:
            yield
        except LeaseError:
            raise  # another driver owns the folder
        except BaseException as error:
            state = exits.classify_exit(error)
            self._status(state, plain(str(error)) if state == "failed" else exits.describe_interruption(error))
            raise
        self._status("finished")

    def end(self, repeats: Sequence[Trial], error: str | None) -> None:
        """Record that the repeats of a setting have finished, failed or been stopped, and update the outcomes."""
        for one in repeats:
            rows = self._outcome(one, error)
            if rows[0]["status"] != "failed":  # failed trials may be rerun, which needs the key
                run_key.remove_key(self.folder.trial(rows[0]["run"]))
            self.rows = [row for row in self.rows if row["trial"] != one.name] + rows
            self.progress.trial_done(one, rows)
        self.rows.sort(key=lambda row: (*map(int, row["trial"].split("-")), row["attack"] or ""))
        self.rows = outcomes.with_references(self.rows, self._document, self._all_else)
        self.folder.write_outcomes(self.rows)
        self._status("running")

    def _all_else(self, row: Any) -> Any:
        """Return the repeat, and the swept values other than the arm's defences."""
        owned = [(path, *self.scenario.owner_of(path)) for path in get_sweep_section(self.scenario).fields]
        mine = _arms_by_name(self.scenario).get(row["arm"], row["arm"])
        values = [(rest, str(row.get(path))) for path, arm, rest in owned if arm in (None, mine)]
        return row["repeat"], tuple(sorted(value for value in values if not value[0].startswith("defences")))

    def _outcome(self, trial: Trial, error: str | None) -> list[dict[str, Any]]:
        run = f"{TRIALS}/{trial.name}"
        folder = self.folder.trial(run)
        status = exits.read_status(folder)
        ended = exits.is_complete(status)
        known = {
            "trial": trial.name,
            "repeat": trial.repeat,
            "seed": self.scenario.seed + trial.repeat,
            "status": "finished" if ended else "failed" if error else "stopped",
            "error": None if ended else status.get("error") or plain(error) if error else None,
            "run": run,
            **{path: outcomes.table_value(value) for path, value in trial.values.items()},
        }
        found = outcomes.compute_outcomes(folder) if folder.exists("scenario.yaml") else []
        return [row | known for row in found] or [{"arm": trial.arm, "attack": None} | known]

    def _status(self, state: exits.Exit, error: str | None = None) -> None:
        done = len({row["trial"] for row in self.rows})
        said = {"error": error, "advice": exits.advise_on_state(state, "sweep"), "unplayed": self._unplayed()}
        status = {"kind": "sweep", "state": state, "trials_done": done, "trials": self.total, **said}
        self.folder.files.write_text("status.json", json.dumps(status, indent=2))

    def _unplayed(self) -> list[str]:
        """Return the titles of the first settings with a planned trial that has no row."""
        left = {one["index"]: Setting("", one["arm"], None, one["values"], {}, []) for one in self.settings}
        return [setting.title for setting in list(left.values())[:NAMED]]


def _arms_by_name(scenario: Scenario) -> dict[str, str]:
    """Return the arms of a scenario by the names in tables of the arms with their opponents."""
    return {name: arm for name, (arm, _) in name_pairs(scenario.written_arms, scenario.opponents)}


def _tried(scenario: Scenario, rows: Sequence[dict[str, Any]]) -> dict[int, TriedSetting]:
    """Return the results for Optuna: index of a setting -> values and objectives, if all repeats finished."""
    from rayfed.runs.sweep_search import TriedSetting

    objectives, arms = get_sweep_section(scenario).objectives, _arms_by_name(scenario)
    settings: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        settings.setdefault(int(row["trial"].partition("-")[0]), {}).setdefault(row["trial"], []).append(row)
    found = {}
    for index, repeats in settings.items():
        judged = measure_objectives(list(repeats.values()), objectives)
        every = [row for trial in repeats.values() for row in trial]
        if len(judged) == len(objectives) and all(row["status"] == "finished" for row in every):
            arm = arms.get(every[0]["arm"], every[0]["arm"])
            values = {path: every[0].get(path) for path in select_fields(scenario, arm)}
            found[index] = TriedSetting(arm, values, [judged[name] for name in objectives])
    return found
