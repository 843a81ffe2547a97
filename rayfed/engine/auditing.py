"""Rehearsal of an audit: which attacks apply to the model, and how long an iteration of each takes.

Seconds are of the process, on all of its cores, so that iterations do not depend on what else the machine does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from time import process_time
from typing import Any

from rayfed import seeds
from rayfed.analysis.audit import FEWEST, MOST, UNDEFENDED, Method, Plan, title
from rayfed.attacks.base import Reconstruction
from rayfed.client import plan as rounds
from rayfed.client.sent import Sent
from rayfed.engine.executor import Call
from rayfed.engine.inputs import Inputs
from rayfed.engine.local import LocalExecutor
from rayfed.errors import ClientError, UserError
from rayfed.scenario import AttackSpec, resolve

_SHORT, _LONG = 2, 8
"""Iterations that are timed; what the second takes longer is what an iteration costs."""


@dataclass(frozen=True)
class Trial:
    """An attack tried on the undefended model."""

    title: str
    """Label of the attack in the scenario."""
    obstacle: str = ""
    """Why it does not apply, or what it raised; empty where it answered."""
    raised: bool = False
    start: float = 0.0
    """Seconds of one call beside its iterations."""
    each: float = 0.0
    """Seconds of one iteration of one call."""


class Rehearsal:
    """Tries the attacks of an audit's scenario in this process, on its own samples and without looking at scores."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs, self._arms = inputs, resolve(inputs.scenario)
        self._executor = LocalExecutor(inputs)
        self._sent = {a.name: Sent(0, a.arm.weights, a.arm.buffers) for a in inputs.accounts}

    def refused(self) -> dict[int, ClientError]:
        """Return the batch sizes of which the undefended model gives no gradient, with what the client raised."""
        found = {}
        first = {attack.batch_size: attack for attack in reversed(self._inputs.scenario.attacks)}
        for size, attack in sorted(first.items()):
            try:
                self._observe(UNDEFENDED, attack)
            except ClientError as error:
                found[size] = error
            except Exception:  # such as too little memory: the attacks' own trials meet it again, and tell
                continue
        return found

    def trials(self) -> Iterator[Trial]:
        """Yield a trial of each attack; of those that search, the first of its twins that applies is timed."""
        timed: dict[tuple[str, int], Trial] = {}
        for attack in self._inputs.scenario.attacks:
            key = attack.name, attack.batch_size
            trial = self._trial(attack, timed.get(key))
            if not trial.obstacle:
                timed[key] = trial
            yield trial

    def observing(self) -> dict[str, float]:
        """Return the seconds that each arm's clients take for the observations of all attacks.

        Raises `UserError` where a client fails.
        """
        attacks = self._inputs.scenario.attacks
        found = {}
        for arm in self._sent:
            began = process_time()
            self._observe(arm, attacks[0])
            calls = sum(self._victims(attack) for attack in attacks)
            found[arm] = (process_time() - began) * calls / len(self._members(attacks[0]))
        return found

    def _victims(self, attack: AttackSpec) -> int:
        return len(rounds.victims(self._inputs.scenario, attack, 0, self._inputs.parts.sizes))

    def _members(self, attack: AttackSpec) -> list[int]:
        """Return the victims of the attack's first call."""
        return rounds.victims(self._inputs.scenario, attack, 0, self._inputs.parts.sizes)[: attack.victims_per_call]

    def _observe(self, arm: str, attack: AttackSpec) -> Any:
        args: tuple[Any, ...] = arm, self._sent[arm], self._members(attack), attack, {}, 0
        [done] = self._executor.run_clients([Call("observe", args, returns=3)])
        return done.rest[0]

    def _trial(self, attack: AttackSpec, timed: Trial | None) -> Trial:
        searches = "iterations" in attack.parameters
        try:
            observations = self._observe(UNDEFENDED, attack)
            guesses, spent, _ = self._played(attack, observations, 1 if searches else None)
            if all(guess.status in ("not applicable", "failed") for guess in guesses):
                raised = any(guess.status == "failed" for guess in guesses)
                return Trial(attack.title, "; ".join(dict.fromkeys(guess.message for guess in guesses)), raised)
            if timed or not searches:
                return Trial(attack.title, start=timed.start if timed else spent, each=timed.each if timed else 0.0)
            (_, short, few), (_, long, many) = (self._played(attack, observations, n) for n in (_SHORT, _LONG))
        except UserError:
            raise
        except Exception as error:  # the attack's or the model's own: the audit goes on without it, and says so
            said = str(error).partition("\n")[0]
            return Trial(attack.title, f"{type(error).__name__}: {said}", raised=True)
        each = (long - short) / (many - few) if many > few and long > short else long / max(many, 1)
        return Trial(attack.title, start=max(short - few * each, 0.0), each=each)

    def _played(
        self, attack: AttackSpec, observations: Any, iterations: int | None
    ) -> tuple[Sequence[Reconstruction], float, int]:
        """Return the guesses of a call, its seconds, and the most iterations of its guesses."""
        changed = {} if iterations is None else {"iterations": iterations}
        spec = attack.model_validate(attack.model_dump() | changed)
        keys = [seeds.derived("rehearsal", v) for v in self._members(attack)]
        call = Call("attack", (spec, self._arms[UNDEFENDED].to_attackers(), observations, keys), returns=2)
        began = process_time()
        [done] = self._executor.run_attackers([call])
        return done.result, process_time() - began, max(guess.iterations for guess in done.result)


def chosen_iterations(plan: Plan, trials: Sequence[Trial], arms: int, seconds: float) -> dict[str, int]:
    """Return the iterations of each search for which all together take about so many seconds.

    Every method has the same time on each batch size, in all `arms` and twins together; two digits of its iterations
    count, so that a repeated audit often has the same.
    """
    found = {}
    for method, batch in plan.searches:
        calls = _calls(plan, batch) * arms
        twins = [t for t in _twins(trials, title(method, batch)) if not t.obstacle]
        fitting = fewest(method)
        if _timed(twins):
            share = seconds / len(plan.searches) / (calls * len(twins))
            fitting = min(max(floor((share - twins[0].start) / twins[0].each), fitting), MOST // method.evaluations)
        found[title(method, batch)] = _two_digits(fitting)
    return found


def untimed(plan: Plan, trials: Sequence[Trial]) -> list[str]:
    """Return the titles of the searches that are played with `FEWEST` evaluations, as no trial told their speed."""
    twins = {title(*search): _twins(trials, title(*search)) for search in plan.searches}
    return [name for name, own in twins.items() if not _timed(own) and not all(trial.raised for trial in own)]


def _twins(trials: Sequence[Trial], name: str) -> list[Trial]:
    return [trial for trial in trials if trial.title.startswith(f"{name},")]


def _timed(trials: Sequence[Trial]) -> bool:
    return any(trial.each for trial in trials)


def estimate(plan: Plan, trials: Sequence[Trial], arms: int, iterations: Mapping[str, int]) -> float:
    """Return about how many seconds the attacks take with these iterations, one after the other."""
    calls = {trial.title: _calls(plan, int(_search(trial).rpartition(" ")[2])) for trial in trials}
    return sum(calls[title] * arms * seconds for title, seconds in of_calls(trials, iterations).items())


def of_calls(trials: Sequence[Trial], iterations: Mapping[str, int]) -> dict[str, float]:
    """Return about how many seconds one call of each attack takes, by its title."""
    return {trial.title: trial.start + trial.each * iterations.get(_search(trial), 0) for trial in trials}


def _search(trial: Trial) -> str:
    """Return the title that a trial's twins have in common."""
    return trial.title.partition(",")[0]


def fewest(method: Method, evaluations: int = FEWEST) -> int:
    """Return how many iterations of a method make so many evaluations, at least one."""
    return max(1, -(-evaluations // method.evaluations))


def _calls(plan: Plan, batch: int) -> int:
    """Return the calls of one attack on one arm."""
    victims = -(-plan.samples // batch)
    size: int = AttackSpec.model_fields["victims_per_call"].default
    return -(-victims // size)


def _two_digits(number: int) -> int:
    unit: int = 10 ** max(floor(log10(number)) - 1, 0)
    return number // unit * unit
