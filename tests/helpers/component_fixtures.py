"""Parameters with which tests build registered components."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from rayfed import registry

CHOSEN: dict[str, list[dict[str, Any]]] = {
    "dcs2": [{"iterations": 1}],
    "dp_fedavg": [{"clip": 0.4, "noise_multiplier": 1}],
    "dp_sgd": [{"clip": 0.4, "noise_multiplier": 1}],
    "fed_cdp": [{"clip": 0.4, "noise_multiplier": 1}],
    "gaussian": [{"clip": 0.4, "sigma": 0.1}],
    "grad_defense": [{"scale": 0.1}],
    "key_lock": [{"length": 8}],
    "laplace": [{"clip": 0.4, "scale": 0.1, "delta": 1e-5}],
    "passport": [{}, {"private_epochs": 0}, {"consistency": 1.0}],
    "prune": [{"ratio": 0.5}, {"ratio": 0.5, "by": "weight_gradient", "error_feedback": True}],
    "quantise": [{"bits": 4, "rounding": "stochastic"}, {"bits": 1, "error_feedback": True}],
    "refiner": [{"iterations": 1}],
    "split": [{}, {"private_epochs": 0}, {"start": "own"}],
    "top_k": [{"k": 0.5, "error_feedback": True}],
    "uniform": [{"magnitude": 0.1}],
    "vae": [{"epochs": 1, "hidden": 8, "latent": 2}],
}
"""Parameters of defences that are slow with their defaults, or keep something of the data with others.

A defence that is not here is tested with its defaults and its `required` parameters.
"""


def variants(defence: str) -> list[dict[str, Any]]:
    """Return the parameters with which a defence is tested."""
    return CHOSEN.get(defence) or [required("defences", defence)]


def required(kind: str, name: str) -> dict[str, Any]:
    """Return a value for each parameter of a component that has no default, from its JSON schema.

    Raises `AssertionError` if the schema has neither an example nor a type with an obvious value.
    """
    schema = TypeAdapter(registry.find(kind, name)).json_schema()
    properties = schema.get("properties", {})
    return {field: _value(properties[field], f"{kind} {name}: {field}") for field in schema.get("required", [])}


def _value(field: dict[str, Any], place: str) -> Any:
    if "examples" in field:
        return field["examples"][0]
    if "enum" in field:
        return field["enum"][0]
    if field.get("type") == "boolean":
        return True
    if field.get("type") not in ("integer", "number"):
        raise AssertionError(f"{place} has no default: give its field an example, as Field(examples=[...])")
    lowest = field.get("minimum", field.get("exclusiveMinimum", 0))
    highest = field.get("maximum", field.get("exclusiveMaximum", lowest + 2))
    middle = (lowest + highest) / 2
    return int(middle) if field["type"] == "integer" else middle
