"""Checks before a run is continued: the scenario must be the original one wherever it affects results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rayfed import seeds
from rayfed.analysis.compare import differences
from rayfed.client import devices, plan
from rayfed.engine.executor import Execution
from rayfed.engine.gpus import KINDS
from rayfed.errors import ResourceError, RunError
from rayfed.scenario import AttackSpec, Scenario
from rayfed.store import run_key
from rayfed.store.checkpoint import Checkpoint
from rayfed.store.folder import SCENARIO, RunFolder

Document = Mapping[str, Any]


def what_counts(scenario: Scenario) -> dict[str, Any]:
    """Return the part of a scenario that determines results, as JSON.

    Not names and places; not how clients that fail are handled, for the table `clients` says who was left out; of
    actors only their threads, which change the order of sums, and whether they compute on a GPU; of a file of devices
    its contents, by their SHA-256.
    """
    document: dict[str, Any] = json.loads(scenario.model_dump_json(exclude={"name", "output", "sweep"}))
    del document["federation"]["failures"], document["metrics"]["success"]
    del document["resources"]["timeout"]
    if document["federation"]["system"] is None:
        del document["federation"]["system"]  # runs that were begun before there were devices go on
    else:
        document["federation"]["system"]["file"] = devices.digest(scenario)
    for kind in ("clients", "server", "attackers"):
        actors = getattr(scenario.resources, kind)
        document["resources"][kind] = {"num_cpus": actors.threads, "num_gpus": bool(actors.num_gpus)}
    return document


def gpus_of_run(saved: Checkpoint | None, scenario: Scenario, execution: Execution) -> dict[str, int]:
    """Return the number of GPUs for each kind of actor of a continued run; 0 if it computed on the CPU so far.

    Raises `ResourceError` if a kind computed on GPUs by `num_gpus: auto`, and there are none.
    """
    gpus = dict(execution.num_gpus(scenario))
    if saved is None or not saved.scenario:
        return gpus
    for kind in KINDS:
        began_on_gpus = saved.scenario["resources"][kind]["num_gpus"]
        if getattr(scenario.resources, kind).num_gpus != "auto":
            continue
        if began_on_gpus and not gpus[kind]:
            raise ResourceError(
                f"resources.{kind}.num_gpus: auto: this run began on GPUs, and neither PyTorch nor Ray finds one here: "
                "continue it on a machine with a GPU, or launch it anew"
            )
        if not began_on_gpus:
            gpus[kind] = 0
    return gpus


def check_same(folder: RunFolder, saved: Checkpoint | None, scenario: Scenario, extend: bool = False) -> None:
    """Raise `RunError`, naming the differences, if the played rounds followed another scenario.

    With `extend` what is to come may differ: the number of rounds, and attacks in rounds that are not played yet.
    """
    if saved is None or not saved.scenario:
        return
    played, now = saved.round + 1, what_counts(scenario)
    system = scenario.federation.system
    edited = f"{SCENARIO} or its file of devices" if system and system.file else SCENARIO
    where = f"{folder.url}: {edited} was edited after round {saved.round}"
    begun, wanted = (_followed(document, played) for document in (saved.scenario, now))
    if begun != wanted:
        raise RunError(
            f"{where}, and what is played already followed the old one: {told(begun, wanted)}; put it back, or launch "
            f"the new one: `rayfed launch {folder.url}/{SCENARIO}`"
        )
    if scenario.federation.rounds < played:
        raise RunError(f"{where}: it has {scenario.federation.rounds} rounds now, but {played} are played; put it back")
    if scenario.federation.rounds < (planned := saved.scenario["federation"]["rounds"]):
        raise RunError(
            f"{where}: it has {scenario.federation.rounds} rounds now, and was begun with {planned}: a run can have "
            f"more, not fewer, for its last round would not have been evaluated; put it back"
        )
    kept = plan.looked_back_on(map(AttackSpec.model_validate, saved.scenario["attacks"]), played)
    if missing := sorted(plan.looked_back_on(scenario.attacks, played) - kept):
        raise RunError(
            f"{where}: attacks to come look back on round {missing[0]}, whose weights were not kept: launch the "
            f"scenario anew, or let them look back on rounds from {played} on alone"
        )
    if now != saved.scenario and not extend:
        raise RunError(
            f"{where}: {told(saved.scenario, now)}; put it back, or `rayfed resume {folder.url} --extend` goes on with "
            f"it, to the results of a run that had it from the start"
        )


def check_attacked(run: str, saved: Checkpoint, scenario: Scenario) -> None:
    """Raise `RunError` if an attack's scenario has other clients or arms than the run whose weights it attacks."""
    if not saved.scenario:
        return
    ours, theirs = (_without_attacks(document) for document in (what_counts(scenario), saved.scenario))
    if ours["arms"]:
        theirs = {**theirs, "arms": {name: arm for name, arm in theirs["arms"].items() if name in ours["arms"]}}
    if ours != theirs:
        raise RunError(
            f"the run {run} followed another scenario: {told(theirs, ours)}; its weights and its clients' states fit "
            f"its own alone: make the scenario the same but for `attacks` and `metrics`"
        )


def check_begun(folder: RunFolder, begun: Document, now: Document) -> None:
    """Raise `RunError` if a sweep's scenario is not the one that its trials were started with."""
    if begun != now:
        raise RunError(
            f"{folder.url}: {SCENARIO} was edited since the sweep began, and its trials followed the old one: "
            f"{told(begun, now)}; put it back, or sweep anew: `rayfed sweep {folder.url}/{SCENARIO}`"
        )


def told(begun: Document, now: Document) -> str:
    """Return a line of text for each field that differs, with both values."""
    return ", ".join(
        f"{each.path} was {each.values[0] or 'not set'} and is {each.values[1] or 'not set'}"
        for each in differences([begun, now])
    )


def _followed(document: Document, played: int) -> Document:
    """Return the part of a scenario that determined the first rounds."""
    due = [{**attack, "rounds": sorted(r for r in attack["rounds"] if r < played)} for attack in document["attacks"]]
    federation = {name: value for name, value in document["federation"].items() if name != "rounds"}
    return {**document, "federation": federation, "attacks": [attack for attack in due if attack["rounds"]]}


def _without_attacks(document: Document) -> Document:
    """Return the part of a scenario that determines the clients and their work."""
    evaluated = ("rounds", "evaluate_every", "evaluate_clients")
    federation = {name: value for name, value in document["federation"].items() if name not in evaluated}
    kept = {name: value for name, value in document.items() if name not in ("attacks", "metrics", "resources")}
    return {**kept, "federation": federation}


def check_streams(folder: RunFolder) -> None:
    """Raise `RunError` for a run or sweep of a rayfed version whose seeds gave other random numbers."""
    if folder.exists("environment.json") and folder.read_mapping("environment.json").get("streams") != seeds.STREAMS:
        raise RunError(
            f"{folder.url}: it was begun by another version of rayfed, whose seeds give other random numbers, so its "
            f"clients had other data and noise: go on with that version, or launch its scenario anew"
        )


def with_key(scenario: Scenario, folder: RunFolder, saved: Checkpoint | None) -> Scenario:
    """Return the scenario with the key of a secure run, as stored in its folder.

    Raises `RunError` where a secure run has rounds but no key any more.
    """
    if not scenario.privacy.secure:
        return scenario
    if key := run_key.load(folder):
        return scenario.with_run_key(key)
    if saved and finished(folder):
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


def finished(folder: RunFolder) -> bool:
    """Return whether a run has ended and has its report."""
    return folder.exists("report.html") and folder.read_mapping("status.json")["state"] == "finished"
