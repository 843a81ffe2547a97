"""The ROC curve against references, and what it takes to state a low false positive rate."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score, roc_curve

from rayfed.evidence.membership import RATES, compute_roc
from rayfed.metrics.roc import auc, needed, share, true_positives


def drawn(members: int, others: int, shift: float, seed: int = 0) -> tuple[list[float], list[float]]:
    rng = np.random.default_rng(seed)
    return rng.normal(shift, 1, members).round(1).tolist(), rng.normal(0, 1, others).round(1).tolist()  # with ties


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_auc_and_rates_are_scikit_learns(shift: float) -> None:
    members, others = drawn(150, 300, shift)
    truth, scores = [1] * 150 + [0] * 300, [*members, *others]
    assert auc(members, others).value == pytest.approx(roc_auc_score(truth, scores))
    false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
    found = true_positives(members, others, 0.01)
    assert found is not None
    assert found.value == pytest.approx(max(t for f, t in zip(false, true, strict=True) if f <= 0.01))


def test_intervals_hold_the_truth_nineteen_times_in_twenty() -> None:
    """Of N(1, 1) against N(0, 1) the area is Phi(1 / sqrt 2)."""
    found = [auc(*drawn(40, 40, 1, seed)) for seed in range(400)]
    held = sum(e.low <= 0.7602 <= e.high for e in found)
    assert 362 <= held <= 395  # 380 but for four deviations


def test_scores_that_do_not_overlap_leave_room_for_doubt() -> None:
    perfect = auc([3, 4, 5], [0, 1, 2])
    assert (perfect.value, perfect.high) == (1, 1)
    assert perfect.low < 0.4
    assert auc([1], [0, 0]).low == 0


@pytest.mark.parametrize(("hits", "of"), [(0, 7), (3, 7), (7, 7), (12, 1000)])
def test_shares_have_clopper_and_pearsons_interval(hits: int, of: int) -> None:
    expected = binomtest(hits, of).proportion_ci(0.95, "exact")
    assert (share(hits, of).low, share(hits, of).high) == pytest.approx((expected.low, expected.high))


def test_a_rate_needs_as_many_non_members_as_it_tells_apart() -> None:
    assert (needed(0.01), needed(0.001)) == (100, 1000)
    members, others = drawn(50, 999, 3)
    assert true_positives(members, others, 0.001) is None
    assert true_positives(members, [*others, 0.0], 0.001) is not None


def rows(victims: int, rounds: int, shift: float, noise: float = 1, same: bool = True) -> list[dict[str, object]]:
    """Each victim's scores have a length and a place of their own."""
    rng, found = np.random.default_rng(0), []
    for victim in range(victims):
        for round in range(rounds):
            scores = [
                {"kind": kind, "sample": i if same else 100 * round + i,
                 "score": victim + 10.0**victim * (shift * (kind == "member") + noise * rng.normal()),
                 "control": victim + 10.0**victim * noise * rng.normal()}
                for kind in ("member", "non-member") for i in range(30)
            ]  # fmt: skip
            found.append({"victim": victim, "round": round, "scores": scores})
    return found


def test_victims_are_pooled_whatever_the_units_of_their_scores() -> None:
    found = compute_roc(rows(4, 1, shift=2))
    assert found is not None
    assert (found.members, found.non_members) == (120, 120)
    assert found.auc.value > 0.85
    assert found.control is not None
    assert found.control.low <= 0.5 <= found.control.high
    assert found.unknown_rates == [RATES[-1]], "0.001 needs 1,000 non-members"


def test_rounds_add_up_where_the_candidates_are_the_same() -> None:
    one, eight, others = (compute_roc(rows(3, r, 0.5, same=same)) for r, same in ((1, True), (8, True), (8, False)))
    assert one is not None
    assert eight is not None
    assert others is not None
    assert (one.members, eight.members, others.members) == (90, 90, 720)
    assert eight.auc.value > max(one.auc.value, others.auc.value) + 0.1


def test_an_attack_that_scores_no_control_has_none() -> None:
    bare = rows(2, 1, shift=1)
    for row in bare:
        row["scores"] = [{**one, "control": None} for one in row["scores"]]
    found = compute_roc(bare)
    assert found is not None
    assert found.control is None


def test_without_scores_there_is_no_curve() -> None:
    assert compute_roc([{"victim": 1, "scores": None}]) is None
