"""Refiner: its projection, its weights, its descent against finite differences, and what leaves the client."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.attacks.matching.priors import total_variation
from rayfed.defences.base import Batch, Task
from rayfed.defences.refiner import Refiner, projected, relative_weights, utility_weights
from rayfed.errors import UserError
from rayfed.gradients import buffers_of, gradient, norm, weights_of
from rayfed.models.build import build_model
from rayfed.models.pretrained import load_evaluator
from rayfed.samples import Pixels
from rayfed.scenario import DefenceSpec, parse, resolve
from rayfed.simulation.client.arm import build_arm
from rayfed.simulation.client.local import gradient_method
from rayfed.update import Named
from tests.helpers.attack_fixtures import leaky_lenet, photo

CPU = torch.device("cpu")
FAR = 1e6


def batch_of(count: int = 2) -> Batch:
    corners = [(0, 0), (100, 100), (60, 200)]
    return Batch(torch.cat([photo(*corner, size=16) for corner in corners[:count]]), torch.tensor([3, 7, 1])[:count])


def task_of(model: nn.Module, batch: Batch, seed: int = 0) -> Task:
    generator = torch.Generator().manual_seed(seed)
    return Task(0, 0, model, weights_of(model), buffers_of(model), batch, generator, order=0)


def sent(refiner: Refiner, model: nn.Module, batch: Batch, seed: int = 0) -> Named:
    task = task_of(model, batch, seed)
    return gradient_method([refiner])(task, task.weights, batch)[0]


def true_gradient(model: nn.Module, batch: Batch) -> Named:
    return gradient(model, weights_of(model), buffers_of(model), *batch[:3])[0]


def apart(a: Named, b: Named) -> float:
    return float(norm({name: t - b[name] for name, t in a.items()}))


@pytest.fixture
def model() -> nn.Module:
    return leaky_lenet((3, 16, 16))


def test_the_projection_is_the_nearest_point_of_the_ball() -> None:
    g = torch.Generator().manual_seed(0)
    true, far = ({"a": torch.randn(3, 2, generator=g), "b": torch.randn(4, generator=g)} for _ in range(2))
    near = projected(far, true, 0.5)
    assert apart(near, true) == pytest.approx(0.5, rel=1e-5)
    for _ in range(100):  # no point of the ball is nearer
        step = {name: torch.randn(t.shape, generator=g) for name, t in true.items()}
        inside = {name: t + 0.5 * step[name] / norm(step) for name, t in true.items()}
        assert apart(inside, far) >= apart(near, far)
    for name, t in projected(near, true, 0.6).items():
        torch.testing.assert_close(t, near[name])
    for name, t in projected(true, true, 0.5).items():
        torch.testing.assert_close(t, true[name])


def test_the_weights_are_those_of_equation_3() -> None:
    layers = OrderedDict(one=nn.Linear(2, 2), act=nn.Sigmoid(), two=nn.Linear(2, 1, bias=False))
    weights = weights_of(nn.Sequential(layers))
    slopes = {name: torch.full_like(w, -2.0) for name, w in weights.items()}
    found = utility_weights(slopes, weights, tau=0.9)
    for name, layer in (("one.weight", 1), ("one.bias", 1), ("two.weight", 2)):
        torch.testing.assert_close(found[name], 2 * weights[name].abs() * 0.9**layer)


def test_the_relative_utility_is_a_share_of_the_squared_norm_by_layer(model: nn.Module) -> None:
    true, weights = true_gradient(model, batch_of()), weights_of(model)
    found = relative_weights(true, weights, tau=0.9)
    double = relative_weights({name: 2 * slope for name, slope in true.items()}, weights, tau=0.9)
    for layer, name in enumerate([name for name in weights if name.endswith(".weight")], 1):
        torch.testing.assert_close(found[name], 0.9**layer / norm(true))
        torch.testing.assert_close(double[name], found[name] / 2)
    zeros = relative_weights({name: 0 * slope for name, slope in true.items()}, weights, tau=0.9)
    assert all(weight.isfinite() for weight in zeros.values())


def test_only_the_relative_utility_brings_the_gradient_back() -> None:
    model, batch = build_model("lenet", {}, (3, 16, 16), 10, seed=0), batch_of(3)
    true = true_gradient(model, batch)
    start, printed, relative = (
        apart(sent(Refiner(beta=0, epsilon=FAR, iterations=iterations, utility=utility), model, batch), true)
        for iterations, utility in ((0, "printed"), (10, "printed"), (10, "relative"))
    )
    assert printed == pytest.approx(start, rel=1e-3)
    assert relative < 0.95 * start


def test_one_step_descends_along_the_objective(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against central differences of N * UM - beta * (the sum over images of PM), in double precision."""

    def judge(images: Tensor) -> Tensor:
        return images.square().mean((1, 2, 3)).sigmoid()

    monkeypatch.setattr("rayfed.defences.refiner.load_evaluator", lambda path, device: judge)
    model, batch = model.double(), batch_of()
    batch = batch._replace(inputs=batch.inputs.double() * 0.6 + 0.2)
    task, true = task_of(model, batch), true_gradient(model, batch)
    refiner = Refiner(alpha=0.3, beta=2, iterations=1, lr=1e-3, tau=0.9)
    start = Refiner(alpha=0.3, iterations=0)._refined(task, task.weights, batch, true).inputs
    task.generator.manual_seed(0)
    step = (start - refiner._refined(task, task.weights, batch, true).inputs) / refiner.lr

    def objective(images: Tensor) -> float:
        here, importance = true_gradient(model, batch._replace(inputs=images)), utility_weights(true, task.weights, 0.9)
        utility = sum((importance[name] * (g - true[name])).square().sum() for name, g in here.items())
        return float(len(images) * utility - 2 * judge(images).sum())

    for place in [(0, 0, 3, 4), (0, 2, 15, 0), (1, 1, 8, 8)]:
        nudge = torch.zeros_like(start)
        nudge[place] = 1e-5
        slope = (objective(start + nudge) - objective(start - nudge)) / 2e-5
        assert step[place].item() == pytest.approx(slope, rel=1e-4)


def test_what_is_sent_is_the_gradient_of_the_robust_data(model: nn.Module) -> None:
    batch = batch_of()
    refiner = Refiner(epsilon=FAR, iterations=2)
    task, true = task_of(model, batch), true_gradient(model, batch)
    robust = refiner._refined(task, task.weights, batch, true)
    assert 0 <= robust.inputs.min() <= robust.inputs.max() <= 1
    expected = true_gradient(model, robust)
    for name, t in sent(refiner, model, batch).items():
        torch.testing.assert_close(t, expected[name])
    assert apart(expected, true) > 0.1
    assert apart(sent(Refiner(epsilon=0.1, iterations=2), model, batch), true) == pytest.approx(0.1, rel=1e-4)


def test_without_noise_and_steps_the_gradient_is_the_true_one(model: nn.Module) -> None:
    batch = batch_of()
    true = true_gradient(model, batch)
    for name, t in sent(Refiner(alpha=0, iterations=0), model, batch).items():
        torch.testing.assert_close(t, true[name])
    assert all(bool(t.isfinite().all()) for t in sent(Refiner(alpha=0, iterations=2), model, batch).values())


def test_it_follows_the_clients_generator_alone(model: nn.Module) -> None:
    batch, refiner = batch_of(), Refiner(iterations=1)
    torch.manual_seed(5)
    first = sent(refiner, model, batch)
    torch.manual_seed(6)
    again, other = (sent(refiner, model, batch, seed) for seed in (0, 1))
    assert all(torch.equal(t, again[name]) for name, t in first.items())
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_refining_makes_images_look_noisier(model: nn.Module) -> None:
    batch, task = batch_of(3), task_of(model, batch_of(3))
    ratio = load_evaluator(None, CPU)
    started, refined = (
        ratio(
            refiner._refined(
                task.replace(generator=torch.Generator().manual_seed(0)),
                task.weights,
                batch,
                {name: torch.zeros_like(w) for name, w in task.weights.items()},
            ).inputs
        )
        for refiner in (Refiner(iterations=0), Refiner(iterations=5))
    )
    assert (refined > started).all()


def test_batch_norm_statistics_are_those_of_the_robust_data() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 16 * 16, 10))
    batch, refiner = batch_of(), Refiner(iterations=2, epsilon=FAR)
    task = task_of(model, batch)
    gradient_method([refiner])(task, task.weights, batch)
    assert task.buffers["0.num_batches_tracked"] == 1
    task_again = task_of(model, batch)
    robust = refiner._refined(task_again, task.weights, batch, true_gradient(model, batch))
    expected = buffers_of(model)
    gradient(model, task.weights, expected, *robust[:3])
    torch.testing.assert_close(task.buffers["0.running_mean"], expected["0.running_mean"])


def test_a_step_without_samples_sends_no_slope(model: nn.Module) -> None:
    batch = Batch(torch.zeros(0, 3, 16, 16), torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    assert all(not t.any() for t in sent(Refiner(iterations=2), model, batch).values())


def test_what_does_not_fit_is_said_before_a_run(tmp_path: Path) -> None:
    lenet = resolve(parse("{name: t, model: lenet, federation: {rounds: 1, clients: 2}}"))["none"]

    def arm(*stack: DefenceSpec) -> None:
        build_arm(replace(lenet, defences=list(stack)), Pixels(3, 16, 16), 10, seed=0)

    with pytest.raises(UserError, match=r"evaluation network .*absent\.pt"):
        arm(DefenceSpec(name="refiner", evaluator=str(tmp_path / "absent.pt")))
    with pytest.raises(UserError, match="dp_sgd needs the gradient of each sample, which Refiner"):
        arm(DefenceSpec(name="refiner"), DefenceSpec(name="dp_sgd", clip=1, noise_multiplier=1))


def test_an_attacker_who_knows_refiner_believes_images_without_noise() -> None:
    images = torch.stack([photo(0, 0), torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))])
    plain, knowing = (InvertingGradients(tv=1e-3, noise=noise)._prior(images) for noise in (0.0, 0.5))
    torch.testing.assert_close(plain, 1e-3 * total_variation(images).mean(1))
    torch.testing.assert_close(knowing - plain, 0.5 * load_evaluator(None, CPU)(images.flatten(0, 1)))
    assert knowing[1] > knowing[0] + 0.3
