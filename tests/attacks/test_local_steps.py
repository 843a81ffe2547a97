"""Local steps, starts and layers: what the gradient-matching attacks let the scenario choose."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayfed.attacks.base import Attack
from rayfed.attacks.closed_form.head import Head
from rayfed.attacks.inference.labels import LabelReader
from rayfed.attacks.matching.distances import one_minus_cosine, squared_l2
from rayfed.attacks.matching.dlg import Dlg
from rayfed.attacks.matching.gradinversion import GradInversion
from rayfed.attacks.matching.idlg import Idlg
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.attacks.matching.local_steps import local_update, many_local_updates
from rayfed.attacks.matching.options import class_averages
from rayfed.attacks.matching.problem import Matching, matched_layers
from rayfed.errors import UserError
from rayfed.models.convnet import ConvNet
from rayfed.scenario import Training
from rayfed.simulation.client.local import local_training
from rayfed.update import LocalTraining, Named, Observation
from tests.helpers.attack_fixtures import digit, leaky_lenet, observe, photo, psnr, seeded

LOCAL = LocalTraining(steps=4, batch_size=2, lr=0.1, momentum=0.9)
DIGITS = torch.tensor([3, 5, 7])


def trained(model: nn.Module, images: Tensor, labels: Tensor, local: LocalTraining) -> Observation:
    """What a client sends that PyTorch's own optimiser trains on batches in the given order."""
    seen = observe(model, images, labels)
    optimiser = torch.optim.SGD(model.parameters(), local.lr, local.momentum, weight_decay=local.weight_decay)
    step = 0
    while step < local.steps:
        for x, y in zip(images.split(local.batch_size or 99), labels.split(local.batch_size or 99), strict=True):
            if step < local.steps:
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), local.clip_norm or math.inf)
                optimiser.step()
                step += 1
    update = {name: seen.weights[name] - w.detach() for name, w in model.named_parameters()}
    return replace(seen, update=update, scale=local.scale, local=local)


def three_digits(local: LocalTraining = LOCAL) -> tuple[nn.Module, Observation]:
    model = leaky_lenet((1, 8, 8))
    return model, trained(model, torch.cat([digit(int(i)) for i in DIGITS]), DIGITS, local)


@pytest.mark.parametrize(
    "told", [{"momentum": 0.0}, {}, {"weight_decay": 0.1}, {"clip_norm": 0.3}, {"weight_decay": 0.1, "clip_norm": 0.3}]
)
def test_simulated_steps_are_those_of_a_client(told: dict[str, float]) -> None:
    model, seen = three_digits(replace(LOCAL, **told))  # type: ignore[arg-type]
    images = torch.cat([digit(int(i)) for i in DIGITS])
    update = local_update(model, seen.weights, seen.buffers, images, DIGITS, seen.local)
    for name, tensor in seen.update.items():
        torch.testing.assert_close(update[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_the_truth_matches_in_its_order_alone(training: bool) -> None:
    """Also under batch norm of either mode; the divided update is no gradient at the weights that were sent."""
    torch.manual_seed(0)
    model = ConvNet(width=4).build((3, 32, 32), 10).train(training)
    images = torch.cat([photo(0, 0), photo(100, 150), photo(40, 60), photo(120, 20)])
    seen = trained(model, images, torch.tensor([1, 2, 3, 4]), LocalTraining(steps=3, batch_size=2, lr=0.05))
    points, victims = images.reshape(1, -1).double(), torch.tensor([0])
    simulated = Matching.of([seen], model, None, one_minus_cosine, local_steps="simulated", dtype=torch.float64)
    divided = Matching.of([seen], model, None, one_minus_cosine, dtype=torch.float64)
    true = simulated.losses(points, victims).item()
    assert true < 1e-5
    assert divided.losses(points, victims).item() > 100 * true
    assert simulated.losses(images[[2, 3, 0, 1]].reshape(1, -1).double(), victims).item() > 100 * true


@pytest.mark.parametrize("known", [True, False])
def test_slope_through_the_steps_against_finite_differences(known: bool) -> None:
    model, seen = three_digits()
    seen = seen if known else replace(seen, labels=None)
    problem = Matching.of([seen], model, None, squared_l2, local_steps="simulated", dtype=torch.float64)
    point = torch.rand(1, problem.dimension, dtype=torch.float64, generator=seeded(0)[0])
    victims = torch.zeros(1, dtype=torch.int64)
    _, slope = problem.value_and_gradient(point, victims)
    for axis in (0, 70, 150, problem.dimension - 1):
        step = torch.zeros_like(point)
        step[0, axis] = 1e-6
        difference = (problem.losses(point + step, victims) - problem.losses(point - step, victims)).item() / 2e-6
        assert slope[0, axis].item() == pytest.approx(difference, rel=1e-4, abs=1e-8)


def test_many_simulations_equal_one_by_one() -> None:
    model, seen = three_digits()
    images = torch.rand(3, 3, 1, 8, 8, generator=seeded(0)[0])
    labels = DIGITS.expand(3, 3)
    together = many_local_updates(model, seen.weights, seen.buffers, images, labels, LOCAL)
    for row in range(3):
        alone: Named = local_update(model, seen.weights, seen.buffers, images[row], labels[row], LOCAL)
        for name, tensor in alone.items():
            torch.testing.assert_close(together[name][row], tensor, rtol=1e-4, atol=1e-6)


def test_weight_decay_of_one_step_is_undone_exactly() -> None:
    """The decay is a hundred times the gradient here; who does not take it off sees nothing else."""
    _, seen = three_digits(LocalTraining(lr=0.1, weight_decay=10.0))
    _, plain = three_digits(LocalTraining(lr=0.1))
    for name, gradient in plain.gradient.items():
        torch.testing.assert_close(seen.gradient[name], gradient, rtol=1e-3, atol=1e-4)
    assert float((seen.step["fc.weight"] - plain.step["fc.weight"]).norm()) > 10 * float(plain.step["fc.weight"].norm())
    cut = replace(seen, update={n: t * (t.abs() > t.abs().median()) for n, t in seen.update.items()})
    assert all((cut.gradient[name][tensor == 0] == 0).all() for name, tensor in cut.update.items())


def test_weight_decay_of_an_update_that_was_scaled_is_taken_off_by_as_much() -> None:
    """A linear layer tells by how much: the gradient of three samples has rank three there."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    seen = observe(model, torch.cat([digit(i) for i in (3, 5, 7)]), DIGITS)
    decayed = {n: 0.05 * 0.1 * (g + seen.weights[n]) for n, g in seen.update.items()}
    told = replace(seen, update=decayed, scale=0.1, local=LocalTraining(lr=0.1, weight_decay=1.0))
    for name, gradient in seen.update.items():
        torch.testing.assert_close(told.gradient[name], 0.05 * gradient, rtol=1e-2, atol=1e-4)
    noisy = {n: t + 1e-3 * torch.randn(t.shape, generator=seeded(0)[0]) for n, t in decayed.items()}
    assert replace(told, update=noisy)._left_of(0.1) == 1  # nothing tells


def test_labels_of_clipped_batches_are_never_sure() -> None:
    for bound in (None, 0.3):
        model, seen = three_digits(LocalTraining(lr=0.1, clip_norm=bound))
        assert LabelReader(Head.of(model, seen), seen).read(seen).sure == (bound is None)


@pytest.mark.parametrize("told", [{"weight_decay": 1.0}, {"clip_norm": 0.3}])
@pytest.mark.parametrize("steps", ["divided", "simulated"])
@pytest.mark.parametrize("pruned", [False, True])
def test_the_truth_is_the_end_of_a_search_whatever_the_step_was(told: Any, steps: Any, pruned: bool) -> None:
    model, seen = three_digits(LocalTraining(lr=0.1, **told))
    if pruned:
        kept = {n: t.abs() >= t.abs().flatten().kthvalue(t.numel() // 2 + 1).values for n, t in seen.update.items()}
        seen = replace(seen, update={n: t * kept[n] for n, t in seen.update.items()})
    images, victims = torch.cat([digit(int(i)) for i in DIGITS]), torch.tensor([0])
    problem = Matching.of([seen], model, None, squared_l2, local_steps=steps, dtype=torch.float64)
    true, other = (problem.losses(x.reshape(1, -1).double(), victims).item() for x in (images, 1 - images))
    assert true < 1e-6 * other + 1e-9


def test_one_step_simulated_is_one_divided() -> None:
    model, seen = three_digits(LocalTraining(lr=0.1))
    points = torch.rand(1, 192, generator=seeded(0)[0])
    losses = [
        Matching.of([seen], model, None, squared_l2, local_steps=steps).losses(points, torch.tensor([0]))
        for steps in ("divided", "simulated")  # type: ignore[attr-defined]
    ]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_simulation_beats_division_after_many_steps() -> None:
    model = leaky_lenet((1, 8, 8))
    seen = trained(model, digit(4), torch.tensor([4]), LocalTraining(steps=4, batch_size=1, lr=0.2))
    found = {
        steps: Dlg(local_steps=steps, restarts=1, iterations=20).reconstruct([seen], model, seeded(0))[0]
        for steps in ("divided", "simulated")
    }
    assert psnr(found["simulated"].images, digit(4)) > psnr(found["divided"].images, digit(4)) + 10


def test_the_server_knows_what_its_clients_were_told() -> None:
    assert local_training(21, Training(epochs=2, batch_size=8, lr=0.3, momentum=0.5)) == LocalTraining(6, 8, 0.3, 0.5)
    told = Training(lr=0.3, weight_decay=0.1, clip_norm=2.0)
    assert local_training(21, told) == LocalTraining(1, 21, 0.3, weight_decay=0.1, clip_norm=2.0)
    assert local_training(5, Training(batch_size=8)).batch_size == 5
    assert local_training(21, Training(algorithm="fedsgd", batch_size=None)) == LocalTraining(batch_size=21)


# layers


def test_layers_are_left_out_by_name_or_pattern() -> None:
    names = ["conv1.weight", "conv1.bias", "fc.weight", "fc.bias"]
    assert matched_layers(names, ["!fc.*"]) == ["conv1.weight", "conv1.bias"]
    assert matched_layers(names, ["!*.bias", "conv1.*"]) == ["conv1.weight"]
    with pytest.raises(UserError, match=r"'cnv1\.weight'.*did you mean 'conv1\.weight'"):
        matched_layers(names, ["!cnv1.weight"])
    with pytest.raises(UserError, match="leaves no parameter"):
        matched_layers(names, ["fc.*", "!fc.*"])


@pytest.mark.engine
def test_what_a_defence_spoils_can_be_left_out() -> None:
    model = leaky_lenet((1, 8, 8))
    seen = observe(model, digit(3), torch.tensor([3]))
    noise = torch.randn(seen.update["fc.weight"].shape, generator=seeded(1)[0])
    spoilt = replace(seen, update=seen.update | {"fc.weight": seen.update["fc.weight"] + noise})
    whole, partial = (
        Dlg(layers=layers, restarts=1).reconstruct([spoilt], model, seeded(0))[0] for layers in (None, ["!fc.weight"])
    )
    assert psnr(partial.images, digit(3)) > 40 > psnr(whole.images, digit(3))


# starts

STARTED = [
    InvertingGradients(start="class_average", iterations=1),
    GradInversion(start="class_average", iterations=1, seeds=1),
    Idlg(start="class_average", iterations=1, restarts=1),
]


def test_class_averages_are_means_of_public_images() -> None:
    _, seen = three_digits()
    images, labels = torch.rand(4, 1, 8, 8, generator=seeded(0)[0]), torch.tensor([3, 5, 3, 1])
    found = class_averages(replace(seen, extra={"public": (images, labels)}))
    expected = torch.stack([(images[0] + images[2]) / 2, images[1], images.mean(0)])  # nobody has a 7
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("attack", STARTED)
def test_a_start_at_the_truth_stays_there(attack: Attack) -> None:
    model = leaky_lenet((1, 8, 8))
    seen = observe(model, digit(3), torch.tensor([3]), known=False)
    public = torch.cat([digit(3), digit(4)]), torch.tensor([3, 4])
    (found,) = attack.reconstruct([replace(seen, extra={"public": public})], model, seeded(0))
    torch.testing.assert_close(found.images, digit(3), atol=1e-3, rtol=0)


@pytest.mark.parametrize("attack", STARTED)
def test_class_averages_need_public_data(attack: Attack) -> None:
    model = leaky_lenet((1, 8, 8))
    seen = observe(model, digit(3), torch.tensor([3]))
    public = digit(3), torch.tensor([3])
    without, with_ = attack.reconstruct([seen, replace(seen, extra={"public": public})], model, seeded(0, 1))
    assert (without.status, with_.status) == ("not applicable", "ok")
    assert "knowledge: [public]" in without.message


def test_class_averages_need_labels() -> None:
    model = leaky_lenet((1, 8, 8))
    seen = observe(model, digit(3), torch.tensor([3]), known=False)
    seen = replace(seen, extra={"public": (digit(3), torch.tensor([3]))})
    (found,) = Dlg(start="class_average").reconstruct([seen], model, seeded(0))
    assert found.status == "not applicable"
    assert "labels" in found.message


def test_grey_starts_the_first_restart_alone() -> None:
    model = leaky_lenet((1, 8, 8))
    seen = observe(model, digit(3), torch.tensor([3]))
    grey = [InvertingGradients(start="grey", iterations=1).reconstruct([seen], model, seeded(s))[0] for s in (0, 1)]
    assert grey[0].trace == grey[1].trace
    both = InvertingGradients(start="grey", iterations=1, restarts=2)
    assert both._started(torch.zeros(2, 64), seen).mean(1).tolist() == [0.5, 0.0]
