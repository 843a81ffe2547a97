"""Robust rules against independent implementations, in any order of clients, and with some of them far out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import trim_mean

from rayfed import scenario as scenarios
from rayfed.aggregation.base import Aggregation
from rayfed.aggregation.fedavg import FedAvg
from rayfed.aggregation.geometric_median import GeometricMedian
from rayfed.aggregation.krum import Krum
from rayfed.aggregation.median import Median
from rayfed.aggregation.norm_bounding import NormBounding
from rayfed.aggregation.server import TreeFold
from rayfed.aggregation.trimmed_mean import TrimmedMean
from rayfed.errors import UserError
from rayfed.simulation.inputs import prepare_inputs
from rayfed.update import Update

ROBUST = [Median(), TrimmedMean(malicious=4), Krum(malicious=4), Krum(malicious=4, keep=7), GeometricMedian()]


def updates(count: int, spread: float = 1.0) -> list[Update]:
    """Around (1, ..., 1), in double precision; client c has c + 1 samples."""
    g = torch.Generator().manual_seed(count)

    def around(*shape: int) -> torch.Tensor:
        return 1 + spread * torch.randn(*shape, generator=g, dtype=torch.float64)

    return [
        Update(c, 0, {"w": around(2, 3), "b": around(2)}, {"mean": around(3)}, samples=c + 1, loss=0.0)
        for c in range(count)
    ]


def rows(sent: Sequence[Update]) -> np.ndarray:
    """(n, 8)."""
    return np.array([np.concatenate([t.numpy().ravel() for t in u.tensors.values()]) for u in sent])


def applied(rule: Aggregation, sent: Sequence[Update]) -> tuple[np.ndarray, np.ndarray]:
    """The step and the buffers of cohorts of two."""
    fold = TreeFold(rule, (len(sent) + 1) // 2)
    for i in range(0, len(sent), 2):
        fold.add(i // 2, rule.partial(sent[i : i + 2]))
    step, buffers = rule.combine(fold.total(), torch.Generator())
    return np.concatenate([t.numpy().ravel() for t in step.values()]), buffers["mean"].numpy()


def titled(rule: Any) -> str:
    return f"{type(rule).__name__}{getattr(rule, 'keep', '')}"


def test_trimmed_mean_is_scipys() -> None:
    sent = updates(11)
    np.testing.assert_allclose(applied(TrimmedMean(malicious=3), sent)[0], trim_mean(rows(sent), 3 / 11 + 1e-9))
    np.testing.assert_allclose(applied(TrimmedMean(malicious=0), sent)[0], rows(sent).mean(0))


def brute_force_krum(x: np.ndarray, f: int, keep: int) -> np.ndarray:
    scores = []
    for i in range(len(x)):
        distances = sorted(((x[i] - x[j]) ** 2).sum() for j in range(len(x)) if j != i)
        scores.append(sum(distances[: len(x) - f - 2]))
    return x[np.argsort(scores)[:keep]].mean(axis=0)


@pytest.mark.parametrize("keep", [1, 4, 8])
@pytest.mark.parametrize("f", [0, 1, 3])
def test_krum_is_what_every_pair_says(f: int, keep: int) -> None:
    sent = updates(11)
    step, buffers = applied(Krum(malicious=f, keep=keep), sent)
    np.testing.assert_allclose(step, brute_force_krum(rows(sent), f, keep))
    own = np.array([u.buffers["mean"].numpy() for u in sent])
    np.testing.assert_allclose(buffers, brute_force_krum(own, f, keep))


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_geometric_median_is_the_minimum_of_the_distances(weights: Any) -> None:
    sent = updates(9)
    x, shares = rows(sent), np.arange(1, 10) if weights == "samples" else np.ones(9)
    best = minimize(lambda v: shares @ np.linalg.norm(x - v, axis=1), x.mean(0), method="BFGS", options={"gtol": 1e-9})
    np.testing.assert_allclose(applied(GeometricMedian(weights=weights), sent)[0], best.x, atol=1e-5)


def test_geometric_median_of_a_line_is_the_middle_one_and_of_a_point_itself() -> None:
    line = torch.tensor([[0.0, 0.0], [1.0, 1.0], [5.0, 5.0]])
    torch.testing.assert_close(GeometricMedian().reduce(line, torch.ones(3)), line[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(GeometricMedian().reduce(line[:1], torch.ones(1)), line[0])


def test_norm_bounding_shortens_what_is_longer() -> None:
    sent, bound = updates(7), float(np.median(np.linalg.norm(rows(updates(7)), axis=1)))
    lengths = np.linalg.norm(rows(sent), axis=1, keepdims=True)
    clipped = np.where(lengths > bound, rows(sent) * bound / lengths, rows(sent))
    step, buffers = applied(NormBounding(norm=bound), sent)
    np.testing.assert_allclose(step, np.average(clipped, axis=0, weights=np.arange(1, 8)))
    np.testing.assert_allclose(buffers, np.median([u.buffers["mean"].numpy() for u in sent], axis=0))
    np.testing.assert_allclose(applied(NormBounding(norm=bound, weights="uniform"), sent)[0], clipped.mean(0))


def test_a_norm_that_nobody_reaches_changes_nothing() -> None:
    sent = updates(6)
    np.testing.assert_allclose(applied(NormBounding(norm=1e9), sent)[0], applied(FedAvg(), sent)[0])


@pytest.mark.parametrize("rule", [*ROBUST, NormBounding(norm=2)], ids=titled)
def test_who_is_who_does_not_matter(rule: Aggregation) -> None:
    sent = updates(11)
    for seed in range(3):
        shuffled = [sent[i] for i in torch.randperm(11, generator=torch.Generator().manual_seed(seed))]
        for before, after in zip(applied(rule, sent), applied(rule, shuffled), strict=True):
            np.testing.assert_allclose(after, before, rtol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", ROBUST, ids=titled)
def test_four_of_eleven_far_out_do_not_move_it(rule: Aggregation, dtype: torch.dtype) -> None:
    """In updates and buffers; also where all four say the same, which a rule by distances could take for a crowd."""
    for same in (True, False):
        sent = updates(11, spread=0.1)
        for number, update in enumerate(sent[:4]):  # of the fewest samples
            for tensor in [*update.tensors.values(), *update.buffers.values()]:
                tensor.fill_(1e6 if same else (-1) ** number * 10.0 ** (6 + number))
        for update in sent:
            for named in (update.tensors, update.buffers):
                named.update({name: tensor.to(dtype) for name, tensor in named.items()})
        for found in applied(rule, sent):
            assert abs(found - 1).max() < 0.5


def test_beyond_their_breakdown_point_they_follow() -> None:
    for rule in ROBUST:
        sent = updates(11, spread=0.1)
        for update in sent[3:]:
            for tensor in update.tensors.values():
                tensor.fill_(1e6)
        assert applied(rule, sent)[0].max() > 1e5, titled(rule)


def test_norm_bounding_lets_an_outlier_move_it_by_the_norm_and_no_more() -> None:
    sent = updates(11, spread=0.1)
    honest = applied(NormBounding(norm=3, weights="uniform"), sent)[0]
    sent[0].tensors["w"].fill_(1e6)
    assert np.linalg.norm(applied(NormBounding(norm=3, weights="uniform"), sent)[0] - honest) <= 2 * 3 / 11 + 1e-9


def test_buffers_may_be_none() -> None:
    sent = [Update(0, 0, {"w": torch.ones(2)}, {}, 1, 0.0)]
    for rule in (Median(), GeometricMedian(), NormBounding(norm=1)):
        assert rule.combine(rule.partial(sent), torch.Generator())[1] == {}


@pytest.mark.parametrize(
    ("aggregation", "federation", "message"),
    [
        ("{name: krum, malicious: 2}", "clients: 6", "at least 7 clients per round, but a round has 6"),
        ("{name: krum, malicious: 1, keep: 6}", "clients: 6", "5 of 6 with malicious: 1"),
        ("{name: trimmed_mean, malicious: 3}", "clients: 6", "removes 6 values, but a round has only 6 clients"),
        ("{name: trimmed_mean, malicious: 2}", "clients: 9, clients_per_round: 4", "removes 4 values"),
        ("{name: trimmed_mean, malicious: 2}", "clients: 20, clients_per_round: 7, sampling: poisson", "removes 4"),
    ],
)
def test_more_malicious_clients_than_a_rule_can_bear_are_told_before_a_round(
    aggregation: str, federation: str, message: str
) -> None:
    text = f"{{name: t, model: mlp, federation: {{rounds: 40, {federation}, aggregation: {aggregation}}}}}"
    with pytest.raises(UserError, match=message):
        prepare_inputs(scenarios.parse(text))


def test_as_many_as_it_can_bear_are_fine() -> None:
    for aggregation in ("{name: krum, malicious: 2, keep: 5}", "{name: trimmed_mean, malicious: 3}"):
        prepare_inputs(
            scenarios.parse(f"{{name: t, federation: {{rounds: 1, clients: 7, aggregation: {aggregation}}}}}")
        )
