"""Exports: CSV against the tables, LaTeX and Markdown as papers need them."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from matplotlib.figure import Figure

from rayfed.errors import UserError
from rayfed.evidence.figures import SHOWN
from rayfed.evidence.settings import MeanEstimate, group_settings
from rayfed.report.export.figures import run_charts, save_figure
from rayfed.report.export.tables import export_table
from rayfed.report.html.explorer import explore, format_interval, interval
from rayfed.report.html.trade_off import trade_off
from rayfed.report.text.figures import USELESS, cell_text
from rayfed.report.text.tables import OF_TWO, SINGLE, UNLIKE, grid
from rayfed.results.loading import open_results
from rayfed.store.schemas import TABLES
from tests.helpers.command import run
from tests.helpers.report_fixtures import make_run
from tests.helpers.result_fixtures import SIGMA, attacked, outcome, setting, small_run, small_sweep, swept_rows


def test_csv_has_every_row_and_value(tmp_path: Path) -> None:
    sweep = open_results(small_sweep(tmp_path).url)
    read = pd.read_csv(io.StringIO(export_table(sweep, "csv")), dtype={"trial": str})
    expected = sweep.frame("outcomes")
    assert list(read.columns) == list(expected.columns)
    pd.testing.assert_series_equal(read["psnr"], expected["psnr"])
    pd.testing.assert_series_equal(read[SIGMA], expected[SIGMA])
    assert len(read) == 24


def test_lists_in_csv_are_json(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {"arms": {"none": []}})
    folder.write_part("attacks", 0, [attacked("none", "dlg", psnr=9.0, knowledge=["defence", "code"])])
    [value] = pd.read_csv(io.StringIO(export_table(open_results(folder.url), "csv", "attacks")))["knowledge"]
    assert json.loads(value) == ["defence", "code"]


@pytest.mark.parametrize("format", ["csv", "latex", "markdown"])
@pytest.mark.parametrize("table", ["rounds", "clients", "attacks", "images", "privacy"])
def test_tables_are_exported_without_their_images(format: str, table: str, tmp_path: Path) -> None:
    text = export_table(open_results(make_run(str(tmp_path), {"none": []}, {"dlg": 1.0}).url), format, table)
    assert "arm" in text
    assert "PNG" not in text
    assert ("reconstructed" in text) is False


def test_markdown_has_a_row_a_setting_with_its_interval(tmp_path: Path) -> None:
    lines = export_table(open_results(small_sweep(tmp_path).url), "markdown").splitlines()
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == [
        "arm", "sigma", "attack", "test accuracy", "PSNR (dB)", "training time (s)", "sent by clients (MB)"
    ]  # fmt: skip
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:10]]
    assert rows[0] == ["none", "–", "dlg", "**0.9810 ± 0.0025**", "40.10 ± 0.25", "**10**", "0.001"]


def test_one_value_has_no_interval_but_one_over_its_rounds() -> None:
    row = outcome(psnr=20.0, train_seconds=3.7, train_seconds_half=1.6, epsilon=11.5)
    [one] = group_settings([row])
    told = {name: interval(name, one.measures[name]) for name in ("psnr", "train_seconds", "epsilon")}
    assert told == {"psnr": "20.0 dB", "train_seconds": "3.7 s (2.1 s to 5.3 s over its rounds)", "epsilon": "11.5"}
    assert format_interval("train_seconds", one.measures["train_seconds"]) == "2.1 s to 5.3 s over its rounds"


def test_two_values_stand_in_place_of_an_interval_of_one_degree_of_freedom() -> None:
    [two] = group_settings(
        [outcome(psnr=value, test_accuracy=0.5, repeat=place) for place, value in enumerate((33.4, 62.2))]
    )
    told = grid([two])
    assert cell_text("psnr", two.measures["psnr"]) == "48 (33, 62)"
    assert interval("psnr", two.measures["psnr"]) == "47.8 dB (33.4 dB, 62.2 dB)"
    assert told.note.startswith(OF_TWO.format("repeats"))
    page = explore([two], preferred=["psnr", "test_accuracy"])
    assert page.data(["none"])["entries"][0]["values"]["psnr"][1:3] == [None, None], "no bar"
    chart = trade_off(page, ["none"])
    assert chart is not None
    assert (chart.rows[0]["x_low"], "95 %" in chart.description) == (None, False)


@pytest.mark.parametrize("table", ["outcomes", "rounds"])
def test_markdown_cells_hold_no_html_and_end_no_cell(table: str, tmp_path: Path) -> None:
    arm = "<img src=x onerror=y> a|b & c\nd"
    text = export_table(open_results(make_run(str(tmp_path), {arm: [], "none": []}, {}).url), "markdown", table)
    assert "&lt;img src=x onerror=y> a&#124;b &amp; c d" in text
    assert "<" not in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_latex_is_booktabs_and_escaped(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {"arms": {"a_b & 50%": []}})
    folder.write_part("attacks", 0, [attacked("a_b & 50%", "my_dlg", psnr=math.inf)])
    text = export_table(open_results(folder.url), "latex")
    assert [rule for rule in ("toprule", "midrule", "bottomrule") if f"\\{rule}" in text] == [
        "toprule", "midrule", "bottomrule"
    ]  # fmt: skip
    assert r"a\_b \& 50\%" in text
    assert r"my\_dlg" in text
    assert SINGLE in text
    assert r"$\ge$100" in text
    swept = export_table(open_results(small_sweep(tmp_path).url), "latex")
    assert r"40.10 $\pm$ 0.25" in swept
    assert "95 \\%" in swept
    assert swept.isascii()
    [columns] = re.findall(r"begin{tabular}{(\w+)}", swept)
    assert columns == "lllrrrr"


def test_latex_fits_two_columns(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {"arms": {"none": [], "gaussian": []}})
    folder.write_part("attacks", 0, [attacked(arm, "idlg", psnr=20.0) for arm in ("none", "gaussian")])
    found = open_results(folder.url)
    narrow = export_table(found, "latex", columns={"arm": None, "psnr": None})
    wide, raw = export_table(found, "latex"), export_table(found, "latex", "attacks")
    for text, kind in ((narrow, "table"), (wide, "table*"), (raw, "table*")):
        assert text.startswith("% needs \\usepackage{booktabs,graphicx}\n\\begin{" + kind + "}\n\\centering\n")
        assert text.endswith("\\end{tabular}}\n\\end{" + kind + "}\n")
        assert text.count("\\resizebox{\\ifdim\\width>\\linewidth") == 1
    if shutil.which("pdflatex") is None:
        return
    document = "\\documentclass[twocolumn]{article}\\usepackage{booktabs,graphicx}\\begin{document}\n"
    (tmp_path / "t.tex").write_text(f"{document}{narrow}{wide}{raw}\\end{{document}}\n")
    done = subprocess.run(["pdflatex", "-halt-on-error", "t.tex"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout


@pytest.mark.parametrize("format", ["markdown", "latex"])
def test_what_is_proved_is_rounded_to_the_safe_side_and_what_is_not_is_a_dash(format: str, tmp_path: Path) -> None:
    folder, up, down = small_run(str(tmp_path), {}), 0.12300001, 0.45699999
    bounds = [field.name for field in TABLES["privacy"] if pa.types.is_floating(field.type)]
    assert {"epsilon", "delta", "rero_10", "rero_100", "rero_1000", "advantage"} == set(bounds)
    rows = [{"arm": "x", "rounds": 1} | dict.fromkeys(bounds, up), {"arm": "y", "rounds": 1}]
    folder.write_part("privacy", 0, rows)
    proved = {"arm": "x", "attack": "a", "defence": "d", "unit": "client", "chance": down, "present": up, "another": up}
    folder.write_part("proved", 0, [proved])
    private, other = (export_table(open_results(folder.url), format, table) for table in ("privacy", "proved"))
    assert (private.count("0.124"), other.count("0.124"), other.count("0.456")) == (len(bounds), 2, 1)
    assert "nan" not in private.lower()
    assert "None" not in private
    cells = [
        cell.strip() for cell in re.split(r"[|&]|\\\\", next(r for r in private.splitlines() if re.match(r"\W*y ", r)))
    ]
    assert cells.count("–" if format == "markdown" else "--") == len(TABLES["privacy"]) - 2


def test_attacks_that_do_not_apply_are_named_and_have_no_row(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {"arms": {"none": [], "masks": []}})
    silent = {"status": "not applicable", "message": "no text", "psnr": None, "label_accuracy": None}
    met = [attacked("none", "dlg", psnr=20.0), attacked("none", "tag", **silent), attacked("masks", "tag", **silent)]
    folder.write_part("attacks", 0, met)
    text = export_table(open_results(folder.url), "markdown")
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("|")][2:]
    assert [[word.strip() for word in row] for row in rows] == [["none", "dlg"], ["masks", "tag"]]


def test_what_does_not_exist_is_named(tmp_path: Path) -> None:
    sweep, single = open_results(small_sweep(tmp_path).url), open_results(small_run(str(tmp_path), {}).url)
    with pytest.raises(UserError, match="did you mean 'markdown'"):
        export_table(sweep, "markdwon")
    with pytest.raises(UserError, match="did you mean 'rounds'"):
        export_table(single, "csv", "round")
    with pytest.raises(UserError, match=r"no table 'rounds': .*outcomes"):
        export_table(sweep, "csv", "rounds")


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


def test_columns_have_the_users_order_and_headings_and_the_best_is_bold(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {"arms": {"a_1": [], "b": [], "c": []}})
    rows = [attacked(arm, "dlg", psnr=psnr) for arm, psnr in (("a_1", 30.0), ("b", 9.0), ("c", 9.0))]
    folder.write_part("attacks", 0, rows)
    chosen = "psnr=PSNR $\\downarrow$,arm=Defence"
    run("export", folder.url, "--format", "latex", "--columns", chosen, "--out", str(tmp_path / "t.tex"))
    text = (tmp_path / "t.tex").read_text()
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert lines == [r"PSNR $\downarrow$ & Defence \\", r"30 & a\_1 \\", r"\textbf{9} & b \\", r"\textbf{9} & c \\"]
    code, text = run("export", folder.url, "--format", "latex", "--columns", "psrn")
    assert (code, "did you mean 'psnr'" in text) == (2, True)
    code, text = run("export", folder.url, "--columns", "psnr")
    assert (code, "latex or markdown" in text) == (2, True)


def test_what_proves_nothing_is_marked_and_never_bold() -> None:
    weak = setting("noise", psnr=3.0)
    weak.rows[0]["verdict"] = "inconclusive"  # type: ignore[index]
    found = grid([setting("none", psnr=30.0), setting("prune", psnr=20.0), weak])
    assert [row[-1] for row in found.rows] == ["30", "20", "3†"]
    assert found.best == {(1, 2)}


def test_repeats_that_prove_nothing_or_collapsed_are_marked_and_not_compared() -> None:
    rows = [
        outcome(arm, seed=seed, repeat=seed, psnr=psnr, verdict=verdict, test_accuracy=accuracy, baseline_accuracy=0.1)
        for arm, psnr, verdicts, accuracies in (
            ("none", 30.0, ("leaks", "leaks", "leaks"), (0.9, 0.9, 0.9)),
            ("noise", 10.0, ("leaks", "inconclusive", "inconclusive"), (0.8, 0.8, 0.8)),
            ("clip", 12.0, ("leaks", "leaks", "leaks"), (0.9, 0.1, 0.9)),
        )
        for seed, (verdict, accuracy) in enumerate(zip(verdicts, accuracies, strict=True))
    ]
    found = grid(group_settings(rows), dict.fromkeys(("arm", "psnr")))
    assert found.rows == [["none", "30"], ["noise", "10¶"], ["clip§", "12"]]
    assert found.best == frozenset(), "one alone is compared"
    [entry] = [entry for entry in explore(group_settings(rows)).entries if entry.setting.arm == "noise"]
    assert entry.setting.inconclusive == 2


def test_means_that_are_printed_alike_are_a_tie_and_guessing_is_marked() -> None:
    arms = [("none", 0.1525), ("weak", 0.1549), ("low", 0.05)]
    settings = [
        replace(one, measures={"test_accuracy": MeanEstimate(mean, mean - 0.14, mean + 0.14, 2)})
        for name, mean in arms
        for one in [setting(name, attack=None)]
    ]
    settings[2].rows[0] |= {"test_accuracy": 0.05, "baseline_accuracy": 0.13}  # type: ignore[operator]
    found = grid(settings)
    assert [row[-1] for row in found.rows[:2]] == ["0.15 ± 0.14", "0.15 ± 0.14"]
    assert found.best == frozenset(), "all that are compared are alike"
    assert [row[0] for row in found.rows] == ["none", "weak", "low§"]
    assert USELESS in found.note


def test_means_are_compared_at_one_rounding_and_not_at_two() -> None:
    spread = [("clip", 5.447, 0.83), ("quantise", 5.492, 3.3), ("none", 9.0, 1.0)]
    found = grid(
        [
            replace(setting(arm), measures={"train_seconds": MeanEstimate(mean, mean - half, mean + half, 3)})
            for arm, mean, half in spread
        ]
    )
    assert [row[-1] for row in found.rows] == ["5.45 ± 0.83", "5.5 ± 3.3", "9.0 ± 1.0"]
    assert found.best == {(0, 2)}, "5.447 is 5.4 to one decimal, and not 5.5 by way of 5.45"


@pytest.mark.parametrize("table", ["outcomes", "paired"])
def test_an_unfinished_sweep_is_told_and_unlike_seeds_are_not_compared(table: str, tmp_path: Path) -> None:
    rows = [row for row in swept_rows() if (row["trial"], row["repeat"]) != ("0003", 2)]
    sweep = small_sweep(tmp_path, rows)
    sweep.files.write_text("status.json", json.dumps({"state": "interrupted", "trials_done": 11, "trials": 12}))
    code, output = run("export", sweep.url, "--format", "latex", "--table", table)
    assert (code, output.startswith("note: 11 of 12 trials ended: unfinished")) == (0, True), output
    [caption] = re.findall(r"caption{.*}", output)
    assert "11 of 12 trials ended: unfinished." in caption
    assert r"\textbf" not in output
    assert (UNLIKE in caption) == (table == "outcomes")
    assert UNLIKE not in export_table(open_results(small_sweep(tmp_path / "whole").url), "latex", table)
    assert run("export", sweep.url)[1].startswith("note: 11 of 12"), "the rows, too"


def test_pairs_have_the_measures_that_are_asked_for_and_an_accuracy_once(tmp_path: Path) -> None:
    url = small_sweep(tmp_path).url
    [*rows] = export_table(open_results(url), "csv", "paired").splitlines()
    assert sum("test_accuracy" in row for row in rows) == 3, "the accuracy of one training, under two attacks"
    text = export_table(open_results(url), "markdown", "paired", {"psnr": "PSNR"})
    cells = [[cell.strip() for cell in line.split("|")[2:4]] for line in text.splitlines() if line.startswith("|")][2:]
    assert cells == [["dlg", "PSNR"]] * 3 + [["idlg", "PSNR"]] * 3
    with pytest.raises(UserError, match="did you mean 'psnr'"):
        export_table(open_results(url), "markdown", "paired", {"psrn": None})


def test_a_figure_has_no_panel_for_what_is_everywhere_the_same() -> None:
    values = ((30.0, 0.9), (20.0, 0.8), (10.0, 0.7))
    same = [setting(str(i), psnr=psnr, ssim=0.5, mse=0.1 + i, test_accuracy=a) for i, (psnr, a) in enumerate(values)]
    chart = trade_off(explore(same, preferred=["psnr", "test_accuracy"]), ["0", "1", "2"])
    assert chart is not None
    assert {row["x"] for row in chart.rows} == {"psnr", "mse"} & set(SHOWN)
    one = trade_off(explore(same[:1], preferred=["psnr", "test_accuracy"]), ["0"])
    assert one is not None
    assert (one.panels, {row["x"] for row in one.rows}) == (1, {"psnr"})


def test_an_arm_of_which_nothing_is_drawn_is_named_and_not_in_the_legend() -> None:
    found = [setting(str(i), psnr=30.0 - i, test_accuracy=0.5 + 0.1 * i) for i in range(2)]
    chart = trade_off(explore(found, preferred=["psnr", "test_accuracy"]), ["0", "1", "soteria"])
    assert chart is not None
    assert [name for name, _ in chart.legend] == ["0", "1"]


@pytest.mark.parametrize(("measure", "expected"), [("psnr", "steps-post"), ("mse", "steps-pre")])
def test_the_front_has_steps(measure: str, expected: str) -> None:
    found = [setting(str(i), **{measure: 1.0 + i, "test_accuracy": a}) for i, a in enumerate((0.2, 0.5, 0.9))]
    chart = trade_off(explore(found, preferred=[measure, "test_accuracy"]), ["0", "1", "2"])
    assert chart is not None
    drawn = Figure()
    chart.draw(drawn)
    assert drawn.axes[0].lines[0].get_drawstyle() == expected


def test_what_broke_off_is_marked_and_counted_and_never_bold() -> None:
    broken = setting("noise", psnr=3.0, test_accuracy=0.9)
    broken.rows[0] |= {"without_result": 2, "attacked": 3}  # type: ignore[operator]
    found = grid(
        [setting("none", psnr=30.0, test_accuracy=0.8), setting("prune", psnr=20.0, test_accuracy=0.7), broken]
    )
    assert [row[-1] for row in found.rows] == ["30", "20", "3‡"]
    assert found.best == {(1, 3), (2, 2)}


def test_figures_are_drawn_from_the_tables_rows(tmp_path: Path) -> None:
    results = open_results(make_run(str(tmp_path)).url)
    charts = {chart.name: chart for chart in run_charts(results)}
    assert list(charts)[:2] == ["trade_off", "success_rates"]
    rounds = {(row["arm"], row["round"]): row["test_accuracy"] for row in results.table("rounds").to_pylist()}
    drawn = {(row["arm"], row["round"]): row["test_accuracy"] for row in charts["test_accuracy"].rows}
    assert drawn == {key: value for key, value in rounds.items() if value is not None}
    means = {(row["arm"], row["attack"]): row["psnr"] for row in results.outcomes().to_pylist()}
    shown = {(r["arm"], r["attack"]): r["x_mean"] for r in charts["trade_off"].rows if r["x"] == "psnr"}
    assert shown == pytest.approx(means)
    assert {row["x_over"] for row in charts["trade_off"].rows} == {"victims"}
    held = sum(results.table("partition")["count"].to_pylist())
    assert sum(row["samples"] for row in charts["label_mix"].rows) == held


def test_a_figure_has_truetype_fonts_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    chart = next(c for c in run_charts(open_results(make_run(str(tmp_path)).url)) if c.name == "test_accuracy")
    for name in ("a", "b"):
        save_figure(chart, 3.17, tmp_path / name)
    pdf, drawing = ((tmp_path / f"a.{ending}").read_bytes() for ending in ("pdf", "svg"))
    assert (pdf, drawing) == ((tmp_path / "b.pdf").read_bytes(), (tmp_path / "b.svg").read_bytes())
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    assert b"CreationDate" not in pdf
    assert b"<text" in drawing
    assert b">gaussian</text>" in drawing
    assert b"#0072b2" in drawing


@pytest.mark.engine
def test_the_command_writes_all_figures_with_their_rows(tmp_path: Path) -> None:
    for url in (make_run(str(tmp_path)).url, small_sweep(tmp_path).url):
        out = tmp_path / "figures" / Path(url).name
        code, output = run("export", url, "--figures", str(out), "--format", "latex", "--out", f"{out}.tex")
        assert (code, "trade_off" in output) == (0, True), output
        tables = {path.stem for path in out.glob("*.csv")}
        assert {path.name for path in out.iterdir()} == {f"{stem}.csv" for stem in tables} | {
            f"{stem}{wide}.{ending}" for stem in tables for wide in ("", "-wide") for ending in ("pdf", "svg")
        }
        assert all(len(pd.read_csv(path)) for path in out.glob("*.csv"))
        assert "booktabs" not in output
        assert "toprule" in Path(f"{out}.tex").read_text()
