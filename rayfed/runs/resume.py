"""Checks before a run is continued: fields that affect results must be the same as at the start of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rayfed.core import seeds
from rayfed.errors import ResourceError, RunError
from rayfed.evidence.compare import compare_documents
from rayfed.report.text.compare import scenario_value_text
from rayfed.scenario import AttackSpec, Scenario
from rayfed.simulation.client import devices, plan
from rayfed.simulation.executors.base import Execution
from rayfed.simulation.gpus import KINDS
from rayfed.store import run_key
from rayfed.store.checkpoint import Checkpoint
from rayfed.store.folder import SCENARIO, RunFolder

Document = Mapping[str, Any]


def select_determining_fields(scenario: Scenario) -> dict[str, Any]:
    """Return the fields of a scenario that determine a run's results, in JSON form.

    It omits names, output folders and the handling of failed clients, which are listed in the table `clients`. Actors
    are reduced to their threads, which change the order of sums, and whether they use a GPU. A file of devices is
    replaced by its SHA-256.
    """
    document: dict[str, Any] = json.loads(scenario.model_dump_json(exclude={"name", "output", "sweep"}))
    del document["federation"]["failures"], document["metrics"]["success"]
    del document["resources"]["timeout"]
    if document["federation"]["system"] is None:
        del document["federation"]["system"]  # checkpoints of older versions do not have this field
    else:
        document["federation"]["system"]["file"] = devices.digest(scenario)
    for kind in ("clients", "server", "attackers"):
        actors = getattr(scenario.resources, kind)
        document["resources"][kind] = {"num_cpus": actors.threads, "num_gpus": bool(actors.num_gpus)}
    return document


def gpus_of_run(saved: Checkpoint | None, scenario: Scenario, execution: Execution) -> dict[str, int]:
    """Return the number of GPUs for each kind of actor of a run, which may be continued (`same_gpus`)."""
    gpus = execution.num_gpus(scenario)
    return same_gpus(saved.scenario, scenario, gpus) if saved and saved.scenario else dict(gpus)


def same_gpus(begun: Document, scenario: Scenario, gpus: Mapping[str, int]) -> dict[str, int]:
    """Return the number of GPUs for each kind of actor of a continued run or sweep; 0 for kinds that used the CPU.

    Raises `ResourceError` if a kind computed on GPUs by `num_gpus: auto`, and there are none.
    """
    automatic = [kind for kind in KINDS if getattr(scenario.resources, kind).num_gpus == "auto"]
    on_cpu = {kind for kind in automatic if not begun["resources"][kind]["num_gpus"]}
    for kind in automatic:
        if not gpus[kind] and kind not in on_cpu:
            raise ResourceError(
                f"resources.{kind}.num_gpus: auto: this run or sweep began on GPUs, and this machine "
                "has no GPU that PyTorch and Ray find: continue it on a machine with a GPU, or start a new one"
            )
    return {kind: 0 if kind in on_cpu else number for kind, number in gpus.items()}


def check_same(folder: RunFolder, saved: Checkpoint | None, scenario: Scenario, extend: bool = False) -> None:
    """Raise `RunError`, with the differences, if the finished rounds of a run used another scenario.

    With `extend`, the number of rounds may differ, and so may the attacks of later rounds.
    """
    if saved is None or not saved.scenario:
        return
    played, before, now = (
        saved.round + 1,
        _without_families(saved.scenario),
        _without_families(select_determining_fields(scenario)),
    )
    system = scenario.federation.system
    edited = f"{SCENARIO} or its file of devices" if system and system.file else SCENARIO
    where = f"{folder.url}: {edited} was edited after round {saved.round}"
    begun, wanted = (_followed(document, played) for document in (before, now))
    if begun != wanted:
        raise RunError(
            f"{where}, and the finished rounds had other values: {format_differences(begun, wanted)}; "
            "restore the old values, or "
            f"launch a new run: `rayfed launch {folder.url}/{SCENARIO}`"
        )
    if scenario.federation.rounds < played:
        raise RunError(
            f"{where}: federation.rounds is {scenario.federation.rounds}, but {played} rounds are finished; restore "
            f"the old value of federation.rounds"
        )
    if scenario.federation.rounds < (planned := saved.scenario["federation"]["rounds"]):
        raise RunError(
            f"{where}: federation.rounds is {scenario.federation.rounds}, but the run was started with {planned}. The "
            f"value can only be raised, because otherwise the last round would not be evaluated; restore the old value"
        )
    kept = plan.looked_back_on(map(AttackSpec.model_validate, saved.scenario["attacks"]), played)
    if missing := sorted(plan.looked_back_on(scenario.attacks, played) - kept):
        raise RunError(
            f"{where}: later attacks need the weights of round {missing[0]}, which were not stored: launch a new run, "
            f"or change `earlier` so that these attacks only need rounds from {played} on"
        )
    if now != before and not extend:
        raise RunError(
            f"{where}: {format_differences(before, now)}; restore the old values, or continue with the new ones: "
            f"`rayfed resume {folder.url} --extend`. The results are those of a run with the new values from the start"
        )


def check_attacked(run: str, saved: Checkpoint, scenario: Scenario) -> None:
    """Raise `RunError` if the scenario has other clients or arms than the run whose weights are attacked."""
    if not saved.scenario:
        return
    ours, theirs = (_without_attacks(document) for document in (select_determining_fields(scenario), saved.scenario))
    if ours["arms"]:
        theirs = {**theirs, "arms": {name: arm for name, arm in theirs["arms"].items() if name in ours["arms"]}}
    if ours != theirs:
        raise RunError(
            f"the run {run} had another scenario: {format_differences(theirs, ours)}; "
            "the run's weights and clients' states fit only "
            f"that scenario: use the same values, except for `attacks` and `metrics`"
        )


def check_begun(folder: RunFolder, begun: Document, now: Document) -> None:
    """Raise `RunError` if a sweep's scenario was changed after the start of the sweep."""
    begun, now = _without_families(begun), _without_families(now)
    if begun != now:
        raise RunError(
            f"{folder.url}: {SCENARIO} was edited after the start of the sweep, and finished trials had other values: "
            f"{format_differences(begun, now)}; restore the old values, or start a new sweep: "
            f"`rayfed sweep {folder.url}/{SCENARIO}`"
        )


def format_differences(begun: Document, now: Document) -> str:
    """Return the fields that differ between two scenarios, with both values, as comma-separated text."""
    texts = []
    for difference in compare_documents([begun, now]):
        before, after = (scenario_value_text(value) or "not set" for value in difference.values)
        texts.append(f"{difference.path} was {before} and is {after}")
    return ", ".join(texts)


def _followed(document: Document, played: int) -> Document:
    """Return the part of a scenario that determines the first `played` rounds."""
    due = [{**attack, "rounds": sorted(r for r in attack["rounds"] if r < played)} for attack in document["attacks"]]
    federation = {name: value for name, value in document["federation"].items() if name != "rounds"}
    return {**document, "federation": federation, "attacks": [attack for attack in due if attack["rounds"]]}


def _without_families(document: Document) -> Document:
    """Return a scenario without the families of its attacks, which are names that change no result.

    Scenarios of older versions do not have this field.
    """
    attacks = [{name: value for name, value in one.items() if name != "family"} for one in document["attacks"]]
    return {**document, "attacks": attacks}


def _without_attacks(document: Document) -> Document:
    """Return the part of a scenario that determines the clients and their work."""
    evaluated = ("rounds", "evaluate_every", "evaluate_clients")
    federation = {name: value for name, value in document["federation"].items() if name not in evaluated}
    kept = {name: value for name, value in document.items() if name not in ("attacks", "metrics", "resources")}
    return {**kept, "federation": federation}


def check_streams(folder: RunFolder) -> None:
    """Raise `RunError` if a run or sweep was started by a rayfed version whose seeds give other random numbers."""
    if folder.exists("environment.json") and folder.read_mapping("environment.json").get("streams") != seeds.STREAMS:
        raise RunError(
            f"{folder.url}: this run or sweep was started by another version of rayfed, whose seeds give other random "
            f"numbers for data and noise: continue with that version, or launch a new run"
        )


def with_key(scenario: Scenario, folder: RunFolder, saved: Checkpoint | None) -> Scenario:
    """Return the scenario with the key of a secure run (`privacy.secure`), as stored in the run's folder.

    Raises `RunError` if a secure run has finished rounds but its key was deleted.
    """
    if not scenario.privacy.secure:
        return scenario
    if key := run_key.load_key(folder):
        return scenario.with_run_key(key)
    if saved and is_finished(folder):
        raise RunError(
            f"{folder.url}: all {saved.round + 1} rounds are finished; nothing to resume. No rounds can be added, "
            f"because the key of this run (privacy.secure) was deleted at its end"
        )
    if saved:
        raise RunError(
            f"{folder.url}: the key of this run (privacy.secure) was deleted, as happens when a run ends or a sweep "
            f"stops a trial, so the run cannot continue; launch a new run"
        )
    return scenario


def is_finished(folder: RunFolder) -> bool:
    """Return whether a run has finished and the run's report was written."""
    return folder.exists("report.html") and folder.read_mapping("status.json")["state"] == "finished"
