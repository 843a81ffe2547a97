"""Updates of attacked clients that this process computed in a round and may need again.

Each update is a pure function of its key, so a process without it computes the same bits. The cache belongs to a client
worker: updates and keys are never sent to another process.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from hashlib import sha256

import cloudpickle
import numpy as np

from rayfed.client.sent import Sent, State
from rayfed.scenario import Training
from rayfed.update import Named, Update

_MOST = 256 * 2**20
"""Maximum bytes of kept updates; more are computed again."""

Answer = tuple[Update, Named | None]
"""An update, or the mean of several and its standard error."""


@dataclass(frozen=True)
class UpdateKey:
    """Everything that determines the bits of a client's update in one scenario."""

    arm: str
    message: str
    """Digest of the server's message (`Sent.content`)."""
    client: int
    state: bytes
    """Digest of the client's state at the start of the round."""
    training: str
    indices: bytes
    """Training samples from which the update is computed."""
    noise: str = ""
    """Stream of the defences' random numbers; empty for the round's own."""
    averages: int = 1
    sends: frozenset[str] = frozenset()
    """Private parameters that the client sends under the attack."""
    server: str = ""
    """The malicious server that changes the model; empty for an honest one."""
    defended: bool = True


def make_key(arm: str, sent: Sent, client: int, state: State, training: Training, indices: np.ndarray) -> UpdateKey:
    """Return the key of a client's update under an honest server, in the round's own stream of random numbers."""
    digest = sha256(cloudpickle.dumps(state)).digest() if state else b""
    return UpdateKey(arm, sent.content, client, digest, training.model_dump_json(), indices.tobytes())


class UpdateCache:
    """Updates of one round, as copies that callers may change. The first ones are kept if there is no room for all."""

    def __init__(self, most: int = _MOST) -> None:
        self._most, self._left, self._round = most, most, -1
        self._kept: dict[Hashable, Answer] = {}

    def begin(self, round: int) -> None:
        """Drop the updates of all other rounds."""
        if round != self._round:
            self._round, self._left, self._kept = round, self._most, {}

    def keep(self, key: UpdateKey, answer: Answer) -> None:
        """Keep a copy of an update if there is room."""
        size = sum(t.nbytes for tensors in _parts(answer) for t in tensors.values())
        if key not in self._kept and size <= self._left:
            self._left -= size
            self._kept[key] = _copied(answer, "cpu")  # a GPU's memory is planned for training

    def find_or_compute(self, key: UpdateKey, device: object, compute: Callable[[], Answer]) -> Answer:
        """Return the update with this key on a device, computed if it is not kept."""
        if key in self._kept:
            return _copied(self._kept[key], str(device))
        answer = compute()
        self.keep(key, answer)
        return answer


def _parts(answer: Answer) -> tuple[Named, ...]:
    update, error = answer
    return update.tensors, update.buffers, error or {}


def _copied(answer: Answer, device: str) -> Answer:
    """Return a copy of an update on a device, without autograd history."""
    tensors, buffers, error = (
        {name: t.detach().to(device, copy=True) for name, t in part.items()} for part in _parts(answer)
    )
    update = replace(answer[0], tensors=tensors, buffers=buffers)
    return update, None if answer[1] is None else error
