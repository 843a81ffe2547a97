"""Audit of a model: which attacks apply, which fit into the time, and what they find.

For users who have a model and data and no scenario yet; `rayfed audit` and `rayfed.audit` are this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import yaml

from rayfed import scenario as scenarios
from rayfed.analysis.audit import UNDEFENDED, Defences, Plan, called
from rayfed.data.section import data_section
from rayfed.documents import yaml_flow
from rayfed.engine import runs
from rayfed.engine.auditing import Budget, TooShort, rehearsed
from rayfed.engine.executor import Execution
from rayfed.engine.finding import dotted, loss_section, search_where
from rayfed.engine.local import local
from rayfed.engine.progress import AuditProgress, Progress
from rayfed.engine.tables import RoundTables
from rayfed.errors import UserError
from rayfed.memory import give_back_cache
from rayfed.report.provenance import initial_weights
from rayfed.scenario import resolve
from rayfed.scenario.components import named
from rayfed.scenario.problems import Problem, component_problems
from rayfed.store.folder import SCENARIO, RunFolder

Watch = Callable[[], AbstractContextManager[AuditProgress]]
"""Opens what shows one stage of an audit: the trials, or the attacks on one set of weights."""


@dataclass(frozen=True)
class Audited:
    """One set of weights that was audited."""

    folder: RunFolder
    weights: str
    """Whose they are, in words."""
    arms: Sequence[str]
    """The arms that were asked about: those with the user's defences, or else the undefended one."""
    short: TooShort | None = None
    """What would have been needed, where there was no time for any attack."""


def audit(
    plan: Plan,
    budget: Budget,
    execution: Execution,
    watch: Watch,
    *,
    run: str | None = None,
    arm: str | None = None,
    changes: Sequence[str] = (),
    out: str | None = None,
    shrink: bool = False,
    arms: Sequence[str] = (UNDEFENDED,),
) -> list[Audited]:
    """Play all applicable attacks within the budget, and return a folder for each set of weights, possibly none.

    Weights are those that the model begins with and, where a `run` is named, those that its `arm` has learnt. With
    `shrink` batches are no larger than what clients have. What attacks need, such as Ray, starts before the trials, for
    it may fail. Where there is no time for any attack, a folder has what trials measured. Raises `UserError` for the
    user's mistakes.
    """
    audited: list[Audited] = []
    with ExitStack() as started:
        with watch() as progress:
            start = lambda inputs: started.enter_context(execution(inputs, Progress()))  # noqa: E731
            found = rehearsed(plan, changes, budget, progress, shrink, start)
        give_back_cache()  # trials are played in this process, and actors have their shares of the same GPU
        if found is None:
            return audited
        loaded, allowance, noted, budget, short, here = found
        initial = initial_weights(loaded.model_dump(mode="json"))
        attacks: list[tuple[str, str | None, str | None]] = [(initial, None, None)]
        attacks += [(f"the weights of {run}", run, arm)] if run else []
        for place, (weights, source, learnt) in enumerate(attacks):
            with watch() as progress:
                progress.seconds, progress.noted = allowance.calls, noted
                own = replace(allowance, until=budget.until(len(attacks) - place))
                if source is not None:  # trials are of the weights that the model begins with
                    own = replace(own, measured=RoundTables(), tried=RoundTables())
                progress.ends = own.ends
                # where little or nothing is played, no actors are needed
                by = local if short or here else execution
                played = runs.attack(loaded, source, out, by, progress, learnt, own)
                progress.audited(weights, f"{played.url}/report.html")
            audited.append(Audited(played, weights, arms, short))
    return audited


def model_of(given: str | Mapping[str, Any] | None, trained: Trained | None) -> dict[str, Any]:
    """Return the section `model` for a name or mapping, by default the run's; raises `UserError` without either."""
    if given is not None:
        found = named(given)
        if not isinstance(found, Mapping):
            raise UserError(f"model: found a {type(given).__name__}; give a name, a class, or {{name: NAME, ...}}")
        return {**found, "name": dotted(found["name"])}
    if trained is None:
        raise UserError("--model: name the model to audit, or a run by --run")
    return trained.model


def loss_of(given: str | Mapping[str, Any] | None, trained: Trained | None) -> dict[str, Any]:
    """Return the section `loss` for a name or mapping, by default the run's; empty if the model's task sets it."""
    if given is None:
        return {} if trained is None else trained.loss
    return loss_section(given)


def data_of(
    given: str | None,
    size: int | None,
    label: str | None,
    targets: Sequence[str] | None,
    text: str | None,
    trained: Trained | None,
) -> dict[str, Any]:
    """Return the section `data` for the given samples (`rayfed.data.section`), by default the run's."""
    if label is not None and targets:
        raise UserError("--label names the column of the classes, --target columns of numbers: give one of them")
    if given is not None:
        return data_section(given, size, label, targets, text)
    if trained is None:
        raise UserError("--data: name a file, a folder or a data set, or a run by --run")
    return trained.data


def pipelines(given: Sequence[Any]) -> Defences:
    """Return defence pipelines by arm, from names, mappings with a name, or lists of these.

    Raises `UserError` for what is none.
    """
    found: Defences = {}
    if isinstance(given, str | Mapping):
        raise UserError(f"defences: found {given!r}; give a list of arms, such as [{given!r}]")
    for value in given:
        pipeline = [named(one) for one in (value if isinstance(value, list | tuple) else [value])]
        if not all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in pipeline):
            raise UserError(
                f"defence: found '{_typed(value)}'; give a name, {{name: NAME, FIELD: VALUE}}, or a list of these"
            )
        pipeline = [{**one, "name": dotted(one["name"])} for one in pipeline]
        for problem in component_problems({"defences": pipeline}):
            raise UserError(f"defence '{_typed(value)}': {_told(problem, value)}")
        found[called(pipeline)] = pipeline
    return {name: pipeline for name, pipeline in found.items() if pipeline}


def _told(problem: Problem, value: Any) -> str:
    """Return a problem of a pipeline's field, and how a name alone is given with what it lacks."""
    field = ".".join(map(str, problem.path[2:]))
    lacks = problem.wanted or not field
    example = f", as '{{name: {value}, {field or 'FIELD'}: VALUE}}'" if lacks and isinstance(value, str) else ""
    return f"{field}{': ' * bool(field)}{problem.told}{example}"


def _typed(value: Any) -> str:
    """Return a defence as a command takes it: YAML in one line."""
    try:
        return yaml_flow(value)
    except yaml.YAMLError:  # of a Python value that YAML does not know
        return str(value)


@dataclass(frozen=True)
class Trained:
    """A run whose weights are audited: those of its first arm, its reference."""

    arm: str
    model: dict[str, Any]
    data: dict[str, Any]
    loss: dict[str, Any]

    @classmethod
    def of(cls, run: str) -> Trained:
        """Read a run's scenario; raises `UserError` if there is none."""
        search_where(run)
        folder = RunFolder.open(run)
        loaded = scenarios.parse(folder.read_text(SCENARIO), f"{folder.url}/{SCENARIO}")
        name, arm = next(iter(resolve(loaded).items()))
        parts = (part.model_dump(mode="json") for part in (arm.model, loaded.data, arm.loss))
        return cls(name, *parts)
