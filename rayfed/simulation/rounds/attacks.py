"""The attacks of one round: clients make observations, attackers compute results, clients score them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from time import monotonic
from typing import Any, NamedTuple, Protocol

import numpy as np

from rayfed.attacks.base import Guess, Inference, failed
from rayfed.attacks.progress import Standing
from rayfed.core import seeds
from rayfed.errors import UserError
from rayfed.scenario import AttackSpec, ResolvedArm, Scenario
from rayfed.simulation.client import plan
from rayfed.simulation.client.server_message import Sent, State
from rayfed.simulation.client.visit import ObservationRequest
from rayfed.simulation.executors.base import Call, Crashed, Done, Hear, Overdue, Ref, Run
from rayfed.simulation.progress import NoteOnce, Progress
from rayfed.simulation.tables import RoundTables, VictimRows
from rayfed.simulation.virtual_time.clock import SENT
from rayfed.store.schemas import TABLES, UNPLAYED, WANT_OF_TIME


@dataclass(frozen=True)
class AttackCall:
    """One call of an attack on some of the attack's victims in one arm (one tested variant of the federation)."""

    arm: ResolvedArm
    attack: AttackSpec
    victims: tuple[int, ...]
    repeat: int
    strip: bool
    """Whether to keep the snapshots of the call's first victim (first call and first repeat of the round only)."""


_HELD = 4 * 2**30
"""Approximate maximum bytes of observations held at once; those of a whole stage may exceed a machine's memory."""


CRASHES = 1
"""Number of process deaths after which an attack is run again; a single death may have another cause."""


class ScoringInputs(NamedTuple):
    """Values of a finished observation that its results are scored with."""

    truths: Ref
    """True samples, which stay with the clients."""
    sent: Ref
    """Message of the server to the victims."""
    request: ObservationRequest


@dataclass(frozen=True)
class Deadline:
    """Time at which attacks end."""

    ends: float = inf
    """On the clock `now`."""
    now: Callable[[], float] = monotonic

    @property
    def passed(self) -> bool:
        """Return whether the time is up."""
        return self.now() >= self.ends

    @property
    def left(self) -> float:
        """Return the seconds left, at least 0."""
        return max(self.ends - self.now(), 0.0)


@dataclass
class _CallState:
    """Attack calls, and their results so far."""

    round: int
    due: Sequence[AttackCall]
    deadline: Deadline = field(default_factory=Deadline)
    waits: bool = False
    """Whether the calls go on after the deadline until one has a result."""
    limit: float | None = None
    """Maximum seconds of each call; None for the limit of the scenario."""
    truths: dict[int, ScoringInputs] = field(default_factory=dict)
    """Index in `due` -> true samples and arguments of an observation that was made."""
    attacked: dict[int, tuple[Sequence[Guess], Ref]] = field(default_factory=dict)
    """Index in `due` -> results, in the order in which the calls ended."""
    done: list[tuple[str, float]] = field(default_factory=list)
    """Title and seconds of work of each finished call."""

    @property
    def late(self) -> bool:
        """Return whether no further call may start or go on."""
        return self.deadline.passed and not self.waits


LoadStates = Callable[[str, Iterable[int], int], dict[int, State]]
"""Load the states of an arm's clients at the start of a round: (arm, clients, round) -> client -> state."""


class CallResult(NamedTuple):
    """Results of an attack call that has ended."""

    call: AttackCall
    outcomes: Sequence[Guess] | None
    """Results without images, one per victim; None if the call exceeded its time limit."""
    tables: RoundTables
    """Rows of the call; empty without results."""


class _TimeIsUp(BaseException):
    """Signal that the time limit has passed. It is no `Exception`, because a search might catch those."""


class RunAttackers(Protocol):
    """Interface of a function that runs attack calls (`rayfed.simulation.executors.base.Executor.run_attackers`)."""

    def __call__(self, calls: Sequence[Call], hear: Hear | None = None, ahead: bool = False) -> Iterator[Done]:
        """Run attack calls, and yield each call with its result as it ends."""


@dataclass(frozen=True)
class PendingAttacks:
    """Attacks of a round that already run while the clients train."""

    due: Sequence[AttackCall]
    truths: Mapping[int, ScoringInputs]
    """Index in `due` -> true samples and arguments of a started call (`_CallState.truths`)."""
    ended: Iterator[Done]
    """The calls as they end, tagged with these indices."""


@dataclass(frozen=True)
class Attacks:
    """The attacks of a scenario, run by an executor round by round."""

    scenario: Scenario
    arms: Mapping[str, ResolvedArm]
    samples: np.ndarray
    """(clients,) int64, samples of each client."""
    load_states: LoadStates
    run_clients: Run
    """Run calls on client workers."""
    run_attackers: RunAttackers
    progress: Progress
    sizes: Mapping[str, int]
    """Bytes that the server sends to a client, by arm."""
    seconds: float = inf
    """Time limit for the attacks of a round, without their scores. Calls that do not fit are reported in the tables."""

    @cached_property
    def _note_once(self) -> NoteOnce:
        return NoteOnce(self.progress.note)

    @cached_property
    def _failures(self) -> dict[str, str]:
        """Metric -> reason why it could not be computed, for the failures already noted."""
        return {}

    def begin(
        self, round: int, sent: Mapping[str, Ref], earlier: Mapping[str, Sequence[Sent]]
    ) -> PendingAttacks | None:
        """Start attacks of a round before its training, as many as are observed at once; `run_attacks` collects the
        results.

        This is possible because an observation repeats the client's work. Returns None if there are no attacks, or if
        a client fails; its training then reports the error.
        """
        due = self.due(round, [self.arms[name] for name in sent])
        if not due:
            return None
        state = _CallState(round, due)
        try:
            observed = self._observe(state, range(len(due)), sent, earlier)
        except UserError:
            return None
        calls = [self._call(i, due[i], seen, round) for i, seen in observed.items()]
        return PendingAttacks(due, state.truths, self.run_attackers(calls, self._hear(state), ahead=True))

    def run_attacks(
        self,
        round: int,
        sent: Mapping[str, Ref],
        tables: RoundTables,
        earlier: Mapping[str, Sequence[Sent]],
        begun: PendingAttacks | None = None,
    ) -> None:
        """Observe a round's victims, run the attacks, score the results, and add the rows to `tables`.

        `earlier` has the kept values that clients received in previous rounds, by arm. Observations and true samples
        are passed by reference. Late clients are attacked, failed ones are not. If Ctrl-C stops the attacks, the rows
        of finished attacks are added first. Under a time limit, small batches come first. Calls that have `begun` are
        not repeated, unless one of their victims failed.
        """
        failed = {(row["arm"], row["client"]) for row in tables.clients if row["status"] not in SENT}
        due = self.due(round, [self.arms[name] for name in sent], failed=failed)
        state = _CallState(round, due, Deadline(monotonic() + self.seconds), waits=self.seconds > 0)
        indices = list(range(len(due)))
        if self.seconds < inf:
            indices.sort(key=lambda i: due[i].attack.batch_size)
        try:
            with suppress(_TimeIsUp):
                if begun:
                    self._end(state, begun)
                    indices = [i for i in indices if i not in state.truths]
                for _ in self._run(state, indices, sent, earlier):
                    pass
        except KeyboardInterrupt:
            with suppress(Exception):  # client workers may be gone, so that nothing can be scored
                self._score(state, tables)
            raise
        self._score(state, tables)
        for i, d in enumerate(due):
            if i not in state.attacked:
                note_not_run(tables, d, round, UNPLAYED, WANT_OF_TIME)

    def run_calls(
        self, round: int, calls: Sequence[AttackCall], sent: Mapping[str, Ref], deadline: Deadline, limit: float | None
    ) -> Iterator[CallResult]:
        """Run attack calls of a round until a deadline, and yield each call with its rows as it ends.

        Calls that are cut off by the deadline are not yielded. A call that exceeds `limit` seconds (None: no limit)
        has no results.
        """
        state = _CallState(round, calls, deadline, limit=limit)
        with suppress(_TimeIsUp):
            for i in self._run(state, range(len(calls)), sent, {}):
                tables = RoundTables()
                if i not in state.attacked:
                    yield CallResult(calls[i], None, tables)
                    continue
                self._score(state, tables, [i])
                yield CallResult(calls[i], state.attacked[i][0], tables)

    def _run(
        self, state: _CallState, indices: Sequence[int], sent: Mapping[str, Ref], earlier: Mapping[str, Sequence[Sent]]
    ) -> Iterator[int]:
        """Run calls, and yield the index of each when it has ended. Raises `_TimeIsUp` at the deadline.

        A call that exceeded `state.limit` has no entry in `state.attacked`.
        """
        while indices:
            if state.late:
                raise _TimeIsUp
            waiting = {i: state.due[i].attack.title for i in indices}
            observed = self._observe(state, indices, sent, earlier)
            calls = [self._call(i, state.due[i], seen, state.round, state.limit) for i, seen in observed.items()]
            ended = self.run_attackers(calls, self._hear(state))
            del observed, calls  # so that no observation is held after its call
            yield from self._gather(state, ended, waiting)
            indices = [i for i in indices if i not in state.truths]

    def _observe(
        self, state: _CallState, indices: Sequence[int], sent: Mapping[str, Ref], earlier: Mapping[str, Sequence[Sent]]
    ) -> dict[int, Ref]:
        """Return observations for the first of these calls, as many as are held at once, by index.

        After the time limit only one is made. The true samples are added to `state`.
        """
        observe, some, requests = [], self._at_once(state, indices), dict[int, ObservationRequest]()
        for i in some:
            d = state.due[i]
            past = tuple(one for one in earlier.get(d.arm.name, ()) if one.round >= state.round - d.attack.earlier)
            states = self._states_behind(d, state.round)
            requests[i] = ObservationRequest(d.arm.name, d.victims, d.attack, states, d.repeat, past)
            observe.append(Call("observe", (sent[d.arm.name], requests[i]), i, returns=3))
        observed, total = dict[int, Ref](), len(state.truths) + len(indices)
        for call, _, refs, _ in self.run_clients(observe):
            observed[call.tag], truths = refs
            request = requests[call.tag]
            state.truths[call.tag] = ScoringInputs(truths, sent[request.arm], request)
            self.progress.observations_done(state.round, len(state.truths), total)
            if state.deadline.passed:
                break
        return {i: observed[i] for i in some if i in observed}

    def _at_once(self, state: _CallState, indices: Sequence[int]) -> Sequence[int]:
        """Return the first of these calls, at least one, whose observations take at most about `_HELD` bytes.

        An observation has each victim's received weights, its update and, if a defence is known, masks.
        """
        room, some = _HELD, list[int]()
        for i in indices:
            d = state.due[i]
            room -= 3 * len(d.victims) * (1 + d.attack.earlier) * self.sizes[d.arm.name]
            if some and room < 0:
                break
            some.append(i)
        return some

    def _end(self, state: _CallState, begun: PendingAttacks) -> None:
        """Add the results of the calls that have begun to `state`, except calls with a victim that has failed."""

        def key(d: AttackCall) -> tuple[Any, ...]:
            return d.arm.name, d.attack.title, d.victims, d.repeat

        places = {key(d): i for i, d in enumerate(state.due)}
        now = {i: places[key(begun.due[i])] for i in begun.truths if key(begun.due[i]) in places}
        state.truths |= {now[i]: truths for i, truths in begun.truths.items() if i in now}
        waiting = {i: state.due[i].attack.title for i in now.values()}
        ended = (
            done._replace(call=replace(done.call, tag=now[done.call.tag]))
            for done in begun.ended
            if done.call.tag in now
        )
        for _ in self._gather(state, ended, waiting):
            pass

    def _hear(self, state: _CallState) -> Hear:
        """Return a callback that reports the progress of searches and raises `_TimeIsUp` at the time limit."""

        def hear(call: Call, standing: Standing | None) -> None:
            if state.late:
                raise _TimeIsUp
            if standing is None:
                return
            d = state.due[call.tag]
            self.progress.search_goes_on(state.round, d.attack.title, d.arm.name, standing)

        return hear

    def _gather(self, state: _CallState, ended: Iterable[Done], waiting: dict[int, str]) -> Iterator[int]:
        """Add the results of calls to `state` as they end, and yield their indices; `waiting` has titles by index."""
        self.progress.attacks_done(state.round, state.done, list(waiting.values()))
        for call, outcomes, rest, _ in ended:
            d = state.due[call.tag]
            del waiting[call.tag]
            if isinstance(outcomes, Overdue) and state.limit is not None:
                yield call.tag
                continue
            if isinstance(outcomes, Overdue | Crashed):
                nothing = self._unfinished(d, outcomes)
                outcomes, rest = nothing, [nothing]
            state.attacked[call.tag] = outcomes, rest[0]
            self._note_once(note for guess in outcomes for note in guess.notes)
            state.waits = state.waits and all(guess.status == "not applicable" for guess in outcomes)
            state.done.append((d.attack.title, sum(guess.seconds for guess in outcomes)))
            self.progress.attacks_done(state.round, state.done, list(waiting.values()))
            yield call.tag
            if waiting and state.late:
                raise _TimeIsUp

    def _score(self, state: _CallState, tables: RoundTables, indices: Collection[int] | None = None) -> None:
        """Score finished calls (default: all), and add their rows to `tables` in the planned order."""
        score = []
        for i in sorted(state.attacked if indices is None else indices):
            truths, sent, request = state.truths[i]
            score.append(Call("score", (truths, state.attacked[i][1], state.due[i].strip, sent, request), i))
        scored = {call.tag: result for call, result, *_ in self.run_clients(score)}
        self._note_failures(one for victims in scored.values() for one in victims)
        for i in sorted(scored):
            note_attack(tables, state.due[i], state.round, state.attacked[i][0], scored[i])

    def _note_failures(self, scored: Iterable[VictimRows]) -> None:
        """Print a note for each metric that could not be computed, with its first reason."""
        for name, why in (failure for one in scored for failure in one.failures):
            if name not in self._failures:
                self._failures[name] = why
                self.progress.note(f"{name} could not be computed and is left empty: {why}")

    def _call(self, tag: int, d: AttackCall, observations: Ref, round: int, most: float | None = None) -> Call:
        limit = compute_limit(self.scenario, d.victims) if most is None else most
        args = d.attack, d.arm.to_attackers(), observations, self._keys(d, round)
        return Call("attack", args, tag, returns=2, limit=limit, crashes=CRASHES)

    def _unfinished(self, d: AttackCall, how: Overdue | Crashed) -> list[Guess]:
        """Return failed results for an attack that took too long or whose process died."""
        if isinstance(how, Overdue):
            message = f"not finished within {self.scenario.resources.timeout:g} s per victim (resources.timeout)"
        elif how.memory:
            message = "the attack's process ran out of memory: lower the attack's batch_size, restarts or victims"
        else:
            message = f"the attack's process died {1 + CRASHES} times"
        return [failed(d.attack.build(), message) for _ in d.victims]

    def due(
        self,
        round: int,
        arms: Sequence[ResolvedArm],
        attacks: Sequence[AttackSpec] | None = None,
        failed: Collection[tuple[str, int]] = (),
    ) -> list[AttackCall]:
        """Return the calls of attacks (default: all) in a round, without the victims that `failed` in an arm."""
        return [
            AttackCall(arm, attack, there, repeat, strip=chunk == repeat == 0)
            for attack in (self.scenario.attacks if attacks is None else attacks)
            if round in attack.rounds
            for chunk, victims in enumerate(self._chunks(attack, round))
            for repeat in range(attack.repeats)
            for arm in arms
            if (there := tuple(v for v in victims if (arm.name, v) not in failed))
        ]

    def _chunks(self, attack: AttackSpec, round: int) -> Iterable[tuple[int, ...]]:
        victims = plan.victims(self.scenario, attack, round, self.samples)
        size = attack.victims_per_call
        return [tuple(victims[i : i + size]) for i in range(0, len(victims), size)]

    def _keys(self, d: AttackCall, round: int) -> list[bytes]:
        return derive_keys(self.scenario, d.attack, round, d.victims, d.repeat)

    def _states_behind(self, d: AttackCall, round: int) -> dict[int, State]:
        """Return the states of the clients whose work the call's observation repeats."""
        return self.load_states(d.arm.name, plan.behind(self.scenario, d.attack, round, d.victims), round)


def compute_limit(scenario: Scenario, victims: Sequence[int]) -> float | None:
    """Return the maximum seconds of a call that attacks these victims (`resources.timeout`); None for no limit."""
    seconds = scenario.resources.timeout
    return None if seconds is None else seconds * len(victims)


def derive_keys(
    scenario: Scenario, attack: AttackSpec, round: int, victims: Sequence[int], repeat: int = 0
) -> list[bytes]:
    """Return the keys that seed an attacker's random numbers, one for each victim."""
    key = (scenario.seed, "attack", attack.title, round)
    return [seeds.derive_bytes(*key, v, *seeds.repeat_suffix(repeat)) for v in victims]


def note_attack(
    tables: RoundTables,
    d: AttackCall,
    round: int,
    outcomes: Sequence[Guess],
    scored: Sequence[VictimRows],
) -> None:
    """Add the rows of one attack call to the tables of attacks, traces, images, texts, snapshots and inferences."""
    for victim, outcome, one in zip(d.victims, outcomes, scored, strict=True):
        key = {"arm": d.arm.name, "round": round, "attack": d.attack.title, "victim": victim, "repeat": d.repeat}
        tables.images += [key | image for image in one.images]
        tables.texts += [key | text for text in one.texts]
        tables.snapshots += [key | snapshot for snapshot in one.snapshots]
        if isinstance(outcome, Inference):
            said = {"status": outcome.status, "reason": outcome.reason, "message": outcome.message}
            tables.inferences += [
                key | said | row for row in one.rows
            ]  # the scoring function, too, may report that the attack does not apply
            continue
        result = {
            "batch_size": len(one.rows),
            "family": d.attack.family,
            "observes": d.attack.observes,
            "knowledge": d.attack.knowledge,
            "objective": outcome.loss,
            "iterations": outcome.iterations,
            "seconds": outcome.seconds,
            "status": outcome.status,
            "reason": outcome.reason,
            "message": outcome.message,
        }
        # A row has a reason only if the scoring found one, which the attacker does not know.
        tables.attacks += [key | result | row for row in one.rows]
        tables.traces += [key | {"iteration": i, "objective": o} for i, o in outcome.trace]


def note_not_run(tables: RoundTables, d: AttackCall, round: int, status: str, why: str) -> None:
    """Add rows for a call that was not made or not finished, with a status and a message (`why`)."""
    nothing = dict.fromkeys(TABLES["attacks"].names)
    key = {"arm": d.arm.name, "round": round, "attack": d.attack.title, "repeat": d.repeat}
    given = {"observes": d.attack.observes, "knowledge": d.attack.knowledge, "family": d.attack.family, "seconds": 0.0}
    told = {"batch_size": d.attack.batch_size, "status": status, "message": why, "iterations": 0}
    tables.attacks += [
        nothing | key | given | told | {"victim": victim, "sample": sample}
        for victim in d.victims
        for sample in range(d.attack.batch_size)
    ]
