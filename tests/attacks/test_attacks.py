"""Attacks: their objectives against independent references, their batching, and that they reconstruct real images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor, nn

from rayfed.attacks import TABLE
from rayfed.attacks.base import Attack, InferenceAttack
from rayfed.attacks.closed_form.analytic import Analytic
from rayfed.attacks.forward_probe import without_tracking
from rayfed.attacks.matching.adam import adam
from rayfed.attacks.matching.distances import one_minus_cosine, squared_l2
from rayfed.attacks.matching.dlg import Dlg
from rayfed.attacks.matching.gradinversion import GradInversion
from rayfed.attacks.matching.idlg import Idlg
from rayfed.attacks.matching.inverting_gradients import InvertingGradients, decayed
from rayfed.attacks.matching.lbfgs import minimise
from rayfed.attacks.matching.priors import squared_variation, total_variation
from rayfed.attacks.matching.problem import Matching, matched_layers
from rayfed.attacks.matching.unit_steps import take_unit_steps
from rayfed.errors import UserError
from rayfed.models.convnet import ConvNet
from rayfed.models.mlp import Mlp
from rayfed.registry import build
from rayfed.update import Named
from tests.helpers.attack_fixtures import digit, leaky_lenet, observe, photo, psnr, seeded, two_digits
from tests.helpers.component_fixtures import required


def tv_prior(images: Tensor) -> Tensor:
    return 0.1 * total_variation(images).mean(1)


# the objective


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("distance", [squared_l2, one_minus_cosine])
def test_slope_of_the_objective_against_finite_differences(distance: object, known: bool) -> None:
    model, observations = two_digits(known)
    problem = Matching.of(observations[:1], model, None, distance, prior=tv_prior, dtype=torch.float64)  # type: ignore[arg-type]
    point = torch.rand(1, problem.dimension, dtype=torch.float64, generator=seeded(0)[0])
    victims = torch.zeros(1, dtype=torch.int64)
    _, slope = problem.value_and_gradient(point, victims)
    for axis in (0, 17, 40, problem.dimension - 1):
        step = torch.zeros_like(point)
        step[0, axis] = 1e-6
        difference = (problem.losses(point + step, victims) - problem.losses(point - step, victims)).item() / 2e-6
        assert slope[0, axis].item() == pytest.approx(difference, rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("distance", [squared_l2, one_minus_cosine])
def test_vectorised_equals_one_by_one(distance: object) -> None:
    model, observations = two_digits()
    problem = Matching.of(observations, model, None, distance, prior=tv_prior)  # type: ignore[arg-type]
    points = torch.rand(2, problem.dimension, generator=seeded(0)[0])
    together = problem.value_and_gradient(points, torch.tensor([0, 1]))
    alone = [problem.value_and_gradient(points[i : i + 1], torch.tensor([i])) for i in (0, 1)]
    for part, pieces in zip(together, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(part, torch.cat(pieces), rtol=1e-4, atol=1e-5)


def test_the_objective_is_nothing_at_the_truth() -> None:
    model, observations = two_digits()
    truth = torch.stack([digit(3).flatten(), digit(5).flatten()])
    for distance in (squared_l2, one_minus_cosine):
        problem = Matching.of(observations, model, None, distance, dtype=torch.float64)
        assert (problem.losses(truth.double(), torch.arange(2)) < 1e-8).all()


@pytest.mark.parametrize("training", [True, False])
def test_the_truth_matches_under_batch_norm_of_either_mode(training: bool) -> None:
    torch.manual_seed(0)
    model = ConvNet(width=4).build((3, 32, 32), 10).train(training)
    images = torch.cat([photo(0, 0), photo(100, 150), photo(40, 60)])
    observation = observe(model, images, torch.tensor([1, 2, 3]))
    problem = Matching.of([observation, observation], model, None, one_minus_cosine)
    points = images.reshape(1, -1).repeat(2, 1)
    true = problem.losses(points, torch.tensor([0, 1])).abs()
    false = problem.losses(1 - points, torch.tensor([0, 1]))
    assert (true < 1e-5).all()
    assert (false > 20 * true).all()


def test_without_tracking_leaves_evaluation_and_the_model_alone() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3).eval(), nn.Dropout(0.5))
    copy = without_tracking(model)
    assert [name for name, _ in copy.named_buffers() if name.endswith("mean")] == ["1.running_mean"]
    assert not copy[2].training
    assert model[0].track_running_stats
    assert model[2].training


@pytest.mark.parametrize("channels", [1, 3])
def test_total_variation_against_a_loop(channels: int) -> None:
    image = torch.rand(channels, 5, 7, generator=seeded(0)[0])
    down = [image[c, i + 1, j] - image[c, i, j] for c in range(channels) for i in range(4) for j in range(7)]
    across = [image[c, i, j + 1] - image[c, i, j] for c in range(channels) for i in range(5) for j in range(6)]
    expected = sum(map(abs, down)) / len(down) + sum(map(abs, across)) / len(across)
    torch.testing.assert_close(total_variation(image), expected)
    squares = [sum(d**2 for d in differences) / len(differences) for differences in (down, across)]
    torch.testing.assert_close(squared_variation(image), 2 * sum(squares))
    for variation in (total_variation, squared_variation):
        assert variation(torch.ones(2, channels, 5, 7)).tolist() == [0, 0]
        assert variation(torch.rand(2, channels, 1, 7)).tolist() == [0, 0]


def test_layers_are_chosen_by_name_or_pattern() -> None:
    names = ["conv1.weight", "conv1.bias", "fc.weight", "fc.bias"]
    assert matched_layers(names, None) == names
    assert matched_layers(names, ["fc.*", "conv1.weight"]) == ["conv1.weight", "fc.weight", "fc.bias"]
    with pytest.raises(UserError, match=r"'cnv1\.weight'.*did you mean 'conv1\.weight'"):
        matched_layers(names, ["cnv1.weight"])


def test_layers_left_out_do_not_count() -> None:
    model, (first, second) = two_digits()
    spoilt = replace(first, update={n: t + (100 if n.startswith("fc") else 0) for n, t in first.update.items()})
    attack = InvertingGradients(iterations=3, layers=["conv*"])
    clean, same = (
        attack.reconstruct([first, second], model, seeded(0, 1))[0],
        attack.reconstruct([spoilt], model, seeded(0))[0],
    )
    torch.testing.assert_close(clean.images, same.images, atol=1e-4, rtol=0)


# the optimisers


def rosenbrock(points: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
    """Problem 1 is nowhere a number."""
    x, y = points[:, :-1], points[:, 1:]
    values = (100 * (y - x**2) ** 2 + (1 - x) ** 2).sum(1)
    slopes = torch.zeros_like(points)
    slopes[:, :-1] = -400 * x * (y - x**2) - 2 * (1 - x)
    slopes[:, 1:] += 200 * (y - x**2)
    broken = problems == 1
    return values.masked_fill(broken, torch.nan), slopes.masked_fill(broken[:, None], torch.nan)


def test_lbfgs_solves_rosenbrock_beside_a_broken_problem() -> None:
    start = torch.randn(4, 6, dtype=torch.float64, generator=seeded(0)[0])
    found = minimise(rosenbrock, start, 1000)
    for row in (0, 2, 3):
        reference = scipy.optimize.minimize(
            lambda x: rosenbrock(torch.tensor(x)[None], torch.tensor([0]))[0].item(),
            start[row].numpy(),
            jac=lambda x: rosenbrock(torch.tensor(x)[None], torch.tensor([0]))[1][0].numpy(),
            method="L-BFGS-B",
            options={"maxiter": 1000, "ftol": 0, "gtol": 1e-10},
        )
        np.testing.assert_allclose(found.points[row].numpy(), reference.x, atol=1e-4)
    assert found.values[1].isnan()
    torch.testing.assert_close(found.points[1], start[1])
    assert found.iterations[1] == 0


def test_lbfgs_in_batch_equals_alone() -> None:
    start = torch.randn(4, 6, dtype=torch.float64, generator=seeded(1)[0])
    together = minimise(rosenbrock, start, 15)
    for row in (0, 2, 3):
        alone = minimise(lambda x, _, row=row: rosenbrock(x, torch.full((len(x),), row)), start[row : row + 1], 15)
        torch.testing.assert_close(together.points[row], alone.points[0])


def test_lbfgs_solves_a_quadratic_and_never_rises() -> None:
    generator = seeded(0)[0]
    basis = torch.randn(3, 8, 8, dtype=torch.float64, generator=generator)
    matrix = basis @ basis.mT + 0.1 * torch.eye(8, dtype=torch.float64)
    lowest = torch.randn(3, 8, dtype=torch.float64, generator=generator)

    def quadratic(x: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
        slope = (matrix[problems] @ (x - lowest[problems])[..., None])[..., 0]
        return ((x - lowest[problems]) * slope).sum(1) / 2, slope

    found = minimise(quadratic, torch.zeros(3, 8, dtype=torch.float64), 99)
    torch.testing.assert_close(found.points, lowest, rtol=1e-5, atol=1e-5)
    assert (found.history.diff(dim=0) <= 0).all()


def test_lbfgs_ends_each_problem_at_its_own_target() -> None:
    start = torch.full((2, 4), 3.0)
    found = minimise(lambda x, _: (x.square().sum(1) / 2, x), start, 50, target=torch.tensor([1e-6, 100.0]))
    assert found.iterations.tolist()[1] == 0
    assert found.values[0] <= 1e-6


def test_lbfgs_steps_back_from_where_the_objective_ends() -> None:
    def barrier(x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return (x - x.log()).sum(1), 1 - 1 / x  # log of a negative number: NaN

    found = minimise(barrier, torch.full((1, 3), 1e-2, dtype=torch.float64), 100)
    torch.testing.assert_close(found.points, torch.ones(1, 3, dtype=torch.float64), atol=1e-4, rtol=0)


@pytest.mark.parametrize("beta2", [0.999, 0.85])
@pytest.mark.parametrize("signed", [True, False])
def test_adam_follows_torch(signed: bool, beta2: float) -> None:
    start, goal = torch.rand(2, 5, generator=seeded(0)[0]), torch.full((2, 5), 0.5)
    found = adam(lambda x: ((x - goal).square().sum(1), 2 * (x - goal)), start, decayed(0.05, 40), signed, beta2=beta2)
    x = start.clone().requires_grad_()
    reference = torch.optim.Adam([x], lr=0.05, betas=(0.9, beta2))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(reference, 40)
    for _ in range(40):
        slope = (2 * (x - goal)).detach()
        x.grad = slope.sign() if signed else slope
        reference.step()
        schedule.step()
        x.data.clamp_(0, 1)
    torch.testing.assert_close(found.last_values, (x - goal).square().sum(1).detach(), rtol=1e-3, atol=1e-6)


# the contract


ATTACKS = {
    "dlg": Dlg(iterations=1, restarts=1),
    "dlg, published": Dlg(iterations=1, restarts=1, line_search=False),
    "idlg": Idlg(iterations=1, restarts=1),
    "inverting_gradients": InvertingGradients(iterations=10, restarts=2),
    "gradinversion": GradInversion(iterations=10, seeds=2),
}


REQUIRED = {"ggl": {"generator": "g.pt"}, "model_inversion": {"cut": "conv1"}}


def test_every_attack_is_built_by_its_name() -> None:
    for name in TABLE:
        parameters = REQUIRED.get(name) or required("attacks", name)
        assert isinstance(build("attacks", name, parameters), Attack | InferenceAttack)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_result_depends_on_its_own_generator_alone(name: str) -> None:
    model, observations = two_digits(known=False)
    attack = ATTACKS[name]
    together = attack.reconstruct(observations, model, seeded(7, 8))
    again = attack.reconstruct(observations, model, seeded(7, 8))
    (alone,) = attack.reconstruct(observations[1:], model, seeded(8))
    (other,) = attack.reconstruct(observations[1:], model, seeded(9))
    assert torch.equal(together[1].images, again[1].images)
    assert together[1].trace == again[1].trace
    assert alone.trace[-1][1] == pytest.approx(together[1].trace[-1][1], abs=1e-4)
    assert other.loss != alone.loss


@pytest.mark.parametrize("name", ATTACKS)
def test_batch_sizes_mix_and_shapes_hold(name: str) -> None:
    model = leaky_lenet((1, 8, 8))
    observations = [
        observe(model, torch.cat([digit(i) for i in members]), torch.tensor(members), known)
        for members, known in (([1, 2, 3], False), ([4], True), ([5, 6, 7], True))
    ]
    for observation, result in zip(
        observations, ATTACKS[name].reconstruct(observations, model, seeded(0, 1, 2)), strict=True
    ):
        assert result.status == "ok"
        assert result.images.shape == (observation.batch_size, 1, 8, 8)
        assert 0 <= result.images.min() <= result.images.max() <= 1
        assert result.images.dtype == torch.float32
        if observation.labels is not None:
            assert result.labels.tolist() == observation.labels.tolist()
        assert result.iterations > 0
        assert result.seconds > 0


@pytest.mark.parametrize("name", ATTACKS)
def test_a_broken_observation_leaves_the_others_alone(name: str) -> None:
    model, (first, second) = two_digits()
    broken = replace(first, update={n: t * torch.nan for n, t in first.update.items()})
    bad, good = ATTACKS[name].reconstruct([broken, second], model, seeded(0, 1))
    (alone,) = ATTACKS[name].reconstruct([second], model, seeded(1))
    assert bad.status == "diverged"
    assert bad.message
    assert bad.images.isfinite().all()
    assert good.status == "ok"
    assert good.loss == pytest.approx(alone.loss, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("attack", [Dlg(layers=["nothing*"]), InvertingGradients(layers=["nothing*"])])
def test_an_unknown_layer_is_refused(attack: Attack) -> None:
    model, observations = two_digits()
    with pytest.raises(UserError, match=r"nothing\*"):
        attack.reconstruct(observations, model, seeded(0, 1))


# reconstruction


def test_dlg_finds_a_digit_and_its_label() -> None:
    model, observations = two_digits(known=False)
    results = Dlg().reconstruct(observations, model, seeded(0, 1))
    for result, index in zip(results, (3, 5), strict=True):
        assert psnr(result.images, digit(index)) > 40
        assert result.labels.tolist() == [index]
        assert result.trace[0][0] == 0
        assert result.trace[-1][1] < 1e-3 * result.trace[0][1]
        assert len(result.trace) <= 101


def test_idlg_finds_a_digit() -> None:
    model, observations = two_digits(known=False)
    (result,) = Idlg().reconstruct(observations[:1], model, seeded(0))
    assert psnr(result.images, digit(3)) > 40


def test_dlg_without_a_line_search_is_the_published_loop() -> None:
    """The loop of the authors' code, written out: `torch.optim.LBFGS` on the image and the logits of its label."""
    model, (seen, _) = two_digits(known=False)
    dummy = torch.randn(74, generator=seeded(0)[0])
    parts = image, logits = dummy[:64].view(1, 1, 8, 8).requires_grad_(), dummy[64:].view(1, 10).requires_grad_()
    optimiser = torch.optim.LBFGS(parts, lr=1)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -(logits.softmax(1) * model(image).log_softmax(1)).sum()
        slopes = torch.autograd.grad(loss, tuple(model.parameters()), create_graph=True)
        apart = [
            (g - seen.update[n]).square().sum() for (n, _), g in zip(model.named_parameters(), slopes, strict=True)
        ]
        distance = torch.stack(apart).sum()
        distance.backward()
        return distance

    for _ in range(2):
        optimiser.step(closure)
    (result,) = Dlg(iterations=2, restarts=1, line_search=False).reconstruct([seen], model, seeded(0))
    torch.testing.assert_close(result.images, image.detach().clamp(0, 1), atol=1e-3, rtol=0)


def test_a_search_with_unit_steps_that_diverges_ends_alone() -> None:
    def holed(x: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
        inside = (problems == 1) & (x.abs().sum(1) < 1)
        return x.square().sum(1).masked_fill(inside, torch.nan), 2 * x

    found = take_unit_steps(holed, torch.full((2, 3), 2.0), 5, 20)
    assert found.values[0] < 1e-6
    assert not found.values[1].isfinite()
    assert found.iterations[1] < found.iterations[0] == 100
    assert found.history.shape == (101, 2)


@pytest.mark.engine
def test_dlg_reports_the_label_of_its_result() -> None:
    """The start's label is random: over ten starts a tool that reports it is wrong nearly always."""
    model = leaky_lenet((1, 8, 8))
    observations = [observe(model, digit(3), torch.tensor([3]), known=False)] * 10
    results = Dlg(iterations=25, restarts=1).reconstruct(observations, model, seeded(*range(10)))
    assert sum(result.labels.item() == 3 for result in results) >= 9


@pytest.mark.slow
def test_dlg_finds_a_photo_and_its_label() -> None:
    model = leaky_lenet((3, 32, 32))
    image = photo(60, 120)
    (result,) = Dlg().reconstruct([observe(model, image, torch.tensor([7]), known=False)], model, seeded(0))
    assert psnr(result.images, image) > 40
    assert result.labels.tolist() == [7]


def test_dlg_fails_under_noise() -> None:
    model, (clean, _) = two_digits()
    noise = {n: t + 0.1 * torch.randn(t.shape, generator=seeded(5)[0]) for n, t in clean.update.items()}
    [noisy] = Dlg(restarts=1).reconstruct([replace(clean, update=noise)], model, seeded(0))
    assert psnr(noisy.images, digit(3)) < 12


@pytest.mark.engine
def test_inverting_gradients_improves_with_its_budget() -> None:
    model = leaky_lenet((1, 8, 8))
    observation = observe(model, digit(3), torch.tensor([3]), known=False)
    short, long = (InvertingGradients(iterations=n).reconstruct([observation], model, seeded(0))[0] for n in (30, 600))
    assert psnr(long.images, digit(3)) > psnr(short.images, digit(3))
    assert long.loss < short.loss
    assert long.labels.tolist() == [3]


def test_the_best_restart_is_kept() -> None:
    model, observations = two_digits()
    three = InvertingGradients(iterations=20, restarts=3).reconstruct(observations, model, seeded(0, 1))
    one = InvertingGradients(iterations=20, restarts=1).reconstruct(observations, model, seeded(0, 1))
    for several, single in zip(three, one, strict=True):
        assert several.loss <= single.loss + 1e-6


def test_analytic_is_exact_for_one_sample() -> None:
    torch.manual_seed(0)
    model = Mlp().build((3, 32, 32), 10)
    image = photo(60, 120)
    (result,) = Analytic().reconstruct([observe(model, image, torch.tensor([7]), known=False)], model, seeded(0))
    torch.testing.assert_close(result.images, image, atol=1e-4, rtol=0)
    assert result.labels.tolist() == [7]


def test_analytic_undoes_a_normalisation() -> None:
    torch.manual_seed(0)
    model = Mlp().build((3, 32, 32), 10)
    model.register_forward_pre_hook(lambda _, inputs: ((inputs[0] - 0.4) / 0.25,))
    image = photo(60, 120)
    (result,) = Analytic().reconstruct([observe(model, image, torch.tensor([7]))], model, seeded(0))
    torch.testing.assert_close(result.images, image, atol=1e-4, rtol=0)


def test_analytic_finds_isolated_samples_of_a_batch() -> None:
    torch.manual_seed(0)
    model = Mlp(hidden=(800, 50)).build((1, 8, 8), 10)
    images = torch.cat([digit(i) for i in (0, 1, 4)])
    (result,) = Analytic().reconstruct([observe(model, images, torch.tensor([0, 1, 4]))], model, seeded(0))
    for image in images:
        assert (result.images - image).square().mean((1, 2, 3)).min() < 1e-4


def test_analytic_says_where_it_does_not_apply() -> None:
    model, observations = two_digits()  # 48 numbers enter the linear layer, of 64 pixels
    for result in Analytic().reconstruct(observations, model, seeded(0, 1)):
        assert result.status == "not applicable"
        assert "linear layer" in result.message
        assert result.images.shape == (1, 1, 8, 8)


def test_analytic_reports_a_broken_update() -> None:
    model = Mlp().build((1, 8, 8), 10)
    observation = observe(model, digit(3), torch.tensor([3]))
    update: Named = {n: t * torch.nan for n, t in observation.update.items()}
    (result,) = Analytic().reconstruct([replace(observation, update=update)], model, seeded(0))
    assert result.status == "failed"
    assert result.images.isfinite().all()
