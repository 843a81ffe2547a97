"""Audits by canaries: below the claim and, where theory says they can be, above half of it; planted bugs are found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from rayfed import scenario as scenarios
from rayfed.audits.canaries import CanaryAudit, audit_canaries
from rayfed.cli import app
from rayfed.defences.base import GradientMethod, Task
from rayfed.defences.dp_fedavg import DpFedAvg
from rayfed.defences.dp_sgd import DpSgd
from rayfed.defences.laplace import Laplace
from rayfed.defences.noise import clip_factors
from rayfed.errors import UserError
from rayfed.evidence.empirical_epsilon import bound_epsilon
from rayfed.gradients import norm
from rayfed.privacy.accountant import Release
from rayfed.privacy.spending import Spending
from rayfed.registry import component
from rayfed.simulation.client import local
from rayfed.simulation.inputs import prepare_inputs
from rayfed.update import Named

FEDERATION = """
name: audited
data: {name: digits, size: 8}
model: {name: mlp, hidden: [8]}
training: {epochs: 1, batch_size: 72, lr: 0.1, sampling: poisson}
federation: {rounds: 2, clients: 2}
"""


def spending(release: Release, delta: float = 1e-5) -> Spending:
    return Spending((release,), delta, "sample", "zero-out", "all", "noise")


def one(defence: str, canaries: int = 1438, **changes: str) -> CanaryAudit:
    text = FEDERATION + f"arms: {{arm: [{defence}]}}\n"
    changed = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
    [found] = audit_canaries(prepare_inputs(scenarios.parse(text, changes=changed)), canaries)
    return found


# The bound itself, on numbers


@pytest.mark.parametrize("cut", [1.0, 0.5])
def test_gaussian_scores_show_most_of_the_claim_and_more_where_noise_is_missing(cut: float) -> None:
    """2,000 with and 2,000 without: where the best threshold alone, by (epsilon, delta), shows 0.75."""
    random = np.random.default_rng(5)
    present, absent = (shift + cut * 1.5 * random.standard_normal(2000) for shift in (1.0, 0.0))
    found = bound_epsilon(present.tolist(), absent.tolist(), spending(Release("gaussian", 1.5, 1)))
    assert found.claimed == pytest.approx(2.75, abs=0.01)
    assert found.refutes_claim == (cut < 1)
    assert found.epsilon > (found.claimed if cut < 1 else found.claimed / 2)


@pytest.mark.engine
def test_bounds_hold_as_often_as_they_say() -> None:
    release, broken = Release("gaussian", 1.0, 1), 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        present, absent = (shift + random.standard_normal(200) for shift in (1.0, 0.0))
        broken += bound_epsilon(present.tolist(), absent.tolist(), spending(release)).refutes_claim
    assert broken <= 5  # 2 are expected at most; more than 5 have a probability of 1 %


def test_laplace_noise_is_not_accused_by_a_normal_curve() -> None:
    """At its middle its rates are those of Gaussian noise with an epsilon above 4, which it never claimed."""
    random = np.random.default_rng(1)
    drawn = [np.clip(shift + random.laplace(size=4000), 0, 1) for shift in (1.0, 0.0)]
    present, absent = ((scores + 1e-6 * random.random(4000)).tolist() for scores in drawn)  # without ties
    found = bound_epsilon(present, absent, spending(Release("laplace", 1, 1), 0))
    assert found.claimed == 1
    assert 0.5 < found.epsilon <= 1
    assert not found.refutes_claim


def test_scores_that_are_alike_show_nothing() -> None:
    scores = np.random.default_rng(2).standard_normal((2, 300)).tolist()
    found = bound_epsilon(scores[0], scores[1], spending(Release("gaussian", 1.0, 1)))
    assert found.epsilon < 0.5
    assert bound_epsilon([0.0] * 50, [0.0] * 50, spending(Release("gaussian", 1.0, 1))).epsilon == 0


# What runs really do


@pytest.mark.parametrize(
    "defence",
    [
        "{name: dp_sgd, noise_multiplier: 0.7}",
        "{name: fed_cdp, noise_multiplier: 1.4, clip: 4, last_clip: 2}",
    ],
)
def test_canary_samples_show_over_half_of_what_is_claimed(defence: str) -> None:
    found = one(defence, training__batch_size="null").found  # one step a round: of several, what is sent has all noise
    assert found.claimed / 2 < found.epsilon <= found.claimed


@pytest.mark.parametrize(
    "defence",
    [
        "{name: gaussian, sigma: 1.5, clip: 1}",
        "{name: dp_fedavg, noise_multiplier: 0.8}",
        pytest.param("{name: dp_fedavg, noise_multiplier: 0.8, noise: clients}", marks=pytest.mark.engine),
        "{name: laplace, scale: 1, clip: 1, delta: 1.0e-5}",
    ],
)
def test_canary_clients_show_over_half_of_what_is_claimed(defence: str) -> None:
    found = one(defence, 500, federation__clients="100")
    assert (found.unit, found.runs) == ("client", 5)
    assert found.found.claimed / 2 < found.found.epsilon <= found.found.claimed


@pytest.mark.engine
def test_drawn_samples_stay_below_their_claim() -> None:
    found = one("{name: dp_sgd, noise_multiplier: 0.7}").found
    assert 0 < found.epsilon <= found.claimed


@pytest.mark.engine
def test_drawn_clients_stay_below_their_claim() -> None:
    for sampling in ("poisson", "fixed"):
        extra = {"federation__clients": "100", "federation__clients_per_round": "30", "federation__sampling": sampling}
        found = one("{name: dp_fedavg, noise_multiplier: 0.8}", 500, **extra)
        assert 0 < found.found.epsilon <= found.found.claimed


# Planted bugs


@component
class HalfNoise(DpSgd):
    """Draws half of the noise that is accounted."""

    def noise(self, task: Task) -> float:
        return self.deviation / 2


@component
class ReusedNoise(DpSgd):
    """Draws the same noise in every round."""

    def wrap_gradient(self, next: GradientMethod) -> GradientMethod:
        inner = super().wrap_gradient(next)

        def gradient(task: Task, weights, batch):  # type: ignore[no-untyped-def]
            import torch

            return inner(task.replace(generator=torch.Generator().manual_seed(task.client)), weights, batch)

        return gradient


@component
class ClipsTheMean(DpSgd):
    """Clips a batch's mean gradient, and not each sample's."""

    def clipped_sum(self, each: Named, task: Task) -> Named:
        mean = {name: g.mean(0) for name, g in each.items()}
        factor = clip_factors(norm(mean).double(), self.clip)
        return {name: g * factor.to(g) * task.batch_size for name, g in mean.items()}


@component
class HalfOfTheSum(DpFedAvg):
    """Adds half of the noise to the sum of clients."""

    def wrap_aggregation(self, next, clients):  # type: ignore[no-untyped-def]
        return replace(super().wrap_aggregation(next, clients), deviation=self.deviation / 2)


@component
class HalfLaplace(Laplace):
    """Draws half of the Laplace noise that is accounted."""

    def wrap_update(self, next):  # type: ignore[no-untyped-def]
        return (
            replace(self, scale=self.width / 2, epsilon_per_update=None)
            .__class__.__mro__[1]
            .wrap_update(Laplace(clip=self.clip, scale=self.width / 2), next)
        )


HERE = "tests.audits.test_canaries"


@pytest.mark.engine
@pytest.mark.parametrize(
    ("defence", "changes"),
    [
        (f"{{name: '{HERE}:HalfNoise', noise_multiplier: 0.7}}", {}),
        (f"{{name: '{HERE}:ReusedNoise', noise_multiplier: 2}}", {"training__sampling": "shuffle"}),
        (f"{{name: '{HERE}:ClipsTheMean', noise_multiplier: 0.7}}", {}),
        (f"{{name: '{HERE}:HalfOfTheSum', noise_multiplier: 0.8}}", {"federation__clients": "300"}),
        (f"{{name: '{HERE}:HalfLaplace', scale: 1, clip: 1, delta: 1.0e-5}}", {"federation__clients": "300"}),
    ],
)
def test_planted_bugs_are_found(defence: str, changes: dict[str, str]) -> None:
    found = one(defence, 600, **changes).found
    assert found.refutes_claim
    assert found.epsilon > found.claimed


@pytest.mark.engine
def test_a_missing_draw_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample is in every step, where a tenth of them is accounted."""
    import torch

    honest = local.batches
    every = lambda samples, training, order: [torch.arange(samples) for _ in honest(samples, training, order)]  # noqa: E731
    monkeypatch.setattr(local, "batches", every)
    assert one("{name: dp_sgd, noise_multiplier: 0.7}", 600).found.refutes_claim


# The command


@pytest.mark.engine
def test_the_command_prints_what_is_shown_and_ends_with_1_where_it_is_too_much(tmp_path) -> None:  # type: ignore[no-untyped-def]
    def command(defence: str) -> tuple[int, str]:
        file = tmp_path / "audited.yaml"
        file.write_text(FEDERATION + f"arms: {{none: [], arm: [{defence}]}}\n")
        ended = CliRunner().invoke(
            app, ["canaries", str(file), "--canaries", "600", "--set", "training.batch_size=null"], terminal_width=200
        )
        return ended.exit_code, " ".join(ended.output.split())

    code, output = command("{name: dp_sgd, noise_multiplier: 0.7}")
    assert code == 0, output
    assert "claimed" in output
    code, output = command(f"{{name: '{HERE}:HalfNoise', noise_multiplier: 0.7}}")
    assert code == 1, output
    assert "EXCEEDED" in output


def test_nothing_to_audit_is_said() -> None:
    with pytest.raises(UserError, match="no arm has an"):
        one("{name: prune, ratio: 0.5}")
    with pytest.raises(UserError, match="no noise"):
        one("{name: dp_sgd, noise_multiplier: 0}")
