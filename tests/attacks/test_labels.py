"""Label inference on untrained models and real images, and its rules on hand-made gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from rayfed.attacks.adaptive.two_images import TwoImages
from rayfed.attacks.base import Attack
from rayfed.attacks.closed_form.head import Head
from rayfed.attacks.inference.label_shares import estimated_shares
from rayfed.attacks.inference.labels import counted_labels, last_linear, one_label, with_labels
from rayfed.attacks.matching.gradinversion import GradInversion
from rayfed.attacks.matching.idlg import Idlg
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.models.convnet import ConvNet
from rayfed.models.lenet import LeNet
from rayfed.models.mlp import Mlp
from rayfed.update import Named
from tests.helpers.attack_fixtures import digit, leaky_lenet, observe, psnr, seeded

MODELS = {
    "lenet": LeNet(),
    "lenet_sigmoid": LeNet(activation="sigmoid"),
    "lenet_uniform": LeNet(activation="sigmoid", init="uniform"),
    "convnet": ConvNet(width=8),
    "mlp": Mlp(),
}


def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random 8x8 digits, enlarged to (count, 1, 16, 16), with their labels."""
    data = load_digits()
    chosen = torch.randint(len(data.images), (count,), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(data.images, dtype=torch.float32)[chosen] / 16
    return images.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, None], torch.tensor(data.target)[chosen]


def inferred(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    [observation] = with_labels([observe(model, images, labels, known=False)], model)
    assert observation.labels is not None
    return observation.labels


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.engine if name == "convnet" else []) for name in MODELS]
)
def test_labels_of_real_digits(name: str, size: int) -> None:
    right = 0
    for seed in range(5):
        torch.manual_seed(seed)
        model = MODELS[name].build((1, 16, 16), 10).eval()
        images, labels = digits(size, seed)
        found = inferred(model, images, labels)
        assert found.shape == (size,)
        right += int(torch.minimum(found.bincount(minlength=10), labels.bincount(minlength=10)).sum())
    # The estimate of p is crude where U(-.5, .5) makes it peaked: there a label in twenty may be lost.
    assert right >= (0.95 if name == "lenet_uniform" and size == 16 else 1.0) * 5 * size


@pytest.mark.parametrize("size", [1, 4, 16])
def test_labels_without_a_bias(size: int) -> None:
    torch.manual_seed(0)
    model = LeNet().build((1, 16, 16), 10)
    model.fc = nn.Linear(192, 10, bias=False)
    model.act3 = nn.Sigmoid()
    images, labels = digits(size, 3)
    assert inferred(model, images, labels).tolist() == labels.sort().values.tolist()


def test_repeated_labels_are_counted() -> None:
    torch.manual_seed(0)
    images, _ = digits(8, 0)
    labels = torch.tensor([3, 3, 3, 3, 3, 7, 7, 1])
    assert inferred(LeNet().build((1, 16, 16), 10), images, labels).tolist() == [1, 3, 3, 3, 3, 3, 7, 7]


def test_counts_sum_to_the_batch_and_proven_classes_occur() -> None:
    expected = torch.tensor([3.4, -0.2, 0.6, 2.2])
    assert counted_labels(expected, torch.zeros(4, dtype=torch.bool), 6).tolist() == [0, 0, 0, 2, 3, 3]
    assert counted_labels(expected, torch.tensor([False, True, False, False]), 6).tolist() == [0, 0, 0, 1, 3, 3]


def test_one_label_from_a_residual_and_from_products_with_features_of_any_sign() -> None:
    residual = torch.tensor([0.2, -0.7, 0.5])
    assert one_label(None, residual).numbers.tolist() == [1]
    for sign in (1, -1):
        assert one_label(residual[:, None] * sign * torch.tensor([-3.0, 1.0]), None).numbers.tolist() == [1]


def own(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(1, M, 5) of noise, and labels of five classes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, samples, 5, generator=generator).double(), torch.eye(5).double().repeat(samples // 5, 1)


def test_shares_are_exact_where_what_is_shown_is_a_function_of_the_labels() -> None:
    _, labels = own(50)
    shares = torch.tensor([0.5, 0.25, 0, 0, 0.25]).double()
    found, _ = estimated_shares((0.2 - labels)[None, ..., None], labels, (0.2 - shares)[:, None], 8, noise=0.0)
    torch.testing.assert_close(found, shares, atol=1e-4, rtol=0)


def test_shares_stay_even_where_nothing_is_shown_or_all_is_noise() -> None:
    noise, labels = own(200)
    seen = own(5, seed=1)[0][0, 0] / 8**0.5
    for shown, variance in ((noise, 0.0), (0.2 - labels[None], 1e4)):
        found, _ = estimated_shares(shown[..., None], labels, seen[:, None], 8, variance)
        torch.testing.assert_close(found, torch.full((5,), 0.2).double(), atol=0.06, rtol=0)


@pytest.mark.parametrize("stages", [1, 5])
def test_shares_stay_as_expected_where_all_that_is_shown_is_zero(stages: int) -> None:
    shown, labels = torch.zeros(stages, 20, 5, 2).double(), torch.eye(5).double().repeat(4, 1)
    shares, deviations = estimated_shares(shown, labels, torch.zeros(5, 2).double(), 8, noise=0.0)
    assert shares.tolist() == pytest.approx([0.2] * 5)
    assert deviations.isfinite().all()


@pytest.mark.parametrize(("apart", "skewed", "most"), [(1.0, False, 1.05), (1.0, True, 1.05), (0.1, True, 0.5)])
def test_samples_of_a_further_stage_cost_about_guessing_at_most(apart: float, skewed: bool, most: float) -> None:
    errors, guessed = 0.0, 0.0
    labels = torch.eye(5).double().repeat(12, 1)
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        told, stages = (torch.randn(rows, 50, generator=generator).double() for rows in (5, 6))
        shares = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0]) if skewed else torch.ones(5)
        batch = torch.eye(5).double()[torch.multinomial(shares, 32, replacement=True, generator=generator)]
        shown = 0.3 * labels @ told + apart * stages[:5, None] + torch.randn(5, 60, 50, generator=generator) / 2
        noise = torch.randn(32, 50, generator=generator) / 2
        seen = (0.3 * batch @ told + apart * stages[5] + noise).mean(0)
        found, _ = estimated_shares(shown.unflatten(2, (5, 10)), labels, seen.reshape(5, 10), 32, noise=0.0)
        errors += float((found - batch.mean(0)).square().sum())
        guessed += float((0.2 - batch.mean(0)).square().sum())
    assert errors <= most * guessed


@pytest.mark.parametrize("stages", [1, 5])
def test_details_that_tell_own_samples_alone_do_not_move_the_shares(stages: int) -> None:
    errors, guessed = 0.0, 0.0
    labels = torch.eye(5).double().repeat(12, 1)
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        told = torch.randn(5, 50, generator=generator).double()
        blur = torch.ones(50).double()
        told[:, 10:] *= 1e-3  # details, which say all of own samples
        blur[10:] = 1e-5
        batch = torch.eye(5).double()[torch.randint(5, (32,), generator=generator)]
        shown = (labels @ told).repeat(stages, 1, 1) + blur * torch.randn(stages, 60, 50, generator=generator)
        seen = (batch @ told + blur * torch.randn(32, 50, generator=generator)).mean(0)
        seen += 0.01 * torch.randn(50, generator=generator)
        found, _ = estimated_shares(shown.unflatten(2, (5, 10)), labels, seen.reshape(5, 10), 32, noise=0.0)
        errors += float((found - batch.mean(0)).square().sum())
        guessed += float((0.2 - batch.mean(0)).square().sum())
    assert errors < guessed


def test_shares_are_estimated_on_the_device_of_what_is_seen() -> None:
    """On a GPU too: what is made meanwhile is not where tensors are by default."""
    generator = torch.Generator().manual_seed(0)
    shown, labels = torch.randn(3, 20, 5, 4, generator=generator).double(), torch.eye(5).double().repeat(4, 1)
    expected = estimated_shares(shown, labels, shown[0, :8].mean(0), 8, noise=1e-6)
    with torch.device("meta"):
        found = estimated_shares(shown, labels, shown[0, :8].mean(0), 8, noise=1e-6)
    assert all(map(torch.equal, found, expected))


def test_last_linear_is_found_by_its_rows() -> None:
    tensors = {"a.weight": torch.zeros(10, 4), "a.bias": torch.zeros(10), "b.weight": torch.zeros(3, 10)}
    assert last_linear(tensors, 10) == "a"
    assert last_linear(tensors, 3) == "b"
    assert last_linear(tensors, 7) is None


class Cosine(nn.Module):
    """Logits that are cosines with a row for each class, times ten."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(10, features))

    def forward(self, features: Tensor) -> Tensor:
        return 10 * F.normalize(features) @ F.normalize(self.rows).T


class Tied(nn.Module):
    """A head whose rows are read in front of it, too."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.fc = nn.Linear(features, 10)

    def forward(self, features: Tensor) -> Tensor:
        return self.fc(features + 0.1 * self.fc.weight.mean(0))


class Divided(nn.Linear):
    """Logits over a temperature, behind a bias that is frozen."""

    def __init__(self, features: int) -> None:
        super().__init__(features, 10)
        self.bias.requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features) / 4


def body(*head: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 5, stride=2), nn.Tanh(), *head)


HEADS = {
    "convolution": lambda: body(nn.Conv2d(8, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "convolution without bias": lambda: body(nn.Sigmoid(), nn.Conv2d(8, 10, 1, bias=False), Mean()),
    "several": lambda: body(nn.Flatten(), nn.Linear(288, 10), nn.Linear(10, 10, bias=False)),
    "wrong order": lambda: Reordered(288),
    "normalised": lambda: body(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(288, 10))),
    "cosine": lambda: body(nn.Sigmoid(), nn.Flatten(), Cosine(288)),
    "tied": lambda: body(nn.Flatten(), Tied(288)),
    "divided": lambda: body(nn.Sigmoid(), nn.Flatten(), Divided(288)),
    "no bias": lambda: body(nn.Flatten(), nn.Linear(288, 10, bias=False)),
    "log softmax": lambda: body(nn.Flatten(), nn.Linear(288, 10), nn.LogSoftmax(1)),
}


class Mean(nn.Module):
    def forward(self, maps: Tensor) -> Tensor:
        return maps.mean((2, 3))


class Reordered(nn.Module):
    """The head is registered before a matrix of as many rows that is none."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.head = nn.Linear(10, 10)
        self.body = body(nn.Flatten(), nn.Linear(features, 10), nn.Tanh())

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images))


@pytest.mark.engine
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("head", HEADS)
def test_labels_behind_any_head(head: str, size: int) -> None:
    right = 0
    for seed in range(3):
        torch.manual_seed(seed)
        model = HEADS[head]().eval()
        images, labels = digits(size, seed)
        found = inferred(model, images, labels)
        right += int(torch.minimum(found.bincount(minlength=10), labels.bincount(minlength=10)).sum())
    assert right >= (0.85 if size > 1 and head == "no bias" else 1) * 3 * size


def test_residuals_without_a_bias_are_those_that_a_norm_shows() -> None:
    torch.manual_seed(0)
    model = body(nn.Flatten(), nn.LayerNorm(288), nn.Linear(288, 10, bias=False)).eval()
    images, labels = digits(8, 0)
    seen = observe(model, images, labels, known=False)
    cross, residual = Head.of(model, seen).products(seen.gradient)
    assert cross is not None
    assert residual is not None
    true = model(images).softmax(1).mean(0) - labels.bincount(minlength=10) / 8
    torch.testing.assert_close(residual, true.detach(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("head", ["convolution", "no bias"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_gradient_that_diverged_has_labels_too(head: str, size: int) -> None:
    torch.manual_seed(0)
    model = HEADS[head]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    assert len(inferred(model, *digits(size, 0))) == size


def test_one_label_is_sure_where_no_other_entry_is_negative() -> None:
    assert one_label(None, torch.tensor([0.2, -0.7, 0.5])).sure
    assert not one_label(None, torch.tensor([-0.3, -0.7, 1.0])).sure
    assert not one_label(None, torch.zeros(3)).sure


def test_counts_are_sure_where_they_come_out_whole() -> None:
    torch.manual_seed(0)
    images, labels = digits(4, 0)
    for head, sure in (("convolution", True), ("no bias", False)):
        model = HEADS[head]().eval()
        [read] = with_labels([observe(model, images, labels, known=False)], model, soft=True)
        assert read.labels is not None
        assert read.labels.is_floating_point() != sure
    [noisy] = with_labels([replace(read, labels=None, update=_noisy(read.update))], model, soft=True)
    assert noisy.labels is not None
    assert noisy.labels.is_floating_point()


def _noisy(tensors: Named) -> Named:
    generator = torch.Generator().manual_seed(0)
    return {name: t + 10 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}


@pytest.mark.parametrize(
    "attack",
    [
        Idlg(restarts=1, iterations=20),
        InvertingGradients(iterations=100),
        pytest.param(GradInversion(iterations=200, seeds=1), marks=pytest.mark.engine),
        pytest.param(TwoImages(iterations=100, lambda_g=1e-6), marks=pytest.mark.engine),
    ],
)
def test_labels_that_are_not_sure_are_fitted_with_the_images(attack: Attack) -> None:
    model = leaky_lenet((1, 8, 8))
    seen = observe(model, digit(3), torch.tensor([3]), known=False)
    [found] = attack.reconstruct([replace(seen, labels=F.one_hot(torch.tensor([5]), 10).float())], model, seeded(0))
    assert found.labels.tolist() == [3]
    assert "soft labels were fitted" in found.message


def test_a_label_that_is_read_wrong_does_not_end_the_images() -> None:
    torch.manual_seed(1)
    model = body(nn.Flatten(), nn.Linear(288, 10)).eval()
    for parameter in model[3].parameters():
        parameter.requires_grad_(False)
    images, labels = digits(1, 1)
    assert inferred(model, images, labels).tolist() != labels.tolist()
    seen = observe(model, images, labels, known=False)
    [found] = InvertingGradients(iterations=200).reconstruct([seen], model, seeded(1))
    assert found.labels.tolist() == labels.tolist()
    assert psnr(found.images, images) > 20


@pytest.mark.parametrize(
    "attack",
    [
        InvertingGradients(iterations=100),
        pytest.param(Idlg(restarts=1, iterations=5), marks=pytest.mark.engine),
        pytest.param(GradInversion(iterations=100, seeds=1), marks=pytest.mark.engine),
    ],
)
def test_labels_that_are_right_but_not_sure_cost_nothing(attack: Attack) -> None:
    torch.manual_seed(0)
    model = HEADS["no bias"]().eval()
    seen = observe(model, *digits(2, 2), known=False)
    [likeliest], [soft] = (with_labels([seen], model, soft=soft) for soft in (False, True))
    assert soft.labels is not None
    assert soft.labels.is_floating_point()
    [found], [given] = (attack.reconstruct([one], model, seeded(0)) for one in (seen, likeliest))
    assert torch.equal(found.images, given.images)
    assert "the likeliest labels were used" in found.message
    assert not given.message


def test_given_labels_stay() -> None:
    images, labels = digits(4, 0)
    model = Mlp().build((1, 16, 16), 10)
    (kept,) = with_labels([observe(model, images, labels, known=True)], model)
    assert kept.labels is labels
