"""Architectures against their published sizes, and the promises of `build_model`."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from rayfed import gradients
from rayfed.errors import UserError
from rayfed.models import build
from rayfed.models.build import build_model, is_stochastic, uses_batch_statistics
from rayfed.registry import table

SMALL = {
    "lenet": {"activation": "sigmoid"},
    "lenet5": {},
    "alexnet": {"norm": "group"},
    "convnet": {"width": 4},
    "mlp": {"hidden": [8]},
    "small_cnn": {},
    "resnet10": {},
    "resnet18": {"activation": "sigmoid"},
    "resnet20": {},
    "resnet32": {"norm": "group"},
    "resnet34": {},
    "torchvision": {"arch": "resnet18"},
}


class OwnNet(nn.Module):
    """A user's network that names `classes` and draws dropout through the functional interface."""

    def __init__(self, image_shape: tuple[int, int, int], classes: int, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = rate
        self.fc = nn.Linear(image_shape[0] * image_shape[1] * image_shape[2], classes)

    def forward(self, images: Tensor) -> Tensor:
        return F.dropout(self.fc(images.flatten(1)), self.rate, self.training)


def own_factory(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))


def stubborn_factory() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(7))


def broken_factory(depth: int) -> nn.Module:
    raise ValueError("depth must be odd")


def no_factory() -> str:
    return "a string"


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters", "shape", "classes", "expected"),
    [
        ("lenet", {}, (3, 32, 32), 10, 15_826),  # DLG, 768 features
        ("lenet", {}, (1, 28, 28), 10, 13_426),  # 588 features
        ("lenet5", {}, (1, 28, 28), 10, 156 + 2_416 + 48_120 + 10_164 + 850),  # Gu 2021, table 2, layer by layer
        ("lenet5", {"padding": 0, "init": "uniform"}, (3, 32, 32), 10, 62_006),  # GRNN's published code
        ("lenet", {"norm": "batch", "normed": "first"}, (3, 32, 32), 10, 15_826 + 24),  # FedKL's published code
        ("alexnet", {}, (3, 32, 32), 10, 4_864 + 307_392 + 663_936 + 884_992 + 590_080 + 40_970),  # likewise
        ("convnet", {}, (3, 32, 32), 10, 2_904_970),  # ConvNet64 as breaching counts it
        ("mlp", {}, (1, 28, 28), 10, 199_210),  # the 2NN of McMahan 2017
        ("small_cnn", {}, (3, 32, 32), 10, 896 + 18_496 + 36_928 + 65_600 + 650),  # layer by layer
        ("resnet18", {}, (3, 32, 32), 10, 11_173_962),  # the usual CIFAR-10 ResNet-18
        ("resnet34", {}, (3, 32, 32), 10, 21_282_122),  # the usual CIFAR-10 ResNet-34
        # He 2016, table 6: 0.27 and 0.46 million; two shortcuts of 1x1 convolution and norm add 2,752
        ("resnet20", {}, (3, 32, 32), 10, 269_722 + 2_752),
        ("resnet32", {}, (3, 32, 32), 10, 464_154 + 2_752),
        ("lenet", {"norm": "batch"}, (3, 32, 32), 10, 15_826 + 3 * 24),
        ("torchvision", {"arch": "resnet18"}, (3, 64, 64), 1000, 11_689_512),  # torchvision's model table
        ("torchvision", {"arch": "googlenet"}, (3, 32, 32), 10, 5_610_154),  # without auxiliary heads
    ],
)
def test_number_of_parameters(name, parameters, shape, classes, expected):
    assert size(build_model(name, parameters, shape, classes, seed=0)) == expected


def test_linear_layers_see_the_published_features():
    assert build_model("lenet", {}, (3, 32, 32), 10, 0).fc.in_features == 768
    assert build_model("lenet", {}, (1, 28, 28), 10, 0).fc.in_features == 588
    assert build_model("convnet", {"width": 5}, (3, 32, 32), 10, 0).fc.in_features == 36 * 5


def test_every_registered_model_is_tested_here():
    elsewhere = {
        "crnn",
        "cryptonet",
        "hf",
        "text_rnn",
        "text_transformer",
        "timm",
        "unet",
    }  # tested in test_words, test_hub, crypto/test_cryptonet, data/test_text, data/test_masks
    assert {name for name, path in table("models").items() if path.startswith("rayfed.")} == set(SMALL) | elsewhere


@pytest.mark.engine
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 64, 48)])
@pytest.mark.parametrize("name", SMALL)
def test_any_usual_image_size_fits(name, shape):
    model = build_model(name, SMALL[name], shape, 7, seed=0)
    assert model(torch.rand(3, *shape)).shape == (3, 7)
    assert model.training


@pytest.mark.engine
@pytest.mark.parametrize("name", SMALL)
def test_vectorised_per_sample_gradients_equal_looped_ones(name):
    shape = (1, 28, 28) if name in ("lenet", "torchvision") else (3, 32, 32)
    model = build_model(name, SMALL[name], shape, 5, seed=1).double().eval()
    weights, buffers = gradients.weights_of(model), gradients.buffers_of(model)
    draw = torch.Generator().manual_seed(2)
    images = torch.rand(3, *shape, generator=draw, dtype=torch.float64)
    labels = torch.tensor([0, 4, 2])
    together = gradients.per_sample_gradients(model, weights, buffers, images, labels)
    for i in range(3):
        one, _ = gradients.gradient(model, weights, buffers, images[i : i + 1], labels[i : i + 1])
        for key, expected in one.items():
            torch.testing.assert_close(together[key][i], expected)


def test_sigmoid_lenet_is_twice_differentiable():
    model = build_model("lenet", {"activation": "sigmoid", "init": "uniform"}, (1, 6, 6), 3, 0).double()
    weights, label = gradients.weights_of(model), torch.tensor([1])

    def squared_norm(image: Tensor) -> Tensor:
        named, _ = gradients.gradient(model, weights, {}, image, label, create_graph=True)
        return gradients.flatten(named).square().sum()

    def vectorised(image: Tensor) -> Tensor:
        named = gradients.many_gradients(model, weights, {}, image.unsqueeze(0), label.unsqueeze(0))
        return gradients.flatten(named).square().sum()

    image = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert torch.autograd.gradcheck(squared_norm, image.requires_grad_())
    assert torch.autograd.gradcheck(vectorised, image)


def test_uniform_initialisation_is_dlgs():
    parameters = gradients.flatten(gradients.weights_of(build_model("lenet", {"init": "uniform"}, (3, 32, 32), 10, 0)))
    assert parameters.abs().max() <= 0.5
    # Five standard errors of the mean and of the variance of U(-1/2, 1/2).
    assert abs(parameters.mean()) < 5 * (1 / 12 / len(parameters)) ** 0.5
    assert abs(parameters.var() - 1 / 12) < 5 * (1 / 180 / len(parameters)) ** 0.5


@pytest.mark.engine
def test_relu_lenet_learns_digits():
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.images).float().unsqueeze(1)[order] / 16
    labels = torch.from_numpy(digits.target)[order]
    model = build_model("lenet", {}, (1, 8, 8), 10, seed=0)
    weights, velocity = gradients.weights_of(model), {}
    for _ in range(15):
        for x, y in zip(images[:1400].split(32), labels[:1400].split(32), strict=True):
            step, _ = gradients.gradient(model, weights, {}, x, y)
            velocity = {k: 0.9 * velocity.get(k, 0) + g for k, g in step.items()}
            weights = {k: w - 0.05 * velocity[k] for k, w in weights.items()}
    found = functional_call(model, weights, (images[1400:],)).argmax(1)
    assert (found == labels[1400:]).double().mean() > 0.95


def test_batch_norm_in_evaluation_mode_keeps_samples_apart():
    model = build_model("convnet", {"width": 4}, (3, 32, 32), 10, seed=0)
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert uses_batch_statistics(model)
    alone, together = model.eval()(images[:1]), model(images)[:1]
    assert not uses_batch_statistics(model)
    torch.testing.assert_close(alone, together)


@pytest.mark.parametrize(("name", "own"), [("convnet", {"width": 4}), ("resnet10", {})])
@pytest.mark.parametrize("norm", ["group", "none"])
def test_group_norm_keeps_samples_apart(name, own, norm):
    model = build_model(name, {**own, "norm": norm}, (3, 32, 32), 10, seed=0).train()
    assert not uses_batch_statistics(model)
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(images)[:1], model(images[:1]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["lenet", "mlp", "small_cnn"])
def test_models_without_batch_norm_use_no_batch_statistics(name):
    assert not uses_batch_statistics(build_model(name, SMALL[name], (1, 28, 28), 10, 0))


def test_weights_depend_on_the_seed_alone():
    before = torch.get_rng_state()
    first = build_model("lenet", {}, (3, 32, 32), 10, seed=5).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(99)
    again = build_model("lenet", {}, (3, 32, 32), 10, seed=5).state_dict()
    other = build_model("lenet", {}, (3, 32, 32), 10, seed=6).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ["lenet", "convnet"])
def test_normalisation_happens_inside(name):
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    plain = build_model(name, SMALL[name], (3, 32, 32), 10, 0).eval()
    inside = build_model(name, SMALL[name], (3, 32, 32), 10, 0, normalise=(mean, std)).eval()
    assert list(plain.state_dict()) == list(inside.state_dict())
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    outside = (images - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(inside(images), plain(outside))
    for twin in (copy.deepcopy(inside), pickle.loads(pickle.dumps(inside))):
        torch.testing.assert_close(twin(images), plain(outside))
    state = dict(inside.state_dict())
    torch.testing.assert_close(functional_call(inside, state, (images,)), plain(outside))
    one_by_one = vmap(lambda image: functional_call(inside, state, (image.unsqueeze(0),)))(images)
    torch.testing.assert_close(one_by_one.squeeze(1), plain(outside))


def test_grey_images_reach_a_torchvision_model_normalised_and_repeated():
    arch = {"arch": "resnet18"}
    grey = build_model("torchvision", arch, (1, 32, 32), 10, 0, normalise=([0.4], [0.2])).eval()
    colour = build_model("torchvision", arch, (3, 32, 32), 10, 0).eval()
    images = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    assert list(grey.state_dict()) == list(colour.state_dict())
    torch.testing.assert_close(grey(images), colour(((images - 0.4) / 0.2).repeat(1, 3, 1, 1)))


def test_own_modules_and_functions_get_what_they_name():
    own = build_model(f"{__name__}:OwnNet", {"rate": 0.5}, (1, 4, 4), 3, 0)
    assert isinstance(own, OwnNet)
    assert own.rate == 0.5
    lazy = build_model(f"{__name__}:own_factory", {}, (1, 4, 4), 3, 0)
    assert lazy[1].weight.shape == (3, 16)


def test_a_model_that_draws_random_numbers_is_known():
    assert is_stochastic(build_model(f"{__name__}:OwnNet", {"rate": 0.5}, (1, 4, 4), 3, 0))
    assert not is_stochastic(build_model(f"{__name__}:OwnNet", {}, (1, 4, 4), 3, 0))
    assert not is_stochastic(build_model(f"{__name__}:OwnNet", {"rate": 0.5}, (1, 4, 4), 3, 0).eval())
    assert is_stochastic(nn.Sequential(nn.Dropout(0.1)))
    assert not is_stochastic(nn.Sequential(nn.Dropout(0.0)))
    assert is_stochastic(nn.MultiheadAttention(4, 2, dropout=0.1))
    assert is_stochastic(nn.LSTM(4, 4, num_layers=2, dropout=0.1))
    assert not is_stochastic(nn.MultiheadAttention(4, 2))
    assert not is_stochastic(build_model("resnet10", {}, (3, 32, 32), 10, 0))


@pytest.mark.parametrize(
    ("name", "parameters", "shape", "words"),
    [
        ("lenett", {}, (3, 32, 32), ["lenett", "did you mean 'lenet'"]),
        ("lenet", {"activaton": "relu"}, (3, 32, 32), ["lenet", "activaton"]),
        ("convnet", {"width": 0}, (3, 32, 32), ["convnet", "width", "greater than or equal to 1"]),
        ("convnet", {}, (3, 8, 8), ["convnet", "9x9", "8x8"]),
        ("small_cnn", {}, (1, 16, 20), ["small_cnn", "18x18", "16x20"]),
        ("torchvision", {}, (3, 32, 32), ["torchvision", "arch"]),
        ("torchvision", {"arch": "resnet81"}, (3, 32, 32), ["resnet81", "did you mean 'resnet18'"]),
        ("torchvision", {"arch": "alexnet"}, (3, 16, 16), ["torchvision", "images of 3x16x16"]),
        ("torchvision", {"arch": "resnet18"}, (2, 32, 32), ["images of 2x32x32", "another model"]),
        (f"{__name__}:OwnNet", {"depth": 3}, (1, 4, 4), ["OwnNet", "depth", "rate: 'float' = 0.0"]),
        (f"{__name__}:broken_factory", {}, (1, 4, 4), ["broken_factory", "depth"]),
        (f"{__name__}:broken_factory", {"depth": 2}, (1, 4, 4), ["depth must be odd"]),
        (f"{__name__}:no_factory", {}, (1, 4, 4), ["no_factory", "str", "nn.Module"]),
        (f"{__name__}:SMALL", {}, (1, 4, 4), ["SMALL", "dict", "nn.Module"]),
        (f"{__name__}:stubborn_factory", {}, (1, 4, 4), ["(2, 7)", "(2, 10)", "images of 1x4x4"]),
    ],
)
def test_errors_say_what_where_and_what_to_do(name, parameters, shape, words):
    with pytest.raises(UserError) as caught:
        build_model(name, parameters, shape, 10, seed=0)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("normalise", [([0.5], [0.5]), ([0.5] * 3, [0.5, 0.0, 0.5])])
def test_statistics_that_do_not_fit_the_channels_are_refused(normalise):
    with pytest.raises(UserError, match="3 means and 3 positive standard deviations"):
        build_model("lenet", {}, (3, 32, 32), 10, 0, normalise=normalise)


def test_a_model_is_built_once_and_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies have the weights that the seed draws, and share none of them."""
    built, of = list[Any](), build.build_model
    monkeypatch.setattr(build, "build_model", lambda *args: built.append(args) or of(*args))
    copied, shape = build.CopiedModels(), (1, 8, 8)
    one, other = (copied("mlp", {"hidden": [8]}, shape, 10, 0) for _ in range(2))
    assert len(built) == 1
    with torch.no_grad():
        next(one.parameters()).zero_()
    anew = of("mlp", {"hidden": [8]}, shape, 10, 0)
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), anew.state_dict().values(), strict=True))
    others = [({"hidden": [9]}, shape, 10, 0), ({"hidden": [8]}, (1, 9, 9), 10, 0), ({"hidden": [8]}, shape, 9, 0)]
    for changed in [*others, ({"hidden": [8]}, shape, 10, 1), ({"hidden": [8]}, shape, 10, 0, ([0.5], [0.5]))]:
        copied("mlp", *changed)
    assert len(built) == 6


class Closed(nn.Module):
    """A network whose function refers to the module that made it, which copies share."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, classes)
        self.answer = lambda images: self.head(images.flatten(1))

    def forward(self, images: Tensor) -> Tensor:
        return self.answer(images)


def test_a_model_of_ones_own_is_built_anew_for_each_arm() -> None:
    copied, images = build.CopiedModels(), torch.rand(2, 1, 8, 8)
    one, other = (copied("tests.models.test_models:Closed", {}, (1, 8, 8), 10, 0) for _ in range(2))
    before = other(images)
    with torch.no_grad():
        one.head.weight.zero_()
    assert torch.equal(other(images), before)
    assert not torch.equal(one(images), before)
