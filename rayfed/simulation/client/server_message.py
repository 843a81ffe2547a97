"""Message of the server to the clients of an arm in a round."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

from rayfed.update import Named, digest_of

State = dict[str, Any]
Split = Literal["test", "train"]


@dataclass(frozen=True)
class Sent:
    """Weights, buffers and keys that the server sends for one round of one arm."""

    round: int
    weights: Named
    buffers: Named
    keys: bytes = b""
    """The clients' key pair for encryption, locked with a secret that the server does not know; empty without one."""
    broadcast: Any = None
    """Broadcast of the aggregation's session (`rayfed.core.questions.RoundSession`); None without a session."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without cached digests, so that each client computes the digests itself."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def nbytes(self) -> int:
        """Return the size of the message's weights, buffers and keys, in bytes."""
        return sum(t.nbytes for t in [*self.weights.values(), *self.buffers.values()]) + len(self.keys)

    @cached_property
    def content(self) -> str:
        """Return the SHA-256 of the message's round, weights and buffers."""
        parts = (digest_of(dict(sorted(tensors.items()))) for tensors in (self.weights, self.buffers))
        return hashlib.sha256(repr((self.round, *parts)).encode()).hexdigest()

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of round, weights, buffers and encrypted keys, on which the masking of updates depends.

        Without this dependence, a server that sends clients different weights can extract single updates from sums.

        Source: Pasquini 2022, 'Eluding secure aggregation in federated learning via model inconsistency'.
        """
        return hashlib.sha256(repr((self.content, self.keys)).encode()).hexdigest()
