"""BFV encryption of updates (Fan and Vercauteren 2012, 'Somewhat practical fully homomorphic encryption')."""

from __future__ import annotations

from typing import ClassVar, Literal

from rayfed.protections.lattice import LatticeProtection
from rayfed.registry import component


@component
class Bfv(LatticeProtection):
    """Encrypt updates as integers under BFV, which is exact and has twice the slots of `ckks`.

    Clients share the secret key and encrypt with it.
    """

    scheme: ClassVar[Literal["bfv", "ckks"]] = "bfv"
