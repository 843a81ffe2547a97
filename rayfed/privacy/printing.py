"""Format bounds with few digits, rounded up or down so that they remain valid."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal


def format_upper(bound: float, digits: int = 3) -> str:
    """Format an upper bound, rounded up to `digits` significant digits: 9.23496 becomes '9.24'.

    Examples: an epsilon, a delta, a sampling rate. The formatted number is never below `bound`.
    """
    return f"{round_up(bound, digits):.{digits}g}"


def round_up(bound: float, digits: int = 3) -> float:
    """Return an upper bound, rounded up to `digits` significant digits."""
    return _rounded(bound, digits, ROUND_CEILING)


LARGE = 10.0
"""Epsilon from which a guarantee is weak: an observation may be 22,000 times as likely with one data set as with
another."""


def caution_text(epsilon: float) -> str:
    """Return a warning to append to a weak privacy guarantee; empty for smaller epsilons."""
    return f" (WEAK: epsilon above {LARGE:g})" if epsilon >= LARGE else ""


def format_share_bound(bound: float, digits: int = 3) -> str:
    """Format an upper bound on a probability in per cent, rounded up: 0.02914 becomes '2.92 %'."""
    return f"{Decimal(format_upper(bound, digits)) * 100:.{digits}g} %"


def format_lower(bound: float, digits: int = 3) -> str:
    """Format a lower bound, such as a noise multiplier, rounded down to `digits` significant digits."""
    return f"{_rounded(bound, digits, ROUND_FLOOR):.{digits}g}"


def _rounded(bound: float, digits: int, direction: str) -> float:
    # The shortest decimal of this float, not its binary value, so that 1e-05 stays 1e-05.
    written = Decimal(repr(float(bound)))
    return float(Context(prec=digits, rounding=direction).create_decimal(written))
