"""The state to resume a run from: the server's and, apart from it, the clients' private state.

Both files carry the round and a part of their own hash in their names, so no save touches an older file;
`latest.json`, replaced last and atomically, says which pair counts. So a crash at any moment leaves one consistent
pair: the old one or the new one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from rayfed.errors import RunError
from rayfed.results.folder import RunFolder

_FOLDER = "checkpoint"
_LATEST = f"{_FOLDER}/latest.json"
_PARTS = ("server", "clients")


@dataclass(frozen=True)
class Checkpoint:
    """A run as it stands after a round; states are tensors, numbers, strings, bytes, None and containers of them."""

    round: int
    """The last round that is complete."""
    server: dict[Any, Any]
    """Global weights, optimiser and aggregation state."""
    clients: dict[Any, Any]
    """Private state by client; it never leaves the clients' side but for this file."""


def save(folder: RunFolder, checkpoint: Checkpoint) -> None:
    """Make this the checkpoint of a run and remove older ones.

    Raises `TypeError` for a state that could not be loaded again, `RunError` where it cannot be written.
    """
    pointer: dict[str, Any] = {"round": checkpoint.round}
    names = []
    for part in _PARTS:
        buffer = BytesIO()
        torch.save(_plain(getattr(checkpoint, part), part), buffer)
        digest = sha256(buffer.getvalue()).hexdigest()
        names.append(f"round-{checkpoint.round:05d}.{part}.{digest[:8]}.pt")
        pointer[part] = {"file": names[-1], "sha256": digest}
        folder.write_bytes(f"{_FOLDER}/{names[-1]}", buffer.getvalue())
    folder.write_text(_LATEST, json.dumps(pointer, indent=2))
    for name in folder.files(_FOLDER):
        if name.endswith(".pt") and name not in names:
            folder.remove(f"{_FOLDER}/{name}")


def load(folder: RunFolder) -> Checkpoint | None:
    """The latest checkpoint with its tensors on the CPU, or None where the run has none. Executes no code of the file.

    Raises `RunError` naming the file that is missing or damaged.
    """
    if not folder.exists(_LATEST):
        return None
    try:
        pointer = json.loads(folder.read_text(_LATEST))
        files = [(f"{_FOLDER}/{pointer[part]['file']}", pointer[part]["sha256"]) for part in _PARTS]
        round = int(pointer["round"])
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, _LATEST) from error
    server, clients = (_load_part(folder, name, digest) for name, digest in files)
    return Checkpoint(round, server, clients)


def _load_part(folder: RunFolder, name: str, digest: str) -> dict[Any, Any]:
    data = folder.read_bytes(name)
    if sha256(data).hexdigest() != digest:
        raise _damaged(folder, name)
    state: dict[Any, Any] = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    return state


def _damaged(folder: RunFolder, name: str) -> RunError:
    return RunError(
        f"the checkpoint '{folder.url}/{name}' is damaged; restore it from a copy, or start the run again from "
        f"{folder.url}/scenario.yaml"
    )


def _plain(value: Any, where: str) -> Any:
    """A copy on the CPU that `torch.load(weights_only=True)` takes; a view is cut loose from the storage behind it."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    raise TypeError(f"{where} is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings, containers")
