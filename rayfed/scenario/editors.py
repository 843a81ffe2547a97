"""JSON schema of a scenario, for editors."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from pydantic import TypeAdapter

from rayfed import registry
from rayfed.scenario.components import (
    AggregationSpec,
    AttackSpec,
    ComponentSpec,
    DataSpec,
    DefenceSpec,
    MaliciousSpec,
    ModelSpec,
    PartitionSpec,
    ProtectionSpec,
)
from rayfed.scenario.sections import Scenario


def json_schema(names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the JSON schema of a scenario with the fields of all components, for completion in editors.

    With `names`, only these components are included and imported.
    """
    schema = Scenario.model_json_schema()
    components = (DataSpec, PartitionSpec, ModelSpec, AggregationSpec, ProtectionSpec, MaliciousSpec)
    for spec in (*components, DefenceSpec, AttackSpec):
        shared = schema["$defs"].pop(spec.__name__)
        schema["$defs"][spec.__name__] = {
            "description": shared["description"],
            "anyOf": [{"type": "string"}, *_component_schemas(spec, shared, schema["$defs"], names)],
        }
    arm = schema["$defs"]["ArmSpec"]
    schema["$defs"]["ArmSpec"] = {"description": arm["description"], "anyOf": [arm["properties"]["defences"], arm]}
    return schema


def _component_schemas(
    spec: type[ComponentSpec], shared: dict[str, Any], definitions: dict[str, Any], names: Collection[str] | None
) -> Iterator[dict[str, Any]]:
    """Yield a schema for each component of a kind, and add the types of its fields to `definitions`."""
    for name in registry.table(spec.kind) if names is None else [n for n in registry.table(spec.kind) if n in names]:
        target = registry.find(spec.kind, name)
        own = TypeAdapter(target).json_schema()
        definitions |= own.get("$defs", {})
        yield {
            "type": "object",
            "title": name,
            "description": own.get("description", ""),
            "properties": {**own.get("properties", {}), **shared["properties"], "name": {"const": name}},
            "required": ["name", *own.get("required", [])],
            "additionalProperties": False,
        }
    dotted = {"type": "string", "pattern": ":", "description": "a dotted path my_module:Name"}
    yield {"type": "object", "properties": {**shared["properties"], "name": dotted}, "required": ["name"]}
