"""Arms with opponents: their names are looked up in the scenario and not split."""

from __future__ import annotations

from typing import Any

from rayfed.analysis.robustness import matrix
from rayfed.analysis.settings import settings
from tests.result_fixtures import outcome

SCENARIO = {"arms": {"dp": {}, "dp vs": {}, "a vs b": {}}, "opponents": {"flip": {}, "c vs d": {}}}


def evaluated(arm: str, accuracy: float) -> dict[str, Any]:
    return {"arm": arm, "round": 0, "test_accuracy": accuracy, "backdoor_accuracy": None}


def test_the_matrix_has_the_pairs_of_the_scenario() -> None:
    found = matrix([evaluated("dp vs flip", 0.5), evaluated("a vs b vs c vs d", 0.75)], SCENARIO)
    assert {pair: one.accuracy for pair, one in found.outcomes.items()} == {
        ("dp", "flip"): 0.5, ("a vs b", "c vs d"): 0.75,
    }  # fmt: skip
    assert (found.arms, found.opponents) == (["dp", "a vs b"], ["flip", "c vs d"])


def test_an_arm_without_opponents_is_not_in_the_matrix() -> None:
    assert matrix([evaluated("dp vs strong", 0.5)], {"arms": {"dp": {}, "dp vs strong": {}}}).outcomes == {}


def test_a_setting_has_the_swept_values_of_its_own_arm() -> None:
    fields = ["training.lr", "arms.dp.dp_sgd.noise", "arms.a vs b.dp_sgd.noise"]
    values = dict(zip(fields, (0.1, 1.0, 2.0), strict=True))
    found = settings([outcome(f"{arm} vs flip", **values) for arm in SCENARIO["arms"]], fields, scenario=SCENARIO)
    assert [one.fields for one in found] == [
        {"training.lr": 0.1, "arms.dp.dp_sgd.noise": 1.0},
        {"training.lr": 0.1},
        {"training.lr": 0.1, "arms.a vs b.dp_sgd.noise": 2.0},
    ]
