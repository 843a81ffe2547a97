"""Statements: the same from the folder alone, nothing read low, nothing of a client in a redacted one."""

from __future__ import annotations

import json
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rayfed.report.html.unscored import write_unscored
from rayfed.report.statement.about import QUESTIONS
from rayfed.report.statement.content import Statement, StatementSection, StatementTable
from rayfed.report.statement.page import as_html, as_markdown, write_statement
from rayfed.results.loading import open_results
from rayfed.store.folder import RunFolder
from tests.helpers.command import run
from tests.helpers.redaction_fixtures import KEY, REBUILT, SECRET, TRUE, on, planted
from tests.helpers.report_fixtures import Page, make_run
from tests.helpers.result_fixtures import attacked, small_run, small_sweep

ANSWERS = "system: A ward | with <b>tags</b>\npeople: 40 patients\n"


def of(folder: RunFolder) -> Statement:
    return Statement(folder, {}, folder)


def section(statement: Statement, title: str) -> StatementSection:
    return next(one for one in statement.sections if one.title == title)


def words(part: StatementSection) -> str:
    return "\n".join(
        "\n".join(" | ".join(row) for row in block.rows) if isinstance(block, StatementTable) else str(block)
        for block in part.blocks
    )


def rates(folder: RunFolder) -> dict[tuple[str, str], list[str]]:
    table = next(block for block in section(of(folder), "Reconstructions").blocks if isinstance(block, StatementTable))
    return {(row[0], row[1]): list(row[2:]) for row in table.rows}


def test_a_copy_of_the_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path / "first"))
    (tmp_path / "about.yaml").write_text(ANSWERS)
    environment = {"started": "2025-03-01", "command": f"rayfed launch {tmp_path}", "search_path": [str(tmp_path)]}
    folder.write_text("environment.json", json.dumps({**environment, "rayfed": "0.2.0"}))
    pages = [Path(page).read_bytes() for page in write_statement(folder, tmp_path / "about.yaml")]
    shutil.move(folder.root, tmp_path / "elsewhere")
    (tmp_path / "about.yaml").unlink()
    code, output = run("statement", str(tmp_path / "elsewhere"))
    assert code == 0, output
    assert [Path(page).read_bytes() for page in output.split()] == pages
    assert b"40 patients" in pages[0]
    assert all(str(tmp_path).encode() not in page for page in pages)


def test_both_pages_say_the_same_and_the_html_needs_and_runs_nothing(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path))
    statement = Statement(folder, {"system": "A ward | with <b>tags</b>"}, folder)
    page, text = Page(as_html(statement)), as_markdown(statement)
    page.check_that_it_stands_alone()
    assert page.open == page.scripts == []
    for part in statement.sections:
        assert part.title in page.text
        assert part.title in text
    assert "A ward | with <b>tags</b>" in page.text
    assert "A ward &#124; with &lt;b>tags" in text
    assert len(page.images) == text.count("data:image/png") == 2


def test_what_the_user_did_not_say_is_not_given(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path))
    told = as_markdown(Statement(folder, {"people": "40 patients"}, folder))
    assert told.count("NOT GIVEN") == len(QUESTIONS) - 1


def test_a_file_of_answers_that_is_not_there_is_named_plainly(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path))
    code, output = run("statement", folder.url, "--about", "MISSING")
    assert (code, "--about MISSING" in output) == (2, True), output
    (tmp_path / "latin.yaml").write_bytes(b"system: caf\xe9")
    for given, said in ((tmp_path, "Is a directory"), (tmp_path / "latin.yaml", "UTF-8")):
        code, output = run("statement", folder.url, "--about", str(given))
        assert (code, said in output, "Errno" in output) == (2, True, False), output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sistem: A ward", "'system'"),
        ("- A ward", "key: text"),
        ("system: [a, b]", "give a text"),
        ("a: b: c", "not valid YAML"),
    ],
)
def test_answers_to_what_nobody_asks_are_refused(tmp_path: Path, text: str, said: str) -> None:
    folder = make_run(str(tmp_path))
    (tmp_path / "about.yaml").write_text(text)
    code, output = run("statement", folder.url, "--about", str(tmp_path / "about.yaml"))
    assert (code, said in output) == (2, True), output
    assert not folder.exists("about.yaml")


def test_rates_have_exact_intervals_and_are_of_what_was_measured_alone(tmp_path: Path) -> None:
    arms: dict[str, Any] = {
        "none": [],
        "noise": [{"name": "gaussian", "sigma": 1.0}],
        "prune": ["prune"],
        "odd": ["prune"],
    }
    folder = small_run(str(tmp_path), {"arms": arms, "data": {"name": "digits"}})
    leaked = [attacked("none", "dlg", victim=v, psnr=30.0) for v in range(8)]
    held = [attacked("noise", "dlg", victim=v, psnr=5.0) for v in range(8)]
    short = [attacked("prune", "dlg", victim=v, psnr=None, status="not played", message="no time") for v in range(8)]
    failed = [attacked("odd", "dlg", victim=v, psnr=None, status="failed", message="KeyError: 3") for v in range(8)]
    folder.write_part("attacks", 0, [*leaked, *held, *short, *failed])
    found = rates(folder)
    # Clopper and Pearson of 8 of 8 and 0 of 8 in closed form: 0.025^(1/8) and its complement
    assert found["none", "2"][:3] == ["8 of 8", "100.0 %", f"{100 * 0.025 ** (1 / 8):.1f} % to 100.0 %"]
    assert found["noise", "2"][:3] == ["0 of 8", "0.0 %", f"0.0 % to {100 * (1 - 0.025 ** (1 / 8)):.1f} %"]
    assert found["prune", "2"][1:3] == found["odd", "2"][1:3] == ["NOT MEASURED", "–"]
    unmeasured = words(section(of(folder), "Not measured"))
    assert "KeyError: 3" in unmeasured


def test_an_unfinished_run_has_no_rate_of_what_was_not_recovered(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {"arms": {"none": [], "prune": ["prune"]}})
    folder.write_part("attacks", 0, [attacked("none", "dlg", psnr=30.0), attacked("prune", "dlg", psnr=5.0)])
    assert rates(folder)["prune", "2"][1] == "0.0 %"
    folder.write_text("status.json", json.dumps({"state": "failed", "rounds_done": 0, "rounds": 1, "error": "broken"}))
    assert rates(folder)["prune", "2"][1] == "NOT MEASURED"
    assert rates(folder)["none", "2"][0] == "1 of 1", "a leak is one whatever came after"


def test_attackers_are_tested_where_one_has_answered(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {"arms": {"none": []}, "attacks": [{"name": "dlg"}, {"name": "imprint"}]})
    unable = attacked("none", "imprint", status="not applicable", message="no such layer", observes="update")
    folder.write_part("attacks", 0, [attacked("none", "dlg", psnr=30.0, knowledge=["labels"]), unable])
    tested, *_ = section(of(folder), "Attackers").blocks
    assert isinstance(tested, StatementTable)
    assert tested.rows == [["the gradient of 2 samples and the labels", "dlg"]]


def test_a_table_s_hash_is_what_sha256sum_says(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path))
    told = words(section(of(folder), "Hashes"))
    command = "sha256sum attacks/*.parquet | sha256sum"
    done = subprocess.run(["sh", "-c", command], cwd=folder.root, capture_output=True, text=True, check=True)
    assert f"Table attacks | {done.stdout.split()[0]}" in told
    assert "Code | not recorded by this run" in told
    part = Path(folder.root, "attacks", "part-00000.parquet")
    pq.write_table(pq.read_table(part).slice(1), part)
    assert words(section(of(folder), "Hashes")) != told


def test_a_redacted_statement_has_hashes_of_the_worst_sample_and_nothing_of_a_client(tmp_path: Path) -> None:
    folder = planted(tmp_path, "all")
    plain = [Path(page).read_text() for page in write_statement(folder)]
    assert all({"true", "reconstructed"} <= on(page) for page in plain)
    assert "statement RUN --redact" in plain[0]
    code, output = run("statement", folder.url, "--redact")
    assert code == 0, output
    for page in output.split():
        assert "redacted" in page
        text = Path(page).read_text()
        assert on(text) == set()
        assert SECRET not in text
        assert SECRET.replace("-", "_") not in text
        assert sha256(TRUE).hexdigest() in text
        assert sha256(REBUILT).hexdigest() in text
    assert open_results(folder.url).scenario["data"]["root"].endswith(SECRET), "the run itself stays as it is"


def test_a_redacted_statement_has_no_hash_of_words(tmp_path: Path) -> None:
    """Of a row of a table it is found in a second by trying values."""
    folder, row = planted(tmp_path, "all"), ["age 24", "stage B"]
    folder.write_part("texts", 7, [KEY | {"true": row, "reconstructed": row}])
    told = sha256("\n".join(row).encode()).hexdigest()
    assert all(told in Path(page).read_text() for page in write_statement(folder))
    code, output = run("statement", folder.url, "--redact")
    assert code == 0, output
    assert not any(told in Path(page).read_text() for page in output.split())


def test_data_that_are_not_public_show_their_truth_by_hash_alone(tmp_path: Path) -> None:
    html, _ = write_statement(planted(tmp_path))
    assert on(Path(html).read_text()) == {"reconstructed"}


def test_there_is_no_statement_on_a_sweep_or_on_what_nobody_scored(tmp_path: Path) -> None:
    sweep = small_sweep(tmp_path)
    code, output = run("statement", sweep.files.url)
    assert (code, "trials/" in output) == (2, True), output
    folder = RunFolder.create(str(tmp_path), "replay")
    write_unscored(folder, "Attacks", [], [])
    code, output = run("statement", folder.url)
    assert (code, "NOT MEASURED" in output) == (2, True), output


def test_membership_inference_is_a_table_with_control_and_rates(tmp_path: Path) -> None:
    kinds = (("member", 2.0), ("non-member", 0.0))
    scores = [
        {"kind": kind, "sample": i, "score": shift + i % 7, "control": float(i % 7)}
        for kind, shift in kinds
        for i in range(100)
    ]
    row = {"arm": "none", "round": 0, "attack": "loss", "victim": 0, "repeat": 0, "status": "ok", "message": ""}
    folder = small_run(str(tmp_path), {"arms": {"none": []}})
    folder.write_part(
        "inferences",
        0,
        [row | {"metric": "auc", "value": 0.8, "chance": 0.5, "control": 0.5, "candidates": 200, "scores": scores}],
    )
    table = section(of(folder), "Inference").blocks[0]
    assert isinstance(table, StatementTable)
    cells = [dict(zip(table.headings, one, strict=True)) for one in table.rows]
    assert cells[0]["Measure"] == "AUC, 100 members, 100 non-members"
    assert cells[0]["Control"].startswith("0.500 ")
    assert {one["Chance"] for one in cells} == {"0.5", "1 %"}, "no rate that 100 non-members cannot show"
    [verdict] = of(folder)._table.rows
    assert (verdict.state, of(folder)._table.headings[0]) == ("not measured", "Inference")
