"""Declarations of defences: what their code sends follows `transform`, `log_likelihood` and `transform_data`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import sqrt
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from rayfed import registry
from rayfed.defences.base import Batch, Defence, Task, UpdateMethod
from rayfed.defences.declarations import laplace_log_likelihood, normal_log_likelihood, straight_through
from rayfed.defences.dp_sgd import DpSgd
from rayfed.defences.gaussian import Gaussian
from rayfed.defences.laplace import Laplace
from rayfed.defences.noise import LocalNoise
from rayfed.defences.outpost import Outpost
from rayfed.defences.prune import Prune
from rayfed.defences.quantise import Quantise
from rayfed.defences.refiner import Refiner
from rayfed.defences.top_k import TopK
from rayfed.gradients import flatten, gradient, per_sample_gradients, unflatten
from rayfed.models.build import build_model
from rayfed.registry import component
from rayfed.scenario import Training
from rayfed.simulation.client.local import data_method, update_method
from rayfed.threat_model.grants.declaration_check import Mismatch, find_mismatch
from rayfed.threat_model.observation_model import ObservationModel
from rayfed.update import LocalTraining, Named, Observation, Update
from tests.helpers.attack_fixtures import digit, observed
from tests.helpers.component_fixtures import variants

pytestmark = pytest.mark.engine

MORE: dict[str, list[dict[str, Any]]] = {
    "ats": [{"policy": "0"}, {"policy": "0-7+3"}],
    "dp_fedavg": [{"clip": 0.4, "noise_multiplier": 1, "noise": "clients"}],
    "dp_sgd": [{"clip": 0.4, "noise_multiplier": 0}],
    "fed_cdp": [{"clip": 0.4, "noise_multiplier": 1, "last_clip": 0.1, "rounds": 4}],
    "gaussian": [{"sigma": 0.01}, {"clip": 0.4, "sigma": 0}],
    "outpost": [{"noise": 0}, {"noised": 0.1, "pruned": 0.5}],
    "prune": [{"ratio": 0.9, "scope": "global"}],
    "quantise": [{"bits": 1}, {"bits": 3}, {"bits": 2, "rounding": "stochastic"}],
    "soteria": [{"ratio": 0.4, "jacobian": "estimated"}],
    "laplace": [{"clip": 0.4, "scale": 0.1, "norm": "l2"}],
    "top_k": [{"k": 0.1}, {"k": 20, "by": "weight_gradient"}],
}
"""Parameters with other declarations than those of `variants`."""
CASES: list[tuple[str, dict[str, Any]]] = []
for _name in sorted(registry.table("defences")):
    CASES += [(_name, options) for options in variants(_name) + MORE.get(_name, [])]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {"hidden": [12]}),
    "cnn": ("convnet", {"width": 2, "norm": "group"}),
}
SAMPLES, DRAWS = 4, 64
PLAIN = Training(algorithm="fedsgd", batch_size=None)
IMAGES = nn.functional.pad(torch.cat([digit(i) for i in range(30)]), (1, 1, 1, 1))
LABELS = torch.arange(30) % 10


class Case(NamedTuple):
    """A client with one or more defences, and the attacker's declaration of them."""

    declared: ObservationModel
    model: nn.Module
    seen: Observation

    def task(self, seed: int = 0, **changes: Any) -> Task:
        task = self.declared.task(self.seen, self.model, IMAGES[:SAMPLES], LABELS[:SAMPLES])
        own = task.replace(generator=torch.Generator().manual_seed(seed), order=seed)
        return own.replace(**changes)

    def sent(self, seed: int = 0, **changes: Any) -> Named:
        """Return what the client sends."""
        return update_method(PLAIN, self.declared.defences)(self.task(seed, **changes)).tensors

    def gradient(self, batch: Batch) -> Named:
        arguments = self.model, self.seen.weights, self.seen.buffers, batch.inputs, batch.labels
        return per_sample_gradients(*arguments) if self.declared.samplewise else gradient(*arguments)[0]

    def expected(self, all_stages: bool = True) -> Named:
        """Return what the client sends by the declaration, without noise."""
        task = self.task()
        task = task.replace(data=self.declared.train_on(task))
        return self.declared.expect(task, self.gradient(task.data), self.seen, all_stages)

    def noise(self) -> Tensor:
        """Return the noise of many updates, (M, D) float64."""
        expected = flatten(self.expected()).double()
        return torch.stack([flatten(self.sent(seed)).double() - expected for seed in range(DRAWS)])

    def log_densities(self, noise: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        """Return the declared log densities of sent values with the given noise, (D,)."""
        expected = {name: tensor.double() for name, tensor in self.expected().items()}
        flat = flatten(expected)
        values = self.declared.log_densities(
            self.task(), unflatten(flat + noise, expected), unflatten(flat + shift, expected), self.seen
        )
        return flatten(values)


def case(*defences: Defence, model: str = "mlp", local: LocalTraining | None = None, scale: float = 1.0) -> Case:
    name, options = MODELS[model]
    built = build_model(name, options, (1, 10, 10), 10, seed=0)
    for defence in defences:
        built = defence.adapt_model(built)
    seen = observed(built, IMAGES[:SAMPLES], LABELS[:SAMPLES])
    known = replace(seen, extra={"public": (IMAGES[10:], LABELS[10:])}, scale=scale, local=local or LocalTraining())
    return Case(ObservationModel(defences, clients_per_round=10), built, known)


def build(name: str, options: dict[str, Any]) -> Defence:
    built: Defence = registry.build("defences", name, options)
    return built


def named(value: Any) -> str | None:
    return str(value) if isinstance(value, dict) else None


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def skip_unsupported(defence: Defence, model: str) -> None:
    """Skip a defence of convolutions on a model without any."""
    if model == "mlp" and registry_name(defence) in ("key_lock", "split", "passport"):
        pytest.skip("needs convolutions")


def registry_name(defence: Defence) -> str:
    return next(n for n in registry.table("defences") if registry.find("defences", n) is type(defence))


@pytest.mark.parametrize(("name", "options"), CASES, ids=named)
def test_every_defence_follows_its_declaration(name: str, options: dict[str, Any], model: str) -> None:
    defence = build(name, options)
    skip_unsupported(defence, model)
    assert defence.is_declared
    own = case(defence, model=model)
    if defence.has_latents:
        follows_latent(name, own)
    elif defence.adds_noise:
        follows_noise(own)
    elif name not in ("dropout", "precode", "passport"):  # these have random numbers of the model
        follows_exactly(own)
    assert find_mismatch(own.declared, own.seen, own.model) is None


def follows_exactly(own: Case) -> None:
    torch.testing.assert_close(own.sent(seed=5), own.expected())


def follows_noise(own: Case) -> None:
    """Test the mean, the density and the independence of the noise."""
    noise = own.noise()
    noisy = noise.abs().amax(0) > 1e-6
    assert noisy.any()
    (defence,) = own.declared.defences
    if isinstance(defence, Quantise):
        follows_rounding(own, noise, noisy)
        return
    assert (noise.mean(0) / noise.std(0) * sqrt(DRAWS))[noisy].abs().max() < 6
    deviation = noise.square().mean(0).sqrt()
    if not isinstance(defence, Outpost):  # a shift of its pruned values cannot be seen from their result
        # E[p(u | m + s) / p(u | m)] is 1 for the declared density p.
        size = noise.square().mean().sqrt()
        for shift in (-size, size):
            ratios = torch.stack([own.log_densities(one, shift) - own.log_densities(one) for one in noise]).exp()
            assert abs(float(ratios.mean()) - 1) < 6 * float(ratios.std()) / sqrt(ratios.numel())
    unit = (noise / deviation)[:, noisy]
    for values in (unit, unit.square() - unit.square().mean()):
        pairs = values[:, :-1] * values[:, 1:]
        assert abs(float(pairs.mean())) < 6 * float(pairs.std()) / sqrt(pairs.numel())


def follows_rounding(own: Case, noise: Tensor, noisy: Tensor) -> None:
    """Test that values have two outcomes, and are rounded up as often as declared."""
    least, most = noise.amin(0), noise.amax(0)
    raised = most - noise < noise - least
    assert torch.minimum(noise - least, most - noise).max() < 1e-5
    up, down = own.log_densities(most).exp(), own.log_densities(least).exp()
    both = noisy & (most - least > 1e-5)
    torch.testing.assert_close((up + down)[both], torch.ones(int(both.sum())).double(), atol=1e-3, rtol=0)
    often = both & (up > 0.25) & (up < 0.75)
    counts, odds = raised.sum(0)[often].double(), up[often]
    errors = (counts - DRAWS * odds) / (DRAWS * odds * (1 - odds)).sqrt()
    assert len(errors) > 20
    assert errors.abs().max() < 6
    assert float(errors.square().mean()) == pytest.approx(1, abs=6 * sqrt(2 / len(errors)))
    pairs = errors[:-1] * errors[1:]
    assert abs(float(pairs.mean())) < 6 / sqrt(len(pairs))


def follows_latent(name: str, own: Case) -> None:
    """Test what is declared about a defence whose updates depend on something unknown."""
    (defence,), sent = own.declared.defences, own.sent()
    if defence.overrides("transform_data"):
        batch, client = own.declared.train_on(own.task(seed=1)), data_method([defence])(own.task(seed=1))
        assert batch.inputs.shape == client.inputs.shape
        torch.testing.assert_close(batch.labels, client.labels)
        if name != "vae":  # it starts from the attacker's random numbers, and so does the client of this test
            torch.testing.assert_close(batch.inputs, client.inputs)
        return
    expected = own.expected()
    if defence.keeps_state:  # nothing is unknown of the first update
        torch.testing.assert_close(sent, expected)
    elif name == "soteria":
        both = (flatten(sent) != 0) & (flatten(expected) != 0)  # other columns may be pruned
        torch.testing.assert_close(flatten(sent)[both], flatten(expected)[both])
    elif isinstance(defence, Refiner):
        assert float((flatten(sent) - flatten(expected)).norm()) <= defence.epsilon + 1e-5
    elif name == "dcs2":
        assert float(flatten(sent) @ flatten(expected)) >= 0
    else:
        noise = own.noise()
        assert bool((noise == 0).any(1).all()) == (name == "grad_defense")
        deviation = {"grad_defense": 0.1, "uniform": 0.1 / sqrt(3)}[name]
        loud = noise[noise.abs() > 1e-5]  # differences elsewhere are rounding errors
        assert loud.std().item() == pytest.approx(deviation, rel=0.05)
        assert abs(noise[noise != 0].mean().item()) < 0.01


LAWS: dict[str, tuple[Defence, Callable[[Task], float], Any]] = {
    "gaussian": (Gaussian(clip=0.4, sigma=0.1), lambda task: 0.1, stats.norm),
    "epsilon": (Gaussian(clip=0.4, epsilon_per_update=2.0), lambda task: 1.5950499565, stats.norm),
    "laplace": (Laplace(clip=0.4, scale=0.1), lambda task: 0.1, stats.laplace),
    "dldp_a": (build("dldp_a", {}), lambda task: 0.002, stats.norm),
    "dldp_b": (build("dldp_b", {}), lambda task: 0.128, stats.norm),
    "dp_sgd": (build("dp_sgd", {"clip": 0.4, "noise_multiplier": 1}), lambda task: 0.4 / SAMPLES, stats.norm),
    "fed_cdp": (build("fed_cdp", {"clip": 0.4, "noise_multiplier": 1}), lambda task: 0.4 / SAMPLES, stats.norm),
    "dp_fedavg": (
        build("dp_fedavg", {"clip": 0.4, "noise_multiplier": 1, "noise": "clients"}),
        lambda task: 0.4 / sqrt(10),
        stats.norm,
    ),
}
"""Defence, width of its noise, and the law."""


@pytest.mark.parametrize("name", LAWS)
def test_noise_and_its_declaration_have_the_law_of_the_defence(name: str, model: str) -> None:
    defence, width, law = LAWS[name]
    own = case(defence, model=model)
    scaled = own.noise() / width(own.task())
    assert stats.kstest(scaled.flatten().numpy(), law.cdf).pvalue > 1e-4
    some = scaled[0] * width(own.task())
    declared = own.log_densities(some) - own.log_densities(torch.zeros_like(some))
    found = torch.from_numpy(law.logpdf(scaled[0].numpy()) - law.logpdf(0.0))
    torch.testing.assert_close(declared, found, rtol=1e-3, atol=1e-4)


def test_noise_of_outpost_is_on_the_largest_values_and_grows_with_the_variance_of_the_weights(model: str) -> None:
    own = case(build("outpost", {}), model=model)
    noise, exact = own.noise(), flatten(own.gradient(own.task().data))
    count = -(-len(exact) * 2 // 5)
    least = exact.abs().sort(descending=True).values[count - 1]
    risks = torch.cat([w.var(correction=0).clamp(max=1).expand(w.numel()) for w in own.seen.weights.values()])
    noisy = (exact.abs() >= least) & (risks > 0)
    assert bool((noise[:, ~noisy].abs() <= 1e-6).all())
    scaled = noise[:, noisy] / (0.8 * risks[noisy])
    assert stats.kstest(scaled.flatten().numpy(), stats.norm.cdf).pvalue > 1e-4
    declared = own.log_densities(noise[0]) - own.log_densities(noise[1])
    difference = torch.from_numpy(stats.norm.logpdf(scaled[0].numpy()) - stats.norm.logpdf(scaled[1].numpy()))
    torch.testing.assert_close(declared[noisy], difference, rtol=1e-3, atol=1e-3)


def test_a_later_defence_that_removes_values_leaves_the_law_of_the_others() -> None:
    own = case(Gaussian(clip=0.4, sigma=0.01), TopK(k=0.2))
    sent, expected = own.sent(), own.expected(all_stages=False)
    masks = own.declared.sent_values(sent, own.seen)
    kept = flatten(masks)
    assert int(kept.sum()) == int(0.2 * len(kept))
    torch.testing.assert_close(sum(float(t.square().sum()) for t in own.expected().values()), 0.16, rtol=0.3, atol=0)
    residual = (flatten(sent) - flatten(expected))[kept]
    found = own.declared.log_likelihood(own.task(), sent, expected, own.seen)
    law = stats.norm.logpdf(residual.numpy(), scale=0.01) + 0.5 * torch.log(torch.tensor(2 * torch.pi)).item()
    assert found == pytest.approx(float(law.sum()), rel=1e-4)
    assert own.declared.is_exact
    assert not case(Prune(ratio=0.1), Gaussian(sigma=0.1), Gaussian(sigma=0.1)).declared.is_exact
    assert not case(Gaussian(sigma=0.1), build("quantise", {"bits": 4})).declared.is_exact
    assert case(build("soteria", {"ratio": 0.4}), Gaussian(sigma=0.1)).declared.is_exact


def test_noise_of_a_gradient_is_scaled_with_the_update() -> None:
    defence = DpSgd(clip=0.4, noise_multiplier=1)
    own = case(defence, local=LocalTraining(lr=0.1, weight_decay=0.5), scale=0.1)
    plain = case(defence)
    noise = plain.noise()[0]
    torch.testing.assert_close(own.log_densities(0.1 * noise), plain.log_densities(noise), rtol=1e-3, atol=1e-4)


def test_a_defence_before_one_of_sample_gradients_acts_on_each_sample() -> None:
    own = case(build("soteria", {"ratio": 0.4}), DpSgd(clip=0.4, noise_multiplier=0))
    torch.testing.assert_close(own.sent(), own.expected())


@pytest.mark.parametrize(
    "defence",
    [
        Gaussian(clip=0.4, sigma=0.1),
        Laplace(clip=0.4, scale=0.1),
        build("dp_fedavg", {"clip": 0.4, "noise_multiplier": 1}),
        DpSgd(clip=0.4, noise_multiplier=1),
        build("fed_cdp", {"clip": 0.1, "noise_multiplier": 1}),
    ],
    ids=registry_name,
)
def test_clipping_has_its_own_derivative(defence: Defence) -> None:
    own = case(defence)
    task = own.task()
    values = {name: tensor.double() for name, tensor in own.gradient(task.data).items()}
    flat = flatten(values).requires_grad_()
    sent = flatten(defence.transform(task, unflatten(flat, values)))
    direction = torch.randn(len(sent), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (slope,) = torch.autograd.grad(sent @ direction, flat)
    step = torch.randn(len(flat), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    far, near = (
        flatten(defence.transform(task, unflatten(flat.detach() + side * step, values))) @ direction
        for side in (1e-6, -1e-6)
    )
    assert float(slope @ step) == pytest.approx(float(far - near) / 2e-6, rel=1e-4)
    zeros = torch.zeros_like(flat).requires_grad_()
    (slope,) = torch.autograd.grad(flatten(defence.transform(task, unflatten(zeros, values))).sum(), zeros)
    assert bool(slope.isfinite().all())


@pytest.mark.parametrize(("name", "options"), CASES, ids=named)
def test_other_declarations_have_the_derivative_of_the_identity(name: str, options: dict[str, Any]) -> None:
    defence = build(name, options)
    own = case(defence, model="cnn")
    task = own.task()
    exact = own.gradient(task.data)
    if type(defence).transform in (LocalNoise.transform, DpSgd.transform) or name == "dp_fedavg":
        return
    leaf = flatten(exact).detach().requires_grad_()
    sent = flatten(defence.transform(task, unflatten(leaf, exact)))
    direction = torch.arange(1.0, len(sent) + 1)
    (slope,) = torch.autograd.grad(sent @ direction, leaf)
    torch.testing.assert_close(slope, direction)


@pytest.mark.parametrize("name", ["ats", "mixup", "instahide", "vae"])
def test_samples_of_training_can_be_differentiated(name: str) -> None:
    own = case(build(name, variants(name)[0]))
    for count in (1, SAMPLES):
        inputs = IMAGES[:count].clone().requires_grad_()
        task = own.declared.task(own.seen, own.model, inputs, LABELS[:count])
        (slope,) = torch.autograd.grad(own.declared.train_on(task).inputs.sum(), inputs)
        assert slope.abs().sum() > 0


def test_straight_through_returns_the_exact_values() -> None:
    tensor = torch.tensor([1e-8, 1.0, 3.0], requires_grad=True)
    values = torch.tensor([1e4, 1 / 3, 0.0])
    assert torch.equal(straight_through(values, tensor), values)


def test_densities_of_several_widths_can_be_compared() -> None:
    sent, mean = {"w": torch.tensor([0.3, -0.1])}, {"w": torch.tensor([0.1, 0.1])}
    found = normal_log_likelihood(sent, mean, {"w": torch.tensor([0.5, 2.0])})["w"]
    law = stats.norm.logpdf([0.2, -0.2], scale=[0.5, 2.0]) + 0.5 * torch.log(torch.tensor(2 * torch.pi)).item()
    torch.testing.assert_close(found, torch.from_numpy(law), rtol=1e-5, atol=1e-6)
    exact = normal_log_likelihood(sent, mean, {"w": torch.tensor([0.5, 0.0])})["w"]
    assert exact[1] < -1e6
    laplace = laplace_log_likelihood(sent, mean, 0.5)["w"]
    torch.testing.assert_close(laplace, torch.tensor([-0.4, -0.4], dtype=torch.float64))


class Wrong(Gaussian):
    """A defence whose declaration has another width than its noise."""

    factor: ClassVar[float] = 1.3

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        return normal_log_likelihood(sent, expected, self.factor * self.width)


class TooNarrow(Wrong):
    factor: ClassVar[float] = 0.7


class MuchTooNarrow(Wrong):
    factor: ClassVar[float] = 0.05


class OtherLaw(Gaussian):
    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        return laplace_log_likelihood(sent, expected, self.width / sqrt(2))


class OtherLawOfLaplace(Laplace):
    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        return normal_log_likelihood(sent, expected, self.width * sqrt(2))


class Declared(Gaussian):
    """Base of defences with other code than that of `Gaussian`, and its declaration."""

    def transform(self, task: Task, tensors: Named) -> Named:
        return tensors

    def source(self, task: Task) -> torch.Generator:
        return task.generator

    def noise_of(self, task: Task, noise: Tensor) -> Tensor:
        """Return what is added to a flattened update, for normal noise."""
        return noise

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        def update(task: Task) -> Update:
            sent = next(task)
            tensors = super(Declared, self).transform(task, sent.tensors)
            flat = flatten(tensors)
            noise = self.noise_of(task, self.width * torch.randn(len(flat), generator=self.source(task)))
            return replace(sent, tensors=unflatten(flat + noise, tensors))

        return update


class ForgottenClip(Declared):
    """The declaration has no clip."""


class Silent(Declared):
    """The update has no noise."""

    def noise_of(self, task: Task, noise: Tensor) -> Tensor:
        return torch.zeros_like(noise)


class Shared(Declared):
    """Two values have the same noise."""

    def noise_of(self, task: Task, noise: Tensor) -> Tensor:
        half = noise[: -(-len(noise) // 2)]
        return torch.cat([half, half])[: len(noise)]


class SharedSize(Declared):
    """The noise of two values differs by a sign and by 1 % of other noise."""

    def noise_of(self, task: Task, noise: Tensor) -> Tensor:
        half = noise[: -(-len(noise) // 2)]
        signs = torch.randint(0, 2, noise.shape, generator=task.generator) * 2 - 1
        return 0.99995 * torch.cat([half, half])[: len(noise)] * signs + 0.01 * noise.flip(0)


class Fixed(Declared):
    """The noise is the same for every update of a round."""

    def noise_of(self, task: Task, noise: Tensor) -> Tensor:
        return self.width * torch.randn(len(noise), generator=torch.Generator().manual_seed(task.round))


class Partly(Declared):
    """A tenth of the values has no noise."""

    def noise_of(self, task: Task, noise: Tensor) -> Tensor:
        return torch.where(torch.arange(len(noise)) % 10 == 0, 0.0, noise)


class Biased(Declared):
    """One value is shifted by two deviations."""

    def noise_of(self, task: Task, noise: Tensor) -> Tensor:
        return noise + 2 * self.width * (torch.arange(len(noise)) == 3)


class ByRound(Declared):
    """A tenth of the rounds has no noise."""

    def noise_of(self, task: Task, noise: Tensor) -> Tensor:
        return noise if task.round % 10 != 1 else torch.zeros_like(noise)


class TwoRows(Declared):
    """Two rows of the first layer have the same noise."""

    def noise_of(self, task: Task, noise: Tensor) -> Tensor:
        return torch.cat([noise[100:200], noise[100:]])


class ThreeRows(Declared):
    """The noise of a row is a sum of that of two others."""

    def noise_of(self, task: Task, noise: Tensor) -> Tensor:
        return torch.cat([(noise[100:200] - noise[200:300]) / sqrt(2), noise[100:]])


class QuietRow(Declared):
    """A row of the first layer has little noise."""

    def noise_of(self, task: Task, noise: Tensor) -> Tensor:
        return torch.cat([1e-3 * noise[:100], noise[100:]])


class OneSeed(Declared):
    """The noise follows from a seed of 16 bits."""

    def source(self, task: Task) -> torch.Generator:
        return torch.Generator().manual_seed(int(torch.randint(2**16, (), generator=task.generator)))


class WholeNumbers(Declared):
    """The noise is rounded, so that it shows the digits of the values after the point."""

    def noise_of(self, task: Task, noise: Tensor) -> Tensor:
        return noise.round()


WRONG: dict[Defence, set[Mismatch]] = {
    TwoRows(sigma=10.0): {Mismatch.REPEATED, Mismatch.CORRELATED},
    ThreeRows(sigma=10.0): {Mismatch.CORRELATED},
    QuietRow(sigma=10.0): {Mismatch.DENSITY},
    OneSeed(sigma=10.0): {Mismatch.FEW_SEEDS},
    WholeNumbers(sigma=1000.0): {Mismatch.REPEATED},
    Wrong(clip=0.4, sigma=0.1): {Mismatch.DENSITY},
    TooNarrow(clip=0.4, sigma=0.1): {Mismatch.DENSITY},
    MuchTooNarrow(sigma=0.1): {Mismatch.DENSITY},
    OtherLaw(sigma=0.1): {Mismatch.DENSITY},
    OtherLawOfLaplace(scale=0.1): {Mismatch.DENSITY},
    ForgottenClip(clip=0.1, sigma=0.01): {Mismatch.DENSITY, Mismatch.MEAN},
    ForgottenClip(clip=0.1, sigma=0.0): {Mismatch.VALUES},
    Silent(sigma=0.1): {Mismatch.DENSITY},
    Shared(sigma=0.1): {Mismatch.REPEATED, Mismatch.CORRELATED},
    SharedSize(sigma=0.1): {Mismatch.REPEATED, Mismatch.CORRELATED},
    Fixed(sigma=0.1): {Mismatch.DENSITY, Mismatch.MEAN},
    Partly(sigma=0.1): {Mismatch.DENSITY},
    Biased(sigma=0.1): {Mismatch.MEAN},
    ByRound(sigma=0.1): {Mismatch.DENSITY},
}
SIZES = {300: [3], 100_000: [900]}


@cache
def network(values: int, seed: int = 0) -> nn.Module:
    return build_model("mlp", {"hidden": SIZES[values]}, (1, 10, 10), 10, seed=seed)


def mismatch(defence: Defence, values: int, seed: int = 0) -> Mismatch | None:
    first = seed % 20
    model = network(values, seed)
    seen = observed(model, IMAGES[first : first + 1], LABELS[first : first + 1], seed=seed)
    return find_mismatch(ObservationModel((defence,)), replace(seen, victim=seed, round=3 * seed), model)


@pytest.mark.parametrize("values", SIZES)
@pytest.mark.parametrize("defence", WRONG, ids=lambda defence: type(defence).__name__)
def test_a_wrong_declaration_is_detected(defence: Defence, values: int) -> None:
    assert mismatch(defence, values) in WRONG[defence]


@pytest.mark.parametrize(
    ("defence", "seeds"),
    [
        (Gaussian(clip=0.4, sigma=0.1), 20),
        (Laplace(clip=0.4, scale=0.1), 20),
        (DpSgd(clip=0.4, noise_multiplier=1), 5),
        (build("dp_fedavg", {"clip": 0.4, "noise_multiplier": 1e-3, "noise": "clients"}), 5),
        (build("outpost", {}), 5),
        (build("quantise", {"bits": 4, "rounding": "stochastic"}), 20),
        (Prune(ratio=0.9), 20),
    ],
    ids=lambda value: registry_name(value) if isinstance(value, Defence) else "",
)
def test_a_right_declaration_is_not_contradicted(defence: Defence, seeds: int) -> None:
    for seed in range(seeds):
        assert mismatch(defence, 300, seed) is None
    assert mismatch(defence, 100_000) is None


@component
class RandomShare(Defence):
    """Removal of values, at random or depending on the samples."""

    secret: bool = False
    exposes: bool = True

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the tensors, of which some are removed."""
        return tensors

    def exposed(self, update: Update) -> Named:
        """Return a mask of the values that were sent."""
        return {name: (tensor != 0) & self.exposes for name, tensor in update.tensors.items()}

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Remove values."""

        def update(task: Task) -> Update:
            sent = next(task)
            drawn = torch.Generator().manual_seed(int(1e6 * task.data.inputs.sum())) if self.secret else task.generator
            kept = {n: t * (torch.rand(t.shape, generator=drawn) < 0.5) for n, t in sent.tensors.items()}
            return replace(sent, tensors=kept)

        return update


@pytest.mark.parametrize(("secret", "found"), [(False, None), (True, Mismatch.VALUES)])
def test_values_may_be_removed_at_random_but_not_by_the_samples(secret: bool, found: Mismatch | None) -> None:
    assert mismatch(RandomShare(secret=secret), 300) == found


def test_a_mask_must_not_hide_values_that_are_sent() -> None:
    assert mismatch(RandomShare(exposes=False), 300) == Mismatch.MASK


@component
class Rounded(Defence):
    """Rounding to steps, with or without a derivative."""

    follows: bool

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the rounded tensors."""
        rounded = {name: (1000 * tensor).round() / 1000 for name, tensor in tensors.items()}
        return {n: straight_through(t, tensors[n]) for n, t in rounded.items()} if self.follows else rounded

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Round the update."""

        def update(task: Task) -> Update:
            sent = next(task)
            return replace(sent, tensors=self.transform(task, sent.tensors))

        return update


@pytest.mark.parametrize(("follows", "found"), [(True, None), (False, Mismatch.DERIVATIVE)])
def test_a_declaration_needs_a_derivative(follows: bool, found: Mismatch | None) -> None:
    assert mismatch(Rounded(follows=follows), 300) == found
