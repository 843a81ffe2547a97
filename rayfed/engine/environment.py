"""The environment of a run: what it takes to repeat it and to read its timings."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version

from rayfed import registry, seeds
from rayfed.scenario import Scenario

_PACKAGES = (
    *("rayfed", "torch", "torchvision", "ray", "numpy", "pyarrow", "scikit-learn", "scikit-image", "lpips"),
    *("dp-accounting", "gmpy2", "tenseal", "cryptography"),
)


def environment(scenario: Scenario, machine: Mapping[str, object]) -> dict[str, object]:
    """Return the content of environment.json; `machine` is `Executor.environment()`."""
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
