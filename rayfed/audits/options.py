"""Options of an audit, and the audit's plan from them, for `rayfed audit` and `rayfed.audit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from rayfed import scenario as scenarios
from rayfed.audits.plan import DEFENCES, Defences, Plan, name_pipeline
from rayfed.audits.queue import BATCHES
from rayfed.core.documents import yaml_flow
from rayfed.data.section import UserData
from rayfed.errors import UserError
from rayfed.runs.scenario_loading import loss_section, search_where, to_dotted_path
from rayfed.scenario import resolve
from rayfed.scenario.components import expand_component
from rayfed.scenario.problems import Problem, component_problems
from rayfed.store.folder import SCENARIO, RunFolder

if TYPE_CHECKING:
    from torch import nn


Model: TypeAlias = "str | type[nn.Module] | nn.Module | Mapping[str, Any] | None"
Data: TypeAlias = str | PathLike[str] | tuple[Any, Any] | UserData | None


@dataclass(frozen=True)
class AuditOptions:
    """Options of an audit other than model, data, defences and time.

    >>> import rayfed
    >>> rayfed.AuditOptions(batches=[8], seed=1).images
    4
    """

    loss: str | Mapping[str, Any] | None = None
    """Name, or mapping with a `name`. Default: cross entropy, or the loss of the audited run."""
    batches: Sequence[int] | None = None
    """Batch sizes. Default: 1, 4 and 16, or fewer if data are small."""
    images: int = 4
    """Number of samples to attack per batch size, rounded up to full batches."""
    iterations: int | None = None
    """Evaluations of the objective per search, without a time limit. Default: as many as fit the time."""
    threshold: float | None = None
    """Similarity that counts as a leak: PSNR in dB, or a share for texts and tables. Default: 15, or 0.9."""
    seed: int = 0
    """Random seed."""
    executor: str = "local"
    """`local` (this process) or `ray`. Both give the same results if `iterations` is given."""
    address: str | None = None
    """Address of a Ray cluster. Default: start Ray on this machine."""

    def plan(self, model: Model, data: Data, defences: Defences | None, trained: Trained | None) -> Plan:
        """Return the plan of an audit. `trained` has the default model and data; without `defences` there are nine.

        Raises `UserError` for a missing or unknown model, data or loss.
        """
        return Plan(
            model=choose_model(model, trained),
            data=choose_data(data, trained),
            loss=choose_loss(self.loss, trained),
            batches=list(self.batches or BATCHES),
            samples=self.images,
            seed=self.seed,
            defences=DEFENCES if defences is None else defences,
            threshold=self.threshold,
        )


def choose_model(given: Model, trained: Trained | None) -> dict[str, Any]:
    """Return the scenario section `model` for a model. Default: the section of the run `trained`.

    A model is a name, a class, a mapping, or an instance, whose weights are written to a temporary file. Raises
    `UserError` without either.
    """
    from torch import nn  # a slow import

    if isinstance(given, type):
        return {"name": _class_path(given)}
    if isinstance(given, nn.Module):
        return _section_of_instance(given)
    if given is not None:
        found = expand_component(given)
        if not isinstance(found, Mapping):
            raise UserError(
                f"model: found a {type(given).__name__}; give a name, a class, an nn.Module, or {{name: NAME, ...}}"
            )
        return {**found, "name": to_dotted_path(found["name"])}
    if trained is None:
        raise UserError("--model: give the model to audit, or a run with --run")
    return trained.model


def _section_of_instance(model: nn.Module) -> dict[str, Any]:
    """Return the section of the model's class, with a file of the model's weights as initial weights."""
    import torch

    from rayfed.models.wrappers import unwrap

    bare = unwrap(model)
    if type(bare).__module__.partition(".")[0] == "torch":
        raise UserError(
            f"model: {type(bare).__name__} is a class of PyTorch, which has no layers without arguments: write a "
            f"class that can be called without arguments and makes these layers"
        )
    file = Path(mkdtemp(prefix="rayfed-model-"), "weights.pt")
    torch.save(bare.state_dict(), file)
    return {"name": _class_path(type(bare)), "state": str(file)}


def _class_path(model: type) -> str:
    return f"{model.__module__}:{model.__qualname__}"


def choose_loss(given: str | Mapping[str, Any] | None, trained: Trained | None) -> dict[str, Any]:
    """Return the scenario section `loss` for a name or mapping. Default: the section of the run, or empty."""
    if given is None:
        return {} if trained is None else trained.loss
    return loss_section(given)


def choose_data(given: Data, trained: Trained | None) -> dict[str, Any]:
    """Return the scenario section `data` for a user's data. Default: the section of the run `trained`."""
    if given is not None:
        return (given if isinstance(given, UserData) else UserData(given)).section()
    if trained is None:
        raise UserError("--data: give a file, a folder or a data set, or a run with --run")
    return trained.data


def parse_pipelines(given: Sequence[Any]) -> Defences:
    """Return defence pipelines by arm name, from names of defences, mappings with a name, or lists of both.

    Raises `UserError` for anything else.
    """
    found: Defences = {}
    if isinstance(given, str | Mapping):
        raise UserError(f"defences: found {given!r}; give a list of arms, such as [{given!r}]")
    for value in given:
        pipeline = [expand_component(one) for one in (value if isinstance(value, list | tuple) else [value])]
        if not all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in pipeline):
            raise UserError(
                f"defence: found '{_typed(value)}'; give a name, {{name: NAME, FIELD: VALUE}}, or a list of both"
            )
        pipeline = [{**one, "name": to_dotted_path(one["name"])} for one in pipeline]
        for problem in component_problems({"defences": pipeline}):
            raise UserError(f"defence '{_typed(value)}': {_told(problem, value)}")
        found[name_pipeline(pipeline)] = pipeline
    return {name: pipeline for name, pipeline in found.items() if pipeline}


def _told(problem: Problem, value: Any) -> str:
    """Return the message for a problem of a pipeline's field, with an example if a required field is missing."""
    field = ".".join(map(str, problem.path[2:]))
    lacks = problem.wanted or not field
    example = f", as '{{name: {value}, {field or 'FIELD'}: VALUE}}'" if lacks and isinstance(value, str) else ""
    place = f"{field}: " if field else ""
    return f"{place}{problem.text}{example}"


def _typed(value: Any) -> str:
    """Return a defence as the command line accepts it: YAML in one line."""
    try:
        return yaml_flow(value)
    except yaml.YAMLError:  # a Python value that YAML cannot represent
        return str(value)


@dataclass(frozen=True)
class Trained:
    """Sections `model`, `data` and `loss` of a run whose weights are audited, from the run's first arm."""

    run: str
    """Path or URL of the run."""
    arm: str
    model: dict[str, Any]
    data: dict[str, Any]
    loss: dict[str, Any]

    @classmethod
    def from_run(cls, run: str) -> Trained:
        """Read the sections from a run's scenario. Raises `UserError` if the run has no scenario."""
        search_where(run)
        folder = RunFolder.open(run)
        loaded = scenarios.parse(folder.read_text(SCENARIO), f"{folder.url}/{SCENARIO}")
        name, arm = next(iter(resolve(loaded).items()))
        parts = (part.model_dump(mode="json") for part in (arm.model, loaded.data, arm.loss))
        return cls(run, name, *parts)
