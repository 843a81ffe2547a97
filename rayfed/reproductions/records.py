"""Records of reproductions: our values of every size and seed, with fingerprints of the code and settings.

A record has no verdict and no value of the paper. Both follow from the file of the reproduction, so a corrected claim
needs no new run.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rayfed.core.documents import read_json
from rayfed.errors import RunError, ScenarioError
from rayfed.reproductions.fingerprints import fingerprints
from rayfed.reproductions.kinds import Size
from rayfed.reproductions.reading import Reproduction
from rayfed.scenario import check_scenario

Value = float | tuple[tuple[float, float], ...]
"""Our value of a figure: a number, or the points (x, y) of a curve."""
Values = Mapping[str, Mapping[str, Value]]
"""Key of a group -> label of a figure -> our value."""


@dataclass(frozen=True)
class SeedRecord:
    """Values of one seed."""

    values: Values
    """Values without a finished trial are missing."""
    true_values: Values = field(default_factory=dict)
    """The same in true arithmetic, for groups with `true_measure`."""
    seconds: float | None = None
    """Wall time (s): that of the run divided by its number of seeds. None if it was not recorded."""
    date: str = ""
    """Day of the run, ISO."""
    commit: str | None = None
    """Commit of the repository; None outside a repository."""
    made_with: str = ""
    """Versions of packages and number of cores."""


@dataclass(frozen=True)
class SizeRecord:
    """Values of one size."""

    scenario: str
    """YAML of the scenario."""
    changes: tuple[str, ...]
    """Changes made with `--set`."""
    fingerprints: Mapping[str, str]
    """Part -> fingerprint, see `rayfed.reproductions.fingerprints`. Empty: not recorded."""
    seeds: Mapping[int, SeedRecord]

    @property
    def seconds(self) -> float | None:
        """Return the wall time of all seeds (s); None if one was not recorded."""
        times = [seed.seconds for seed in self.seeds.values()]
        known = [time for time in times if time is not None]
        return sum(known) if len(known) == len(times) else None

    def continues(self, other: SizeRecord) -> bool:
        """Return whether another record of this size has the same code and settings, so that seeds can be added."""
        same = dict(self.fingerprints) == dict(other.fingerprints) and self.changes == other.changes
        return bool(self.fingerprints) and same


@dataclass(frozen=True)
class Record:
    """Measurements of one reproduction."""

    name: str
    sizes: Mapping[Size, SizeRecord] = field(default_factory=dict)

    def seeds_of(self, size: Size, part: SizeRecord) -> Mapping[int, SeedRecord]:
        """Return the seeds of a size that were computed with the same code and settings as `part`."""
        kept = self.sizes.get(size)
        return kept.seeds if kept is not None and kept.continues(part) else {}

    def with_seeds(self, size: Size, part: SizeRecord) -> Record:
        """Return the record with the seeds of a size added; seeds that were computed with anything else are dropped."""
        seeds = {**self.seeds_of(size, part), **part.seeds}
        return replace(self, sizes={**self.sizes, size: replace(part, seeds=seeds)})


_ADAPTER = TypeAdapter(Record)


@dataclass(frozen=True)
class Staleness:
    """Parts of a size that have changed since it was computed. False if there are none."""

    changed: tuple[str, ...]
    """Changed, new and removed parts: `scenario`, `figures`, or a component as `KIND.NAME`."""
    recorded: bool
    """Whether the record has fingerprints. Without them it is stale, and the changed parts are not known."""

    def __bool__(self) -> bool:
        return bool(self.changed) or not self.recorded


def find_changes(own: Reproduction, size: Size, kept: SizeRecord) -> Staleness:
    """Return the parts that have changed since a size was computed."""
    if not kept.fingerprints:
        return Staleness((), recorded=False)
    try:
        today = fingerprints_of(own, size, kept.changes)
    except ScenarioError:
        if not kept.changes:
            raise
        return Staleness(("scenario",), recorded=True)  # the changes of `--set` no longer fit
    parts = sorted(kept.fingerprints.keys() | today.keys())
    return Staleness(tuple(part for part in parts if kept.fingerprints.get(part) != today.get(part)), recorded=True)


def fingerprints_of(own: Reproduction, size: Size, changes: tuple[str, ...]) -> dict[str, str]:
    """Return the fingerprints of a reproduction at a size with the present code."""
    document = own.document(size, changes)
    return fingerprints(document, check_scenario(document, f"{own.title} ({size})"), own.compared(size))


def made_with() -> str:
    """Return the environment on which results may depend: versions of packages and number of cores."""
    return f"rayfed {version('rayfed')}, torch {version('torch')}, {os.cpu_count()} cores"


def commit() -> str | None:
    """Return the commit of rayfed's repository; None if rayfed is installed without one, or has uncommitted changes."""
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # rayfed may be installed inside another repository
        changed = _git("status", "--porcelain", "--", ":/rayfed")
        head = _git("rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return None
    return None if changed else head


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def write_record(folder: Path, record: Record) -> None:
    """Write a record as JSON into a folder, which is created if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = _ADAPTER.dump_python(record, mode="json")
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    (folder / f"{record.name}.json").write_text(text, encoding="utf-8")


def read_record(folder: Path, name: str) -> Record:
    """Return a reproduction's record in a folder; an empty one if there is none. Raises `RunError` if it is damaged."""
    path = folder / f"{name}.json"
    return _read(path) if path.is_file() else Record(name)


def read_records(folder: Path) -> list[Record]:
    """Return all records of a folder by name. Raises `RunError` for a damaged record."""
    return [_read(path) for path in sorted(folder.glob("*.json"))]


def _read(path: Path) -> Record:
    try:
        return _ADAPTER.validate_python(read_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise RunError(f"cannot read '{path}': {error}; rerun the reproduction") from error
