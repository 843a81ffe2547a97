"""Shamir's secret sharing: any `threshold` shares determine the secret, fewer reveal nothing.

Source: Shamir 1979, "How to Share a Secret"; a polynomial modulo the Mersenne prime 2^521 - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rayfed.crypto.keys import Stream
from rayfed.errors import ProtectionError

PRIME = (1 << 521) - 1
SHARE_BYTES = 66


def split(secret: bytes, threshold: int, holders: Sequence[int], stream: Stream) -> dict[int, int]:
    """Split a secret of at most 64 bytes into one share per holder, with a random polynomial from `stream`.

    Raises `ProtectionError` for negative holder numbers: the share for -1 would be the secret.
    """
    if not all(type(holder) is int and 0 <= holder < PRIME - 1 for holder in holders):
        raise ProtectionError("found a negative or too large number of a holder of secret shares; numbers start at 0")
    drawn = [int.from_bytes(stream.read(SHARE_BYTES + 16)) % PRIME for _ in range(threshold - 1)]
    coefficients = [int.from_bytes(secret), *drawn]
    return {holder: _at(holder + 1, coefficients) for holder in holders}


def join(shares: Mapping[int, int], threshold: int, size: int) -> bytes:
    """Compute a secret of `size` bytes from its holders' shares. Raises `ProtectionError` for too few or bad shares."""
    if len(shares) < threshold:
        raise ProtectionError(
            f"only {len(shares)} of {threshold} needed shares of a secret are left: too many clients dropped out; "
            f"lower the threshold"
        )
    points = {holder + 1: share for holder, share in sorted(shares.items())[:threshold]}
    total = 0
    for x, share in points.items():
        others = [other for other in points if other != x]
        above, below = 1, 1
        for other in others:
            above, below = above * other % PRIME, below * (other - x) % PRIME
        total += share * above * pow(below, -1, PRIME)
    try:
        return (total % PRIME).to_bytes(size)
    except OverflowError:
        raise ProtectionError("the shares of a secret are inconsistent: one of them was tampered with") from None


def _at(x: int, coefficients: Sequence[int]) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value
