"""What a scenario sets of a protection, and the channels that it makes of it."""

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

    clip: Annotated[float, Field(gt=0)] = 1.0
    """Every value of an update is clipped to [-clip, clip]; how many lose by it stands in the table `clients`."""
    clip_buffers: Annotated[float, Field(gt=0)] = 100.0
    """The same for buffers, the statistics of batch norm, which are sent as they are and not as differences."""

    masks: ClassVar[bool] = False
    """Whether what is opened is the sum of what clients made, noise included, to a server that sees nothing else."""

    @property
    def missing(self) -> int:
        """How many clients of every round send nothing."""
        return 0

    def withstands(self, clients: int, colluders: int) -> bool:
        """Whether an honest but curious server, with so many of a round's clients, learns only the sum of the
        others.
        """
        return False

    def warning(self) -> str | None:
        """Why it protects nothing as it is set; None where it does."""
        return None

    def summing(self, clients: int, units: int, step: float | None) -> SecureChannel[Any, Any]:
        """The channel for sums of so many clients at most, whose weights come to so many units together at most.

        Where values are whole multiples of a `step` it may leave them exact. Raises `UserError` for parameters without
        room for such sums.
        """
        raise NotImplementedError

    def mixing(self, clients: int) -> EncryptedChannel:
        """The channel for a server that also multiplies what clients send by whole numbers, of so many clients a round.

        Raises `UserError` where there is none.
        """
        raise UserError(
            f"{type(self).__name__} lets the server add updates and nothing else, which is not enough for a rule that "
            f"has them mixed: use fedavg, or a protection that encrypts, or leave it out"
        )


@component
class Encryption(Protection):
    """Base of those under which clients encrypt: from the scenario's parameters it makes the public `Encryptor`."""

    pieces_of_weight: Annotated[int, Field(ge=1)] = 100
    """The thesis' P: where the server multiplies (`fedboosting`, or `encoding: fedboosting`), weights are whole numbers
    that sum to it, by largest remainders."""

    @property
    def pieces(self) -> int | None:
        """In how many pieces the server deals weights that clients know; None where these multiply by their own."""
        return None

    def encryptor(self, load: Load) -> Encryptor:
        """What encrypts for such sums; raises `UserError` where the parameters have no room for them."""
        raise NotImplementedError

    def summing(self, clients: int, units: int, step: float | None) -> EncryptedChannel:
        """Whole numbers, multiplied by clients, or by the server in pieces; values are rounded whatever their step."""
        if self.pieces and self.pieces < clients:
            raise UserError(
                f"{self.pieces} pieces cannot be dealt to {clients} clients so that each has one: raise "
                f"pieces_of_weight, or have fewer clients a round"
            )
        load = Load(clients, self.pieces, multiplied=True) if self.pieces else Load(clients, units)
        return EncryptedChannel(self.encryptor(load))

    def mixing(self, clients: int) -> EncryptedChannel:
        """The server multiplies by pieces of the whole."""
        return EncryptedChannel(self.encryptor(Load(clients, self.pieces_of_weight, multiplied=True)))
