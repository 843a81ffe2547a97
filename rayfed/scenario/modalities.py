"""Checks and defaults that depend on the modality of the samples: images, texts or records (`rayfed.samples`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rayfed import registry
from rayfed.core.documents import Place
from rayfed.core.files import local_path
from rayfed.errors import UserError
from rayfed.metrics.known import default_names, default_success, metrics_of
from rayfed.scenario.components import ComponentSpec, ModelSpec, expand_component, expand_model
from rayfed.scenario.problems import Problem
from rayfed.scenario.sections import Scenario


def with_metrics(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scenario document with the default metrics for its data's modality; unchanged if a field is invalid."""
    from rayfed.samples import dataset_modality  # imports PyTorch, which the schema does not need

    data, metrics = expand_component(document.get("data")), document.get("metrics") or {}
    name = data.get("name") if isinstance(data, dict) else None
    if not isinstance(name, str) or not isinstance(metrics, dict):
        return dict(document)
    try:
        kind = dataset_modality(registry.find("datasets", name))
    except UserError:  # the check of components reports it
        return dict(document)
    if kind == "pixels":  # the schema's own defaults
        return dict(document)
    names, success = metrics.get("names", default_names(kind)), default_success(kind)
    if isinstance(names, list):  # no threshold for a metric that is not measured
        success = {name: least for name, least in success.items() if name in names}
    return {**document, "metrics": {"names": names, "success": success, **metrics}}


def with_tokenizer(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scenario document in which a text data set without a tokeniser uses the model's tokeniser."""
    from rayfed.data.tokens import has_tokenizer

    data, model = expand_component(document.get("data")), expand_model(document.get("model"))
    if not (isinstance(data, dict) and isinstance(model, dict) and model.get("name") == "hf"):
        return dict(document)
    try:
        target = registry.find("datasets", str(data.get("name")))
    except UserError:  # the check of components reports it
        return dict(document)
    folder = model.get("path")
    takes = "tokenizer" in {parameter.name for parameter in registry.parameters(target)}
    if not takes or data.get("tokenizer") is not None or not isinstance(folder, str | Path):
        return dict(document)
    try:
        there = has_tokenizer(local_path(folder))
    except UserError:  # building the model reports it
        return dict(document)
    if not there:
        return dict(document)
    return {**document, "data": {**data, "tokenizer": str(folder)}}


_OF_TASKS = {"causal_lm": "causal_lm", "masked_lm": "masked_lm", "token_classification": "place_cross_entropy"}
"""Task of a Hugging Face model -> its loss."""


def with_loss(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scenario document with the default loss for its Hugging Face task or masks, unless a loss is set."""
    model = expand_model(document.get("model"))
    task = model.get("task") if isinstance(model, dict) and model.get("name") == "hf" else None
    loss = _OF_TASKS.get(str(task)) or ("place_cross_entropy" if _has_masks(document) else None)
    if document.get("loss") is not None or loss is None:
        return dict(document)
    return {**document, "loss": {"name": loss}}


def _has_masks(document: Mapping[str, Any]) -> bool:
    """Return whether the data of a document have one class per pixel (segmentation)."""
    data = expand_component(document.get("data"))
    try:
        target = registry.find("datasets", str(data.get("name"))) if isinstance(data, dict) else None
    except UserError:  # the check of components reports it
        return False
    return bool(getattr(target, "has_masks", False))


def modality_problems(s: Scenario) -> Iterator[Problem]:
    """Yield a problem for each component and metric that does not support the modality of the scenario's data."""
    from rayfed.samples import dataset_modality, supported_modalities

    kind = dataset_modality(registry.find(s.data.kind, s.data.name))
    for path, spec in _components(s):
        try:
            fitting = supported_modalities(spec.kind, registry.find(spec.kind, spec.name))
        except UserError:  # another check reports it
            continue
        if kind not in fitting:
            message = (
                f"{spec.name} supports {' or '.join(fitting)}, but the samples of data '{s.data.name}' are {kind}; "
                f"choose another component or data set"
            )
            yield Problem(path=path, message=message)
    known = metrics_of(kind)
    for field, names in (("names", s.metrics.names), ("success", s.metrics.success)):
        for name in names:
            if name not in known:
                message = (
                    f"{name} does not apply to {kind}, the samples of data '{s.data.name}'; use {', '.join(known)}"
                )
                yield Problem(path=("metrics", field), message=message)
    if kind != "pixels" and s.model.normalise:
        message = f"only for pixels, but the samples of data '{s.data.name}' are {kind}; remove `normalise`"
        yield Problem(path=("model", "normalise"), message=message)


def _components(s: Scenario) -> Iterator[tuple[Place, ComponentSpec]]:
    """Yield every component that depends on samples, with its path."""
    yield ("model",), s.model
    for i, attack in enumerate(s.attacks):
        yield ("attacks", i), attack
    for i, defence in enumerate(s.defences):
        yield ("defences", i), defence
    if s.federation.malicious:
        yield ("federation", "malicious"), s.federation.malicious
    for name, malicious in s.opponents.items():
        if malicious:
            yield ("opponents", name), malicious
    for name, arm in s.arms.items():
        if arm.model:
            with suppress(ValidationError):  # the checks of arms report it
                yield ("arms", name, "model"), ModelSpec.model_validate(s.model_with(arm.model))
        if arm.malicious:
            yield ("arms", name, "malicious"), arm.malicious
        for i, defence in enumerate(arm.defences):
            yield ("arms", name, i), defence
