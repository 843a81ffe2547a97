"""Execution of runs: check a scenario, run its rounds, write tables and checkpoints, and write the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa

from rayfed import scenario as scenarios
from rayfed.data.partitions.base import count_labels
from rayfed.errors import RunError, ScenarioError
from rayfed.report.text.guarantees import guarantee_lines
from rayfed.report.text.weights import initial_weights
from rayfed.runs.bounds import check_proved_bounds
from rayfed.runs.environment import FILE as ENVIRONMENT
from rayfed.runs.environment import MachineRecord
from rayfed.runs.hashes import changed_code, changed_data, hash_inputs
from rayfed.runs.preflight import find_undeclared, find_unreachable
from rayfed.runs.recorder import RunRecorder
from rayfed.runs.resume import (
    check_attacked,
    check_same,
    check_streams,
    gpus_of_run,
    is_finished,
    select_determining_fields,
    with_key,
)
from rayfed.scenario import Scenario
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.executors.base import Execution
from rayfed.simulation.gpus import with_devices
from rayfed.simulation.inputs import Inputs, make_scorer, prepare_inputs
from rayfed.simulation.progress import Progress
from rayfed.simulation.rounds.attacks import LoadStates
from rayfed.simulation.rounds.federation import Federation
from rayfed.simulation.rounds.recovery import rerun_until_complete
from rayfed.simulation.rounds.round import Round
from rayfed.simulation.small_batches import check_batches
from rayfed.simulation.tables import RoundTables
from rayfed.store import checkpoint, exits, run_key
from rayfed.store.folder import SCENARIO, RunFolder
from rayfed.store.lease import hold_lease
from rayfed.store.schemas import TABLES

_OTHER_DATA = (
    "differ from those of the finished rounds, although the scenario is the same: restore the data files, or launch a "
    "new run"
)


@dataclass(frozen=True)
class Keep:
    """Functions that write results of attacks without training while the attacks run."""

    write: Callable[[RoundTables], object]
    """Write all rows so far, and replace those written before."""
    describe: Callable[[Scenario], object]
    """Write the scenario, if its attacks have changed."""


AttackRound = Callable[[Federation, int, Keep], RoundTables]
"""Run the attacks of a round without training, and return their rows. The rows so far are kept after Ctrl-C."""


def attack_once(federation: Federation, round: int, keep: Keep, seconds: float = inf) -> RoundTables:
    """Run each attack of a round once, in at most `seconds`, and return the rows."""
    federation.attacks = replace(federation.attacks, seconds=seconds)
    arms = list(federation.arms)
    return rerun_until_complete(federation, round, lambda: Round(federation, round, arms).attack_alone(keep.write))


def launch(scenario: Scenario, out: str | None, execution: Execution, progress: Progress) -> RunFolder:
    """Run a scenario, write the results to a new folder under `out` (default: the scenario's), and return the folder.

    Raises `UserError` for invalid input. After any error, the folder has the status of the run.
    """
    inputs = prepare_inputs(scenario.model_copy(update={"sweep": None}), gpus=execution.num_gpus(scenario))
    _ = inputs.privacy  # raises errors of accounts and budgets before a folder is created
    _tell(progress, *check_batches(inputs), *find_unreachable(inputs.scenario, find_undeclared(inputs)))
    folder = RunFolder.create(out or scenario.output.folder, scenario.name)
    with hold_lease(folder, progress.note) as held:
        checkpoint.begin(held)
        _describe(inputs, held, inputs.scenario)
        _play(inputs, held, execution, progress, None)
    return folder


def launch_in(folder: RunFolder, scenario: Scenario, execution: Execution, progress: Progress) -> None:
    """Run one trial of a sweep in the trial's folder, continuing after the last finished round, without a report.

    The folder is taken over from a previous driver of the trial, even if that one is alive, because the sweep assigns
    the trials. Raises `RunError` if the trial has failed before, or if its finished rounds had another scenario.
    """
    with hold_lease(folder, progress.note, told=True) as held:
        _launch_in(held, scenario, execution, progress)


def _launch_in(folder: RunFolder, scenario: Scenario, execution: Execution, progress: Progress) -> None:
    status = exits.read_status(folder)
    if status.get("state") == "failed":
        raise RunError(status["error"])
    if status:
        check_streams(folder)
    saved, over = checkpoint.load(folder), status.get("state") == "finished"
    gpus = gpus_of_run(saved, scenario, execution)
    inputs = prepare_inputs(scenario if over else with_key(scenario, folder, saved), gpus=gpus)
    check_same(folder, saved, inputs.scenario)
    if over:
        run_key.remove_key(folder)  # the process may have died before deleting the key
        return
    _check_data(folder, saved, inputs)
    checkpoint.begin(folder)
    _describe(inputs, folder, inputs.scenario)
    _play(inputs, folder, execution, progress, saved, reports=False)


def resume(path: str, execution: Execution, progress: Progress, extend: bool = False) -> RunFolder:
    """Continue a run after its last finished round.

    With `extend`, the number of rounds and later attacks may have changed in its scenario. Raises `RunError` if there
    is nothing to resume, or if finished rounds had another scenario, and `LeaseError` if the run's driver is alive.
    """
    folder = RunFolder.open(path)
    if exits.read_status(folder).get("kind") == "attack":
        raise RunError(
            f"{folder.url}: nothing to resume, because this run has attacks without training; use `rayfed attack` or "
            "`rayfed audit` again"
        )
    check_streams(folder)
    with hold_lease(folder, progress.note) as held:
        _resume(held, execution, progress, extend)
    return folder


def _resume(folder: RunFolder, execution: Execution, progress: Progress, extend: bool) -> None:
    scenario = scenarios.parse(folder.read_text(SCENARIO), f"{folder.url}/{SCENARIO}")
    saved = checkpoint.load(folder)
    inputs = prepare_inputs(with_key(scenario, folder, saved), gpus=gpus_of_run(saved, scenario, execution))
    check_same(folder, saved, inputs.scenario, extend)
    rounds = max(inputs.limits.values())
    if saved and saved.round + 1 >= rounds and is_finished(folder):
        run_key.remove_key(folder)  # the process may have died before deleting the key
        raise RunError(
            f"{folder.url}: all {rounds} rounds are finished; nothing to resume. To add rounds, raise "
            f"federation.rounds in the run's {SCENARIO}, then `rayfed resume {folder.url} --extend`"
        )
    _check_data(folder, saved, inputs)
    checkpoint.begin(folder)
    folder.write_part("partition", 0, _partition_table(inputs))
    _play(inputs, folder, execution, progress, saved)


@dataclass(frozen=True)
class _Attacked:
    """Weights for a run of attacks without training, and their origin."""

    saved: checkpoint.Checkpoint | None = None
    """Checkpoint with the weights; None for the initial weights."""
    run: RunFolder | None = None
    """Run with the clients' states that belong to the weights."""
    words: str = ""
    """Description of the weights; empty for the initial weights."""
    given: bool = False
    """Whether the weights were given, so that nothing is known about their training."""
    source: str = ""
    """Folder name of the run that trained the weights, and its arm if all arms have the weights of one arm."""

    @property
    def round(self) -> int:
        """Return the number of the attacked round."""
        return self.saved.round + 1 if self.saved else 0

    @property
    def weights(self) -> str:
        """Return a text that describes how the attacked weights were trained."""
        if self.given:
            return "given"
        if self.saved is None:
            return "initial"
        return f"trained for {self.round} round{'s' * (self.round != 1)} ({self.source})"


def attack(
    scenario: Scenario,
    run: str | None,
    out: str | None,
    execution: Execution,
    progress: Progress,
    arm: str | None = None,
    attack_round: AttackRound = attack_once,
) -> RunFolder:
    """Attack the initial weights, or the trained weights of `run`, without training, and write to a new folder.

    `attack_round` runs the attacks; by default, each is run once, whatever its `rounds`. With `arm`, all arms have the
    weights of this arm of the run, without its clients' states. Raises `RunError` if the weights of `run` do not fit
    the scenario.
    """
    for spec in scenario.attacks:
        if spec.earlier:
            raise ScenarioError(
                f"attack '{spec.title}' needs {spec.earlier} earlier rounds, but without training there is only one: "
                f"remove `earlier`, or use `rayfed launch`"
            )
    saved = _trained(run) if run else None
    gpus = execution.num_gpus(scenario)
    attacked_scenario = scenario.attacked_in(saved.round + 1 if saved else 0)
    inputs = prepare_inputs(with_devices(attacked_scenario, gpus), rounds=scenario.federation.rounds, gpus=gpus)
    attacked = _Attacked()
    if run and saved and arm:
        source = f"arm {arm} of {PurePosixPath(run).name}"
        attacked = _Attacked(
            _given_to_all(run, saved, arm, inputs), words=f"those of arm {arm} of {run}", source=source
        )
    elif run and saved:
        _check_fit(f"the run {run}", saved, inputs)
        check_attacked(run, saved, inputs.scenario)
        attacked = _Attacked(saved, RunFolder.open(run), f"those of {run}", source=PurePosixPath(run).name)
    return _attack_in_new(out, inputs, attacked, execution, progress, attack_round)


def attack_sent(
    scenario: Scenario,
    sent: Sent,
    words: str,
    out: str | None,
    execution: Execution,
    progress: Progress,
    seconds: float = inf,
) -> RunFolder:
    """Attack given weights without training for `seconds`, and write the results to a new folder.

    `words` describes the weights.
    """
    inputs = prepare_inputs(scenario.attacked_in(sent.round), gpus=execution.num_gpus(scenario))
    state = {"weights": sent.weights, "buffers": sent.buffers, "state": {}, "memory": {}}
    saved = checkpoint.Checkpoint(sent.round - 1, {account.name: state for account in inputs.accounts})
    attacked = _Attacked(saved, words=words, given=True)
    return _attack_in_new(out, inputs, attacked, execution, progress, partial(attack_once, seconds=seconds))


def _attack_in_new(
    out: str | None,
    inputs: Inputs,
    attacked: _Attacked,
    execution: Execution,
    progress: Progress,
    attack_round: AttackRound,
) -> RunFolder:
    folder = RunFolder.create(out or inputs.scenario.output.folder, inputs.scenario.name)
    with hold_lease(folder, progress.note) as held:
        _describe(inputs, held, inputs.scenario)
        _attack(inputs, held, attacked, execution, progress, attack_round)
    return folder


def _given_to_all(run: str, saved: checkpoint.Checkpoint, arm: str, inputs: Inputs) -> checkpoint.Checkpoint:
    """Return a checkpoint in which every arm has the model of one arm of the run."""
    if arm not in saved.server:
        raise RunError(f"the run {run} has no arm '{arm}', only {', '.join(saved.server)}")
    learnt = {part: saved.server[arm][part] for part in ("weights", "buffers")} | {"state": {}, "memory": {}}
    shared = checkpoint.Checkpoint(saved.round, {account.name: learnt for account in inputs.accounts})
    _check_fit(f"the run {run}", shared, inputs)
    return shared


def _attack(
    inputs: Inputs,
    folder: RunFolder,
    attacked: _Attacked,
    execution: Execution,
    progress: Progress,
    attack_round: AttackRound,
) -> None:
    round = attacked.round
    recorder = RunRecorder(folder, "attack", 0, weights=attacked.weights)
    progress = recorder.logging(progress)
    with (
        recorder.recording(0),
        _federation(inputs, folder, execution, progress, attacked.saved, attacked.run) as (federation, joined),
    ):
        keep = Keep(partial(recorder.write, round), lambda scenario: folder.write_text(SCENARIO, scenario.dump()))
        tables = attack_round(federation, round, keep)
        keep.write(tables)
        if attacked.saved is None:  # the account of trained weights belongs to their run
            folder.write_part("proved", 0, inputs.proved(training=False))
        _tell(progress, joined())
        begun = initial_weights(inputs.scenario.model_dump(mode="json"))
        recorder.line(f"attacked the weights of round {round}: {attacked.words or begun}")
        progress.round_done([], tables.attacks, tables.inferences)
        check_proved_bounds(folder)


def _trained(run: str) -> checkpoint.Checkpoint:
    folder = RunFolder.open(run)
    check_streams(folder)
    saved = checkpoint.load(folder)
    if saved is None:
        raise RunError(
            f"{run}: no round is finished, so there are no trained weights to attack; use `rayfed resume` first"
        )
    return saved


def _check_fit(what: str, saved: checkpoint.Checkpoint, inputs: Inputs) -> None:
    for account in inputs.accounts:
        name = account.name
        if name not in saved.server:
            raise RunError(
                f"{what} has no arm '{name}', only {', '.join(saved.server)}: use these names in the scenario"
            )
        shapes = {name: w.shape for name, w in account.arm.weights.items()}
        if shapes != {name: w.shape for name, w in saved.server[name]["weights"].items()}:
            raise RunError(f"{what} trained another model in arm '{name}' than the scenario's: use the same `model`")


def _describe(inputs: Inputs, folder: RunFolder, scenario: Scenario) -> None:
    """Write the files that describe a run before its first round."""
    folder.write_text(SCENARIO, scenario.dump())
    folder.write_part("partition", 0, _partition_table(inputs))


def _play(
    inputs: Inputs,
    folder: RunFolder,
    execution: Execution,
    progress: Progress,
    saved: checkpoint.Checkpoint | None,
    reports: bool = True,
) -> None:
    """Run the rounds after the checkpoint, update the folder's status and log, and write the report."""
    _ = inputs.privacy  # raises errors of accounts before a key is stored or a process started
    first, rounds = saved.round + 1 if saved else 0, max(inputs.limits.values())
    counts = select_determining_fields(inputs.scenario)
    secure = inputs.scenario.privacy.secure
    if secure:
        run_key.save_key(folder, inputs.scenario.run_key)
    recorder = RunRecorder(folder, "training", rounds)
    progress = recorder.logging(progress)
    with (
        recorder.recording(first, reports),
        _federation(inputs, folder, execution, progress, saved, folder) as (federation, joined),
    ):
        _account(inputs, folder, recorder, progress)
        _tell(progress, joined())
        for round in range(first, rounds):
            tables = _play_round(federation, round, inputs.limits)
            recorder.finish_round(
                tables, checkpoint.Checkpoint(round, federation.saved, federation.changed, scenario=counts)
            )
            _tell(progress, *federation.aborted, joined())
            if round + 1 == rounds:
                check_proved_bounds(folder)  # before the next line, in which a scheduler may stop the run
            progress.round_done(tables.rounds, tables.attacks, tables.inferences)
        if first == rounds:  # the driver died between its last round and this check
            check_proved_bounds(folder)
    if secure:
        run_key.remove_key(folder)


def _play_round(federation: Federation, round: int, limits: Mapping[str, int]) -> RoundTables:
    """Run one round of the arms that have not reached their limit."""
    arms = [arm for arm, limit in limits.items() if round < limit]
    every = federation.scenario.federation.evaluate_every
    due = [arm for arm in arms if (round + 1) % every == 0 or round + 1 == limits[arm]]
    return rerun_until_complete(federation, round, lambda: Round(federation, round, arms).play(due))


def _account(inputs: Inputs, folder: RunFolder, recorder: RunRecorder, progress: Progress) -> None:
    """Write and print every arm's guarantees and their caveats."""
    folder.write_part("privacy", 0, inputs.privacy)
    folder.write_part("proved", 0, inputs.proved(training=True))
    progress.accounted(inputs.privacy)
    for line in guarantee_lines(inputs.privacy):
        recorder.line(line)
    _tell(progress, inputs.randomness, *_early_ends(inputs))


def _tell(progress: Progress, *messages: str | None) -> None:
    for message in filter(None, messages):
        progress.note(message)


def _early_ends(inputs: Inputs) -> Iterator[str]:
    """Yield remarks on arms that end before the others."""
    for arm, limit in inputs.limits.items():
        if limit < inputs.scenario.federation.rounds:
            message = f"arm {arm} ends after {limit} rounds, because another round would exceed privacy.budget"
            if any(round >= limit for attack in inputs.scenario.attacks for round in attack.rounds):
                message += "; attacks of later rounds are not run on this arm"
            yield message


@contextmanager
def _federation(
    inputs: Inputs,
    folder: RunFolder,
    execution: Execution,
    progress: Progress,
    saved: checkpoint.Checkpoint | None,
    source: RunFolder | None,
) -> Iterator[tuple[Federation, Callable[[], str | None]]]:
    """Open a federation that continues after a checkpoint; `source` is the run with the clients' states, if any.

    Yields the federation, and a function that records machines that have joined and returns a warning or None.
    """
    scenario = inputs.scenario
    with execution(inputs, progress) as executor:
        made_of = {"hashes": hash_inputs(inputs, saved)}
        before = folder.read_mapping(ENVIRONMENT) if folder.exists(ENVIRONMENT) else {}
        changed = changed_code(before, made_of["hashes"]["code"])
        record = MachineRecord(folder, scenario, {**executor.environment(), **made_of})
        progress.starting(scenario, folder, executor.describe())
        states: LoadStates = partial(checkpoint.load_states, source) if source else lambda *_: {}
        federation = Federation(inputs, executor, progress, saved.server if saved else {}, states)
        federation.make_keys()
        progress.ready(saved.round + 1 if saved else 0)
        for message in (*([changed] if changed else []), *inputs.remarks, *inputs.encryption):
            progress.note(message)
        if scenario.attacks:
            for message in make_scorer(scenario, inputs.data).unavailable():
                progress.note(message)
        yield federation, lambda: record.add(executor.machines())


def _check_data(folder: RunFolder, saved: checkpoint.Checkpoint | None, inputs: Inputs) -> None:
    """Raise `RunError` if the data differ from those of the finished rounds, for example after a file was changed."""
    before = folder.read_mapping(ENVIRONMENT) if saved and folder.exists(ENVIRONMENT) else {}
    if splits := changed_data(before, inputs):
        raise RunError(f"{folder.url}: the data ({', '.join(splits)}) {_OTHER_DATA}")
    if saved and not folder.read_table("partition").equals(_partition_table(inputs)):
        raise RunError(f"{folder.url}: the clients' data {_OTHER_DATA}")


def _partition_table(inputs: Inputs) -> pa.Table:
    """Return the table `partition`, built from columns for speed."""
    groups, names = inputs.data.groups
    counts = count_labels(groups, inputs.parts, len(names))
    clients, labels = np.indices(counts.shape, np.int32).reshape(2, -1)
    columns = [clients, labels, pa.DictionaryArray.from_arrays(labels, names).cast(pa.string()), counts.reshape(-1)]
    return pa.table(columns, schema=TABLES["partition"])
