"""Description of the weights that a run attacked: from a file, from a training, or as built."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from rayfed import registry
from rayfed.evidence.arms import arm_and_opponent
from rayfed.evidence.rows import Row
from rayfed.report.text.formats import format_count

_BUILT = "the weights of its constructor"
_UNTRAINED = "untrained weights"
_PRETRAINED = "pretrained weights, as given"


def initial_weights(scenario: Row, arms: Collection[str] | None = None) -> str:
    """Describe the weights of a scenario's arms (default: all arms) before any training in the run.

    Arms with the same weights are named together; if all have the same, no arm is named.
    """
    models = _models(scenario, arms)
    names = _short({str(model["state"]) for model in models.values() if model.get("state")})
    found: dict[str, list[str]] = {}
    for arm, model in models.items():
        state = model.get("state")
        found.setdefault(f"the weights of {names[str(state)]}" if state else _without_file(model), []).append(arm)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(own)}: {weights}" for weights, own in found.items())


def attacked_weights(scenario: Row, status: Row, attacks: Sequence[Row], arms: Collection[str] | None = None) -> str:
    """Describe the attacked weights of some arms, from the run's scenario, status and rows of attacks."""
    initial, rounds = initial_weights(scenario, arms), {row["round"] for row in attacks}
    if status.get("kind") == "attack":
        known = {"initial": initial, "given": "the weights that were given"}
        state = status.get("weights") or "that are not recorded"
        return known.get(state, f"weights {state}")
    if rounds <= {0}:
        return initial
    given = any(model.get("state") for model in _models(scenario, arms).values())
    start = f" that started from {initial}" if given else ""
    return f"the weights of {format_count(len(rounds), 'round')} of a training{start}"


def _models(scenario: Row, arms: Collection[str] | None) -> dict[str, Mapping[str, Any]]:
    """Return the models of some arms, or of all if none of them is in the scenario.

    An arm with another architecture does not use the scenario's file of weights.
    """
    shared: Mapping[str, Any] = scenario.get("model") or {}
    wanted = {arm_and_opponent(scenario, arm)[0] for arm in arms or ()}
    found: dict[str, Mapping[str, Any]] = {}
    for name, arm in (scenario.get("arms") or {"": {}}).items():
        own = (arm.get("model") if isinstance(arm, Mapping) else None) or {}
        same = own.get("name", shared.get("name")) == shared.get("name")
        found[name] = {**(shared if same else {}), **own}
    return {name: model for name, model in found.items() if name in wanted} or found


def _without_file(model: Mapping[str, Any]) -> str:
    """Return the weights of a model without a file of weights."""
    name = model.get("name")
    if name == "hf":
        return _PRETRAINED
    return _UNTRAINED if name is None or name in registry.table("models") else _BUILT


def _short(files: set[str]) -> dict[str, str]:
    """Return the names of files without folders, unless two of these are equal."""
    names = {file: PurePosixPath(file.replace("\\", "/")).name for file in files}
    return names if len(set(names.values())) == len(files) else {file: file for file in files}
