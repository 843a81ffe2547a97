"""Generative gradient leakage: its objective, its searches, and what they find in a tiny generator's images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rayfed.attacks.base import Attack
from rayfed.attacks.matching.distances import one_minus_cosine, squared_l2
from rayfed.attacks.matching.ggl import Ggl, LatentSearch
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.attacks.matching.priors import latent_divergence
from rayfed.attacks.matching.problem import Matching
from rayfed.defences.base import Defence
from rayfed.defences.gaussian import Gaussian
from rayfed.defences.prune import Prune
from rayfed.errors import UserError
from rayfed.gradients import gradient
from rayfed.metrics.images import psnr
from rayfed.models.build import build_model
from rayfed.models.dcgan import Generator
from rayfed.models.pretrained import Origin, load_generator, save_generator
from rayfed.pretraining.generator import GeneratorSize, train
from rayfed.registry import build
from rayfed.scenario import parse
from rayfed.simulation.inputs import prepare_inputs
from rayfed.update import Observation
from tests.helpers.attack_fixtures import LENET, generators, images_of, observed

SHAPE = (1, 8, 8)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A generator with latents of four numbers, its weights enlarged so that they matter."""
    torch.manual_seed(0)
    generator = Generator(SHAPE, 10, latent=4, width=8)
    generator.latent_in.weight.data.mul_(4)
    generator.train()(torch.randn(500, 4), torch.arange(500) % 10)  # statistics for the batch norm
    path = tmp_path_factory.mktemp("generator") / "g.pt"
    save_generator(path, generator, Origin({}, "", 0, 0))
    return str(path)


def victims(file: str, count: int, stack: Sequence[Defence] = ()) -> tuple[nn.Module, Tensor, list[Observation]]:
    """Clients whose images the generator can make: (count, 1, 8, 8), client i's of class i."""
    model, labels = build_model(*LENET, SHAPE, 10, seed=1), torch.arange(count)
    latents = torch.randn(count, 4, generator=torch.Generator().manual_seed(9))
    images = load_generator(file, SHAPE, 10)(latents, labels)
    return model, images, [observed(model, images[i : i + 1], labels[i : i + 1], stack, seed=i) for i in range(count)]


def labelled(observations: list[Observation]) -> list[Observation]:
    return [replace(observation, labels=torch.tensor([i])) for i, observation in enumerate(observations)]


def test_divergence_is_that_of_two_normals() -> None:
    latents = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)) * 2 + 1
    fitted = torch.distributions.Normal(latents.mean(1), latents.std(1, correction=0))
    expected = torch.distributions.kl_divergence(fitted, torch.distributions.Normal(0.0, 1.0))
    torch.testing.assert_close(latent_divergence(latents), expected)


@pytest.mark.parametrize("distance", [squared_l2, one_minus_cosine])
def test_the_objective_by_its_definition(file: str, distance: object) -> None:
    model, _, seen = victims(file, 2)
    problem = Matching.of(labelled(seen), model, None, distance)  # type: ignore[arg-type]
    generator = load_generator(file, SHAPE, 10)
    latents = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
    values = LatentSearch(problem, generator, prior=0.5).values(latents, torch.arange(2))
    for i in range(2):
        image = generator(latents[i : i + 1], torch.tensor([i]))
        made, _ = gradient(model, seen[i].weights, {}, image, torch.tensor([i]))
        difference = distance(  # type: ignore[operator]
            {n: t[None] for n, t in made.items()}, {n: t[None] for n, t in seen[i].gradient.items()}
        )
        assert values[i].item() == pytest.approx(
            difference.item() + 0.5 * latent_divergence(latents[i]).item(), rel=1e-4
        )


def test_slope_of_the_objective_against_finite_differences(file: str) -> None:
    model, _, seen = victims(file, 2)
    problem = Matching.of(labelled(seen), model, None, squared_l2, dtype=torch.float64)
    search = LatentSearch(problem, load_generator(file, SHAPE, 10).double(), prior=0.5)
    latents = torch.randn(2, 4, generator=torch.Generator().manual_seed(3)).double()
    values, slopes = search.value_and_gradient(latents, torch.arange(2))
    torch.testing.assert_close(values, search.values(latents, torch.arange(2)))
    for axis in range(4):
        step = torch.zeros_like(latents)
        step[:, axis] = 1e-6
        difference = search.values(latents + step, torch.arange(2)) - search.values(latents - step, torch.arange(2))
        torch.testing.assert_close(slopes[:, axis], difference / 2e-6, rtol=1e-4, atol=1e-6)


@pytest.mark.engine
@pytest.mark.parametrize("optimiser", ["cma", "adam"])
@pytest.mark.parametrize("distance", ["squared_l2", "cosine"])
def test_it_finds_images_that_the_generator_can_make(file: str, optimiser: str, distance: str) -> None:
    model, images, seen = victims(file, 3)
    attack = Ggl(generator=file, optimiser=optimiser, distance=distance, population=12, iterations=60, prior=0)
    found = attack.reconstruct(seen, model, generators(3))
    quality = psnr(images, torch.cat([f.images for f in found]))
    assert [f.labels.item() for f in found] == [0, 1, 2]
    assert quality.median() > 30
    for f in found:
        assert f.status == "ok"
        assert f.trace[-1][1] < f.trace[0][1]
        assert f.trace[-1][0] == f.iterations == 60
        assert [iteration for iteration, _ in f.snapshots] == [0, 10, 60]
        assert torch.equal(f.snapshots[-1][1], f.images)


@pytest.mark.parametrize("optimiser", ["cma", "adam"])
def test_a_result_depends_on_its_own_generator_alone(file: str, optimiser: str) -> None:
    model, _, seen = victims(file, 3)
    attack = Ggl(generator=file, optimiser=optimiser, population=8, iterations=10)
    together, again = (attack.reconstruct(seen, model, generators(3)) for _ in range(2))
    [alone] = attack.reconstruct(seen[1:2], model, generators(3)[1:2])
    [other] = attack.reconstruct(seen[1:2], model, generators(1, seed=5))
    assert torch.equal(together[1].images, again[1].images)
    assert together[1].trace == again[1].trace
    assert alone.trace[-1][1] == pytest.approx(together[1].trace[-1][1], abs=1e-4)
    assert other.loss != alone.loss


@pytest.mark.parametrize("optimiser", ["cma", "adam"])
def test_a_broken_observation_leaves_the_others_alone(file: str, optimiser: str) -> None:
    model, _, seen = victims(file, 2)
    broken = replace(seen[0], update={n: t * torch.nan for n, t in seen[0].update.items()})
    attack = Ggl(generator=file, optimiser=optimiser, population=8, iterations=10)
    bad, good = attack.reconstruct([broken, seen[1]], model, generators(2))
    [alone] = attack.reconstruct(seen[1:], model, generators(2)[1:])
    assert bad.status == "diverged"
    assert bad.message
    assert bad.images.isfinite().all()
    assert good.status == "ok"
    assert good.loss == pytest.approx(alone.loss, rel=1e-3, abs=1e-4)


def test_batches_and_layers(file: str) -> None:
    model, images, seen = victims(file, 3)
    batch = observed(model, images, torch.arange(3))
    spoilt = replace(batch, update={n: t + (100 if n.startswith("conv") else 0) for n, t in batch.update.items()})
    attack = Ggl(generator=file, population=8, iterations=5, layers=["fc.*"])
    mixed, single = attack.reconstruct([batch, seen[0]], model, generators(2))
    assert mixed.images.shape == (3, *SHAPE)
    assert mixed.labels.tolist() == [0, 1, 2]
    assert single.images.shape == (1, *SHAPE)
    [same] = attack.reconstruct([spoilt], model, generators(1))
    assert torch.equal(mixed.images, same.images)


@pytest.mark.slow
@pytest.mark.engine
def test_it_stands_noise_that_takes_a_prior_on_pixels_down(file: str) -> None:
    """Pruning takes neither down: what is left is seen by both."""
    for defence, ahead in ((Gaussian(sigma=0.1), 5.0), (Prune(ratio=0.9), -inf)):
        model, images, seen = victims(file, 3, [defence])
        latent = Ggl(generator=file, population=12, iterations=60).reconstruct(seen, model, generators(3))
        pixels = InvertingGradients(iterations=300).reconstruct(seen, model, generators(3))
        assert [f.labels.item() for f in latent] == [0, 1, 2]
        generative, pixelwise = (psnr(images, torch.cat([f.images for f in found])) for found in (latent, pixels))
        assert generative.mean() > max(20.0, float(pixelwise.mean()) + ahead)


def test_generators_that_do_not_fit_are_refused(file: str, tmp_path: Path) -> None:
    model, _, seen = victims(file, 1)
    with pytest.raises(UserError, match="rayfed train-generator"):
        Ggl(generator=str(tmp_path / "absent.pt")).reconstruct(seen, model, generators(1))
    with pytest.raises(UserError, match=r"nothing\*"):
        Ggl(generator=file, layers=["nothing*"]).reconstruct(seen, model, generators(1))
    scenario = f"""
name: t
data: {{name: digits, size: 16}}
federation: {{rounds: 1, clients: 2}}
attacks: [{{name: ggl, generator: '{file}'}}]
"""
    with pytest.raises(UserError, match="1x8x8 in 10 classes, but the data have 1x16x16"):
        prepare_inputs(parse(scenario))


def test_a_model_whose_head_is_a_convolution_shows_its_label(file: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten())
    seen = observed(model, torch.rand(1, *SHAPE), torch.tensor([1]))
    [found] = Ggl(generator=file, iterations=1).reconstruct([seen], model, generators(1))
    assert found.status == "ok"
    assert found.labels.tolist() == [1]


@pytest.mark.slow
def test_real_digits_through_a_generator_of_other_digits(tmp_path: Path) -> None:
    """A generator trained on training digits; victims are test digits, as they are and under noise."""
    data = build("datasets", "digits", {"size": 8}).load()
    pretrained = train(data.train_images, data.train_labels, 10, seed=0, epochs=75, size=GeneratorSize(16, 16))
    save_generator(tmp_path / "g.pt", pretrained, Origin({}, "", 0, 75))
    images, labels = images_of("digits", 8, size=8, skip=10)
    model = build_model(*LENET, SHAPE, 10, seed=2)

    def quality(attack: Attack, stack: Sequence[Defence]) -> float:
        seen = [observed(model, images[i : i + 1], labels[i : i + 1], stack, seed=i) for i in range(8)]
        found = attack.reconstruct(seen, model, generators(8))
        assert [f.labels.item() for f in found] == labels.tolist()
        return psnr(images, torch.cat([f.images for f in found])).mean().item()

    ggl = Ggl(generator=str(tmp_path / "g.pt"), iterations=100)
    latents = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    blind = psnr(images, load_generator(tmp_path / "g.pt", SHAPE, 10)(latents, labels)).mean().item()
    assert quality(ggl, []) > blind + 2
    noise = [Gaussian(sigma=0.1)]
    assert quality(ggl, noise) > quality(InvertingGradients(iterations=300), noise) + 2
