"""Audit of a model and its data without a scenario, as run by `rayfed audit` and `rayfed.audit`.

The audit selects the attacks that apply and fit into the time, runs them, and reports the leaks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import yaml
from torch import nn

from rayfed import scenario as scenarios
from rayfed.analysis.audit import UNDEFENDED, Defences, Plan, called
from rayfed.data.section import data_section
from rayfed.documents import yaml_flow
from rayfed.engine import runs
from rayfed.engine.auditing import Budget, TooShort, rehearsed
from rayfed.engine.executor import Execution
from rayfed.engine.finding import dotted, loss_section, search_where
from rayfed.engine.gpus import KINDS, with_devices
from rayfed.engine.inputs import Inputs
from rayfed.engine.local import local
from rayfed.engine.progress import AuditProgress, Progress
from rayfed.engine.tables import RoundTables
from rayfed.errors import UserError
from rayfed.memory import give_back_cache
from rayfed.models.wrappers import unwrap
from rayfed.report.text.weights import initial_weights
from rayfed.scenario import resolve
from rayfed.scenario.components import named
from rayfed.scenario.problems import Problem, component_problems
from rayfed.store.folder import SCENARIO, RunFolder

Watch = Callable[[], AbstractContextManager[AuditProgress]]
"""Open the display of one stage of an audit: the trials, or the attacks on one set of weights."""


@dataclass(frozen=True)
class Audited:
    """Results of an audit for one set of weights."""

    folder: RunFolder
    weights: str
    """Description of the weights."""
    arms: Sequence[str]
    """Arms with the user's defences; without any, the undefended arm."""
    short: TooShort | None = None
    """The smallest possible audit, if there was no time for any attack."""


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
    """Run all applicable attacks within the time budget, and return the results for each set of weights.

    The weights are the model's initial ones and, if a `run` is given, those that its `arm` has learnt. The list is
    empty if no attack applies. `shrink` reduces batch sizes to the number of samples per client. `execution` is opened
    before the trials, because it may fail. If there is no time for any attack, the folder has the measurements of the
    trials. Raises `UserError` for invalid input.
    """
    audited: list[Audited] = []
    with ExitStack() as started:
        with watch() as progress:
            start = lambda inputs: started.enter_context(execution(_without_gpus(inputs), Progress()))  # noqa: E731
            found = rehearsed(plan, changes, budget, progress, shrink, start)
        give_back_cache()  # trials run in this process and share the GPU with the actors
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
                if source is not None:  # trials used the initial weights
                    own = replace(own, measured=RoundTables(), tried=RoundTables())
                progress.ends = own.ends
                # without actors if little or nothing is run
                by = local if short or here else execution
                played = runs.attack(loaded, source, out, by, progress, learnt, own)
                progress.audited(weights, f"{played.url}/report.html")
            audited.append(Audited(played, weights, arms, short))
    return audited


def _without_gpus(inputs: Inputs) -> Inputs:
    """Return the inputs of trials with `num_gpus: auto` replaced by 0, to open an execution before the attacks.

    Each run measures its own shares of GPUs, and the trials' GPUs are those of this process, not of a cluster.
    """
    return replace(inputs, scenario=with_devices(inputs.scenario, dict.fromkeys(KINDS, 0)))


def model_of(
    given: str | type[nn.Module] | nn.Module | Mapping[str, Any] | None, trained: Trained | None
) -> dict[str, Any]:
    """Return the scenario section `model` for a model. Default: the section of the run `trained`.

    A model is a name, a class, a mapping, or an instance, whose weights are written to a temporary file. Raises
    `UserError` without either.
    """
    if isinstance(given, type):
        return {"name": _class_path(given)}
    if isinstance(given, nn.Module):
        return _section_of_instance(given)
    if given is not None:
        found = named(given)
        if not isinstance(found, Mapping):
            raise UserError(
                f"model: found a {type(given).__name__}; give a name, a class, an nn.Module, or {{name: NAME, ...}}"
            )
        return {**found, "name": dotted(found["name"])}
    if trained is None:
        raise UserError("--model: give the model to audit, or a run with --run")
    return trained.model


def _section_of_instance(model: nn.Module) -> dict[str, Any]:
    """Return the section of the model's class, with a file of the model's weights as initial weights."""
    bare = unwrap(model)
    if type(bare).__module__.partition(".")[0] == "torch":
        raise UserError(
            f"model: {type(bare).__name__} is a class of PyTorch, which has no layers without arguments: write a class "
            f"that can be called without arguments and makes these layers"
        )
    file = Path(mkdtemp(prefix="rayfed-model-"), "weights.pt")
    torch.save(bare.state_dict(), file)
    return {"name": _class_path(type(bare)), "state": str(file)}


def _class_path(model: type) -> str:
    return f"{model.__module__}:{model.__qualname__}"


def loss_of(given: str | Mapping[str, Any] | None, trained: Trained | None) -> dict[str, Any]:
    """Return the scenario section `loss` for a name or mapping. Default: the section of the run, or empty."""
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
    """Return the scenario section `data` for a file, folder or data set. Default: the section of the run `trained`."""
    if label is not None and targets:
        raise UserError(
            "--label names a column of classes, --target columns of numbers: give only one of these options"
        )
    if given is not None:
        return data_section(given, size, label, targets, text)
    if trained is None:
        raise UserError("--data: give a file, a folder or a data set, or a run with --run")
    return trained.data


def pipelines(given: Sequence[Any]) -> Defences:
    """Return defence pipelines by arm name, from names of defences, mappings with a name, or lists of both.

    Raises `UserError` for anything else.
    """
    found: Defences = {}
    if isinstance(given, str | Mapping):
        raise UserError(f"defences: found {given!r}; give a list of arms, such as [{given!r}]")
    for value in given:
        pipeline = [named(one) for one in (value if isinstance(value, list | tuple) else [value])]
        if not all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in pipeline):
            raise UserError(
                f"defence: found '{_typed(value)}'; give a name, {{name: NAME, FIELD: VALUE}}, or a list of both"
            )
        pipeline = [{**one, "name": dotted(one["name"])} for one in pipeline]
        for problem in component_problems({"defences": pipeline}):
            raise UserError(f"defence '{_typed(value)}': {_told(problem, value)}")
        found[called(pipeline)] = pipeline
    return {name: pipeline for name, pipeline in found.items() if pipeline}


def _told(problem: Problem, value: Any) -> str:
    """Return the message for a problem of a pipeline's field, with an example if a required field is missing."""
    field = ".".join(map(str, problem.path[2:]))
    lacks = problem.wanted or not field
    example = f", as '{{name: {value}, {field or 'FIELD'}: VALUE}}'" if lacks and isinstance(value, str) else ""
    return f"{field}{': ' * bool(field)}{problem.told}{example}"


def _typed(value: Any) -> str:
    """Return a defence as the command line accepts it: YAML in one line."""
    try:
        return yaml_flow(value)
    except yaml.YAMLError:  # a Python value that YAML cannot represent
        return str(value)


@dataclass(frozen=True)
class Trained:
    """Sections `model`, `data` and `loss` of a run whose weights are audited, from the run's first arm."""

    arm: str
    model: dict[str, Any]
    data: dict[str, Any]
    loss: dict[str, Any]

    @classmethod
    def of(cls, run: str) -> Trained:
        """Read the sections from a run's scenario. Raises `UserError` if the run has no scenario."""
        search_where(run)
        folder = RunFolder.open(run)
        loaded = scenarios.parse(folder.read_text(SCENARIO), f"{folder.url}/{SCENARIO}")
        name, arm = next(iter(resolve(loaded).items()))
        parts = (part.model_dump(mode="json") for part in (arm.model, loaded.data, arm.loss))
        return cls(name, *parts)
