"""Validation of a run folder's documents, which may come from another program or version."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

_PLAIN = TypeAdapter(dict[str, JsonValue])


class _Part(BaseModel):
    """Base of document sections, which checks only the fields that are read."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Named(_Part):
    name: str
    key_bits: int | None = None


_Component = str | _Named
_Stack = list[_Component]


class _Rules(_Part):
    aggregation: _Component | None = None
    protection: _Component | None = None
    malicious: _Component | None = None


class _Arm(_Rules):
    defences: _Stack | None = None
    training: dict[str, Any] | None = None
    model: dict[str, Any] | None = None


class _Metrics(_Part):
    success: dict[str, float] | None = None


class _Sweep(_Part):
    fields: dict[str, Any]
    objectives: list[str] | None = None


class _Scenario(_Part):
    name: str | None = None
    arms: dict[str, _Stack | _Arm] | None = None
    defences: _Stack | None = None
    attacks: _Stack | None = None
    federation: _Rules | None = None
    metrics: _Metrics | None = None
    sweep: _Sweep | None = None


class _Status(_Part):
    kind: str | None = None
    state: str | None = None
    rounds_done: int | None = None
    rounds: int | None = None
    error: str | None = None
    advice: str | None = None


class _Environment(_Part):
    search_path: list[str] = []
    earlier: list[dict[str, Any]] = []
    processors: dict[str, list[str]] = {}
    devices: dict[str, list[str]] = {}


class _Pair(_Part):
    file: str
    sha256: str


_Seal = Annotated[str, Field(pattern=r"^\d+ [0-9a-f]{64}$")]


class _Latest(_Part):
    round: int
    drivers: Annotated[list[Annotated[list[int], Field(min_length=2, max_length=2)]], Field(min_length=1)]
    server: _Pair | None
    clients: dict[str, dict[str, _Seal]]
    parts: dict[str, list[int]] | None
    scenario: dict[str, Any] = {}


_SHAPES: dict[str, type[BaseModel]] = {
    "scenario.yaml": _Scenario,
    "status.json": _Status,
    "environment.json": _Environment,
    "checkpoint/latest.json": _Latest,
}


_DRIVER = re.compile(r"(?<=latest)-\d+(?=\.json$)", re.ASCII)
"""Number of the driver in a file's name."""


def check_document_shape(name: str, value: Any) -> None:
    """Raise `ValueError` unless a document has the structure that a run writes under the given name."""
    try:
        _PLAIN.validate_python(value)
        if shape := _SHAPES.get(_DRIVER.sub("", name)):
            shape.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise ValueError(f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}") from error
