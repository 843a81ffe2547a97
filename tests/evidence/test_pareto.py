"""Fronts against brute force and hypervolumes against rectangles."""

from __future__ import annotations

import numpy as np
import pytest

from rayfed.errors import UserError
from rayfed.evidence.pareto import ParetoFront, compute_front
from rayfed.evidence.settings import Setting, select_strongest
from tests.helpers.result_fixtures import setting


def points(*rows: tuple[float, float]) -> list[Setting]:
    return [setting(f"a{place}", psnr=psnr, test_accuracy=acc) for place, (psnr, acc) in enumerate(rows)]


def names(settings: list[Setting]) -> list[str]:
    return [each.arm for each in settings]


@pytest.mark.parametrize("cost", [None, "train_seconds"])
@pytest.mark.parametrize("leakage", ["psnr", "mse"])
def test_the_front_is_what_brute_force_finds(leakage: str, cost: str | None) -> None:
    generator = np.random.default_rng(7)
    measures = [leakage, "test_accuracy", *([cost] if cost else [])]
    signs = np.array([1 if m in ("mse", "test_accuracy") else -1 for m in measures])
    for _ in range(20):
        values = generator.integers(0, 6, (30, len(measures))).astype(float)  # whole numbers: many ties
        found = [setting(str(i), **dict(zip(measures, row, strict=True))) for i, row in enumerate(values)]
        turned = values * signs
        beaten = [any((other >= own).all() and (other > own).any() for other in turned) for own in turned]
        expected = {str(i) for i, lost in enumerate(beaten) if not lost}
        result = compute_front(found, leakage, "test_accuracy", cost)
        assert set(names(result.best)) == expected
        first = [each.measures[leakage].mean * signs[0] for each in result.best]
        assert first == sorted(first, reverse=True)


def test_the_hypervolume_is_the_area_of_rectangles() -> None:
    found = compute_front(points((10, 0.5), (20, 0.8), (30, 0.9), (30, 0.6)), "psnr", "test_accuracy")
    assert names(found.best) == ["a0", "a1", "a2"]
    corners = {"reference": {"psnr": 40, "test_accuracy": 0.4}, "ideal": {"psnr": 0, "test_accuracy": 1.0}}
    area = 30 * 0.1 + 20 * 0.3 + 10 * 0.1  # from the reference: steps of the staircase, bottom up
    assert found.hypervolume(**corners) == pytest.approx(area / (40 * 0.6))
    worse = {"psnr": 25, "test_accuracy": 0.7}
    assert found.hypervolume(worse, {"psnr": 0, "test_accuracy": 1.0}) == pytest.approx(5 * 0.1 / (25 * 0.3))


def test_the_hypervolume_with_a_cost_is_the_volume_of_boxes() -> None:
    rows = [setting("a", psnr=1, test_accuracy=0.5, bytes_up=2), setting("b", psnr=2, test_accuracy=0.5, bytes_up=1)]
    found = compute_front(rows, "psnr", "test_accuracy", "bytes_up")
    reference = {"psnr": 3, "test_accuracy": 0, "bytes_up": 3}
    ideal = {"psnr": 0, "test_accuracy": 1, "bytes_up": 0}
    assert found.hypervolume(reference, ideal) == pytest.approx((2 * 1 + 1 * 2 - 1) * 0.5 / 9)


def test_without_corners_the_volume_is_that_of_the_settings_own_range() -> None:
    two = compute_front(points((10, 0.5), (20, 0.9)), "psnr", "test_accuracy")
    assert two.hypervolume() == pytest.approx((2 * 0.1 * 1.1 - 0.1 * 0.1) / 1.1**2)
    scaled = compute_front(points((1000, 5), (2000, 9)), "psnr", "test_accuracy")
    assert scaled.hypervolume() == pytest.approx(two.hypervolume())
    assert compute_front(points((10, 0.9), (20, 0.5)), "psnr", "test_accuracy").hypervolume() == pytest.approx(1)
    assert compute_front(points((10, 0.9)), "psnr", "test_accuracy").hypervolume() == 1
    assert compute_front(points((10, 0.9), (20, 0.9)), "psnr", "test_accuracy").hypervolume() == pytest.approx(1)
    assert compute_front([], "psnr", "test_accuracy").hypervolume() == 0


def test_better_than_the_ideal_is_ideal_and_worse_than_the_reference_is_nothing() -> None:
    reference, ideal = {"psnr": 20, "test_accuracy": 0.5}, {"psnr": 10, "test_accuracy": 0.9}
    assert compute_front(points((5, 0.95)), "psnr", "test_accuracy").hypervolume(reference, ideal) == 1
    assert compute_front(points((5, 0.4)), "psnr", "test_accuracy").hypervolume(reference, ideal) == 0


def test_corners_have_to_make_a_box() -> None:
    found = compute_front(points((10, 0.5)), "psnr", "test_accuracy")
    with pytest.raises(UserError, match="ideal psnr"):
        found.hypervolume({"psnr": 0, "test_accuracy": 0}, {"psnr": 40, "test_accuracy": 1})
    with pytest.raises(UserError, match="the reference has no 'test_accuracy'"):
        found.hypervolume({"psnr": 40}, {"psnr": 0})
    with pytest.raises(UserError, match="both corners"):
        found.hypervolume({"psnr": 40, "test_accuracy": 0})


def test_a_settings_leakage_is_that_of_the_attack_that_gets_most() -> None:
    rows = [
        setting("noise", "dlg", {"sigma": 0.1}, psnr=12, mse=0.5, test_accuracy=0.9),
        setting("noise", "idlg", {"sigma": 0.1}, psnr=15, mse=0.6, test_accuracy=0.9),
        setting("noise", "idlg", {"sigma": 0.2}, psnr=9, mse=0.7, test_accuracy=0.9),
        setting("none", None, test_accuracy=0.95),
    ]
    assert [(s.attack, s.fields["sigma"]) for s in select_strongest(rows, "psnr")] == [("idlg", 0.1), ("idlg", 0.2)]
    assert [(s.attack, s.fields["sigma"]) for s in select_strongest(rows, "mse")] == [("dlg", 0.1), ("idlg", 0.2)]
    found = compute_front(rows, "psnr", "test_accuracy")
    assert [s.measures["psnr"].mean for s in found.settings] == [15, 9]
    assert names(found.unknown) == ["none"]
    named = compute_front(rows, "psnr", "test_accuracy", attack="dlg")
    assert [s.measures["psnr"].mean for s in named.settings] == [12]
    assert [(s.arm, s.fields) for s in named.unknown] == [("noise", {"sigma": 0.2}), ("none", {})]


def test_what_does_not_exist_is_named() -> None:
    with pytest.raises(UserError, match="did you mean 'psnr'"):
        compute_front([], "psrn", "test_accuracy")
    with pytest.raises(UserError, match="did you mean 'dlg'"):
        compute_front(points((1, 1)), "psnr", "test_accuracy", attack="dgl")


def test_a_front_of_nothing_is_empty() -> None:
    assert compute_front([], "psnr", "test_accuracy") == ParetoFront(("psnr", "test_accuracy"), [], [], [])
