"""Differences between arms on the same victims or seeds, against published examples and by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks.lora import difference
from rayfed.errors import UserError
from rayfed.evidence.compare import Unpaired, compare_results
from rayfed.evidence.paired import (
    SIGNIFICANCE,
    PairedDifference,
    PairGroup,
    compare_pairs,
    holm,
    min_wilcoxon,
    paired_table,
)
from rayfed.report.text.figures import cell_text
from rayfed.report.text.paired import few_pairs_text, paired_grid
from rayfed.results.loading import open_results
from tests.helpers.command import run
from tests.helpers.result_fixtures import attacked, small_run, small_sweep, swept_rows

SLEEP = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0], [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
"""Hours of sleep of ten patients under two drugs (Student 1908)."""
MAIZE = [6, 8, 14, 16, 23, 24, 28, 29, 41, -48, 49, 56, 60, -67, 75]
"""Differences of heights of cross- and self-fertilised maize (Darwin 1876), as in scipy's documentation."""
ARMS = {"none": [], "noise": ["gaussian"], "other": ["gaussian"]}


def group(arm: str, values: list[float]) -> PairGroup:
    return PairGroup(arm, arm, "dlg", "victim", {"psnr": dict(enumerate(values))})


def test_the_published_examples_come_out() -> None:
    [slept] = compare_pairs([group("first", SLEEP[0]), group("second", SLEEP[1])])
    assert slept.difference == pytest.approx(1.58)
    assert (slept.low, slept.high) == pytest.approx((0.7001142, 2.4598858))  # R's t.test(paired = TRUE)
    assert slept.t == pytest.approx(0.00283289)
    [grown] = compare_pairs([group("self", [0.0] * 15), group("cross", [float(each) for each in MAIZE])])
    assert grown.wilcoxon == pytest.approx(0.041259765625)
    assert holm([0.05, None, 0.01, 0.03, 0.02, 0.04]) == pytest.approx([0.09, None, 0.05, 0.09, 0.08, 0.09])  # R


def test_a_difference_that_is_no_evidence_is_marked() -> None:
    doubted = replace(group("b", SLEEP[1]), doubted=["psnr"])
    found = compare_pairs([group("a", SLEEP[0]), doubted, group("c", SLEEP[1])])
    assert [one.unproven for one in found] == [True, False]
    assert paired_table(found)["unproven"].to_pylist() == [True, False]
    shown = paired_grid(found)
    assert shown is not None
    assert [row[4] for row in shown.rows] == ["+1.58†", "+1.58"]


def test_the_pairs_of_a_run_know_the_verdict_of_its_arms(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {"arms": ARMS, "attacks": [{"name": "dlg"}]})
    rows = [
        attacked(arm, "dlg", psnr=30.0 if arm == "none" else 9.0, victim=victim, true_label=3, distortion=0.0)
        | {
            "above_baseline": 15.0 if arm == "none" else -3.0,
            "knowledge": [] if arm == "noise" else ["defence", "code"],
        }
        for arm in ARMS
        for victim in range(3)
    ]
    folder.write_part("attacks", 0, rows)
    found = {one.arm: one.unproven for one in open_results(folder.url).paired() if one.measure == "psnr"}
    assert found == {"noise": True, "other": False}


def test_shares_of_the_same_texts_are_compared_as_published() -> None:
    """Bentur et al. 2009, 21 children before and after a transplant, as Fagerland et al. 2013 have it, table 4."""
    before, after = [True] * 2 + [False] * 19, [True] + [False] + [True] * 7 + [False] * 12
    found = difference(after, before)
    assert (found.gained, found.lost) == (7, 1)
    assert found.p == pytest.approx(0.0703, abs=5e-5)
    assert found.value == pytest.approx(6 / 21)
    assert found.low < 0 < found.value < found.high
    other = difference(before, after)
    assert (other.p, other.low, other.high) == pytest.approx((found.p, -found.high, -found.low))
    assert difference(before, before).p == 1
    assert difference([True] * 20, [False] * 20).low > 0


def test_the_correction_is_over_the_arms_of_one_attack_and_measure() -> None:
    rest = [[value + 1.0 for value in SLEEP[1]], [value + 2.0 for value in SLEEP[1]]]
    found = compare_pairs([group("a", SLEEP[0]), group("b", SLEEP[1]), group("c", rest[0]), group("d", rest[1])])
    assert [one.t_holm for one in found] == holm([one.t for one in found])
    assert found[0].t_holm == found[0].t
    assert found[2].t_holm == pytest.approx(3 * (found[2].t or 0))


def test_what_does_not_differ_has_no_test_and_few_pairs_are_warned_of() -> None:
    alike = compare_pairs([group("a", [1, 2, 3]), group("b", [1, 2, 3]), group("c", [2, 3, 4])])
    assert [(one.difference, one.low, one.t, one.wilcoxon) for one in alike[:1]] == [(0, None, None, None)]
    assert (alike[1].difference, alike[1].t, alike[1].low) == (1, None, None)
    rounded = paired_grid([replace(alike[0], difference=9.3e-18, low=-0.05, high=0.05)])
    assert rounded is not None
    assert "0" in rounded.rows[0], "and no 9.252e-18, which is of rounding"
    with pytest.raises(UserError, match="did you mean"):
        compare_pairs([group("arm", [1.0])], "arms")


def victims(arm: str, psnr: list[float], label: int = 0) -> list[dict[str, Any]]:
    return [
        attacked(arm, "dlg", psnr=value, victim=client, true_label=label, label_accuracy=float(value > 20))
        for client, value in enumerate(psnr)
    ]


def make(tmp_path: Path, name: str = "small", **changes: Any) -> Any:
    folder = small_run(str(tmp_path), {"arms": ARMS, **changes}, name)
    rows = victims("none", [30, 20, 25, 22, 28, 24]) + victims("noise", [20, 16, 17, 14, 24, 19])
    folder.write_part("attacks", 0, rows + victims("other", [9, 9, 9, 9, 9, 9], label=7))
    return open_results(folder.url)


@pytest.mark.parametrize(
    ("pairs", "arms", "few"), [(5, 1, True), (6, 1, False), (6, 2, True), (7, 2, False), (3, 5, True)]
)
def test_the_minimum_of_the_rank_test_is_that_of_scipy(pairs: int, arms: int, few: bool) -> None:
    least = float(stats.wilcoxon(np.arange(1.0, pairs + 1)).pvalue) * arms
    assert min_wilcoxon(pairs, arms) == pytest.approx(min(1.0, least))
    assert (few_pairs_text(pairs, arms) is not None) == few == (least >= SIGNIFICANCE)


def test_a_run_is_paired_by_its_victims_and_others_are_said_to_be_none(tmp_path: Path) -> None:
    results = make(tmp_path)
    psnr = [one for one in results.paired() if one.measure == "psnr"]
    assert [(one.arm, one.reference, one.unit, one.pairs) for one in psnr] == [
        ("noise", "none", "victim", 6), ("other", "none", "victim", 0)
    ]  # fmt: skip
    assert psnr[0].difference == pytest.approx(-39 / 6)
    assert psnr[0].wilcoxon == 2 / 2**6
    assert psnr[0].t_holm == psnr[0].t  # an arm without pairs is none of those corrected for
    assert {one.reference for one in results.paired("noise")} == {"noise"}


def test_a_single_run_has_intervals_over_its_victims(tmp_path: Path) -> None:
    one = make(tmp_path).with_intervals()[1]
    psnr, labels = one.measures["psnr"], one.measures["label_accuracy"]
    assert (psnr.over, psnr.n, psnr.mean) == ("victims", 6, pytest.approx(110 / 6))
    assert cell_text("psnr", psnr) == "18.3 ± 3.7"  # t(5) = 2.5706, s = 3.5024
    assert (labels.low, labels.high) == pytest.approx((0.0042107, 0.6412346), abs=1e-6)  # Clopper-Pearson of 1 in 6
    assert cell_text("label_accuracy", labels) == "0.17 (0.00 to 0.64)"


def test_unequal_batches_keep_the_mean_over_samples(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {})
    rows = [attacked("none", "dlg", sample, psnr=10.0, victim=1) for sample in range(3)]
    folder.write_part("attacks", 0, [*rows, attacked("none", "dlg", psnr=20.0, victim=2)])
    psnr = open_results(folder.url).with_intervals()[0].measures["psnr"]
    assert (psnr.mean, psnr.n) == (12.5, 2)


def test_what_diverged_or_failed_is_in_no_pair_and_counted(tmp_path: Path) -> None:
    folder = small_run(
        str(tmp_path), {"arms": ARMS, "attacks": [{"name": "dlg"}, {"name": "analytic", "label": "rows"}]}
    )
    rows = victims("none", [30, 20, 25, 22]) + victims("noise", [20, 16, 17, 14])
    rows[5] |= {"status": "diverged"}
    rows[7] |= {"status": "failed", "psnr": None, "label_accuracy": None}
    nothing_fits = [row | {"attack": "rows", "status": "diverged", "psnr": 12.0} for row in rows]
    folder.write_part("attacks", 0, [*rows, *nothing_fits])
    results = open_results(folder.url)
    for against, sign in (("none", 1), ("noise", -1)):
        found = {one.attack: one for one in results.paired(against) if one.measure == "psnr"}
        assert (found["dlg"].pairs, found["dlg"].excluded, found["dlg"].difference) == (2, 2, -9 * sign), against
        assert (found["rows"].pairs, found["rows"].excluded) == (4, 0)  # a closed form has answered
    grid = paired_grid([one for one in results.paired() if one.measure == "psnr"])
    assert grid is not None
    assert [cells[3] for cells in grid.rows] == ["2‡ of 4", "4"]
    rows[4] |= {"status": "diverged"}
    rows[6] |= {"status": "diverged"}
    folder.write_part("attacks", 0, rows)
    nothing = [one for one in results.paired() if one.measure == "psnr"]
    assert [(one.pairs, one.excluded, one.difference, one.t) for one in nothing] == [(0, 4, None, None)]
    assert paired_grid(nothing) is not None


def test_a_seed_in_which_an_attack_failed_is_in_no_pair(tmp_path: Path) -> None:
    rows = swept_rows()
    next(row for row in rows if row["arm"] == "noise" and row["attack"] == "dlg")["without_result"] = 1
    found = open_results(small_sweep(tmp_path, rows).url).paired()
    [of_psnr, *_] = [one for one in found if one.attack == "dlg" and one.measure == "psnr" and one.arm.endswith("0.01")]
    [of_accuracy] = [
        one for one in found if one.attack is None and one.measure == "test_accuracy" and one.arm.endswith("0.01")
    ]
    assert (of_psnr.pairs, of_psnr.excluded) == (2, 1)
    assert (of_accuracy.pairs, of_accuracy.excluded) == (3, 0)


def test_a_sweep_is_paired_by_its_seeds(tmp_path: Path) -> None:
    found = {(one.attack, one.measure, one.arm): one for one in open_results(small_sweep(tmp_path).url).paired()}
    one = found["dlg", "psnr", "noise, sigma 0.1"]
    assert (one.unit, one.pairs, one.difference) == ("seed", 3, pytest.approx(-29))
    assert one.t is None  # all three differences are alike


def test_runs_beside_each_other_are_paired_where_their_victims_are_the_same(tmp_path: Path) -> None:
    first, second, third = make(tmp_path, "a"), make(tmp_path, "b"), make(tmp_path, "c", seed=5)
    found: list[PairedDifference] = compare_results([first, second]).paired
    assert {one.difference for one in found if one.arm.endswith(", none")} == {0}
    other = compare_results([first, third])
    assert (other.paired, other.unpaired) == ([], Unpaired(fields=("seed",)))
    code, output = run("compare", first.url, second.url, "--against", f"{first.name}, noise")
    assert (code, "paired differences" in output, "+6.5" in output) == (0, True, True), output
    code, output = run("compare", first.url, second.url, "--against", "noise")
    assert (code, "several settings" in output) == (2, True)
