"""Base classes of protections: a scenario's parameters, from which secure channels are created."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from rayfed.crypto.encryptor import Encryptor, Load
from rayfed.errors import UserError
from rayfed.protections.channel import SecureChannel
from rayfed.protections.encrypted import EncryptedChannel
from rayfed.registry import component


@component
class Protection:
    """Base class of protections."""

    masks: ClassVar[bool] = False
    """Whether the server sees only the sum of the clients' vectors, including their noise."""

    @property
    def missing(self) -> int:
        """Number of clients that send nothing in every round."""
        return 0

    def withstands(self, clients: int, colluders: int) -> bool:
        """Return whether a server that colludes with clients learns only the sum of the other clients.

        The server is honest but curious. `clients` is the number of clients per round, of which `colluders` help the
        server.
        """
        return False

    def warning(self) -> str | None:
        """Return why this setting protects nothing; None if it does protect."""
        return None

    def summing(self, clients: int, units: int, step: float | None) -> SecureChannel[Any, Any]:
        """Return the channel for sums of at most this many clients with at most this total weight.

        If values are multiples of a `step`, the channel may keep them exact. Raises `UserError` for parameters that
        cannot represent such sums.
        """
        raise NotImplementedError

    def mixing(self, clients: int) -> EncryptedChannel:
        """Return the channel for a server that also multiplies, for rounds of this many clients.

        The server multiplies the clients' messages by whole numbers. Raises `UserError` if there is no such channel.
        """
        raise UserError(
            f"with {type(self).__name__} the server can only add updates, which is not enough for a rule that mixes "
            f"them: use a WeightedSumRule, such as fedavg, or a protection that encrypts, or remove the protection"
        )


@component
class Clipping(Protection):
    """Base of the protections that send clipped values in fixed point."""

    clip: Annotated[float, Field(gt=0)] = 1.0
    """Clip bound: every value of an update is clipped to [-clip, clip]. The table `clients` has the number of clipped
    values."""
    clip_buffers: Annotated[float, Field(gt=0)] = 100.0
    """Clip bound of buffers (batch-norm statistics), which are sent as values, not as differences."""


@component
class Encryption(Clipping):
    """Base of the protections that encrypt, with the public `Encryptor` created from the parameters."""

    pieces_of_weight: Annotated[int, Field(ge=1)] = 100
    """The thesis' P: if the server multiplies (`fedboosting`, or `encoding: fedboosting`), weights are whole numbers
    with this sum, by largest remainders."""

    @property
    def pieces(self) -> int | None:
        """Number of pieces into which the server divides the weights; None if clients multiply by their own weights."""
        return None

    def encryptor(self, load: Load) -> Encryptor:
        """Return an encryptor for such sums; raise `UserError` if the parameters cannot represent them."""
        raise NotImplementedError

    def summing(self, clients: int, units: int, step: float | None) -> EncryptedChannel:
        """Return the channel for integer sums, with weights applied by clients, or by the server in pieces.

        Values are rounded to the channel's own grid, whatever their `step`.
        """
        if self.pieces and self.pieces < clients:
            raise UserError(
                f"{self.pieces} pieces are too few for {clients} clients, of which each needs at least one: increase "
                f"pieces_of_weight, or reduce clients_per_round"
            )
        load = Load(clients, self.pieces, multiplied=True) if self.pieces else Load(clients, units)
        return EncryptedChannel(self.encryptor(load))

    def mixing(self, clients: int) -> EncryptedChannel:
        """Return the channel for a server that multiplies by pieces of the total weight."""
        return EncryptedChannel(self.encryptor(Load(clients, self.pieces_of_weight, multiplied=True)))
