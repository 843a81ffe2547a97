"""What stands in the caption of an exported table beside its notes: what was played, from the scenario."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MOST = 4
"""Most attacks that are described one by one; of more, as an audit has, the methods are named."""


def played(scenario: Mapping[str, Any]) -> str:
    """Return a sentence on model, data, federation and attacks; empty where the scenario has no model or data.

    Of a sweep it says what was swept alone, unless that are the seeds.
    """
    if swept := [field for field in (scenario.get("sweep") or {}).get("fields") or {} if field != "seed"]:
        return f"Swept: {', '.join(swept)}."
    model, data, federation = (scenario.get(name) or {} for name in ("model", "data", "federation"))
    if not model.get("name") or not data.get("name"):
        return ""
    size = [f"{federation[name]} {name}" for name in ("clients", "rounds") if federation.get(name)]
    attacks = scenario.get("attacks") or []
    if len(attacks) > MOST:
        told = [", ".join(dict.fromkeys(one["name"] for one in attacks))]
    else:
        told = [_attack(one) for one in attacks]
    trained = f"Model {model['name']} on data {data['name']}{''.join(f', {part}' for part in size)}"
    return "; ".join([trained, *told]) + "."


def label(scenario: Mapping[str, Any], table: str = "") -> str:
    """Return a name for LaTeX's references: `tab:NAME`, and a table's own name if it is not of the outcomes."""
    words = [str(scenario.get("name") or "rayfed"), *([table] if table else [])]
    return "tab:" + "-".join(re.sub(r"[^A-Za-z0-9.-]+", "-", word).strip("-") for word in words)


def _attack(one: Mapping[str, Any]) -> str:
    """Return an attack's title, method and budget: `blind: dlg, 60 iterations, 2 victims a round, batches of 1`."""
    victims = one.get("victims") or 1
    count = len(victims) if isinstance(victims, list) else victims
    parts = [one["name"]]
    parts += [f"{one['iterations']} iterations"] if one.get("iterations") else []
    parts += [f"{count} victim{'s' * (count != 1)} a round"]
    parts += [f"batches of {one.get('batch_size', 1)}"] if one.get("observes") == "gradient" else []
    parts += [f"given {' and '.join(one['knowledge'])}"] if one.get("knowledge") else []
    return f"{one['label']}: {', '.join(parts)}" if one.get("label") else ", ".join(parts)
