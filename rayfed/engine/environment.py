"""The environment of a run: what it takes to repeat it and to read its timings."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version

from rayfed import registry, seeds
from rayfed.scenario import Scenario
from rayfed.store.folder import RunFolder

FILE = "environment.json"

_PACKAGES = (
    *("rayfed", "torch", "torchvision", "ray", "numpy", "pyarrow", "scikit-learn", "scikit-image", "lpips"),
    *("dp-accounting", "gmpy2", "tenseal", "cryptography"),
)


def note_environment(folder: RunFolder, scenario: Scenario, machine: Mapping[str, object]) -> None:
    """Write environment.json for who plays now; who has played before stays there under `earlier`, oldest first.

    `machine` is `Executor.environment()`.
    """
    now = _environment(scenario, machine)
    if folder.exists(FILE):
        last = folder.read_mapping(FILE)
        now["earlier"] = [*last.pop("earlier", []), last]
    folder.write_text(FILE, json.dumps(now, indent=2))


def _environment(scenario: Scenario, machine: Mapping[str, object]) -> dict[str, object]:
    return {
        "started": f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
        "command": " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "search_path": registry.SEARCHED,
        "seed": scenario.seed,
        "streams": seeds.STREAMS,
        "reproducible": not scenario.privacy.secure,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: _version(name) for name in _PACKAGES},
        **machine,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
