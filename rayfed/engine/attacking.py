"""The attacks of one round: clients make observations, attackers guess, clients score the guesses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from rayfed import seeds
from rayfed.attacks.base import Guess, Inference, failed
from rayfed.client import plan
from rayfed.client.sent import Sent, State
from rayfed.engine.executor import Call, Overdue, Ref, Run
from rayfed.engine.progress import Progress
from rayfed.engine.tables import RoundTables, Scored
from rayfed.scenario import AttackSpec, ResolvedArm, Scenario


@dataclass(frozen=True)
class AttackCall:
    """One call of an attack: some of its victims in one arm."""

    arm: ResolvedArm
    attack: AttackSpec
    victims: tuple[int, ...]
    repeat: int
    strip: bool
    """Whether the snapshots of its first victim are kept: of the attack's first in the round, the first time."""


LoadStates = Callable[[str, Iterable[int], int], dict[int, State]]
"""Returns the states of some clients of an arm when a round begins: (arm, clients, round) -> client -> state."""


@dataclass(frozen=True)
class Attacks:
    """The attacks of a scenario, run by an executor round by round."""

    scenario: Scenario
    arms: Mapping[str, ResolvedArm]
    samples: np.ndarray
    """(clients,) int64, samples of each client."""
    load_states: LoadStates
    run_clients: Run
    """Does calls on client workers."""
    run_attackers: Run
    progress: Progress

    def strike(
        self, round: int, sent: Mapping[str, Ref], tables: RoundTables, earlier: Mapping[str, Sequence[Sent]]
    ) -> None:
        """Observe, attack and score what is due in a round, and add the rows to `tables`.

        `earlier` has, by arm, what clients were sent in the rounds before that are kept. Observations and truths go by
        reference. A client that failed in the round has sent nothing to attack. Where Ctrl-C stops the attacks, the
        rows of those that were over are added first.
        """
        failed = {(row["arm"], row["client"]) for row in tables.clients if row["status"] != "ok"}
        due = self._due(round, [self.arms[name] for name in sent], failed)
        if not due:
            return
        observe = []
        for i, d in enumerate(due):
            past = [one for one in earlier.get(d.arm.name, ()) if one.round >= round - d.attack.earlier]
            args = d.arm.name, sent[d.arm.name], d.victims, d.attack, self._states_behind(d, round), d.repeat, past
            observe.append(Call("observe", args, i, returns=3))
        observed: dict[int, Sequence[Ref]] = {}
        for call, _, refs in self.run_clients(observe):
            observed[call.tag] = refs
            self.progress.observations_done(round, len(observed), len(due))
        attack = [self._call(i, d, observed[i][0], round) for i, d in enumerate(due)]
        attacked: dict[int, tuple[Sequence[Guess], Ref]] = {}
        self.progress.attacks_done(round, [], [d.attack.title for d in due])
        try:
            for call, outcomes, rest in self.run_attackers(attack):
                if isinstance(outcomes, Overdue):
                    nothing = self._unfinished(due[call.tag])
                    attacked[call.tag] = nothing, nothing
                else:
                    attacked[call.tag] = outcomes, rest[0]
                waiting = [d.attack.title for i, d in enumerate(due) if i not in attacked]
                self.progress.attacks_done(round, [due[i].attack.title for i in attacked], waiting)
        except KeyboardInterrupt:
            with suppress(Exception):  # there may be nobody left to score what is there
                self._score(due, observed, attacked, round, tables)
            raise
        self._score(due, observed, attacked, round, tables)

    def _score(
        self,
        due: Sequence[AttackCall],
        observed: Mapping[int, Sequence[Ref]],
        attacked: Mapping[int, tuple[Sequence[Guess], Ref]],
        round: int,
        tables: RoundTables,
    ) -> None:
        """Score the calls that have ended, and add their rows to `tables` in the order in which they were due."""
        ended = [(i, d) for i, d in enumerate(due) if i in attacked]
        score = [Call("score", (observed[i][1], attacked[i][1], d.strip), i) for i, d in ended]
        scored = {call.tag: result for call, result, _ in self.run_clients(score)}
        for i, d in ended:
            _note_attack(tables, d, round, attacked[i][0], scored[i])

    def _call(self, tag: int, d: AttackCall, observations: Ref, round: int) -> Call:
        seconds = self.scenario.resources.timeout
        limit = None if seconds is None else seconds * len(d.victims)
        args = d.attack, d.arm.to_attackers(), observations, self._keys(d, round)
        return Call("attack", args, tag, returns=2, limit=limit)

    def _unfinished(self, d: AttackCall) -> list[Guess]:
        """Return what stands in the tables of an attack that was ended, as it took too long."""
        seconds = self.scenario.resources.timeout
        message = f"not finished within {seconds:g} s for each victim (resources.timeout)"
        return [failed(d.attack.build(), message) for _ in d.victims]

    def _due(self, round: int, arms: Sequence[ResolvedArm], failed: Collection[tuple[str, int]]) -> list[AttackCall]:
        """Return the calls of a round, without the victims that have `failed` in an arm."""
        return [
            AttackCall(arm, attack, there, repeat, strip=chunk == repeat == 0)
            for attack in self.scenario.attacks
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
        key = (self.scenario.seed, "attack", d.attack.title, round)
        return [seeds.derived(*key, v, *seeds.again(d.repeat)) for v in d.victims]

    def _states_behind(self, d: AttackCall, round: int) -> dict[int, State]:
        """Return the states of the clients whose work an observation repeats."""
        return self.load_states(d.arm.name, plan.behind(self.scenario, d.attack, round, d.victims), round)


def _note_attack(
    tables: RoundTables,
    d: AttackCall,
    round: int,
    outcomes: Sequence[Guess],
    scored: Sequence[Scored],
) -> None:
    """Add one call's rows to the tables of attacks, traces, images, texts, snapshots and inferences."""
    for victim, outcome, (rows, images, texts, snapshots) in zip(d.victims, outcomes, scored, strict=True):
        key = {"arm": d.arm.name, "round": round, "attack": d.attack.title, "victim": victim, "repeat": d.repeat}
        tables.images += [key | image for image in images]
        tables.texts += [key | text for text in texts]
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
