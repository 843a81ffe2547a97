"""The simulation of a round on many nodes: its driver's time, and what docs/scaling.md says of it."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.scaling_model import MEASURED, Costs, Plan, fitted, play
from tests.conftest import REPOSITORY

COSTS = Costs(client=0.0, cohort=10.0, call=0.002, row=0.001, fixed=0.0, bytes=0, fold=0.0, wait=0.01)


def test_the_driver_pays_for_every_actor_that_it_waits_for() -> None:
    """Five cohorts of two clients at once: Ray goes through 5, 4, 3, 2 and 1 references."""
    found = play(Plan(per_round=10, cohorts=5, nodes=1, actors=5), COSTS)
    assert found["driver"] == pytest.approx(5 * 0.002 + 10 * 0.001 + 15 * 0.01)
    queued = play(Plan(per_round=10, cohorts=10, nodes=1, actors=5), COSTS)  # a second call is not waited for
    assert queued["driver"] == pytest.approx(10 * 0.002 + 10 * 0.001 + (5 * 6 + 10) * 0.01)


def test_the_page_says_how_far_the_model_is_from_measured_rounds() -> None:
    measured = json.loads(MEASURED.read_text())
    costs = fitted(measured["growing"], measured["fine"][0], bytes=4 * 13_426, fold=2.5e-9, wait=0.0)
    points = measured["growing"] + measured["fine"]
    ratios = [play(Plan(p["per_round"], p["cohorts"], 1, 2), costs)["seconds"] / p["seconds"] for p in points]
    page = (REPOSITORY / "docs" / "scaling.md").read_text()
    [within] = re.findall(r"It meets all rounds of two actors within (\d+) %", page)
    assert max(abs(ratio - 1) for ratio in ratios) <= int(within) / 100
