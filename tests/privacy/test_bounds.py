"""Bounds on guesses and membership tests: against closed forms, and against attackers who play the mechanism itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm
from typer.testing import CliRunner

from rayfed import scenario as scenarios
from rayfed.cli import app
from rayfed.defences.base import Task
from rayfed.defences.dp_sgd import DpSgd
from rayfed.errors import UserError
from rayfed.evidence.proved_bounds import (
    BoundComparison,
    attacks_without_bound,
    closest_comparisons,
    compare_bounds,
    nontrivial_comparisons,
)
from rayfed.evidence.recommend import parse_bound, recommend_setting
from rayfed.evidence.settings import group_settings
from rayfed.metrics.roc import share
from rayfed.privacy.accountant import Release
from rayfed.privacy.printing import format_share_bound
from rayfed.privacy.tradeoff import TradeOff
from rayfed.registry import component
from rayfed.report.export.figures import write_figures
from rayfed.report.html.run import write_report
from rayfed.report.text.proved_bounds import bound_rows
from rayfed.results.loading import open_results
from rayfed.runs import runner
from rayfed.runs.bounds import BoundExceeded
from rayfed.simulation.executors.local import local
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress
from rayfed.store import exits
from rayfed.store.folder import RunFolder
from tests.helpers.result_fixtures import attacked, small_run

ACCOUNTS = """
name: x
data: {name: digits, size: 8}
model: {name: mlp, hidden: [8]}
federation: {rounds: 4, clients: 6}
arms:
  samples: [{name: dp_sgd, noise_multiplier: 2}]
  clients: [{name: gaussian, sigma: 8, clip: 1}]
  bare: [{name: gaussian, sigma: 8}]
"""
CHANCES = (0.5, 0.1, 0.01, 0.001)


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("steps", [1, 10, 100])
def test_gaussian_bounds_are_the_closed_form_to_a_thousandth(multiplier: float, steps: int) -> None:
    """Phi(Phi^-1(a) + sqrt(T) / sigma) and, of the advantage, 2 Phi(sqrt(T) / 2 sigma) - 1, never below."""
    curve, moved = TradeOff.from_releases([Release("gaussian", multiplier, steps)]), steps**0.5 / multiplier
    for chance in CHANCES:
        assert 0 <= curve.at_most(chance) - norm.cdf(norm.ppf(chance) + moved) < 1e-3
    assert 0 <= curve.advantage - (2 * norm.cdf(moved / 2) - 1) < 1e-3


def test_laplace_bounds_are_the_closed_form() -> None:
    """Dong, Roth and Su 2022, the trade-off function of Laplace noise: three pieces."""
    curve, scale = TradeOff.from_releases([Release("laplace", 2.0, 1)]), 0.5
    for chance in (0.001, 0.1, 0.3, 0.5, 0.9):
        if chance <= np.exp(-scale) / 2:
            exact = np.exp(scale) * chance
        elif chance < 0.5:
            exact = 1 - np.exp(-scale) / (4 * chance)
        else:
            exact = 1 - np.exp(-scale) * (1 - chance)
        assert 0 <= curve.at_most(chance) - exact < 1e-3


def test_the_figures_of_subsampled_noise_are_those_of_the_paper_and_of_a_mixture() -> None:
    """One step is a mixture, of which the best test of `with` against `without` is that of the normal."""
    curve, rate = TradeOff.from_releases([Release("gaussian", 1.0, 1, 0.2)]), 0.2
    for chance in CHANCES:
        exact = (1 - rate) * chance + rate * norm.cdf(norm.ppf(chance) + 1)
        assert curve.at_most(chance) - exact >= -1e-12
    long = TradeOff.from_releases([Release("gaussian", 1.0, 1000, 0.01)])
    assert [format_share_bound(long.at_most(a)) for a in (0.1, 0.01)] == ["19.5 %", "2.92 %"]


@pytest.mark.parametrize(
    "release",
    [
        Release("gaussian", 0.005, 60),
        Release("gaussian", 0.5, 5000),
        Release("gaussian", 0.0, 3),
        Release("gaussian", 1.0, 50, drawn=(5, 10)),
    ],
)
def test_bounds_never_fall_and_are_never_below_chance(release: Release) -> None:
    curve = TradeOff.from_releases([release])
    found = [curve.at_most(chance) for chance in (0.0, 1e-6, *CHANCES[::-1], 0.9, 1.0)]
    assert all(low <= high + 1e-12 for low, high in pairwise(found))
    assert all(a <= t <= 1 for a, t in zip((0.0, 1e-6, *CHANCES[::-1], 0.9, 1.0), found, strict=True))
    assert 0 <= curve.advantage <= 1
    if release.multiplier < 0.5:
        assert curve.at_most(0.01) > 0.999


def test_nothing_released_tells_nothing() -> None:
    curve = TradeOff.from_releases([Release("gaussian", 1.0, 0)])
    assert [curve.at_most(chance) for chance in CHANCES] == list(CHANCES)
    assert curve.advantage == 0


def test_the_unit_that_is_worst_off_counts_and_releases_of_one_unit_add_up() -> None:
    some = [Release("gaussian", 2.0, steps) for steps in (4, 9, 1)]
    assert TradeOff.from_releases(some).at_most(0.01) == TradeOff.from_releases(some[1:2]).at_most(0.01)
    both = TradeOff.from_releases([Release("gaussian", 2.0, 4)]).after([Release("gaussian", 1.0, 3)])
    assert both.at_most(0.01) == pytest.approx(norm.cdf(norm.ppf(0.01) + 2), abs=1e-4)


@pytest.mark.parametrize(("candidates", "rate", "steps"), [(10, 1.0, 1), (10, 1.0, 9), (100, 1.0, 4), (10, 0.3, 6)])
def test_no_guesser_is_above_the_bound_and_the_best_comes_near(candidates: int, rate: float, steps: int) -> None:
    """An attacker who knows the mechanism picks the likeliest of N orthogonal records, each with its own draws.

    Of N orthogonal records he knows more than of one, so without a draw he is above half of what he gains at most.
    """
    random, trials, sigma = np.random.default_rng(candidates + steps), 4000, 3.0
    loglikelihood = np.zeros((trials, candidates))
    for _ in range(steps):
        seen = sigma * random.standard_normal((trials, candidates))
        seen[:, 0] += random.random(trials) < rate  # the true record is the first
        loglikelihood += np.log1p(rate * np.expm1((seen - 0.5) / sigma**2))
    right = share(int((loglikelihood.argmax(1) == 0).sum()), trials)
    bound = TradeOff.from_releases([Release("gaussian", sigma, steps, rate)]).at_most(1 / candidates)
    assert right.low <= bound
    if rate == 1:
        assert right.high - 1 / candidates > 0.4 * (bound - 1 / candidates)


@pytest.mark.parametrize("chance", [0.01, 0.1])
def test_the_best_membership_test_meets_the_bound(chance: float) -> None:
    random, trials, sigma, steps = np.random.default_rng(4), 20_000, 2.0, 4
    scores = sigma * random.standard_normal((2, trials, steps)).sum(2)
    hits = int((scores[0] + steps > sigma * steps**0.5 * norm.isf(chance)).sum())
    found, bound = share(hits, trials), TradeOff.from_releases([Release("gaussian", sigma, steps)]).at_most(chance)
    assert found.low <= bound <= found.high


def test_shares_are_printed_rounded_up() -> None:
    assert [format_share_bound(x) for x in (0.029139, 0.1, 1.0, 0.40000000001)] == [
        "2.92 %",
        "10.0 %",
        "100 %",
        "40.1 %",
    ]


def test_an_account_carries_its_bounds_and_says_which_unit_they_are_about() -> None:
    samples, clients, bare = prepare_inputs(scenarios.parse(ACCOUNTS)).privacy
    for row in (samples, clients):  # four releases of a multiplier of 2, and of 8 over twice the clip bound
        moved = 2 / (2 if row is samples else 4)
        assert row["rero_100"] == pytest.approx(norm.cdf(norm.ppf(0.01) + moved), abs=1e-4)
        assert row["advantage"] == pytest.approx(2 * norm.cdf(moved / 2) - 1, abs=1e-4)
    assert "rero_100" not in bare
    rows = bound_rows([{"arm": "a", **row} for row in (samples, clients, bare)])
    assert len(rows) == 2, "none without an account"
    advantage = format_share_bound(samples["advantage"])
    assert rows[0][3:] == ["39.0 %", "9.24 %", "1.83 %", "1.83 %", advantage]


def test_a_setting_is_recommended_by_its_proved_bound() -> None:
    rows = [
        {"arm": arm, "attack": None, "rero": rero, "epsilon": epsilon, "delta": delta, "train_seconds": 1.0}
        | {f"epsilon_{name}": "the same" for name in ("unit", "adjacency", "against")}
        for arm, rero, epsilon, delta in (("much", 0.2, 3.0, 1e-5), ("less", 0.04, 2.0, 1e-6))
    ]
    found = recommend_setting(group_settings(rows), [parse_bound("rero<=0.05")])
    assert (found.chosen.title, found.meeting) == ("less", 1)  # whatever the deltas, of which it knows nothing
    with pytest.raises(UserError, match="different kinds"):
        recommend_setting(group_settings(rows), [parse_bound("epsilon<=5")])
    with pytest.raises(UserError, match="bound on rero"):
        recommend_setting(group_settings([row | {"rero": None} for row in rows]), [parse_bound("rero<=0.05")])


def test_a_bound_that_nothing_could_pass_is_compared_with_nothing() -> None:
    """Of few samples all is possible: a row beside a bound of 100 % would read as if something were proved."""
    few, chance = share(0, 4, 1e-4), share(0, 4, 1e-4)
    vacuous = BoundComparison("x", "a", None, 0, 4, few, chance, 1.0)
    telling_one, passed = replace(vacuous, bound=0.4), replace(vacuous, share=share(4000, 4000, 1e-4), bound=0.995)
    assert nontrivial_comparisons([vacuous, telling_one, passed]) == [telling_one, passed]
    assert closest_comparisons([vacuous]) == []


def test_page_and_figures_have_no_bounds_that_prove_nothing(tmp_path: Path) -> None:
    scores = {"psnr": 9.0, "identified": 0.0, "decoy_identified": 0.0}
    for present, there in ((1.0, False), (0.4, True)):
        folder = small_run(str(tmp_path / str(there)), {"arms": {"dp": ["dp_sgd"]}})
        folder.write_part("attacks", 0, [attacked("dp", "a", i, **scores) for i in range(4)])
        curve = {
            "arm": "dp",
            "attack": "a",
            "defence": "dp_sgd",
            "unit": "sample",
            "chance": 1.0,
            "present": 1.0,
            "another": present,
        }
        folder.write_part("proved", 0, [curve])
        assert ("Proved bound</th>" in Path(write_report(folder)).read_text()) == there
        assert ("proved" in write_figures(open_results(folder.url), str(tmp_path / "figures" / str(there)))) == there


@component
class Forgets(DpSgd):
    """Plants a bug: what is accounted is not drawn."""

    def noise(self, task: Task) -> float:
        return 0.0


PLANTED = """
name: x
data: {{name: digits, size: 8}}
model: {{name: mlp, hidden: [16]}}
federation: {{rounds: 1, clients: 40}}
defences: [{{name: '{defence}', noise_multiplier: 10}}]
attacks: [{{name: analytic, observes: gradient, victims: 40}}]
"""


@pytest.mark.engine
def test_a_measurement_above_its_bound_is_an_error_of_ours(tmp_path: Path) -> None:
    honest = runner.attack(scenarios.parse(PLANTED.format(defence="dp_sgd")), None, str(tmp_path), local, Progress())
    [one] = compare_bounds(*(honest.read_table(name).to_pylist() for name in ("proved", "attacks", "inferences")))
    assert one.share.low <= one.bound < 0.4
    assert one.count == 40
    planted = scenarios.parse(PLANTED.format(defence="tests.privacy.test_bounds:Forgets"))
    with pytest.raises(BoundExceeded):
        runner.attack(planted, None, str(tmp_path / "planted"), local, Progress())
    [left] = (tmp_path / "planted").iterdir()
    assert exits.read_status(RunFolder.open(str(left)))["state"] == "failed"


def test_the_command_ends_with_1_and_both_figures(tmp_path: Path) -> None:
    file = tmp_path / "planted.yaml"
    file.write_text(PLANTED.format(defence="tests.privacy.test_bounds:Forgets"))
    ended = CliRunner().invoke(app, ["attack", str(file), "--executor", "local", "--out", str(tmp_path), "--quiet"])
    assert ended.exit_code == 1


def test_only_what_an_account_covers_is_compared() -> None:
    attacks = """
attacks:
  - {name: analytic, observes: gradient, label: plain, victims: 2}
  - {name: membership, knowledge: [candidates], label: asked, rounds: [0, 3]}
  - {name: analytic, observes: gradient, batch_size: 2, averages: 9, knowledge: [defence], label: mean}
"""
    found = prepare_inputs(scenarios.parse(ACCOUNTS + attacks))
    rows = {(row["arm"], row["attack"]): row for row in found.proved(training=True) if row["chance"] == 1e-4}
    assert {arm for arm, _ in rows} == {"samples", "clients"}  # bare noise has none, nor a server's noise for a server

    def exact(moved: float) -> float:
        return float(norm.cdf(norm.ppf(1e-4) + moved))

    present = {attack: rows["samples", attack]["present"] for attack in ("plain", "asked", "mean")}
    four, noise = 4, 2.0  # rounds of one step each, whose batch is the client's whole part, beside what is asked for
    assert present["plain"] == pytest.approx(exact((four + 1) ** 0.5 / noise), rel=1e-3)
    assert present["asked"] == pytest.approx(exact(four**0.5 / noise), rel=1e-3)
    assert present["mean"] == pytest.approx(exact((four + 9) ** 0.5 / noise), rel=1e-3)
    assert rows["samples", "plain"]["another"] == pytest.approx(exact(2 * 5**0.5 / noise), rel=1e-3)
    assert rows["clients", "plain"]["another"] == rows["clients", "plain"]["present"]


def test_a_unit_that_is_known_to_take_part_is_hidden_by_no_draw() -> None:
    drawn = TradeOff.from_releases([Release("gaussian", 1.0, 10, rate=0.01)])
    whole = TradeOff.from_releases([Release("gaussian", 1.0, 10)])
    assert drawn.taking_part.at_most(0.01) == whole.at_most(0.01) > drawn.at_most(0.01)


def test_nothing_is_proved_where_noise_is_next_to_nothing() -> None:
    assert TradeOff.from_releases([Release("gaussian", 1e-5, 1, rate=0.03)]).at_most(0.01) == 1.0


def test_attacks_beyond_an_account_are_named() -> None:
    privacy = [{"arm": "dp", "epsilon": 1.0}, {"arm": "none", "epsilon": None}]
    proved = [
        {"arm": "dp", "attack": name, "chance": 1e-4, "present": most} for name, most in (("own", 0.1), ("many", 1.0))
    ]
    attacks = [{"arm": arm, "attack": name} for arm in ("dp", "none") for name in ("own", "many", "keyed")]
    assert attacks_without_bound(privacy, proved, attacks, []) == [("dp", "many"), ("dp", "keyed")]
