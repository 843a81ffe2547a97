"""DCS2: what is sent, which samples are concealed, what concealed ones are like, and the attacker who knows of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scipy.optimize import minimize
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from rayfed.attacks.adaptive.two_images import TwoImages
from rayfed.defences.base import Batch, Task
from rayfed.defences.dcs2 import Dcs2, projected
from rayfed.errors import UserError
from rayfed.gradients import flatten, gradient, weights_of
from rayfed.models.convnet import ConvNet
from rayfed.samples import Pixels
from rayfed.scenario import Training
from rayfed.simulation.client.local import gradient_method, update_method
from rayfed.update import Named, Observation
from tests.helpers.attack_fixtures import leaky_lenet, seeded


def digits(count: int, skip: int = 0) -> tuple[Tensor, Tensor]:
    data = load_digits()
    rows = slice(skip, skip + count)
    return torch.tensor(data.images[rows], dtype=torch.float32)[:, None] / 16, torch.tensor(data.target[rows])


def client(count: int, model: nn.Module | None = None, worked_on: list[int] | None = None, seed: int = 0) -> Task:
    """A client with so many digits, which works on some of them."""
    model = leaky_lenet((1, 8, 8)) if model is None else model
    everything = Batch(*digits(count), places=torch.arange(count))
    chosen = torch.arange(count) if worked_on is None else torch.tensor(worked_on)
    rest = torch.tensor([i for i in range(count) if i not in chosen.tolist()], dtype=torch.int64)
    return Task(
        client=0,
        round=0,
        model=model,
        weights=weights_of(model),
        buffers={},
        data=everything.rows(chosen),
        generator=torch.Generator().manual_seed(seed),
        order=0,
        others=everything.rows(rest) if len(rest) else None,
        classes=10,
    )


def step(defence: Dcs2, task: Task) -> Named:
    return gradient_method([defence])(task, task.weights, task.data)[0]


def own_gradient(task: Task, images: Tensor, labels: Tensor) -> Named:
    return gradient(task.model, task.weights, {}, images, labels)[0]


def concealed(defence: Dcs2, task: Task) -> tuple[Batch, Tensor]:
    """The starts and the concealed samples of all of a task's data."""
    start = defence._start(task, task.data)
    return start, defence._concealed(task, task.weights, task.data, start)


@pytest.mark.parametrize("margin", [0.0, 0.5])
@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_the_multiple_of_the_own_gradient_solves_the_dual_program(margin: float, ridge: float) -> None:
    for seed in range(5):
        own, away = (torch.randn(5, generator=g, dtype=torch.float64) for g in seeded(seed, seed + 100))
        away = away if own @ away < 0 else -away
        found = projected({"a": away}, {"a": own}, margin, ridge)["a"]
        square, inner = float(own @ own) + ridge, float(own @ away)
        values = np.linspace(margin, 20, 200_001)
        best = values[(0.5 * square * values**2 + inner * values).argmin()]
        torch.testing.assert_close(found, away + best * own, rtol=0, atol=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_projection_solves_the_quadratic_program(seed: int) -> None:
    own, away = (torch.randn(5, generator=g, dtype=torch.float64) for g in seeded(seed, seed + 100))
    away = away if seed % 2 else away - 2 * own
    found = projected({"a": away[:2], "b": away[2:]}, {"a": own[:2], "b": own[2:]})
    solver = minimize(
        lambda z: 0.5 * np.square(z - away.numpy()).sum(),
        np.zeros(5),
        jac=lambda z: z - away.numpy(),
        constraints={"type": "ineq", "fun": lambda z: z @ own.numpy(), "jac": lambda z: own.numpy()},
        options={"ftol": 1e-14},
    )
    assert solver.success
    np.testing.assert_allclose(flatten(found).numpy(), solver.x, atol=1e-6)


def test_what_is_sent_is_equation_10() -> None:
    defence = Dcs2(iterations=3, lambda_g=0.7)
    start, images = concealed(defence, client(3))
    task = client(3)
    leaves = {name: w.clone().requires_grad_() for name, w in task.weights.items()}

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(task.model, leaves, (x,)), y)

    total = (
        loss(task.data.inputs, task.data.labels)
        + 0.7 * loss(images, start.labels)
        + 0.3 * loss(images, task.data.labels)
    )
    expected = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
    own = own_gradient(task, task.data.inputs, task.data.labels)
    assert flatten(expected) @ flatten(own) > 0  # so nothing is projected
    torch.testing.assert_close(step(defence, task), expected, rtol=1e-4, atol=1e-6)


def test_concealed_samples_are_those_of_a_plain_loop_over_equation_9() -> None:
    defence = Dcs2(iterations=8, lambda_x=0.2, lambda_z=0.5)
    task = client(3)
    start, images = concealed(defence, task)
    for i in range(3):
        model = task.model
        x_s, y_s, y_c = task.data.inputs[i : i + 1], task.data.labels[i : i + 1], start.labels[i : i + 1]
        parameters = list(model.parameters())
        target = torch.autograd.grad(F.cross_entropy(model(x_s), y_s), parameters)
        x_c = start.inputs[i : i + 1].clone().requires_grad_()
        optimiser = torch.optim.Adam([x_c], lr=0.1)
        for k in range(8):
            optimiser.param_groups[0]["lr"] = 0.1 * 0.1 ** sum(k >= share * 8 for share in (3 / 8, 5 / 8, 7 / 8))
            slopes = torch.autograd.grad(F.cross_entropy(model(x_c), y_c), parameters, create_graph=True)
            inner = sum((a * b).sum() for a, b in zip(slopes, target, strict=True))
            norms = [sum(a.square().sum() for a in slope) ** 0.5 for slope in (slopes, target)]
            output = (model(x_c) - model(x_s)).norm() / model(x_s).norm()
            objective = 1 - inner / (norms[0] * norms[1]) + (-0.2 * (x_c - x_s).norm()).exp() + 0.5 * (output - 0.01)
            (x_c.grad,) = torch.autograd.grad(objective, x_c)
            optimiser.step()
        torch.testing.assert_close(images[i : i + 1], x_c.detach(), rtol=0, atol=1e-3)


def test_a_concealed_sample_stops_one_step_after_it_is_far_enough() -> None:
    task = client(3)
    whole = [concealed(Dcs2(iterations=8, lr=0.3, mixup=0.9), client(3))[1]]
    start, stopped = concealed(Dcs2(iterations=8, lr=0.3, mixup=0.9, stop_distance=1e6), client(3))
    assert torch.equal(stopped, whole[0])
    # the first 3/8 of 800 iterations have the same step size
    paths = [concealed(Dcs2(iterations=1, lr=0.3, mixup=0.9), client(3))[0].inputs]
    for done in range(1, 6):
        defence = Dcs2(iterations=800, lr=0.3, mixup=0.9, stop_distance=1e-9)
        images, labels = paths[-1], start.labels
        paths.append(defence._concealed(task, task.weights, task.data, Batch(images, labels)))
        assert (paths[-1] - images).abs().max() == pytest.approx(0.3, rel=1e-3), done
    near = float((start.inputs - task.data.inputs).flatten(1).norm(dim=1).max())
    far = concealed(Dcs2(iterations=800, lr=0.3, mixup=0.9, stop_distance=near + 1), client(3))[1]
    distance = (far - task.data.inputs).flatten(1).norm(dim=1)
    assert ((distance > near + 1) & (distance < near + 2 * 0.3 * 8 + 1)).all()


def test_concealed_samples_have_the_gradient_of_sensitive_ones_and_another_look() -> None:
    defence = Dcs2(iterations=60, lambda_x=0.1)
    task = client(4)
    start, images = concealed(defence, task)
    for i in range(4):
        true = flatten(own_gradient(task, task.data.inputs[i : i + 1], task.data.labels[i : i + 1]))

        def alike(image: Tensor, label: Tensor, true: Tensor = true) -> float:
            made = flatten(own_gradient(task, image[None], label[None]))
            return float(torch.cosine_similarity(made, true, dim=0))

        assert alike(images[i], start.labels[i]) > alike(start.inputs[i], start.labels[i])
        assert (images[i] - task.data.inputs[i]).norm() > 1


@pytest.mark.parametrize(
    ("sensitive", "expected"),
    [("all", [1, 1, 1, 1]), (0.5, [1, 1, 0, 0]), ({"labels": [2, 7]}, [0, 1, 0, 1]), ([7, 0, 99], [1, 0, 0, 1])],
)
def test_the_scenario_chooses_the_sensitive_samples(sensitive: object, expected: list[int]) -> None:
    task = client(10, worked_on=[0, 2, 5, 7])
    assert Dcs2(sensitive=sensitive)._sensitive(task, task.data).int().tolist() == expected


def test_sensitive_samples_are_known_in_every_batch_of_local_training() -> None:
    seen: list[int] = []

    def note(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
        assert batch.places is not None
        assert torch.equal(batch.inputs, digits(9)[0][batch.places])
        seen.extend(batch.places.tolist())
        return weights, torch.zeros(())

    class Noting(Dcs2):
        def wrap_gradient(self, next):  # type: ignore[no-untyped-def]
            return note

    update_method(Training(epochs=2, batch_size=4), [Noting()])(client(9))
    assert sorted(seen) == sorted([*range(9)] * 2)


def test_a_batch_without_sensitive_samples_is_left_alone() -> None:
    task = client(3)
    sent = step(Dcs2(sensitive=[50]), task)
    torch.testing.assert_close(sent, own_gradient(task, task.data.inputs, task.data.labels))


def test_a_concealed_sample_weighs_what_a_sample_of_the_batch_does() -> None:
    defence = Dcs2(sensitive=[0], iterations=1, lambda_g=1)
    task = client(4)
    sent = step(defence, task)
    fresh = client(4)
    chosen = fresh.data.rows(torch.tensor([0]))
    start = defence._start(fresh, chosen)
    image = defence._concealed(fresh, fresh.weights, chosen, start)
    images, labels = torch.cat([fresh.data.inputs, image]), torch.cat([fresh.data.labels, start.labels])
    expected = {name: 5 / 4 * g for name, g in own_gradient(fresh, images, labels).items()}
    own = own_gradient(fresh, fresh.data.inputs, fresh.data.labels)
    torch.testing.assert_close(sent, projected(expected, own), rtol=1e-4, atol=1e-6)


def test_another_sample_is_never_the_sensitive_one() -> None:
    task = client(3, worked_on=[1])
    found = torch.cat([Dcs2()._start(task, task.data).inputs for _ in range(20)])
    images = digits(3)[0]
    chosen = (found[:, None] == images[None]).flatten(2).all(2).int().argmax(1)
    assert set(chosen.tolist()) == {0, 2}


def test_starts_are_what_they_are_called() -> None:
    images, labels = digits(5, skip=100)
    task = client(6, worked_on=[4]).replace(public=Batch(images, labels))
    public = Dcs2(start="public")._start(task, task.data)
    [row] = [i for i in range(5) if torch.equal(images[i], public.inputs[0])]
    assert public.labels.tolist() == [labels[row].item()]
    noise, mixed = (Dcs2(start="noise", mixup=m)._start(client(6, worked_on=[4]), task.data) for m in (0, 0.3))
    torch.testing.assert_close(mixed.inputs, 0.7 * noise.inputs + 0.3 * task.data.inputs)
    assert 0 <= noise.inputs.min() < 0.1 < 0.9 < noise.inputs.max() <= 1


def test_steps_follow_the_clients_generator() -> None:
    defence = Dcs2(iterations=2)
    first, again, other = (flatten(step(defence, client(5, seed=s))) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_vanished_gradient_hurts_nothing() -> None:
    task = client(2)
    sure = task.weights | {"fc.bias": task.weights["fc.bias"] + 1e4 * F.one_hot(task.data.labels[0], 10)}
    sent, _ = gradient_method([Dcs2(iterations=2)])(task, sure, task.data)
    assert all(bool(g.isfinite().all()) for g in sent.values())


@pytest.mark.parametrize(
    ("defence", "task", "said"),
    [
        (Dcs2(), client(1), "only one"),
        (Dcs2(start="public"), client(2), "data.public"),
        (Dcs2(), client(2).replace(data=Batch(*digits(2))), "replaces them"),
    ],
)
def test_what_cannot_be_concealed_is_said(defence: Dcs2, task: Task, said: str) -> None:
    with pytest.raises(UserError, match=said):
        step(defence, task)


def test_batch_norm_in_training_mode_is_refused() -> None:
    with pytest.raises(UserError, match="batch norm"):
        Dcs2().check(ConvNet(width=2).build((3, 9, 9), 10))


@pytest.mark.parametrize(
    "wrong", [{"sensitive": 0.0}, {"sensitive": {"classes": [1]}}, {"lambda_g": 2}, {"mixup": 1}, {"stop_distance": 0}]
)
def test_parameters_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Dcs2(**wrong)


def observation(task: Task, update: Named, known: bool = True) -> Observation:
    labels = task.data.labels if known else None
    return Observation(0, 0, task.weights, {}, update, 1.0, len(task.data.labels), Pixels(1, 8, 8), 10, labels=labels)


def test_the_second_image_explains_the_gradient_exactly() -> None:
    """At the true pair of images the adaptive attacker's distance is 0, labels read from the gradient."""
    defence = Dcs2(iterations=5)
    start, images = concealed(defence, client(12, worked_on=[3]))
    assert start.labels != 3
    task = client(12, worked_on=[3])
    seen = observation(task, step(defence, task))
    attack = TwoImages(tv=0, width=4)
    problem = attack._matching([seen], task.model, seeded(0))
    inside = (images - 0.5) / 4 + 0.5
    point = torch.cat([task.data.inputs.flatten(), inside.flatten()])[None]
    assert problem.losses(point, torch.tensor([0])).item() == pytest.approx(0, abs=1e-5)


def test_the_adaptive_attack_gives_the_sensitive_half() -> None:
    task = client(12, worked_on=[3, 4])
    seen = observation(task, step(Dcs2(iterations=2), task), known=False)
    [found] = TwoImages(iterations=3).reconstruct([seen], task.model, seeded(0))
    assert found.status == "ok"
    assert found.images.shape == (2, 1, 8, 8)
    assert found.labels.shape == (2,)
    headless = replace(seen, update={"conv1.weight": seen.update["conv1.weight"]})
    assert TwoImages().reconstruct([headless], task.model, seeded(0))[0].status == "not applicable"
