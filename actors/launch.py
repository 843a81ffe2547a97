"""One run, from a scenario to a finished folder: load, check, play the rounds, write tables and checkpoint, report."""

from __future__ import annotations

import json
import os
import platform
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from typing import Literal

import numpy as np
import pyarrow as pa
import ray

from actors import transport
from actors.cluster import Allotment, allot, connected
from actors.crew import Crew
from actors.federation import Federation, count_calls
from actors.progress import Progress
from actors.tables import RoundTables
from rayfed import registry, seeds
from rayfed import scenario as scenarios
from rayfed.client.arm import build_arm
from rayfed.console import guarantees
from rayfed.data.partitions.base import label_mix
from rayfed.engine.inputs import Inputs, prepare, scorer
from rayfed.errors import ClientError, RunError, UserError
from rayfed.scenario import Scenario
from rayfed.store import checkpoint, client_states, run_key
from rayfed.store.folder import RunFolder
from rayfed.store.schemas import TABLES

_PACKAGES = (
    *("rayfed", "torch", "torchvision", "ray", "numpy", "pyarrow", "scikit-learn", "scikit-image", "lpips"),
    *("dp-accounting", "gmpy2", "tenseal", "cryptography"),
)


@dataclass(frozen=True)
class Staff:
    """What a sweep gives to one of its trials."""

    allotment: Allotment
    crew: Crew
    """Where actors come from and go to, trial after trial."""


Kind = Literal["training", "attack"]
"""What a run does; only training can be resumed."""


def launch(scenario: Scenario, out: str | None, address: str | None, progress: Progress) -> RunFolder:
    """Run a scenario into a new folder under `out` (by default the scenario's own) and return it finished.

    Raises `UserError` for what the user can mend; whatever is raised, the folder says how far the run came.
    """
    inputs = prepare(scenario.model_copy(update={"sweep": None}))
    _ = inputs.privacy  # what cannot be accounted, or kept to a budget, shows before there is a folder
    folder = RunFolder.create(out or scenario.output.folder, scenario.name)
    _describe(inputs, folder)
    _play(inputs, folder, address, progress, None)
    return folder


def launch_in(folder: RunFolder, scenario: Scenario, trial: Staff, progress: Progress) -> None:
    """Run a scenario in this folder, after the last complete round that is there, on the Ray that is connected to.

    No report is made. Raises `RunError` where the run has failed before: it would again.
    """
    if folder.exists("status.json"):
        status = folder.read_mapping("status.json")
        if status["state"] == "finished":
            run_key.remove(folder)  # its process may have died before it did
            return
        if status["state"] == "failed":
            raise RunError(status["error"])
        check_streams(folder)
    saved = checkpoint.load(folder)
    inputs = prepare(_continued(scenario, folder, saved))
    _drop_after(folder, saved)
    _describe(inputs, folder)
    _play(inputs, folder, None, progress, saved, trial)


def resume(path: str, address: str | None, progress: Progress) -> RunFolder:
    """Continue a run after its last complete round; a finished one is left as it is.

    Raises `RunError` where there is nothing to resume.
    """
    folder = RunFolder.open(path)
    if _kind(folder) == "attack":
        raise RunError(
            f"{folder.url}: it attacked without training; nothing to resume: attack again with `rayfed attack`"
        )
    check_streams(folder)
    scenario = scenarios.parse(folder.read_text("scenario.yaml"), f"{folder.url}/scenario.yaml")
    saved = checkpoint.load(folder)
    inputs = prepare(_continued(scenario, folder, saved))
    rounds = max(inputs.limits.values())
    if saved and saved.round + 1 >= rounds and _finished(folder):
        run_key.remove(folder)  # its process may have died before it did
        raise RunError(f"{folder.url}: all {rounds} rounds are played; nothing to resume")
    _drop_after(folder, saved)
    folder.write_part("partition", 0, _partition_table(inputs))
    _play(inputs, folder, address, progress, saved)
    return folder


def check_streams(folder: RunFolder) -> None:
    """Raise `RunError` for a run or sweep that was begun by a rayfed whose seeds give other random numbers."""
    if folder.exists("environment.json") and folder.read_mapping("environment.json").get("streams") != seeds.STREAMS:
        raise RunError(
            f"{folder.url}: it was begun by another version of rayfed, whose seeds give other random numbers, so its "
            f"clients had other data and noise: go on with that version, or launch its scenario anew"
        )


def _continued(scenario: Scenario, folder: RunFolder, saved: checkpoint.Checkpoint | None) -> Scenario:
    """The scenario, with the key that the run in the folder began with where that is secure.

    Raises `RunError` where a secure run has rounds but no key any more.
    """
    if not scenario.privacy.secure:
        return scenario
    if key := run_key.load(folder):
        return scenario.with_run_key(key)
    if saved and _finished(folder):
        raise RunError(
            f"{folder.url}: all {saved.round + 1} rounds are played; nothing to resume, and no more rounds can follow: "
            f"the key of this run (privacy.secure) went when it ended"
        )
    if saved:
        raise RunError(
            f"{folder.url}: the key of this run (privacy.secure) is gone, as it is when a run has ended or a sweep has "
            f"stopped it, so it cannot go on; launch its scenario anew"
        )
    return scenario


def _finished(folder: RunFolder) -> bool:
    return folder.exists("report.html") and folder.read_mapping("status.json")["state"] == "finished"


def _drop_after(folder: RunFolder, saved: checkpoint.Checkpoint | None) -> None:
    """Remove what a round has left that did not end."""
    round = saved.round if saved else -1
    folder.drop_after(round)
    client_states.tidy(folder, round + 1)


def attack(scenario: Scenario, run: str | None, out: str | None, address: str | None, progress: Progress) -> RunFolder:
    """Attack without training, into a new folder: the untrained model, or what `run` had learnt when it ended.

    Every attack strikes once, whatever its `rounds`. Raises `RunError` where `run` has no weights for the scenario.
    """
    saved = _trained(run) if run else None
    round = saved.round + 1 if saved else 0
    inputs = prepare(scenario.attacked_in(round), rounds=scenario.federation.rounds)
    scenario = inputs.scenario
    if saved:
        _check_fit(f"the run {run}", saved, scenario, inputs)
    folder = RunFolder.create(out or scenario.output.folder, scenario.name)
    _describe(inputs, folder)
    with (
        _recorded(folder, "attack", 0, 0) as log,
        _federation(
            inputs, folder, address, progress, saved, source=RunFolder.open(run) if run else None
        ) as federation,
    ):
        tables = federation.attack(round)
        _write(folder, round, tables)
        log.line(f"attacked the weights of round {round}" + (f" of {run}" if run else ", which are untrained"))
        progress.round_done([], tables.attacks, tables.inferences)
    return folder


def _trained(run: str) -> checkpoint.Checkpoint:
    folder = RunFolder.open(run)
    check_streams(folder)
    saved = checkpoint.load(folder)
    if saved is None:
        raise RunError(
            f"{run}: none of its rounds is complete, so it has no weights to attack; `rayfed resume` it first"
        )
    return saved


def _check_fit(what: str, saved: checkpoint.Checkpoint, scenario: Scenario, inputs: Inputs) -> None:
    for name, stack in scenario.stacks.items():
        if name not in saved.server:
            raise RunError(f"{what} has no arm '{name}', only {', '.join(saved.server)}: name the scenario's arms so")
        data = inputs.data
        arm = build_arm(scenario.model_of(name), stack, data.image_shape, len(data.classes), scenario.seed)
        shapes = {name: w.shape for name, w in arm.weights.items()}
        if shapes != {name: w.shape for name, w in saved.server[name]["weights"].items()}:
            raise RunError(f"{what} trained another model than the scenario's in arm '{name}': make `model` the same")


def _describe(inputs: Inputs, folder: RunFolder) -> None:
    """Write what a run is of, before its first round."""
    folder.write_text("scenario.yaml", inputs.scenario.dump())
    folder.write_part("partition", 0, _partition_table(inputs))


def _play(
    inputs: Inputs,
    folder: RunFolder,
    address: str | None,
    progress: Progress,
    saved: checkpoint.Checkpoint | None,
    trial: Staff | None = None,
) -> None:
    """The rounds after the checkpoint, then the report; the folder's status and log follow along.

    The `trial` of a sweep keeps to what it is given, and the sweep makes one report of all.
    """
    first, limits = saved.round + 1 if saved else 0, inputs.limits
    rounds = max(limits.values())
    privacy, secure = inputs.privacy, inputs.scenario.privacy.secure
    if secure:
        run_key.save(folder, inputs.scenario.run_key)
    with (
        _recorded(folder, "training", first, rounds, reports=trial is None) as log,
        _federation(inputs, folder, address, progress, saved, trial) as federation,
    ):
        folder.write_part("privacy", 0, privacy)
        progress.accounted(privacy)
        for line in guarantees(privacy):
            log.line(line)
        if message := inputs.randomness:
            log.line(message)
            progress.note(message)
        for message in inputs.encryption:
            log.line(message)
        for arm, limit in limits.items():
            if limit < inputs.scenario.federation.rounds:
                message = f"arm {arm} ends after {limit} rounds: one more would spend more than privacy.budget"
                if any(round >= limit for attack in inputs.scenario.attacks for round in attack.rounds):
                    message += "; attacks of later rounds do not meet it"
                log.line(message)
                progress.note(message)
        for round in range(first, rounds):
            tables = federation.play(round, limits)
            _write(folder, round, tables)
            checkpoint.save(folder, checkpoint.Checkpoint(round, federation.saved, federation.changed))
            log.round_done(round, tables)
            progress.round_done(tables.rounds, tables.attacks, tables.inferences)
    if secure:
        run_key.remove(folder)


@contextmanager
def _federation(
    inputs: Inputs,
    folder: RunFolder,
    address: str | None,
    progress: Progress,
    saved: checkpoint.Checkpoint | None,
    trial: Staff | None = None,
    source: RunFolder | None = None,
) -> Iterator[Federation]:
    """The run's actors, up and ready to go on after the checkpoint, which is the run's own unless it has a source."""
    scenario = inputs.scenario
    with connected(address, scenario):
        transport.register()
        allotment = trial.allotment if trial else allot(scenario, *count_calls(scenario, len(inputs.data.test_labels)))
        folder.write_text("environment.json", json.dumps(environment(scenario, allotment), indent=2))
        progress.starting(scenario, folder, allotment)
        federation = Federation(
            scenario,
            inputs.data,
            inputs.parts,
            inputs.validation,
            allotment,
            progress,
            saved.server if saved else {},
            partial(checkpoint.recall, source or folder),
            trial.crew if trial else Crew(),
        )
        with _closing(federation, keep=trial is not None):
            federation.start()
            progress.ready(saved.round + 1 if saved else 0)
            for message in inputs.encryption:
                progress.note(message)
            if scenario.attacks:
                for message in scorer(scenario, inputs.data).unavailable():
                    progress.note(message)
            yield federation


@contextmanager
def _closing(federation: Federation, keep: bool) -> Iterator[None]:
    """End the actors; `keep` leaves them to another run, unless what ended this one may be their fault.

    A call that is still under way does not matter: an actor begins anew behind it.
    """
    try:
        yield
    except ClientError:
        federation.close()  # one more of its clients may hang in an actor
        raise
    except (UserError, SystemExit):
        federation.close(keep)
        raise
    except BaseException:
        federation.close()
        raise
    federation.close(keep)


def _write(folder: RunFolder, round: int, tables: RoundTables) -> None:
    for table, rows in vars(tables).items():
        if rows:
            folder.write_part(table, round, rows)


class _Log:
    """log.txt and status.json of a run: what happened, and how it stands."""

    def __init__(self, folder: RunFolder, kind: Kind, rounds: int) -> None:
        self._folder, self._kind, self._rounds = folder, kind, rounds
        self._done, self._text = 0, StringIO()
        if folder.exists("log.txt"):
            self._text.write(folder.read_text("log.txt"))

    def line(self, message: str) -> None:
        self._text.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {message}\n")
        self._folder.write_text("log.txt", self._text.getvalue())

    def status(self, state: str, error: str | None = None) -> None:
        rounds = {"rounds_done": self._done, "rounds": self._rounds}
        status = {"kind": self._kind, "state": state, **rounds, "error": error}
        self._folder.write_text("status.json", json.dumps(status, indent=2))

    def running(self, done: int) -> None:
        self._done = done
        self.status("running")

    def round_done(self, round: int, tables: RoundTables) -> None:
        self.running(round + 1)
        for row in tables.rounds:
            accuracy = "" if row.get("test_accuracy") is None else f", test accuracy {row['test_accuracy']:.4f}"
            loss = "no client" if row["train_loss"] is None else f"training loss {row['train_loss']:.4f}"
            self.line(f"round {round}, arm {row['arm']}: {loss}{accuracy}")
        for row in tables.clients:
            if row["status"] != "ok":
                self.line(f"round {round}, arm {row['arm']}: client {row['client']} is left out: it {row['status']}")


@contextmanager
def _recorded(folder: RunFolder, kind: Kind, first: int, rounds: int, reports: bool = True) -> Iterator[_Log]:
    """Keep status, log and report true however the run ends."""
    log = _Log(folder, kind, rounds)
    log.running(first)
    log.line(f"run starts at round {first} of {rounds}")
    try:
        yield log
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)  # by the user; by a sweep's scheduler
        message = "interrupted" if interrupted else f"{type(error).__name__}: {error}"
        trace = message if interrupted or isinstance(error, UserError) else traceback.format_exc()
        with _not_hiding_the_first(log):
            log.line(trace)
        with _not_hiding_the_first(log):
            log.status("interrupted" if interrupted else "failed", message)
        if reports:
            with _not_hiding_the_first(log):
                _report(folder)
        raise
    log.line("run finished")
    log.status("finished")
    if reports:
        _report(folder)


def _report(folder: RunFolder) -> None:
    from rayfed.report.run import write_report  # its plotting libraries cost a second, at the end and not at the start

    write_report(folder)


@contextmanager
def _not_hiding_the_first(log: _Log) -> Iterator[None]:
    """Let nothing that fails in here hide the error that ended the run; the log notes it, if it can be written."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):
            log.line(f"after the run ended: {type(error).__name__}: {error}")


def _kind(folder: RunFolder) -> Kind | None:
    """What the run is by its status; None where it ended before it had one."""
    return folder.read_mapping("status.json").get("kind") if folder.exists("status.json") else None


def _partition_table(inputs: Inputs) -> pa.Table:
    """By columns: many clients make many rows."""
    groups, names = inputs.data.groups
    counts = label_mix(groups, inputs.parts, len(names))
    clients, labels = np.indices(counts.shape, np.int32).reshape(2, -1)
    columns = [clients, labels, pa.DictionaryArray.from_arrays(labels, names).cast(pa.string()), counts.reshape(-1)]
    return pa.table(columns, schema=TABLES["partition"])


def environment(scenario: Scenario, a: Allotment) -> dict[str, object]:
    """What it takes to repeat the run and to read its timings."""
    have = ray.cluster_resources()
    return {
        "started": f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
        "command": " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "search_path": registry.SEARCHED,
        "seed": scenario.seed,
        "streams": seeds.STREAMS,
        "reproducible": not scenario.privacy.secure,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: _version(name) for name in _PACKAGES},
        "cpus": have.get("CPU", 0),
        "gpus": have.get("GPU", 0),
        "nodes": len(ray.nodes()),
        "actors": f"{a.clients} clients ({a.client}), {a.attackers} attackers ({a.attacker}), 1 server ({a.server})",
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
