"""What a page shows of clients' data: planted in a run's tables, searched for in the page, base64 decoded too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from rayfed.core.reasons import Reason
from rayfed.data.sets import TABLE, is_public
from rayfed.data.sets.digits import Digits
from rayfed.report import samples
from rayfed.report.export.redaction import REDACTED, redact, write_redacted
from rayfed.report.export.share import copy_shareable
from rayfed.report.html.run import write_report
from rayfed.report.html.sweep import write_sweep_report
from rayfed.report.text.formats import LEFT_OUT
from rayfed.report.text.reasons import REASONS
from rayfed.results.loading import open_results
from rayfed.results.sweep_folder import SweepFolder
from rayfed.store.schemas import WANT_OF_TIME
from tests.helpers.command import run
from tests.helpers.redaction_fixtures import (
    COLUMN,
    KEY,
    ON_PAGE,
    ROW,
    SECRET,
    decoded,
    on,
    plant,
    planted,
)
from tests.helpers.report_fixtures import Page, make_run, make_sweep


@pytest.mark.engine
def test_a_redacted_page_has_nothing_that_was_planted(tmp_path: Path) -> None:
    folder = planted(tmp_path, "all")
    write_report(folder)
    plain = folder.read_text("report.html")
    assert on(plain) == set(ON_PAGE)
    assert plain.count(SECRET) > 5
    code, output = run("report", folder.url, "--redact")
    assert (code, output.strip()) == (0, f"{folder.url}/{REDACTED}")
    page = folder.read_text(REDACTED)
    assert SECRET.encode() not in decoded(page)
    assert SECRET.replace("-", "_") not in page
    assert "471147" not in page
    assert Page(page).images == []
    assert str(tmp_path) not in page
    for stays in ("Redacted.", "60.0 dB", "sigma 0.01", "idlg", "gaussian", "size: 8", "image_folder"):
        assert stays in page
    assert folder.read_text("report.html") == plain


@pytest.mark.engine
def test_a_redacted_page_of_a_sweep_has_nothing_either(tmp_path: Path) -> None:
    sweep = make_sweep(str(tmp_path), 2, 1)
    plant(sweep.trial("trials/0000-0"), "all")
    scenario, rows = sweep.scenario, sweep.outcomes().to_pylist()
    scenario["data"] = {"name": "table", "path": f"/clinic/{SECRET}.csv"}
    scenario["sweep"]["fields"]["data.path"] = [f"{SECRET}.csv"]
    sweep.files.write_text("scenario.yaml", yaml.safe_dump(scenario))
    spoilt = {"error": f"ValueError: {SECRET}", "data.path": f"{SECRET}.csv", "defences": f"refiner (path {SECRET})"}
    sweep.write_outcomes([row | spoilt for row in rows])
    write_sweep_report(sweep)
    assert SECRET in sweep.files.read_text("report.html")
    page = Path(write_redacted(open_results(sweep.url))).read_text()
    assert SECRET.encode() not in decoded(page)
    assert Page(page).images == []
    assert "sigma 0.001" in page


TEXT = {k: v for k, v in ROW.items() if k not in ("psnr", "mse")} | {"token_accuracy": 1.0}


@pytest.mark.engine
def test_the_columns_of_a_table_have_numbers_for_names(tmp_path: Path) -> None:
    folder = planted(tmp_path)
    assert COLUMN in str(folder.read_table("attacks").to_pylist())
    with redact(open_results(folder.url)) as copy:
        rows = copy.read_table("attacks").to_pylist()
    assert COLUMN not in str(rows)
    assert rows[0]["columns"] == [{"name": "column 1", "found": True, "guess": None}]


@pytest.mark.parametrize(("images", "times"), [("none", 0), ("blurred", 0), (None, 2), ("worst", 4), ("all", 4)])
def test_texts_are_shown_as_far_as_the_scenario_allows(images: str | None, times: int, tmp_path: Path) -> None:
    folder = make_run(str(tmp_path), {"none": []}, {})
    scenario = {"name": "t", "arms": {"none": []}, "data": {"name": "text", "root": "x"}, "output": {"images": images}}
    folder.write_text("scenario.yaml", yaml.safe_dump(scenario))
    folder.write_part("attacks", 7, [TEXT | {"above_baseline": 0.5, "identified": 1.0}])
    folder.write_part("texts", 7, [KEY | {"true": [SECRET], "reconstructed": [SECRET], "right": [True]}])
    write_report(folder)
    page = folder.read_text("report.html")
    assert page.count(SECRET) == times, "in the summary and among the samples"
    assert ("not known to be public" in page) == (images != "none")


SHOWN: dict[str | None, set[str]] = {
    "none": set(), "blurred": set(), None: {"reconstructed", "snapshot"}, "worst": set(ON_PAGE), "all": set(ON_PAGE),
}  # fmt: skip


@pytest.mark.engine
@pytest.mark.parametrize("images", SHOWN)
def test_images_are_shown_as_far_as_the_scenario_allows(images: str | None, tmp_path: Path) -> None:
    folder = planted(tmp_path, images)
    write_report(folder)
    page = folder.read_text("report.html")
    assert on(page) == SHOWN[images]
    assert bool(Page(page).images) == (images != "none")
    assert ("not known to be public" in page) == (images != "none")
    said = samples.find_warning(folder)
    assert said is not None
    assert ("not known to be public" in said) == (images != "none")
    assert "snapshots" in said, "in the tables, whatever the page shows"
    assert (f"class {SECRET}" in page) == (images in ("worst", "all"))


@pytest.mark.engine
def test_the_worst_is_one_of_each_arm(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path))
    folder.write_text("scenario.yaml", folder.read_text("scenario.yaml") + "output: {images: worst}\n")
    write_report(folder)
    shown = re.findall(r'<figure data-entry="\d+" data-arm="(\w+)"', folder.read_text("report.html"))
    assert sorted(shown) == ["gaussian", "none", "prune"]


def test_public_data_are_shown_without_a_warning_and_no_others(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path), {"none": []}, {"dlg": 1.0})
    assert samples.make_sample_filter([{"data": {"name": "digits"}}]).mode == "all"
    assert samples.find_warning(folder) is None
    private = (
        "image_folder", "image_table", "image_masks", "hugging_face", "table", "text_table", "words", "arrow", "parquet"
    )  # fmt: skip
    given = {"root": "r", "path": "p", "table": "t", "train": "t", "test": "t"}
    assert [
        name for name in TABLE if not is_public({"name": name, **given, "root": None if name == "text" else "r"})
    ] == [*private]
    assert is_public("photos")
    assert is_public({"name": "text", "root": None, "public": 0.1})
    assert not is_public({"name": "text", "root": "letters"})


def test_data_of_the_users_are_never_public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """\
from rayfed.data.sets.digits import Digits
from rayfed.registry import component

@component
class Mine(Digits):
    is_public = True
"""
    (tmp_path / "ward_data.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_public("ward_data:Mine")
    assert samples.make_sample_filter([{"data": {"name": "ward_data:Mine"}}]).mode == "reconstructed"
    monkeypatch.setattr(Digits, "is_public", False)  # the component says it, not its name
    assert not is_public("digits")
    assert not is_public({"name": "mnist", "root": "r", "of_another_version": 1, "size": 0})


def test_a_sweep_over_data_is_as_private_as_one_of_its_trials(tmp_path: Path) -> None:
    sweep = make_sweep(str(tmp_path), 2, 1)
    assert samples.make_sweep_filter(sweep).truth
    scenario = sweep.scenario
    scenario["sweep"]["fields"]["data"] = ["digits", {"name": "table"}]
    sweep.files.write_text("scenario.yaml", yaml.safe_dump(scenario))
    trial = sweep.trial("trials/0000-0")
    trial.write_text("scenario.yaml", yaml.safe_dump({**trial.scenario(), "data": {"name": "table", "path": "x"}}))
    assert not samples.make_sweep_filter(SweepFolder(sweep.files)).truth
    assert samples.find_warning(sweep.files) is not None


def test_no_reason_of_a_sweep_has_a_message_of_an_attack(tmp_path: Path) -> None:
    sweep = make_sweep(str(tmp_path), 2, 1)
    rows = sweep.outcomes().to_pylist()
    rows[0]["reason"] = f"dlg failed: KeyError: {SECRET}"
    rows[1] |= {"doubt": Reason.NO_ADAPTIVE_ATTACK, "reason": f"dlg failed: KeyError: {SECRET}"}
    sweep.write_outcomes(rows)
    with copy_shareable(open_results(sweep.url), str(tmp_path / "copy")) as copy:
        found = SweepFolder(copy).outcomes()["reason"].to_pylist()[:3]
    assert found == [LEFT_OUT, REASONS[Reason.NO_ADAPTIVE_ATTACK], None]


def test_messages_that_follow_from_other_columns_stay(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path), {"none": []}, {})
    rows = [
        KEY | {"victim": 0, "status": "not played", "message": f"{WANT_OF_TIME} {SECRET}", "batch_size": 1},
        KEY | {"victim": 1, "status": "ok", "reason": "masked", "message": SECRET, "batch_size": 1},
    ]
    folder.write_part("attacks", 7, rows)
    with copy_shareable(open_results(folder.url), str(tmp_path / "copy")) as copy:
        assert copy.read_table("attacks")["message"].to_pylist() == [WANT_OF_TIME, REASONS[Reason.MASKED]]


def test_no_message_of_an_attack_leaves_with_a_copy(tmp_path: Path) -> None:
    folder = planted(tmp_path / "own")
    with copy_shareable(open_results(folder.url), str(tmp_path / "copy")) as copy:
        for table in ("attacks", "inferences"):
            assert SECRET in str(folder.read_table(table).to_pylist())
            assert SECRET not in str(copy.read_table(table).to_pylist())


def test_the_terminal_warns_of_what_leaves(tmp_path: Path) -> None:
    folder = planted(tmp_path)
    folder.write_part("texts", 7, [KEY | {"true": [SECRET], "reconstructed": [SECRET], "right": [True]}])
    assert "not known to be public" in run("report", folder.url)[1]
    assert "not known to be public" in run("export", folder.url, "--table", "texts")[1]
    assert "not known to be public" not in run("export", folder.url, "--table", "rounds")[1]
