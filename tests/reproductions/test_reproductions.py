"""Reproductions: their form, what is compared, verdicts, pages; and that those we have can be played."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rayfed.cli import app
from rayfed.errors import RunError, UserError
from rayfed.evidence.settings import Estimate, estimate
from rayfed.metrics.images import PSNR_CEILING
from rayfed.reproductions import pages
from rayfed.reproductions.judging import judge, overall
from rayfed.reproductions.measuring import Finding, measured
from rayfed.reproductions.reading import Group, Reproduction, load, names
from rayfed.results.loading import Sweep
from rayfed.results.sweep_folder import SweepFolder
from rayfed.scenario import check
from rayfed.store.folder import RunFolder
from tests.conftest import REPOSITORY

SCENARIO: dict[str, Any] = {
    "name": "small",
    "data": {"name": "digits", "train_samples": 100, "test_samples": 50},
    "model": {"name": "mlp", "hidden": [8]},
    "federation": {"rounds": 2, "clients": 2},
    "arms": {"none": [], "noise": [{"name": "gaussian", "sigma": 1.0}]},
    "attacks": [
        {"name": "idlg", "rounds": [0], "victims": 1, "observes": "gradient", "batch_size": 1, "iterations": 9}
    ],
    "resources": {"clients": {"actors": 1}, "attackers": {"actors": 1}},
    "sweep": {"repeats": 2},
}
PSNR = {
    "title": "PSNR (dB)",
    "measure": "psnr",
    "tolerance": 5,
    "figures": [
        {"label": "plain", "paper": 100, "where": {"arm": "none"}},
        {"label": "noisy", "paper": 5, "where": {"arm": "noise", "attack": "idlg"}},
    ],
}
DOCUMENT: dict[str, Any] = {
    "title": "A small one",
    "paper": {"name": "Nobody 2020", "place": "table 1"},
    "claim": "noise hides",
    "scenario": SCENARIO,
    "groups": [PSNR],
}


def group(tolerance: float = 1.0, **more: Any) -> Group:
    return Group.model_validate({**PSNR, "tolerance": tolerance, **more})


def finding(label: str, paper: float, mean: float | None, half: float = 0.0) -> Finding:
    ours = None if mean is None else Estimate(mean, mean - half, mean + half, 3)
    return Finding(label, paper, paper, ours, why="" if ours else "nothing was measured")


@pytest.mark.parametrize(
    ("found", "verdict", "because"),
    [
        ([("a", 10, 10.9, 0.1), ("b", 20, 19.2, 0.1)], "agrees", ""),
        ([("a", 10, 11.5, 1.8), ("b", 20, 20, 0)], "agrees", ""),  # within an interval that says something
        ([("a", 10, 14, 5)], "undecided", "a differs"),  # within one that says nothing
        ([("a", 10, 30, 1), ("b", 20, 40, 1)], "same order but different size", ""),
        ([("a", 10, 40, 1), ("b", 20, 30, 1)], "contradicts", "a is above b"),
        ([("a", 10, 31, 1), ("b", 20, 30, 1)], "undecided", "a and b do not differ significantly"),
        ([("b", 20, 30, 1), ("a", 10, 40, 1)], "contradicts", "a is above b"),
        ([("a", 10, 40, 1), ("b", 10.5, 30, 1)], "contradicts", "a differs; b differs"),  # no order to keep
        ([("a", 10, 10, 0), ("b", 20, None)], "undecided", "b: nothing was measured"),
        ([("a", 10, None)], "not comparable here", "a: nothing was measured"),
    ],
)
def test_verdicts(found: list[Any], verdict: str, because: str) -> None:
    judged = judge(group(), [finding(*each) for each in found])
    assert (judged.verdict, judged.because) == (verdict, because)


def test_one_seed_is_beyond_no_doubt() -> None:
    def single(label: str, paper: float, mean: float) -> Finding:
        return Finding(label, paper, paper, estimate([mean]))

    assert judge(group(), [single("a", 10, 15.1), single("b", 20, 15.0)]).verdict == "undecided"
    assert judge(group(), [single("a", 10, 15.1)]).verdict == "undecided"
    assert judge(group(), [single("a", 10, 10.9)]).verdict == "agrees"


def test_pairs_are_told_apart_as_by_the_interval_of_their_difference() -> None:
    overlapping = [finding("a", 10, 30, 1.0), finding("b", 20, 31.5, 1.0)]
    assert judge(group(), overlapping).verdict == "same order but different size"  # sqrt(2) < 1.5


def test_what_a_seed_does_to_both_is_no_doubt_about_their_order() -> None:
    """The seeds are 10 apart, the two figures 1 in each of them: independently taken they would not be told apart."""

    def of(label: str, paper: float, values: list[float]) -> Finding:
        return Finding(label, paper, paper, estimate(values), by_seed=dict(enumerate(values)))

    low, high = of("a", 10, [10.0, 20.0, 30.0]), of("b", 20, [11.0, 21.1, 31.2])
    assert judge(group(), [low, high]).verdict == "same order but different size"
    assert judge(group(), [of("a", 10, [11.0, 21.1, 31.2]), of("b", 20, [10.0, 20.0, 30.0])]).verdict == "contradicts"
    assert judge(group(), [low, of("b", 20, [11.0, 41.0, 11.0])]).verdict == "undecided"


def test_the_whole_is_as_good_as_its_worst_part() -> None:
    assert overall(["agrees", "not comparable here", "contradicts"]) == "contradicts"
    assert overall(["not comparable here"]) == overall([]) == "not comparable here"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"groups": [{**PSNR, "measure": "pnsr"}]}, "did you mean 'psnr'"),
        ({"groups": [{**PSNR, "table": "round"}]}, "did you mean 'rounds'"),
        ({"groups": [{**PSNR, "relative_to": "plane"}]}, "did you mean 'plain'"),
        ({"groups": [{**PSNR, "figures": PSNR["figures"] * 2}]}, "same label"),  # type: ignore[operator]
        (
            {"groups": [{**PSNR, "relative_to": "plain", "figures": [{"label": "plain", "paper": 0}]}]},
            "'plain' is 0 in the paper",
        ),
        ({"groups": [{**PSNR, "at_least": 1, "at_most": 2}]}, "not both"),
        ({"groups": [{**PSNR, "ranked": True, "relative_to": "plain"}]}, "`ranked` excludes `relative_to`"),
        ({"groups": [{**PSNR, "true_measure": "pnsr"}]}, "did you mean 'psnr'"),
        ({"groups": [{**PSNR, "true_measure": "psnr", "at_least": 1}]}, "`true_measure` excludes"),
        (
            {"groups": [{**PSNR, "relative_to": "x", "figures": [{"label": "x", "paper": 1, "full_only": True}]}]},
            "'x' is not",
        ),
        ({"groups": []}, "there are no `groups`"),
        ({"scenario": None}, "there is no `scenario`"),
        ({"scenario": {**SCENARIO, "sweep": None}}, "intervals are over seeds"),
        ({"tilte": 1}, "tilte"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(yaml.safe_dump(DOCUMENT | change))
    with pytest.raises(UserError, match=said) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_reduced_changes_the_scenario_and_set_comes_last() -> None:
    own = Reproduction.model_validate({**DOCUMENT, "reduced": {"federation.rounds": 1, "arms.noise": []}})
    assert own.document("full") == SCENARIO
    changed = own.document("reduced", ["federation.rounds=3"])
    assert changed["federation"]["rounds"] == 3
    assert changed["arms"]["noise"] == []
    assert own.scenario == SCENARIO
    wrong = own.model_copy(update={"reduced": {"attacks.grnn.iterations": 1}})
    with pytest.raises(UserError, match=r"attacks\.grnn\.iterations"):
        wrong.document("reduced")


def swept(tmp_path: Path, rows: list[dict[str, Any]]) -> Sweep:
    """A sweep with these outcomes, as if it had been played."""
    scenario = check({**SCENARIO, "sweep": {"repeats": 2, "fields": {"training.lr": [0.1, 0.2]}}}, "test")
    folder = RunFolder.create(str(tmp_path), "small")
    folder.write_text("scenario.yaml", scenario.dump())
    base = {"trial": "0", "status": "finished", "run": "trials/0000-0", "arm": "none", "attack": "idlg", "seed": 0}
    SweepFolder(folder).write_outcomes([base | row for row in rows])
    return Sweep(folder)


def test_figures_are_means_over_seeds_of_the_rows_they_name(tmp_path: Path) -> None:
    sweep = swept(
        tmp_path,
        [
            {"repeat": 0, "training.lr": 0.1, "psnr": 10.0},
            {"repeat": 1, "training.lr": 0.1, "psnr": 14.0},
            {"repeat": 0, "training.lr": 0.2, "psnr": 99.0},
            {"repeat": 1, "training.lr": 0.2, "psnr": 99.0},
            {"repeat": 0, "training.lr": 0.1, "psnr": 5.0, "arm": "noise"},
            {"repeat": 1, "training.lr": 0.1, "psnr": 7.0, "arm": "noise"},
            {"repeat": 0, "training.lr": 0.2, "arm": "noise", "status": "failed", "run": None},
        ],
    )
    where = {"arm": "none", "training.lr": 0.1}
    figures = [
        {"label": "plain", "paper": 12, "where": where},
        {"label": "noisy", "paper": 6, "where": {**where, "arm": "noise"}},
        {"label": "lost", "paper": 6, "where": {"arm": "noise", "training.lr": 0.2}},
    ]
    plain, noisy, lost = measured(group(figures=figures), sweep)
    assert plain.ours is not None
    assert (plain.ours.mean, plain.ours.n) == (12.0, 2)
    assert plain.ours.high == pytest.approx(12 + 12.706 * 2, abs=1e-2)  # Student's t
    assert lost.ours is None
    assert lost.why
    relative = measured(group(figures=figures, relative_to="plain"), sweep)[1]
    assert relative.ours is not None
    assert (relative.paper, relative.ours.mean) == (0.5, 0.5)
    assert noisy.ours_true is None
    zero = measured(group(figures=figures, relative_to="lost"), sweep)[0]
    assert "'lost'" in zero.why
    with pytest.raises(UserError, match=r"no column or swept field 'atack': did you mean 'attack'"):
        measured(group(figures=[{"label": "x", "paper": 1, "where": {"atack": "idlg"}}]), sweep)
    with pytest.raises(UserError, match=r"no row has arm 'nois': did you mean 'noise'"):
        measured(group(figures=[{"label": "x", "paper": 1, "where": {"arm": "nois"}}]), sweep)


def test_a_sweep_of_failures_says_why(tmp_path: Path) -> None:
    failed = {"repeat": 0, "training.lr": 0.1, "status": "failed", "run": None, "error": "out of memory"}
    with pytest.raises(UserError, match="none of the sweep's trials has finished: out of memory"):
        measured(group(), swept(tmp_path, [failed]))


def test_a_share_of_rows_counts_those_without_a_value_as_failures(tmp_path: Path) -> None:
    values = [10.0, 14.0, 20.0, None]
    sweep = swept(tmp_path, [{"repeat": r, "training.lr": 0.1, "psnr": v} for r in (0, 1) for v in values])
    figures = [{"label": "x", "paper": 50, "where": {"training.lr": 0.1}}]
    for threshold, share in (({"at_least": 14.0}, 50), ({"at_most": 10.0}, 25)):
        [found] = measured(group(figures=figures, scale=100, **threshold), sweep)
        assert found.ours is not None
        assert (found.ours.mean, found.ours.n) == (share, 2)


def test_seeds_are_told_apart_in_a_table_that_counts_an_attack_s_own_repeats(tmp_path: Path) -> None:
    sweep = swept(tmp_path, [{"repeat": r, "run": f"trials/0000-{r}", "training.lr": 0.1} for r in (0, 1)])
    key = {"arm": "none", "round": 0, "attack": "idlg", "victim": 0, "repeat": 0, "sample": 0}
    for seed, psnr_of_seed in enumerate((10.0, 14.0)):
        trial = SweepFolder(sweep.folder).trial(f"trials/0000-{seed}")
        trial.write_part("attacks", 0, [key | {"status": "ok", "psnr": psnr_of_seed}])
    figures = [{"label": "x", "paper": 12, "where": {"arm": "none"}}]
    [found] = measured(group(table="attacks", figures=figures), sweep)
    assert found.by_seed == {0: 10.0, 1: 14.0}
    exact = key | {"status": "ok", "psnr": math.inf}
    SweepFolder(sweep.folder).trial("trials/0000-0").write_part("attacks", 0, [exact])
    assert measured(group(table="attacks", figures=figures), sweep)[0].by_seed == {0: PSNR_CEILING, 1: 14.0}


def test_a_swept_section_is_named_by_some_of_its_fields(tmp_path: Path) -> None:
    scenario = check(
        {**SCENARIO, "sweep": {"fields": {"data": [{"name": "digits"}, {"name": "digits", "size": 16}]}}}, ""
    )
    folder = RunFolder.create(str(tmp_path), "small")
    folder.write_text("scenario.yaml", scenario.dump())
    base = {"trial": "0", "status": "finished", "run": "trials/0000-0", "arm": "none", "attack": "idlg", "seed": 0}
    rows = [{"data": {"name": "digits"}, "psnr": 10.0}, {"data": {"name": "digits", "size": 16}, "psnr": 30.0}]
    SweepFolder(folder).write_outcomes([base | {"repeat": 0} | row for row in rows])

    def ours(**section: Any) -> Any:
        figures = [{"label": "x", "paper": 1, "where": {"data": section}}]
        return measured(group(figures=figures), Sweep(folder))[0].ours

    assert ours(size=16).mean == 30.0
    assert ours(name="digits").mean == 20.0
    with pytest.raises(UserError, match="no row has data"):
        ours(size=17)


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [((3, 5, 9), "agrees"), ((5, 3, 9), "contradicts"), ((5, 5, 9), "undecided"), ((1, 2, 3), "agrees")],
)
def test_of_an_order_without_numbers_the_order_decides(ours: tuple[int, ...], verdict: str) -> None:
    found = [finding(str(place), place, mean) for place, mean in enumerate(ours, start=1)]
    for tolerance in (0.5, 2):  # which means nothing here
        assert judge(group(tolerance, ranked=True), found).verdict == verdict
    assert judge(group(0.5, ranked=True), found[:1]).verdict == "not comparable here"


def test_places_alone_do_not_agree() -> None:
    """As numbers they would: 1 and 1 are within the tolerance."""
    found = [finding("a", 1, 1.2), finding("b", 2, 1.1)]
    assert judge(group(0.95, ranked=True), found).verdict == "contradicts"
    assert judge(group(0.95), found).verdict == "agrees"


def test_what_the_full_size_alone_has_is_absent_from_the_reduced() -> None:
    full = {"label": "large", "paper": 3, "where": {"arm": "none"}, "full_only": True}
    own = Reproduction.model_validate(
        {
            **DOCUMENT,
            "groups": [{**PSNR, "figures": [*PSNR["figures"], full]}, {**PSNR, "title": "x", "figures": [full]}],
        }  # type: ignore[misc]
    )
    assert [len(part.figures) for part in own.compared("full")] == [3, 1]
    assert [len(part.figures) for part in own.compared("reduced")] == [2]
    assert [each.what for each in own.not_compared("reduced")] == ["PSNR (dB): large", "x: large"]
    assert own.not_compared("full") == []


def test_a_published_attack_is_shown_with_the_default_attack_and_true_arithmetic(
    tmp_path: Path,
) -> None:
    rows = [{"repeat": r, "training.lr": 0.1, "mse": 10.0 + r, "psnr": math.inf} for r in (0, 1)]
    rows += [row | {"attack": "dlg", "mse": 50.0} for row in rows]
    one = [
        {
            "label": "x",
            "paper": 30.0,
            "where": {"training.lr": 0.1, "attack": "idlg"},
            "default_attack": {"attack": "dlg"},
        }
    ]
    [found] = measured(group(figures=one, measure="psnr", true_measure="mse"), swept(tmp_path, rows))
    assert found.ours is not None
    assert (found.paper, found.ours.mean, found.ours_true) == (30.0, PSNR_CEILING, 10.5)
    assert found.default_attack == 50.0


MODULE = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, image_shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, classes))
"""


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["reproduce", *arguments])
    assert result.exit_code == 0, result.output
    return str(result.output)


@pytest.mark.engine
@pytest.mark.usefixtures("ray_session")
@pytest.mark.slow
def test_a_reproduction_from_the_command_line(tmp_path: Path) -> None:
    rounds = {
        "title": "accuracy (%)", "table": "rounds", "measure": "test_accuracy", "take": "last", "scale": 100,
        "tolerance": 100, "figures": [{"label": "plain", "paper": 50, "where": {"arm": "none"}}],
    }  # fmt: skip
    absent = [{"what": "CelebA", "why": "not at hand"}]
    path = tmp_path / "small.yaml"
    (tmp_path / "beside_it.py").write_text(MODULE)
    scenario = {**SCENARIO, "model": {"name": "beside_it:Net"}}
    path.write_text(yaml.safe_dump({**DOCUMENT, "scenario": scenario, "groups": [PSNR, rounds], "absent": absent}))
    kept, out = tmp_path / "kept", tmp_path / "out"
    said = invoke(str(path), "--reduced", "--keep", str(kept), "--out", str(out))
    assert "Verdict: agrees" in said
    assert "CelebA" in said
    page = (kept / "small.md").read_text()
    assert "| plain | 100 | 100 ± 0 |" in page
    assert "- CelebA: not at hand" in page
    summary = (kept / "README.md").read_text()
    assert "[small](small.md)" in summary
    assert "- **agrees** (1):" in summary
    assert "- dcs2-table-1\n" in summary.partition("## Not run yet")[2]
    [run] = out.iterdir()
    again = invoke(str(path), "--reduced", "--run", str(run))
    assert "Verdict: agrees" in again
    other = CliRunner().invoke(app, ["reproduce", str(path), "--run", str(run), "--set", "training.lr=0.5"])
    assert other.exit_code == 2
    assert "another scenario" in other.output
    assert yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0]) == scenario


def test_missing_data_are_told_before_anything_is_played(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(
        yaml.safe_dump({**DOCUMENT, "scenario": {**SCENARIO, "data": {"name": "mnist", "root": "nowhere"}}})
    )
    result = CliRunner().invoke(app, ["reproduce", str(path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "missing from nowhere" in result.output
    assert not (tmp_path / "out").exists()


def test_files_that_it_needs_are_made_by_commands(tmp_path: Path) -> None:
    path, made = tmp_path / "small.yaml", tmp_path / "made.yaml"
    commands = {str(made): f"new {made}", str(tmp_path / "other.yaml"): f"new {tmp_path / 'another'}"}
    path.write_text(yaml.safe_dump({**DOCUMENT, "prepare": commands}))
    result = CliRunner().invoke(app, ["reproduce", str(path)])
    assert result.exit_code == 2
    assert made.read_text().strip()
    assert f"`rayfed new {tmp_path / 'another'}`" in " ".join(result.output.split())


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text("{")
    with pytest.raises(RunError, match=r"odd\.json"):
        pages.records(tmp_path)


def test_an_unknown_name_says_what_there_is() -> None:
    result = CliRunner().invoke(app, ["reproduce", "dcs2-tabel-1", "--folder", str(REPOSITORY / "reproductions")])
    assert result.exit_code == 2
    assert "did you mean 'dcs2-table-1'" in result.output


OURS = names(str(REPOSITORY / "reproductions"))


@pytest.mark.parametrize("name", OURS)
def test_ours_can_be_played(name: str) -> None:
    own = load(REPOSITORY / "reproductions" / f"{name}.yaml")
    for scale in ("reduced", "full") if own.scenario is not None else ():
        scenario = check(own.document(scale), name)
        compared = own.compared(scale)
        arms = {figure.where["arm"] for part in compared for figure in part.figures if "arm" in figure.where}
        assert arms <= set(scenario.played)
        fields = set(scenario.sweep.fields) if scenario.sweep else set()
        assert {key for part in compared for f in part.figures for key in f.where if "." in key} <= fields


def test_the_kept_pages_are_what_their_records_say() -> None:
    folder = REPOSITORY / "docs" / "reproductions"
    found = pages.records(folder)
    assert (folder / pages.SUMMARY).read_text() == pages.summary(found, OURS)
    for record in found:
        assert (folder / f"{record['name']}.md").read_text() == pages.page(record)
        assert record["name"] in OURS
