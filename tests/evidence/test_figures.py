"""Numbers of tables: each is rounded and compared as a number, and formatted last."""

from __future__ import annotations

from decimal import Decimal
from math import ulp

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rayfed.evidence.figures import RoundedEstimate, round_estimate
from rayfed.evidence.settings import MeanEstimate
from rayfed.report.text.figures import cell_text, number_text

VALUES = st.floats(1e-9, 1e12) | st.integers(-100_000, 100_000).map(float)


def alone(mean: float) -> MeanEstimate:
    return MeanEstimate(mean, None, None, 1)


@pytest.mark.parametrize(
    ("measure", "estimate", "value", "decimals", "text"),
    [
        ("psnr", alone(12.0), 12.0, 0, "12"),
        ("psnr", alone(12.34567), 12.34567, 2, "12.35"),
        ("psnr", alone(250.0), 100.0, 0, "≥100"),
        ("mse", alone(12345.0), 12345.0, -1, "1.234e+04"),
        ("epsilon", alone(9.23496), 9.24, 2, "9.24"),
        ("epsilon", alone(1230.5), 1240.0, -1, "1.24e+03"),
        ("bytes_up", alone(1.5e6), 1.5, 1, "1.5"),
        ("psnr", MeanEstimate(18.3, 14.6, 22.0, 6), 18.3, 1, "18.3 ± 3.7"),
        ("test_accuracy", MeanEstimate(0.17, 0.0, 0.64, 6, cut=True), 0.17, 2, "0.17 (0.00 to 0.64)"),
        ("psnr", MeanEstimate(47.8, -100.0, 200.0, 2, pair=(33.4, 62.2)), 47.8, 0, "48 (33, 62)"),
    ],
)
def test_a_cell_has_its_value_and_decimals_before_its_text(
    measure: str, estimate: MeanEstimate, value: float, decimals: int, text: str
) -> None:
    found = round_estimate(measure, estimate)
    assert (found.value, found.decimals) == (pytest.approx(value), decimals)
    assert cell_text(measure, estimate) == text


@given(VALUES, st.integers(1, 6))
def test_the_decimals_of_a_cell_are_those_of_its_text(value: float, digits: int) -> None:
    found = RoundedEstimate(value, digits)
    assert found.decimals == -int(Decimal(number_text(found)).as_tuple().exponent)


@given(VALUES, st.floats(1e-6, 1e6), st.booleans())
def test_the_decimals_of_a_cell_with_ends_are_those_of_its_text(value: float, half: float, pair: bool) -> None:
    assume(half > 10 * ulp(value))
    found = RoundedEstimate(value, ends=(value - half, value + half), pair=pair)
    assert found.decimals == -int(Decimal(number_text(found).split()[0]).as_tuple().exponent)


def test_cells_are_compared_to_the_decimals_of_both() -> None:
    assert RoundedEstimate(12.34).equals(RoundedEstimate(12.3))
    assert not RoundedEstimate(12.36).equals(RoundedEstimate(12.3))
