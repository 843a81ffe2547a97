"""The report of a sweep: its figures against the outcomes, what failed, its size, and that it stands alone."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from rayfed.analysis.sweep_folder import SweepFolder
from rayfed.cli import app
from rayfed.evidence.settings import settings
from rayfed.evidence.verdicts import criterion_of
from rayfed.report.pictures import Pair, within
from rayfed.report.sweep import IMAGES, write_sweep_report
from rayfed.report.sweep_plots import curves
from rayfed.report.text import sweeps
from rayfed.report.text.guarantees import short_keys_text
from rayfed.report.text.sweeps import sweep_summary, sweep_verdicts
from tests.report_fixtures import BATCH, Page, make_sweep
from tests.result_fixtures import swept_rows

SIGMA = "arms.noise.defences.gaussian.sigma"


def read(sweep: SweepFolder) -> Page:
    write_sweep_report(sweep)
    page = Page(sweep.files.read_text("report.html"))
    assert page.open == []
    return page


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> SweepFolder:
    return make_sweep(str(tmp_path_factory.mktemp("sweeps")), sigmas=4, repeats=3)


@pytest.fixture(scope="module")
def page(sweep: SweepFolder) -> Page:
    return read(sweep)


def test_the_command_makes_it(sweep: SweepFolder) -> None:
    result = CliRunner().invoke(app, ["report", sweep.url])
    assert result.exit_code == 0, result.output
    assert "".join(result.output.split()).endswith("report.html")


def test_stands_alone_and_describes_its_images(page: Page) -> None:
    page.check_that_it_stands_alone()
    assert page.images
    assert all(image.get("alt") for image in page.images)


def test_every_attacked_setting_has_a_verdict(sweep: SweepFolder, page: Page) -> None:
    found = settings(sweep.outcomes().to_pylist(), sweep.fields)
    told = dict(sweep_verdicts([one for one in found if one.attack]))
    assert sum(int(sentence.partition(" of ")[0]) for sentence in told.values()) == 5
    assert told["leaks"].startswith("4 of 5: none (66.6 dB by idlg, baseline 61.6 dB); noise, sigma 0.001 (60.6 dB")
    assert all(sentence in page.text for sentence in told.values())


def test_a_verdict_has_the_closest_reconstruction_beside_a_guess() -> None:
    rows = [
        {"result": "leaks", "max_similarity": 17.8, "baseline_similarity": 14.3, "attack": "a", "psnr": 12.0},
        {"result": "leaks", "max_similarity": 17.1, "baseline_similarity": 11.0, "attack": "b", "psnr": 12.0},
        {
            "result": "not reconstructed",
            "max_similarity": 18.0,
            "baseline_similarity": 19.0,
            "attack": "c",
            "psnr": 18.0,
        },
    ]
    assert sweeps._figures(rows, "leaks") == " (17.8 dB by a, baseline 14.3 dB)"
    assert sweeps._figures(rows[2:], "inconclusive") == " (18.0 dB by c, baseline 19.0 dB)"
    assert sweeps._figures([rows[0] | {"max_similarity": None}], "leaks") == "", "as of outcomes of earlier versions"
    records = [
        {"result": "leaks", "max_similarity": 0.9, "baseline_similarity": 0.4, "attack": "a", "feature_accuracy": 0.9}
    ]
    assert sweeps._figures(records, "leaks") == " (90 % by a, baseline 40 %)"


def test_the_page_of_a_sweep_that_broke_off_names_what_was_not_played(tmp_path: Path) -> None:
    sweep = make_sweep(str(tmp_path), sigmas=2, repeats=1, failed=0, stopped=0)
    status = {"state": "interrupted", "trials_done": 2, "trials": 5, "unplayed": ["noise, sigma 1", "none"]}
    sweep.files.write_text("status.json", json.dumps(status))
    assert "3 of 5 trials are not finished: noise, sigma 1; none" in read(sweep).text
    sweep.files.write_text("status.json", json.dumps(status | {"trials_done": 5, "unplayed": []}))
    assert "trials are not finished" not in read(sweep).text


def test_a_leak_in_some_repeats_says_what_the_others_are() -> None:
    rows = [{"repeat": i, "verdict": state} for i, state in enumerate(("inconclusive", "leaks", "inconclusive"))]
    assert sweeps._in_some(rows, "leaks") == " (in 1 of 3 repeats; inconclusive in 2)"
    assert sweeps._in_some(rows[1:2], "leaks") == ""


def test_points_are_the_settings_with_their_means_and_intervals(sweep: SweepFolder, page: Page) -> None:
    rows = sweep.outcomes()
    entries = {entry["title"]: entry for entry in page.data()["entries"] if entry["finished"]}
    assert list(entries) == ["none", *(f"noise, sigma {sigma}" for sigma in ("0.001", "0.01", "0.1", "1"))]
    mine = rows.filter((pc.field(SIGMA) == 0.01) & (pc.field("status") == "finished"))
    mean, low, high, _ = entries["noise, sigma 0.01"]["values"]["psnr"]
    assert mean == pytest.approx(fmean(mine["psnr"].to_pylist()))
    half = 4.30265 * pc.stddev(mine["psnr"], ddof=1).as_py() / 3**0.5  # Student's t with two degrees of freedom
    assert (low, high) == (pytest.approx(mean - half, rel=1e-4), pytest.approx(mean + half, rel=1e-4))
    lone = entries["noise, sigma 1"]["values"]["psnr"]
    assert lone[1] is None


def test_trials_that_did_not_finish_stand_in_the_table_with_their_error(page: Page) -> None:
    unfinished = [entry for entry in page.data()["entries"] if not entry["finished"]]
    assert [entry["title"] for entry in unfinished] == ["noise, sigma 1", "noise, sigma 1"]
    assert "failed DataError: no images <b>here</b>" in page.text
    assert "13 trials finished, 1 stopped early, 1 failed" in page.text
    assert "0004-2 seed 2" in page.text


def test_every_setting_has_its_worst_images_over_all_repeats(sweep: SweepFolder, page: Page) -> None:
    figures = [dict(attrs) for attrs in page.figures]
    for entry in page.data()["entries"]:
        mine = [float(str(f["data-psnr"])) for f in figures if f["data-entry"] == str(entry["id"])]
        assert mine == sorted(mine, reverse=True)
        assert len(mine) == (0 if entry["attack"] is None else min(8, BATCH * (3 if entry["values"]["psnr"][1] else 1)))


def test_the_summary_names_the_worst_image_and_what_settings_cost(sweep: SweepFolder, page: Page) -> None:
    attacks = [row for n in range(3) for row in sweep.trial(f"trials/0000-{n}").read_table("attacks").to_pylist()]
    worst = max(row["psnr"] for row in attacks)
    assert f"under the setting none at a PSNR of {worst:.1f} dB" in page.text
    noise = [one for one in settings(sweep.outcomes().to_pylist(), [SIGMA]) if one.arm == "noise"]
    low, high = (f(one.measures["test_accuracy"].mean for one in noise) for f in (min, max))
    assert f"noise, 4 settings: test accuracy {100 * low:.1f} % to {100 * high:.1f} % (means over seeds)" in page.text


def test_the_worst_image_is_a_leak_where_there_is_one(tmp_path: Path) -> None:
    sweep = make_sweep(str(tmp_path), sigmas=2, repeats=1, failed=0, stopped=0)

    def read_with_another_sample_as_near_in(trial: str) -> Page:
        folder = sweep.trial(f"trials/{trial}")
        folder.write_part("attacks", 0, [r | {"identified": 0.0} for r in folder.read_table("attacks").to_pylist()])
        return read(sweep)

    page = read_with_another_sample_as_near_in("0000-0")  # which has the highest PSNR
    assert "idlg reconstructed an image of client" in page.text
    assert "under the setting noise, sigma 0.001 at a PSNR of" in page.text
    assert "under arm noise" in next(alt for image in page.images if "Result of" in (alt := str(image["alt"])))
    text = read_with_another_sample_as_near_in("0001-0").text
    defined, told = "LEAKS: at least one reconstruction", "No image was reconstructed"
    assert text.count(defined) == 1
    assert text.index(defined) < text.index(told) < text.index("under the setting none")


def test_the_worst_images_alone_are_those_that_have_a_picture(tmp_path: Path) -> None:
    """Of later repeats of an attack there is none, so one that comes nearer takes none from the page."""
    sweep = make_sweep(str(tmp_path), sigmas=2, repeats=1, failed=0, stopped=0)
    sweep.files.write_text("scenario.yaml", sweep.files.read_text("scenario.yaml") + "output: {images: worst}\n")
    assert {"none", "noise"} <= shown_arms(before := read(sweep))
    for name in sweep.trial_names():
        rows = (folder := sweep.trial(f"trials/{name}")).read_table("attacks").to_pylist()
        nearest = max(rows, key=lambda row: row["psnr"])
        folder.write_part("attacks", 0, [*rows, nearest | {"repeat": 1, "psnr": nearest["psnr"] + 1}])
    assert shown_arms(read(sweep)) == shown_arms(before)


def shown_arms(page: Page) -> set[str]:
    alts = (str(image["alt"]) for image in page.images)
    return {alt.partition("under arm ")[2].partition(",")[0] for alt in alts if "under arm" in alt}


def test_a_range_over_attacks_says_that_it_is_of_their_means() -> None:
    met = settings([row | {"max_psnr": row["psnr"]} for row in swept_rows() if row["arm"] == "none"])
    [said] = sweep_summary(met, None, criterion_of({}, []), None, ["none"])[0].lines
    assert "test accuracy 98.1 % (means over seeds), max PSNR 5.0 dB to 40.1 dB (means over seeds of each" in said


def test_every_swept_field_has_a_curve(page: Page) -> None:
    labels = [value for name, value in page.attributes if name == "aria-label" and value and " by arms." in value]
    assert labels == [f"PSNR and test accuracy by {SIGMA} in arm noise"]


@pytest.mark.parametrize("values", [(0.001, 1.0), ("a", "b"), (0.1, 0.2, 0.3)])
def test_a_line_joins_three_values_or_more(values: tuple[Any, ...]) -> None:
    rows = [{"arm": "x", "attack": "a", "x": v, "psnr": p, "seed": p} for v in values for p in (1.0, 5.0)]
    [curve] = curves(settings(rows, ["x"]), ["psnr"], ["x"])
    drawn = Figure()
    curve.chart.draw(drawn)
    [axes] = drawn.axes
    lines = [line for line in axes.lines if line.get_linestyle() != "None"]
    joined = [np.size(line.get_xdata()) for line in lines if line.get_transform() == axes.transData]
    assert joined == [len(values)] * (len(values) > 2)
    means = [line.get_transform().transform((0, 0)) for line in lines if len(lines) > 1]  # in their middles
    assert [axes.transData.inverted().transform(mean)[1] for mean in means] == pytest.approx([3.0] * len(means))
    assert len(means) == (0 if joined else len(values))


def test_a_sweep_under_way_and_one_that_has_just_begun(tmp_path: Path) -> None:
    sweep = make_sweep(str(tmp_path), sigmas=2, repeats=1, failed=0, stopped=0)
    rows = sweep.outcomes().to_pylist()
    sweep.write_outcomes(rows[:1])
    assert "1 trial finished" in read(sweep).text
    sweep.write_outcomes([])
    page = read(sweep)
    assert "No setting has a result yet" in page.text
    assert [kind for kind, _ in page.scripts] == [None]


def test_trials_whose_folders_are_gone_have_no_images(tmp_path: Path) -> None:
    sweep = make_sweep(str(tmp_path), sigmas=2, repeats=1, failed=0, stopped=0)
    sweep.files.fs.rm(f"{sweep.files.root}/trials", recursive=True)
    page = read(sweep)
    assert page.images == []
    assert len(page.data()["entries"]) == 3


def test_images_are_taken_setting_by_setting_until_the_page_is_full() -> None:
    pairs = [[Pair("x" * 10, "y" * 10, {"rank": rank, "setting": s}) for rank in range(3)] for s in range(2)]
    chosen = [(pair.row["rank"], pair.row["setting"]) for pair in within(pairs, 70)]
    assert chosen == [(0, 0), (0, 1), (1, 0)]


def test_swept_key_lengths_are_warned_of() -> None:
    assert len(short_keys_text({}, {512, 1024, 2048, 3072})) == 2


@pytest.mark.slow
def test_two_hundred_settings_stay_under_fifteen_megabytes(tmp_path: Path) -> None:
    sweep = make_sweep(str(tmp_path), sigmas=199, repeats=1, failed=0, stopped=0, pairs=2)
    page = read(sweep)
    size = len(sweep.files.read_bytes("report.html"))
    images = sum(len(str(image["src"])) for image in page.images)
    text = size - images
    print(f"{size / 1e6:.2f} MB with {images / 1e6:.2f} MB of images")
    assert len(page.data()["entries"]) == 200
    assert text + IMAGES < 15e6  # however many and large the images are


@pytest.mark.parametrize("secure", [False, True])
def test_a_secure_sweep_does_not_promise_its_trials_again(secure: bool, tmp_path: Path) -> None:
    sweep = make_sweep(str(tmp_path), 2, 1)
    text = sweep.files.read_text("scenario.yaml")
    sweep.files.write_text("scenario.yaml", f"{text}privacy: {{secure: {str(secure).lower()}}}\n")
    write_sweep_report(sweep)
    assert ("give the same trials" in sweep.files.read_text("report.html")) is not secure
