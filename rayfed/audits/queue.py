"""Queue of an audit: the order in which its attacks are run.

The first pass has the closed forms and short searches, small batches first. Each further pass repeats the searches with
twice as many evaluations of the objective. In each pass the undefended arm comes first at each batch size.

A pass repeats the searches from their start, because their step sizes depend on the total number of iterations, and so
do their trial searches. All passes together cost at most twice as much as the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rayfed.audits.plan import ATTACKER_KNOWLEDGE, UNDEFENDED, Plan, make_title
from rayfed.evidence.methods import FEWEST, MOST, USEFUL, Method

BATCHES = 1, 4, 16
"""Default batch sizes."""


@dataclass(frozen=True)
class Unit:
    """Attack on one arm at one batch size, by all attackers."""

    arm: str
    method: Method
    batch: int

    @property
    def titles(self) -> tuple[str, ...]:
        """Return the attack's titles in the scenario, one per attacker."""
        name = make_title(self.method, self.batch)
        return tuple(f"{name}, {twin}" for twin in ATTACKER_KNOWLEDGE)


@dataclass(frozen=True)
class Stage:
    """Units that are run together, in this order: closed forms or searches."""

    evaluations: int
    """Evaluations of the objective per search in the stage's pass."""
    units: Sequence[Unit]

    @property
    def searches(self) -> bool:
        """Return whether the units are searches."""
        return any(unit.method.evaluations for unit in self.units)


def plan_stages(plan: Plan, arms: Sequence[str], evaluations: int | None = None) -> list[Stage]:
    """Return the stages of an audit of `arms`, in the order in which they are run.

    With `evaluations`, the last pass makes this many per search; the default is `MOST`.
    """
    first, *further = pass_evaluations(evaluations)
    found = []
    for batch in plan.batches:
        closed_forms, searches = (_methods(plan, batch, kind) for kind in (False, True))
        found += _stages_of(first, arms, batch, closed_forms) + _stages_of(first, arms, batch, searches)
    for count in further:
        for batch in plan.batches:
            found += _stages_of(count, arms, batch, _methods(plan, batch, searches=True))
    return [stage for stage in found if stage.units]


def _methods(plan: Plan, batch: int, searches: bool) -> list[Method]:
    """Return the searches or closed forms that take a batch of this size."""
    methods = [method for method in plan.methods if bool(method.evaluations) == searches]
    return [method for method in methods if method.takes(plan.modality, batch)]


def _stages_of(evaluations: int, arms: Sequence[str], batch: int, methods: Sequence[Method]) -> list[Stage]:
    """Return the stages of one batch size: all methods on the undefended arm, then each method on all other arms.

    After the first stage it is known which attacks never apply to the model, and after each method which arms leak.
    """
    defended = [arm for arm in arms if arm != UNDEFENDED]
    bare = Stage(evaluations, [Unit(UNDEFENDED, method, batch) for method in methods])
    return [bare, *(Stage(evaluations, [Unit(arm, method, batch) for arm in defended]) for method in methods)]


def pass_evaluations(last: int | None = None) -> Iterator[int]:
    """Yield the evaluations per search of each pass, which double up to `last` (default: `MOST`)."""
    last = MOST if last is None else last
    evaluations = min(USEFUL, last)
    yield evaluations
    while evaluations < last:
        evaluations = min(2 * evaluations, last)
        yield evaluations


def pass_iterations(plan: Plan, evaluations: int, fixed: bool = False) -> dict[str, int]:
    """Return the iterations of each search in a pass, by title.

    Unless the number of evaluations is `fixed` by the user, methods with a small `share` make fewer of them.
    """
    found = {}
    for method, batch in plan.searches:
        count = evaluations if fixed else max(FEWEST, round(evaluations * method.share))
        found[make_title(method, batch)] = count_iterations(method, count)
    return found


def count_iterations(method: Method, evaluations: int) -> int:
    """Return the number of iterations, at least one, in which a search makes `evaluations` evaluations."""
    return max(1, -(-evaluations // method.evaluations))
