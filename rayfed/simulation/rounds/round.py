"""One round of a federation: training of cohorts, the server's step, evaluation and attacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from math import isnan
from typing import Any

from rayfed.aggregation.asynchronous import AsynchronousRule
from rayfed.aggregation.base import AnyAggregation, InteractiveAggregation
from rayfed.errors import ScenarioError
from rayfed.models.private_conv import private_convs
from rayfed.scenario import Scenario
from rayfed.simulation.client import plan
from rayfed.simulation.client.arm import Arm
from rayfed.simulation.client.failures import check_left
from rayfed.simulation.client.server_message import Sent, Split, State
from rayfed.simulation.executors.base import Call, Ref
from rayfed.simulation.executors.stragglers import (
    Cohort,
    Portion,
    StragglerHandling,
    format_failures,
    make_straggler_rows,
    split_among_workers,
    split_by_weight,
)
from rayfed.simulation.rounds import node_sums
from rayfed.simulation.rounds.attacks import PendingAttacks
from rayfed.simulation.rounds.evaluation import (
    Found,
    count_slices,
    evaluate,
    evaluate_backdoors,
    evaluate_encrypted,
    evaluate_members,
    measure_baselines,
    measure_private_layers,
)
from rayfed.simulation.rounds.federation import Federation, RoundStart
from rayfed.simulation.rounds.node_sums import NodeSums, assign_homes
from rayfed.simulation.rounds.questions import consult
from rayfed.simulation.server import ArmServerState, ArmState
from rayfed.simulation.tables import RoundTables, Rows
from rayfed.simulation.virtual_time.admission import Admission
from rayfed.simulation.virtual_time.clock import DROPPED, SENT, RoundClock
from rayfed.simulation.virtual_time.flights import InFlightUpdates
from rayfed.update import Named

States = dict[str, dict[int, State]]
"""Arm -> client -> state of the client."""


def count_calls(scenario: Scenario, test_samples: int) -> tuple[int, int]:
    """Return the maximum numbers of concurrent calls in a round: (client calls, attacker calls)."""
    arms = len(scenario.played)
    cohorts = -(-scenario.drawn_per_round // plan.cohort_size(scenario))
    due: dict[int, int] = {}
    for attack in scenario.attacks:
        victims = attack.victims if isinstance(attack.victims, int) else len(attack.victims)
        for round in attack.rounds:
            due[round] = due.get(round, 0) + arms * attack.repeats * -(-victims // attack.victims_per_call)
    return arms * max(cohorts, count_slices(test_samples)), max(due.values(), default=0)


class Round:
    """One round of a federation, for several arms (tested variants) at once."""

    def __init__(self, federation: Federation, number: int, arms: Sequence[str]) -> None:
        self.federation, self.number = federation, number
        self.arms = {name: federation.arms[name] for name in arms}
        rules = {name: federation.rules[name] for name in arms}
        self.asking = [name for name, rule in rules.items() if _asks(self.arms[name], rule)]
        self.asynchronous = [name for name, rule in rules.items() if rule.asynchronous]
        self.cohorts = {name: plan.cohorts(federation.scenario, number, name in self.asynchronous) for name in arms}
        self.flights: dict[str, InFlightUpdates] = {}
        self.added: list[Ref] = []
        """Unconfirmed calls in which the server adds partial results."""
        self.tables = RoundTables()

    def play(self, due: Iterable[str]) -> RoundTables:
        """Train, aggregate, evaluate the arms in `due`, run the attacks, and return the round's rows."""
        before = self._states_before()
        sent = self._begin()
        begun = self._begin_attacks(sent)
        after = self._train(sent, before)
        self._measure_private_layers(after)
        self._ask(sent, before, after)
        served = self._step()
        finished = self._finished(served)  # before client calls, so that a hanging server is not mistaken for a client
        evaluations = self._evaluate({arm: served[arm].sent for arm in due}, after)
        self.federation.attacks.run_attacks(self.number, sent, self.tables, self._earlier(), begun)
        self._end(served, finished, after, evaluations)
        return self.tables

    def attack_alone(self, interrupted: Callable[[RoundTables], object]) -> RoundTables:
        """Run the round's attacks without training, on the weights that clients would receive, and return the rows.

        After Ctrl-C, `interrupted` is called with the rows so far.
        """
        sent = {arm: self.federation.ask_server("sent", arm, self.number).sent for arm in self.arms}
        try:
            self.federation.attacks.run_attacks(self.number, sent, self.tables, {})
        except KeyboardInterrupt:
            interrupted(self.tables)
            raise
        return self.tables

    @property
    def _failed(self) -> set[tuple[str, int]]:
        """Return the (arm, client) pairs that failed."""
        return {(row["arm"], row["client"]) for row in self.tables.clients if row["status"] != "ok"}

    def _states_before(self) -> States:
        """Return the states of the round's clients at its start, by arm."""
        return {arm: self.federation.load_states(arm, self._clients(arm), self.number) for arm in self.arms}

    def _clients(self, arm: str) -> list[int]:
        """Return the clients of an arm in this round, in the order of their cohorts."""
        return list(chain(*self.cohorts[arm]))

    def _begin(self) -> dict[str, Ref]:
        """Start the round, ask questions before training, and return the messages to clients by arm."""
        federation = self.federation
        federation.forget_transcripts(self.number)
        served = {
            arm: federation.served.get(arm) or federation.ask_server("sent", arm, self.number) for arm in self.arms
        }
        sent = {arm: one.sent for arm, one in served.items()}
        if not self.asking or not (members := plan.drawn_clients(federation.scenario, self.number)):
            return sent
        opening = [federation.executor.serve("begin_round", arm, self.number, members) for arm in self.asking]
        opens = federation.wait_for(opening, len(opening))
        opened = [arm for arm, does in zip(self.asking, opens, strict=True) if does]
        states = {arm: federation.load_states(arm, members, self.number) for arm in opened}
        consult(federation, self.number, {arm: sent[arm] for arm in opened}, states)
        return sent | {arm: federation.ask_server("sent", arm, self.number).sent for arm in opened}

    def _begin_attacks(self, sent: Mapping[str, Ref]) -> PendingAttacks | None:
        """Start attacks before the training, if attackers do not slow clients down.

        Otherwise, or if clients may hang or fail, returns None, because failures are detected in the training.
        """
        federation, failures = self.federation, self.federation.scenario.federation.failures
        if not federation.executor.attackers_apart or failures.timeout is not None or failures.then == "drop":
            return None
        return federation.attacks.begin(self.number, sent, self._earlier())

    def _train(self, sent: Mapping[str, Ref], before: States) -> States:
        """Train all cohorts, add their sums at the server, record rows, and return the clients' new states."""
        federation = self.federation
        note, executor = federation.progress.note, federation.executor
        handling = StragglerHandling(self.number, federation.scenario.federation.failures, executor.run_clients, note)
        states: States = {arm: {} for arm in self.arms}
        seconds, warming = dict.fromkeys(self.arms, 0.0), set[str]()
        done = 0
        everybody = sum(len(self._clients(arm)) for arm in self.arms)
        clocks = self._clocks()
        self.flights = {arm: self._flights(arm, clocks.pop(arm)) for arm in self.asynchronous}
        admission = Admission(clocks)
        work, lost = admission.left(self._work(sent, before))
        counts = {arm: len(cohorts) for arm, cohorts in self.cohorts.items()}
        sums = NodeSums(federation.run_clients, handling.results, sent, counts)
        for result in admission.results(handling.results(work), work, lost):
            portion, report, partials, _ = result
            arm = portion[0].arm.name
            rows = [
                *report.rows,
                *chain(*(make_straggler_rows(cohort, federation.scenario, self.number) for cohort in portion)),
            ]
            if arm in self.flights:
                self.flights[arm].add(rows, partials)
            else:
                self.tables.clients += rows
                if portion[0].node and result.node:
                    sums.add(result)
                else:
                    self.added.append(executor.serve("add", arm, counts[arm], partials))
            states[arm].update(report.states)
            seconds[arm] += report.seconds
            if report.warming:
                warming.add(arm)
            federation.note_once(report.notes)
            done += sum(map(len, (cohort.clients for cohort in portion)))
            federation.progress.clients_done(self.number, done, everybody)
        for arm, partials in sums.merge():
            self.added.append(executor.serve("add", arm, counts[arm], partials))
        for arm, flights in self.flights.items():
            self.added += self._apply_arrivals(arm, flights)
        self._sum_up(seconds, warming, admission)
        return {arm: dict(sorted(own.items())) for arm, own in states.items()}  # in a fixed order

    def _flights(self, arm: str, clock: RoundClock) -> InFlightUpdates:
        """Return the updates of an arm that are in flight at the start of the round."""
        federation = self.federation
        count, held = federation.scenario.clients_per_round, federation.held.get(arm, {})
        return InFlightUpdates.from_state(self.number, clock, count, federation.saved[arm], held)

    def _apply_arrivals(self, arm: str, flights: InFlightUpdates) -> list[Ref]:
        """Advance an arm until enough updates for a step have arrived, and add them at the server in order."""
        federation = self.federation
        flights.advance(self._clients(arm))
        rule, earlier = federation.rules[arm], federation.saved[arm]["earlier"]
        again = [
            Call("cohorts", (arm, Sent(one.round, **earlier[one.round]), 0, [(one.client,)], {}), one.key, returns=2)
            for one in flights.missing()
        ]
        for done in federation.run_clients(again):
            [flights.held[done.call.tag]] = done.rest
        added = []
        for place, one in enumerate(flights.landed):
            begun = federation.saved[arm] if one.round == self.number else earlier[one.round]
            known = begun["weights"] if isinstance(rule, AsynchronousRule) and rule.mixes else {}
            args = len(flights.landed), place, self.number - one.round, known, flights.held[one.key]
            added.append(federation.executor.serve("apply_async_update", arm, *args))
        self.tables.clients += flights.rows
        return added

    def _clocks(self) -> dict[str, RoundClock]:
        """Return the virtual clock of the round by arm; empty without devices in the scenario."""
        federation = self.federation
        if (clock := federation.clock) is None:
            return {}
        return {
            name: clock.begin(arm.spec, self.number, self._clients(name), _bytes_of(federation.saved[name]))
            for name, arm in self.arms.items()
        }

    def _work(self, sent: Mapping[str, Ref], before: States) -> list[Portion]:
        """Return all arms' cohorts in portions of one call, largest first, so that the last one to end is small."""
        federation, scenario = self.federation, self.federation.scenario
        weights = {
            arm: [float(federation.samples[clients].sum()) for clients in cohorts]
            for arm, cohorts in self.cohorts.items()
        }
        drops = scenario.federation.system is not None and scenario.federation.system.drops
        alone = scenario.federation.failures.timeout is not None  # a limit must not depend on the number of workers
        work = []
        for name, arm in self.arms.items():
            malicious = federation.malicious[name]
            colluders = malicious.clients if malicious.poisoning.colludes else frozenset()
            count = len(self.cohorts[name])
            apart = drops or name in self.asynchronous  # each update is admitted or rejected separately
            if apart:
                split = [[i] for i in range(count)]
            elif alone:
                split = split_by_weight(weights[name], count, count)
            else:
                split = split_among_workers(weights[name], federation.executor.clients, len(self.arms))
            loads = [sum(weights[name][i] for i in portion) for portion in split]
            for portion, node in zip(split, self._homes(name, loads), strict=True):
                own = [(i, tuple(self.cohorts[name][i])) for i in portion]
                known = {i: _some(before[name], {*clients, *colluders}) for i, clients in own}
                work.append([Cohort(arm.spec, i, sent[name], c, known[i], node=node) for i, c in own])
        return sorted(work, key=lambda portion: -sum(weights[cohort.arm.name][cohort.index] for cohort in portion))

    def _homes(self, name: str, loads: Sequence[float]) -> list[str]:
        """Return the node of each portion of an arm with these loads; empty strings if sums are not added on nodes.

        Sums are not added on nodes if there is only one node, if the model is small, if the rule gathers updates (a sum
        is then no smaller than its parts), or if it is asynchronous.
        """
        rule, nodes = self.federation.rules[name], self.federation.executor.nodes()
        small = _bytes_of(self.federation.saved[name]) < node_sums.LEAST
        if len(nodes) < 2 or small or rule.gathers or rule.asynchronous:
            return [""] * len(loads)
        return assign_homes(loads, nodes)

    def _sum_up(self, seconds: Mapping[str, float], warming: Collection[str], admission: Admission) -> None:
        """Add a row for every arm from its clients' rows; `seconds` has the time of their work by arm.

        In the arms `warming`, a process trained for the first time. Raises `ClientError` if too few clients are left.
        """
        order = {arm: i for i, arm in enumerate(self.arms)}
        self.tables.clients.sort(key=lambda row: (order[row["arm"]], row["client"]))
        for name, arm in self.arms.items():
            rows = [row for row in self.tables.clients if row["arm"] == name]
            simulated = self.flights[name].columns if name in self.flights else admission.close(name, rows)
            if self.federation.clock:
                ended, took = self.federation.saved[name].get("ended", 0.0), simulated["simulated_seconds"]
                simulated["simulated_seconds"] = self.federation.clock.since(ended, self.number, took)
            left = [row for row in rows if row["status"] == "ok"]
            if failed := [row for row in rows if row["status"] not in ("ok", *DROPPED)]:
                self.federation.progress.note(format_failures(name, self.number, failed, len(rows)))
            if len(left) < len(rows):
                check_left(arm.spec, self.number, len(left), len(rows))
            row = _round_row(name, self.number, left, seconds[name]) | {"warming": name in warming} | simulated
            row["bytes_up"] = sum(row["sent_bytes"] for row in rows if row["status"] in SENT)
            self.tables.rounds.append(row)

    def _measure_private_layers(self, after: States) -> None:
        private = {name: after[name] for name, arm in self.arms.items() if private_convs(arm.model)}
        rows = measure_private_layers(self.federation.run_clients, private)
        self.tables.private += [row | {"round": self.number} for row in rows]

    def _ask(self, sent: Mapping[str, Ref], before: States, after: States) -> None:
        """Ask clients the rules' questions about the round's sums."""
        if not self.asking:
            return
        self.federation.wait_for(self.added, len(self.added))
        states = {arm: before[arm] | after[arm] for arm in self.asking}
        consult(self.federation, self.number, {arm: sent[arm] for arm in self.asking}, states, self._failed)

    def _step(self) -> dict[str, RoundStart]:
        """Run the server's step, and return its values for the next round."""
        federation, secure = self.federation, self.federation.scenario.privacy.secure
        failed = self._failed
        served = {}
        for arm in self.arms:
            without = [client for its, client in failed if its == arm]
            key = plan.server_key(federation.scenario, arm, self.number, without)
            served[arm] = federation.ask_server("finish", arm, self.number, key, secure)
        return served

    def _earlier(self) -> dict[str, list[Sent]]:
        """Return the stored messages to clients of earlier rounds, by arm."""
        saved = self.federation.saved
        return {arm: [Sent(round, **model) for round, model in saved[arm]["earlier"].items()] for arm in self.arms}

    def _kept(self, arm: str, states: Mapping[int, State]) -> dict[int, dict[str, Named]]:
        """Return the messages up to this round that attacks of later rounds need.

        The mapping is empty if the arm encrypts or masks updates. Raises `ScenarioError` if clients have `states` that
        no defence declares (`keeps_state`), because their updates could not be computed again.
        """
        before, attacks = self.federation.saved[arm], self.federation.scenario.attacks
        needed = plan.looked_back_on(attacks, self.number + 1)
        if self.arms[arm].spec.protection:
            return {}
        if arm in self.flights:
            needed |= {one.round for one in self.flights[arm].flying}
        if self.number in needed and states:
            raise ScenarioError(
                f"attacks need updates of round {self.number}, but clients of arm '{arm}' have a state that no defence "
                f"declares (keeps_state), and only the latest state is stored: remove the arm, or "
                f"remove `earlier` from the attacks"
            )
        kept = before["earlier"] | {self.number: {part: before[part] for part in ("weights", "buffers")}}
        return {round: sent for round, sent in kept.items() if round in needed}

    def _evaluate(self, sent: Mapping[str, Ref], after: States) -> dict[str, Found]:
        """Return loss and accuracy on the test set by arm, and on clients' data with `evaluate_clients`."""
        federation, run = self.federation, self.federation.run_clients
        sizes: dict[Split, int] = {"test": len(federation.data.test_labels)}
        if federation.scenario.federation.evaluate_clients:
            sizes["train"] = int(federation.samples.sum())
        shared = {arm: ref for arm, ref in sent.items() if not self.arms[arm].private}
        split = {arm: ref for arm, ref in sent.items() if self.arms[arm].private}
        means, own = evaluate_members(run, split, after, federation.samples, list(sizes))
        for row in self.tables.clients:
            row["test_accuracy"] = own.get((row["arm"], row["client"]))
        found = evaluate(run, shared, sizes) | means
        for values in found.values():
            values |= measure_baselines(federation.data, federation.scenario.loss.build())
        backdoored = {a: ref for a, ref in shared.items() if federation.malicious[a].poisoning.has_trigger}
        for arm, share in evaluate_backdoors(run, backdoored, sizes["test"]).items():
            found[arm] |= share
        images = federation.scenario.federation.encrypted_images
        if images and self.number + 1 == federation.scenario.federation.rounds:
            encrypted = {arm: ref for arm, ref in shared.items() if self.arms[arm].spec.model.name == "cryptonet"}
            for arm, values in evaluate_encrypted(run, encrypted, images).items():
                found[arm] |= values
        return found

    def _finished(self, served: Mapping[str, RoundStart]) -> dict[str, tuple[Sent, ArmServerState]]:
        """Return the server's new state of all arms after its step; raises `Lost` if the server dies."""
        stepped = [ref for one in served.values() for ref in one]
        settled = self.federation.wait_for([*self.added, *stepped], len(self.added) + len(served))
        values = iter(settled[len(self.added) :])
        return {arm: (next(values), next(values)) for arm in served}

    def _end(
        self,
        served: Mapping[str, RoundStart],
        finished: Mapping[str, tuple[Sent, ArmServerState]],
        after: States,
        evaluations: Mapping[str, Found],
    ) -> None:
        """Replace the federation's state with the new one, and complete the round's rows."""
        federation = self.federation
        for arm, (new, kept) in finished.items():
            ended = federation.saved[arm].get("ended", 0.0)
            ended += sum(
                row["simulated_seconds"] for row in self.tables.rounds if federation.clock and row["arm"] == arm
            )
            federation.saved[arm] = {
                "weights": new.weights,
                "buffers": new.buffers,
                "state": kept.state,
                "memory": kept.memory,
                "earlier": self._kept(arm, after[arm]),
            }
            if federation.clock:
                federation.saved[arm]["ended"] = ended
            if arm in self.flights:
                federation.saved[arm]["flying"] = self.flights[arm].kept
                federation.held[arm] = self.flights[arm].left
            self.tables.add({"arm": arm, "round": self.number}, kept.rows)
        aborted = {arm: kept.aborted for arm, (_, kept) in finished.items() if kept.aborted}
        federation.aborted = [f"round {self.number} of arm {arm} is not applied: {why}" for arm, why in aborted.items()]
        federation.served, federation.changed = dict(served), after
        for row in self.tables.rounds:
            clients = sum(one["arm"] == row["arm"] for one in self.tables.clients)
            row.update(evaluations.get(row["arm"], {}))
            row["bytes_down"] = _bytes_of(federation.saved[row["arm"]]) * clients


def _asks(arm: Arm, rule: AnyAggregation) -> bool:
    """Return whether an arm's rule or protection asks clients questions."""
    return arm.spec.protection is not None or isinstance(rule, InteractiveAggregation)


def _some(states: Mapping[int, State], clients: Iterable[int]) -> dict[int, State]:
    return {c: states[c] for c in clients if c in states}


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
    }
