"""Checkpoints: the state to resume a run from, the server's and, apart from it, the clients' private one.

The server's file carries the round and a part of its own hash in its name and clients' files theirs
(`rayfed.store.client_states`), so no save touches an older file; `latest.json`, replaced last and atomically, says
which count. So a crash at any moment leaves one consistent whole: the old one or the new one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from rayfed.errors import RunError
from rayfed.store import client_states
from rayfed.store.client_states import Seal, State, damaged, verified
from rayfed.store.folder import RunFolder
from rayfed.store.states import packed

_FOLDER = "checkpoint"
_LATEST = f"{_FOLDER}/latest.json"
_FILE = re.compile(r"[\w.-]+\.pt", re.ASCII)


@dataclass(frozen=True)
class Checkpoint:
    """State of a run after a round: tensors, numbers, strings, bytes, None and containers of them."""

    round: int
    """The last round that is complete."""
    server: dict[Any, Any]
    """Global weights, optimiser and aggregation state."""
    clients: Mapping[str, Mapping[int, State]] = field(default_factory=dict)
    """Arm -> client -> private state, of the clients whose state the round has changed; empty in a loaded checkpoint.

    It never leaves the clients' side but for its file, from which `load_states` reads the states that are asked for."""
    scenario: Mapping[str, Any] = field(default_factory=dict)
    """What determines the results, of the scenario that the rounds have followed; empty where that is not known."""


def save(folder: RunFolder, checkpoint: Checkpoint) -> None:
    """Make this the checkpoint of a run and remove what it replaces; other clients' states stay as they are.

    Raises `TypeError` for a state that could not be loaded again, `RunError` where it cannot be written.
    """
    server = packed(checkpoint.server, "server")
    digest = sha256(server).hexdigest()
    file = f"round-{checkpoint.round:05d}.server.{digest[:8]}.pt"
    _, _, seals = _pointer(folder) or (-1, {}, {})
    replaced = []
    for arm, states in checkpoint.clients.items():
        if states:
            seals[arm], tidy = client_states.write(folder, arm, checkpoint.round, states, seals.get(arm, Seal()))
            replaced.append(tidy)
    folder.write_bytes(f"{_FOLDER}/{file}", server)
    pointer = {
        "round": checkpoint.round,
        "server": {"file": file, "sha256": digest},
        "clients": {arm: {"count": seal.count, "names": f"{seal.names:064x}"} for arm, seal in seals.items()},
        "scenario": checkpoint.scenario,
    }
    folder.write_text(_LATEST, json.dumps(pointer, indent=2))
    for name in folder.files(_FOLDER):
        if f"{_FOLDER}/{name}" != _LATEST and name != file:  # of a save that was killed, too
            folder.remove(f"{_FOLDER}/{name}")
    for tidy in replaced:
        tidy()


def load(folder: RunFolder) -> Checkpoint | None:
    """Return the latest checkpoint, tensors on the CPU, or None where there is none; executes no code of the file.

    Raises `RunError` naming what is missing or damaged.
    """
    found = _pointer(folder)
    if found is None:
        return None
    round, server, seals = found
    client_states.check(folder, seals, round + 1)
    if not _FILE.fullmatch(server["file"]):  # it might lead out of the folder
        raise damaged(folder, _LATEST)
    state = verified(folder, f"{_FOLDER}/{server['file']}", server["sha256"])
    return Checkpoint(round, state, scenario=folder.read_mapping(_LATEST).get("scenario", {}))


def load_states(folder: RunFolder, arm: str, clients: Iterable[int], before: int) -> dict[int, State]:
    """Return the states of those of some clients of an arm that have one, as they are when a round begins.

    Raises `RunError` naming what is damaged, or where the run has gone on since: it keeps the latest states alone.
    """
    found = _pointer(folder)
    if not found or arm not in found[2]:
        return {}
    states = client_states.read(folder, arm, clients, before)
    if (latest := _pointer(folder)) is None or latest[0] + 1 != before:
        raise RunError(f"the run {folder.url} has gone on meanwhile, and its clients' states with it: wait for its end")
    return states


def _pointer(folder: RunFolder) -> tuple[int, dict[str, str], dict[str, Seal]] | None:
    """Read `latest.json`: the round, the server's file and its hash, and the seal of every arm's clients."""
    if not folder.exists(_LATEST):
        return None
    pointer = folder.read_mapping(_LATEST)
    seals = {arm: Seal(of["count"], int(of["names"], 16)) for arm, of in pointer["clients"].items()}
    return pointer["round"], pointer["server"], seals
