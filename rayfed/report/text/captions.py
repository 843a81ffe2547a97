"""Captions: model, data, federation and attacks of a scenario."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayfed.data.sets import is_public
from rayfed.report.text.formats import LEFT_OUT, format_count

_OWN = "train", "path", "root", "table"
"""Fields of data sets with a file or folder of the user."""
MOST = 4
"""Maximum number of attacks that are described in detail; of more, only the names are listed."""


def scenario_caption(scenario: Mapping[str, Any]) -> str:
    """Return a sentence on the scenario's model, data, federation and attacks; empty without a model or data.

    For a sweep over other fields than the seed it names only the swept fields.
    """
    if swept := [field for field in (scenario.get("sweep") or {}).get("fields") or {} if field != "seed"]:
        return f"Swept: {', '.join(swept)}."
    trained = model_and_data_text(scenario)
    if not trained:
        return ""
    federation = scenario.get("federation") or {}
    size = [format_count(federation[f"{noun}s"], noun) for noun in ("client", "round") if federation.get(f"{noun}s")]
    attacks = scenario.get("attacks") or []
    if len(attacks) > MOST:
        texts = [", ".join(dict.fromkeys(one["name"] for one in attacks))]
    else:
        texts = [_attack(one) for one in attacks]
    return "; ".join([", ".join([trained, *size]), *texts]) + "."


def model_and_data_text(scenario: Mapping[str, Any]) -> str:
    """Return the model and the data of a scenario; empty without a model or data."""
    model, data = scenario.get("model") or {}, scenario.get("data") or {}
    if not model.get("name") or not data.get("name"):
        return ""
    return f"Model {_component_text(model, 'arch', 'path')} on data {_data_text(data)}"


def _component_text(section: Mapping[str, Any], *fields: str) -> str:
    """Return a component's name with the first of `fields` that is set, such as `timm:resnet18`."""
    part = next((section[field] for field in fields if isinstance(section.get(field), str)), LEFT_OUT)
    return str(section["name"]) if part == LEFT_OUT else f"{section['name']}:{part}"


def _data_text(data: Mapping[str, Any]) -> str:
    """Return the name of a scenario's data: the name of a data set, or the user's file or folder."""
    name = str(data["name"])
    own = None if is_public(data) else next((data[field] for field in _OWN if isinstance(data.get(field), str)), None)
    return name if own in (None, LEFT_OUT) else f"{Path(own).name} ({name})"


def label(scenario: Mapping[str, Any], table: str = "") -> str:
    """Return the LaTeX label of an exported table: `tab:NAME`, plus the table's name except for `outcomes`."""
    words = [str(scenario.get("name") or "rayfed"), *([table] if table else [])]
    return "tab:" + "-".join(re.sub(r"[^A-Za-z0-9.-]+", "-", word).strip("-") for word in words)


def _attack(one: Mapping[str, Any]) -> str:
    """Return title, method and budget of an attack: `plain: dlg, 60 iterations, 2 victims per round, batch size 1`."""
    victims = one.get("victims") or 1
    count = len(victims) if isinstance(victims, list) else victims
    parts = [one["name"]]
    parts += [f"{one['iterations']} iterations"] if one.get("iterations") else []
    parts += [f"{format_count(count, 'victim')} per round"]
    parts += [f"batch size {one.get('batch_size', 1)}"] if one.get("observes") == "gradient" else []
    parts += [f"given {' and '.join(one['knowledge'])}"] if one.get("knowledge") else []
    return f"{one['label']}: {', '.join(parts)}" if one.get("label") else ", ".join(parts)
