"""CKKS encryption of updates, with exact sums by rounding.

Source: Cheon 2017, 'Homomorphic encryption for arithmetic of approximate numbers'. Decrypted values are rounded before
anyone sees them because of Li and Micciancio 2021, 'On the security of homomorphic encryption on approximate numbers'.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rayfed.protections.lattice import LatticeProtection
from rayfed.registry import component


@component
class Ckks(LatticeProtection):
    """Encrypt updates as integers under CKKS; rounding removes its noise, so sums are exact.

    Clients share the secret key and encrypt with it. If clients multiply by their own weights, the scale must cover the
    noise of a sum. If the server multiplies, as with FedBoosting, the scale must also cover the noise times its
    factors.
    """

    scheme: ClassVar[Literal["bfv", "ckks"]] = "ckks"
