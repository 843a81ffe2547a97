"""Write `docs/scenario.md`, the scenario's reference, from the schema and the registry.

    python docs/generate.py

A test fails when the file is not what this prints.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rayfed import registry
from rayfed.scenario import ArmSpec, AttackSpec, ComponentSpec, DataSpec, Lora, ModelSpec, Normalise, Scenario, Train
from rayfed.scenario.system import DeviceClass, System

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
    yield from _table((name, field) for name, field in model.model_fields.items())
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel) and not issubclass(inner, ComponentSpec):
            yield from _sections(f"{path}.{name}".lstrip("."), inner)


def _own_fields() -> Iterator[str]:
    yield "## `arms.NAME`\n"
    yield f"{_text(ArmSpec.__doc__)}\n"
    yield from _table((name, field) for name, field in ArmSpec.model_fields.items())
    for path, section in {"federation.system": System, "federation.system.devices.NAME": DeviceClass}.items():
        yield f"## `{path}`\n"
        yield f"{_text(section.__doc__)}\n"
        yield from _table((name, field) for name, field in section.model_fields.items())
    own = {"data": DataSpec, "model": ModelSpec, "attacks[]": AttackSpec}
    inside = {"model.normalise": Normalise, "model.train": Train, "model.train.lora": Lora}
    for path, model in (own | inside).items():
        beside = " These stand beside the component's own fields." if path in own else ""
        yield f"## `{path}`\n"
        yield f"{_text(model.__doc__)}{beside}\n"
        yield from _table((name, field) for name, field in model.model_fields.items())


def _table(fields: Iterator[tuple[str, FieldInfo]]) -> Iterator[str]:
    yield "| field | default | meaning |"
    yield "| --- | --- | --- |"
    for name, field in fields:
        default = "required" if field.is_required() else _default(field)
        yield f"| `{name}` | {default} | {_text(field.description)} |"
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


if __name__ == "__main__":
    Path(__file__).with_name("scenario.md").write_text(reference())
