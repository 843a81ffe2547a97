"""The report: its numbers against pyarrow's, its safety, and that it stands alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
import torch
from matplotlib.figure import Figure

from rayfed.errors import RunError
from rayfed.evidence.attack_results import summarise_inferences
from rayfed.evidence.label_mix import compute_label_mix
from rayfed.evidence.outcomes import compute_outcomes
from rayfed.evidence.spread import Spread, measure_spread
from rayfed.evidence.success import success_share
from rayfed.evidence.training import summarise_arms
from rayfed.evidence.verdicts import collect_evidence
from rayfed.metrics.images import PSNR_CEILING
from rayfed.report.html import plots
from rayfed.report.html.page import code, make_environment
from rayfed.report.html.pictures import SHOWN, STRIPS
from rayfed.report.html.run import write_report
from rayfed.report.text import formats
from rayfed.report.text.attacks import threshold_text
from rayfed.report.text.verdict_table import verdict_table
from rayfed.store.folder import RunFolder
from rayfed.store.images import encode_png
from tests.helpers.report_fixtures import ARMS, ATTACKS, HOSTILE, ROUNDS, Page, make_run
from tests.helpers.result_fixtures import attacked, small_run

PRIVATE = {
    "rounds": 5,
    "defence": "dp_sgd",
    "epsilon": 2.9555,
    "delta": 1e-5,
    "unit": "sample",
    "adjacency": "one sample added",
    "against": "the server",
    "mechanism": "noise",
    "accountant": "pld",
    "conversion": "exact",
}


def test_what_is_in_backticks_is_code_on_the_page_and_nothing_else_is_markup(tmp_path: Path) -> None:
    assert code("`a` <b> `c`") == "<code>a</code> &lt;b&gt; <code>c</code>"
    page = html(small_run(str(tmp_path), {"arms": {"none": []}}))
    assert "`" not in Page(page).text.partition("Scenario")[0]


def html(folder: RunFolder) -> str:
    return Path(write_report(folder)).read_text()


def read(folder: RunFolder) -> Page:
    write_report(folder)
    page = Page(folder.read_text("report.html"))
    assert page.open == []
    return page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(str(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def page(run: RunFolder) -> Page:
    return read(run)


def test_says_where_it_was_written(run: RunFolder) -> None:
    assert write_report(run) == f"{run.url}/report.html"
    assert Path(run.url, "report.html").is_file()


@pytest.mark.engine
def test_is_the_same_every_time(run: RunFolder) -> None:
    write_report(run)
    first = run.read_text("report.html")
    write_report(run)
    assert run.read_text("report.html") == first


def test_templates_are_compiled_once() -> None:
    """That takes as long as to draw a report's charts."""
    assert make_environment().get_template("report.html.j2") is make_environment().get_template("report.html.j2")


def test_table_agrees_with_pyarrow(run: RunFolder, page: Page) -> None:
    attacks = run.read_table("attacks")
    figures = [("psnr", "mean"), ("psnr", "min"), ("psnr", "max"), ("ssim", "mean"), ("psnr", "count")]
    grouped = attacks.group_by(["arm", "attack"]).aggregate(figures).to_pylist()
    assert len(grouped) == len(ARMS) * len(ATTACKS)
    for row in grouped:
        mine = attacks.filter((pc.field("arm") == row["arm"]) & (pc.field("attack") == row["attack"]))
        deviation = pc.stddev(mine["psnr"], ddof=1).as_py()
        expected = (
            f"{row['psnr_mean']:.1f}, sd {deviation:.1f} {row['psnr_min']:.1f} to {row['psnr_max']:.1f}, "
            f"n = {row['psnr_count']}"
        )
        assert expected in page.text
        assert f"{row['ssim_mean']:.3f}, sd" in page.text


def test_accuracies_are_those_of_the_last_round(run: RunFolder, page: Page) -> None:
    rounds = run.read_table("rounds")
    last = rounds.filter(pc.field("round") == ROUNDS - 1).to_pylist()
    shown = set(re.findall(r"[\d.]+ %", page.text))
    for row in last:
        for measure in ("test_accuracy", "train_accuracy", "non_member_accuracy", "non_member_mean_accuracy"):
            assert formats.format_share(row[measure]) in shown


def test_loads_nothing_and_runs_nothing_but_its_own_scripts(page: Page) -> None:
    page.check_that_it_stands_alone()
    kinds = [kind for kind, _ in page.scripts]
    assert kinds == ["application/json", None, None]
    own = page.scripts[2][1]
    assert not re.findall(r"https?:|innerHTML|insertAdjacentHTML|eval\(", own)


def test_its_own_text_points_nowhere(run: RunFolder, page: Page) -> None:
    source = run.read_text("report.html").replace(page.scripts[1][1], "")
    assert "@import" not in source
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", source))
    assert "http:" not in source
    assert "https:" not in source


def test_the_plot_and_its_table_have_every_arm_and_attack(run: RunFolder, page: Page) -> None:
    rows = compute_outcomes(run)
    entries = page.data()["entries"]
    assert [(e["arm"], e["attack"]) for e in entries] == [(row["arm"], row["attack"]) for row in rows]
    for row, entry in zip(rows, entries, strict=True):
        for name in ("psnr", "max_ssim", "test_accuracy", "pmm", "bytes_up"):
            assert entry["values"][name][:3] == [pytest.approx(row[name]), None, None]
    assert page.tags.count("button") > len(entries)


def test_a_run_without_attacks_has_no_plot_and_no_plotly(tmp_path: Path) -> None:
    page = read(make_run(str(tmp_path), attacks={}))
    page.check_that_it_stands_alone()
    assert [kind for kind, _ in page.scripts] == ["application/json", None]


def test_images_have_descriptions(page: Page) -> None:
    assert page.images
    assert all(image.get("alt") for image in page.images)


def test_shows_a_limited_number_of_images(page: Page) -> None:
    pairs = len(ARMS) * len(ATTACKS)
    assert len(page.images) == 2 * (1 + len(ARMS) + pairs * SHOWN)  # the summary's, each arm's worst, the gallery


def test_the_verdicts_are_a_row_for_each_arm_with_its_cost_and_its_guarantee(run: RunFolder) -> None:
    scenario, attacks = run.scenario(), run.read_table("attacks").to_pylist()
    arms = summarise_arms(list(ARMS), scenario, run.read_table("rounds").to_pylist(), [])
    privacy = [{"arm": "gaussian", **PRIVATE}, {"arm": "prune", "epsilon": None, "note": "no mechanism"}]
    found = verdict_table(collect_evidence(scenario, attacks, []), arms, privacy, "untrained weights")
    cells = {row.arm: dict(zip(found.headings, row.cells, strict=True)) for row in found.rows}
    assert {arm: own["Verdict"] for arm, own in cells.items()} == dict.fromkeys(ARMS, "LEAKS")
    assert {arm: own["Epsilon"] for arm, own in cells.items()} == {
        "none": "–", "gaussian": "2.96 per sample", "prune": "none",
    }  # fmt: skip
    assert cells["none"]["Images reconstructed, batch size 4"] == "16 of 16"
    best = max(row["psnr"] for row in attacks if row["arm"] == "none")
    assert cells["none"]["Max PSNR (dB)"] == f"{best:.1f}"
    assert cells["none"]["Baseline"] == f"{best - 5.0:.1f}"
    assert cells["none"]["Test accuracy"] == formats.format_share(arms[0].accuracy)
    assert cells["prune"]["Test accuracy"].startswith(formats.format_share(arms[2].accuracy))


def test_an_arm_with_several_batch_sizes_is_one_row(run: RunFolder) -> None:
    rows = [attacked("none", "dlg", psnr=psnr, batch_size=size, distortion=0.5) for size, psnr in ((1, 30.0), (4, 5.0))]
    scenario = {"arms": {"none": []}}
    found = verdict_table(collect_evidence(scenario, rows, []), [], [], "untrained weights")
    [row] = found.rows
    cells = dict(zip(found.headings, row.cells, strict=True))
    assert cells["Images reconstructed"] == "1 of 1 at batch size 1, 0 of 1 at batch size 4"
    assert cells["Max PSNR (dB)"] == "30.0", "of the batch size that leaks"
    assert cells["Distortion"] == "0.500"
    assert "Epsilon" not in cells, "nothing was trained"


def test_progress_is_shown_by_iteration_beside_the_true_image(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path), {"none": []}, {"dlg": 1.0})
    key = {"arm": "none", "round": 0, "attack": "dlg", "victim": 1, "repeat": 0}
    png = encode_png(torch.rand(1, 8, 8))
    rows = [key | {"sample": s, "iteration": i, "image": png} for s in range(4) for i in (100, 0, 10)]
    folder.write_part("snapshots", 0, rows)
    page = read(folder)
    held = [image["alt"] for image in page.images if "at iteration" in (image["alt"] or "")]
    assert held == [f"State of dlg at iteration {i}" for _ in range(STRIPS) for i in (0, 10, 100)]
    assert sum(image["alt"] == "The true image" for image in page.images) == STRIPS


@pytest.mark.engine
def test_escapes_what_users_wrote(tmp_path: Path) -> None:
    arms: dict[str, Any] = {HOSTILE: [], "</script><b>": ["prune"], "a & b $x^2$": ["prune"]}
    folder = make_run(str(tmp_path), arms, {'"><img src=x onerror=y>': 1.0, "<!--<script>": 1.0})
    status = {"state": 'failed"><script>', "error": "<script>bad</script>", "rounds_done": 1, "rounds": 5}
    folder.write_text("status.json", json.dumps(status))
    folder.write_text("environment.json", json.dumps({"<b>key": {"nested": "<i>value"}}))
    page = read(folder)
    page.check_that_it_stands_alone()
    assert page.tags.count("script") == 3
    assert not {"b", "i"} & set(page.tags)
    assert all(image["src"] != "x" for image in page.images)
    assert HOSTILE in page.text
    assert "<script>bad</script>" in page.text
    assert {entry["arm"] for entry in page.data()["entries"]} == set(arms)


@pytest.mark.engine
def test_infinite_psnr_is_exact_and_leaves_means_finite(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path), {"none": []}, {"analytic": 1.0})
    rows = folder.read_table("attacks").to_pylist()
    rows[0] |= {"psnr": math.inf, "mse": 0.0}
    rows[1] |= {"psnr": 141.0, "mse": 8e-15}
    folder.write_part("attacks", 0, [row for row in rows if row["round"] == 0])
    page = read(folder)
    assert ">100 dB" in page.text
    values = [min(row["psnr"], 100.0) for row in rows]
    assert f"{sum(values) / len(values):.1f}, sd" in page.text
    assert not re.search(r"\binf\b", page.text)
    assert "nan" not in page.text


def test_unmeasured_scores_are_not_counted() -> None:
    assert measure_spread([None, math.nan]) is None
    assert measure_spread([1.0, None, 3.0, math.nan]) == Spread(2.0, math.sqrt(2), 1.0, 3.0, 2)
    assert measure_spread([math.inf, 50.0], PSNR_CEILING) == Spread(75.0, math.sqrt(1250), 50, 100, 2)
    assert measure_spread([5.0]) == Spread(5.0, None, 5.0, 5.0, 1)


@pytest.mark.engine
def test_labels_that_were_given_are_not_found(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path), {"none": []}, {"analytic": 1.0, "blind": 1.0})
    for round in range(ROUNDS):
        rows = [row for row in folder.read_table("attacks").to_pylist() if row["round"] == round]
        given = {"knowledge": ["defence", "labels"]}
        folder.write_part("attacks", round, [row | given if row["attack"] == "analytic" else row for row in rows])
    read(folder)
    text = folder.read_text("report.html")
    cells = dict(
        re.findall(r'<td class="setting">(\w+)<small>.*?data-label="Labels recovered">(.*?)</td>', text, re.DOTALL)
    )
    assert cells["analytic"] == "given"
    assert "%" in cells["blind"]
    captions = [
        one for one in re.findall(r"<figcaption>(.*?)</figcaption>", text, re.DOTALL) if "· analytic<br>" in one
    ]
    assert captions
    assert all(re.search(r"label[^<]*, given<br>", one) for one in captions)


def test_the_probability_of_reconstruction_success_counts_every_attacked_image() -> None:
    rows = [
        {"psnr": 20.0, "mse": 0.01},
        {"psnr": 15.0, "mse": 0.03},
        {"psnr": 9.0, "mse": 0.1},
        {"psnr": None, "mse": None},
    ]
    assert success_share(rows, "psnr", 15) == 0.5
    assert success_share(rows, "mse", 0.01) == 0.25
    assert success_share(rows, "mse", 0.1) == 0.75
    assert success_share(rows[3:], "psnr", 15) is None
    assert threshold_text("psnr", 15.0) == "psnr ≥ 15"
    assert threshold_text("mse", 0.01) == "mse ≤ 0.01"


@pytest.mark.engine
def test_the_probability_of_reconstruction_success_is_in_the_table(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path))
    assert "PoRS" not in html(folder)
    folder.write_text(
        "scenario.yaml",
        folder.read_text("scenario.yaml") + "metrics: {success: {psnr: 15, ssim: 0.5, lpips_vgg: 0.1}}\n",
    )
    text = html(folder)
    attacks = folder.read_table("attacks")
    rows = attacks.filter((pc.field("arm") == "prune") & (pc.field("attack") == "idlg")).to_pylist()
    assert f'data-label="PoRS, psnr ≥ 15">{100 * sum(row["psnr"] >= 15 for row in rows) / len(rows):.1f} %' in text
    assert "PoRS, ssim ≥ 0.5" in text
    assert "lpips_vgg ≤" not in text  # not measured


def test_inferences_stand_beside_chance_and_generated_images_beside_true_ones(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path), {"none": [], "prune": ["prune"]}, {})
    key = {"arm": "none", "round": 0, "victim": 1, "repeat": 0, "status": "ok", "message": ""}
    rows = [
        key | {"attack": "membership", "metric": "auc", "value": 0.75, "chance": 0.5, "candidates": 40},
        key | {"attack": "membership", "metric": "auc", "value": 0.85, "chance": 0.5, "candidates": 40, "victim": 4},
        key | {"attack": "gan", "metric": "class_share", "value": 0.625, "chance": 0.1, "candidates": 16},
        key | {"attack": "who", "metric": "accuracy", "chance": 0.5, "candidates": 0, "status": "not applicable",
               "message": "grant public data"},
    ]  # fmt: skip
    kinds = [("member", 2.0), ("non-member", 0.0)]
    scores = [{"kind": k, "sample": i, "score": s + i, "control": float(i)} for k, s in kinds for i in range(60)]
    for row in rows[:2]:
        row |= {"control": 0.5, "scores": scores}
    folder.write_part("inferences", 0, rows)
    png = encode_png(torch.rand(1, 8, 8))
    place = {"arm": "none", "round": 0, "attack": "gan", "victim": 1, "repeat": 0}
    folder.write_part("images", 0, [place | {"sample": i, "true": png, "reconstructed": png} for i in range(SHOWN + 2)])
    claims = {c.attack: c for c in summarise_inferences(folder.read_table("inferences").to_pylist(), ["none", "prune"])}
    assert claims["membership"].value is not None
    assert claims["membership"].value.mean == pytest.approx(0.8)
    assert claims["membership"].candidates == 80
    write_report(folder)
    page = Page(folder.read_text("report.html"))
    assert not page.open
    assert len([i for i in page.images if "generated by gan" in (i["alt"] or "")]) == SHOWN


@pytest.mark.engine
def test_attacks_without_a_result_are_no_rows(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path))
    rows = [row for row in folder.read_table("attacks").to_pylist() if row["round"] == 0]
    scores = ("label", "label_accuracy", "mse", "psnr", "ssim", "objective", "iterations", "seconds")
    for row in rows:
        if row["attack"] == "idlg" or row["arm"] == "prune":
            late = row["attack"] == "inverting_gradients"
            message = "not enough time (about 5 s)" if late else "no bias"
            row |= dict.fromkeys(scores) | {"status": "not played" if late else "not applicable", "message": message}
    for round in (0, 4):
        folder.write_part("attacks", round, rows if not round else [])
    page = read(folder)
    entries = page.data()["entries"]
    assert [(e["arm"], e["attack"]) for e in entries] == [
        ("none", "inverting_gradients"), ("gaussian", "inverting_gradients"), ("prune", None),
    ]  # fmt: skip


@pytest.mark.engine
@pytest.mark.parametrize("count", [8, 12])
def test_ten_arms_have_colours_of_their_own_and_legends_have_an_end(tmp_path: Path, count: int) -> None:
    folder = make_run(str(tmp_path), {f"arm{i}": [] for i in range(10)}, {f"attack{i}": 1.0 for i in range(count)})
    page = read(folder)
    text = folder.read_text("report.html")
    named = {f"--series-{i}" for i in range(10)}
    assert named <= set(re.findall(r"--series-\d+", text))
    assert len({colour for _, colour in re.findall(r"--series-(\d+): (#\w+)", text)[:10]}) == 10
    assert "hollow" not in [name for key, name in page.attributes if key == "class"]


@pytest.mark.engine
def test_nothing_trained_makes_no_trade_off(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path))
    for round in range(ROUNDS):
        folder.write_part("rounds", round, [])
        folder.write_part("clients", round, [])
    page = read(folder)
    assert page.data()["x"] is None


def _nothing(folder: RunFolder) -> None:
    for table in ("rounds", "clients", "attacks", "images", "partition"):
        for name in folder.files(table):
            folder.remove(f"{table}/{name}")
    for name in ("status.json", "environment.json"):
        folder.remove(name)


def _training_only(folder: RunFolder) -> None:
    for table in ("attacks", "images"):
        for name in folder.files(table):
            folder.remove(f"{table}/{name}")


def _no_images(folder: RunFolder) -> None:
    for name in folder.files("images"):
        folder.remove(f"images/{name}")


def _never_evaluated(folder: RunFolder) -> None:
    for round in range(ROUNDS):
        folder.write_part("rounds", round, [{"arm": arm, "round": round, "train_loss": 1.0} for arm in ARMS])


@pytest.mark.engine
@pytest.mark.parametrize("change", [_nothing, _training_only, _no_images, _never_evaluated])
def test_reports_a_partial_run(tmp_path: Path, change: Any) -> None:
    folder = make_run(str(tmp_path))
    change(folder)
    assert "digits-example" in read(folder).text


@pytest.mark.engine
def test_many_classes_and_clients(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path), attacks={})
    cells = ({"client": c, "label": k, "class_name": f"k{k}", "count": k} for c in range(80) for k in range(100))
    rows = list(cells)
    folder.write_part("partition", 0, rows)
    mix = compute_label_mix(folder.read_table("partition"))
    assert mix is not None
    assert mix.samples == (4950, 4950, 4950)
    assert mix.classes_held == (99, 99, 99)
    assert sum(sum(counts) for _, counts in plots.merge_small_classes(mix)) == 80 * 4950


def test_a_damaged_status_names_the_file(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path), attacks={})
    folder.write_text("status.json", "{")
    with pytest.raises(RunError, match=r"status\.json"):
        write_report(folder)


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://report-test"
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem().rm("/report-test", recursive=True)


@pytest.mark.engine
def test_reports_into_other_file_systems(memory: str) -> None:
    folder = make_run(memory)
    assert write_report(folder).startswith("memory://")
    assert "digits-example" in read(folder).text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formats.format_psnr(math.inf), "exact"),
        (formats.format_psnr(100.1), ">100"),
        (formats.format_psnr(-3.14), "−3.1"),
        (formats.format_psnr(None), "–"),
        (formats.format_mean_psnr(100.0), "≥100"),
        (formats.format_share(0.9126), "91.3 %"),
        (formats.format_share(math.nan), "–"),
        (formats.format_points(-0.0131), "−1.3"),
        (formats.format_points(0.00001), "±0.0"),
        (formats.format_bytes(999), "999 B"),
        (formats.format_bytes(1_234_567), "1.23 MB"),
        (formats.format_duration(0.1234), "0.12 s"),
        (formats.format_duration(185), "3 min 05 s"),
        (formats.format_duration(7800), "2 h 10 min"),
        (formats.format_counts(measure_spread([3.0, 4.0])), "3 to 4"),
        (formats.format_counts(measure_spread([2400.0, 2400.0])), "2,400"),
        (formats.format_counts(None), "–"),
    ],
)
def test_numbers_as_people_read_them(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.engine
def test_what_clients_weighed_and_how_they_scored_stands_in_the_report(tmp_path: Path) -> None:
    folder = make_run(str(tmp_path), {"none": [], "boosted": {"aggregation": {"name": "fedboosting", "rule": "code"}}})  # type: ignore[dict-item]
    for round in range(2):
        key = {"arm": "boosted", "round": round}
        folder.write_part("weights", round, [key | {"client": c, "weight": (2 + c * round) / 10} for c in range(12)])
        folder.write_part(
            "scores",
            round,
            [
                key | {"model": m, "validator": v, "accuracy": (4 * m + v + round) / 100}
                for m in range(12)
                for v in range(12)
            ],
        )
    text = html(folder)
    maps = re.findall(r'<svg [^>]*aria-label="Accuracy of each client.*?</svg>', text, re.DOTALL)
    assert len(maps) == 1
    for share in ("1", "56"):  # the last round's least and largest
        assert re.search(rf"<text[^>]*>{share}</text>", maps[0])


@pytest.mark.parametrize("rounds", [2, 3])
def test_weights_are_joined_from_three_rounds_on(rounds: int) -> None:
    drawn = Figure()
    rows = [{"arm": "x", "round": r, "client": c, "weight": 0.1} for r in range(rounds) for c in range(2)]
    plots.plot_weights("x", rows).draw(drawn)
    assert {line.get_linestyle() for line in drawn.axes[0].lines} == {"None" if rounds < 3 else "-"}
