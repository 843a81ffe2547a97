"""Transfer of the user's own code to the nodes of a cluster, which have only rayfed installed."""

from __future__ import annotations

import os
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from rayfed import registry
from rayfed.scenario import Scenario, dotted_paths
from rayfed.simulation.machine import PORTABLE


def runtime_env(scenario: Scenario) -> dict[str, Any]:
    """Return Ray's `runtime_env` for a scenario: environment variables, and the user's modules that the scenario names.

    These are all modules imported so far from the folders for dotted paths and from PYTHONPATH, except installed
    packages. Checking the scenario has imported them.
    """
    fixed: dict[str, Any] = {"env_vars": PORTABLE} if scenario.resources.deterministic == "portable" else {}
    if not dotted_paths(scenario.dump()):
        return fixed
    installed = {"rayfed", "actors", *packages_distributions()}
    folders = {Path(folder).resolve() for folder in _users_folders()}
    sources = {name: source for name in list(sys.modules) if "." not in name and (source := _source(name))}
    own = [str(source) for name, source in sources.items() if source.parent in folders and name not in installed]
    return fixed | ({"py_modules": sorted(own)} if own else {})


def _users_folders() -> list[str]:
    return [*registry.SEARCHED, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def _source(name: str) -> Path | None:
    """Return the file of a top-level module, or the folder of a package."""
    file = getattr(sys.modules[name], "__file__", None)
    if name == "__main__":
        return None
    if file is None:  # a package without an `__init__.py`, or a built-in module
        return next((Path(place).resolve() for place in getattr(sys.modules[name], "__path__", ())), None)
    path = Path(file).resolve()
    return path.parent if path.name == "__init__.py" else path if path.suffix == ".py" else None
