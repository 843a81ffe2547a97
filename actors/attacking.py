"""The attacks of one round: clients show what attackers may see, attackers guess, clients score the guesses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from actors.calls import Call
from actors.evaluation import Run
from actors.progress import Progress
from actors.tables import RoundTables, Scored
from rayfed import seeds
from rayfed.attacks.base import Guess, Inference
from rayfed.client import plan
from rayfed.client.clients import State
from rayfed.scenario import AttackSpec, Scenario


@dataclass(frozen=True)
class AttackCall:
    """Some victims of one attack in one arm."""

    arm: str
    attack: AttackSpec
    victims: tuple[int, ...]
    repeat: int
    strip: bool
    """Whether the snapshots of its first victim are kept: of the attack's first in the round, the first time."""


@dataclass(frozen=True)
class Attacks:
    """A scenario's attacks, and who does the work."""

    scenario: Scenario
    samples: np.ndarray
    """(clients,) int64, how many each client holds."""
    recall: Callable[[str, Iterable[int], int], dict[int, State]]
    """The memories of some clients in an arm when a round begins."""
    run_clients: Run
    run_attackers: Run
    progress: Progress

    def strike(self, round: int, sent: Mapping[str, ray.ObjectRef[Any]], tables: RoundTables) -> None:
        """Observe, attack and score what is due: each in its own place, observations and truths by reference. A client
        that failed in the round has sent nothing that could be attacked.
        """
        failed = {(row["arm"], row["client"]) for row in tables.clients if row["status"] != "ok"}
        due = [
            AttackCall(arm, attack, there, repeat, strip=chunk == repeat == 0)
            for attack in self.scenario.attacks
            if round in attack.rounds
            for chunk, victims in enumerate(self._chunks(attack, round))
            for repeat in range(attack.repeats)
            for arm in sent
            if (there := tuple(v for v in victims if (arm, v) not in failed))
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
        observed = {call.tag: refs for call, _, refs in self.run_clients(observe)}
        known = {arm: (self.scenario.model_of(arm), stack) for arm, stack in self.scenario.stacks.items()}
        attack = [
            Call("attack", (d.attack, *known[d.arm], observed[i][0], self._keys(d, round)), i, returns=2)
            for i, d in enumerate(due)
        ]
        attacked = {}
        for call, outcomes, [reconstructions] in self.run_attackers(attack):
            attacked[call.tag] = outcomes, reconstructions
            self.progress.attacks_done(round, len(attacked), len(due))
        score = [Call("score", (observed[i][1], attacked[i][1], d.strip), i) for i, d in enumerate(due)]
        scored = {call.tag: result for call, result, _ in self.run_clients(score)}
        for i, d in enumerate(due):
            _note_attack(tables, d, round, attacked[i][0], scored[i])

    def _chunks(self, attack: AttackSpec, round: int) -> Iterable[tuple[int, ...]]:
        victims = plan.victims(self.scenario, attack, round, self.samples)
        size = attack.victims_per_call
        return [tuple(victims[i : i + size]) for i in range(0, len(victims), size)]

    def _keys(self, d: AttackCall, round: int) -> list[bytes]:
        key = (self.scenario.seed, "attack", d.attack.title, round)
        return [seeds.derived(*key, v, *seeds.again(d.repeat)) for v in d.victims]

    def _states_behind(self, d: AttackCall, round: int) -> dict[int, State]:
        """The memories of the clients whose work an observation repeats."""
        if d.attack.observes == "shown":
            return self.recall(d.arm, plan.drawn_clients(self.scenario, round), round)
        colluders = (
            [plan.colluder(self.scenario, round, v) for v in d.victims] if "colluder" in d.attack.knowledge else []
        )
        return self.recall(d.arm, [*d.victims, *colluders], round)


def _note_attack(
    tables: RoundTables,
    d: AttackCall,
    round: int,
    outcomes: Sequence[Guess],
    scored: Sequence[Scored],
) -> None:
    """Add one call's rows to the tables of attacks, traces, images, texts, snapshots and inferences."""
    for victim, outcome, (rows, images, texts, snapshots) in zip(d.victims, outcomes, scored, strict=True):
        key = {"arm": d.arm, "round": round, "attack": d.attack.title, "victim": victim, "repeat": d.repeat}
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
