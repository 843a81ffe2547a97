"""A weighted mean of updates that the server cannot read: sealed by clients, added by anyone, opened by one client.

Source: Ren's thesis, algorithm 3 and equation 4.4, whose server adds ciphertexts and has a client decrypt the sum. That
one sum a round can be opened, whoever is asked and however often, is ours: it is of all the round's clients, which
everybody knows from the scenario, and its factors follow from the weights that these have sealed. So clients need not
remember what they have opened.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Self

import torch

from rayfed.aggregation.base import Aggregation, Member, Question
from rayfed.aggregation.fedavg import FedAvg, WeightedSum
from rayfed.crypto.packing import apportion
from rayfed.crypto.sealing import Keys, Load, Sealer
from rayfed.errors import ProtectionError, UserError
from rayfed.protections.base import Encryption
from rayfed.update import Named, Sealed, Update


@dataclass(frozen=True)
class Sealing(Aggregation):
    """Base of what makes of a rule the same on sealed updates."""

    rule: Aggregation
    sealer: Sealer
    keys: Keys | None = None
    """The clients' alone; the server's rule is made without."""
    clients: tuple[int, ...] = ()
    """Those of the round, as each of them knows by itself: no server is asked."""
    drops: bool = False
    """Whether some may be missing: then clients have to believe the server who has failed."""

    def at_clients(self, keys: Keys, clients: Iterable[int], drops: bool = False) -> Self:
        """The same at a client of a round."""
        return replace(self, keys=keys, clients=tuple(clients), drops=drops)

    def sealed(self, update: Update) -> Sealed:
        """All that the server sees of an update's values."""
        raise NotImplementedError

    def observed(self, update: Update) -> Sealed:
        """The same less the tag, without which nothing that was made to be observed gets into a round's sum."""
        return replace(self.sealed(update), tag=0)

    def describe(self) -> str:
        """What is sent, in words."""
        return f"encrypts {self.sealer.describe()}"

    def caveat(self) -> str | None:
        """What clients see of one another in spite of it, in words; None where they see sums alone."""
        return None

    def clipped(self, update: Update) -> int:
        """Values beyond the protection's clip bounds."""
        return self.sealer.clipped(update)

    def idle(self, weights: Named, generator: torch.Generator) -> Named:
        """As the rule has it."""
        return self.rule.idle(weights, generator)

    def opened(self, payload: Sealed, round: int, alone: bool = False) -> tuple[Named, Named, int]:
        """What `Sealer.open` finds in a sum of this round, as parameters are kept: sums are opened with 53 bits."""
        if payload.round != round:
            raise ProtectionError(f"an encrypted sum of round {payload.round} was sent in round {round}")
        tensors, buffers, weight = self.sealer.open(self._own_keys, payload, alone)
        return single(tensors), single(buffers), weight

    def check_present(self, clients: Collection[int]) -> None:
        """Raise `ProtectionError` unless these are the round's clients: all of them, or two at least where some may be
        missing.
        """
        present, drawn = set(clients), set(self.clients)
        if not present <= drawn or len(present) < 2 or (present != drawn and not self.drops):
            raise ProtectionError(
                f"the server asks for a sum of clients {_listed(present)}; this round's are {_listed(drawn)}: with "
                f"others a difference of sums would be one client's update, and the sum is not opened"
            )

    @property
    def _own_keys(self) -> Keys:
        if self.keys is None:
            raise ProtectionError("only clients have the keys to seal and to open")
        return self.keys


Total = tuple[Sealed, ...]
"""One sum; or, where the server multiplies, every client's own."""


@dataclass(frozen=True)
class Protected(Sealing):
    """A weighted mean on sealed updates."""

    rule: FedAvg

    @classmethod
    def of(cls, rule: Aggregation, protection: Encryption, clients: int, samples: int) -> Protected:
        """The rule under a protection, where a round has so many clients and samples at most.

        Raises `UserError` for a rule that is no weighted sum, and for parameters without room for one.
        """
        summed = weighted_sum_of(rule)
        weighted = Load(clients, units_of(summed, clients, samples))
        if protection.pieces and protection.pieces < clients:
            raise UserError(
                f"{protection.pieces} pieces cannot be dealt to {clients} clients so that each has one: raise "
                f"pieces_of_weight, or have fewer clients a round"
            )
        load = Load(clients, protection.pieces, multiplied=True) if protection.pieces else weighted
        return cls(summed, protection.sealer(load))

    def sealed(self, update: Update) -> Sealed:
        """The update sealed, its weight with it."""
        return self.sealer.seal(self._own_keys, update, self.rule.weight(update))

    def sends(self, update: Update) -> Sealed:
        """The same and nothing else."""
        return self.sealed(update)

    def partial(self, updates: Iterable[Sealed]) -> Total:
        """The sum over one cohort."""
        return reduce(self.merge, ((sealed,) for sealed in updates))

    def merge(self, left: Total, right: Total) -> Total:
        """The sum of two sums, under encryption."""
        return left + right if self.sealer.load.multiplied else (self.sealer.add(left[0], right[0]),)

    def asks(self, total: Total | WeightedSum) -> Question | None:
        """One client opens the sum."""
        return None if isinstance(total, WeightedSum) else Question(self._summed(total), of="one")

    def answer(self, payload: Sealed, member: Member) -> WeightedSum:
        """The sum in the clear; raises `ProtectionError` for any but the one of the round."""
        found = {share.client: share for share in payload.shares}
        self.check_present(found)
        expected = self._factors({client: share.weight for client, share in found.items()})
        if {client: share.after for client, share in found.items()} != expected:
            raise ProtectionError(
                "the server has multiplied sealed updates by other factors than their weights come to: the sum is not "
                "opened"
            )
        return WeightedSum(*self.opened(payload, member.round))

    def hears(self, total: Total, answers: Mapping[int, WeightedSum]) -> WeightedSum:
        """What the client opened."""
        [opened] = answers.values()
        return opened

    def combine(self, total: WeightedSum, generator: torch.Generator) -> tuple[Named, Named]:
        """What the rule makes of such a sum."""
        return self.rule.combine(total, generator)

    def _summed(self, total: Total) -> Sealed:
        if not self.sealer.load.multiplied:
            return total[0]
        shares = [sealed.shares[0] for sealed in total]
        factors = self._factors({share.client: share.weight for share in shares})
        return self.sealer.weighted(total, [factors[share.client] for share in shares])

    def _factors(self, weights: Mapping[int, int]) -> dict[int, int]:
        """By what the server multiplies each client's update; the same for whoever works it out from these weights."""
        if not self.sealer.load.multiplied:
            return dict.fromkeys(weights, 1)
        clients = sorted(weights)
        return dict(zip(clients, _dealt([weights[c] for c in clients], self.sealer.load.units), strict=True))


def _dealt(weights: Sequence[int], pieces: int) -> list[int]:
    """`apportion` with a piece at least for each, which whoever has most gives up: a client without one would not be in
    the sum, and its weight could not be checked.
    """
    dealt = apportion(weights, pieces)
    while 0 in dealt:
        dealt[dealt.index(0)] = 1
        dealt[dealt.index(max(dealt))] -= 1
    return dealt


def weighted_sum_of(rule: Aggregation) -> FedAvg:
    """The rule; raises `UserError` for one that is no weighted sum."""
    if not isinstance(rule, FedAvg) or type(rule).partial is not FedAvg.partial:
        raise UserError(
            f"a protection lets the server add updates and nothing else, which is not enough for "
            f"{type(rule).__name__}: use fedavg or fedboosting, or leave the protection out"
        )
    return rule


def units_of(rule: FedAvg, clients: int, samples: int) -> int:
    """The most that the weights of a round sum to, where it has so many clients and samples at most."""
    return samples if rule.weights == "samples" else clients


def single(tensors: Named) -> Named:
    """As parameters are kept; sums are opened with 53 bits."""
    return {name: t.float() for name, t in tensors.items()}


def _listed(clients: Collection[int]) -> str:
    return ", ".join(map(str, sorted(clients)))
