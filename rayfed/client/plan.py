"""The plan of a round (drawn clients, cohorts, victims), from the scenario alone and so equal in every process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import ceil

import numpy as np

from rayfed import seeds
from rayfed.client.arm import Arm, Protecting
from rayfed.client.devices import Stamp, stamp, there
from rayfed.errors import ScenarioError
from rayfed.privacy.sampling import SecureGenerator
from rayfed.scenario import AttackSpec, ResolvedArm, Scenario, resolve

_MOST = 8
"""Most clients of a cohort that are trained one by one, so that a large round has work for a large cluster."""


def drawn_clients(scenario: Scenario, round: int) -> list[int]:
    """Return the clients of a round, in ascending order, drawn as `federation.sampling` says."""
    f = scenario.federation
    system = f.system if f.system and f.system.draws_from_some else None
    here = (scenario.seed, system.model_dump_json(), stamp(system), round) if system else None
    return list(_drawn(scenario.secret("clients", round), f.clients, scenario.drawn_per_round, f.sampling, here))


@lru_cache(maxsize=4)  # a round asks again and again, and a draw takes time that goes with all clients
def _drawn(
    key: bytes, everybody: int, expected: int, sampling: str, here: tuple[int, str, Stamp, int] | None
) -> tuple[int, ...]:
    drawn = SecureGenerator(key).uniform(everybody)
    absent = ~there(*here, everybody) if here else np.zeros(0, bool)
    drawn[np.flatnonzero(absent)] = 1.0  # beyond what is drawn from [0, 1)
    if sampling == "poisson":
        return tuple(np.flatnonzero(drawn < expected / everybody).tolist())
    expected = min(expected, everybody - int(absent.sum()))
    return tuple(sorted(np.argpartition(drawn, expected - 1)[:expected].tolist()))


def started(scenario: Scenario, round: int) -> list[int]:
    """Return the clients that start on a round's weights under an asynchronous rule, in order.

    As many as a step takes, `drawn_clients`; before the first step as many as there are tasks in flight, with those
    that follow on the first to be done. Who is on the way from earlier rounds is not known here, so that a device may
    be drawn while it has a task: it does its tasks in turn.
    """
    f, count = scenario.federation, scenario.clients_per_round
    assert f.system is not None
    if round == 0:
        count += (f.system.concurrency or count) - 1
    drawn = _drawn(scenario.secret("clients", round), f.clients, count, "fixed", None)
    return [drawn[i] for i in seeds.numpy_generator(scenario.seed, "started", round).permutation(count)]


def leaving(scenario: Scenario, round: int) -> list[int]:
    """Return the clients of a round in the order in which simulated drop-outs occur, the same in all arms."""
    drawn = drawn_clients(scenario, round)
    return [drawn[i] for i in seeds.numpy_generator(scenario.seed, "leaving", round).permutation(len(drawn))]


def server_key(scenario: Scenario, arm: str, round: int, failed: Iterable[int]) -> bytes:
    """Return the key of the server's randomness in a round without the clients that failed.

    Another in each arm, for the difference of two arms would cancel noise; and another without other clients, where a
    round is played again.
    """
    return scenario.secret("server", round, arm, *sorted(failed))


def malicious_clients(scenario: Scenario, arm: ResolvedArm) -> frozenset[int]:
    """Return the malicious clients of an arm, the same in every round and for all arms with that many."""
    malicious = arm.malicious
    if malicious is None:
        return frozenset()
    if isinstance(malicious.clients, list):
        return frozenset(malicious.clients)
    order = seeds.numpy_generator(scenario.seed, "malicious").permutation(scenario.federation.clients)
    return frozenset(order[: malicious.clients].tolist())


def fewest_clients(scenario: Scenario) -> int:
    """Return the size of the smallest non-empty round."""
    drawn = (len(drawn_clients(scenario, round)) for round in range(scenario.federation.rounds))
    return min(filter(None, drawn), default=scenario.drawn_per_round)


def cohort_size(scenario: Scenario) -> int:
    """Return the number of clients in one cohort, from the scenario alone, never from the cluster."""
    f = scenario.federation
    if f.system and f.system.drops:
        return 1  # whose update is in the sum is known when it is there
    if f.cohort_size:
        return f.cohort_size
    together = any(arm.training.trains_together for arm in resolve(scenario).values())
    if together or scenario.resources.clients.num_gpus:
        return ceil(scenario.drawn_per_round / 8)
    return min(ceil(scenario.drawn_per_round / 64), _MOST)


def cohorts(scenario: Scenario, round: int, asynchronous: bool = False) -> list[list[int]]:
    """Return the round's clients in slices of the scenario's cohort size; those of an asynchronous rule one by one."""
    if asynchronous:
        return [[client] for client in started(scenario, round)]
    clients, size = drawn_clients(scenario, round), cohort_size(scenario)
    return [clients[i : i + size] for i in range(0, len(clients), size)]


def victims(scenario: Scenario, attack: AttackSpec, round: int, samples: np.ndarray) -> list[int]:
    """Return the honest clients that one attack observes in one round; `samples[i]` is how many client i holds.

    Raises `ScenarioError` when the scenario asks for a client that cannot be observed.
    """
    malicious = frozenset[int]().union(*(malicious_clients(scenario, arm) for arm in resolve(scenario).values()))
    drawn = [client for client in drawn_clients(scenario, round) if client not in malicious]
    view = attack.view
    need = view.samples(attack)
    if isinstance(attack.victims, int):
        able = [c for c in drawn if samples[c] >= need]
        if len(able) < attack.victims:
            raise ScenarioError(
                f"attack '{attack.title}' wants {attack.victims} victims with {need} samples or more in round {round}, "
                f"but {len(able)} of the {len(drawn)} drawn{' honest' * bool(malicious)} clients have so many: ask for "
                f"fewer or a smaller batch_size"
            )
        return able[: attack.victims]
    for client in attack.victims:
        if client in malicious:
            raise ScenarioError(
                f"attack '{attack.title}' wants client {client}, which is malicious and has nothing to hide: choose "
                f"another victim, or give the malicious clients as a list without it"
            )
        if view.of_round and client not in drawn:
            raise ScenarioError(
                f"attack '{attack.title}' wants client {client} in round {round}, which sends nothing then "
                f"(drawn: {', '.join(map(str, drawn))}): choose among these, or `observes: gradient`"
            )
        if samples[client] < need:
            raise ScenarioError(
                f"attack '{attack.title}' wants {need} samples of client {client}, which has {samples[client]}: "
                f"choose another victim or a smaller batch_size"
            )
    return list(attack.victims)


def protecting(scenario: Scenario, arm: ResolvedArm, samples: np.ndarray) -> Protecting | None:
    """Return the protection of an arm's updates, dimensioned for the heaviest round; None without protection.

    Raises `ScenarioError` for a round of one client, whose update would be the sum that is opened.
    """
    if arm.protection is None:
        return None
    for round in range(scenario.federation.rounds):
        if len(drawn_clients(scenario, round)) == 1:
            raise ScenarioError(
                f"arm '{arm.name}' hides updates in their sum, but round {round} has one client, so that the sum "
                f"that is opened is its update: set federation.clients_per_round to 2 or more (with sampling: poisson, "
                f"far more)"
            )
    fixed = scenario.federation.sampling == "fixed"
    clients = scenario.drawn_per_round if fixed else scenario.federation.clients
    return Protecting(arm.protection, clients, int(np.sort(samples)[-clients:].sum()))


def heaviest(scenario: Scenario, weights: Sequence[int]) -> tuple[float, int, int]:
    """Return the largest share of a round's weight that a client has, that client, and the round.

    `weights[i]` is the weight of client i in any round.
    """
    found = [(0.0, 0, 0)]
    for round in range(scenario.federation.rounds):
        if drawn := drawn_clients(scenario, round):
            client = max(drawn, key=lambda c: weights[c])
            found.append((weights[client] / sum(weights[c] for c in drawn), client, round))
    return max(found, key=lambda one: one[0])


def behind(scenario: Scenario, attack: AttackSpec, round: int, victims: Sequence[int]) -> list[int]:
    """Return the clients whose work is repeated to observe victims: these, and those that views and grants involve.

    Raises `ScenarioError` where there is no such client.
    """
    parts = (attack.view, *attack.grants.values())
    others = [client for part in parts for victim in victims for client in part.involves(scenario, round, victim)]
    return list(dict.fromkeys([*victims, *others]))


def check_nothing_private_is_given(scenario: Scenario) -> None:
    """Raise `ScenarioError` for an attack that is granted a private part which no arm has."""
    for attack in scenario.attacks:
        for name, grant in sorted(attack.grants.items()):
            if grant.needs_private(attack):
                raise ScenarioError(
                    f"attack '{attack.title}' is given a {name}, but no arm keeps a part of its model private: add a "
                    f"defence that does, such as key_lock or split, or take it out of the attack's knowledge"
                )


def check_victims(scenario: Scenario, samples: np.ndarray) -> None:
    """Raise `ScenarioError`, before the first round, if a victim of any round cannot be observed."""
    for attack in scenario.attacks:
        for round in attack.rounds:
            found = victims(scenario, attack, round, samples)
            behind(scenario, attack, round, found)
            if attack.earlier:
                _check_earlier(scenario, attack, round, {victim: int(samples[victim]) for victim in found})


def _check_earlier(scenario: Scenario, attack: AttackSpec, round: int, samples: Mapping[int, int]) -> None:
    """Raise `ScenarioError` if a victim did not answer in an earlier round, or on other samples.

    `samples` has how many every victim holds.
    """
    for arm in resolve(scenario).values():
        for victim, size in samples.items():
            if not attack.view.repeats(arm.training, size):
                raise ScenarioError(
                    f"attack '{attack.title}' looks back on {attack.earlier} rounds, but client {victim}, of {size} "
                    f"samples, takes others of them in every round of arm '{arm.name}' (training.batch_size: "
                    f"{arm.training.batch_size}): set training.batch_size to null, or `observes: gradient`"
                )
    for before in range(round - attack.earlier, round) if attack.view.of_round else ():
        drawn = drawn_clients(scenario, before)
        if missing := sorted(samples.keys() - set(drawn)):
            raise ScenarioError(
                f"attack '{attack.title}' looks back from round {round} on round {before}, in which client "
                f"{missing[0]} sends nothing (drawn: {', '.join(map(str, drawn))}): choose among these, or "
                f"`observes: gradient`"
            )


def check_repeatable(scenario: Scenario, arm: Arm) -> None:
    """Raise `ScenarioError` for an attack on earlier rounds in an arm whose clients keep a state or augment images.

    A run has the latest state alone, so earlier answers could not be made again; augmented images differ by round.
    """
    keeps = bool(arm.private) or any(defence.keeps_state for defence in arm.defences)
    for attack in scenario.attacks:
        if attack.earlier and arm.spec.training.augment:
            raise ScenarioError(
                f"attack '{attack.title}' looks back on {attack.earlier} rounds for the same images, but clients of "
                f"arm '{arm.spec.name}' train on other crops and flips in every round (training.augment): leave out "
                f"either"
            )
        if attack.earlier and keeps and not arm.spec.protection:
            raise ScenarioError(
                f"attack '{attack.title}' looks back on {attack.earlier} rounds, but clients of arm '{arm.spec.name}' "
                f"keep a state over rounds (private layers, error feedback, an autoencoder), and a run has the latest "
                f"alone: leave out the arm, or `earlier`"
            )


def looked_back_on(attacks: Iterable[AttackSpec], after: int) -> set[int]:
    """Return the rounds before `after` that attacks of that round or later ones observe."""
    rounds = ((attack, round) for attack in attacks for round in attack.rounds if round >= after)
    return {before for attack, round in rounds for before in range(round - attack.earlier, after)}
