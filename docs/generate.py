"""Write the pages of the reference that are made from code: the scenario, commands, tables, exit codes, scenarios.

    python docs/generate.py

A test fails when a page is not what this prints.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pyarrow as pa
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rayfed import registry
from rayfed.cli import app
from rayfed.cli.common import EXIT_CODES
from rayfed.metrics.measures import MEASURES
from rayfed.scenario import (
    ArmSpec,
    AttackSpec,
    Augment,
    ComponentSpec,
    DataSpec,
    Lora,
    ModelSpec,
    Normalise,
    Prompt,
    Scenario,
    Train,
)
from rayfed.scenario.system import DeviceClass, System
from rayfed.shipped import shipped
from rayfed.store.schemas import OUTCOME_FIELDS, TABLES, TRIAL_FIELDS

HEADER = """\
# The scenario, field by field

Made by `python docs/generate.py` from the schema; `rayfed schema` prints the same for editors. A component (data set,
partition, model, aggregation, protection, defence, attack, and what an attack `observes` and has as `knowledge`) is
named by its short name, by an entry point of another installed package (`rayfed.attacks`, `rayfed.defences`, ...), or
by a dotted path `my_module:Name`, or as `FILE.py:Name`; its own fields stand beside the name.

**Paths.** A relative path in a scenario (data, weights, networks, `FILE.py:Name`, in the values of a `sweep`, too) is
looked for beside the scenario's file, then in the current folder, and the command says so where it takes the latter's.
One on the command line (`--set`, `--model`, `--defence`, `--data`, `--out`) is relative to the current folder, and so
is what is written (`output.folder`). `~` and environment variables are expanded. The run notes in its `scenario.yaml`
what was found, as absolute paths: `rayfed resume` and Ray's processes look there, whatever the current folder. A field
of a component of your own is a path where its type is `pathlib.Path`.

**`--set PATH=VALUE`.** Entries of lists go by index or name: `attacks.0.iterations`, `attacks.idlg.iterations`. An
arm's defences go by either whether the arm is a list or has `defences`: `arms.noise.gaussian.sigma`,
`arms.noise.defences.0.sigma`.
"""


def reference() -> str:
    """The whole page."""
    return "\n".join([HEADER, *_sections("", Scenario), *_own_fields(), *_components()]).rstrip() + "\n"


def _sections(path: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"## `{path or 'scenario'}`\n"
    yield f"{_text(model.__doc__)}\n"
    yield from _table(model)
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel) and not issubclass(inner, ComponentSpec):
            yield from _sections(f"{path}.{name}".lstrip("."), inner)


def _own_fields() -> Iterator[str]:
    yield "## `arms.NAME`\n"
    yield f"{_text(ArmSpec.__doc__)}\n"
    yield from _table(ArmSpec)
    sections = {"training.augment": Augment, "federation.system": System, "federation.system.devices.NAME": DeviceClass}
    for path, section in sections.items():
        yield f"## `{path}`\n"
        yield f"{_text(section.__doc__)}\n"
        yield from _table(section)
    own = {"data": DataSpec, "model": ModelSpec, "attacks[]": AttackSpec}
    inside = {"model.normalise": Normalise, "model.train": Train, "model.train.lora": Lora}
    inside["model.train.prompt"] = Prompt
    for path, model in (own | inside).items():
        beside = " These stand beside the component's own fields." if path in own else ""
        yield f"## `{path}`\n"
        yield f"{_text(model.__doc__)}{beside}\n"
        yield from _table(model)


def _table(model: type[BaseModel]) -> Iterator[str]:
    said = registry.said_of_fields(model)
    yield "| field | default | meaning |"
    yield "| --- | --- | --- |"
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else _default(field)
        yield f"| `{name}` | {default} | {_text(field.description or said.get(name))} |"
    yield ""


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, ComponentSpec):
        return f"`{value.name}`"
    if isinstance(value, dict) and any(isinstance(one, BaseModel) for one in value.values()):
        return "one class, with its defaults"
    return "see below" if isinstance(value, BaseModel) else f"`{'null' if value is None else value}`"


def _components() -> Iterator[str]:
    for kind in registry.KINDS:
        yield f"## {kind.capitalize()}\n"
        for name in sorted(registry.table(kind)):
            target = registry.find(kind, name)
            yield f"### `{name}`\n"
            yield f"{inspect.getdoc(target)}\n"
            parameters = registry.parameters(target)
            if parameters:
                yield "| field | type | default | meaning |"
                yield "| --- | --- | --- | --- |"
                for p in parameters:
                    kind_of = p.type.replace("|", "\\|")
                    yield f"| `{p.name}` | {kind_of} | {p.default.replace('|', chr(92) + '|')} | {_text(p.doc)} |"
                yield ""


def _text(doc: str | None) -> str:
    return " ".join((doc or "").split()).replace("|", "\\|")


COMMANDS = """\
# Commands

Made by `python docs/generate.py` from the commands themselves; `rayfed COMMAND --help` prints the same. How a
command ends is under [exit codes](exit-codes.md).
"""


def commands() -> str:
    """The page of all commands."""
    parts = [COMMANDS, *_command("rayfed", app.registered_callback.callback)]
    for group in app.registered_groups:
        for command in group.typer_instance.registered_commands:
            name = command.name or command.callback.__name__.replace("_", "-")
            parts += _command(f"rayfed {name}", command.callback)
    return "\n".join(parts).rstrip() + "\n"


def _command(name: str, callback: Callable[..., Any]) -> Iterator[str]:
    """Yield the section of a command: what it does, its arguments, its options."""
    yield f"## `{name}`\n"
    if doc := inspect.getdoc(callback):
        yield f"{doc}\n"
    signature = inspect.signature(callback, eval_str=True)
    annotated = [p for p in signature.parameters.values() if get_origin(p.annotation) is Annotated]
    parameters = [(p, *get_args(p.annotation)) for p in annotated]
    arguments = [_argument(p, info) for p, _, info in parameters if isinstance(info, typer.models.ArgumentInfo)]
    yield f"```\n{' '.join([name, *arguments])} [OPTIONS]\n```\n"
    yield "| | value | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for parameter, kind, info in parameters:
        if isinstance(info, typer.models.ArgumentInfo):
            names = [info.metavar or parameter.name.upper()]
        else:
            given = [info.default, *(info.param_decls or ())]  # `Annotated` leaves a first name in the default's place
            own = f"--{parameter.name.replace('_', '-')}"
            names = [name for name in given if str(name).startswith("-")] or [own]
        empty = parameter.default in (None, False, inspect.Parameter.empty)
        default = "" if empty else f"`{getattr(parameter.default, 'value', parameter.default)}`"
        if parameter.default is inspect.Parameter.empty:
            default = "required"
        named = ", ".join(f"`{one}`" for one in names)
        value = "" if names == [info.metavar] else _value(kind, info)
        yield f"| {named} | {value} | {default} | {_text(info.help)} |"
    yield ""


def _argument(parameter: inspect.Parameter, info: typer.models.ArgumentInfo) -> str:
    """Return an argument as the line of usage has it."""
    name = (info.metavar or parameter.name.upper()) + "..." * (get_origin(parameter.annotation.__origin__) is list)
    return name if parameter.default is inspect.Parameter.empty else f"[{name}]"


def _value(kind: Any, info: typer.models.ParameterInfo) -> str:
    """Return which values an option takes."""
    while get_origin(kind) in (Union, UnionType, list, Annotated):
        kind = next(one for one in get_args(kind) if one is not NoneType)
    if kind is bool:
        return ""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{one}`" for one in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{one.value}`" for one in kind)
    bounds = [f"{sign} {bound:g}" for sign, bound in ((">=", info.min), ("<=", info.max)) if bound is not None]
    words = {int: "whole number", float: "number", Path: "path", str: "text"}
    return " ".join([f"`{info.metavar}`" if info.metavar else words[kind], ", ".join(bounds)]).strip()


TABLES_HEADER = """\
# Tables of a run

Made by `python docs/generate.py` from the schemas. A run's folder has a folder of Parquet files for each table;
`rayfed.load(RUN).table(NAME)` returns it as an Arrow table, `.frame(NAME)` as a pandas data frame. Columns without
"may be null" have a value in every row; elsewhere null means "not measured" or "does not apply". Shares and accuracies
are between 0 and 1, losses in nats, times in seconds.
"""


def tables() -> str:
    """The page of all tables and columns."""
    parts = [TABLES_HEADER]
    for name, schema in TABLES.items():
        parts += [f"## `{name}`\n", "| column | type | may be null | meaning |", "| --- | --- | --- | --- |"]
        for field in schema:
            meaning = _text(field.metadata[b"description"].decode())
            parts.append(f"| `{field.name}` | {_arrow(field.type)} | {'yes' * field.nullable} | {meaning} |")
        parts.append("")
    parts += ["## `outcomes`\n", OUTCOMES, "| column | type | meaning |", "| --- | --- | --- |"]
    for field in [*TRIAL_FIELDS, *OUTCOME_FIELDS]:
        if measure := MEASURES.get(field.name):
            unit = f" ({measure.unit})" if measure.unit else ""
            better = "more" if measure.higher_is_better else "less"
            meaning = f"{measure.kind}: {measure.title}{unit}; {better} is better"
        else:
            meaning = field.metadata[b"description"].decode()
        parts.append(f"| `{field.name}` | {_arrow(field.type)} | {_text(meaning)} |")
    return "\n".join(parts).rstrip() + "\n"


OUTCOMES = """\
`rayfed.load(RUN).outcomes()` has a row for each arm and attack. Of a sweep it has them for each trial, beside a column
for each swept field. Better means better for those who protect data. `rayfed recommend --where` bounds any measure.
"""


def _arrow(type: pa.DataType) -> str:
    """Return a type in words; of lists of structures their fields."""
    if pa.types.is_list(type):
        return f"list of {_arrow(type.value_type)}"
    if pa.types.is_struct(type):
        return "(" + ", ".join(f"`{field.name}` {_arrow(field.type)}" for field in type) + ")"
    return str(type)


EXITS = """\
# Exit codes

Made by `python docs/generate.py`. An error is one message on the standard error; `--debug` shows where it was raised.

| code | when |
| --- | --- |
"""


def exit_codes() -> str:
    """The page of the exit codes."""
    return EXITS + "".join(f"| {code} | {_text(meaning)} |\n" for code, meaning in EXIT_CODES.items())


SCENARIOS = """\
# Scenarios that come with rayfed

Made by `python docs/generate.py` from the scenarios' first lines. `rayfed launch noniid` plays one by its name,
`rayfed new mine --from noniid` copies it. How long one takes is an estimate for two cores.

| scenario | shows |
| --- | --- |
"""


def scenarios() -> str:
    """The page of the scenarios, from the comment that each begins with."""
    headers = {path.stem: _header(path) for path in sorted(shipped("scenarios").glob("*.yaml"))}
    page = SCENARIOS
    for name, header in headers.items():
        page += f"| [`{name}`](#{name.lower()}) | {_text(header.partition(chr(10) * 2)[0])} |\n"
    for name, header in headers.items():
        page += f"\n## `{name}`\n\n{header}\n\n[`scenarios/{name}.yaml`](../../scenarios/{name}.yaml)\n"
    return page


def _header(path: Path) -> str:
    """Return a scenario's first comment as Markdown: what stands further in are commands."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[2:])
    blocks = "\n".join(lines).split("\n\n")
    return "\n\n".join(f"```\n{inspect.cleandoc(' ' + b)}\n```" if b.startswith("  ") else b for b in blocks)


PAGES: dict[str, Callable[[], str]] = {
    "scenario.md": reference,
    "reference/commands.md": commands,
    "reference/tables.md": tables,
    "reference/exit-codes.md": exit_codes,
    "reference/scenarios.md": scenarios,
}
"""Page, relative to `docs/` -> what writes it."""

if __name__ == "__main__":
    for page, made in PAGES.items():
        (Path(__file__).parent / page).write_text(made(), encoding="utf-8")
