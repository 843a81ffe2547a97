"""GPU shares for `num_gpus: auto`, computed from the memory that one client actor and one attacker need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from math import ceil, floor
from typing import Literal, TypeAlias

from actors.actor_pool import ActorPool
from actors.attacker import AttackerActor
from actors.client import ClientActor
from actors.cluster import Allotment, alive, available_gpus, check, connected, divide, gpus_for, wanted
from actors.workers import Workers
from rayfed.core.memory import CONTEXT, Peak, explain_memory_errors, find_largest_peak
from rayfed.data.partitions.base import Parts
from rayfed.errors import ResourceError, UserError
from rayfed.scenario import Scenario, resolve
from rayfed.scenario.trials import Trial, make_trial_scenario
from rayfed.scenario.trials import plan_largest as largest_trials
from rayfed.simulation.executors.base import Call, Crashed, Done, Overdue
from rayfed.simulation.gpus import with_devices, with_num_gpus
from rayfed.simulation.inputs import Inputs, prepare_inputs
from rayfed.simulation.rounds.attacks import CRASHES, compute_limit, derive_keys

_GIB = 2**30
_UNITS = 10_000
"""Ray counts GPUs in units of 1/10,000."""
Kind = Literal["clients", "attackers"]
_ACTOR: dict[Kind, str] = {"clients": "a client actor", "attackers": "an attacker"}
Needs: TypeAlias = Mapping[Kind, Peak | None]
"""Kind of actor -> peak GPU memory of one such actor; None if it is unknown."""


def with_shares(inputs: Inputs, note: Callable[[str], None]) -> Scenario:
    """Replace each `num_gpus: auto` of a scenario by a number, measured on GPUs, and print the measured memory.

    One client actor, with a GPU to itself, trains the largest cohorts of each arm. Then one attacker begins each attack
    on each arm. Raises `ResourceError` if a GPU has no room for such actors.
    """
    return _with_shares(inputs.scenario, partial(_measure, inputs), note)


def with_measured_shares(scenario: Scenario, note: Callable[[str], None] = lambda _: None) -> Scenario:
    """Replace each `num_gpus: auto` of a sweep's scenario by a number, measured on the sweep's largest trials.

    The shares are those of the largest actor of each kind. An actor of a trial that is invalid is unknown.
    """
    gpus = available_gpus(None, scenario)
    scenario = with_devices(scenario, gpus)
    if not any(gpus.values()):
        return scenario

    def measure(kinds: Sequence[Kind]) -> Needs:
        each = [_measure_trial(scenario, trial, gpus, kinds) for trial in largest_trials(scenario)]
        return {kind: find_largest_peak(needs[kind] for needs in each) for kind in kinds}

    with connected(None, scenario):
        return _with_shares(scenario, measure, note)


def _with_shares(
    scenario: Scenario, measure: Callable[[Sequence[Kind]], Needs], note: Callable[[str], None]
) -> Scenario:
    """Replace each `num_gpus: auto` by a number, given a function that measures actors of these kinds."""
    kinds = _automatic(scenario)
    if "attackers" in kinds and not scenario.attacks:
        kinds.remove("attackers")
        scenario = with_num_gpus(scenario, {"attackers": 0.0})
    if not kinds:
        return scenario
    needs = measure(kinds)
    alone = with_num_gpus(scenario, dict.fromkeys(kinds, 1.0))
    most = wanted(alone, 1, len(scenario.attacks))
    if most.client.labels == most.attacker.labels:
        shares = shares_of(needs, gpus_for(most.client, list(alive().values())))
    else:
        shares = shares_apart(needs)
    note(describe(needs, shares))
    return with_num_gpus(scenario, shares)


def _automatic(scenario: Scenario) -> list[Kind]:
    """Return the kinds of actors with `num_gpus: auto`."""
    return [kind for kind in _ACTOR if getattr(scenario.resources, kind).num_gpus == "auto"]


def shares_of(needs: Needs, gpus: int) -> dict[str, float]:
    """Return the share of a GPU for one actor of each kind, given each kind's need and the number of GPUs.

    As many actors of each kind as fit share a GPU. If one of each does not fit, or a need is unknown, the kinds are on
    different GPUs. On a single GPU, a kind with an unknown need gets the rest. Raises `ResourceError` if
    the kinds do not fit on a single GPU.
    """
    known = {kind: peak for kind, peak in needs.items() if peak}
    room = min((peak.total - peak.others for peak in known.values()), default=0)
    needed = sum(peak.took for peak in known.values())
    if len(known) == len(needs) and needed <= room:
        together = room // needed
        return {kind: _rounded(peak.took / needed / together) for kind, peak in known.items()}
    if gpus > 1 or len(needs) == 1:
        return shares_apart(needs)
    if not known:
        return dict.fromkeys(needs, 1 / len(needs))
    if len(known) == len(needs) or room - needed <= CONTEXT:
        raise ResourceError(_too_large(known))
    [first] = known
    share = ceil(needed / room * _UNITS - 1e-6) / _UNITS  # not rounded down, because it has no room to spare
    return {kind: share if kind == first else _rounded(1 - share) for kind in needs}


def shares_apart(needs: Needs) -> dict[str, float]:
    """Return the share of a GPU for one actor of each kind, if different kinds are on different GPUs.

    An actor with an unknown need gets a whole GPU.
    """
    return {kind: _rounded(1 / peak.together) if peak else 1.0 for kind, peak in needs.items()}


def describe(needs: Needs, shares: Mapping[str, float]) -> str:
    """Return a text with the GPU memory measured for each kind of actor, and how many actors share a GPU."""
    numbers = ", ".join(f"{floor(1 / share)} {kind}" for kind, share in shares.items())
    if len(shares) > 1 and sum(shares.values()) <= 1:
        numbers = f"{floor(1 / sum(shares.values()))} of each kind"
    found = ", ".join(_need(kind, peak) for kind, peak in needs.items())
    return f"num_gpus: auto: {found}; {numbers} per GPU{_gpu(needs)}"


def _need(kind: Kind, peak: Peak | None) -> str:
    return f"{_ACTOR[kind]} needs {peak.took / _GIB:.2f} GiB" if peak else f"{_ACTOR[kind]} could not be measured"


def _gpu(needs: Needs) -> str:
    """Return a text with the memory of the measured GPU; empty if nothing was measured."""
    peak = next(filter(None, needs.values()), None)
    if peak is None:
        return ""
    used = f", of which other processes use {peak.others / _GIB:.1f}" if peak.others else ""
    return f" ({peak.total / _GIB:.1f} GiB{used})"


def _rounded(share: float) -> float:
    """Round a share down to Ray's units, so that all shares of a GPU fit on it."""
    return max(1, floor(share * _UNITS + 1e-6)) / _UNITS


def _too_large(known: Needs) -> str:
    """Return the error message if an actor of each kind does not fit on the only GPU."""
    needs = ", ".join(_need(kind, peak) for kind, peak in known.items())
    return (
        f"resources: num_gpus: auto: a client actor and an attacker do not fit together on the only GPU{_gpu(known)}: "
        f"{needs}: set resources.attackers.num_gpus to 0, so that attackers compute on the CPU, or lower "
        f"training.batch_size, federation.cohort_size or the attacks' batch_size, restarts or victims_per_call"
    )


def _measure_trial(scenario: Scenario, trial: Trial, gpus: Mapping[str, int], kinds: Sequence[Kind]) -> Needs:
    """Return the needs of a sweep's trial; unknown if its values do not fit together, or if a call fails."""
    unknown: Needs = dict.fromkeys(kinds)  # the sweep may not have this combination; if it has, its row has the error
    try:
        inputs = prepare_inputs(make_trial_scenario(scenario, trial), gpus=gpus)
    except UserError:
        return unknown
    try:
        return _measure(inputs, kinds, _run_of_trial)
    except _CallFailed:
        return unknown


def _run(workers: Workers, kind: Kind, calls: Sequence[Call]) -> list[Done]:
    with explain_memory_errors(kind):
        return list(workers.run(calls))


class _CallFailed(Exception):
    """Signal that a measuring call of a sweep's trial has failed, such as by too little memory."""


def _run_of_trial(workers: Workers, kind: Kind, calls: Sequence[Call]) -> list[Done]:
    try:
        return _run(workers, kind, calls)
    except Exception as error:  # from the model, the data or the machine
        raise _CallFailed from error


def _measure(inputs: Inputs, kinds: Sequence[Kind], run: Callable[..., list[Done]] = _run) -> Needs:
    """Return the peak of one actor of each of these kinds, which has a GPU to itself; None for unknown.

    A client actor observes also for attackers that are not measured, because an observation may need more memory than
    training.
    """
    scenario = with_num_gpus(inputs.scenario, dict.fromkeys(_automatic(inputs.scenario), 1.0))
    attacked = range(len(scenario.attacks))
    allotment = divide(list(alive().values()), scenario, 1, len(attacked))
    data, needs = inputs.data, dict[Kind, Peak | None]()
    parts = data, Parts.from_indices(inputs.parts), Parts.from_indices(inputs.validation)
    check_alone(replace(allotment, clients=1, attackers=0))
    with closing(Workers(ActorPool(), 1, ClientActor, allotment.client, scenario, *parts)) as clients:
        clients.wait()
        if "clients" in kinds:
            run(clients, "clients", [Call("train_largest", ())])
        arms = resolve(scenario).values()
        observe = [
            Call("first_observations", (arm.name, i), (scenario.attacks[i], arm), returns=2)
            for i in attacked
            for arm in arms
        ]
        observed = run(clients, "clients", observe)
        if "clients" in kinds:
            needs["clients"] = run(clients, "clients", [Call("peak", ())])[0].result
    if "attackers" in kinds:
        check_alone(replace(allotment, clients=0, attackers=1))
        made_of = AttackerActor, allotment.attacker, data.sample.published(), len(data.classes)
        calls = [_first_attack(scenario, done) for done in observed if done.result]
        with closing(Workers(ActorPool(), 1, *made_of)) as attackers:
            attackers.wait()
            results = [done.result for done in run(attackers, "attackers", calls)]
        failed = len(calls) < len(observed) or any(isinstance(result, Overdue | Crashed) for result in results)
        needs["attackers"] = None if failed else find_largest_peak(results)
    return needs


def check_alone(allotment: Allotment) -> None:
    """Raise `ResourceError` if the cluster has no room for an allotment with a single actor."""
    check(allotment, list(alive().values()))


def _first_attack(scenario: Scenario, observed: Done) -> Call:
    """Return the call that begins an attack on the victims that a client actor has observed."""
    (attack, arm), victims, [observations] = observed.call.tag, observed.result, observed.rest
    args = attack, arm.to_attackers(), observations, derive_keys(scenario, attack, 0, victims)
    return Call("begin_attack", args, limit=compute_limit(scenario, victims), crashes=CRASHES)
