"""Checkpoints for resuming a run: the server's state and, separately, the clients' private states.

File names contain the round and a hash, so a save never changes an older file (see `rayfed.store.client_states`). The
history, which lists the valid files, is replaced last and atomically (`rayfed.store.history`). A crash at any moment
therefore leaves the old or the new checkpoint complete.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from rayfed.errors import RunError
from rayfed.store import client_states, history
from rayfed.store.client_states import State, damage_error, read_verified
from rayfed.store.folder import RunFolder
from rayfed.store.history import FOLDER, History, pointer
from rayfed.store.states import serialise_state

_FILE = re.compile(r"[\w.-]+\.pt", re.ASCII)


@dataclass(frozen=True)
class Checkpoint:
    """State of a run after a round: tensors, numbers, strings, bytes, None and containers of such values."""

    round: int
    """The last complete round."""
    server: dict[Any, Any]
    """Global weights, optimiser and aggregation state."""
    clients: Mapping[str, Mapping[int, State]] = field(default_factory=dict)
    """Arm -> client -> private state, for the clients whose state changed in the round; empty in a loaded checkpoint.

    Only files hold these states on the driver's side, and `load_states` reads them for the clients."""
    scenario: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the scenario that determine the results of the finished rounds; empty if unknown."""
    tables: Collection[str] | None = None
    """Tables to which the round has written a part; None if unknown, and in a loaded checkpoint."""


def begin(folder: RunFolder) -> None:
    """Make this driver's checkpoint files the only valid ones, and remove the files of unfinished saves."""
    found = history.register_driver(folder)
    _tidy(folder, found)
    folder.tidy()
    client_states.tidy(folder, found)


def save(folder: RunFolder, checkpoint: Checkpoint) -> None:
    """Save the checkpoint of a run, and remove the previous checkpoint; states of other clients are unchanged.

    Raises `TypeError` for a state that cannot be serialised, `RunError` if the checkpoint cannot be written.
    """
    server = serialise_state(checkpoint.server, "server")
    digest = sha256(server).hexdigest()
    file = f"round-{checkpoint.round:05d}{folder.tag}.server.{digest[:8]}.pt"
    before = _before(folder, checkpoint.round)
    clients, replaced = dict(before.clients), []
    for arm, states in checkpoint.clients.items():
        if states:
            seals, olds = client_states.write_states(folder, arm, checkpoint.round, states, before)
            clients[arm] = {**clients.get(arm, {}), **seals}
            replaced += olds
    folder.write_bytes(f"{FOLDER}/{file}", server)
    pair = {"file": file, "sha256": digest}
    parts = _parts(before, checkpoint)
    now = History(checkpoint.round, before.drivers, pair, clients, parts, checkpoint.scenario)
    history.write_history(folder, now)
    _tidy(folder, now)
    client_states.remove_states(folder, replaced)


def _before(folder: RunFolder, round: int) -> History:
    """Return the history before a round is saved; raises `RunError` if it is not this driver's."""
    found = history.read_history(folder)
    if folder.lease and (found is None or found.round + 1 != round):
        folder.check()
        last = "no round" if found is None else f"round {found.round} as the last one"
        raise RunError(
            f"{folder.url} was changed during the run: cannot save round {round}, because the folder's checkpoint has "
            f"{last}; restore the folder from a copy and continue with `rayfed resume`, or launch the scenario again"
        )
    return found or History(parts={})


def load(folder: RunFolder) -> Checkpoint | None:
    """Return the latest checkpoint of a run, with tensors on the CPU, or None; no code in the file is executed.

    Raises `RunError` naming the file that is missing or damaged.
    """
    found = history.read_history(folder)
    if found is None and folder.parts("rounds"):
        raise RunError(
            f"'{folder.url}/{FOLDER}/latest.json' is missing, but the run has finished rounds: restore the file from a "
            "copy, or launch the scenario again"
        )
    if found is None or found.server is None:
        return None
    client_states.check_states(folder, found)
    if not _FILE.fullmatch(found.server["file"]):  # it might lead out of the folder
        raise damage_error(folder, f"{FOLDER}/latest.json")
    state = read_verified(folder, f"{FOLDER}/{found.server['file']}", found.server["sha256"])
    return Checkpoint(found.round, state, scenario=found.scenario)


def load_states(folder: RunFolder, arm: str, clients: Iterable[int], before: int) -> dict[int, State]:
    """Return the stored states of some clients of an arm, as of the start of a round.

    Only the latest states are stored. Raises `RunError` naming a missing or damaged file, or if the run has continued
    since that round.
    """
    found = history.read_history(folder) or History()
    try:
        states = client_states.read_states(folder, arm, clients, found)
    except RunError:
        _check_still(folder, before)
        raise
    _check_still(folder, before)
    return states


def _check_still(folder: RunFolder, before: int) -> None:
    """Raise `RunError` unless a run's last complete round is the one before `before`.

    Raises `LeaseError` in the run's own driver if another driver has taken over and continued.
    """
    round = (history.read_history(folder) or History()).round
    if round + 1 != before:
        folder.check()
    if round + 1 > before:
        raise RunError(
            f"the run {folder.url} has continued and changed the clients' states: wait until the run has ended"
        )
    if round + 1 < before:
        raise RunError(
            f"{folder.url} has no clients' states of round {before - 1}: restore the subfolder {FOLDER} from a copy"
        )


def _tidy(folder: RunFolder, history: History) -> None:
    """Remove the server's invalid states and history files, left by earlier rounds and killed saves."""
    kept = {pointer(folder), history.server["file"] if history.server else None}
    for name in folder.files(FOLDER):
        if name not in kept:
            folder.remove(f"{FOLDER}/{name}")


def _parts(before: History, checkpoint: Checkpoint) -> Mapping[str, list[int]] | None:
    """Return the rounds of every table's parts, including this one; None if they are not known."""
    if before.parts is None or checkpoint.tables is None:
        return None
    new = {table: [*before.parts.get(table, []), checkpoint.round] for table in checkpoint.tables}
    return {**before.parts, **new}
