"""History of a run folder: the finished rounds, the driver of each round, and the rounds' files.

The history is in `checkpoint/latest.json`, which each save replaces last and atomically. A driver that takes over a run
first copies it to its own file (`latest-2.json`). Only the file of the latest driver is valid, so delayed writes of an
earlier driver have no effect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from rayfed.store.files import Files

FOLDER = "checkpoint"
_LATEST = re.compile(r"latest(?:-(\d+))?\.json", re.ASCII)


@dataclass(frozen=True)
class Seal:
    """Checksum of a set of file names, which detects missing or foreign files."""

    count: int = 0
    names: int = 0
    """Exclusive or of the names' hashes, so that names can be added and removed."""

    def with_(self, *changed: str) -> Seal:
        """Return the checksum with file names added."""
        return self._toggled(len(changed), changed)

    def without(self, *changed: str) -> Seal:
        """Return the checksum with file names removed."""
        return self._toggled(-len(changed), changed)

    def _toggled(self, more: int, changed: Iterable[str]) -> Seal:
        names = self.names
        for name in changed:
            names ^= int.from_bytes(sha256(name.encode()).digest())
        return Seal(self.count + more, names)

    def __str__(self) -> str:
        return f"{self.count} {self.names:064x}"

    @classmethod
    def parse(cls, text: str) -> Seal:
        """Parse a checksum from its written form."""
        count, names = text.split()
        return cls(int(count), int(names, 16))


@dataclass(frozen=True)
class History:
    """Finished rounds of a run, with the drivers and files of each."""

    round: int = -1
    """The last finished round; -1 if none is finished."""
    drivers: tuple[tuple[int, int], ...] = ((1, 0),)
    """(number, first round that the driver finished) of every driver, in order."""
    server: Mapping[str, str] | None = None
    """`file` and `sha256` of the server's state after the last round."""
    clients: Mapping[str, Mapping[str, Seal]] = field(default_factory=dict)
    """Arm -> folder of some clients -> the seal of their states' files."""
    parts: Mapping[str, list[int]] | None = None
    """Table -> rounds for which the table has a part; None if unknown."""
    scenario: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the scenario that determine the results of the finished rounds; empty if unknown."""

    def driver_of(self, round: int) -> int:
        """Return the number of the driver that finished a round."""
        return max((number for number, first in self.drivers if first <= round), default=1)


def read_history(files: Files) -> History | None:
    """Return the history of a run folder, or None if the folder has no history; raise `RunError` for a damaged file."""
    name = _newest(files)
    if name is None:
        return None
    found: dict[str, Any] = files.read_mapping(name)
    clients = {arm: {k: Seal.parse(v) for k, v in of.items()} for arm, of in found["clients"].items()}
    drivers = tuple((number, first) for number, first in found["drivers"])
    return History(found["round"], drivers, found["server"], clients, found["parts"], found.get("scenario", {}))


def pointer(files: Files) -> str:
    """Return the name of the file to which a driver writes the history."""
    return f"latest{files.tag}.json"


def write_history(files: Files, history: History) -> None:
    """Write a run's history to the driver's file, which becomes the valid history."""
    document = vars(history) | {
        "clients": {arm: {k: str(v) for k, v in of.items()} for arm, of in history.clients.items()}
    }
    files.write_text(f"{FOLDER}/{pointer(files)}", json.dumps(document))


def register_driver(files: Files) -> History:
    """Register this driver as the driver that continues a run folder, and return the folder's history."""
    found = read_history(files) or History(parts={})
    before = [driver for driver in found.drivers if driver[1] <= found.round and driver[0] != files.token]
    mine = replace(found, drivers=(*before, (files.token, found.round + 1)))
    write_history(files, mine)
    return mine


def newest_driver(files: Files) -> int:
    """Return the number of the latest driver with a history, or 0 if the folder has no history."""
    return max(_pointers(files), default=0)


def _newest(files: Files) -> str | None:
    found = _pointers(files)
    return f"{FOLDER}/{found[max(found)]}" if found else None


def _pointers(files: Files) -> dict[int, str]:
    """Return the drivers' history files by number."""
    return {int(match[1] or 1): name for name in files.files(FOLDER) if (match := _LATEST.fullmatch(name))}
