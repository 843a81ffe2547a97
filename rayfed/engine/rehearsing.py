"""Trials of an audit's attacks: which of them apply to the model, and how long they take.

What a step takes is measured in seconds of the process, so that iterations do not depend on what else the machine does;
how many seconds by the clock that is, on the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import floor, inf
from statistics import median
from time import monotonic, process_time
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rayfed.analysis.audit import METHODS, TWINS, UNDEFENDED, Criterion
from rayfed.analysis.summary import Row
from rayfed.attacks.base import Reconstruction
from rayfed.attacks.telling import Standing, listening
from rayfed.client import plan as rounds
from rayfed.client.sent import Sent
from rayfed.client.visit import Truth
from rayfed.engine.attacking import AttackCall, keys_of, note_attack
from rayfed.engine.executor import Call
from rayfed.engine.inputs import Inputs
from rayfed.engine.local import LocalExecutor
from rayfed.engine.tables import RoundTables, Scored
from rayfed.errors import ClientError, UserError
from rayfed.scenario import AttackSpec, resolve
from rayfed.store.schemas import UNPLAYED

TIMED = 4
"""Iterations that are timed, of one evaluation each, unless `_STEPS` steps tell enough sooner."""
_STEPS = 6
_LONG = 10
"""Iterations of a search whose steps take as long as any: L-BFGS has remembered as many as it ever does."""
_PATIENCE = 1 / 8
"""Share of the time that is left after which a trial of a search ends, if `_STEPS` steps have told its pace, or steps
that took as long."""
_SLOW = 5.0
"""Seconds from which on the steps of a search may be too many for all victims: attacks are tried on one of them."""
_MOST_OF_TRIALS = 1 / 2
"""Share of the time that trials have left which a step of a search may take for it to be tried."""
_QUICK = 1 / 20
"""Share of the time that is left which a trial may have taken, for its twins and larger batches to be tried, too."""
_UNKNOWN = 1.5
"""Steps of an attack's searches for each iteration that it is given, where none came to its end."""
_CUT_OFF = "not tried to its end, for want of time"
_OF_LABELS = (
    *("arm", "round", "attack", "victim", "repeat", "sample", "batch_size", "observes", "knowledge"),
    *("true_label", "label_accuracy", "label_guess_accuracy", "target_error", "target_guess_error"),
)
"""Columns of a row of attacks that say which labels, or numbers in their place, were read, and of what."""
_LOADING = 0.5
"""Seconds from which on the first start of an attack may be the loading of what it needs, which later ones find."""
Shown = Callable[[str, int, int, Standing | None], None]
"""Is told which of so many trials goes on, and how far its search is."""


@dataclass(frozen=True)
class Trial:
    """Result of trying one attack on the undefended model."""

    title: str
    """Label of the attack in the scenario."""
    obstacle: str = ""
    """Why it does not apply, or what it raised; empty where it answered."""
    raised: bool = False
    start: float = 0.0
    """Seconds of one call beside its iterations."""
    each: float = 0.0
    """Seconds of one iteration of one call."""
    evaluation: float = 0.0
    """Seconds of one evaluation of a search's objective, on all victims of a call."""
    tried: bool = True
    """False where there was no time for it, or not to its end."""
    supposed: bool = False
    """Whether it is that on a smaller batch, as long for each sample: there was little time for another."""
    never: bool = False
    """Whether it applies to no update of such a model, whatever the attacker knows (`Reconstruction.inherent`)."""


@dataclass(frozen=True)
class Pace:
    """Time beside the attacks themselves (observations, scores), in seconds for each victim."""

    observing: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By arm, and name of the twin; those that are missing take none."""
    scoring: float = 0.0


class _Enough(BaseException):
    """Signal that a trial has run long enough; not an `Exception`, which an attack might catch."""


class _Deadline(TorchFunctionMode):
    """Ends a trial at the first operation after its time: a closed form reports no steps, and one may take minutes.

    It does so once, and never where gradients are switched on and off: that is an operation, too, which the end of a
    `no_grad` block needs for the trials after this one.
    """

    def __init__(self, ends: float) -> None:
        """Raise `_Enough` where the clock (`monotonic`) passes `ends`."""
        super().__init__()
        self._ends = ends

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, if there is time."""
        if func is not torch._C._set_grad_enabled and monotonic() > self._ends:
            self._ends = inf
            raise _Enough
        return func(*args, **(kwargs or {}))


class _Watch:
    """Timer of a trial's search steps, which stops the trial when enough is known or time is up."""

    def __init__(self, patience: float, shown: Callable[[Standing], None]) -> None:
        """Stop after `patience` seconds, once `_STEPS` steps have told the pace, or steps that took as long."""
        self._patience, self._until, self._shown = patience, monotonic() + patience, shown
        self.steps: list[float] = []
        """Seconds of each step that follows another one of its search."""
        self.iterations: list[int] = []
        """Iterations of each search."""
        self._last = 0.0

    def hear(self, standing: Standing) -> None:
        """Record one step of a search."""
        now = process_time()
        if standing.search > len(self.iterations):
            self.iterations.append(standing.iterations)
        else:
            self.steps.append(now - self._last)
        self._last = now
        self._shown(standing)
        if monotonic() > self._until and (len(self.steps) > _STEPS or sum(self.steps) > max(self._patience, _SLOW)):
            raise _Enough


class Rehearsal:
    """Trials of the attacks of an audit's scenario in this process."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self._arms = inputs, resolve(inputs.scenario)
        self._executor = LocalExecutor(inputs)
        self._built = {account.name: account.arm for account in inputs.accounts}
        self._sent: dict[str, Sent] = {}
        """What clients of an arm are sent, by its name, of those that were looked at."""
        self._started: set[str] = set()
        """Names of the attacks that have been called."""
        self._steps_each: dict[str, float] = {}
        """Steps that the searches of an attack make in all for each iteration that it is given."""
        self._largest = max(inputs.scenario.attacks, key=lambda attack: attack.batch_size)
        """An attack on the largest batches of those that were tried; before trials, of all."""
        self._answers: dict[str, tuple[Sequence[Truth], Sequence[Reconstruction]]] = {}
        """What trials answered, by title, with the truth, which is looked at once all have been tried."""
        self._observing: dict[tuple[str, str], float] = {}
        """Seconds of one observation, by arm and name of the twin, of those that were timed."""
        self._scores: dict[str, Sequence[Scored]] = {}
        """Their scores, by title and victim."""

    def refused(self) -> dict[int, ClientError]:
        """Return the batch sizes for which the undefended model gives no gradient, with the client's error.

        Larger ones of which that takes long are not looked at: the attacks' own trials meet it again, and tell.
        """
        found = {}
        first = {attack.batch_size: attack for attack in reversed(self.inputs.scenario.attacks)}
        for size, attack in sorted(first.items()):
            if size > min(first) and self.gradient * size / min(first) > _SLOW:
                break
            try:
                self._observe(UNDEFENDED, attack, most=1)
            except ClientError as error:
                found[size] = error
            except Exception:  # such as too little memory
                continue
        return found

    @cached_property
    def gradient(self) -> float:
        """Seconds, by the clock, of one observation of the smallest batch without a defence."""
        first = min(self.inputs.scenario.attacks, key=lambda attack: attack.batch_size)
        taken = list[float]()
        while not taken or (len(taken) == 1 and taken[0] < _SLOW):  # the first may load something
            began = monotonic()
            with suppress(Exception):  # the attacks' own trials meet it again, and tell
                self._observe(UNDEFENDED, first, most=1)
            taken.append(monotonic() - began)
        return min(taken)

    def _steps(self, attack: AttackSpec) -> float:
        """Return about how many seconds the steps of a search's trial take, on all victims of a call."""
        smallest = min(attack.batch_size for attack in self.inputs.scenario.attacks)
        each = self.gradient * attack.batch_size / smallest
        return (TIMED + _STEPS) * len(self._members(attack)) * each

    def trials(
        self,
        until: float = inf,
        shown: Shown = lambda *_: None,
        enough: Callable[[Trial], bool] = lambda _: False,
        last: float = inf,
    ) -> Iterator[Trial]:
        """Yield a trial of each attack, small batches first; for searches, the first applicable one is timed.

        That is one of an attack's twins on a batch size, and the others count as it does where it took long. What never
        applies on a batch size does not on larger ones. Where the clock (`monotonic`) passes `until`, or a step of a
        search would take most of what is left, it is not tried; but a search is, up to `last`, where nothing that
        applies is known yet, for nobody could say how long an audit takes. A closed form is cut off after most of what
        is left, and so are its twins and larger batches. A search that took long on small batches is supposed to apply
        to larger ones, and to take as long for each sample. Once a trial is `enough`, nothing more is tried.
        """
        never: dict[str, Trial] = {}
        cut: dict[str, Trial] = {}
        timed: dict[tuple[str, int], Trial] = {}
        tried: dict[tuple[str, int], Trial] = {}
        took: dict[tuple[str, int], float] = {}
        attacks = sorted(self.inputs.scenario.attacks, key=lambda attack: attack.batch_size)
        for number, attack in enumerate(attacks):
            key = attack.name, attack.batch_size
            if known := never.get(attack.name) or cut.get(attack.name):
                yield replace(known, title=attack.title)
                continue
            if key not in timed and (supposed := self._supposed(attack, timed, took, until)):
                yield supposed
                continue
            needed = max(self._first_step(attack, timed), *_on_smaller(attack, took), 0.0)
            late = needed > _MOST_OF_TRIALS * (until - monotonic())
            if late and (timed or not _iterations_tried(attack)):
                untried = Trial(attack.title, "not tried, for want of time", tried=False)
                yield replace(timed[key], title=attack.title) if key in timed else untried
                continue
            if key in timed and took[key] > _QUICK * (until - monotonic()):
                yield replace(timed[key], title=attack.title)
                continue
            shown(attack.title, number, len(attacks), None)
            same = tried.get(key)
            if same and self._tells_nothing(attack):
                yield replace(same, title=attack.title)
                continue
            began = monotonic()
            ends = until if timed else last
            if not _iterations_tried(attack):
                ends = began + _MOST_OF_TRIALS * (until - began)
            show = partial(shown, attack.title, number, len(attacks))
            trial = self._trial(attack, timed.get(key), until, ends, show)
            took.setdefault(key, monotonic() - began)
            tried.setdefault(key, trial)
            if trial.never:
                never[attack.name] = trial
            if not trial.tried:
                cut[attack.name] = trial
            if not trial.obstacle:
                timed.setdefault(key, trial)
            self._largest = attack
            if enough(trial):
                until = -inf
            yield trial

    def _supposed(
        self,
        attack: AttackSpec,
        timed: Mapping[tuple[str, int], Trial],
        took: Mapping[tuple[str, int], float],
        until: float,
    ) -> Trial | None:
        """Return a search's trial on the largest smaller batch, for as many samples as here, if another took long."""
        sizes = [size for name, size in timed if name == attack.name and size < attack.batch_size]
        if not sizes or not _iterations_tried(attack) or until == -inf:
            return None
        key = attack.name, max(sizes)
        known = timed[key]
        smaller = next(one for one in self.inputs.scenario.attacks if (one.name, one.batch_size) == key)
        times = len(self._members(attack)) * attack.batch_size / (len(self._members(smaller)) * smaller.batch_size)
        if times * took[key] <= _QUICK * (until - monotonic()):
            return None
        each, start, evaluation = (times * seconds for seconds in (known.each, known.start, known.evaluation))
        return replace(known, title=attack.title, start=start, each=each, evaluation=evaluation, supposed=True)

    def _first_step(self, attack: AttackSpec, timed: Mapping[tuple[str, int], Trial]) -> float:
        """Return about how many seconds one step of a search takes, by those that were timed at its batch size.

        One of several evaluations has another precision, which is slower. 0 for closed forms, and if none was timed.
        """
        known = [trial.evaluation for (_, size), trial in timed.items() if size == attack.batch_size]
        many = _evaluations(attack)
        return (2 * many if many > 1 else many) * max(known, default=0.0) if _iterations_tried(attack) else 0.0

    def _tells_nothing(self, attack: AttackSpec) -> bool:
        """Return whether the attacker's only extra knowledge is of defences, which the tried model lacks."""
        return bool(attack.knowledge) and set(attack.knowledge) <= {"defence", "code"}

    def pace(self, until: float = inf, arms: Collection[str] | None = None) -> Pace:
        """Return the time for observations and scores, measured on the smallest batch.

        Where the clock (`monotonic`) passes `until`, observations of the arms that are left count as the slowest ones;
        those of the first two are measured in any case, and what an earlier call measured is not measured again.
        `arms` are those that are played, by default all. Raises `UserError` where a client fails.
        """
        first = min(self.inputs.scenario.attacks, key=lambda attack: attack.batch_size)
        found = self._observing
        guessed: dict[tuple[str, str], float] = {}
        for arm in self._built if arms is None else arms:
            late = len({other for other, _ in found}) > 1 and monotonic() > until
            for twin, granted in TWINS.items():
                if (arm, twin) in found:
                    continue
                if late:
                    guessed[arm, twin] = max(seconds for (_, other), seconds in found.items() if other == twin)
                    continue
                if "labels" in granted:  # which are no work
                    found[arm, twin] = found[arm, "adaptive"]
                    continue
                attack = first.model_copy(update={"knowledge": list(granted)})
                taken = inf
                for victim in self._members(attack)[:2]:  # what an arm's code does may be seen once for all
                    began = process_time()
                    self._observed(arm, attack, [victim])
                    taken = min(taken, process_time() - began)
                    if taken < _LOADING:
                        break
                found[arm, twin] = taken
        return Pace(found | guessed, self._scoring)

    @cached_property
    def _scoring(self) -> float:
        """Seconds for scoring one victim of the largest batch that was tried; the scores are discarded."""
        attack = self._largest
        seen, truths = self._observed(UNDEFENDED, attack, self._members(attack)[:1])
        blank = Reconstruction(seen[0].sample.blank(attack.batch_size), truths[0].labels.cpu())
        taken = []
        for _ in range(2):  # the first loads what metrics need
            began = process_time()
            list(self._executor.run_clients([Call("score", (truths, [blank], False))]))
            taken.append(process_time() - began)
        return taken[-1]

    def leaking(self, criterion: Criterion) -> list[str]:
        """Return the titles of the attacks that leaked in their trials."""
        return [name for name in self._answers if any(map(criterion.leaks, self._scored(name)))]

    def found(self, criterion: Criterion, titles: Collection[str] | None = None) -> list[str]:
        """Return a line on the trials of each attack and batch size, of all or of these `titles`.

        A search made a few evaluations alone, so what it did not find says nothing.
        """
        searches = {method.name for method in METHODS if method.evaluations}
        nearest: dict[str, list[Row]] = {}
        for name in self._answers:
            if titles is None or name in titles:
                nearest.setdefault(name.partition(",")[0], []).extend(self._scored(name))
        lines = []
        for name, rows in nearest.items():
            cut = name.partition(" ")[0] in searches
            leaked = any(criterion.leaks(row) for row in rows)
            best = max((value for row in rows if (value := criterion.nearness(row)) is not None), default=None)
            said = "no finite reconstruction" if best is None else f"the closest at {criterion.written(best)}"
            verdict = "LEAKS" if leaked else "a search cut short, which says nothing against a longer one"
            lines.append(f"{name}: {verdict if leaked or cut else 'no leak'}, {said}")
        return lines

    @property
    def measured(self) -> RoundTables:
        """What trials answered, as rows of a run: closed forms whole, and of searches the labels that were read.

        A search made a few evaluations alone, so that what it rebuilt says nothing against a longer one: it was not
        played.
        """
        tables = RoundTables()
        for attack in self.inputs.scenario.attacks:
            if attack.title not in self._answers:
                continue
            of, guesses, scored = RoundTables(), self._answers[attack.title][1], self._of_victims(attack.title)
            victims = tuple(self._members(attack)[: len(guesses)])
            note_attack(of, AttackCall(self._arms[UNDEFENDED], attack, victims, 0, strip=False), 0, guesses, scored)
            if _iterations_tried(attack):
                nothing = dict.fromkeys(of.attacks[0]) | {"status": UNPLAYED, "iterations": 0, "seconds": 0.0}
                of = RoundTables(attacks=[nothing | {n: row[n] for n in _OF_LABELS if n in row} for row in of.attacks])
            for name in ("attacks", "images", "texts"):
                getattr(tables, name).extend(getattr(of, name))
        return tables

    def _scored(self, name: str) -> Sequence[Row]:
        """Return the rows of a trial's answer."""
        return [row for scored in self._of_victims(name) for row in scored.rows]

    def _of_victims(self, name: str) -> Sequence[Scored]:
        """Return what a trial's answer has of each victim, scored once."""
        if name not in self._scores:
            attack = next(attack for attack in self.inputs.scenario.attacks if attack.title == name)
            truths, guesses = self._answers[name]
            args = self._asked(UNDEFENDED, attack, self._members(attack)[: len(guesses)])
            [done] = self._executor.run_clients([Call("score", (truths, guesses, False, *args))])
            self._scores[name] = done.result
        return self._scores[name]

    def _members(self, attack: AttackSpec) -> list[int]:
        """Return the victims of the attack's first call."""
        return rounds.victims(self.inputs.scenario, attack, 0, self.inputs.parts.sizes)[: attack.victims_per_call]

    def _observe(self, arm: str, attack: AttackSpec, most: int | None = None) -> Any:
        return self._observed(arm, attack, self._members(attack)[:most])[0]

    def _observed(self, arm: str, attack: AttackSpec, victims: Sequence[int]) -> tuple[Any, Any]:
        """Return the observations of these victims, and the truths."""
        [done] = self._executor.run_clients([Call("observe", self._asked(arm, attack, victims), returns=3)])
        return done.rest[0], done.rest[1]

    def _asked(self, arm: str, attack: AttackSpec, victims: Sequence[int]) -> tuple[Any, ...]:
        """Return the arguments of an observation."""
        if arm not in self._sent:
            self._sent[arm] = Sent(0, self._built[arm].weights, self._built[arm].buffers)
        return arm, self._sent[arm], list(victims), attack, {}, 0

    def _trial(
        self, attack: AttackSpec, timed: Trial | None, until: float, ends: float, shown: Callable[[Standing], None]
    ) -> Trial:
        """Return the trial of an attack, on its first victim alone where the model is slow and that one tells enough.

        One victim may be refused for what it has, which says nothing of others.
        """
        patience, many = _PATIENCE * max(until - monotonic(), 0.0), len(self._members(attack))
        if self._steps(attack) > max(patience, _SLOW) and many > 1:
            trial = self._trial_of(1, attack, timed, until, ends, shown)
            if not trial.obstacle or trial.never or not trial.tried:
                return trial
        return self._trial_of(many, attack, timed, until, ends, shown)

    def _trial_of(
        self,
        tried: int,
        attack: AttackSpec,
        timed: Trial | None,
        until: float,
        ends: float,
        shown: Callable[[Standing], None],
    ) -> Trial:
        """Return the trial of an attack on so many victims, with the seconds of all of a call.

        Where it has neither answered nor made a step of a search when the clock passes `ends`, it is cut off.
        """
        patience = _PATIENCE * max(until - monotonic(), 0.0)
        watch = _Watch(0.0 if timed else patience, shown)
        count = _iterations_tried(attack)
        times = len(self._members(attack)) / tried  # a call takes as long for each victim
        if timed and timed.each:  # a search that remembers its steps slows down: it is begun as the longest are
            count = max(count, floor(min(_LONG, max(until - monotonic(), 0.0) / timed.each)))
        guesses: Sequence[Reconstruction] = ()
        # steps tell the time of a quick model's search, which would be timed with the deadline's own work
        deadline = _Deadline(ends) if not count or self._steps(attack) > _SLOW else nullcontext()
        began = process_time()
        try:
            with suppress(_Enough), deadline:
                observations, truths = self._observed(UNDEFENDED, attack, self._members(attack)[:tried])
                began = process_time()
                with listening(watch.hear, every=0.0):
                    guesses = self._played(attack, observations, count)
        except UserError as error:
            if not isinstance(error, ClientError):
                raise
            return Trial(attack.title, str(error).partition("\n")[0], raised=True)
        except Exception as error:  # the attack's or the model's own: the audit goes on without it, and says so
            said = str(error).partition("\n")[0]
            return Trial(attack.title, f"{type(error).__name__}: {said}", raised=True)
        spent = process_time() - began
        if not guesses and not watch.steps:
            return Trial(attack.title, _CUT_OFF, tried=False)
        if guesses and all(guess.status in ("not applicable", "failed") for guess in guesses):
            raised = any(guess.status == "failed" for guess in guesses)
            said = "; ".join(dict.fromkeys(guess.message for guess in guesses))
            never = all(guess.inherent for guess in guesses)  # it is played on other architectures alone
            start = times * (spent if never else self._start(attack, observations, spent, until))
            return Trial(attack.title, said, raised, start, never=never)
        start = times * self._start(attack, observations, max(spent - sum(watch.steps), 0.0), until)
        if guesses:
            self._answers[attack.title] = truths, guesses
        if not count or not watch.steps:
            return Trial(attack.title, start=start)
        if guesses and timed is None:
            self._steps_each[attack.name] = sum(watch.iterations) / count
        steps, step = self._steps_each.get(attack.name, _UNKNOWN * _evaluations(attack)), times * median(watch.steps)
        return Trial(attack.title, start=start, each=steps * step, evaluation=step)

    def _start(self, attack: AttackSpec, observations: Any, took: float, until: float) -> float:
        """Return the seconds of one call beside its iterations, without what the first call of an attack loads.

        A long first start is made a second time, up to the first step of a search: loading takes seconds, once, and
        would be counted for each arm.
        """
        first = attack.name not in self._started
        self._started.add(attack.name)
        if not first or not _LOADING < took < _PATIENCE * (until - monotonic()):
            return took

        def stop(standing: Standing) -> None:
            raise _Enough

        began = process_time()
        with suppress(_Enough), listening(stop, every=0.0), _Deadline(until):
            self._played(attack, observations, _iterations_tried(attack))
        return min(took, process_time() - began)

    def _played(self, attack: AttackSpec, observations: Any, iterations: int) -> Sequence[Reconstruction]:
        """Return the guesses of a call; searches make this many iterations, unless it is 0."""
        changed = {"iterations": iterations} if iterations else {}
        spec = attack.model_validate(attack.model_dump() | changed)
        keys = keys_of(self.inputs.scenario, attack, 0, self._members(attack))  # a closed form's answer is the attack's
        call = Call("attack", (spec, self._arms[UNDEFENDED].to_attackers(), observations, keys), returns=2)
        [done] = self._executor.run_attackers([call])
        guesses: Sequence[Reconstruction] = done.rest[0]  # with their images
        return guesses


def _on_smaller(attack: AttackSpec, took: Mapping[tuple[str, int], float]) -> list[float]:
    """Return an attack's seconds by its trials on smaller batches, as long for each sample, where that is long.

    Searches have none, as they end when time does.
    """
    if _iterations_tried(attack):
        return []
    own = [(size, seconds) for (name, size), seconds in took.items() if name == attack.name]
    found = (seconds * attack.batch_size / size for size, seconds in own if size < attack.batch_size)
    return [seconds for seconds in found if seconds > _SLOW]


def _iterations_tried(attack: AttackSpec) -> int:
    """Return the number of iterations in a trial, 0 for a closed form."""
    return max(1, TIMED // _evaluations(attack)) if "iterations" in attack.parameters else 0


def _evaluations(attack: AttackSpec) -> int:
    """Return the number of evaluations of the objective in one iteration of a search."""
    return next((method.evaluations for method in METHODS if method.name == attack.name), 1)
