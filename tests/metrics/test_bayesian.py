"""Bayesian privacy: histograms' divergences against scipy, repeats of an attack, the paper's four bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import entropy
from torch import Tensor

from rayfed.attacks.base import Reconstruction
from rayfed.core import seeds
from rayfed.evidence.attack_results import summarise_leakage
from rayfed.evidence.bayesian_criteria import check_criteria
from rayfed.evidence.training import summarise_arms
from rayfed.metrics.bayesian import compute_least_error, knowledge_increment, posterior_knowledge
from rayfed.metrics.score import Scorer
from rayfed.scenario import AttackSpec, parse, resolve
from rayfed.simulation.rounds.attacks import AttackCall, note_attack
from rayfed.simulation.tables import RoundTables, VictimRows
from tests.helpers.attack_fixtures import digit, photo

UNIFORM = np.full(10, 0.1)


def shares(image: Tensor) -> np.ndarray:
    counts, _ = np.histogram(image.double().numpy(), bins=10, range=(0, 1))
    return counts / counts.sum()


@pytest.mark.parametrize("image", [digit(3), photo(60, 120), digit(8)], ids=["digit", "photo", "another digit"])
def test_both_directions_are_those_of_the_histogram(image: Tensor) -> None:
    anything = torch.zeros_like(image)
    floored = (shares(image) + 1e-10) / (1 + 1e-9)
    assert knowledge_increment(anything, image).item() == pytest.approx(entropy(UNIFORM, floored, base=10), rel=1e-9)
    assert posterior_knowledge(anything, image).item() == pytest.approx(
        entropy(shares(image), UNIFORM, base=10), rel=1e-9
    )


def test_the_bounds_are_reached() -> None:
    even, black, white = torch.arange(0.05, 1, 0.1).reshape(1, 1, 2, 5), torch.zeros(1, 1, 2, 5), torch.ones(1, 1, 2, 5)
    images = torch.cat([even, black, white])
    torch.testing.assert_close(posterior_knowledge(images, images), torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(
        knowledge_increment(images, images), torch.tensor([0.0, 8.0, 8.0], dtype=torch.float64), atol=1e-6, rtol=0
    )


def test_the_least_error_of_an_image_that_knows_nothing_is_that_of_a_convex_program() -> None:
    """Table 1 of Gu 2021 prints 0.092 at 0.16 for MNIST, whose pixels have this mean and variance."""
    mean, variance, increment = 0.1307, 0.0949, 0.16
    apart = np.array([min(abs(v - mean) for v in np.linspace(b / 10, (b + 1) / 10, 1001)) ** 2 for b in range(10)])
    solved = minimize(
        lambda h: float(h @ apart),
        UNIFORM,
        options={"ftol": 1e-12, "maxiter": 1000},
        bounds=[(1e-6, 1)] * 10,
        constraints=[
            {"type": "eq", "fun": lambda h: h.sum() - 1},
            {"type": "ineq", "fun": lambda h: increment + np.log10(10 * h).mean()},
        ],
    )
    assert compute_least_error(mean, variance, increment) == pytest.approx(variance + solved.fun, rel=1e-3)
    assert compute_least_error(mean, variance, increment) > 0.15
    assert compute_least_error(mean, variance, 8) == pytest.approx(variance, rel=1e-3)


def test_they_are_columns_of_a_score() -> None:
    true, guess = torch.cat([digit(1), digit(2)]), torch.cat([digit(2), digit(1)])
    rows = Scorer(("bp_ki", "bp_ki_posterior")).score(true, torch.tensor([1, 2]), guess, torch.tensor([2, 1]))
    assert [row["bp_ki"] for row in rows] == pytest.approx(knowledge_increment(true, true).tolist())
    assert [row["bp_ki_posterior"] for row in rows] == pytest.approx(posterior_knowledge(true, true).tolist())


def scored(arm: str, repeat: int, mse: float, bp_ki: float) -> dict[str, object]:
    return {
        "arm": arm, "round": 0, "attack": "dlg", "victim": 1, "repeat": repeat, "sample": 0, "batch_size": 1,
        "observes": "gradient", "knowledge": [], "mse": mse, "psnr": 10.0, "ssim": None, "lpips_alex": None,
        "lpips_vgg": None, "noise_ratio": None, "bp_ki": bp_ki, "bp_ki_posterior": None, "label_accuracy": repeat % 2,
        "iterations": 1, "seconds": 1.0, "status": "ok", "message": "",
    }  # fmt: skip


def trained(arm: str, accuracy: float, seconds: float) -> dict[str, object]:
    return {
        "arm": arm, "round": 0, "test_accuracy": accuracy, "train_accuracy": None, "test_loss": 1.0,
        "non_member_accuracy": None, "non_member_mean_accuracy": None,
        "actor_seconds": seconds, "bytes_up": 1, "bytes_down": 1,
    }  # fmt: skip


def test_repeats_count_in_means_and_have_rows_of_their_own() -> None:
    [leak] = summarise_leakage([scored("none", r, 0.1 * r, 0.2) for r in range(3)], ["none"], {})
    mse, labels = leak.scores["mse"], leak.scores["label_accuracy"]
    assert mse is not None
    assert mse.mean == pytest.approx(0.1)
    assert labels is not None
    assert labels.n == 3
    tables = RoundTables()
    outcome = Reconstruction(torch.zeros(0, 1, 2, 2), torch.tensor([1]), trace=[(0, 1.0)])
    for repeat in range(2):
        arm = resolve(parse("{name: t, federation: {rounds: 1, clients: 2}}"))["none"]
        call = AttackCall(arm, AttackSpec(name="dlg", repeats=2), (4,), repeat, strip=True)
        note_attack(tables, call, 0, [outcome], [VictimRows([{"sample": 0}], [{"sample": 0}], [], [{"sample": 0}])])
    for rows in (tables.attacks, tables.traces, tables.images, tables.snapshots):
        assert [row["repeat"] for row in rows] == [0, 1]


def test_the_first_repeat_draws_what_a_single_attack_draws() -> None:
    first, alone, second = (seeds.torch_generator("x", *seeds.repeat_suffix(r)).initial_seed() for r in (0, 0, 1))
    assert first == alone == seeds.torch_generator("x").initial_seed()
    assert second != first


def test_who_meets_the_papers_bounds() -> None:
    names = ["open", "private", "noisy", "slow"]
    attacks = [
        scored("open", 0, 1e-6, 0.9),
        *(scored("private", r, 0.04 + 0.04 * r, 0.2) for r in range(2)),  # 0.06 in the mean
        scored("noisy", 0, 0.05, 0.3),
        scored("slow", 0, 0.2, 0.1),
    ]
    rounds = [
        trained("open", 0.9, 10),
        trained("private", 0.89, 12),
        trained("noisy", 0.8, 10),
        trained("slow", 0.9, 101),
    ]
    arms = summarise_arms(names, {}, rounds, [])
    found = {v.arm: v for v in check_criteria(arms, summarise_leakage(attacks, names, {}))}
    assert [name for name, met in found.items() if met.satisfies] == ["private"]
    assert (found["open"].accuracy, found["open"].bp_mse, found["open"].bp_ki) == (True, False, False)
    assert (found["noisy"].accuracy, found["noisy"].bp_mse, found["noisy"].bp_ki) == (False, True, True)
    assert found["slow"].seconds is False


def test_there_are_no_criteria_where_bp_ki_was_not_measured() -> None:
    attacks = [scored("none", 0, 0.1, 0.2) | {"bp_ki": None}]
    arms = summarise_arms(["none"], {}, [], [])
    assert check_criteria(arms, summarise_leakage(attacks, ["none"], {})) == []
