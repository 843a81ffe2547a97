"""Clients' private states on disk: one file per client and version, so a round writes only its clients' states.

A file's name contains the client, the round, the driver and the file's hash. The valid state of a client is its latest
version by the driver that finished that round (`rayfed.store.history`); other versions are from unfinished saves.
Clients are grouped into folders. A checksum (`Seal`) of the valid names of each folder detects lost files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

from rayfed.errors import RunError
from rayfed.store.files import tag
from rayfed.store.folder import RunFolder
from rayfed.store.history import History, Seal

State = dict[str, Any]
FOLDER = "checkpoint/clients"
_WARNING = f"{FOLDER}/README.txt"
_PRIVATE = """PRIVATE: do not share this folder.

It contains the unencrypted private states of the clients, which are needed to resume the run: keys, locks, passports,
layers trained on their own samples, and the states of their defences. The threat models of the scenario hide these
states from the server and from attackers. On a local disk only the owner can open this folder; check the permissions of
every copy.

`run.key` exists until a secure run (privacy.secure) ends. It reproduces all noise of the run.

To copy the run without this folder:

    rayfed export RUN --format folder --out COPY

A finished run does not need this folder: delete it.
"""
_BUCKET = 256
"""Number of clients per folder: small enough to list the folder for one client."""
_THREADS = 16
"""Number of files read or written in parallel; most of the time is waiting for a disk or server."""
_NAME = re.compile(r"(\d+)\.(\d+)(?:-(\d+))?\.([0-9a-f]{64})\.pt", re.ASCII)

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True)
class Version:
    """Version of a client's stored state: the state after one round."""

    client: int
    round: int
    driver: int
    """Number of the driver that wrote the state."""
    digest: str
    """SHA-256 of the file, hexadecimal."""

    @property
    def name(self) -> str:
        """Return the file's name, without its folder."""
        return f"{self.client}.{self.round}{tag(self.driver)}.{self.digest}.pt"

    def path(self, arm: str) -> str:
        """Return the file's path in the run folder."""
        return f"{FOLDER}/{_bucket(arm, self.client)}/{self.name}"


def read_states(folder: RunFolder, arm: str, clients: Iterable[int], history: History) -> dict[int, State]:
    """Return the latest stored states of some clients of an arm.

    Raises `RunError` naming a damaged file, or the folder of a lost one.
    """

    def state(version: Version) -> State:
        return read_verified(folder, version.path(arm), version.digest)

    counted = _counted(folder, arm, clients, history)
    versions = [counted[client][-1] for client in clients if client in counted]
    return dict(zip((v.client for v in versions), _all(state, versions), strict=True))


def write_states(
    folder: RunFolder, arm: str, round: int, states: Mapping[int, State], before: History
) -> tuple[dict[str, Seal], list[str]]:
    """Write some clients' states after a round, and return the new checksums and the replaced files.

    Remove the replaced files after the history is saved. Raises `TypeError` for a state that cannot be serialised,
    `RunError` if an earlier state is lost.
    """
    from rayfed.store.states import serialise_state  # imports PyTorch, which `holds_any` does not need

    make_private(folder)
    counted = _counted(folder, arm, states, before)
    files = {client: serialise_state(state, f"clients[{arm!r}][{client}]") for client, state in states.items()}
    news = [Version(client, round, folder.token, sha256(data).hexdigest()) for client, data in files.items()]
    _all(lambda v: folder.write_bytes(v.path(arm), files[v.client]), news)
    seals = dict(before.clients.get(arm, {}))
    changed = dict[str, Seal]()
    for new in news:
        bucket = _bucket(arm, new.client)
        old = [version.name for version in counted.get(new.client, [])[-1:]]
        changed[bucket] = changed.get(bucket, seals.get(bucket, Seal())).without(*old).with_(new.name)
    return changed, [old.path(arm) for client in states for old in counted.get(client, [])]


def remove_states(folder: RunFolder, names: Iterable[str]) -> None:
    """Remove clients' state files that newer versions replaced."""
    _all(folder.remove, names)


def make_private(folder: RunFolder) -> None:
    """Create the folder of clients' private files, with a text file that explains its content."""
    if not folder.exists(_WARNING):
        folder.make_private(FOLDER)
        folder.write_text(_WARNING, _PRIVATE)


def holds_any(folder: RunFolder) -> bool:
    """Return whether a run has private files: clients' states, or the key of a secure run."""
    if any(f"{FOLDER}/{name}" != _WARNING for name in folder.files(FOLDER)):
        return True
    return any(folder.files(f"{FOLDER}/{bucket}") for bucket in folder.folders(FOLDER))


def check_states(folder: RunFolder, history: History) -> None:
    """Raise `RunError` unless all valid files of clients' states exist; their content is not read."""
    for arm, seals in history.clients.items():
        listed = _all(lambda bucket: _listed(folder, bucket, history), seals)
        _check(folder, arm, seals, dict(zip(seals, listed, strict=True)))


def tidy(folder: RunFolder, history: History) -> None:
    """Remove invalid versions of clients' states: versions of unfinished saves, and replaced versions."""
    for bucket in folder.folders(FOLDER):
        counted = {of[-1].name for of in _listed(folder, bucket, history).values()}
        for name in folder.files(f"{FOLDER}/{bucket}"):
            if name not in counted:
                folder.remove(f"{FOLDER}/{bucket}/{name}")


def read_verified(folder: RunFolder, name: str, digest: str) -> dict[Any, Any]:
    """Return the state in a file of a checkpoint; raise `RunError` if the file's SHA-256 differs."""
    from rayfed.store.states import deserialise_state

    data = folder.read_bytes(name)
    if sha256(data).hexdigest() != digest:
        raise damage_error(folder, name)
    try:
        state = deserialise_state(data)
    except Exception as error:  # torch's unpickler can raise any exception for a foreign file
        raise damage_error(folder, name) from error
    if not isinstance(state, dict):
        raise damage_error(folder, name)
    return state


def damage_error(folder: RunFolder, name: str) -> RunError:
    """Return the error for a file of a checkpoint that has changed since it was written."""
    return RunError(
        f"the checkpoint '{folder.url}/{name}' is damaged; restore the file from a copy, or launch "
        f"{folder.url}/scenario.yaml again"
    )


def _counted(folder: RunFolder, arm: str, clients: Iterable[int], history: History) -> dict[int, list[Version]]:
    """Return the valid versions of all clients whose folder contains one of these clients.

    Raises `RunError` if a valid file is lost.
    """
    seals = history.clients.get(arm, {})
    buckets = sorted({_bucket(arm, client) for client in clients} & seals.keys())
    listed = dict(zip(buckets, _all(lambda bucket: _listed(folder, bucket, history), buckets), strict=True))
    _check(folder, arm, seals, listed)
    return {client: of for found in listed.values() for client, of in found.items()}


def _check(
    folder: RunFolder, arm: str, seals: Mapping[str, Seal], listed: Mapping[str, Mapping[int, list[Version]]]
) -> None:
    """Raise `RunError` unless the seals of some folders match their valid versions."""
    found = {bucket: Seal().with_(*(of[-1].name for of in versions.values())) for bucket, versions in listed.items()}
    if any(seals[bucket] != seal for bucket, seal in found.items()):
        there, all_ = sum(seal.count for seal in found.values()), sum(seals[bucket].count for bucket in found)
        raise RunError(
            f"'{folder.url}/{FOLDER}' does not contain the {all_} client states of arm '{arm}' that the checkpoint "
            f"lists (found {there}); restore the folder from a copy, or launch {folder.url}/scenario.yaml again"
        )


def _listed(folder: RunFolder, bucket: str, history: History) -> dict[int, list[Version]]:
    """Return each client's versions by the driver that finished their rounds, in order."""
    found: dict[int, list[Version]] = {}
    for name in folder.files(f"{FOLDER}/{bucket}"):
        if match := _NAME.fullmatch(name):
            version = Version(int(match[1]), int(match[2]), int(match[3] or 1), match[4])
            if version.round <= history.round and version.driver == history.driver_of(version.round):
                found.setdefault(version.client, []).append(version)
    return {client: sorted(of, key=lambda version: version.round) for client, of in found.items()}


def _bucket(arm: str, client: int) -> str:
    return f"{_prefix(arm)}{client // _BUCKET:06d}"


def _prefix(arm: str) -> str:
    """Return the start of a folder's name for an arm: a hash, as an arm's name may not be a valid file name."""
    return f"{sha256(arm.encode()).hexdigest()[:16]}-"


def _all(act: Callable[[_In], _Out], items: Iterable[_In]) -> list[_Out]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(act, items))
