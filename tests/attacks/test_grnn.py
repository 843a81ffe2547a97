"""GRNN: its terms against references, its generators, its contract, and that it finds real digits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import scipy.stats
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from rayfed.attacks.matching.distances import squared_l2
from rayfed.attacks.matching.generators import LATENT, Generator
from rayfed.attacks.matching.grnn import Grnn, Makers, RmsProp, wasserstein
from rayfed.attacks.matching.priors import squared_variation
from rayfed.attacks.matching.problem import Matching
from rayfed.errors import UserError
from rayfed.metrics.images import psnr
from rayfed.update import LocalTraining, Observation
from tests.helpers.attack_fixtures import digit, leaky_lenet, observe, photo, seeded, two_digits

GENERATOR = Generator((1, 8, 8), 10)


def short(**weights: float) -> Grnn:
    return Grnn(iterations=10, **weights)


def seen(*members: int, known: bool = False) -> tuple[nn.Module, Observation]:
    """A batch of digits and the model that saw it."""
    model = leaky_lenet((1, 8, 8))
    return model, observe(model, torch.cat([digit(i) for i in members]), torch.tensor(members), known)


# the terms


def test_wasserstein_against_scipy() -> None:
    left, right = ({"a": torch.randn(3, 4, 5, generator=g), "b": torch.randn(3, 7, generator=g)} for g in seeded(0, 1))
    for q, found in enumerate(wasserstein(left, right).tolist()):
        values = [torch.cat([t[q].flatten() for t in side.values()]).numpy() for side in (left, right)]
        assert found == pytest.approx(scipy.stats.wasserstein_distance(*values), rel=1e-5)


def test_the_objective_of_the_published_code() -> None:
    """Its "Wasserstein distance" is the Euclidean norm of the difference, with a finite slope at 0."""
    left, right = ({"a": torch.randn(2, 4, generator=g), "b": torch.randn(2, 3, 3, generator=g)} for g in seeded(0, 1))
    apart = torch.cat([(left[name] - right[name]).flatten(1) for name in left], 1)
    expected = apart.square().sum(1) + apart.norm(dim=1)
    torch.testing.assert_close(Grnn(wd=0, norm=1).distance(left, right), expected)
    same = {name: t.clone().requires_grad_() for name, t in left.items()}
    Grnn(mse=0, wd=0, norm=1).distance(same, left).sum().backward()
    assert all(t.grad is not None and not t.grad.any() for t in same.values())
    images = torch.rand(2, 1, 3, 4, 5, generator=seeded(2)[0])
    torch.testing.assert_close(Grnn(tv=0.5, tv_power=2).prior(images), 0.5 * squared_variation(images).mean(1))


def test_rmsprop_follows_torch() -> None:
    start = torch.randn(2, 5, generator=seeded(0)[0])
    ours, theirs = start.clone(), start.clone().requires_grad_()
    stepper = RmsProp({"x": ours}, lr=0.01, momentum=0.9, smoothing=0.8)
    reference = torch.optim.RMSprop([theirs], lr=0.01, momentum=0.9, alpha=0.8)
    for _ in range(20):
        stepper.step([2 * ours])
        theirs.grad = 2 * theirs.detach()
        reference.step()
    torch.testing.assert_close(ours, theirs.detach())


@pytest.mark.parametrize("known", [True, False])
def test_slope_in_the_generators_weights_against_finite_differences(known: bool) -> None:
    model, observations = two_digits(known)
    attack = Grnn(cd=0.5, tv=0.1)
    problem = Matching.of(observations, model, None, attack.distance, attack.prior, dtype=torch.float64)
    makers = Makers.draw(problem, seeded(0, 1))
    makers = replace(
        makers,
        weights={n: w.detach().double().requires_grad_() for n, w in makers.weights.items()},
        latents=makers.latents.double(),
    )
    victims = torch.arange(2)
    points = makers.points()
    _, pull = problem.value_and_gradient(points, victims)
    slopes = dict(
        zip(makers.weights, torch.autograd.grad(points, list(makers.weights.values()), pull, materialize_grads=True),
            strict=True)
    )  # fmt: skip
    for name, weight in makers.weights.items():
        along = torch.randn(weight.shape, dtype=torch.float64, generator=seeded(2)[0])
        values = []
        for sign in (1e-6, -1e-6):
            moved = replace(makers, weights={**makers.weights, name: weight.detach() + sign * along})
            values.append(problem.losses(moved.points(), victims).sum().item())
        expected = (values[0] - values[1]) / 2e-6
        assert (slopes[name] * along).sum().item() == pytest.approx(expected, rel=1e-3, abs=1e-6), name


def test_the_terms_are_weighted() -> None:
    model, observations = two_digits()
    started = {key: start(observations, model, **({"mse": 0, "wd": 0, "cd": 0, "tv": 0} | {key: 2.0}))
               for key in ("mse", "wd", "cd")}  # fmt: skip
    assert start(observations, model, mse=2, wd=2, cd=2, tv=0) == pytest.approx(sum(started.values()), rel=1e-5)
    problem = Matching.of(observations[:1], model, None, squared_l2)
    points = Makers.draw(problem, seeded(0)).points()
    assert started["mse"] == pytest.approx(2 * problem.losses(points, torch.tensor([0])).item(), rel=1e-5)


def start(observations: list[Observation], model: nn.Module, **weights: float) -> float:
    """The first victim's objective before the first step."""
    return short(**weights).reconstruct(observations[:1], model, seeded(0))[0].trace[0][1]


def test_the_cosine_alone_does_not_see_the_length_of_the_gradient() -> None:
    model, (observation, _) = two_digits()
    longer = replace(observation, update={n: 8 * t for n, t in observation.update.items()})
    attack = short(mse=0, wd=0, cd=1)
    one, eight = attack.reconstruct([observation], model, seeded(0)) + attack.reconstruct([longer], model, seeded(0))
    torch.testing.assert_close(one.images, eight.images)


def test_nothing_to_match_is_refused() -> None:
    with pytest.raises(ValidationError, match="mse, wd, norm and cd"):
        Grnn(mse=0, wd=0)


# the generators


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [((1, 8, 8), 1), ((1, 28, 28), 3), ((3, 32, 32), 3), ((3, 64, 64), 4), ((1, 112, 92), 5), ((3, 3, 4), 1)],
)
def test_a_generator_fits_the_images(shape: tuple[int, int, int], blocks: int) -> None:
    generator = Generator(shape, 7)
    images, logits = generator(torch.randn(2, LATENT, generator=seeded(0)[0]))
    assert len(generator.blocks) == blocks
    assert images.shape == (2, *shape)
    assert logits.shape == (2, 7)
    assert 0 < images.min() < images.max() < 1
    assert not list(generator.buffers())


def test_every_pixel_is_free_where_the_image_is_cut() -> None:
    """The Jacobian of all pixels in the weights has full rank: no two pixels are tied."""
    generator = Generator((1, 6, 6), 2)
    images, _ = generator(torch.randn(1, LATENT, generator=seeded(0)[0]))
    weights = list(generator.parameters())
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(pixel, weights, retain_graph=True, materialize_grads=True)])
        for pixel in images.flatten()
    ]
    assert torch.linalg.matrix_rank(torch.stack(rows)) == 36


def test_stacked_generators_equal_one_by_one() -> None:
    model, _ = two_digits()
    _, observation = seen(1, 2, 3)
    problem = Matching.of([observation, observation], model, None, squared_l2)
    together = Makers.draw(problem, seeded(0, 1)).points()
    for row, generator in enumerate(seeded(0, 1)):
        torch.testing.assert_close(together[row : row + 1], Makers.draw(problem, [generator]).points())


def test_global_randomness_neither_moves_nor_counts() -> None:
    model, (observation, _) = two_digits()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    (first,) = short().reconstruct([observation], model, seeded(0))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    (second,) = short().reconstruct([observation], model, seeded(0))
    assert torch.equal(first.images, second.images)


# the contract


def test_a_result_depends_on_its_own_generator_alone() -> None:
    model, observations = two_digits(known=False)
    together = short().reconstruct(observations, model, seeded(7, 8))
    again = short().reconstruct(observations, model, seeded(7, 8))
    (alone,) = short().reconstruct(observations[1:], model, seeded(8))
    (other,) = short().reconstruct(observations[1:], model, seeded(9))
    assert torch.equal(together[1].images, again[1].images)
    assert together[1].trace == again[1].trace
    assert alone.trace[10][0] == 10
    assert alone.trace[10][1] == pytest.approx(together[1].trace[10][1], rel=1e-4)
    assert other.loss != alone.loss


def test_batch_sizes_mix_and_labels_that_are_known_stay() -> None:
    model = leaky_lenet((1, 8, 8))
    observations = [seen(1, 2, 3)[1], seen(4, known=True)[1], seen(5, 6, 7, known=True)[1]]
    for observation, result in zip(
        observations, short().reconstruct(observations, model, seeded(0, 1, 2)), strict=True
    ):
        assert result.status == "ok"
        assert result.images.shape == (observation.batch_size, 1, 8, 8)
        assert 0 <= result.images.min() <= result.images.max() <= 1
        assert result.labels.shape == (observation.batch_size,)
        assert observation.labels is None or torch.equal(result.labels, observation.labels)
        assert result.loss <= min(value for _, value in result.trace)
        assert result.seconds > 0


def test_a_result_does_not_depend_on_who_trains_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model, observations = two_digits(known=False)
    observations = [*observations, *two_digits(known=False)[1]]
    together = short().reconstruct(observations, model, seeded(*range(4)))
    sizes: list[int] = []
    points = Makers.points
    monkeypatch.setattr(Makers, "points", lambda self: sizes.append(len(self.latents)) or points(self))
    monkeypatch.setattr(
        "rayfed.attacks.matching.grnn._WEIGHTS_AT_ONCE", 3 * sum(w.numel() for w in GENERATOR.parameters())
    )
    apart = short().reconstruct(observations, model, seeded(*range(4)))
    assert set(sizes) == {3, 1}
    for one, other in zip(together, apart, strict=True):
        assert one.trace[10][1] == pytest.approx(other.trace[10][1], rel=1e-4)
        assert torch.equal(one.labels, other.labels)


def test_local_steps_are_simulated() -> None:
    model, observation = seen(3, known=True)
    observation = replace(observation, local=LocalTraining(steps=3, lr=0.5))
    attack = Grnn(iterations=1, local_steps="simulated", wd=0, tv=0)
    (simulated,) = attack.reconstruct([observation], model, seeded(0))
    problem = Matching.of([observation], model, None, squared_l2, local_steps="simulated")
    points = Makers.draw(problem, seeded(0)).points()
    assert simulated.trace[0][1] == pytest.approx(problem.losses(points, torch.tensor([0])).item(), rel=1e-5)


def test_a_broken_observation_leaves_the_others_alone() -> None:
    model, (first, second) = two_digits()
    broken = replace(first, update={n: t * torch.nan for n, t in first.update.items()})
    bad, good = short().reconstruct([broken, second], model, seeded(0, 1))
    (alone,) = short().reconstruct([second], model, seeded(1))
    assert bad.status == "diverged"
    assert bad.message
    assert bad.images.isfinite().all()
    assert good.status == "ok"
    assert good.loss == pytest.approx(alone.loss, rel=1e-4)


def test_a_training_that_ends_in_overflow_returns_the_best_before() -> None:
    model, (observation, _) = two_digits()
    (result,) = Grnn(iterations=30, lr=1e30).reconstruct([observation], model, seeded(0))
    assert result.images.isfinite().all()
    assert result.loss <= result.trace[0][1]


def test_an_unknown_layer_is_refused_and_those_left_out_do_not_count() -> None:
    model, (observation, _) = two_digits()
    with pytest.raises(UserError, match=r"nothing\*"):
        Grnn(layers=["nothing*"]).reconstruct([observation], model, seeded(0))
    spoilt = replace(observation, update={n: t + n.startswith("fc") for n, t in observation.update.items()})
    attack = Grnn(iterations=10, layers=["conv*"])
    clean, same = (attack.reconstruct([o], model, seeded(0))[0].images for o in (observation, spoilt))
    assert torch.equal(clean, same)


# reconstruction


@pytest.mark.engine
def test_digits_and_their_labels_are_found() -> None:
    model, observations = two_digits(known=False)
    results = Grnn(iterations=600).reconstruct(observations, model, seeded(0, 1))
    for result, index in zip(results, (3, 5), strict=True):
        assert psnr(result.images, digit(index)).item() > 30
        assert result.labels.tolist() == [index]


@pytest.mark.slow
def test_a_photo_and_its_label_are_found() -> None:
    model = leaky_lenet((3, 32, 32))
    image = photo(60, 120)
    (result,) = Grnn().reconstruct([observe(model, image, torch.tensor([7]), known=False)], model, seeded(0))
    assert psnr(result.images, image).item() > 30
    assert result.labels.tolist() == [7]


@pytest.mark.engine
def test_noise_takes_the_digit_away() -> None:
    model, (observation, _) = two_digits()
    noise: dict[str, Tensor] = {
        n: t + 0.1 * torch.randn(t.shape, generator=seeded(5)[0]) for n, t in observation.update.items()
    }
    results = Grnn(iterations=300).reconstruct([observation, replace(observation, update=noise)], model, seeded(0, 0))
    clean, noisy = (psnr(r.images, digit(3)).item() for r in results)
    assert clean - noisy > 10
