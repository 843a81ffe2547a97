"""The journey of one round over the actors: cohorts out, partial results to the server, evaluation, attacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectLostError, RayActorError

from actors.attacker import AttackerActor
from actors.client import ClientActor
from actors.cluster import Allotment
from actors.crew import Crew
from actors.evaluation import evaluate, evaluate_backdoors, evaluate_members, private_layers, slices
from actors.pool import Call, Pool, wait_for
from actors.progress import Progress
from actors.server import ArmState, Kept, ServerActor, ServerRole
from rayfed import seeds
from rayfed.aggregation.server_optimiser import ServerOptimiser
from rayfed.attacks.base import Guess, Inference
from rayfed.data.base import Dataset
from rayfed.scenario import AttackSpec, Scenario
from rayfed.training import plan
from rayfed.training.arm import Arm, build_arm
from rayfed.training.host import Sent, Split, State
from rayfed.training.malicious import Malicious

Rows = list[dict[str, Any]]
Served = tuple[ray.ObjectRef, ray.ObjectRef]
"""What clients are sent, and what stays with the server beside it."""


@dataclass
class RoundTables:
    """One round's rows, by table."""

    rounds: Rows = field(default_factory=list)
    clients: Rows = field(default_factory=list)
    attacks: Rows = field(default_factory=list)
    traces: Rows = field(default_factory=list)
    images: Rows = field(default_factory=list)
    snapshots: Rows = field(default_factory=list)
    inferences: Rows = field(default_factory=list)
    private: Rows = field(default_factory=list)
    weights: Rows = field(default_factory=list)
    scores: Rows = field(default_factory=list)
    secure_sums: Rows = field(default_factory=list)


@dataclass(frozen=True)
class AttackCall:
    """Some victims of one attack in one arm."""

    arm: str
    attack: AttackSpec
    victims: tuple[int, ...]
    repeat: int
    strip: bool
    """Whether the snapshots of its first victim are kept: of the attack's first in the round, the first time."""


def count_calls(scenario: Scenario, test_samples: int) -> tuple[int, int]:
    """The most calls that a round has for clients and for attackers at once: more actors would never work."""
    arms = len(scenario.stacks)
    cohorts = -(-scenario.clients_per_round // scenario.cohort_size)
    due: dict[int, int] = {}
    for attack in scenario.attacks:
        victims = attack.victims if isinstance(attack.victims, int) else len(attack.victims)
        for round in attack.rounds:
            due[round] = due.get(round, 0) + arms * attack.repeats * -(-victims // attack.victims_per_call)
    return arms * max(cohorts, slices(test_samples)), max(due.values(), default=0)


class Federation:
    """The actors of one run, and what is needed to play any round on them."""

    def __init__(
        self,
        scenario: Scenario,
        data: Dataset,
        parts: Sequence[np.ndarray],
        validation: Sequence[np.ndarray],
        allotment: Allotment,
        progress: Progress,
        saved: dict[str, ArmState],
        states: dict[str, dict[int, State]],
        crew: Crew,
    ) -> None:
        """`saved` and `states` are the server's and the clients' side of a checkpoint, or empty."""
        self._scenario, self._data, self._allotment, self._progress = scenario, data, allotment, progress
        self._samples = [len(part) for part in parts]
        arms = {
            name: build_arm(scenario.model_of(name), stack, data.image_shape, len(data.classes), scenario.seed)
            for name, stack in scenario.stacks.items()
        }
        self._saved = {name: saved.get(name) or _untrained(arm) for name, arm in arms.items()}
        self._private = {name for name, arm in arms.items() if arm.private}
        malicious = {name: Malicious.of(scenario, name) for name in arms}
        self._backdoored = {name for name, m in malicious.items() if m.poisoning.has_trigger}
        self._colluders = {name: m.clients if m.poisoning.colludes else frozenset() for name, m in malicious.items()}
        self.states = {arm: dict(states.get(arm, {})) for arm in scenario.stacks}
        self._sent: dict[str, Served] = {}
        data_ref, parts_ref, validation_ref = ray.put(data), ray.put(list(parts)), ray.put(list(validation))
        self._boxes: dict[str, bytes] = {}
        self._crew = crew
        self._server = self._start_server()
        arguments = (scenario, data_ref, parts_ref, allotment.client, validation_ref)
        self._clients = Pool(crew, allotment.clients, ClientActor, allotment.client, *arguments)
        self._attackers: Pool | None = None

    def start(self) -> None:
        """Wait until the clients' actors are up, so that a round's time is that of its work; where they encrypt, one
        client makes the keys of all, and the server passes them on without being able to read them.

        Raises `ResourceError` when the cluster does not bring them up in time.
        """
        self._clients.wait()
        arms = [arm for arm in self._scenario.stacks if self._scenario.protection_of(arm)]
        making = [Call("make_keys", (arm,), arm) for arm in arms]
        self._boxes = {call.tag: box for call, box, _ in self._run_clients(making)}
        for arm, box in self._boxes.items():
            self._server.relay.remote(arm, box)  # one that dies of it is started again with them

    def play(self, round: int, limits: Mapping[str, int]) -> RoundTables:
        """Play one round of the arms that have so many; when the server dies or a node takes objects with it, start the
        server from the last finished round and play again. Raises `ResourceError` when the cluster has no place for
        actors any more.
        """
        return self._surviving(lambda: self._play(round, limits), round)

    def attack(self, round: int) -> RoundTables:
        """Only the attacks of a round, on the weights that clients would be sent in it; again as `play` does it."""
        return self._surviving(lambda: self._attack_alone(round), round)

    @property
    def saved(self) -> dict[str, ArmState]:
        """The server's state after the last finished round."""
        return self._saved

    def close(self, keep: bool = False) -> None:
        """End all actors, or leave them to the crew."""
        self._clients.close(keep)
        if self._attackers:
            self._attackers.close(keep)
        self._crew.dismiss(self._server, keep)

    def _start_server(self) -> Any:
        """The server is told how to add and where to start; with the seed it could draw every client's noise again."""
        s, share, server = self._scenario, self._allotment.server, self._scenario.federation.server
        roles = {
            arm: ServerRole(
                s.aggregation_of(arm),
                stack,
                s.clients_per_round,
                ServerOptimiser(server.optimiser, s.server_lr(arm), server.momentum),
                plan.protecting(s, arm, self._samples),
                self._boxes.get(arm, b""),
            )
            for arm, stack in s.stacks.items()
        }
        actor, _ = self._crew.hire(ServerActor, share, roles, share, self._saved)
        return actor

    def _surviving(self, act: Callable[[], RoundTables], round: int) -> RoundTables:
        failures = 0
        while True:
            try:
                wait_for([self._server.__ray_ready__.remote()])  # else clients would wait for its weights without end
                return act()
            except (RayActorError, ObjectLostError) as error:
                failures += 1
                if failures > Pool.RETRIES:
                    raise
                what = "the server died" if isinstance(error, RayActorError) else "an object was lost"
                self._progress.note(f"{what} in round {round} and the round is played again ({error})")
                self._crew.dismiss(self._server, keep=False)  # it may live on, with half a round added
                self._server, self._sent = self._start_server(), {}

    def _attack_alone(self, round: int) -> RoundTables:
        tables = RoundTables()
        served = {arm: self._ask_server("sent", arm, round) for arm in self._scenario.stacks}
        self._attack(round, {arm: sent for arm, (sent, _) in served.items()}, tables)
        return tables

    def _play(self, round: int, limits: Mapping[str, int]) -> RoundTables:
        tables, arms = RoundTables(), [arm for arm, limit in limits.items() if round < limit]
        cohorts = plan.cohorts(self._scenario, round)
        served = {arm: self._sent.get(arm) or self._ask_server("sent", arm, round) for arm in arms}
        served |= self._opened(round, served)
        before = {arm: sent for arm, (sent, _) in served.items()}
        states = self._train(round, cohorts, before, tables)
        kept = private_layers(self._run_clients, {arm: own for arm, own in states.items() if arm in self._private})
        tables.private += [row | {"round": round} for row in kept]
        self._consult(round, before, states)
        served = {arm: self._ask_server("finish", arm, round, self._server_key(arm, round)) for arm in arms}
        every = self._scenario.federation.evaluate_every
        due = [arm for arm in arms if (round + 1) % every == 0 or round + 1 == limits[arm]]
        evaluations = self._evaluate({arm: served[arm][0] for arm in due}, states, tables)
        self._attack(round, before, tables)
        finished = {arm: ray.get(list(refs)) for arm, refs in served.items()}  # all or none: the server may die here
        for arm, (new, kept) in finished.items():
            self._saved[arm] = _arm_state(new, kept)
            if kept.aborted:
                self._progress.note(f"round {round} of arm {arm} is not applied: {kept.aborted}")
            for table, rows in kept.rows.items():
                getattr(tables, table).extend({"arm": arm, "round": round} | row for row in rows)
        self._sent = served
        for row in tables.rounds:
            row.update(evaluations.get(row["arm"], {}))
            row["bytes_down"] = _bytes_of(self._saved[row["arm"]]) * row["clients"]
        for arm, changed in states.items():
            self.states[arm].update(changed)
        return tables

    def _server_key(self, arm: str, round: int) -> int:
        """Of the server's own randomness; another in each arm, for the difference of two arms would cancel noise."""
        return seeds.torch_generator(self._scenario.seed, "server", round, arm).initial_seed()

    def _ask_server(self, method: str, *arguments: Any) -> Served:
        sent, kept = getattr(self._server, method).options(num_returns=2).remote(*arguments)
        return sent, kept

    def _train(
        self, round: int, cohorts: list[list[int]], sent: dict[str, ray.ObjectRef], tables: RoundTables
    ) -> dict[str, dict[int, State]]:
        """All arms' cohorts, the largest first so that the last to finish is a small one; the clients' new states."""
        calls = [
            Call(
                "cohort",
                (arm, sent[arm], clients, self._states_of(arm, {*clients, *self._colluders[arm]})),
                (arm, index),
                returns=2,
            )
            for arm in sent
            for index, clients in enumerate(cohorts)
        ]
        calls.sort(key=lambda call: -sum(self._samples[c] for c in call.args[2]))
        states: dict[str, dict[int, State]] = {arm: {} for arm in sent}
        added: list[ray.ObjectRef] = []
        seconds = dict.fromkeys(sent, 0.0)
        for call, report, [partial] in self._run_clients(calls):
            arm, index = call.tag
            added.append(self._server.add.remote(arm, index, len(cohorts), partial))
            tables.clients += report.rows
            states[arm].update(report.states)
            seconds[arm] += report.seconds
            self._progress.clients_done(round, len(tables.clients), sum(map(len, cohorts)) * len(sent))
        ray.get(added)
        states = {arm: dict(sorted(own.items())) for arm, own in states.items()}  # whoever was done first
        order = {arm: i for i, arm in enumerate(sent)}
        tables.clients.sort(key=lambda row: (order[row["arm"]], row["client"]))
        for arm in sent:
            tables.rounds.append(_round_row(arm, round, [r for r in tables.clients if r["arm"] == arm], seconds[arm]))
        return states

    def _opened(self, round: int, served: dict[str, Served]) -> dict[str, Served]:
        """Ask what rules have to know before clients train; what clients are sent in these arms, with what they are
        told of it.
        """
        members = plan.drawn_clients(self._scenario, round)
        if not members:
            return {}
        opening = {arm: self._server.open.remote(arm, round, members) for arm in served}
        opened = [arm for arm, ref in opening.items() if ray.get(ref)]
        self._consult(round, {arm: served[arm][0] for arm in opened}, {arm: {} for arm in opened})
        return {arm: self._ask_server("sent", arm, round) for arm in opened}

    def _consult(self, round: int, sent: dict[str, ray.ObjectRef], states: dict[str, dict[int, State]]) -> None:
        """Carry what the rules ask to the round's clients and the answers back, until no arm's rule asks any more.

        Payloads and answers go by reference: the driver never holds them. The server hears clients in their order,
        whoever answered first.
        """
        members = plan.drawn_clients(self._scenario, round)

        def own_state(arm: str, client: int) -> State:
            return states[arm].get(client) or self.states[arm].get(client, {})

        asking = list(sent)
        while asking:
            asked = {arm: self._ask_server("ask", arm) for arm in asking}
            whom = {arm: of for arm, (ref, _) in asked.items() if (of := ray.get(ref))}
            calls = [
                Call("answer", (arm, sent[arm], asked[arm][1], c, own_state(arm, c)), (arm, c), returns=2)
                for arm, of in whom.items()
                for c in (members if of == "all" else members[:1])
            ]
            answers = {call.tag: answer for call, _, [answer] in self._run_clients(calls)}
            heard = [
                self._server.hear.remote(
                    arm, own := [c for c in members if (arm, c) in answers], *(answers[arm, c] for c in own)
                )
                for arm in whom
            ]
            ray.get(heard)
            asking = list(whom)

    def _evaluate(
        self, sent: dict[str, ray.ObjectRef], states: dict[str, dict[int, State]], tables: RoundTables
    ) -> dict[str, dict[str, float | None]]:
        """Loss and accuracy on the test set, arm by arm, and accuracy on clients' own data where it is asked for."""
        sizes: dict[Split, int] = {"test": len(self._data.test_labels)}
        if self._scenario.federation.evaluate_clients:
            sizes["train"] = sum(self._samples)
        shared = {arm: ref for arm, ref in sent.items() if arm not in self._private}
        split = {arm: ref for arm, ref in sent.items() if arm in self._private}
        means, own = evaluate_members(self._run_clients, split, states, self._samples, list(sizes))
        for row in tables.clients:
            row["test_accuracy"] = own.get((row["arm"], row["client"]))
        found = evaluate(self._run_clients, shared, sizes) | means
        backdoored = {arm: ref for arm, ref in shared.items() if arm in self._backdoored}
        for arm, share in evaluate_backdoors(self._run_clients, backdoored, sizes["test"]).items():
            found[arm] |= share
        return found

    def _attack(self, round: int, sent: dict[str, ray.ObjectRef], tables: RoundTables) -> None:
        """Observe, attack, score: each in its own place, the observations and truths passed by reference."""
        due = [
            AttackCall(arm, attack, victims, repeat, strip=chunk == repeat == 0)
            for attack in self._scenario.attacks
            if round in attack.rounds
            for chunk, victims in enumerate(self._chunks(attack, round))
            for repeat in range(attack.repeats)
            for arm in sent
        ]
        if not due:
            return
        observe = [
            Call(
                "observe",
                (d.arm, sent[d.arm], d.victims, d.attack, self._states_behind(d, round), d.repeat),
                i,
                returns=3,
            )
            for i, d in enumerate(due)
        ]
        observed = {call.tag: refs for call, _, refs in self._run_clients(observe)}
        known = {arm: (self._scenario.model_of(arm), stack) for arm, stack in self._scenario.stacks.items()}
        attack = [
            Call("attack", (d.attack, *known[d.arm], observed[i][0], self._keys(d, round)), i, returns=2)
            for i, d in enumerate(due)
        ]
        attacked = {}
        for call, outcomes, [reconstructions] in self._run_attackers(attack):
            attacked[call.tag] = outcomes, reconstructions
            self._progress.attacks_done(round, len(attacked), len(due))
        score = [Call("score", (observed[i][1], attacked[i][1], d.strip), i) for i, d in enumerate(due)]
        scored = {call.tag: result for call, result, _ in self._run_clients(score)}
        for i, d in enumerate(due):
            _note_attack(tables, d, round, attacked[i][0], scored[i])

    def _chunks(self, attack: AttackSpec, round: int) -> Iterable[tuple[int, ...]]:
        victims = plan.victims(self._scenario, attack, round, self._samples)
        size = attack.victims_per_call
        return [tuple(victims[i : i + size]) for i in range(0, len(victims), size)]

    def _keys(self, d: AttackCall, round: int) -> list[int]:
        key = (self._scenario.seed, "attack", d.attack.title, round)
        return [seeds.torch_generator(*key, v, *seeds.again(d.repeat)).initial_seed() for v in d.victims]

    def _states_of(self, arm: str, clients: Iterable[int]) -> dict[int, State]:
        return {c: self.states[arm][c] for c in clients if c in self.states[arm]}

    def _states_behind(self, d: AttackCall, round: int) -> dict[int, State]:
        """The memories of the clients whose work an observation repeats."""
        if d.attack.observes == "shown":
            return self._states_of(d.arm, plan.drawn_clients(self._scenario, round))
        colluders = (
            [plan.colluder(self._scenario, round, v) for v in d.victims] if "colluder" in d.attack.knowledge else []
        )
        return self._states_of(d.arm, [*d.victims, *colluders])

    def _run_clients(self, calls: Sequence[Call]) -> Iterable[tuple[Call, Any, list[ray.ObjectRef]]]:
        return self._noting_losses(self._clients, calls, "client actor")

    def _run_attackers(self, calls: Sequence[Call]) -> Iterable[tuple[Call, Any, list[ray.ObjectRef]]]:
        if self._attackers is None:
            d, a = self._data, self._allotment
            arguments = (d.image_shape, len(d.classes), a.attacker)
            self._attackers = Pool(self._crew, a.attackers, AttackerActor, a.attacker, *arguments)
        return self._noting_losses(self._attackers, calls, "attacker")

    def _noting_losses(
        self, pool: Pool, calls: Sequence[Call], what: str
    ) -> Iterable[tuple[Call, Any, list[ray.ObjectRef]]]:
        known = pool.losses
        for result in pool.run(calls):
            if pool.losses > known:
                self._progress.note(f"{pool.losses - known} {what} died; another does its work again")
                known = pool.losses
            yield result


def _untrained(arm: Arm) -> ArmState:
    return {"weights": arm.weights, "buffers": arm.buffers, "state": {}, "memory": {}}


def _arm_state(sent: Sent, kept: Kept) -> ArmState:
    return {"weights": sent.weights, "buffers": sent.buffers, "state": kept.state, "memory": kept.memory}


def _bytes_of(arm: ArmState) -> int:
    return sum(t.numel() * t.element_size() for t in [*arm["weights"].values(), *arm["buffers"].values()])


def _round_row(arm: str, round: int, clients: Rows, actor_seconds: float) -> dict[str, Any]:
    trained = [row for row in clients if not isnan(row["loss"])]
    counted = sum(row["samples"] for row in trained)
    return {
        "arm": arm,
        "round": round,
        "train_loss": sum(row["loss"] * row["samples"] for row in trained) / counted if counted else None,
        "clients": len(clients),
        "samples": sum(row["samples"] for row in clients),
        "actor_seconds": actor_seconds,
        "bytes_up": sum(row["sent_bytes"] for row in clients),
    }


def _note_attack(
    tables: RoundTables,
    d: AttackCall,
    round: int,
    outcomes: Sequence[Guess],
    scored: Sequence[tuple[Rows, Rows, Rows]],
) -> None:
    """Add one call's rows to the tables of attacks, traces, images, snapshots and inferences."""
    for victim, outcome, (rows, images, snapshots) in zip(d.victims, outcomes, scored, strict=True):
        key = {"arm": d.arm, "round": round, "attack": d.attack.title, "victim": victim, "repeat": d.repeat}
        tables.images += [key | image for image in images]
        tables.snapshots += [key | snapshot for snapshot in snapshots]
        if isinstance(outcome, Inference):
            tables.inferences += [key | row | {"status": outcome.status, "message": outcome.message} for row in rows]
            continue
        result = {
            "batch_size": len(rows),
            "observes": d.attack.observes,
            "knowledge": ",".join(d.attack.knowledge),
            "objective": outcome.loss,
            "iterations": outcome.iterations,
            "seconds": outcome.seconds,
            "status": outcome.status,
            "message": outcome.message,
        }
        tables.attacks += [key | row | result for row in rows]
        tables.traces += [key | {"iteration": i, "objective": o} for i, o in outcome.trace]
