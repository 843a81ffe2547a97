"""GPU shares for `num_gpus: auto`, computed from the memory that one client actor and one attacker need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from math import floor
from typing import Literal

from actors.actor_pool import ActorPool
from actors.attacker import AttackerActor
from actors.client import ClientActor
from actors.cluster import Allotment, alive, available_gpus, check, connected, divide
from actors.workers import Workers
from rayfed.data.partitions.base import Parts
from rayfed.engine.attacking import keys_of
from rayfed.engine.executor import Call, Done
from rayfed.engine.gpus import KINDS, with_devices, with_num_gpus
from rayfed.engine.inputs import Inputs, prepare
from rayfed.errors import ResourceError
from rayfed.memory import Peak, explaining
from rayfed.scenario import Scenario, resolve
from rayfed.scenario.trials import planned, scenario_of

_GIB = 2**30
_UNITS = 10_000
"""Ray counts GPUs in units of 1/10,000."""
_ACTOR = {"clients": "a client actor", "attackers": "an attacker"}
Kind = Literal["clients", "attackers"]
_LOWER = {
    "clients": "training.batch_size or federation.cohort_size",
    "attackers": "the attacks' batch_size, restarts or victims_per_call",
}
"""Fields that determine how much memory an actor needs, by kind."""


def with_shares(inputs: Inputs, note: Callable[[str], None]) -> Scenario:
    """Replace each `num_gpus: auto` of a scenario by a number, measured on GPUs, and print the measured memory.

    One client actor, alone on a GPU, trains the first cohort of each arm. Then one attacker, alone on a GPU, begins
    each attack. Raises `ResourceError` if no GPU has room for such an actor.
    """
    scenario = inputs.scenario
    kinds = [kind for kind in KINDS if getattr(scenario.resources, kind).num_gpus == "auto"]
    if "attackers" in kinds and not scenario.attacks:
        kinds.remove("attackers")
        scenario = with_num_gpus(scenario, {"attackers": 0.0})
    if not kinds:
        return scenario
    peaks = _measure(inputs, with_num_gpus(scenario, dict.fromkeys(kinds, 1.0)), kinds)
    if scenario.resources.clients.labels == scenario.resources.attackers.labels:
        shares = shares_of(peaks)
    else:  # they are on different nodes
        shares = {kind: shares_of({kind: peak})[kind] for kind, peak in peaks.items()}
    note(describe(peaks, shares))
    return with_num_gpus(scenario, shares)


def with_measured_shares(scenario: Scenario, note: Callable[[str], None] = lambda _: None) -> Scenario:
    """Replace each `num_gpus: auto` of a sweep's scenario by a number, measured on the first trial."""
    gpus = available_gpus(None, scenario)
    if not any(gpus.values()):
        return with_devices(scenario, gpus)
    trials = planned(scenario) if scenario.sweep and scenario.sweep.search != "optuna" else []
    first = scenario_of(scenario, trials[0]) if trials else scenario
    with connected(None, scenario):
        measured = with_shares(prepare(first.model_copy(update={"sweep": None}), gpus=gpus), note).resources
    return scenario.model_copy(update={"resources": measured})


def shares_of(peaks: Mapping[str, Peak]) -> dict[str, float]:
    """Return the share of a GPU for one actor of each kind, given each kind's peak of GPU memory.

    As many actors of each kind as fit share a GPU. If one of each does not fit, the last kind gets what the first one
    leaves: an attacker attacks fewer victims at a time if memory runs out. Raises `ResourceError` if an actor does not
    fit alone.
    """
    for kind, peak in peaks.items():
        _check_fits(kind, peak)
    room = min(peak.total - peak.others for peak in peaks.values())
    needed = sum(peak.took for peak in peaks.values())
    together = room // needed
    if together:
        return {kind: _rounded(peak.took / needed / together) for kind, peak in peaks.items()}
    first, last = peaks
    share = min(_rounded(peaks[first].took / room), 1 - 1 / _UNITS)
    return {first: share, last: _rounded(1 - share)}


def describe(peaks: Mapping[str, Peak], shares: Mapping[str, float]) -> str:
    """Return a text with the GPU memory measured for each kind of actor, and how many actors share a GPU."""
    peak = next(iter(peaks.values()))
    total, others = peak.total / _GIB, peak.others / _GIB
    needs = ", ".join(f"{_ACTOR[kind]} needs {peak.took / _GIB:.2f} GiB" for kind, peak in peaks.items())
    numbers = ", ".join(f"{floor(1 / share)} {kind}" for kind, share in shares.items())
    if len(shares) > 1:
        numbers = f"{max(1, floor(1 / sum(shares.values())))} of each kind"
    used = f", of which other processes use {others:.1f}" if others else ""
    return f"num_gpus: auto: {needs}; {numbers} per GPU ({total:.1f} GiB{used})"


def _rounded(share: float) -> float:
    """Round a share down to Ray's units, so that all shares of a GPU fit on it."""
    return max(1, floor(share * _UNITS + 1e-6)) / _UNITS


def _check_fits(kind: str, peak: Peak) -> None:
    if peak.together > 0:
        return
    took, others, total = (size / _GIB for size in (peak.took, peak.others, peak.total))
    used = f", of which other processes use {others:.1f}" if others else ""
    raise ResourceError(
        f"resources.{kind}.num_gpus: auto: {_ACTOR[kind]} needs {took:.1f} GiB, and its GPU has {total:.1f} GiB{used}: "
        f"lower {_LOWER[kind]}"
    )


def _measure(inputs: Inputs, scenario: Scenario, kinds: Sequence[str]) -> dict[str, Peak]:
    """Return the peak of one actor of each of these kinds, each alone on a GPU."""
    allotment = divide(list(alive().values()), scenario, 1, 1)
    attacked = list(range(len(scenario.attacks))) if "attackers" in kinds else []
    data = inputs.data
    parts = data, Parts.of(inputs.parts), Parts.of(inputs.validation)
    peaks = dict[str, Peak]()
    check_alone(replace(allotment, clients=1, attackers=0))
    with closing(Workers(ActorPool(), 1, ClientActor, allotment.client, scenario, *parts)) as clients:
        if "clients" in kinds:
            [done] = _run(clients, "clients", [Call("first_work", ())])
            peaks["clients"] = done.result
        observed = {
            done.call.tag: done.result
            for done in _run(clients, "clients", [Call("first_observations", (i,), i) for i in attacked])
        }
    calls = [_first_attack(scenario, i, observed[i]) for i in attacked if observed[i]]
    if calls:
        check_alone(replace(allotment, clients=0, attackers=1))
        made_of = AttackerActor, allotment.attacker, data.sample.published(), len(data.classes)
        with closing(Workers(ActorPool(), 1, *made_of)) as attackers:
            ended = _run(attackers, "attackers", calls)
        peaks["attackers"] = max((done.result for done in ended), key=lambda peak: peak.tensors)
    elif attacked:
        peaks["attackers"] = peaks["clients"]
    return peaks


def check_alone(allotment: Allotment) -> None:
    """Raise `ResourceError` if the cluster has no room for an allotment with a single actor."""
    check(allotment, list(alive().values()))


def _first_attack(scenario: Scenario, index: int, observed: tuple[Sequence[int], Sequence[object]]) -> Call:
    """Return the call that begins an attack on the first arm's observations."""
    attack, arm = scenario.attacks[index], next(iter(resolve(scenario).values()))
    victims, observations = observed
    return Call("begin_attack", (attack, arm.to_attackers(), observations, keys_of(scenario, attack, 0, victims)))


def _run(workers: Workers, kind: Kind, calls: Sequence[Call]) -> list[Done]:
    workers.wait()
    with explaining(kind):
        return list(workers.run(calls))
