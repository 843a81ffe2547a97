"""Base classes of protections: a scenario's parameters, from which secure channels are created."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from rayfed.crypto.encryptor import Encryptor, Load
from rayfed.crypto.layout import LayerBounds
from rayfed.errors import UserError
from rayfed.protections.channel import SecureChannel
from rayfed.protections.encrypted import EncryptedChannel
from rayfed.registry import component


@component
class Protection:
    """Base class of protections, such as encryption, which hide single updates from the server."""

    masks: ClassVar[bool] = False
    """Whether the server sees only the sum of the clients' vectors, including their noise."""

    @property
    def missing(self) -> int:
        """Return the number of clients that drop out in every round before they send an update."""
        return 0

    def withstands(self, clients: int, colluders: int) -> bool:
        """Return whether a server that colludes with clients learns only the sum of the other clients' updates.

        The server is honest but curious. `clients` is the number of clients per round, of which `colluders` help the
        server.
        """
        return False

    def warning(self) -> str | None:
        """Return why the protection's parameters protect nothing, in words; None if they do protect."""
        return None

    def summing(self, clients: int, units: int, step: float | None) -> SecureChannel[Any, Any]:
        """Return a secure channel for sums of at most `clients` updates with a total weight of at most `units`.

        If values are multiples of a `step`, the channel may keep them exact. Raises `UserError` for parameters that
        cannot represent such sums.
        """
        raise NotImplementedError

    def mixing(self, clients: int) -> EncryptedChannel:
        """Return a secure channel whose server can also multiply updates, for rounds of `clients` clients.

        The server multiplies the clients' messages by whole numbers. Raises `UserError` if there is no such channel.
        """
        raise UserError(
            f"with {type(self).__name__} the server can only add updates, which is not enough for a rule that mixes "
            f"them: use a WeightedSumRule, such as fedavg, or a protection that encrypts, or remove the protection"
        )


@component
class Clipping(Protection):
    """Base of the protections that clip an update's values and send them in fixed point."""

    clip: Annotated[float, Field(gt=0)] = 1.0
    """Clip bound: every value of an update is clipped to [-clip, clip]. The table `clients` has the number of clipped
    values."""
    clip_buffers: Annotated[float, Field(gt=0)] = 100.0
    """Clip bound of buffers (batch-norm statistics), which are sent as values, not as differences."""


@component
class Encryption(Clipping):
    """Base of the protections that encrypt updates with an `Encryptor`, created from the parameters."""

    pieces_of_weight: Annotated[int, Field(ge=1)] = 100
    """The thesis' P: if the server multiplies (`fedboosting`, or `encoding: fedboosting`), weights are whole numbers
    with this sum, by largest remainders."""

    clip_layers: dict[str, Annotated[float, Field(gt=0)]] | None = None
    """Clip bounds of single tensors, by name or pattern (`conv*`); the last match counts, and `clip` applies to all
    other tensors. Layers differ in the size of their updates, so one bound for all of them wastes bits or clips
    values. BatchCrypt sets a bound per layer too: 3.9 standard deviations of the layer's values for 8 bits.
    Default: none."""

    @property
    def layer_bounds(self) -> LayerBounds:
        """Return the clip bounds of single tensors as pairs of pattern and bound."""
        return tuple((self.clip_layers or {}).items())

    @property
    def pieces(self) -> int | None:
        """Return the number of pieces into which the server divides the weights; None if clients apply the weights."""
        return None

    def encryptor(self, load: Load) -> Encryptor:
        """Return an encryptor for sums of a given load. Raises `UserError` if parameters cannot represent the sums."""
        raise NotImplementedError

    def summing(self, clients: int, units: int, step: float | None) -> EncryptedChannel:
        """Return a channel for encrypted integer sums. Weights are applied by clients or, in pieces, by the server.

        Values are rounded to the channel's own grid, whatever their `step`.
        """
        if self.pieces and self.pieces < clients:
            raise UserError(
                f"{self.pieces} pieces of weight are too few for {clients} clients, each of which needs at least one: "
                f"increase pieces_of_weight, or reduce clients_per_round"
            )
        load = Load(clients, self.pieces, multiplied=True) if self.pieces else Load(clients, units)
        return EncryptedChannel(self.encryptor(load))

    def mixing(self, clients: int) -> EncryptedChannel:
        """Return an encrypted channel whose server multiplies updates by whole pieces of the total weight."""
        return EncryptedChannel(self.encryptor(Load(clients, self.pieces_of_weight, multiplied=True)))
