"""CKKS encryption of updates.

Source: Cheon 2017, 'Homomorphic encryption for arithmetic of approximate numbers'; Li and Micciancio 2021, 'On the
security of homomorphic encryption on approximate numbers', for why what is decrypted is rounded before anyone sees it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rayfed.protections.lattice import LatticeProtection
from rayfed.registry import component


@component
class Ckks(LatticeProtection):
    """Encrypt updates as integers under CKKS, whose noise is rounded away, so that sums are exact.

    Clients share the secret key and encrypt with it. Where they multiply by their own weights the scale has to cover
    the noise of a sum; where the server multiplies, as FedBoosting's does, also what its factors make of the noise.
    """

    scheme: ClassVar[Literal["bfv", "ckks"]] = "ckks"
