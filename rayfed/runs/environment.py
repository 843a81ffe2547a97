"""The environment of a run: versions, machines and settings needed to repeat it and to interpret its timings."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version

from rayfed import registry
from rayfed.core import seeds
from rayfed.scenario import Scenario
from rayfed.simulation.machine import Machine
from rayfed.store.folder import RunFolder
from rayfed.version import __version__

FILE = "environment.json"

_PACKAGES = (
    *("torch", "torchvision", "ray", "numpy", "pyarrow", "scikit-learn", "scikit-image", "lpips"),
    *("dp-accounting", "gmpy2", "tenseal", "cryptography"),
)


def note_environment(folder: RunFolder, scenario: Scenario, machine: Mapping[str, object]) -> dict[str, object]:
    """Write a run's environment.json for the current driver process, and return the file's contents.

    Environments of earlier drivers are listed under `earlier`, oldest first. `machine` is `Executor.environment()`.
    """
    now = _environment(scenario, machine)
    if folder.exists(FILE):
        last = folder.read_mapping(FILE)
        now["earlier"] = [*last.pop("earlier", []), last]
    folder.write_text(FILE, json.dumps(now, indent=2))
    return now


def _environment(scenario: Scenario, machine: Mapping[str, object]) -> dict[str, object]:
    return {
        "started": f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
        "command": shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "search_path": registry.SEARCHED,
        "seed": scenario.seed,
        "streams": seeds.STREAMS,
        "reproducible": not scenario.privacy.secure,
        "deterministic": scenario.resources.deterministic,
        "tf32": scenario.resources.tf32,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "rayfed": __version__,
        **{name: _version(name) for name in _PACKAGES},
        **machine,
    }


class MachineRecord:
    """Record of all machines of a run in environment.json, including the machines before a resume."""

    def __init__(self, folder: RunFolder, scenario: Scenario, machine: Mapping[str, object]) -> None:
        """Write environment.json; `machine` is the value of `Executor.environment()`."""
        before = folder.read_mapping(FILE) if folder.exists(FILE) else {}
        self._processors, self._devices = before.get("processors", {}), before.get("devices", {})
        self._folder, self._portable = folder, scenario.resources.deterministic == "portable"
        self._contents = note_environment(folder, scenario, machine)
        self._write()

    def add(self, machines: Iterable[Machine]) -> str | None:
        """Record the machines of a run's processes, and return a warning if their processors differ; else None."""
        kinds, known = self._kinds(), self._known()
        for role, processor, device in machines:
            for table, value in ((self._processors, processor), (self._devices, device)):
                if value not in table.setdefault(role, []):
                    table[role].append(value)
        if self._known() == known:
            return None
        self._write()
        if len(self._kinds()) < 2 or self._kinds() == kinds:
            return None
        told = "; ".join(f"{role} on {' and '.join(found)}" for role, found in self._processors.items())
        hint = "" if self._portable else ": `resources.deterministic: portable` fixes the instructions"
        return f"WARNING: processors differ, so the last bits of results may differ{hint} ({told})"

    def _known(self) -> int:
        """Return the number of entries, which never decreases."""
        return sum(map(len, (*self._processors.values(), *self._devices.values())))

    def _kinds(self) -> set[str]:
        """Return the kinds of processors with different arithmetic; only vendors if arithmetic is portable."""
        found = {processor for told in self._processors.values() for processor in told}
        return {processor[processor.rfind(" (") :] for processor in found} if self._portable else found

    def _write(self) -> None:
        contents = self._contents | {"processors": self._processors, "devices": self._devices}
        self._folder.write_text(FILE, json.dumps(contents, indent=2))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
