"""Accountants against reference figures, mechanisms against their moments and against an attacker who tests them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from rayfed import scenario as scenarios
from rayfed.defences.base import Batch, DataMethod, Defence, Task, UpdateMethod
from rayfed.defences.dp_fedavg import DpFedAvg
from rayfed.defences.dp_sgd import DpSgd
from rayfed.defences.fed_cdp import FedCdp
from rayfed.defences.gaussian import Gaussian
from rayfed.defences.laplace import Laplace
from rayfed.errors import UserError
from rayfed.gradients import norm, per_sample_gradients, weights_of
from rayfed.models.build import build_model
from rayfed.privacy.accountant import Release, analytic_gaussian, compute_guarantee, find_least_noise
from rayfed.registry import component
from rayfed.scenario import AttackSpec, Training, resolve
from rayfed.simulation.client.local import gradient_method, update_method
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.client.visit import ClientVisit
from rayfed.simulation.inputs import Inputs, prepare_inputs
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.update import Named

CPU = torch.device("cpu")


@component
class Peeks(Defence):
    """Stands for a defence of the update that reads the data."""

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        return next


@component
class Mixes(Defence):
    """Stands for one that changes the data."""

    def wrap_data(self, next: DataMethod) -> DataMethod:
        return lambda task: next(task)


@pytest.mark.parametrize(
    ("release", "delta", "rdp", "pld"),
    [
        (Release("gaussian", 1.0, 1), 1e-5, 4.7285, 4.3772),
        (Release("gaussian", 1.0, 1000, 0.01), 1e-5, 2.1014, 1.8282),
        (Release("gaussian", 1.12, 14063, 256 / 60000), 1e-5, 2.5187, 2.3103),
        (Release("gaussian", 1.5, 200, 0.1), 1e-3, 4.050, 3.5225),
    ],
)
def test_reference_epsilons(release: Release, delta: float, rdp: float, pld: float) -> None:
    assert compute_guarantee([release], delta, "rdp").epsilon == pytest.approx(rdp, rel=5e-3)
    assert compute_guarantee([release], delta, "pld").epsilon == pytest.approx(pld, rel=1e-3)
    assert compute_guarantee([release], delta).accountant == "pld"


def test_the_classic_conversion_gives_the_well_known_figure() -> None:
    """2.92 of TF-Privacy's README, from the Renyi divergences of the same mechanism and Mironov 2017, proposition 3."""
    from dp_accounting import dp_event
    from dp_accounting.rdp import RdpAccountant

    orders = [1 + x / 10 for x in range(1, 100)] + list(range(11, 64))
    accountant = RdpAccountant(orders)
    accountant.compose(dp_event.PoissonSampledDpEvent(256 / 60000, dp_event.GaussianDpEvent(1.12)), 14063)
    classic = min(r + np.log(1e5) / (a - 1) for a, r in zip(orders, accountant._rdp, strict=True))
    assert classic == pytest.approx(2.92, abs=0.01)


def test_drawing_a_fixed_number_is_not_poisson_sampling() -> None:
    fixed = compute_guarantee([Release("gaussian", 1.0, 1000, drawn=(100, 10000))], 1e-5)
    assert fixed.epsilon == pytest.approx(3.576, rel=5e-3)
    assert fixed.accountant == "rdp"
    with pytest.raises(UserError, match=r"federation\.sampling: poisson"):
        compute_guarantee([Release("gaussian", 1.0, 1000, drawn=(100, 10000))], 1e-5, "pld")


def test_laplace_adds_up_and_composes_better_with_a_delta() -> None:
    assert compute_guarantee([Release("laplace", 10, 100)], 0).epsilon == pytest.approx(10)
    assert compute_guarantee([Release("laplace", 10, 100)], 1e-5).epsilon == pytest.approx(4.220, rel=1e-3)
    with pytest.raises(UserError, match="delta of 0"):
        compute_guarantee([Release("gaussian", 1, 1)], 0)


def test_the_worst_client_counts() -> None:
    releases = [Release("gaussian", 1.0, steps, rate) for steps, rate in ((10, 0.5), (1000, 0.01), (1, 1.0))]
    alone = [compute_guarantee([r], 1e-5).epsilon for r in releases]
    assert compute_guarantee(releases, 1e-5).epsilon == max(alone)


def test_noise_is_found_for_an_epsilon() -> None:
    found = find_least_noise(lambda z: [Release("gaussian", z, 100, 0.1)], 2.0, 1e-5, "rdp")
    assert 1.98 < compute_guarantee([Release("gaussian", found, 100, 0.1)], 1e-5, "rdp").epsilon <= 2.0


def test_the_analytic_gaussian_mechanism_meets_its_own_definition() -> None:
    """Balle and Wang 2018, theorem 8: delta from sigma and epsilon by the normal distribution."""
    for epsilon in (0.1, 1.0, 8.0):
        sigma = analytic_gaussian(epsilon, 1e-5)
        low, high = 1 / (2 * sigma) - epsilon * sigma, -1 / (2 * sigma) - epsilon * sigma
        assert stats.norm.cdf(low) - np.exp(epsilon) * stats.norm.cdf(high) == pytest.approx(1e-5, rel=1e-3)


# Mechanisms


@pytest.fixture(scope="module")
def digits() -> Batch:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return Batch(torch.tensor(images[:40] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels[:40]))


def task(batch: Batch, seed: int = 0, batch_size: int | None = None) -> Task:
    model = build_model("mlp", {"hidden": [8]}, (1, 8, 8), 10, seed=1)
    generator = torch.Generator().manual_seed(seed)
    size = batch_size or len(batch.labels)
    return Task(0, 0, model, weights_of(model), {}, batch, generator, order=0, batch_size=size)


def sent(defence: DpSgd, batch: Batch, seed: int = 0, batch_size: int | None = None) -> Named:
    work = task(batch, seed, batch_size)
    return gradient_method([defence])(work, work.weights, batch)[0]


@pytest.mark.parametrize("clip", [0.01, 0.5, 1e6])
def test_dp_sgd_clips_every_sample_and_divides_by_the_expected_size(digits: Batch, clip: float) -> None:
    out = sent(DpSgd(clip=clip, noise_multiplier=0), digits, batch_size=32)
    work = task(digits)
    each = per_sample_gradients(work.model, work.weights, {}, digits.inputs, digits.labels)
    expected = {name: torch.zeros_like(w) for name, w in work.weights.items()}
    for i in range(40):
        one = {name: g[i] for name, g in each.items()}
        factor = min(1.0, clip / float(norm(one)))
        expected = {name: e + factor * one[name] / 32 for name, e in expected.items()}
    for name, tensor in out.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-4)


def test_fed_cdp_clips_layer_by_layer_and_its_bound_falls(digits: Batch) -> None:
    one = Batch(digits.inputs[:1], digits.labels[:1])
    defence = FedCdp(clip=0.3, noise_multiplier=0, last_clip=0.1, rounds=3)
    for round, bound in ((0, 0.3), (1, 0.2), (2, 0.1), (5, 0.1)):
        work = task(one).replace(round=round)
        out = gradient_method([defence])(work, work.weights, one)[0]
        assert max(float(t.norm()) for t in out.values()) == pytest.approx(bound, rel=1e-4)


def test_the_noise_of_dp_sgd_has_the_deviation_that_is_accounted(digits: Batch) -> None:
    quiet = sent(DpSgd(clip=0.5, noise_multiplier=0), digits)
    loud = sent(DpSgd(clip=0.5, noise_multiplier=3), digits)
    noise = torch.cat([(loud[n] - t).flatten() for n, t in quiet.items()]) * 40 / (0.5 * 3)
    assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-3


def test_a_step_without_samples_is_noise_alone(digits: Batch) -> None:
    empty = Batch(digits.inputs[:0], digits.labels[:0])
    out = torch.cat([t.flatten() for t in sent(DpSgd(clip=2, noise_multiplier=3), empty, batch_size=4).values()])
    assert stats.kstest((out * 4 / 6).numpy(), "norm").pvalue > 1e-3


def test_batch_norm_is_refused_with_its_replacement() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    with pytest.raises(UserError, match=r"`norm: group`.*`nn.GroupNorm`.*batch_norm: eval"):
        DpSgd(noise_multiplier=1).check(model)
    DpSgd(noise_multiplier=1).check(model.eval())


@pytest.mark.parametrize(
    ("defence", "order", "spread"),
    [(Gaussian(epsilon_per_update=1, clip=0.1), 2, "norm"), (Laplace(epsilon_per_update=1, clip=0.1), 1, "laplace")],
)
def test_local_noise_hides_twice_the_clip_bound(digits: Batch, defence, order: int, spread: str) -> None:  # type: ignore[no-untyped-def]
    training = Training(steps=3, batch_size=10, lr=0.1)
    out = update_method(training, [defence])(task(digits)).tensors
    plain = update_method(training, [type(defence)(**{_noise(defence): 0.0}, clip=0.1)])(task(digits)).tensors
    flat = torch.cat([t.flatten() for t in plain.values()])
    assert float(flat.norm(p=order)) <= 0.1 * (1 + 1e-5)
    scale = 2 * 0.1 * analytic_gaussian(1, 1e-5) if order == 2 else 2 * 0.1 / 1
    noise = torch.cat([(out[n] - t).flatten() for n, t in plain.items()]) / scale
    assert stats.kstest(noise.numpy(), spread).pvalue > 1e-3


def _noise(defence: Gaussian | Laplace) -> str:
    return "sigma" if isinstance(defence, Gaussian) else "scale"


# What a run claims


def inputs(extra: str, **changes: str) -> Inputs:
    text = """
name: x
data: {name: digits, size: 8}
model: {name: mlp, hidden: [16]}
training: {epochs: 1, batch_size: 30, lr: 0.1, sampling: poisson}
federation: {rounds: 4, clients: 6}
"""
    return prepare_inputs(
        scenarios.parse(text + extra, changes=[f"{k.replace('__', '.')}={v}" for k, v in changes.items()])
    )


def claimed(extra: str, **changes: str) -> list[dict]:  # type: ignore[type-arg]
    return inputs(extra, **changes).privacy


@pytest.mark.engine
def test_dp_sgd_is_accounted_for_the_worst_client() -> None:
    extra = "partition: {name: dirichlet, alpha: 0.5}\ndefences: [{name: dp_sgd, noise_multiplier: 1.5}]\n"
    [row] = claimed(extra)
    sizes = [len(part) for part in inputs(extra).parts]
    expected = max(
        compute_guarantee([Release("gaussian", 1.5, 4 * -(-n // 30), min(30, n) / n)], 1e-5).epsilon for n in sizes
    )
    assert row["epsilon"] == pytest.approx(expected)
    assert (row["unit"], row["accountant"], row["delta"]) == ("sample", "pld", 1e-5)
    assert row["adjacency"] == "each single sample (zero-out adjacency)"


def test_shuffled_batches_gain_nothing_from_sampling() -> None:
    [row] = claimed("defences: [{name: dp_sgd, noise_multiplier: 2}]\n", training__sampling="shuffle")
    assert row["epsilon"] == pytest.approx(compute_guarantee([Release("gaussian", 2, 4)], 1e-5).epsilon)


@pytest.mark.engine
def test_dp_fedavg_is_accounted_for_the_draw_that_is_made() -> None:
    text = "defences: [{name: dp_fedavg, noise_multiplier: 2}]\n"
    [everybody] = claimed(text)
    [fixed] = claimed(text, federation__clients_per_round="3")
    [all_others] = claimed(text, federation__clients_per_round="5")
    [poisson] = claimed(text, federation__clients_per_round="3", federation__sampling="poisson")
    assert everybody["epsilon"] == pytest.approx(compute_guarantee([Release("gaussian", 2, 4)], 1e-5).epsilon)
    # one client in another's place moves the sum by twice the bound; a third client knows that it is neither
    assert fixed["epsilon"] == pytest.approx(compute_guarantee([Release("gaussian", 1, 4, drawn=(3, 5))], 1e-5).epsilon)
    assert all_others["epsilon"] == pytest.approx(compute_guarantee([Release("gaussian", 1, 4)], 1e-5).epsilon)
    assert poisson["epsilon"] == pytest.approx(compute_guarantee([Release("gaussian", 2, 4, 0.5)], 1e-5).epsilon)
    assert [row["accountant"] for row in (everybody, fixed, poisson)] == ["pld", "rdp", "pld"]
    assert "not the server" in everybody["against"]


def test_clients_who_add_the_noise_gain_nothing_from_the_draw_and_know_their_own_part() -> None:
    text = "defences: [{name: dp_fedavg, noise_multiplier: 2, noise: clients}]\n"
    [row] = claimed(text, federation__clients_per_round="4")
    rounds = inputs(text, federation__clients_per_round="4").accounts[0].setting(4).most_rounds
    assert row["epsilon"] == pytest.approx(
        compute_guarantee([Release("gaussian", 2 * 0.75**0.5, rounds)], 1e-5).epsilon
    )
    with pytest.raises(UserError, match="noise: server"):
        inputs(text, federation__clients_per_round="1")


def test_fed_cdp_pays_for_every_layer() -> None:
    [row] = claimed("defences: [{name: fed_cdp, noise_multiplier: 6, clip: 4}]\n", training__sampling="shuffle")
    assert row["epsilon"] == pytest.approx(compute_guarantee([Release("gaussian", 3, 4)], 1e-5).epsilon)  # four layers


def test_an_epsilon_is_turned_into_noise_before_the_run() -> None:
    found = inputs("defences: [{name: dp_sgd, epsilon: 3}]\nprivacy: {accountant: rdp}\n")
    [spec] = found.scenario.defences
    assert set(spec.parameters) == {"noise_multiplier"}
    [row] = found.accounts[0].rows(4)
    assert 2.9 < row["epsilon"] <= 3
    assert found.scenario.dump() == scenarios.parse(found.scenario.dump()).dump()


@pytest.mark.engine
@pytest.mark.parametrize(
    ("extra", "note"),
    [
        ("defences: []\n", None),
        ("defences: [{name: gaussian, sigma: 0.1}]\n", "empirical"),
        ("defences: [{name: prune, ratio: 0.5}]\n", "empirical"),
        ("defences: [{name: dldp_b}]\n", "empirical"),
        ("defences: [{name: tests.privacy.test_privacy:Peeks}, {name: gaussian, sigma: 1, clip: 1}]\n", "guaranteed"),
        (
            "defences: [{name: tests.privacy.test_privacy:Peeks}, {name: dp_sgd, noise_multiplier: 1}]\n",
            "reads the data",
        ),
        ("defences: [{name: prune, ratio: 0.5}, {name: dp_sgd, noise_multiplier: 1}]\n", "guaranteed"),
        ("defences: [{name: gaussian, sigma: 1, clip: 1}, {name: prune, ratio: 0.5}]\n", "guaranteed"),
        (
            "defences: [{name: gaussian, sigma: 1, clip: 1}, {name: tests.privacy.test_privacy:Peeks}]\n",
            "reads the data",
        ),
        (
            "defences: [{name: tests.privacy.test_privacy:Mixes}, {name: dp_sgd, noise_multiplier: 1}]\n",
            "changes the samples",
        ),
    ],
)
def test_a_guarantee_is_claimed_only_where_there_is_one(extra: str, note: str | None) -> None:
    [row] = claimed(extra)
    assert ("epsilon" in row) == (note == "guaranteed")
    if note not in (None, "guaranteed"):
        assert note in row["note"]


def test_statistics_without_noise_break_a_guarantee() -> None:
    changes = {"data__size": "16", "model": "{name: convnet, width: 2}"}
    [row] = claimed("defences: [{name: gaussian, sigma: 1, clip: 1}]\n", **changes)
    assert "batch norm" in row["note"]
    [row] = claimed("defences: [{name: gaussian, sigma: 1, clip: 1}]\n", **changes, model__batch_norm="eval")
    assert row["epsilon"] > 0


def test_each_mechanism_of_a_stack_is_judged_for_itself() -> None:
    noise = "{name: gaussian, sigma: 1, clip: 1}"
    first, second = claimed(f"defences: [{noise}, {{name: tests.privacy.test_privacy:Peeks}}, {noise}]\n")
    assert (first["defence"], second["defence"]) == ("gaussian", "gaussian")
    assert "epsilon" in first
    assert "reads the data" in second["note"]


class Statistics(nn.Module):
    """A norm that is no batch norm and keeps statistics all the same."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(1, track_running_stats=True)
        self.out = nn.Linear(64, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(images).flatten(1))


def test_any_statistics_without_noise_break_a_guarantee() -> None:
    [row] = claimed(
        "defences: [{name: gaussian, sigma: 1, clip: 1}]\n", model="{name: 'tests.privacy.test_privacy:Statistics'}"
    )
    assert "model.batch_norm" in row["note"]


def test_arms_and_observed_gradients_have_noise_of_their_own() -> None:
    """Else two arms with other multipliers, or a gradient and an update, would cancel it."""
    noisy = "[{name: gaussian, sigma: 1, clip: 1}]"
    found = inputs(f"arms: {{a: {noisy}, b: {noisy}}}\n")
    runtime, sent = cohort(found, [0])
    seen = ObservationBuilder(runtime)
    attack = AttackSpec(name="dlg")
    updates = [seen.observe(ClientVisit(arm, sent, 0), attack)[0].update for arm in ("a", "b")]
    gradient, _ = seen.observe(ClientVisit("a", sent, 0), AttackSpec(name="dlg", observes="gradient"))
    noise = [torch.cat([t.flatten() for t in u.values()]) for u in (*updates, gradient.update)]
    for i, j in ((0, 1), (0, 2)):
        assert abs(float(torch.corrcoef(torch.stack([noise[i], noise[j]]))[0, 1])) < 0.2


@pytest.mark.engine
def test_hardly_any_noise_is_accounted_in_little_memory() -> None:
    found = compute_guarantee([Release("gaussian", 0.005, 60)], 1e-5)
    assert found.accountant == "pld"
    # of 60 releases together, the same as of one with so much less noise: Balle and Wang's formula is exact
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    exact = get_epsilon_gaussian(0.005 / 60**0.5, 1e-5)
    assert exact <= found.epsilon * (1 + 1e-6)
    assert found.epsilon == pytest.approx(exact, rel=1e-2)


def test_nobody_drawn_needs_no_noise() -> None:
    assert find_least_noise(lambda z: [Release("gaussian", z, 0, 0.5)], 8, 1e-5, None) == 0


def test_a_budget_is_not_for_mechanisms_that_lost_their_guarantee() -> None:
    text = "defences: [{name: tests.privacy.test_privacy:Mixes}, {name: dp_sgd, noise_multiplier: 1}]\n"
    with pytest.raises(UserError, match=r"privacy\.budget: .*no guarantee"):
        _ = inputs(text + "privacy: {budget: 1}\n").limits


@pytest.mark.engine
def test_a_budget_ends_an_arm_before_it_is_exceeded() -> None:
    found = inputs(
        "arms: {none: [], dp: [{name: dp_sgd, noise_multiplier: 1}]}\nprivacy: {budget: 4, accountant: rdp}\n",
        federation__rounds="50",
    )
    limit = found.limits["dp"]
    account = found.accounts[1]
    assert found.limits["none"] == 50
    assert 1 <= limit < 50
    assert account.epsilon(limit) <= 4 < account.epsilon(limit + 1)
    with pytest.raises(UserError, match=r"privacy\.budget: the first round of arm 'dp' spends"):
        _ = inputs("arms: {dp: [{name: dp_sgd, noise_multiplier: 0.3}]}\nprivacy: {budget: 0.1}\n").limits


def test_combinations_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match="dp_fedavg cannot be combined with the later quantise"):
        inputs("defences: [{name: dp_fedavg, noise_multiplier: 1}, {name: quantise, bits: 4}]\n")
    with pytest.raises(UserError, match="Median"):
        inputs("defences: [{name: dp_fedavg, noise_multiplier: 1}]\n", federation__aggregation="median")
    with pytest.raises(UserError, match="noise: server"):
        inputs("defences: [{name: dp_fedavg, epsilon: 8, noise: clients}]\n", federation__sampling="poisson")


def cohort(found: Inputs, clients: list[int]) -> tuple[ClientRuntime, Sent]:
    runtime = ClientRuntime(found.scenario, found.data, found.parts, CPU)
    return runtime, Sent(0, weights_of(runtime.arm(next(iter(found.scenario.played))).model), {})


@pytest.mark.parametrize("noise", ["server", "clients"])
def test_both_ways_of_dp_fedavg_put_the_same_noise_on_the_sum(noise: str) -> None:
    from rayfed.simulation.client.arm import aggregation_of

    def step(multiplier: float) -> torch.Tensor:
        found = inputs(f"defences: [{{name: dp_fedavg, clip: 0.2, noise_multiplier: {multiplier}, noise: {noise}}}]\n")
        s = found.scenario
        runtime, start = cohort(found, list(range(6)))
        partial, _ = runtime.cohort("dp_fedavg", start, list(range(6)), {})
        rule = aggregation_of(resolve(s)["dp_fedavg"])
        sums, _ = rule.combine(partial, torch.Generator().manual_seed(1))
        return torch.cat([t.flatten() for t in sums.values()])

    quiet = step(0)
    assert float(quiet.norm()) <= 0.2 * (1 + 1e-5)
    assert stats.kstest(((step(1.5) - quiet) * 6 / (0.2 * 1.5)).numpy(), "norm").pvalue > 1e-3


def test_a_round_without_clients_moves_dp_fedavg_by_noise_alone() -> None:
    from rayfed.aggregation.fedavg import FedAvg

    rule = DpFedAvg(clip=2, noise_multiplier=3).wrap_aggregation(FedAvg(), clients=4)
    step = rule.idle({"w": torch.zeros(5000)}, torch.Generator().manual_seed(0))["w"]
    assert stats.kstest((step * 4 / 6).numpy(), "norm").pvalue > 1e-3
    assert not FedAvg().idle({"w": torch.ones(2)}, torch.Generator())["w"].any()


def test_poisson_draws_have_their_rate() -> None:
    from rayfed.simulation.client import plan
    from rayfed.simulation.client.local import batches

    s = inputs("", federation__clients_per_round="2", federation__sampling="poisson").scenario
    sizes = [len(plan.drawn_clients(s, r)) for r in range(3000)]
    assert stats.chisquare(np.bincount(sizes, minlength=7), 3000 * stats.binom.pmf(range(7), 6, 1 / 3)).pvalue > 1e-3
    training = Training(steps=3000, batch_size=2, sampling="poisson")
    counts = [len(index) for index in batches(6, training, order=5)]
    assert stats.chisquare(np.bincount(counts, minlength=7), 3000 * stats.binom.pmf(range(7), 6, 1 / 3)).pvalue > 1e-3


def test_without_a_mechanism_no_clients_are_drawn_for_its_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws of all rounds would take time that goes with the rounds, before the first."""
    text = "{name: t, data: {name: digits, size: 8}, model: mlp, federation: {rounds: 9, clients: 4}}"
    found = prepare_inputs(scenarios.parse(text, changes=["defences=[{name: prune, ratio: 0.5}]"]))
    monkeypatch.setattr("rayfed.simulation.client.plan.drawn_clients", None)
    assert not any(row.get("epsilon") for row in found.privacy)
