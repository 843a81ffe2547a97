"""Formatting of bounds in few digits, rounded up or down so that they remain valid."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal


def at_most(bound: float, digits: int = 3) -> str:
    """Format an upper bound, rounded up to this many significant digits: 9.23496 as '9.24'.

    It may be an epsilon, a delta, a sampling rate. Read back as a float it is never below `bound`.
    """
    return _rounded(bound, digits, ROUND_CEILING)


LARGE = 10.0
"""Epsilon from which on a guarantee is of little use: what is seen may be 22,000 times as likely for one data set."""


def caution(epsilon: float) -> str:
    """Return a clause on what a large epsilon is worth, to stand behind its guarantee; empty for a smaller one."""
    return "; so large an epsilon promises next to nothing" if epsilon >= LARGE else ""


def share_at_most(bound: float, digits: int = 3) -> str:
    """Format an upper bound on a probability in per cent, rounded up: 0.02914 as '2.92 %'."""
    return f"{Decimal(at_most(bound, digits)) * 100:.{digits}g} %"


def at_least(bound: float, digits: int = 3) -> str:
    """Format a lower bound, such as a noise multiplier, rounded down to this many significant digits."""
    return _rounded(bound, digits, ROUND_FLOOR)


def _rounded(bound: float, digits: int, direction: str) -> str:
    # The shortest decimal that is read back as this float, not its binary value: 1e-05 stays what somebody wrote.
    written = Decimal(repr(float(bound)))
    return f"{float(Context(prec=digits, rounding=direction).create_decimal(written)):.{digits}g}"
