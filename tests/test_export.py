"""Exports: CSV against the tables, LaTeX and Markdown as papers need them."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pandas as pd
import pytest

from rayfed.analysis.loading import load
from rayfed.errors import UserError
from rayfed.report.export import export
from tests.result_fixtures import SIGMA, attacked, small_run, small_sweep
from tests.test_cli import run
from tests.test_report import make_run


def test_csv_has_every_row_and_value(tmp_path: Path) -> None:
    sweep = load(small_sweep(tmp_path).url)
    read = pd.read_csv(io.StringIO(export(sweep, "csv")), dtype={"trial": str})
    expected = sweep.frame("outcomes")
    assert list(read.columns) == list(expected.columns)
    pd.testing.assert_series_equal(read["psnr"], expected["psnr"])
    pd.testing.assert_series_equal(read[SIGMA], expected[SIGMA])
    assert len(read) == 24


@pytest.mark.parametrize("format", ["csv", "latex", "markdown"])
@pytest.mark.parametrize("table", ["rounds", "clients", "attacks", "images", "privacy"])
def test_tables_are_exported_without_their_images(format: str, table: str, tmp_path: Path) -> None:
    text = export(load(make_run(str(tmp_path), {"none": []}, {"dlg": 1.0}).url), format, table)
    assert "arm" in text
    assert "PNG" not in text
    assert ("reconstructed" in text) is False


def test_markdown_has_a_row_a_setting_with_its_interval(tmp_path: Path) -> None:
    lines = export(load(small_sweep(tmp_path).url), "markdown").splitlines()
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == [
        "arm", "sigma", "attack", "test accuracy", "PSNR (dB)", "training time (s)", "sent by clients (MB)"
    ]  # fmt: skip
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:10]]
    assert rows[0] == ["none", "–", "dlg", "0.9810 ± 0.0025", "40.10 ± 0.25", "10 ± 0", "0.001 ± 0"]
    assert lines[-1] == "Mean and half the 95 % interval over 3 repeats."


@pytest.mark.parametrize("table", ["outcomes", "rounds"])
def test_markdown_cells_hold_no_html_and_end_no_cell(table: str, tmp_path: Path) -> None:
    arm = "<img src=x onerror=y> a|b & c\nd"
    text = export(load(make_run(str(tmp_path), {arm: [], "none": []}, {}).url), "markdown", table)
    assert "&lt;img src=x onerror=y> a&#124;b &amp; c d" in text
    assert "<" not in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_latex_is_booktabs_and_escaped(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {"arms": {"a_b & 50%": []}})
    folder.write_part("attacks", 0, [attacked("a_b & 50%", "my_dlg", psnr=math.inf)])
    text = export(load(folder.url), "latex")
    assert [rule for rule in ("toprule", "midrule", "bottomrule") if f"\\{rule}" in text] == [
        "toprule", "midrule", "bottomrule"
    ]  # fmt: skip
    assert r"a\_b \& 50\%" in text
    assert r"my\_dlg" in text
    assert "played once" in text
    assert r"$\ge$100" in text
    swept = export(load(small_sweep(tmp_path).url), "latex")
    assert r"40.10 $\pm$ 0.25" in swept
    assert "95 \\%" in swept
    assert swept.isascii()
    [columns] = re.findall(r"begin{tabular}{(\w+)}", swept)
    assert columns == "lllrrrr"


def test_what_does_not_exist_is_named(tmp_path: Path) -> None:
    sweep, single = load(small_sweep(tmp_path).url), load(small_run(str(tmp_path), {}).url)
    with pytest.raises(UserError, match="did you mean 'markdown'"):
        export(sweep, "markdwon")
    with pytest.raises(UserError, match="did you mean 'rounds'"):
        export(single, "csv", "round")
    with pytest.raises(UserError, match=r"no table 'rounds': .*outcomes"):
        export(sweep, "csv", "rounds")


def test_the_command_prints_or_writes(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {})
    code, output = run("export", folder.url, "--table", "rounds")
    assert (code, output.startswith("arm,round,train_loss")) == (0, True)
    code, output = run("export", folder.url, "--format", "markdown", "--out", str(tmp_path / "t.md"))
    assert (code, output) == (0, f"wrote {tmp_path / 't.md'}")
    assert (tmp_path / "t.md").read_text().startswith("| arm")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--format", "xlsx"], "csv, folder, latex, markdown"),
        (["--table", "atacks"], "did you mean 'attacks'"),
        (["--out", "/nowhere/at/all.csv"], "cannot write /nowhere/at/all.csv"),
    ],
)
def test_the_users_mistakes_end_with_2(options: list[str], expected: str, tmp_path: Path) -> None:
    code, output = run("export", small_run(str(tmp_path), {}).url, *options)
    assert (code, expected in output, "Traceback" in output) == (2, True, False), output
