"""The plan of a round: sampled clients, cohorts and victims.

It depends only on the scenario. Part of that is whether clients compute on a GPU, which `num_gpus: auto` decides once,
before the first round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import ceil

import numpy as np

from rayfed.core import seeds
from rayfed.errors import ScenarioError
from rayfed.privacy.sampling import SecureGenerator
from rayfed.scenario import AttackSpec, ResolvedArm, Scenario, resolve
from rayfed.simulation.client.arm import Arm, Protecting
from rayfed.simulation.client.devices import Stamp, stamp, there

_MOST = 8
"""Maximum size of a cohort whose clients are trained one by one, so that large rounds use large clusters."""


def drawn_clients(scenario: Scenario, round: int) -> list[int]:
    """Return the sampled clients of a round (`federation.sampling`), in ascending order."""
    f = scenario.federation
    system = f.system if f.system and f.system.draws_from_some else None
    here = (scenario.seed, system.model_dump_json(), stamp(system), round) if system else None
    return list(_drawn(scenario.secret("clients", round), f.clients, scenario.drawn_per_round, f.sampling, here))


@lru_cache(maxsize=4)  # called many times per round, and its time is linear in the number of clients
def _drawn(
    key: bytes, everybody: int, expected: int, sampling: str, here: tuple[int, str, Stamp, int] | None
) -> tuple[int, ...]:
    drawn = SecureGenerator(key).uniform(everybody)
    absent = ~there(*here, everybody) if here else np.zeros(0, bool)
    drawn[np.flatnonzero(absent)] = 1.0  # above all numbers of [0, 1), so not sampled
    if sampling == "poisson":
        return tuple(np.flatnonzero(drawn < expected / everybody).tolist())
    expected = min(expected, everybody - int(absent.sum()))
    return tuple(sorted(np.argpartition(drawn, expected - 1)[:expected].tolist()))


def started(scenario: Scenario, round: int) -> list[int]:
    """Return the clients that start training from a round's weights under an asynchronous rule, in order.

    These are as many as a step needs (`clients_per_round`), plus `concurrency` - 1 in the first round. A client that is
    still busy may be sampled again; it runs its tasks one after another.
    """
    f, count = scenario.federation, scenario.clients_per_round
    assert f.system is not None
    if round == 0:
        count += (f.system.concurrency or count) - 1
    drawn = _drawn(scenario.secret("clients", round), f.clients, count, "fixed", None)
    return [drawn[i] for i in seeds.numpy_generator(scenario.seed, "started", round).permutation(count)]


def leaving(scenario: Scenario, round: int) -> list[int]:
    """Return a round's clients, in the order in which simulated dropouts remove them; the same in all arms."""
    drawn = drawn_clients(scenario, round)
    return [drawn[i] for i in seeds.numpy_generator(scenario.seed, "leaving", round).permutation(len(drawn))]


def server_key(scenario: Scenario, arm: str, round: int, failed: Iterable[int]) -> bytes:
    """Return the key of the server's random numbers (such as noise) in a round of an arm.

    The key depends on the arm and the failed clients, so that the difference of two results does not cancel noise.
    """
    return scenario.secret("server", round, arm, *sorted(failed))


def malicious_clients(scenario: Scenario, arm: ResolvedArm) -> frozenset[int]:
    """Return the malicious clients of an arm, the same in all rounds, and in all arms with the same number."""
    malicious = arm.malicious
    if malicious is None:
        return frozenset()
    if isinstance(malicious.clients, list):
        return frozenset(malicious.clients)
    order = seeds.numpy_generator(scenario.seed, "malicious").permutation(scenario.federation.clients)
    return frozenset(order[: malicious.clients].tolist())


def fewest_clients(scenario: Scenario) -> int:
    """Return the number of clients in the smallest round that has any clients."""
    drawn = (len(drawn_clients(scenario, round)) for round in range(scenario.federation.rounds))
    return min(filter(None, drawn), default=scenario.drawn_per_round)


def cohort_size(scenario: Scenario) -> int:
    """Return the number of clients per cohort.

    By default it depends on the number of clients per round, on the training of the arms, and on whether clients
    compute on a GPU, but not on the number or size of the actors. The last bits of results depend on it, because each
    cohort's updates are summed first. A resumed run keeps it, because clients stay on the same kind of device.
    """
    f = scenario.federation
    if f.system and f.system.drops:
        return 1  # which updates are summed is only known when they arrive
    if f.cohort_size:
        return f.cohort_size
    together = any(arm.training.trains_together for arm in resolve(scenario).values())
    if together or scenario.resources.clients.num_gpus:
        return ceil(scenario.drawn_per_round / 8)
    return min(ceil(scenario.drawn_per_round / 64), _MOST)


def cohorts(scenario: Scenario, round: int, asynchronous: bool = False) -> list[list[int]]:
    """Return a round's cohorts, as lists of clients; an asynchronous rule has one client per cohort."""
    if asynchronous:
        return [[client] for client in started(scenario, round)]
    clients, size = drawn_clients(scenario, round), cohort_size(scenario)
    return [clients[i : i + size] for i in range(0, len(clients), size)]


def largest_cohorts(scenario: Scenario, samples: np.ndarray, asynchronous: bool = False) -> list[tuple[int, list[int]]]:
    """Return the cohort with the largest client and the cohort with the most samples, each after its round.

    Client i has `samples[i]` samples. These may be one cohort, or none if no round has clients.
    """

    def size(cohort: Sequence[int]) -> int:
        return int(samples[cohort].max())

    def total(cohort: Sequence[int]) -> int:
        return int(samples[cohort].sum())

    found = list[tuple[int, list[int]]]()
    for round in range(scenario.federation.rounds):
        if there := cohorts(scenario, round, asynchronous):
            found += [(round, max(there, key=size)), (round, max(there, key=total))]
    if not found:
        return []
    largest, most = max(found, key=lambda one: size(one[1])), max(found, key=lambda one: total(one[1]))
    return [largest] if largest == most else [largest, most]


def victims(scenario: Scenario, attack: AttackSpec, round: int, samples: np.ndarray) -> list[int]:
    """Return an attack's victims (honest clients) in a round; client i has `samples[i]` samples.

    Raises `ScenarioError` for a victim that cannot be observed, or if there are too few clients.
    """
    malicious = frozenset[int]().union(*(malicious_clients(scenario, arm) for arm in resolve(scenario).values()))
    drawn = [client for client in drawn_clients(scenario, round) if client not in malicious]
    view = attack.view
    need = view.samples(attack)
    if isinstance(attack.victims, int):
        able = [c for c in drawn if samples[c] >= need]
        if len(able) < attack.victims:
            raise ScenarioError(
                f"attack '{attack.title}' needs {attack.victims} victims with at least {need} samples, but only "
                f"{len(able)} of the {len(drawn)} sampled{' honest' * bool(malicious)} clients of round {round} have "
                f"as many; reduce `victims` or `batch_size`"
            )
        return able[: attack.victims]
    for client in attack.victims:
        if client in malicious:
            raise ScenarioError(
                f"attack '{attack.title}' has client {client} as a victim, which is malicious; choose another victim, "
                f"or list malicious clients that do not include this client"
            )
        if view.of_round and client not in drawn:
            raise ScenarioError(
                f"attack '{attack.title}' has client {client} as a victim, which is not sampled in round {round} "
                f"(sampled: {', '.join(map(str, drawn))}); choose a sampled client, or set `observes: gradient`"
            )
        if samples[client] < need:
            raise ScenarioError(
                f"attack '{attack.title}' needs {need} samples of client {client}, which has {samples[client]}; "
                f"choose another victim or a smaller batch_size"
            )
    return list(attack.victims)


def protecting(scenario: Scenario, arm: ResolvedArm, samples: np.ndarray) -> Protecting | None:
    """Return an arm's protection of updates, with sizes for the largest round; None without protection.

    Raises `ScenarioError` for a round of one client, because the decrypted sum would be its update.
    """
    if arm.protection is None:
        return None
    for round in range(scenario.federation.rounds):
        if len(drawn_clients(scenario, round)) == 1:
            raise ScenarioError(
                f"arm '{arm.name}' protects updates by revealing only their sum, but round {round} has one client, "
                f"whose update is the sum; set federation.clients_per_round to at least 2 (with sampling: poisson, far "
                f"more)"
            )
    fixed = scenario.federation.sampling == "fixed"
    clients = scenario.drawn_per_round if fixed else scenario.federation.clients
    return Protecting(arm.protection, clients, int(np.sort(samples)[-clients:].sum()))


def heaviest(scenario: Scenario, weights: Sequence[int]) -> tuple[float, int, int]:
    """Return the largest share of a round's total weight that one client has, with the client and the round.

    `weights[i]` is the weight of client i in all rounds.
    """
    found = [(0.0, 0, 0)]
    for round in range(scenario.federation.rounds):
        if drawn := drawn_clients(scenario, round):
            client = max(drawn, key=lambda c: weights[c])
            found.append((weights[client] / sum(weights[c] for c in drawn), client, round))
    return max(found, key=lambda one: one[0])


def behind(scenario: Scenario, attack: AttackSpec, round: int, victims: Sequence[int]) -> list[int]:
    """Return the clients whose training an attack repeats: the victims, and the clients that views and grants involve.

    Raises `ScenarioError` if a grant needs a client that does not exist.
    """
    parts = (attack.view, *attack.grants.values())
    others = [client for part in parts for victim in victims for client in part.involves(scenario, round, victim)]
    return list(dict.fromkeys([*victims, *others]))


def check_nothing_private_is_given(scenario: Scenario) -> None:
    """Raise `ScenarioError` if an attack has a grant of private layers, but no arm has private layers."""
    for attack in scenario.attacks:
        for name, grant in sorted(attack.grants.items()):
            if grant.needs_private(attack):
                raise ScenarioError(
                    f"attack '{attack.title}' has the knowledge {name}, but no arm has private layers; add a defence "
                    f"with private layers, such as key_lock or split, or remove `{name}` from `knowledge`"
                )


def check_victims(scenario: Scenario, samples: np.ndarray) -> None:
    """Raise `ScenarioError` if a victim of any round cannot be observed."""
    for attack in scenario.attacks:
        for round in attack.rounds:
            found = victims(scenario, attack, round, samples)
            behind(scenario, attack, round, found)
            if attack.earlier:
                _check_earlier(scenario, attack, round, {victim: int(samples[victim]) for victim in found})


def _check_earlier(scenario: Scenario, attack: AttackSpec, round: int, samples: Mapping[int, int]) -> None:
    """Raise `ScenarioError` if a victim sends no update in an earlier round, or uses other samples in it.

    `samples` contains the number of samples of each victim.
    """
    for arm in resolve(scenario).values():
        for victim, size in samples.items():
            if not attack.view.repeats(arm.training, size):
                raise ScenarioError(
                    f"attack '{attack.title}' needs updates on the same samples from {attack.earlier} earlier rounds, "
                    f"but client {victim}, with {size} samples, uses other samples in each round of arm '{arm.name}' "
                    f"(training.batch_size: {arm.training.batch_size}); set training.batch_size to null, or `observes: "
                    f"gradient`"
                )
    for before in range(round - attack.earlier, round) if attack.view.of_round else ():
        drawn = drawn_clients(scenario, before)
        if missing := sorted(samples.keys() - set(drawn)):
            raise ScenarioError(
                f"attack '{attack.title}' on round {round} needs updates from round {before}, in which client "
                f"{missing[0]} is not sampled (sampled: {', '.join(map(str, drawn))}); choose a sampled client, "
                f"or set `observes: gradient`"
            )


def check_repeatable(scenario: Scenario, arm: Arm) -> None:
    """Raise `ScenarioError` if an attack uses earlier rounds of an arm with stateful clients or augmented images.

    Only the latest state is stored, so earlier updates cannot be recomputed. Augmented images differ between rounds.
    """
    keeps = bool(arm.private) or any(defence.keeps_state for defence in arm.defences)
    for attack in scenario.attacks:
        if attack.earlier and arm.spec.training.augment:
            raise ScenarioError(
                f"attack '{attack.title}' needs updates on the same images from {attack.earlier} earlier rounds, but "
                f"clients of arm '{arm.spec.name}' train on different crops and flips in each round "
                f"(training.augment); remove `augment` or `earlier`"
            )
        if attack.earlier and keeps and not arm.spec.protection:
            raise ScenarioError(
                f"attack '{attack.title}' needs updates from {attack.earlier} earlier rounds, but arm "
                f"'{arm.spec.name}' has stateful clients (private layers, error feedback, an autoencoder) and only "
                f"their latest state is stored; remove the arm or `earlier`"
            )


def looked_back_on(attacks: Iterable[AttackSpec], after: int) -> set[int]:
    """Return the rounds before round `after` whose updates are used by attacks on round `after` or later rounds."""
    rounds = ((attack, round) for attack in attacks for round in attack.rounds if round >= after)
    return {before for attack, round in rounds for before in range(round - attack.earlier, after)}
