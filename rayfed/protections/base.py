"""Base classes of protections: a scenario's parameters, from which channels are made."""

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
    """Base of every protection."""

    masks: ClassVar[bool] = False
    """Whether what is opened is the sum of what clients made, noise included, to a server that sees nothing else."""

    @property
    def missing(self) -> int:
        """Number of clients of every round that send nothing."""
        return 0

    def withstands(self, clients: int, colluders: int) -> bool:
        """Return whether a server that colludes with clients learns only the sum of the others.

        The server is honest but curious; `clients` are those of a round, `colluders` those of them that help it.
        """
        return False

    def warning(self) -> str | None:
        """Return why this setting protects nothing; None if it does protect."""
        return None

    def summing(self, clients: int, units: int, step: float | None) -> SecureChannel[Any, Any]:
        """Return the channel for sums of at most this many clients with at most this total weight.

        Where values are whole multiples of a `step` it may leave them exact. Raises `UserError` for parameters without
        room for such sums.
        """
        raise NotImplementedError

    def mixing(self, clients: int) -> EncryptedChannel:
        """Return the channel for a server that also multiplies, for rounds of this many clients.

        It multiplies what clients send by whole numbers. Raises `UserError` where there is no such channel.
        """
        raise UserError(
            f"{type(self).__name__} lets the server add updates and nothing else, which is not enough for a rule that "
            f"has them mixed: use a WeightedSumRule, such as fedavg, or a protection that encrypts, or leave it out"
        )


@component
class Clipping(Protection):
    """Base of the protections that send clipped values in fixed point."""

    clip: Annotated[float, Field(gt=0)] = 1.0
    """Every value of an update is clipped to [-clip, clip]; how many lose by it stands in the table `clients`."""
    clip_buffers: Annotated[float, Field(gt=0)] = 100.0
    """Clip bound of buffers, the statistics of batch norm, which are sent as they are and not as differences."""


@component
class Encryption(Clipping):
    """Base of the protections that encrypt, with the public `Encryptor` made from the parameters."""

    pieces_of_weight: Annotated[int, Field(ge=1)] = 100
    """The thesis' P: where the server multiplies (`fedboosting`, or `encoding: fedboosting`), weights are whole numbers
    that sum to it, by largest remainders."""

    @property
    def pieces(self) -> int | None:
        """Number of pieces into which the server divides weights that clients know.

        None where clients multiply by their own weights.
        """
        return None

    def encryptor(self, load: Load) -> Encryptor:
        """Return an encryptor for such sums; raises `UserError` if the parameters have no room for them."""
        raise NotImplementedError

    def summing(self, clients: int, units: int, step: float | None) -> EncryptedChannel:
        """Return the channel for integer sums, with weights applied by clients, or by the server in pieces.

        Values are rounded whatever their step.
        """
        if self.pieces and self.pieces < clients:
            raise UserError(
                f"{self.pieces} pieces cannot be dealt to {clients} clients so that each has one: raise "
                f"pieces_of_weight, or have fewer clients a round"
            )
        load = Load(clients, self.pieces, multiplied=True) if self.pieces else Load(clients, units)
        return EncryptedChannel(self.encryptor(load))

    def mixing(self, clients: int) -> EncryptedChannel:
        """Return the channel for a server that multiplies by pieces of the total weight."""
        return EncryptedChannel(self.encryptor(Load(clients, self.pieces_of_weight, multiplied=True)))
