"""Trials of an audit's attacks, which measure whether an attack applies to the model and how long it takes.

Steps are measured in CPU time, so that the number of iterations does not depend on other processes of the machine.
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

from rayfed.analysis.audit import TWINS, UNDEFENDED
from rayfed.attacks.base import Reconstruction
from rayfed.attacks.telling import Standing, listening
from rayfed.client import plan as rounds
from rayfed.client.sent import Sent
from rayfed.client.visit import ObservationRequest, Truth
from rayfed.engine.attacking import AttackCall, keys_of, note_attack
from rayfed.engine.executor import Call
from rayfed.engine.inputs import Inputs
from rayfed.engine.local import LocalExecutor
from rayfed.engine.tables import RoundTables, Scored
from rayfed.errors import ClientError, UserError
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.methods import METHODS
from rayfed.evidence.rows import Row
from rayfed.scenario import AttackSpec, resolve
from rayfed.store.schemas import UNPLAYED

TIMED = 4
"""Iterations of one evaluation that are timed, unless `_STEPS` steps suffice."""
_STEPS = 6
_LONG = 10
"""Iterations after which the steps of a search have their full duration, because the memory of L-BFGS is full."""
_PATIENCE = 1 / 8
"""Share of the remaining time after which the trial of a search ends, if `_STEPS` steps, or steps of this duration,
were timed."""
_SLOW = 5.0
"""Seconds of a search's steps above which an attack is tried on one victim only."""
_MOST_OF_TRIALS = 1 / 2
"""Maximum share of the remaining trial time that a step of a search may take to be tried."""
_QUICK = 1 / 20
"""Maximum share of the remaining time of a trial after which other attackers and larger batches are tried."""
_UNKNOWN = 1.5
"""Assumed steps per iteration of an attack, if no search has ended."""
_CUT_OFF = "trial not completed, no time"
_OF_LABELS = (
    *("arm", "round", "attack", "victim", "repeat", "sample", "batch_size", "observes", "knowledge"),
    *("true_label", "label_accuracy", "label_baseline", "target_error", "target_baseline"),
)
"""Columns of the table `attacks` on recovered labels or numbers, with the key columns."""
_LOADING = 0.5
"""Seconds above which the first start of an attack may include the loading of files."""
Shown = Callable[[str, int, int, Standing | None], None]
"""Show a running trial: title, number, total number of trials, and progress of its search."""


@dataclass(frozen=True)
class Trial:
    """Result of trying one attack on the undefended model: whether the attack applies, and how long it takes."""

    title: str
    """Label of the attack in the scenario."""
    obstacle: str = ""
    """Why it does not apply, or its error; empty if it returned a result."""
    raised: bool = False
    start: float = 0.0
    """Seconds of one call without its iterations."""
    each: float = 0.0
    """Seconds of one iteration of one call."""
    evaluation: float = 0.0
    """Seconds of one evaluation of a search's objective, on all victims of a call."""
    tried: bool = True
    """False if there was no time for the trial, or not for all of it."""
    supposed: bool = False
    """Whether the times are scaled from a trial on a smaller batch, because there was no time for a trial."""
    never: bool = False
    """Whether the attack never applies to this architecture, with any knowledge (`Reconstruction.inherent`)."""


@dataclass(frozen=True)
class Pace:
    """Seconds per victim for observations and scores."""

    observing: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(Arm, attacker) -> seconds per observation; missing entries count as 0."""
    scoring: float = 0.0


class _Enough(BaseException):
    """Signal that a trial has run long enough. It is no `Exception`, because an attack might catch those."""


class _Deadline(TorchFunctionMode):
    """Mode that ends a trial at the first PyTorch operation after a deadline.

    It is needed for closed forms, which report no steps. It raises only once, and never when gradients are switched
    on or off, because the end of a `no_grad` block must restore them.
    """

    def __init__(self, ends: float) -> None:
        """Initialise a mode that raises `_Enough` when the clock (`monotonic`) passes `ends`."""
        super().__init__()
        self._ends = ends

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, or raise `_Enough` after the deadline."""
        if func is not torch._C._set_grad_enabled and monotonic() > self._ends:
            self._ends = inf
            raise _Enough
        return func(*args, **(kwargs or {}))


class _Watch:
    """Timer of a trial's search steps, which stops the trial when enough steps are timed or the time is up."""

    def __init__(self, patience: float, shown: Callable[[Standing], None]) -> None:
        """Initialise a timer that stops after `patience` seconds, once `_STEPS` steps or as many seconds are timed."""
        self._patience, self._until, self._shown = patience, monotonic() + patience, shown
        self.steps: list[float] = []
        """Seconds of each step except the first of a search."""
        self.iterations: list[int] = []
        """Iterations of each search."""
        self._last = 0.0

    def hear(self, standing: Standing) -> None:
        """Record the duration of one step of a search, and stop the trial when enough steps are timed."""
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
        """Messages from the server to clients, by arm, created on first use."""
        self._started: set[str] = set()
        """Names of the attacks that have been called."""
        self._steps_each: dict[str, float] = {}
        """Steps of all searches of an attack per iteration, by the attack's name."""
        self._largest = max(inputs.scenario.attacks, key=lambda attack: attack.batch_size)
        """The last tried attack, which has the largest batch; before the trials, the one with the largest batch."""
        self._answers: dict[str, tuple[Sequence[Truth], Sequence[Reconstruction]]] = {}
        """True samples and results of trials, by title. They are scored after all trials."""
        self._observing: dict[tuple[str, str], float] = {}
        """Measured seconds of one observation, by arm and attacker."""
        self._scores: dict[str, Sequence[Scored]] = {}
        """Scores of the trials' victims, by title."""

    def refused(self) -> dict[int, ClientError]:
        """Return the batch sizes for which the undefended model gives no gradient, each with the client's error.

        Larger batches whose gradients take long are not checked; the attacks' trials report their errors.
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
        """Return the elapsed seconds of computing one gradient of the smallest batch without a defence."""
        first = min(self.inputs.scenario.attacks, key=lambda attack: attack.batch_size)
        taken = list[float]()
        while not taken or (len(taken) == 1 and taken[0] < _SLOW):  # the first one may load files
            began = monotonic()
            with suppress(Exception):  # the attacks' trials report the error
                self._observe(UNDEFENDED, first, most=1)
            taken.append(monotonic() - began)
        return min(taken)

    def _steps(self, attack: AttackSpec) -> float:
        """Return the estimated seconds of the steps of a search's trial, on all victims of a call."""
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
        """Try each attack on the undefended model, small batches first, and yield the trials.

        An attack is timed for one attacker per batch size. If that took long, the other attackers reuse its trial.

        - An attack that never applies at one batch size is not tried at larger ones.
        - Nothing is tried after `until` (on the clock of `monotonic`), or if a step would take most of the rest. A
          search may still be tried up to `last`, if no attack is known to apply.
        - A closed form is stopped after most of the remaining time, and then not tried again.
        - A search that took long on small batches is assumed to apply to larger ones, in proportion to their samples.
        - Once `enough` returns true for a trial, nothing more is tried.
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
                untried = Trial(attack.title, "not tried, no time", tried=False)
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
        """Return a search's trial on the largest smaller batch, scaled to this batch, if it took long; else None."""
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
        """Return the estimated seconds of one step of a search, from those timed at its batch size.

        Steps of several evaluations count twice, because they use a slower precision. Returns 0 for closed forms, and
        if no search was timed.
        """
        known = [trial.evaluation for (_, size), trial in timed.items() if size == attack.batch_size]
        many = _evaluations(attack)
        return (2 * many if many > 1 else many) * max(known, default=0.0) if _iterations_tried(attack) else 0.0

    def _tells_nothing(self, attack: AttackSpec) -> bool:
        """Return whether the attacker's only extra knowledge is the defences, which the tried model does not have."""
        return bool(attack.knowledge) and set(attack.knowledge) <= {"defence", "code"}

    def pace(self, until: float = inf, arms: Collection[str] | None = None) -> Pace:
        """Measure the seconds that observations and scores take per victim, on the smallest batch.

        Observations of `arms` (default: all) are measured until the clock (`monotonic`) passes `until`, those of the
        first two arms always. The remaining arms are assumed to be as slow as the slowest measured arm. Measurements of
        earlier calls are reused. Raises `UserError` if a client fails.
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
                if "labels" in granted:  # giving labels takes no time
                    found[arm, twin] = found[arm, "adaptive"]
                    continue
                attack = first.model_copy(update={"knowledge": list(granted)})
                taken = inf
                for victim in self._members(attack)[:2]:  # the first observation of an arm may be slower
                    began = process_time()
                    self._observed(arm, attack, [victim])
                    taken = min(taken, process_time() - began)
                    if taken < _LOADING:
                        break
                found[arm, twin] = taken
        return Pace(found | guessed, self._scoring)

    @cached_property
    def _scoring(self) -> float:
        """Seconds for scoring one victim of the largest tried batch; the scores are discarded."""
        attack = self._largest
        seen, truths = self._observed(UNDEFENDED, attack, self._members(attack)[:1])
        blank = Reconstruction(seen[0].sample.blank(attack.batch_size), truths[0].labels.cpu())
        taken = []
        for _ in range(2):  # the first one loads networks of metrics
            began = process_time()
            list(self._executor.run_clients([Call("score", (truths, [blank], False))]))
            taken.append(process_time() - began)
        return taken[-1]

    def leaking(self, criterion: Criterion) -> list[str]:
        """Return the titles of the attacks whose trials leaked samples, according to `criterion`."""
        return [name for name in self._answers if any(map(criterion.leaks, self._scored(name)))]

    def found(self, criterion: Criterion, titles: Collection[str] | None = None) -> list[str]:
        """Return a line per attack and batch size with the trials' results; `titles` selects the trials (None: all).

        A failed search says nothing about longer searches, because trials make only a few evaluations.
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
            said = "no finite reconstruction" if best is None else f"max {criterion.written(best)}"
            verdict = "LEAKS" if leaked else "no leak yet (a short search; a longer one may succeed)"
            lines.append(f"{name}: {verdict if leaked or cut else 'no leak'}, {said}")
        return lines

    @property
    def measured(self) -> RoundTables:
        """Return the trials' results as rows of a run: all results of closed forms, and labels recovered by searches.

        Reconstructions of searches are omitted, because trials make only a few evaluations; their status is not run.
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
        """Return the rows of a trial's results."""
        return [row for scored in self._of_victims(name) for row in scored.rows]

    def _of_victims(self, name: str) -> Sequence[Scored]:
        """Return the scores of a trial's victims, computed on first use."""
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
        """Return the observations of these victims, and their true samples."""
        [done] = self._executor.run_clients([Call("observe", self._asked(arm, attack, victims), returns=3)])
        return done.rest[0], done.rest[1]

    def _asked(self, arm: str, attack: AttackSpec, victims: Sequence[int]) -> tuple[Sent, ObservationRequest]:
        """Return the arguments of an observation."""
        if arm not in self._sent:
            self._sent[arm] = Sent(0, self._built[arm].weights, self._built[arm].buffers)
        return self._sent[arm], ObservationRequest(arm, list(victims), attack)

    def _trial(
        self, attack: AttackSpec, timed: Trial | None, until: float, ends: float, shown: Callable[[Standing], None]
    ) -> Trial:
        """Return the trial of an attack; with a slow model, only the first victim is tried.

        If the attack does not apply to this victim's samples, all victims are tried.
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
        """Return the trial of an attack on `tried` victims, with times scaled to all victims of a call.

        The trial is stopped if it has no result and no step of a search when the clock passes `ends`.
        """
        patience = _PATIENCE * max(until - monotonic(), 0.0)
        watch = _Watch(0.0 if timed else patience, shown)
        count = _iterations_tried(attack)
        times = len(self._members(attack)) / tried  # time is proportional to victims
        if timed and timed.each:  # L-BFGS slows down as its memory fills: make enough iterations to fill it
            count = max(count, floor(min(_LONG, max(until - monotonic(), 0.0) / timed.each)))
        guesses: Sequence[Reconstruction] = ()
        # searches of quick models stop at a step instead, because the deadline mode would slow them down
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
        except Exception as error:  # from the attack or the model: the audit continues without it and reports it
            said = str(error).partition("\n")[0]
            return Trial(attack.title, f"{type(error).__name__}: {said}", raised=True)
        spent = process_time() - began
        if not guesses and not watch.steps:
            return Trial(attack.title, _CUT_OFF, tried=False)
        if guesses and all(guess.status in ("not applicable", "failed") for guess in guesses):
            raised = any(guess.status == "failed" for guess in guesses)
            said = "; ".join(dict.fromkeys(guess.message for guess in guesses))
            never = all(guess.inherent for guess in guesses)  # it can apply only to other architectures
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
        """Return the seconds of one call without its iterations and without loading of files.

        A long first start is repeated up to the first step of a search, because only the first one loads files.
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
        """Return the results of a call; if `iterations` is not 0, searches make this many."""
        changed = {"iterations": iterations} if iterations else {}
        spec = attack.model_validate(attack.model_dump() | changed)
        keys = keys_of(self.inputs.scenario, attack, 0, self._members(attack))  # same results as in the run
        call = Call("attack", (spec, self._arms[UNDEFENDED].to_attackers(), observations, keys), returns=2)
        [done] = self._executor.run_attackers([call])
        guesses: Sequence[Reconstruction] = done.rest[0]  # with their images
        return guesses


def _on_smaller(attack: AttackSpec, took: Mapping[tuple[str, int], float]) -> list[float]:
    """Return a closed form's estimated seconds, from each of its slow trials on smaller batches, scaled by samples.

    The list is empty for searches, which can be stopped at any step.
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
