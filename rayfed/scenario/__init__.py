"""Scenarios, the user's YAML files: schema, checks and derived values.

`load` reads, checks and returns a `Scenario`. It reports all problems of a file at once, each with its path, line,
value and the allowed values.
"""

from rayfed.scenario.arms import ResolvedArm, resolve
from rayfed.scenario.components import (
    AggregationSpec,
    AttackSpec,
    ComponentSpec,
    DataSpec,
    DefenceSpec,
    Lora,
    MaliciousSpec,
    ModelSpec,
    Normalise,
    PartitionSpec,
    Prompt,
    ProtectionSpec,
    Train,
)
from rayfed.scenario.editors import json_schema
from rayfed.scenario.inputs import find_inputs
from rayfed.scenario.reading import check_scenario, dotted_paths, has_form, load, parse, read_text, with_changes
from rayfed.scenario.sections import NAME, Actors, ArmSpec, Augment, Failures, Scenario, Training
from rayfed.scenario.sweep import Sweep

__all__ = [
    "NAME",
    "Actors",
    "AggregationSpec",
    "ArmSpec",
    "AttackSpec",
    "Augment",
    "ComponentSpec",
    "DataSpec",
    "DefenceSpec",
    "Failures",
    "Lora",
    "MaliciousSpec",
    "ModelSpec",
    "Normalise",
    "PartitionSpec",
    "Prompt",
    "ProtectionSpec",
    "ResolvedArm",
    "Scenario",
    "Sweep",
    "Train",
    "Training",
    "check_scenario",
    "dotted_paths",
    "find_inputs",
    "has_form",
    "json_schema",
    "load",
    "parse",
    "read_text",
    "resolve",
    "with_changes",
]
