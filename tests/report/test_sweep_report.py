"""The report of a sweep: its figures against the outcomes, what failed, its size, and that it stands alone."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from rayfed.cli import app
from rayfed.evidence.settings import group_settings
from rayfed.report.html.pictures import PicturePair, select_within
from rayfed.report.html.sweep import IMAGES, write_sweep_report
from rayfed.report.html.sweep_plots import plot_curves
from rayfed.report.text.guarantees import short_keys_text
from rayfed.results.sweep_folder import SweepFolder
from tests.helpers.report_fixtures import BATCH, Page, make_sweep

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


def test_every_setting_has_its_worst_images_over_all_repeats(sweep: SweepFolder, page: Page) -> None:
    figures = [dict(attrs) for attrs in page.figures]
    for entry in page.data()["entries"]:
        mine = [float(str(f["data-psnr"])) for f in figures if f["data-entry"] == str(entry["id"])]
        assert mine == sorted(mine, reverse=True)
        assert len(mine) == (0 if entry["attack"] is None else min(8, BATCH * (3 if entry["values"]["psnr"][1] else 1)))


def test_the_worst_image_is_a_leak_where_there_is_one(tmp_path: Path) -> None:
    sweep = make_sweep(str(tmp_path), sigmas=2, repeats=1, failed=0, stopped=0)

    def read_with_another_sample_as_near_in(trial: str) -> Page:
        folder = sweep.trial(f"trials/{trial}")
        folder.write_part("attacks", 0, [r | {"identified": 0.0} for r in folder.read_table("attacks").to_pylist()])
        return read(sweep)

    page = read_with_another_sample_as_near_in("0000-0")  # which has the highest PSNR
    assert "under arm noise" in next(alt for image in page.images if "Result of" in (alt := str(image["alt"])))


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


@pytest.mark.parametrize("values", [(0.001, 1.0), ("a", "b"), (0.1, 0.2, 0.3)])
def test_a_line_joins_three_values_or_more(values: tuple[Any, ...]) -> None:
    rows = [{"arm": "x", "attack": "a", "x": v, "psnr": p, "seed": p} for v in values for p in (1.0, 5.0)]
    [curve] = plot_curves(group_settings(rows, ["x"]), ["psnr"], ["x"])
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
    sweep.write_outcomes([])
    page = read(sweep)
    assert [kind for kind, _ in page.scripts] == [None]


def test_trials_whose_folders_are_gone_have_no_images(tmp_path: Path) -> None:
    sweep = make_sweep(str(tmp_path), sigmas=2, repeats=1, failed=0, stopped=0)
    sweep.files.fs.rm(f"{sweep.files.root}/trials", recursive=True)
    page = read(sweep)
    assert page.images == []
    assert len(page.data()["entries"]) == 3


def test_images_are_taken_setting_by_setting_until_the_page_is_full() -> None:
    pairs = [[PicturePair("x" * 10, "y" * 10, {"rank": rank, "setting": s}) for rank in range(3)] for s in range(2)]
    chosen = [(pair.row["rank"], pair.row["setting"]) for pair in select_within(pairs, 70)]
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
