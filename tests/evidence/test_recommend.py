"""Recommendations: bounds, uncertainty, the nearest, and what the command prints."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayfed.errors import UserError
from rayfed.evidence.baseline_check import mark_idle
from rayfed.evidence.pareto import compute_front
from rayfed.evidence.recommend import (
    MeasureBound,
    Recommendation,
    bound_on_best,
    check_cost,
    parse_bound,
    recommend_setting,
)
from rayfed.evidence.settings import Weakness, group_settings
from rayfed.report.text import recommendation
from rayfed.results.loading import open_results
from tests.helpers.command import run
from tests.helpers.result_fixtures import SIGMA, attacked, outcome, setting, small_run, small_sweep

LEAK, USE = parse_bound("psnr<=12"), parse_bound("test_accuracy>=0.9")


def test_a_bound_is_read() -> None:
    assert parse_bound(" psnr <= 12 ") == MeasureBound("psnr", 12, True)
    assert parse_bound("mse>=1e-2") == MeasureBound("mse", 0.01, False)
    assert bound_on_best(LEAK) == MeasureBound("max_psnr", 12, True)
    assert bound_on_best(USE) == USE


@pytest.mark.parametrize("text", ["psnr", "psnr<12", "psnr<=", "psnr<=much", "psnr<=nan", "psnr<=inf", "<=3"])
def test_what_is_no_bound_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="MEASURE<=VALUE"):
        parse_bound(text)


def test_the_cheapest_that_meets_all_bounds() -> None:
    rows = [
        setting("leaky", psnr=20, test_accuracy=0.95, train_seconds=1),
        setting("dear", psnr=10, test_accuracy=0.95, train_seconds=9, bytes_up=1),
        setting("cheap", psnr=11, test_accuracy=0.92, train_seconds=5, bytes_up=7),
        setting("useless", psnr=5, test_accuracy=0.5, train_seconds=1),
    ]
    found = recommend_setting(rows, [LEAK, USE])
    assert (found.chosen.title, found.meeting, found.candidates) == ("cheap", 2, 4)
    assert recommend_setting(rows, [LEAK, USE], (check_cost("bytes_up"),)).chosen.title == "dear"
    level = [setting("more", train_seconds=1, bytes_up=9), setting("less", train_seconds=1, bytes_up=2)]
    assert recommend_setting(level, [parse_bound("train_seconds<=3")]).chosen.title == "less"
    with pytest.raises(UserError, match="'psnr' is not a cost"):
        check_cost("psnr")


def test_a_bound_holds_when_it_holds_for_every_attack() -> None:
    rows = [setting("a", "dlg", psnr=5), setting("a", "idlg", psnr=14), setting("b", "dlg", psnr=9)]
    found = recommend_setting(rows, [LEAK])
    assert (found.chosen.title, found.meeting) == ("b", 1)
    [check] = recommend_setting(rows[:2], [LEAK]).chosen.checks
    assert check.setting == rows[1]


def repeated(arm: str, attack: str, values: list[float]) -> list[Any]:
    return group_settings([outcome(arm, attack, psnr=value, repeat=place) for place, value in enumerate(values)])


@pytest.mark.parametrize(
    ("values", "sure", "share"),
    [
        ([10.0, 10.1, 9.9], True, 0.0),
        ([11.0, 12.5, 12.0], False, 0.0),
        ([11.0], None, 0.0),
        ([11.0, 11.4], False, 0.0),
        ([13.0, 13.0], False, 1.0),
    ],
)
def test_it_says_how_sure_it_is(values: list[float], sure: bool | None, share: float) -> None:
    [check] = recommend_setting(repeated("a", "dlg", values), [LEAK]).chosen.checks
    assert (check.sure, check.share) == (sure, share)


def test_two_values_are_shown_and_judged_by_their_interval() -> None:
    found = recommend_setting(repeated("a", "dlg", [11.0, 11.4]), [LEAK])
    [check] = found.chosen.checks
    assert recommendation.check_cells(check)[1] == "11.2 dB (11 dB, 11.4 dB)"
    assert check.estimate is not None
    assert check.estimate.pair == (11.0, 11.4)


def test_it_is_as_sure_as_of_the_least_certain_attack() -> None:
    rows = repeated("a", "dlg", [11.0, 11.1, 10.9]) + repeated("a", "idlg", [9.0, 12.9, 10.9])
    [check] = recommend_setting(rows, [LEAK]).chosen.checks
    assert (check.setting, check.sure) == (rows[0], False)


def test_the_nearest_is_weighed_by_the_ranges() -> None:
    rows = [
        setting("private", psnr=8, test_accuracy=0.5),
        setting("between", psnr=16, test_accuracy=0.8),
        setting("useful", psnr=40, test_accuracy=0.9),
    ]
    found = recommend_setting(rows, [LEAK, USE])
    assert (found.meeting, found.chosen.title) == (0, "between")
    assert [v.share for v in found.chosen.checks] == pytest.approx([4 / 32, 0.1 / 0.4])
    assert found.chosen.miss == (0, pytest.approx(math.hypot(4 / 32, 0.25)))
    alone = recommend_setting([setting("a", psnr=13)], [LEAK])
    assert alone.chosen.checks[0].share == 1  # the bound is part of the range: never a division by zero


def test_what_nobody_attacked_is_not_private() -> None:
    rows = [setting("idle", None, test_accuracy=0.99, train_seconds=1), setting("met", psnr=30, test_accuracy=0.1)]
    found = recommend_setting(rows, [LEAK, USE])
    assert (found.chosen.title, [one.title for one in found.unattacked]) == ("met", ["idle"])
    assert recommend_setting(rows, [USE]).chosen.title == "idle"
    assert recommend_setting(rows, [USE]).unattacked == []


def judged(arm: str, verdict: str, attack: str = "dlg", **columns: Any) -> Any:
    [found] = group_settings([outcome(arm, attack, verdict=verdict, **columns)])
    return found


def test_attacks_that_prove_nothing_recommend_nothing() -> None:
    rows = [
        judged("none", "leaks", psnr=30.0, test_accuracy=0.9),
        judged("untold", "inconclusive", psnr=5.0, test_accuracy=0.9),
        judged("failed", "not measured", psnr=5.0, test_accuracy=0.9),
        judged("noise", "not reconstructed", psnr=9.0, test_accuracy=0.8),
    ]
    found = recommend_setting(rows, [LEAK])
    assert (found.chosen.title, found.meeting) == ("noise", 1)
    assert refused(found) == {"untold": (Weakness.INCONCLUSIVE,), "failed": (Weakness.NO_RESULT,)}
    assert recommend_setting(rows, [USE]).meeting == 3, "accuracy is known without attacks"
    assert {each.title for each in compute_front(rows, "psnr", "test_accuracy").best} == {"none", "noise"}
    assert recommend_setting(rows[:3], [LEAK]).meeting == 0


def refused(found: Recommendation) -> dict[str, tuple[Weakness, ...]]:
    return {one.setting.title: one.weaknesses for one in found.refused}


def of_verdicts(arm: str, verdicts: Sequence[str], psnr: Sequence[float], **columns: Any) -> Any:
    """One setting with a verdict and a PSNR for every repeat."""
    both = enumerate(zip(verdicts, psnr, strict=True))
    told = [{"repeat": i, "seed": i, "verdict": one, "psnr": value} for i, (one, value) in both]
    [found] = group_settings([outcome(arm) | each | columns for each in told])
    return found


@pytest.mark.parametrize("failed", [1, 2, 3])
def test_no_bound_is_met_by_repeats_in_which_attacks_failed(failed: int) -> None:
    verdicts = ["inconclusive"] * failed + ["not reconstructed"] * (3 - failed)
    low = of_verdicts("half", verdicts, (5.0, 5.0, 5.1), test_accuracy=0.9)
    found = recommend_setting([low, judged("dear", "not reconstructed", psnr=9.0, train_seconds=9.0)], [LEAK])
    why = Weakness.INCONCLUSIVE if failed == 3 else Weakness.PARTLY_INCONCLUSIVE
    assert (found.chosen.title, found.meeting, refused(found)) == ("dear", 1, {"half": (why,)})
    alone = recommend_setting([low], [LEAK])
    assert (alone.meeting, alone.chosen.checks[0].setting) == (0, None)
    assert recommend_setting([low], [USE]).meeting == 1, "accuracy is known without attacks"


def test_what_attacks_got_beside_failures_may_miss_a_bound() -> None:
    high = of_verdicts("half", ("leaks", "inconclusive", "inconclusive"), (40.0, 5.0, 5.0))
    found = recommend_setting([high], [LEAK])
    assert found.chosen.checks[0].estimate == high.measures["psnr"]
    assert (high.inconclusive, found.refused) == (2, [])


def test_settings_with_the_same_title_are_refused_one_by_one() -> None:
    found = [judged("noise", "not reconstructed", psnr=9.0, test_accuracy=0.8)]
    rows = [outcome("arm", verdict="inconclusive", psnr=5.0, sigma=0.1 + i * 1e-9) for i in range(5)]
    found += group_settings(rows, ["sigma"])
    assert {one.title for one in found[1:]} == {"arm, sigma 0.1"}
    recommended = recommend_setting(found, [LEAK])
    assert [one.setting for one in recommended.refused] == found[1:]


def test_where_updates_are_hidden_there_is_nothing_to_bound() -> None:
    rows = [
        judged("none", "leaks", psnr=30.0, train_seconds=1.0),
        judged("masks", "nothing to attack", train_seconds=2.0),
    ]
    found = recommend_setting(rows, [LEAK])
    assert (found.chosen.title, found.meeting) == ("masks", 1)
    [check] = found.chosen.checks
    assert (check.setting, check.estimate) == (rows[1], None)


def test_hidden_updates_say_nothing_of_members() -> None:
    hidden = judged("masks", "nothing to attack", train_seconds=2.0)
    rows = [judged("none", "leaks", psnr=30.0, inferred=0.3, train_seconds=1.0), hidden]
    assert recommend_setting(rows, [parse_bound("inferred<=0.1")]).meeting == 0


@pytest.mark.parametrize(
    ("bare", "behind", "meeting"),
    [
        ((0.3, 0.32, 0.31), 0.05, 1),
        ((0.3, 0.32), 0.05, 1),
        ((0.3,), 0.05, 1),
        ((0.3,), 0.2, 0),
        ((0.3, -0.3, 0.1), 0.05, 0),
        ((0.3, -0.1), 0.05, 0),
        ((0.0,), 0.05, 0),
        ((), 0.05, 0),
    ],
)
def test_who_infers_nothing_without_a_defence_says_nothing_of_one(
    bare: Sequence[float], behind: float, meeting: int
) -> None:
    arms = {"none": {"defences": []}, "noise": {"defences": ["gaussian"]}, "other": {"model": "mlp", "defences": []}}
    rows = [outcome("none", "membership", seed=seed, inferred=gain) for seed, gain in enumerate(bare)]
    rows += [outcome("noise", "membership", seed=0, inferred=behind), outcome("none", "gan", inferred=0.4)]
    rows += [outcome("other", "membership", seed=0, inferred=0.4)]
    found = recommend_setting(mark_idle(group_settings(rows), {"arms": arms}), [parse_bound("inferred<=0.1")])
    assert (found.meeting, found.chosen.title == "noise") == (meeting, bool(meeting) or behind > 0.1)
    assert (Weakness.IDLE in refused(found).get("noise", ())) == (not bare or min(bare) <= 0)


@pytest.mark.parametrize(("low", "meeting"), [(0.05, 1), (-0.02, 0), (None, 1)])
def test_one_run_shows_that_an_attack_works_by_its_whole_interval(low: float | None, meeting: int) -> None:
    rows = [outcome("none", "membership", seed=0, inferred=0.3, inferred_low=low)]
    rows.append(outcome("noise", "membership", seed=0, inferred=0.05, inferred_low=-0.2))
    arms = {"none": {"defences": []}, "noise": {"defences": ["gaussian"]}}
    assert (
        recommend_setting(mark_idle(group_settings(rows), {"arms": arms}), [parse_bound("inferred<=0.1")]).meeting
        == meeting
    )


@pytest.mark.parametrize("property_gain", [-0.02, 0.3])
def test_a_bound_on_inferences_names_the_attacks_that_nothing_shows_to_work(property_gain: float) -> None:
    gains = {("none", "membership"): 0.4, ("none", "property"): property_gain}
    gains |= {("noise", "membership"): 0.05, ("noise", "property"): 0.0}
    rows = [outcome(*one, seed=0, inferred=gain) for one, gain in gains.items()]
    arms = {"none": {"defences": []}, "noise": {"defences": ["gaussian"]}}
    found = recommend_setting(mark_idle(group_settings(rows), {"arms": arms}), [parse_bound("inferred<=0.1")])
    assert (found.chosen.title, found.meeting) == ("noise", 1)
    assert {one.attack: one.idle for one in found.chosen.settings} == {
        "membership": False,
        "property": property_gain < 0,
    }


def test_no_bound_is_met_where_any_attack_failed_in_some_repeats() -> None:
    """The first attack may have met fewer repeats than another."""
    whole = outcome("half", "a") | {"seed": 0, "verdict": "not reconstructed", "psnr": 5.0}
    verdicts = ["not reconstructed", "inconclusive", "inconclusive"]
    met = [outcome("half", "b") | {"repeat": i, "seed": i, "verdict": v, "psnr": 5.0} for i, v in enumerate(verdicts)]
    assert recommend_setting(group_settings([whole, *met]), [LEAK]).meeting == 0
    assert recommend_setting(group_settings([whole, met[0]]), [LEAK]).meeting == 1


def test_nobody_uses_a_model_that_guesses() -> None:
    noise = judged("noise", "not reconstructed", psnr=6.0, test_accuracy=0.12, baseline_accuracy=0.13)
    rows = [judged("none", "leaks", psnr=30.0, test_accuracy=0.9, baseline_accuracy=0.13), noise]
    assert recommend_setting(rows, [LEAK]).meeting == 0
    assert refused(recommend_setting(rows, [LEAK])) == {"noise": (Weakness.AT_CHANCE,)}
    assert [each.arm for each in compute_front(rows, "psnr", "test_accuracy").best] == ["none"]
    with pytest.raises(UserError, match="chance level"):
        recommend_setting([noise], [LEAK])


@pytest.mark.parametrize("collapsed", [0, 1, 2])
def test_it_says_in_how_many_repeats_the_model_guesses(collapsed: int) -> None:
    accuracies = [0.1] * collapsed + [0.9] * (3 - collapsed)
    rows = [outcome("clip", seed=i, test_accuracy=a, baseline_accuracy=0.13) for i, a in enumerate(accuracies)]
    found = recommend_setting(group_settings(rows), [parse_bound("test_accuracy>=0.2")])
    assert found.chosen.settings[0].collapsed == collapsed


def test_times_within_their_noise_are_a_tie() -> None:
    rows = [
        judged("quick", "leaks", train_seconds=5.0, train_seconds_half=1.0, bytes_up=9.0),
        judged("small", "leaks", train_seconds=5.5, train_seconds_half=1.0, bytes_up=2.0),
        judged("alike", "leaks", train_seconds=5.6, train_seconds_half=1.0, bytes_up=2.0),
        judged("slow", "leaks", train_seconds=9.0, train_seconds_half=1.0, bytes_up=1.0),
    ]
    found = recommend_setting(rows, [parse_bound("train_seconds<=20")])
    assert (found.chosen.title, [one.title for one in found.tied]) == ("small", ["alike"])


def test_what_cannot_be_answered_is_refused() -> None:
    with pytest.raises(UserError, match="no bound"):
        recommend_setting([setting(psnr=1)], [])
    with pytest.raises(UserError, match="no trial has finished"):
        recommend_setting([], [LEAK])
    with pytest.raises(UserError, match=r"'lpips_alex' .*psnr"):
        recommend_setting([setting(psnr=1)], [parse_bound("lpips_alex>=0.3")])
    with pytest.raises(UserError, match=r"\(epsilon, delta\)"):
        recommend_setting([setting(psnr=1)], [parse_bound("epsilon<=3")])


def test_only_an_epsilon_is_a_guarantee() -> None:
    row = outcome("dp", psnr=9.0, epsilon=2.5, delta=1e-5, epsilon_unit="sample")
    rows = [*group_settings([row]), setting("none", psnr=5)]
    unguarded = recommend_setting(rows, [parse_bound("epsilon<=1"), parse_bound("psnr<=6")])
    assert unguarded.chosen.title == "dp"  # a bound that is missed is nearer than one of which nothing is known


def test_a_settings_scenario_can_be_played_again(tmp_path: Path) -> None:
    arms = {"none": {"defences": []}, "noise": {"defences": [{"name": "gaussian", "sigma": 0.1}]}}
    folder = small_run(str(tmp_path), {"arms": arms})
    folder.write_part("attacks", 0, [attacked("none", "dlg", psnr=30.0), attacked("noise", "dlg", psnr=8.0)])
    results = open_results(folder.url)
    chosen = recommend_setting(results.settings(), [LEAK]).chosen
    commands = recommendation.rerun_commands(results.url, results.scenario, chosen)
    *start, changed = shlex.split(commands["this arm"])
    assert start == ["rayfed", "launch", f"{folder.url}/scenario.yaml", "--set"]
    assert yaml.safe_load(changed.removeprefix("arms=")) == {"noise": arms["noise"]}
    assert commands["all arms"] == f"rayfed launch {folder.url}/scenario.yaml"


def test_the_command_answers_for_a_sweep(tmp_path: Path) -> None:
    sweep = small_sweep(tmp_path)
    sweep.files.write_text("status.json", json.dumps({"state": "interrupted"}))
    code, output = run("recommend", sweep.url, "--max-psnr", "12", "--min-accuracy", "0.94")
    assert code == 0, output
    assert f"rayfed launch {sweep.url}/trials/0002-0/scenario.yaml" in output
    assert f"--set sweep=null --set {SIGMA}=0.1" in output
    assert run("recommend", sweep.url, "--max-psnr", "10", "--where", "test_accuracy>=0.97")[0] == 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "no bound"),
        (["--where", "psrn<=12"], "did you mean 'psnr'"),
        (["--where", "psnr=12"], "MEASURE<=VALUE"),
        (["--max-psnr", "12", "--worst"], "'max_psnr'"),
        (["--max-psnr", "12", "--cheapest", "psnr"], "'psnr' is not a cost"),
        (["--min-accuracy", "97"], "--min-accuracy"),
    ],
)
def test_the_users_mistakes_end_with_2(options: list[str], expected: str, tmp_path: Path) -> None:
    code, output = run("recommend", small_sweep(tmp_path).url, *options)
    assert (code, expected in output, "Traceback" in output) == (2, True, False), output


def test_no_such_run(tmp_path: Path) -> None:
    code, output = run("recommend", str(tmp_path / "nothing"), "--max-psnr", "12")
    assert (code, "not a run folder" in output) == (2, True)
