"""Success rates against shares counted by hand and against PoRS."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pandas as pd
import pytest

import rayfed
from rayfed.errors import UserError
from rayfed.evidence.success import CURVE_METRICS, group_by_attack, success_curve, success_share
from rayfed.report.export.tables import export_table
from rayfed.report.html.success_plots import _stairs, success_rates
from rayfed.report.html.svg import svg
from rayfed.results.loading import Run, Sweep
from tests.helpers.result_fixtures import attacked, small_run, small_sweep, trial_run

PSNR = [10.0, 20.0, 20.0, math.inf, None]
MSE = [0.1, 0.01, 0.01, 0.0, None]


def rows(arm: str = "none", attack: str = "dlg") -> list[dict[str, object]]:
    """Five attacked images, of one of which nothing came out."""
    return [attacked(arm, attack, i, psnr=p, mse=m, ssim=None) for i, (p, m) in enumerate(zip(PSNR, MSE, strict=True))]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = small_run(str(tmp_path), {"arms": {"none": [], "noise": ["gaussian"]}})
    folder.write_part("attacks", 0, [*rows(), *rows("noise", "idlg")[:1]])
    found = rayfed.load(folder.url)
    assert isinstance(found, Run)
    return found


def test_a_curve_has_the_shares_counted_by_hand() -> None:
    [group] = group_by_attack(rows())
    psnr, mse = success_curve(group, "psnr"), success_curve(group, "mse")
    assert psnr is not None
    assert mse is not None
    assert list(zip(psnr.thresholds, psnr.shares, strict=True)) == [(10, 0.8), (20, 0.6), (100, 0.2)]
    assert list(zip(mse.thresholds, mse.shares, strict=True)) == [(0.1, 0.8), (0.01, 0.6), (0, 0.2)]
    assert success_curve(group, "ssim") is None
    asked = success_curve(group, "psnr", [30, 5, 20])
    assert asked is not None
    assert list(zip(asked.thresholds, asked.shares, strict=True)) == [(5, 0.8), (20, 0.6), (30, 0.2)]
    with pytest.raises(UserError, match="'psrn' has no success rates: did you mean 'psnr'"):
        success_curve(group, "psrn")


@pytest.mark.parametrize(("metric", "thresholds"), [("psnr", [5, 10, 15, 20, 99]), ("mse", [1, 0.1, 0.05, 0.01, 1e-9])])
def test_pors_is_a_point_of_the_curve(metric: str, thresholds: list[float]) -> None:
    [group] = group_by_attack(rows())
    found = success_curve(group, metric, thresholds)
    assert found is not None
    assert found.thresholds == thresholds
    assert found.shares == [success_share(group.rows, metric, threshold) for threshold in thresholds]


def test_a_run_has_them_as_a_table(run: Run) -> None:
    found = run.success_rates("psnr", thresholds=[15]).to_pylist()
    assert [(row["setting"], row["attack"], row["threshold"], row["images"], row["share"]) for row in found] == [
        ("none", "dlg", 15, 5, 0.6),
        ("noise", "idlg", 15, 1, 0.0),
    ]
    assert {row["batch_size"] for row in found} == {2}
    every = run.frame("success_rates")
    assert set(every["metric"]) == {"psnr", "mse"}
    assert (every.groupby(["setting", "attack", "metric"])["share"].apply(lambda s: s.is_monotonic_decreasing)).all()
    read = pd.read_csv(io.StringIO(export_table(run, "csv", "success_rates")))
    pd.testing.assert_frame_equal(read, every, check_dtype=False)


def test_a_sweep_counts_the_images_of_all_repeats(tmp_path: Path) -> None:
    folder = small_sweep(tmp_path)
    for repeat in range(3):
        trial_run(folder, f"trials/0001-{repeat}").write_part("attacks", 0, rows("noise")[repeat : repeat + 2])
    sweep = rayfed.load(folder.url)
    assert isinstance(sweep, Sweep)
    found = sweep.success_rates("psnr", thresholds=[15, 50]).to_pylist()
    assert [(row["setting"], row["attack"], row["images"], row["share"]) for row in found] == [
        ("noise, sigma 0.01", "dlg", 6, pytest.approx(5 / 6)),
        ("noise, sigma 0.01", "dlg", 6, pytest.approx(1 / 6)),
    ]
    assert "success_rates" in sweep.tables


@pytest.mark.parametrize(
    ("metric", "values", "line"),
    [
        ("psnr", [70.0, 127.0], ([0.0, 60.0, 60.0], [1.0, 1.0, 1.0])),
        ("psnr", [30.0, 127.0], ([30.0, 30.0, 60.0, 60.0], [1.0, 1.0, 0.5, 0.5])),
        ("mse", [1e-12, 1e-9], ([1.0, 1e-6, 1e-6], [1.0, 1.0, 1.0])),
    ],
)
def test_copies_that_are_exact_to_any_eye_pass_the_hardest_threshold_shown(
    metric: str, values: list[float], line: tuple[list[float], list[float]]
) -> None:
    [met] = group_by_attack([attacked("none", "dlg", **{metric: value}) for value in values])
    found = success_curve(met, metric)
    assert found
    assert _stairs(found, [found]) == line


def test_the_chart_has_a_panel_a_metric_and_a_dash_an_attack() -> None:
    found = success_rates([*rows(), *rows("noise", "idlg")], ["none", "noise"], {"psnr": 15})
    assert found is not None
    assert [attack for attack, _ in found.attacks] == ["dlg", "idlg"]
    assert all(f"var(--series-{arm})" in svg(found.chart) for arm in (0, 1))
    assert success_rates([attacked("none", "ggl", psnr=None)], ["none"], {}) is None
    assert set(CURVE_METRICS) >= {"psnr", "ssim", "mse"}
