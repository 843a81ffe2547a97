"""Arms with opponents: their names are looked up in the scenario and not split."""

from __future__ import annotations

from typing import Any

import pytest

from rayfed.evidence.arms import arm_and_opponent
from rayfed.evidence.robustness import robustness_matrix
from rayfed.evidence.settings import group_settings
from tests.helpers.result_fixtures import outcome

SCENARIO = {"arms": {"dp": {}, "dp vs": {}, "a vs b": {}}, "opponents": {"flip": {}, "c vs d": {}}}


def evaluated(arm: str, accuracy: float) -> dict[str, Any]:
    return {"arm": arm, "round": 0, "test_accuracy": accuracy, "backdoor_accuracy": None}


def test_the_matrix_has_the_pairs_of_the_scenario() -> None:
    found = robustness_matrix([evaluated("dp vs flip", 0.5), evaluated("a vs b vs c vs d", 0.75)], SCENARIO)
    assert {pair: one.accuracy for pair, one in found.results.items()} == {
        ("dp", "flip"): 0.5, ("a vs b", "c vs d"): 0.75,
    }  # fmt: skip
    assert (found.arms, found.opponents) == (["dp", "a vs b"], ["flip", "c vs d"])


@pytest.mark.parametrize("names", [("bare vs x", "noise vs y"), ("bare", "noise")])
def test_arms_with_malicious_clients_are_no_pairs(names: tuple[str, str]) -> None:
    arms = {name: {"defences": [], "malicious": {"name": "label_flip"}} for name in names}
    assert arm_and_opponent({"arms": arms}, names[1]) == (names[1], "")


def test_pairs_of_an_earlier_version_are_read() -> None:
    arms = {
        f"{arm} vs {opponent}": {"defences": [], "malicious": {"name": opponent}}
        for arm in ("a", "b") for opponent in ("flip", "noise")
    }  # fmt: skip
    assert arm_and_opponent({"arms": arms}, "b vs noise") == ("b", "noise")


def test_an_arm_without_opponents_is_not_in_the_matrix() -> None:
    assert robustness_matrix([evaluated("dp vs strong", 0.5)], {"arms": {"dp": {}, "dp vs strong": {}}}).results == {}


def test_a_setting_has_the_swept_values_of_its_own_arm() -> None:
    fields = ["training.lr", "arms.dp.dp_sgd.noise", "arms.a vs b.dp_sgd.noise"]
    values = dict(zip(fields, (0.1, 1.0, 2.0), strict=True))
    found = group_settings([outcome(f"{arm} vs flip", **values) for arm in SCENARIO["arms"]], fields, scenario=SCENARIO)
    assert [one.fields for one in found] == [
        {"training.lr": 0.1, "arms.dp.dp_sgd.noise": 1.0},
        {"training.lr": 0.1},
        {"training.lr": 0.1, "arms.a vs b.dp_sgd.noise": 2.0},
    ]
