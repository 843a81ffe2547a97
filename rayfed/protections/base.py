"""The contract of a protection: how clients hide what they send, so that the server adds what it cannot read."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rayfed.crypto.sealing import Load, Sealer
from rayfed.registry import component


@component
class Protection:
    """Base of every protection."""

    clip: Annotated[float, Field(gt=0)] = 1.0
    """Every value of an update is clipped to [-clip, clip]; how many lose by it stands in the table `clients`."""
    clip_buffers: Annotated[float, Field(gt=0)] = 100.0
    """The same for buffers, the statistics of batch norm, which are sent as they are and not as differences."""

    def warning(self) -> str | None:
        """Why it protects nothing as it is set; None where it does."""
        return None


@component
class Encryption(Protection):
    """Base of those under which clients encrypt: from the scenario's parameters it makes the public `Sealer`.

    Clients share one key pair: an honest server learns the sum of each round and nothing of a single update, but one
    client that colludes with it, or taps the others' lines, reads everyone.
    """

    pieces_of_weight: Annotated[int, Field(ge=1)] = 100
    """The thesis' P: where the server multiplies (`fedboosting`, or `encoding: fedboosting`), weights are whole numbers
    that sum to it, by largest remainders."""

    @property
    def pieces(self) -> int | None:
        """In how many pieces the server deals weights that clients know; None where these multiply by their own."""
        return None

    def sealer(self, load: Load) -> Sealer:
        """What seals for such sums; raises `UserError` where the parameters have no room for them."""
        raise NotImplementedError
