"""Factor short Paillier moduli with FLINT, as an attacker would: 128 bits take 0.04 s, 192 bits take 3 s."""

from __future__ import annotations

from rayfed.errors import require_extra

MOST_BITS = 200
"""Moduli of this length or more are not factored: every 30 additional bits take about ten times as long."""


def require_factoring() -> None:
    """Raise `MissingExtraError` if FLINT is missing."""
    require_extra("crypto", "the option `factor` of an attack", "flint")


def factor(n: int) -> tuple[int, int] | None:
    """Return the two prime factors of a modulus, the smaller one first; None if the modulus is too long."""
    if n.bit_length() >= MOST_BITS:
        return None
    require_factoring()
    from flint import fmpz

    (p, _), (q, _) = sorted(fmpz(n).factor())
    return int(p), int(q)
