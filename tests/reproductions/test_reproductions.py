"""Reproductions: their form, what is compared, verdicts, pages; and that those we have can be played."""

from __future__ import annotations

import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rayfed.cli import app
from rayfed.errors import RunError, UserError
from rayfed.metrics.images import PSNR_CEILING
from rayfed.reproductions import pages
from rayfed.reproductions.findings import Finding, curve_gap, make_findings, tabulate_curves
from rayfed.reproductions.fingerprints import PACKAGES, components, fingerprints, hash_component
from rayfed.reproductions.judging import (
    FigureState,
    Judgement,
    PairState,
    Verdict,
    Whole,
    judge,
    overall,
    seeds_to_decide,
)
from rayfed.reproductions.kinds import Attacker, Size
from rayfed.reproductions.measuring import measure
from rayfed.reproductions.reading import Group, Reproduction, load, names
from rayfed.reproductions.records import (
    Record,
    SeedRecord,
    SizeRecord,
    find_changes,
    fingerprints_of,
    read_record,
    read_records,
    write_record,
)  # fmt: skip
from rayfed.reproductions.results import read_results, result_of
from rayfed.results.loading import Sweep
from rayfed.results.sweep_folder import SweepFolder
from rayfed.scenario import check_scenario
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
    """Three seeds with this mean and this half of the 95 % interval."""
    step = half / 2.4841377  # t(2) / sqrt(3), for a standard deviation of one step
    values = [] if mean is None else [mean - step, mean, mean + step]
    return Finding(label, paper, paper, dict(enumerate(values)))


def seeded(label: str, paper: float, *values: float) -> Finding:
    return Finding(label, paper, paper, dict(enumerate(values)))


def verdict(findings: list[Finding], tolerance: float = 1.0, **more: Any) -> Verdict:
    return judge(group(tolerance, **more), findings).verdict


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([("a", 10, 10.9, 0.1), ("b", 20, 19.2, 0.1)], "reproduced"),
        ([("a", 10, 11.5, 1.8), ("b", 20, 20, 0)], "reproduced"),  # within an interval that says something
        ([("a", 10, 14, 5)], "undecided"),  # within one that says nothing
        ([("a", 10, 30, 1), ("b", 20, 40, 1)], "same_order"),
        ([("a", 10, 40, 1), ("b", 20, 30, 1)], "contradicted"),
        ([("b", 20, 30, 1), ("a", 10, 40, 1)], "contradicted"),
        ([("a", 10, 40, 1), ("b", 10.5, 30, 1)], "contradicted"),  # no order to keep
        ([("a", 10, 30.4, 0), ("b", 20, 30, 0)], "contradicted"),  # a difference of the paper that is not there
        ([("a", 10, 10, 0), ("b", 20, None)], "undecided"),
        ([("a", 10, None)], "not_measured"),
    ],
)
def test_verdicts(found: list[Any], expected: str) -> None:
    assert verdict([finding(*each) for each in found]) == expected


def test_a_better_figure_is_no_contradiction() -> None:
    better = [finding("a", 10, 12, 0.1)]
    assert verdict(better) is Verdict.CONTRADICTED
    assert verdict(better, better="higher") is Verdict.BETTER
    assert verdict(better, better="lower") is Verdict.CONTRADICTED
    assert verdict(better, measure="test_accuracy") is Verdict.BETTER  # a measure of utility has its own direction
    assert verdict([*better, finding("b", 15, 12.2, 0.5)], better="higher") is Verdict.CONTRADICTED
    saturated = [*better, finding("b", 11.5, 12.2, 0.1)]
    assert verdict(saturated, better="higher") is Verdict.BETTER
    assert verdict([finding("a", 10, 14, 0.1), finding("b", 11.5, 12.2, 0.1)], better="higher") is Verdict.CONTRADICTED


def test_one_seed_decides_nothing_but_agreement() -> None:
    one = seeded("a", 10, 15.1)
    assert verdict([one, seeded("b", 20, 15.0)]) is Verdict.UNDECIDED
    assert verdict([one]) is Verdict.UNDECIDED
    assert judge(group(), [one]).seeds is None
    assert verdict([seeded("a", 10, 10.9)]) is Verdict.REPRODUCED


def test_differences_are_paired_by_seed() -> None:
    """The seeds are 10 apart, the two figures 1 in each of them: independently taken they would not be told apart."""
    low = seeded("a", 10, 10.0, 20.0, 30.0)
    assert verdict([low, seeded("b", 20, 11.0, 21.1, 31.2)]) is Verdict.SAME_ORDER
    assert verdict([seeded("a", 10, 11.0, 21.1, 32.2), seeded("b", 20, 9.0, 19.0, 30.0)]) is Verdict.CONTRADICTED
    assert verdict([low, seeded("b", 20, 11.0, 41.0, 11.0)]) is Verdict.UNDECIDED


def test_claims_about_differences() -> None:
    alike = [finding("a", 7.9, 13.1, 0.2), finding("b", 7.4, 12.9, 0.2)]
    assert verdict(alike) is Verdict.CONTRADICTED  # as values
    assert verdict(alike, compare="differences") is Verdict.REPRODUCED
    assert verdict([alike[0], finding("b", 7.4, 10, 0.2)], compare="differences") is Verdict.CONTRADICTED
    apart = finding("c", 20, 40, 0.2)
    assert verdict([alike[0], apart], compare="differences") is Verdict.SAME_ORDER  # 27 dB, not 12
    assert verdict([apart, finding("a", 7.9, 60, 0.2)], compare="differences") is Verdict.CONTRADICTED
    assert verdict([seeded("a", 1, 0, 9, 0), seeded("b", 1.2, 9, 0, 2)], compare="differences") is Verdict.UNDECIDED


def test_the_number_of_seeds_that_decides() -> None:
    """By the t quantiles of tables: 2.776 for five seeds, 3.182 for four."""
    values = [0.0, 1.0, 2.0]  # s = 1
    assert seeds_to_decide(values, 2.7764 / math.sqrt(5) + 1e-3) == 5
    assert seeds_to_decide(values, 2.7764 / math.sqrt(5) - 1e-3) == 6
    assert seeds_to_decide(values, 1e-3) is None
    assert seeds_to_decide([1.0], 1.0) is None
    gap = judge(group(), [seeded("a", 10, 0.0, 0.0, 0.0), seeded("b", 20, 0.0, 3.0, 6.0)])
    assert (gap.pairs[0].state, gap.seeds) == (PairState.UNDECIDED, seeds_to_decide([0.0, 3.0, 6.0], 3.0))
    figure = judge(group(), [seeded("a", 10, 10.0, 14.0, 18.0)])
    assert (figure.figures[0].state, figure.seeds) == (FigureState.UNDECIDED, seeds_to_decide([10.0, 14.0, 18.0], 4.0))


def curve(label: str, paper: float, *seeds: tuple[tuple[float, float], ...]) -> Finding:
    return Finding(label, paper, paper, curves=dict(enumerate(seeds)))


def test_curves_are_compared_at_equal_x() -> None:
    """At PMM 0.9 to 1, which both reach, one lies 3 dB below the other; their points have nothing else in common."""
    prune = curve("prune", 2, ((0.8, 10.0), (1.0, 20.0)), ((0.8, 10.2), (1.0, 20.2)))
    refiner = curve("refiner", 1, ((0.9, 12.0), (1.1, 22.0)), ((0.9, 12.0), (1.1, 22.0)))
    both = [prune, refiner]
    assert curve_gap(refiner.curves[0], prune.curves[0]) == pytest.approx(3)
    curves: dict[str, Any] = {
        "along": "pmm",
        "figures": [{"label": label, "paper": 1, "points": [{"arm": label}]} for label in ("prune", "refiner")],
    }
    assert verdict(both, compare="order", **curves) is Verdict.REPRODUCED
    assert verdict([curve("r", 2, *refiner.curves.values()), curve("p", 1, *prune.curves.values())],
                   compare="order", **curves) is Verdict.CONTRADICTED  # fmt: skip
    assert verdict(both, 0.5, compare="differences", **curves) is Verdict.SAME_ORDER  # 3, not 1
    grid, [first, second] = tabulate_curves(both, 3)
    assert grid == pytest.approx([0.9, 0.95, 1.0])
    assert [round(at.mean, 6) for at in first if at] == [15.1, 17.6, 20.1]
    assert [at.high for at in second if at] == pytest.approx([12.0, 14.5, 17.0])
    elsewhere = curve("x", 3, ((0.1, 1.0), (0.2, 1.0)))
    assert judge(group(compare="order", **curves), [prune, elsewhere]).pairs[0].state is PairState.NO_OVERLAP


def test_the_whole_is_as_good_as_its_worst_part() -> None:
    def of(verdict: Verdict, attacker: Attacker | None = None) -> Judgement:
        return Judgement(group().model_copy(update={"attacker": attacker}), [], verdict, [], [])

    parts = [of(Verdict.REPRODUCED), of(Verdict.NOT_MEASURED), of(Verdict.SAME_ORDER, Attacker.PAPER)]
    assert overall(parts) == Whole(Verdict.SAME_ORDER)
    assert overall(parts, Attacker.ADAPTIVE) is None
    contradicted = of(Verdict.CONTRADICTED, Attacker.ADAPTIVE)
    assert overall([*parts, contradicted], Attacker.ADAPTIVE) == Whole(Verdict.CONTRADICTED)
    assert overall([of(Verdict.NOT_MEASURED)]) == Whole(Verdict.NOT_MEASURED)
    undecided = [judge(group(), [seeded("a", 10, 10.0, x, 18.0)]) for x in (14.0, 15.0)]
    assert overall(undecided) == Whole(Verdict.UNDECIDED, max(one.seeds or 0 for one in undecided))


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
        ({"groups": [{**PSNR, "compare": "order", "relative_to": "plain"}]}, "`compare: order` excludes"),
        ({"groups": [{**PSNR, "compare": "order", "along": "pmm"}]}, "curves need both `along` and the `points`"),
        ({"groups": [{**PSNR, "along": "pnm", "compare": "order"}]}, "no column 'pnm'"),
        ({"groups": [PSNR, PSNR]}, "same title"),
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


def test_a_size_changes_the_scenario_and_set_comes_last() -> None:
    own = Reproduction.model_validate({**DOCUMENT, "reduced": {"federation.rounds": 1}, "gpu": {"arms.noise": []}})
    assert own.document(Size.PAPER) == SCENARIO
    assert own.document(Size.GPU)["arms"]["noise"] == []
    assert own.document(Size.REDUCED, ["federation.rounds=3"])["federation"]["rounds"] == 3
    assert own.scenario == SCENARIO
    wrong = own.model_copy(update={"reduced": {"attacks.grnn.iterations": 1}})
    with pytest.raises(UserError, match=r"attacks\.grnn\.iterations"):
        wrong.document(Size.REDUCED)


def swept(tmp_path: Path, rows: list[dict[str, Any]]) -> Sweep:
    """A sweep with these outcomes, as if it had been played."""
    scenario = check_scenario({**SCENARIO, "sweep": {"repeats": 2, "fields": {"training.lr": [0.1, 0.2]}}}, "test")
    folder = RunFolder.create(str(tmp_path), "small")
    folder.write_text("scenario.yaml", scenario.dump())
    base = {"trial": "0", "status": "finished", "run": "trials/0000-0", "arm": "none", "attack": "idlg"}
    SweepFolder(folder).write_outcomes([base | row | {"seed": row["repeat"]} for row in rows])
    return Sweep(folder)


def record_of(groups: list[Group], sweep: Sweep) -> SizeRecord:
    return SizeRecord("", (), {}, {seed: SeedRecord(values) for seed, values in measure(groups, sweep).items()})


def measured(one: Group, sweep: Sweep) -> list[Finding]:
    return make_findings(one, record_of([one], sweep))


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
    relative = measured(group(figures=figures, relative_to="plain"), sweep)[1]
    assert relative.ours is not None
    assert (relative.paper, relative.ours.mean) == (0.5, 0.5)
    assert noisy.also is None
    assert not measured(group(figures=figures, relative_to="lost"), sweep)[0].measured
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
    scenario = check_scenario(
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
    ("ours", "expected"),
    [
        ((3, 5, 9), "reproduced"),
        ((5, 3, 9), "contradicted"),
        ((5, 5, 9), "undecided"),
        ((1, 2, 3), "reproduced"),
    ],
)
def test_of_an_order_without_numbers_the_order_decides(ours: tuple[int, ...], expected: str) -> None:
    found = [finding(str(place), place, mean) for place, mean in enumerate(ours, start=1)]
    for tolerance in (0.5, 2):  # which means nothing here
        assert verdict(found, tolerance, compare="order") == expected
    assert verdict(found[:1], compare="order") is Verdict.NOT_MEASURED


def test_places_alone_do_not_agree() -> None:
    """As numbers they would: 1 and 1 are within the tolerance."""
    found = [finding("a", 1, 1.2), finding("b", 2, 1.1)]
    assert verdict(found, 0.95, compare="order") is Verdict.CONTRADICTED
    assert verdict(found, 0.95) is Verdict.REPRODUCED


def test_what_the_full_size_alone_has_is_absent_from_the_reduced() -> None:
    full = {"label": "large", "paper": 3, "where": {"arm": "none"}, "full_only": True}
    own = Reproduction.model_validate(
        {
            **DOCUMENT,
            "groups": [{**PSNR, "figures": [*PSNR["figures"], full]}, {**PSNR, "title": "x", "figures": [full]}],
        }  # type: ignore[misc]
    )
    assert [len(part.figures) for part in own.compared(Size.PAPER)] == [3, 1]
    assert [len(part.figures) for part in own.compared(Size.REDUCED)] == [2]
    assert len(own.not_compared([Size.REDUCED])) == 2
    assert own.not_compared([Size.REDUCED, Size.PAPER]) == []


def test_a_measure_in_a_convention_is_shown_with_the_true_one(tmp_path: Path) -> None:
    one = group(measure="psnr", true_measure="mse", figures=[{"label": "x", "paper": 30, "where": {"arm": "none"}}])
    sweep = swept(tmp_path, [{"repeat": r, "training.lr": 0.1, "psnr": math.inf, "mse": 10.0 + r} for r in (0, 1)])
    values, true = measure([one], sweep), measure([one.in_true_arithmetic()], sweep)
    record = SizeRecord("", (), {}, {seed: SeedRecord(values[seed], true[seed]) for seed in values})
    [found] = make_findings(one, record)
    assert found.ours is not None
    assert (found.ours.mean, found.also) == (PSNR_CEILING, 10.5)


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
    options = [str(path), "--size", "reduced", "--keep", str(kept)]
    assert "CelebA" in invoke(*options, "--out", str(out))
    page = (kept / "small.md").read_text()
    assert "| plain | 100 | 100 ± 0 |" in page
    assert yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0]) == scenario
    assert "(small.md)" in (kept / "README.md").read_text()
    [run] = out.iterdir()
    first = read_record(kept, "small")
    assert result_of("small", load(path), first).verdict is Verdict.REPRODUCED
    invoke(*options, "--seeds", "3", "--out", str(out))
    second = read_record(kept, "small").sizes[Size.REDUCED].seeds
    assert {seed: second[seed] for seed in (0, 1)} == first.sizes[Size.REDUCED].seeds
    assert [len(yaml.safe_load((other / "scenario.yaml").read_text())["arms"]) for other in out.iterdir()] == [2, 2]
    other = CliRunner().invoke(app, ["reproduce", str(path), "--run", str(run), "--set", "training.lr=0.5"])
    assert other.exit_code == 2
    assert "another scenario" in other.output
    whole = invoke(str(path), "--size", "reduced", "--run", str(run), "--keep", str(tmp_path / "other"))
    assert whole
    values = {
        seed: one.values for seed, one in read_record(tmp_path / "other", "small").sizes[Size.REDUCED].seeds.items()
    }
    assert values == {seed: second[seed].values for seed in (0, 1)}


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
    for text in ("{", '{"name": "odd", "sizes": {"huge": {}}}'):
        (tmp_path / "odd.json").write_text(text)
        with pytest.raises(RunError, match=r"odd\.json"):
            read_records(tmp_path)


SMALL = Reproduction.model_validate(DOCUMENT)


def kept_record(own: Reproduction = SMALL) -> Record:
    parts = fingerprints_of(own, Size.REDUCED, ())
    values = {"PSNR (dB)": {"plain": 100.0, "noisy": 5.0}}
    return Record("small", {Size.REDUCED: SizeRecord("", (), parts, {0: SeedRecord(values), 1: SeedRecord(values)})})


def test_a_record_is_stale_when_what_it_was_computed_with_has_changed(tmp_path: Path) -> None:
    write_record(tmp_path, kept_record())
    kept = read_record(tmp_path, "small").sizes[Size.REDUCED]
    assert kept == kept_record().sizes[Size.REDUCED]
    assert {"attacks.idlg", "defences.gaussian", "models.mlp", "metrics.psnr", "scenario"} <= set(kept.fingerprints)
    assert not find_changes(SMALL, Size.REDUCED, kept)

    def changed(**change: Any) -> tuple[str, ...]:
        return find_changes(Reproduction.model_validate({**DOCUMENT, **change}), Size.REDUCED, kept).changed

    assert changed(claim="something else", remarks="new", groups=[{**PSNR, "tolerance": 7}]) == ()
    assert changed(groups=[{**PSNR, "measure": "ssim"}]) == ("figures", "metrics.psnr", "metrics.ssim")
    assert changed(scenario={**SCENARIO, "sweep": {"repeats": 9}}) == ()
    assert changed(scenario={**SCENARIO, "model": {"name": "lenet"}}) == ("models.lenet", "models.mlp", "scenario")
    old = SizeRecord("", (), {**kept.fingerprints, "attacks.idlg": "0"}, kept.seeds)
    assert find_changes(SMALL, Size.REDUCED, old).changed == ("attacks.idlg",)
    assert find_changes(SMALL, Size.REDUCED, SizeRecord("", (), {}, kept.seeds)).recorded is False
    assert find_changes(SMALL, Size.REDUCED, SizeRecord("", (), {}, kept.seeds))
    unknown = SizeRecord("", ("x=1",), kept.fingerprints, kept.seeds)
    assert find_changes(SMALL, Size.REDUCED, unknown).changed == ("scenario",)


def test_seeds_are_added_to_a_record_that_is_not_stale() -> None:
    record = kept_record()
    more = SizeRecord("", (), record.sizes[Size.REDUCED].fingerprints, {2: SeedRecord({})})
    assert sorted(record.with_seeds(Size.REDUCED, more).sizes[Size.REDUCED].seeds) == [0, 1, 2]
    assert sorted(record.with_seeds(Size.PAPER, more).sizes) == [Size.PAPER, Size.REDUCED]
    other = SizeRecord("", (), {**more.fingerprints, "attacks.idlg": "0"}, more.seeds)
    assert sorted(record.with_seeds(Size.REDUCED, other).sizes[Size.REDUCED].seeds) == [2]


def test_the_code_of_a_component_is_that_of_the_modules_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comments, docstrings, imports and the layout do not count, and neither does a report page."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def written(name: str, own: str, below: str, page: str = "") -> str:
        package = tmp_path / name
        package.mkdir()
        for file, text in (("__init__", ""), ("own", own), ("below", below), ("page", page)):
            (package / f"{file}.py").write_text(text)
        monkeypatch.setattr("rayfed.reproductions.fingerprints.PACKAGES", (f"{name}.own", f"{name}.below"))
        return hash_component(f"{name}.own:Own")

    own, below = "from {}.below import f\nfrom {}.page import g\nx = f(1)\n", "def f(x):\n    return x\n"
    first = written("one", own.format("one", "one"), below)
    same = written("two", '"""Doc."""\n' + own.format("two", "two"), "def f(x):  # why\n    return (x)\n", "y = 2\n")
    assert first == same
    assert written("three", own.format("three", "three"), below.replace("return x", "return -x")) != first
    assert written("four", own.format("four", "four") + "z = 1\n", below) != first


def test_the_rooms_whose_code_counts_exist() -> None:
    assert all(find_spec(package) for package in PACKAGES)


def test_components_of_all_trials_count() -> None:
    scenario = check_scenario({**SCENARIO, "sweep": {"fields": {"model": [{"name": "mlp"}, {"name": "lenet"}]}}}, "")
    used = components(scenario, [group()])
    assert {("models", "mlp"), ("models", "lenet"), ("metrics", "psnr"), ("attacks", "idlg")} <= used
    assert fingerprints(SCENARIO, scenario, [group()])["models.lenet"] == hash_component("rayfed.models.lenet:LeNet")


def test_each_attacker_has_a_verdict(tmp_path: Path) -> None:
    attackers = {"paper": {"attack": "idlg"}, "adaptive": {"attack": "strong"}}
    own = Reproduction.model_validate({**DOCUMENT, "groups": [{**PSNR, "attackers": attackers}], "cause": "stronger"})
    published, adaptive = own.compared(Size.PAPER)
    assert [one.attacker for one in (published, adaptive)] == [Attacker.PAPER, Attacker.ADAPTIVE]
    assert adaptive.figures[0].where == {"arm": "none", "attack": "strong"}
    defaults = [PSNR["figures"][0], {**PSNR["figures"][1], "default_attack": {"attack": "dlg"}}]  # type: ignore[index]
    both = [one.figures[1].where["attack"] for one in group(figures=defaults).by_attacker()]
    assert both == ["idlg", "dlg"]
    values = {published.key: {"plain": 100.0, "noisy": 5.0}, adaptive.key: {"plain": 20.0, "noisy": 60.0}}
    seeds = {seed: SeedRecord(values) for seed in (0, 1)}
    result = result_of("small", own, Record("small", {Size.PAPER: SizeRecord("", (), {}, seeds)}))
    assert result.best is not None
    assert (result.verdict, result.best.adaptive) == (Verdict.REPRODUCED, Whole(Verdict.CONTRADICTED))
    assert result.causes == ["stronger"]


def test_an_unknown_name_says_what_there_is() -> None:
    result = CliRunner().invoke(app, ["reproduce", "dcs2-tabel-1", "--folder", str(REPOSITORY / "reproductions")])
    assert result.exit_code == 2
    assert "did you mean 'dcs2-table-1'" in result.output


OURS = names(str(REPOSITORY / "reproductions"))


@pytest.mark.parametrize("name", OURS)
def test_ours_can_be_played(name: str) -> None:
    own = load(REPOSITORY / "reproductions" / f"{name}.yaml")
    for size in Size if own.scenario is not None else ():
        scenario = check_scenario(own.document(size), name)
        compared = own.compared(size)
        arms = {figure.where["arm"] for part in compared for figure in part.figures if "arm" in figure.where}
        assert arms <= set(scenario.played)
        fields = set(scenario.sweep.fields) if scenario.sweep else set()
        assert {key for part in compared for f in part.figures for key in f.where if "." in key} <= fields


def test_the_kept_pages_are_what_their_records_say() -> None:
    """After a change of an attack or a YAML: `rayfed reproduce pages --keep docs/reproductions`."""
    folder = REPOSITORY / "docs" / "reproductions"
    results = read_results([REPOSITORY / "reproductions" / f"{name}.yaml" for name in OURS], folder)
    assert {record.name for record in read_records(folder)} <= set(OURS)
    assert (folder / pages.INDEX).read_text() == pages.index(results)
    written = {result.name: pages.page(result) for result in results}
    assert {path.stem: path.read_text() for path in folder.glob("*.md") if path.name != pages.INDEX} == written


def test_a_contradiction_of_a_current_record_states_its_cause() -> None:
    folder = REPOSITORY / "docs" / "reproductions"
    for result in read_results([REPOSITORY / "reproductions" / f"{name}.yaml" for name in OURS], folder):
        if result.best and not result.best.staleness and result.verdict is Verdict.CONTRADICTED:
            assert result.causes, result.name


LINK = re.compile(r"\]\(([^)#]+)(?:#([^)]+))?\)|docs/[\w/-]+\.md")


@pytest.mark.parametrize("name", OURS)
def test_links_of_ours_lead_somewhere(name: str) -> None:
    """A link in a YAML is relative to its page: `[text](../findings/refiner.md#section)`."""
    text = (REPOSITORY / "reproductions" / f"{name}.yaml").read_text()
    for link in LINK.finditer(text):
        target, section = link.groups()
        assert target is not None, f"write a link, not the path {link[0]}"
        page = REPOSITORY / "docs" / "reproductions" / target
        if page.parent == REPOSITORY / "docs" / "reproductions":
            assert page.stem in OURS
            continue
        headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
        anchors = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}
        assert section is None or section in anchors, link[0]
