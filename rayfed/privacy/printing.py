"""Bounds in few digits: an upper bound is rounded up, a lower bound down, so that what is printed still holds."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal


def at_most(bound: float, digits: int = 3) -> str:
    """An upper bound, such as an epsilon, a delta or a sampling rate, with so many significant digits: '9.24' of
    9.23496.

    Read back as a float it is never below `bound`.
    """
    return _rounded(bound, digits, ROUND_CEILING)


def at_least(bound: float, digits: int = 3) -> str:
    """A lower bound, such as a noise multiplier, likewise rounded down."""
    return _rounded(bound, digits, ROUND_FLOOR)


def _rounded(bound: float, digits: int, direction: str) -> str:
    # The shortest decimal that is read back as this float, not its binary value: 1e-05 stays what somebody wrote.
    written = Decimal(repr(float(bound)))
    return f"{float(Context(prec=digits, rounding=direction).create_decimal(written)):.{digits}g}"
