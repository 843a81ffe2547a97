"""Cache of attacked clients' updates in a round: an update that several attacks observe is computed once.

Each update depends only on its key, so a process without the update computes the same bits. The cache belongs to the
clients' side: it is not sent to the server or to attackers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch

from rayfed.scenario import Training
from rayfed.simulation.client.server_message import Sent, State
from rayfed.update import Named, Update, digest_of

_MAX_BYTES = 256 * 2**20
"""Maximum bytes of the cached updates of one process; further updates are computed again when they are needed."""


class ClientUpdate(NamedTuple):
    """One update of a client, or the mean of several updates."""

    update: Update
    error: Named | None = None
    """Standard error of each value of a mean update; None for a single update."""


@dataclass(frozen=True)
class UpdateKey:
    """Values that determine the bits of a client's update in one scenario."""

    arm: str
    message: str
    """Digest of the server's message (`Sent.content`), with the number of the round."""
    client: int
    state: bytes
    """Digest of the client's state at the start of the round; empty without a state."""
    training: str
    """Training settings in JSON."""
    indices: bytes
    """Training samples from which the update is computed, in their order."""
    noise: str = ""
    """View that names the random stream of the defences; empty for the stream of the round itself."""
    averages: int = 1
    """Number of updates in the mean."""
    sent_private: frozenset[str] = frozenset()
    """Private parameters that the client sends under the attack."""
    server: str = ""
    """Attack of the malicious server that changes the model, in JSON; empty for an honest server."""
    defended: bool = True
    """Whether the arm's defences are applied."""


def make_key(arm: str, sent: Sent, client: int, state: State, training: Training, indices: np.ndarray) -> UpdateKey:
    """Return the key of a client's update under an honest server, with the random numbers of the round itself."""
    samples = np.asarray(indices, np.int64).tobytes()
    return UpdateKey(arm, sent.content, client, _digest_state(state), training.model_dump_json(), samples)


def _digest_state(state: State) -> bytes:
    """Return the SHA-256 of a client's state; empty for an empty state.

    A state with other values than numbers, texts, arrays, tensors and their collections has a digest that no other
    state has, so updates that depend on it are computed again.
    """
    if not state:
        return b""
    digest = sha256()
    try:
        for part in _parts_of(state):
            digest.update(part)
    except TypeError:
        return uuid4().bytes
    return digest.digest()


def _parts_of(value: Any) -> Iterator[bytes]:
    """Yield bytes that determine a value; raise `TypeError` for values of unknown types."""
    yield type(value).__name__.encode()
    if isinstance(value, torch.Tensor):
        yield digest_of({"": value})
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield repr((value.dtype.str, value.shape)).encode() + value.tobytes()
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _parts_of(key)
            yield from _parts_of(entry)
        yield b"end"
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _parts_of(entry)
        yield b"end"
    elif value is None or isinstance(value, bool | int | float | str | bytes | np.generic):
        yield repr(value).encode() + b";"
    else:
        raise TypeError(f"a value of {type(value)} has no digest")


class UpdateCache:
    """Updates of one round on the CPU. If there is no room for all, the first ones stay.

    Updates are copied on the way in and out, because defences, views and aggregation rules may change tensors in place.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        """Initialise without updates; the cached ones take at most `max_bytes`."""
        self._max_bytes, self._free_bytes = max_bytes, max_bytes
        self._round = -1
        self._updates: dict[UpdateKey, ClientUpdate] = {}

    def __reduce__(self) -> tuple[type[UpdateCache], tuple[int]]:
        """Pickle an empty cache, so that no update reaches another process with an object that refers to clients."""
        return UpdateCache, (self._max_bytes,)

    def __len__(self) -> int:
        return len(self._updates)

    def begin_round(self, number: int) -> None:
        """Drop the updates of all other rounds."""
        if number != self._round:
            self._round, self._free_bytes = number, self._max_bytes
            self._updates.clear()

    def add(self, key: UpdateKey, made: ClientUpdate) -> None:
        """Add a copy of an update if there is room."""
        size = sum(tensor.nbytes for tensors in _parts(made) for tensor in tensors.values())
        if key not in self._updates and size <= self._free_bytes:
            self._free_bytes -= size
            self._updates[key] = _copy(made, torch.device("cpu"))  # a GPU's memory is planned for training

    def get(self, key: UpdateKey, device: torch.device, compute: Callable[[], ClientUpdate]) -> ClientUpdate:
        """Return a copy of the update with this key on a device, computed by `compute` if it is not cached."""
        if key in self._updates:
            return _copy(self._updates[key], device)
        made = compute()
        self.add(key, made)
        return _copy(made, device)  # a copy also here, so that the tensors' memory layout is the same


def _parts(made: ClientUpdate) -> tuple[Named, ...]:
    return made.update.tensors, made.update.buffers, made.error or {}


def _copy(made: ClientUpdate, device: torch.device) -> ClientUpdate:
    """Return a copy of an update on a device, without autograd history."""
    tensors, buffers, error = (_copy_tensors(part, device) for part in _parts(made))
    return ClientUpdate(replace(made.update, tensors=tensors, buffers=buffers), None if made.error is None else error)


def _copy_tensors(tensors: Named, device: torch.device) -> Named:
    return {name: tensor.detach().to(device, copy=True) for name, tensor in tensors.items()}
