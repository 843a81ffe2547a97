"""Clients' private states on the disk: one file a client and version, so that a round touches only its own clients.

A file's name tells whose state it is, after which round, and its hash. What counts of a client is its latest version
of a round that the checkpoint has (`rayfed.store.checkpoint`); later ones are of a save that never ended. The
checkpoint keeps a seal of the names that count, which a round changes without looking at any other client's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

from rayfed.errors import RunError
from rayfed.store.folder import RunFolder
from rayfed.store.states import packed, unpacked

State = dict[str, Any]
FOLDER = "checkpoint/clients"
_WARNING = f"{FOLDER}/README.txt"
_PRIVATE = """PRIVATE: do not share this folder.

It holds in clear what the clients of this run keep to themselves, so that the run can be resumed: keys, locks,
passports and layers trained on their own samples, and what their defences remember. Whoever reads it knows what the
scenario's threat models hide from the server and from attackers. Only its owner may enter it on a local disk; a copy
elsewhere may be open to others.

`run.key`, which a secure run (privacy.secure) has until it ends, draws all noise of the run again.

    rayfed export RUN --format folder --out COPY

makes a copy of the run without it. A finished run does not need it: delete it.
"""
_BUCKET = 256
"""Number of clients whose files share a folder: few enough to list it for one of them."""
_THREADS = 16
"""Number of files that are read or written at a time: each waits far longer for a disk or server than for us."""
_NAME = re.compile(r"(\d+)\.(\d+)\.([0-9a-f]{64})\.pt")

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True)
class Version:
    """One client's state after one round."""

    client: int
    round: int
    digest: str
    """SHA-256 of the file, hexadecimal."""

    @property
    def name(self) -> str:
        """Name of the file in its folder."""
        return f"{self.client}.{self.round}.{self.digest}.pt"


@dataclass(frozen=True)
class Seal:
    """Checksum of the names of an arm's files: one that is lost, or of another run, shows."""

    count: int = 0
    names: int = 0
    """Exclusive or of the names' hashes, so that one can be taken out or put in."""

    def with_(self, *changed: Version) -> Seal:
        """Return the seal after these names have been added."""
        return self._toggled(len(changed), changed)

    def without(self, *changed: Version) -> Seal:
        """Return the seal after these names have been removed."""
        return self._toggled(-len(changed), changed)

    def _toggled(self, more: int, changed: Iterable[Version]) -> Seal:
        names = self.names
        for version in changed:
            names ^= int.from_bytes(sha256(version.name.encode()).digest())
        return Seal(self.count + more, names)


def read(folder: RunFolder, arm: str, clients: Iterable[int], before: int) -> dict[int, State]:
    """Return the states of those of some clients of an arm that have one, as they are when a round begins.

    Raises `RunError` naming a file that is damaged.
    """

    def state(version: Version) -> State:
        return verified(folder, f"{_bucket(arm, version.client)}/{version.name}", version.digest)

    versions = [of[-1] for of in _versions(folder, arm, clients, before).values() if of]
    return dict(zip((v.client for v in versions), _all(state, versions), strict=True))


def write(
    folder: RunFolder, arm: str, round: int, states: Mapping[int, State], seal: Seal
) -> tuple[Seal, Callable[[], None]]:
    """Write some clients' states after a round; return the new seal, and a function that removes the old versions.

    That is to be called when the checkpoint counts the new ones. Raises `TypeError` for a state that could not be
    loaded again.
    """
    make_private(folder)
    olds = [version for of in _versions(folder, arm, states, round).values() for version in of]
    files = {client: packed(state, f"clients[{arm!r}][{client}]") for client, state in states.items()}
    news = [Version(client, round, sha256(data).hexdigest()) for client, data in files.items()]
    _all(lambda v: folder.write_bytes(f"{_bucket(arm, v.client)}/{v.name}", files[v.client]), news)
    counted = {version.client: version for version in olds}  # the latest of a client comes last

    def tidy() -> None:
        _all(lambda v: folder.remove(f"{_bucket(arm, v.client)}/{v.name}"), olds)

    return seal.without(*counted.values()).with_(*news), tidy


def make_private(folder: RunFolder) -> None:
    """Make the folder of clients' private files, with the file that says what it is."""
    if not folder.exists(_WARNING):
        folder.make_private(FOLDER)
        folder.write_text(_WARNING, _PRIVATE)


def holds_any(folder: RunFolder) -> bool:
    """Return whether a run has private files of clients: states, or the key of a secure run."""
    if any(f"{FOLDER}/{name}" != _WARNING for name in folder.files(FOLDER)):
        return True
    return any(folder.files(f"{FOLDER}/{bucket}") for bucket in folder.folders(FOLDER))


def check(folder: RunFolder, seals: Mapping[str, Seal], before: int) -> None:
    """Raise `RunError` unless all files that count are there; they are not read."""
    for arm, seal in seals.items():
        buckets = [name for name in folder.folders(FOLDER) if name.startswith(_prefix(arm))]
        counted = [of[-1] for bucket in buckets for of in _listed(folder, f"{FOLDER}/{bucket}", before).values()]
        if Seal().with_(*counted) != seal:
            raise RunError(
                f"'{folder.url}/{FOLDER}' has {len(counted)} of the {seal.count} states of clients of arm '{arm}', or "
                f"others; restore it from a copy, or start the run again from {folder.url}/scenario.yaml"
            )


def tidy(folder: RunFolder, before: int) -> None:
    """Remove versions that do not count: of a save that never ended, and those that later ones have replaced."""
    for bucket in folder.folders(FOLDER):
        path = f"{FOLDER}/{bucket}"
        counted = {of[-1].name for of in _listed(folder, path, before).values()}
        for name in folder.files(path):
            if name not in counted:
                folder.remove(f"{path}/{name}")


def verified(folder: RunFolder, name: str, digest: str) -> dict[Any, Any]:
    """Return the state in a checkpoint's file; raises `RunError` where the file has not this SHA-256."""
    data = folder.read_bytes(name)
    if sha256(data).hexdigest() != digest:
        raise damaged(folder, name)
    try:
        state = unpacked(data)
    except Exception as error:  # whatever a foreign file makes torch's unpickler raise
        raise damaged(folder, name) from error
    if not isinstance(state, dict):
        raise damaged(folder, name)
    return state


def damaged(folder: RunFolder, name: str) -> RunError:
    """Return the error for a checkpoint's file that is not as it was written."""
    return RunError(
        f"the checkpoint '{folder.url}/{name}' is damaged; restore it from a copy, or start the run again from "
        f"{folder.url}/scenario.yaml"
    )


def _versions(folder: RunFolder, arm: str, clients: Iterable[int], before: int) -> dict[int, list[Version]]:
    """Return each client's versions of earlier rounds, in order."""
    wanted = list(clients)
    buckets = sorted({_bucket(arm, client) for client in wanted})
    listed = dict(zip(buckets, _all(lambda bucket: _listed(folder, bucket, before), buckets), strict=True))
    return {client: listed[_bucket(arm, client)].get(client, []) for client in wanted}


def _listed(folder: RunFolder, bucket: str, before: int) -> dict[int, list[Version]]:
    found: dict[int, list[Version]] = {}
    for name in folder.files(bucket):
        match = _NAME.fullmatch(name)
        if match and int(match[2]) < before:
            found.setdefault(int(match[1]), []).append(Version(int(match[1]), int(match[2]), match[3]))
    return {client: sorted(of, key=lambda version: version.round) for client, of in found.items()}


def _bucket(arm: str, client: int) -> str:
    return f"{FOLDER}/{_prefix(arm)}{client // _BUCKET:06d}"


def _prefix(arm: str) -> str:
    """Return an arm's name as a part of a folder's: a plain word, whatever a scenario calls it."""
    return f"{sha256(arm.encode()).hexdigest()[:16]}-"


def _all(act: Callable[[_In], _Out], items: Iterable[_In]) -> list[_Out]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(act, items))
