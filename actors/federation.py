"""The journey of one round over the actors: cohorts out, partial results to the server, evaluation, attacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from math import ceil, isnan
from typing import Any, TypeAlias

import numpy as np
import ray
from ray.exceptions import ObjectLostError, RayActorError

from actors.attacker import AttackerActor
from actors.attacking import Attacks
from actors.calls import Call
from actors.client import ClientActor
from actors.cluster import Allotment
from actors.cohorts import Cohort, Patience, portions, rows_of, told
from actors.crew import Crew
from actors.evaluation import evaluate, evaluate_backdoors, evaluate_members, private_layers, slices
from actors.pool import Pool, wait_for
from actors.progress import Progress
from actors.server import ArmState, Kept, ServerActor, ServerRole
from actors.tables import RoundTables, Rows
from rayfed.aggregation.server_optimiser import ServerOptimiser
from rayfed.client import plan
from rayfed.client.arm import Arm, build_arm
from rayfed.client.clients import Sent, Split, State
from rayfed.client.failures import check_left
from rayfed.client.malicious import Malicious
from rayfed.crypto.masking import Transcript
from rayfed.data.base import Dataset
from rayfed.data.partitions.base import Parts
from rayfed.scenario import Scenario

_CALLS = 2
"""Calls for each actor in a round's training: more even out better, but each costs its way there and back."""
Recall = Callable[[str, Iterable[int], int], dict[int, State]]
"""The memories of some clients of an arm when a round begins."""
Served: TypeAlias = "tuple[ray.ObjectRef[Any], ray.ObjectRef[Any]]"
"""What clients are sent, and what stays with the server beside it."""


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
        recall: Recall,
        crew: Crew,
    ) -> None:
        """`saved` is the server's side of a checkpoint, or empty; `recall` reads the clients', to which whoever plays
        rounds adds what they `changed`.
        """
        self._scenario, self._data, self._allotment, self._progress = scenario, data, allotment, progress
        dealt = Parts.of(parts)
        self._samples = dealt.sizes
        arms = {
            name: build_arm(scenario.model_of(name), stack, data.image_shape, len(data.classes), scenario.seed)
            for name, stack in scenario.stacks.items()
        }
        self._saved = {name: saved.get(name) or _untrained(arm) for name, arm in arms.items()}
        self._private = {name for name, arm in arms.items() if arm.private}
        malicious = {name: Malicious.of(scenario, name) for name in arms}
        self._backdoored = {name for name, m in malicious.items() if m.poisoning.has_trigger}
        self._colluders = {name: m.clients if m.poisoning.colludes else frozenset() for name, m in malicious.items()}
        self.changed: dict[str, dict[int, State]] = {}
        """Arm -> client -> memory, of the clients of the last finished round."""
        self._recall = recall
        self._sent: dict[str, Served] = {}
        self._transcripts: dict[tuple[str, int, int], Transcript] = {}
        """What an arm's client remembers of a round's questions; kept when the server dies and asks them again."""
        data_ref, parts_ref, validation_ref = ray.put(data), ray.put(dealt), ray.put(Parts.of(validation))
        self._boxes: dict[str, bytes] = {}
        self._crew = crew
        self._server = self._start_server()
        arguments = (scenario, data_ref, parts_ref, allotment.client, validation_ref)
        self._attackers: Pool | None = None
        self._clients = Pool(
            crew,
            allotment.clients,
            ClientActor,
            allotment.client,
            *arguments,
            make_room=lambda: self._make_room(self._attackers, "attacker"),
        )
        self._attacks = Attacks(scenario, self._samples, recall, self._run_clients, self._run_attackers, progress)

    def start(self) -> None:
        """Wait until the clients' actors are up, so that a round's time is that of its work; where they encrypt, one
        client makes the keys of all, and the server passes them on without being able to read them.

        Raises `ResourceError` when the cluster does not bring them up in time.
        """
        self._clients.wait()
        if self._clients.losses:
            self._progress.note(f"{self._clients.losses} client actor died as it started; another takes its place")
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
        self._attacks.strike(round, {arm: sent for arm, (sent, _) in served.items()}, tables)
        return tables

    def _play(self, round: int, limits: Mapping[str, int]) -> RoundTables:
        tables, arms = RoundTables(), [arm for arm, limit in limits.items() if round < limit]
        self._transcripts = {key: known for key, known in self._transcripts.items() if key[1] == round}
        cohorts = plan.cohorts(self._scenario, round)
        served = {arm: self._sent.get(arm) or self._ask_server("sent", arm, round) for arm in arms}
        served |= self._opened(round, served)
        before = {arm: sent for arm, (sent, _) in served.items()}
        drawn = set(chain(*cohorts))
        known = {arm: self._recall(arm, drawn, round) for arm in arms}
        states = self._train(round, cohorts, before, known, tables)
        kept = private_layers(self._run_clients, {arm: own for arm, own in states.items() if arm in self._private})
        tables.private += [row | {"round": round} for row in kept]
        failed = {(row["arm"], row["client"]) for row in tables.clients if row["status"] != "ok"}
        self._consult(round, before, {arm: known[arm] | states[arm] for arm in arms}, failed)
        secure = self._scenario.privacy.secure
        without = {arm: [client for its, client in failed if its == arm] for arm in arms}
        keys = {arm: plan.server_key(self._scenario, arm, round, without[arm]) for arm in arms}
        served = {arm: self._ask_server("finish", arm, round, keys[arm], secure) for arm in arms}
        every = self._scenario.federation.evaluate_every
        due = [arm for arm in arms if (round + 1) % every == 0 or round + 1 == limits[arm]]
        evaluations = self._evaluate({arm: served[arm][0] for arm in due}, states, tables)
        self._attacks.strike(round, before, tables)
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
            row["bytes_down"] = _bytes_of(self._saved[row["arm"]]) * sum(r["arm"] == row["arm"] for r in tables.clients)
        self.changed = states
        return tables

    def _ask_server(self, method: str, *arguments: Any) -> Served:
        sent, kept = getattr(self._server, method).options(num_returns=2).remote(*arguments)
        return sent, kept

    def _train(
        self,
        round: int,
        cohorts: list[list[int]],
        sent: dict[str, ray.ObjectRef[Any]],
        known: dict[str, dict[int, State]],
        tables: RoundTables,
    ) -> dict[str, dict[int, State]]:
        """All arms' cohorts, the largest first so that the last to finish is a small one; the clients' new states."""
        weights = [float(self._samples[clients].sum()) for clients in cohorts]
        failures, note = self._scenario.federation.failures, self._progress.note
        alone = failures.timeout is not None  # else how long one is waited for would depend on the number of actors
        calls = len(cohorts) if alone else max(2, ceil(_CALLS * self._allotment.clients / len(sent)))
        work = [
            [
                Cohort(arm, i, sent[arm], tuple(cohorts[i]), _some(known[arm], {*cohorts[i], *self._colluders[arm]}))
                for i in portion
            ]
            for arm in sent
            for portion in portions(weights, calls)
        ]
        work.sort(key=lambda portion: -sum(weights[cohort.index] for cohort in portion))
        states: dict[str, dict[int, State]] = {arm: {} for arm in sent}
        added: list[ray.ObjectRef[Any]] = []
        seconds = dict.fromkeys(sent, 0.0)
        for portion, report, partials in Patience(round, failures, self._run_clients, note).results(work):
            arm = portion[0].arm
            added.append(self._server.add.remote(arm, len(cohorts), partials))
            tables.clients += report.rows
            tables.clients += [row for cohort in portion for row in rows_of(cohort, self._scenario, round)]
            states[arm].update(report.states)
            seconds[arm] += report.seconds
            self._progress.clients_done(round, len(tables.clients), sum(map(len, cohorts)) * len(sent))
        ray.get(added)
        states = {arm: dict(sorted(own.items())) for arm, own in states.items()}  # whoever was done first
        order = {arm: i for i, arm in enumerate(sent)}
        tables.clients.sort(key=lambda row: (order[row["arm"]], row["client"]))
        for arm in sent:
            rows = [row for row in tables.clients if row["arm"] == arm]
            if (left := sum(row["status"] == "ok" for row in rows)) < len(rows):
                note(told(arm, round, rows))
                check_left(self._scenario, arm, round, left, len(rows))
            tables.rounds.append(_round_row(arm, round, [r for r in rows if r["status"] == "ok"], seconds[arm]))
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
        remembered = {arm: self._recall(arm, members, round) for arm in opened}
        self._consult(round, {arm: served[arm][0] for arm in opened}, remembered)
        return {arm: self._ask_server("sent", arm, round) for arm in opened}

    def _consult(
        self,
        round: int,
        sent: dict[str, ray.ObjectRef[Any]],
        states: dict[str, dict[int, State]],
        failed: Collection[tuple[str, int]] = (),
    ) -> None:
        """Carry what the rules ask to the round's clients and the answers back, until no arm's rule asks any more;
        clients that have `failed` in an arm are asked nothing.

        Payloads and answers go by reference: the driver never holds them. The server hears clients in their order,
        whoever answered first.
        """
        drawn = plan.drawn_clients(self._scenario, round)
        members = {arm: [c for c in drawn if (arm, c) not in failed] for arm in sent}

        asking = list(sent)
        while asking:
            asked = {arm: self._ask_server("ask", arm) for arm in asking}
            whom = {arm: of for arm, (ref, _) in asked.items() if (of := ray.get(ref))}
            calls = [
                Call(
                    "answer",
                    (
                        arm,
                        sent[arm],
                        asked[arm][1],
                        c,
                        states[arm].get(c, {}),
                        self._transcripts.get((arm, round, c), {}),
                    ),
                    (arm, c),
                    returns=2,
                )
                for arm, of in whom.items()
                for c in (members[arm] if of == "all" else members[arm][:1])
            ]
            answers = {}
            for call, transcript, [answer] in self._run_clients(calls):
                arm, client = call.tag
                answers[arm, client] = answer
                self._transcripts[arm, round, client] = transcript
            heard = [
                self._server.hear.remote(
                    arm, own := [c for c in members[arm] if (arm, c) in answers], *(answers[arm, c] for c in own)
                )
                for arm in whom
            ]
            ray.get(heard)
            asking = list(whom)

    def _evaluate(
        self, sent: dict[str, ray.ObjectRef[Any]], states: dict[str, dict[int, State]], tables: RoundTables
    ) -> dict[str, dict[str, float | None]]:
        """Loss and accuracy on the test set, arm by arm, and accuracy on clients' own data where it is asked for."""
        sizes: dict[Split, int] = {"test": len(self._data.test_labels)}
        if self._scenario.federation.evaluate_clients:
            sizes["train"] = int(self._samples.sum())
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

    def _run_clients(self, calls: Sequence[Call]) -> Iterable[tuple[Call, Any, list[ray.ObjectRef[Any]]]]:
        return self._noting_losses(self._clients, calls, "client actor")

    def _run_attackers(self, calls: Sequence[Call]) -> Iterable[tuple[Call, Any, list[ray.ObjectRef[Any]]]]:
        if self._attackers is None:
            d, a = self._data, self._allotment
            arguments = (d.image_shape, len(d.classes), a.attacker)
            self._attackers = Pool(
                self._crew,
                a.attackers,
                AttackerActor,
                a.attacker,
                *arguments,
                make_room=lambda: self._make_room(self._clients, "client actor"),
            )
        return self._noting_losses(self._attackers, calls, "attacker")

    def _make_room(self, giver: Pool | None, what: str) -> None:
        """Where a node died and its actors find no place on those that are left, one of the other kind gives way."""
        if giver and giver.give_place():
            self._progress.note(f"there is no place for what died: one {what} gives way")

    def _noting_losses(
        self, pool: Pool, calls: Sequence[Call], what: str
    ) -> Iterable[tuple[Call, Any, list[ray.ObjectRef[Any]]]]:
        known = pool.losses
        for result in pool.run(calls):
            if pool.losses > known:
                lost = pool.losses - known
                self._progress.note(f"{lost} {what}{'s' * (lost > 1)} died; another does the work again")
                known = pool.losses
            yield result


def _some(states: Mapping[int, State], clients: Iterable[int]) -> dict[int, State]:
    return {c: states[c] for c in clients if c in states}


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
