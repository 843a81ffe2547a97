"""The server's message to the clients of an arm in a round."""

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
    """The weights, buffers and keys that the server sends for one round of one arm."""

    round: int
    weights: Named
    buffers: Named
    keys: bytes = b""
    """The clients' key pair where they encrypt, locked with what only they know: the server passes it on."""
    broadcast: Any = None
    """Of the session of the arm's aggregation (`rayfed.questions.RoundSession`); None where it has none."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without digests, so that each client computes them itself."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def nbytes(self) -> int:
        """Bytes of weights, buffers and keys."""
        return sum(t.nbytes for t in [*self.weights.values(), *self.buffers.values()]) + len(self.keys)

    @cached_property
    def content(self) -> str:
        """SHA-256 of the model that questions are about: round, weights and buffers."""
        parts = (digest_of(dict(sorted(tensors.items()))) for tensors in (self.weights, self.buffers))
        return hashlib.sha256(repr((self.round, *parts)).encode()).hexdigest()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that clients must have in common for their updates to be added.

        It is of round, weights, buffers and the box of their keys, which is another in every run.

        Source: Pasquini 2022, 'Eluding secure aggregation in federated learning via model inconsistency': a server
        that sends clients different weights gets single updates out of sums, unless what hides an update depends
        on the weights.
        """
        return hashlib.sha256(repr((self.content, self.keys)).encode()).hexdigest()
