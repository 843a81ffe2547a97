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
from rayfed.scenario import ArmSpec, AttackSpec, ComponentSpec, DataSpec, ModelSpec, Normalise, Scenario

HEADER = """\
# The scenario, field by field

Made by `python docs/generate.py` from the schema; `rayfed schema` prints the same for editors. A component (data set,
partition, model, aggregation, protection, defence, attack, and what an attack `observes` and has as `knowledge`) is
named by its short name, by an entry point of another installed package (`rayfed.attacks`, `rayfed.defences`, ...), or
by a dotted path `my_module:Name`; its own fields stand beside the name.
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
    own = {"data": DataSpec, "model": ModelSpec, "model.normalise": Normalise, "attacks[]": AttackSpec}
    for path, model in own.items():
        yield f"## `{path}`\n"
        yield f"{_text(model.__doc__)} These stand beside the component's own fields.\n"
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
