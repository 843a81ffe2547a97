"""Closed forms: what they read exactly, on models of sizes and seeds drawn at random, and what they say elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torchvision
from scipy.optimize import linear_sum_assignment
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from rayfed import registry
from rayfed.attacks.base import Attack, Reconstruction
from rayfed.attacks.closed_form.analytic import Analytic
from rayfed.attacks.closed_form.answer import agreement
from rayfed.attacks.closed_form.april import April
from rayfed.attacks.closed_form.equations import is_affine, solve
from rayfed.attacks.closed_form.factors import Factors
from rayfed.attacks.closed_form.kept import kept
from rayfed.attacks.closed_form.layers import Layer
from rayfed.attacks.closed_form.peel import Peel
from rayfed.attacks.closed_form.probe import probe
from rayfed.attacks.closed_form.ratios import pairs
from rayfed.attacks.closed_form.spear import Spear
from rayfed.core.shipped import find_shipped
from rayfed.models.build import build_model
from rayfed.update import Named, Observation
from tests.helpers.attack_fixtures import digit, observe, photo, psnr, seeded
from tests.helpers.images import digits


def perceptron(
    seed: int, activation: Callable[[], nn.Module], classes: int = 10, bias: bool = True, layers: int = 2
) -> nn.Module:
    """Layers of 100 to 300 units each."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = [nn.Flatten()]
    width = 64
    for _ in range(layers):
        units = int(torch.randint(100, 300, ()))
        parts += [nn.Linear(width, units, bias=bias), activation()]
        width = units
    return nn.Sequential(*parts, nn.Linear(width, classes))


def play(attack: Attack, model: nn.Module, images: Tensor, labels: Tensor, known: bool = False) -> Reconstruction:
    classes = int(model(images).shape[1])
    seen = replace(observe(model, images, labels, known), classes=classes)
    (result,) = attack.reconstruct([seen], model, seeded(0))
    return result


def found(result: Reconstruction, images: Tensor, labels: Tensor) -> tuple[int, int]:
    """How many images are found at 40 dB, and how many labels stand at them."""
    errors = (result.images[:, None] - images).square().flatten(2).mean(2)
    rows, columns = linear_sum_assignment(errors)
    return int((errors[rows, columns] < 1e-4).sum()), int((result.labels[rows] == labels[columns]).sum())


@pytest.mark.engine
@pytest.mark.parametrize(
    ("attack", "seed", "size", "classes", "bias", "activation"),
    [
        (Spear(), 11, 8, 10, True, nn.ReLU),
        (Spear(), 12, 16, 10, True, nn.ReLU),
        (Spear(), 13, 12, 2, True, nn.ReLU),
        (Spear(), 14, 6, 10, False, nn.ReLU),
        (Spear(), 15, 5, 2, False, nn.ReLU),
        # hardtanh is flat in too few places for images in [0, 1], unless it is steep
        (Spear(), 16, 8, 10, True, lambda: nn.Hardtanh(-0.2, 0.2)),
        (Spear(), 17, 8, 3, True, nn.ReLU6),
        (Spear(), 18, 1, 10, True, nn.ReLU),
        (Peel(), 21, 8, 10, True, nn.Sigmoid),
        (Peel(), 22, 12, 10, True, nn.GELU),
        (Peel(), 23, 6, 2, True, nn.Sigmoid),
        (Peel(), 24, 6, 10, False, nn.Tanh),
        (Peel(), 25, 1, 10, True, nn.SiLU),
    ],
)
def test_whole_batches_are_read(
    attack: Attack, seed: int, size: int, classes: int, bias: bool, activation: Callable[[], nn.Module]
) -> None:
    images, labels = digits(size, seed, classes)
    result = play(attack, perceptron(seed, activation, classes, bias), images, labels)
    assert result.status == "ok", result.message
    assert found(result, images, labels) == (size, size)
    assert result.loss < 1e-3


@pytest.mark.parametrize("attack", [Spear(), Peel()], ids=["spear", "peel"])
def test_a_batch_is_normalised_summed_and_its_labels_granted(attack: Attack) -> None:
    images, labels = digits(5, 31)
    labels = labels.sort().values
    model = perceptron(31, nn.ReLU if isinstance(attack, Spear) else nn.Sigmoid)
    model.register_forward_pre_hook(lambda _, inputs: ((inputs[0] - 0.4) / 0.25,))
    seen = observe(model, images, labels)
    summed: Named = {name: 5 * tensor for name, tensor in seen.update.items()}
    (result,) = attack.reconstruct([replace(seen, update=summed)], model, seeded(0))
    assert found(result, images, labels) == (5, 5)
    assert result.labels.tolist() == labels.tolist()
    assert result.loss < 1e-3


def test_a_batch_under_noise_is_refused_by_spear() -> None:
    images, labels = digits(8, 32)
    model = perceptron(32, nn.ReLU)
    seen = observe(model, images, labels)
    noisy = {n: t + 0.01 * torch.randn(t.shape, generator=seeded(5)[0]) for n, t in seen.update.items()}
    (result,) = Spear().reconstruct([replace(seen, update=noisy)], model, seeded(0))
    assert result.status == "diverged"
    assert "above noise" in result.message


def test_spear_reads_several_local_steps_on_the_whole_batch() -> None:
    images, labels = digits(6, 33)
    model = perceptron(33, nn.ReLU)
    seen = observe(model, images, labels)
    total = {name: torch.zeros_like(tensor) for name, tensor in seen.update.items()}
    for _ in range(3):  # whose slopes add up, over the same inputs
        step = observe(model, images, labels).update
        for name, weight in model.named_parameters():
            total[name] += 1e-3 * step[name]
            weight.data -= 1e-3 * step[name]
    update = replace(seen, update=total, scale=3e-3)
    (result,) = Spear().reconstruct([update], model, seeded(0))
    assert found(result, images, labels)[0] == 6


class Patches(nn.Module):
    """A transformer of our own: patches by convolution or by a linear layer, positions as a parameter or a table."""

    def __init__(self, width: int = 96, convolution: bool = True, token: bool = True, table: bool = False) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4) if convolution else nn.Linear(48, width)
        self.token = nn.Parameter(torch.randn(1, 1, width)) if token else None
        self.table = nn.Embedding(64 + token, width) if table else None
        self.places = None if table else nn.Parameter(torch.randn(1, 64 + token, width))
        layer = nn.TransformerEncoderLayer(width, 4, width, 0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        if isinstance(self.embed, nn.Conv2d):
            tokens = self.embed(images).flatten(2).transpose(1, 2)
        else:
            tokens = self.embed(F.unfold(images, 4, stride=4).transpose(1, 2))
        if self.token is not None:
            tokens = torch.cat([self.token.expand(len(tokens), -1, -1), tokens], 1)
        tokens = tokens + (self.places if self.table is None else self.table(torch.arange(tokens.shape[1])))
        logits: Tensor = self.head(self.encoder(tokens)[:, 0])
        return logits


@pytest.mark.parametrize(
    "build",
    [
        lambda: Patches(),
        pytest.param(lambda: Patches(token=False, table=True, convolution=False), marks=pytest.mark.engine),
        pytest.param(lambda: Patches(width=80, table=True), marks=pytest.mark.engine),
    ],
)
def test_april_reads_an_image_off_learned_positions(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(41)
    model = build()
    model.register_forward_pre_hook(lambda _, inputs: ((inputs[0] - 0.4) / 0.25,))
    image = photo(60, 120)
    result = play(April(), model, image, torch.tensor([7]))
    assert psnr(result.images, image) > 50
    assert result.labels.tolist() == [7]
    assert result.loss < 1e-2


@pytest.mark.parametrize("noisy", ["bias", "token", "bias token head"])
def test_april_reads_an_image_where_what_tells_nothing_of_it_is_noise(noisy: str) -> None:
    torch.manual_seed(45)
    model, image = Patches(), photo(60, 120)
    seen = replace(observe(model, image, torch.tensor([7]), True), classes=10)
    hit = {n for n in seen.update if any(part in n for part in noisy.split())}
    assert hit
    update = {n: t + torch.randn(t.shape) * (n in hit) for n, t in seen.update.items()}
    (result,) = April().reconstruct([replace(seen, update=update)], model, seeded(0))
    assert psnr(result.images, image) > 50


def test_april_reads_torchvisions_transformer() -> None:
    torch.manual_seed(42)
    model = torchvision.models.VisionTransformer(32, 8, 1, 4, 64, 64, num_classes=10)
    nn.init.normal_(model.heads.head.weight)  # which torchvision makes 0
    image = photo(60, 120)
    assert psnr(play(April(), model, image, torch.tensor([7])).images, image) > 50


@pytest.mark.engine
@pytest.mark.parametrize(("options", "reads"), [({}, True), ({"token": False}, True), ({"learned": False}, False)])
def test_april_reads_the_transformer_of_the_scenario(options: dict[str, bool], reads: bool) -> None:
    """Mean pooling hides nothing; of positions that nobody learns the slopes are not sent."""
    model = build_model(registry.dotted(find_shipped("scenarios") / "vit.py", "Vit"), options, (3, 32, 32), 7, seed=0)
    image = photo(60, 120)
    result = play(April(), model, image, torch.tensor([3]))
    assert (psnr(result.images, image) > 60) == reads
    assert (result.status == "ok") == reads


def test_a_pass_that_ends_early_reaches_what_the_whole_one_does() -> None:
    torch.manual_seed(44)
    model = Patches()
    seen_by = probe(model, observe(model, photo(60, 120), torch.tensor([7]), True))
    samples = seen_by.samples(1)
    whole = seen_by.run(samples)[0]
    for place in (0, len(whole) // 2, len(whole) - 1):
        reached = seen_by.reached(samples, seen_by.leaves(), place)
        assert torch.equal(reached.output, whole[place].output)
        assert reached.names == whole[place].names


def test_april_says_where_it_does_not_apply() -> None:
    torch.manual_seed(43)
    model = Patches()
    images = torch.cat([photo(60, 120), photo(10, 30)])
    several = play(April(), model, images, torch.tensor([7, 3]))
    assert (several.status, bool(several.message)) == ("not applicable", True)
    assert model.places is not None
    model.places.requires_grad_(False)
    frozen = play(April(), model, images[:1], torch.tensor([7]))
    assert (frozen.status, bool(frozen.message)) == ("not applicable", True)


def _with_front(front: nn.Module, features: int, frozen: bool = True) -> nn.Module:
    for parameter in front.parameters():
        parameter.requires_grad_(not frozen)
    return nn.Sequential(front, nn.Flatten(), nn.Linear(features, 50), nn.ReLU(), nn.Linear(50, 10))


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 40, bias=False), nn.Sigmoid(), nn.Linear(40, 10)),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 40, bias=False), nn.ReLU(), nn.Linear(40, 10, bias=False)),
        lambda: _with_front(nn.Sequential(nn.Flatten(), nn.Linear(64, 90), nn.Linear(90, 80)), 80),
        lambda: _with_front(nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(inplace=True)), 512),
        lambda: _with_front(nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU()), 512, frozen=False),
        lambda: nn.Sequential(nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 10)),
        lambda: nn.Sequential(nn.Conv2d(1, 20, 8), nn.Flatten(), nn.ReLU(), nn.Linear(20, 10)),
    ],
    ids=["no bias", "no bias at all", "frozen layers", "frozen convolution", "convolution", "sigmoid", "one place"],
)
@pytest.mark.parametrize("normalised", [False, True])
def test_analytic_undoes_what_lies_in_front(build: Callable[[], nn.Module], normalised: bool) -> None:
    torch.manual_seed(51)
    model = build()
    if normalised:
        model.register_forward_pre_hook(lambda _, inputs: ((inputs[0] - 0.4) / 0.25,))
    result = play(Analytic(), model, digit(3), torch.tensor([3]))
    assert psnr(result.images, digit(3)) > 50
    assert result.labels.tolist() == [3]
    assert result.loss < 1e-2


def test_analytic_needs_no_last_linear_layer() -> None:
    torch.manual_seed(52)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Unflatten(1, (32, 1, 1)), nn.Conv2d(32, 10, 1), nn.Flatten()
    )
    result = play(Analytic(), model, digit(3), torch.tensor([3]))
    assert psnr(result.images, digit(3)) > 50
    assert result.labels.tolist() == [3]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cell(images[:, 0])[0][:, -1])
        return logits


class Broken(nn.Module):
    """A model that refuses double precision, and single samples."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        if images.dtype == torch.float64 or len(images) == 1:
            raise ValueError("not these")
        logits: Tensor = self.head(images.flatten(1))
        return logits


def _models() -> list[tuple[str, nn.Module]]:
    named = {"lenet": {}, "mlp": {"hidden": [20]}, "mlp linear": {"hidden": []}, "cryptonet": {}}
    built = [(name, build_model(name.split()[0], p, (1, 8, 8), 10, 0)) for name, p in named.items()]
    torch.manual_seed(61)
    norm = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 10))
    drop = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.Dropout(0.5), nn.ReLU(), nn.Linear(30, 10))
    return [*built, ("recurrent", Recurrent()), ("norm", norm), ("dropout", drop), ("broken", Broken())]


@pytest.mark.parametrize("left", [0.0, pytest.param(-1.0, marks=pytest.mark.engine)])
def test_analytic_does_without_a_bias_that_the_weight_contradicts(left: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.Sigmoid(), nn.Linear(30, 10))
    image, label = digit(3), torch.tensor([3])
    seen = observe(model, image, label)
    changed = {name: (left * tensor.flip(0) if tensor.ndim < 2 else tensor) for name, tensor in seen.update.items()}
    [result] = Analytic().reconstruct([replace(seen, update=changed)], model, seeded(0))
    assert psnr(result.images, image) > 40


def noisy(seen: Observation, share: float, but: str = "no tensor") -> Observation:
    """The observation with noise much larger than the gradient on a share of the values of all tensors but one's."""
    (draw,) = seeded(5)
    noise = {n: torch.randn(t.shape, generator=draw) * (torch.rand(t.shape, generator=draw) < share)
             for n, t in seen.update.items()}  # fmt: skip
    return replace(seen, update={n: t if n.startswith(but) else t + noise[n] for n, t in seen.update.items()})


def test_analytic_reads_what_noise_on_some_values_leaves() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.SiLU(), nn.Linear(40, 10))
    seen = noisy(observe(model, digit(3), torch.tensor([3]), known=False), 0.1)
    [result] = Analytic().reconstruct([seen], model, seeded(0))
    assert psnr(result.images, digit(3)) > 60


@pytest.mark.engine
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_analytic_reads_the_one_product_that_noise_on_all_else_leaves(seed: int, part: bool) -> None:
    """The first layer's weight as it was, or what is in half of the sums of its rows, which blurs its length."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    seen = noisy(observe(model, digit(seed), torch.tensor([seed]), known=False), 1.0, but="1.weight")
    if part:
        sums = torch.linalg.qr(torch.randn(128, 64, generator=seeded(seed)[0])).Q
        seen = replace(seen, update={**seen.update, "1.weight": sums @ sums.T @ seen.update["1.weight"]})
    [result] = Analytic().reconstruct([seen], model, seeded(0))
    assert torch.cosine_similarity(result.images.flatten(), digit(seed).flatten(), dim=0) > 0.999
    assert psnr(result.images, digit(seed)) > (15 if part else 60)
    assert result.labels.tolist() == [seed]


class Behind(nn.Module):
    """A layer with two parameters whose gradients have a ratio that tells the sample; all else tells less."""

    frozen: Tensor
    head: Tensor

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.what, wide = what, 96 if what in ("norm", "slopes") else 64
        self.register_buffer("frozen", torch.randn(wide, 64) / 8 if wide > 64 else torch.eye(64))
        self.scale, self.shift = nn.Parameter(torch.ones(wide)), nn.Parameter(0.1 * torch.randn(wide))
        self.register_buffer("head", torch.randn(10, wide) / 8)

    def forward(self, images: Tensor) -> Tensor:
        entering = images.flatten(1) @ self.frozen.T
        if self.what == "slopes":
            moved = F.prelu(entering - 0.3 + self.shift, self.scale / 4)
        elif self.what == "waves":
            moved = torch.exp(entering * self.scale) + self.shift
        else:
            moved = entering * self.scale + self.shift
        if self.what in ("norm", "norm of pixels"):
            moved = F.layer_norm(entering, entering.shape[1:], self.scale, self.shift)
        logits: Tensor = torch.tanh(moved) @ self.head.T
        return logits


@pytest.mark.parametrize("place", [20, 47])
@pytest.mark.parametrize("what", ["scale", "waves", "norm", "norm of pixels", "slopes"])
def test_analytic_reads_ratios_of_other_parameters(what: str, place: int) -> None:
    model, image = Behind(what), digit(place)
    seen = observe(model, image, torch.tensor([3]), known=False)
    [result] = Analytic().reconstruct([seen], model, seeded(0))
    assert psnr(result.images, image) > 60
    assert result.labels.tolist() == [3]
    [hidden] = Analytic().reconstruct([noisy(seen, 1.0)], model, seeded(0))
    assert hidden.loss > 0.5


def test_ratios_are_read_where_some_are_left_out() -> None:
    model, image = Behind("scale"), digit(20)
    seen = observe(model, image, torch.tensor([3]), known=False)
    some = {name: tensor * (torch.arange(64) % 20 > 0) for name, tensor in seen.update.items()}
    [result] = Analytic().reconstruct([replace(seen, update=some)], model, seeded(0))
    assert psnr(result.images, image) > 15


@pytest.mark.engine
def test_a_layer_of_one_number_and_a_decoy_push_out_no_better_answer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.Sigmoid(), nn.Linear(128, 10))
    seen = observe(model, digit(3), torch.tensor([3]), known=False)
    (draw,) = seeded(1)
    decoy = torch.outer(torch.randn(128, generator=draw), torch.rand(64, generator=draw))
    [result] = Analytic().reconstruct([replace(seen, update={**seen.update, "1.weight": decoy})], model, seeded(0))
    assert psnr(result.images, digit(3)) > 60
    gated = OnePixel()
    [result] = Analytic().reconstruct([slightly_noisy(observe(gated, digit(3), torch.tensor([3])))], gated, seeded(0))
    assert psnr(result.images, digit(3)) > 25


class OnePixel(nn.Module):
    """A layer that sees one pixel, whose weight's gradient always has rank one, beside one that sees all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.fc, self.head = nn.Linear(1, 16), nn.Linear(64, 128), nn.Linear(144, 10)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        logits: Tensor = self.head(torch.cat([self.gate(flat[:, 27:28]), self.fc(flat)], 1).tanh())
        return logits


def slightly_noisy(seen: Observation) -> Observation:
    (draw,) = seeded(2)
    noise = {n: 0.1 * t.std() * torch.randn(t.shape, generator=draw) for n, t in seen.update.items()}
    return replace(seen, update={name: tensor + noise[name] for name, tensor in seen.update.items()})


def test_sums_over_places_have_no_ratio_that_tells_a_sample() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 4, 3), nn.Flatten(), nn.Linear(64, 10)
    )
    seen = observe(model.eval(), digit(3), torch.tensor([3]))
    assert pairs(probe(model, seen), seen.update) == []


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_analytic_reads_the_fifth_of_the_values_that_noise_leaves(seed: int, bias: bool) -> None:
    """Without a bias but for the length of the image, which the noise blurs."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100, bias=bias), nn.ReLU(), nn.Linear(100, 10))
    seen = noisy(observe(model, digit(seed), torch.tensor([seed]), known=not bias), 0.8)
    [result] = Analytic().reconstruct([seen], model, seeded(0))
    assert torch.cosine_similarity(result.images.flatten(), digit(seed).flatten(), dim=0) > 0.99
    assert not bias or psnr(result.images, digit(seed)) > 60


def test_values_on_a_few_levels_say_nothing_by_agreeing() -> None:
    torch.manual_seed(0)
    seen = observe(nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)), *digits(1, 0))
    layer = Layer("1.weight", "1.bias", False, 0, 0, 64)
    left, scaled = kept(layer, noisy(seen, 0.8)) or (None, False)
    assert left is not None
    assert scaled
    levels = {n: (7 * t / t.abs().max()).round() * t.abs().max() / 7 for n, t in seen.update.items()}
    for update in (levels, {n: t * torch.nan for n, t in seen.update.items()}, {n: t * 0 for n, t in levels.items()}):
        assert kept(layer, replace(seen, update=update)) is None


@pytest.mark.parametrize("sent", [True, False])
def test_analytic_reads_the_second_layer_where_the_first_says_nothing(sent: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, 10))
    seen = observe(model, digit(3), torch.tensor([3]), known=False)
    hidden = replace(seen, update={n: t * (not n.startswith("1.")) for n, t in seen.update.items()})
    [result] = Analytic().reconstruct([noisy(seen, 1.0, but="3.") if sent else hidden], model, seeded(0))
    assert psnr(result.images, digit(3)) > 60


class Rounded(nn.Module):
    """Steps of a twentieth."""

    def forward(self, inputs: Tensor) -> Tensor:
        return (20 * inputs).round() / 20


def test_analytic_reads_what_a_model_rounds_as_far_as_that_tells() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Rounded(), nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 10))
    [result] = Analytic().reconstruct([observe(model, digit(3), torch.tensor([3]))], model, seeded(0))
    assert torch.allclose(result.images, (20 * digit(3)).round() / 20, atol=1e-5)


class Coarse(nn.Module):
    """Whether a pixel is bright, which has no slope."""

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs > 0.5).to(inputs)


def test_a_front_without_a_slope_raises_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Coarse(), nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 10))
    result = play(Analytic(), model, digit(3), torch.tensor([3]))
    assert result.status != "failed"


def spoilt(seen: Observation, name: str) -> Observation:
    """The observation, of which one value of one tensor is not a number."""
    changed = seen.update[name].clone()
    changed.view(-1)[5] = torch.nan
    return replace(seen, update=dict(seen.update) | {name: changed})


@pytest.mark.parametrize(
    ("name", "bias"), [("1.weight", True), ("1.bias", True), ("3.bias", True), ("1.weight", False), ("3.bias", False)]
)
def test_analytic_leaves_out_what_is_not_finite(name: str, bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 30, bias=bias), nn.Sigmoid(), nn.Linear(30, 10))
    image, label = digit(3), torch.tensor([3])
    [result] = Analytic().reconstruct([spoilt(observe(model, image, label, known=False), name)], model, seeded(0))
    assert psnr(result.images, image) > 40


@pytest.mark.parametrize("attack", [Spear(), Peel()], ids=lambda a: type(a).__name__)
def test_a_value_that_is_not_finite_is_no_answer(attack: Attack) -> None:
    images, labels = digits(3, 63)
    model = perceptron(63, nn.ReLU if isinstance(attack, Spear) else nn.Sigmoid, layers=1)
    [result] = attack.reconstruct([spoilt(observe(model, images, labels), "1.weight")], model, seeded(0))
    assert (result.status, result.message) == ("failed", "the gradient of '1.weight' is not finite")


@pytest.mark.parametrize("attack", [Analytic(), Spear(), Peel(), April()], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize(("name", "model"), _models(), ids=lambda value: value if isinstance(value, str) else "")
def test_closed_forms_never_raise(attack: Attack, name: str, model: nn.Module) -> None:
    images, labels = digits(3, 62)
    seen: list[Observation] = [observe(model, images, labels, known=False)]
    if name not in ("norm", "broken"):
        seen.append(observe(model, images[:1], labels[:1], known=False))
        seen.append(replace(seen[1], update={n: t * torch.nan for n, t in seen[1].update.items()}))
        seen.append(noisy(seen[1], 0.9))
    seen.append(replace(seen[0], update={n: t * torch.nan for n, t in seen[0].update.items()}))
    seen.append(replace(seen[0], update={n: t * 0 for n, t in seen[0].update.items()}))
    for result, one in zip(attack.reconstruct(seen, model, seeded(*range(len(seen)))), seen, strict=True):
        assert result.images.shape == (one.batch_size, 1, 8, 8)
        assert result.images.isfinite().all()
        assert result.status == "ok" or result.message


@pytest.mark.parametrize("attack", [Analytic(), Spear(), Peel()], ids=lambda a: type(a).__name__)
def test_a_model_that_takes_no_single_sample_is_refused_with_its_reason(attack: Attack) -> None:
    images, labels = digits(3, 62)
    result = play(attack, dict(_models())["norm"].train(), images, labels)
    assert result.status == "not applicable"
    assert "single sample" in result.message
    assert "more than 1 value per channel" in result.message


def test_equations_are_solved_where_they_determine_a_sample() -> None:
    generator = seeded(71)[0]
    matrix = torch.randn(30, 12, generator=generator, dtype=torch.float64)
    sample = torch.rand(1, 12, generator=generator, dtype=torch.float64)
    for function, affine in ((lambda x: x @ matrix.T + 1, True), (lambda x: (x @ matrix.T).tanh(), False)):
        assert is_affine(function, torch.rand(2, 12, generator=generator, dtype=torch.float64)) is affine
        solution = solve(function, function(sample), (1, 12), affine)
        torch.testing.assert_close(solution.samples, sample, atol=1e-6, rtol=0)
        assert solution.residual < 1e-6


@pytest.mark.parametrize("seed", [70, 71, 72])
def test_a_front_that_squashes_is_undone_as_far_as_it_tells(seed: int) -> None:
    """LSQR leaves 1e-5 here, 20 dB of the image: small singular values of the slopes come late in it."""
    torch.manual_seed(seed)
    layers = (nn.Conv2d(1, 4, 5, 2, 2), nn.Sigmoid(), nn.Conv2d(4, 32, 3, 2, 1), nn.Sigmoid())
    front = nn.Sequential(*layers).double().requires_grad_(False)
    images = torch.rand(2, 1, 16, 16, dtype=torch.float64)
    assert solve(front, front(images), (2, 1, 16, 16), affine=False).residual < 1e-9


class Experts(nn.Module):
    """One of eight layers sees a sample, which the model itself chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(8, 64))
        self.weight, self.bias = nn.Parameter(torch.randn(8, 32, 64) / 8), nn.Parameter(torch.zeros(8, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        chosen = ((flat - 0.3) @ self.directions.T).argmax(1)
        hidden = (self.weight[chosen] @ flat[:, :, None])[..., 0] + self.bias[chosen]
        logits: Tensor = self.head(hidden.tanh())
        return logits


@pytest.mark.parametrize("seed", [51, 52, 53])
def test_a_stack_of_layers_of_which_one_sees_the_sample_is_read(seed: int) -> None:
    torch.manual_seed(seed)
    images, labels = digits(1, seed)
    assert psnr(play(Analytic(), Experts(), images, labels).images, images) > 100


@pytest.mark.parametrize("norm", [nn.LayerNorm((1, 8, 8)), nn.InstanceNorm2d(1)], ids=["layer", "instance"])
def test_brightness_that_a_norm_hides_is_that_of_an_image_from_black_to_white(norm: nn.Module) -> None:
    torch.manual_seed(54)
    images, labels = digits(1, 54)
    images = (images - images.amin()) / (images.amax() - images.amin())
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    assert psnr(play(Analytic(), model, images, labels).images, images) > 30


@pytest.mark.engine
@pytest.mark.parametrize("noise", [0.0, 1e-4, 1e-3])
def test_what_a_norm_hides_of_a_photograph_is_no_reason_to_stretch_it(noise: float) -> None:
    image = F.avg_pool2d(photo(10, 200), 4)
    torch.manual_seed(2)
    front = [nn.LayerNorm([3, 8, 8]), nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*front, nn.Flatten(), nn.Linear(1024, 10))
    seen = observe(model, image, torch.tensor([3]), known=False)
    moved = {
        n: t + noise * t.abs().max() * torch.randn(t.shape, generator=seeded(0)[0]) for n, t in seen.update.items()
    }
    [result] = Analytic().reconstruct([replace(seen, update=moved)], model, seeded(0))
    assert psnr(result.images, image) > 19


def test_a_front_that_sees_brightness_keeps_what_was_solved_under_noise() -> None:
    """Small weights leave a sigmoid almost affine: stretching the sample changes what it gives by little in all."""
    image = F.avg_pool2d(photo(10, 200), 4)
    torch.manual_seed(2)
    front = nn.Conv2d(3, 16, 3, padding=1)
    nn.init.normal_(front.weight, std=1e-3)
    model = nn.Sequential(front, nn.Sigmoid(), nn.Flatten(), nn.Linear(1024, 10))
    assert psnr(play(Analytic(), model, image, torch.tensor([3])).images, image) > 60


@pytest.mark.parametrize("attack", [Analytic(), Spear(), Peel(), April()], ids=lambda a: type(a).__name__)
def test_one_empty_update_says_nothing_of_the_others(attack: Attack) -> None:
    torch.manual_seed(3)
    model = Patches() if isinstance(attack, April) else perceptron(3, nn.ReLU if attack == Spear() else nn.Sigmoid)
    image, label = (photo(60, 120), torch.tensor([1])) if isinstance(attack, April) else digits(1, 3)
    seen = observe(model, image, label)
    results = attack.reconstruct([replace(seen, update={}), seen], model, seeded(0, 0))
    assert (results[0].status, results[0].inherent) == ("not applicable", False)
    assert (results[1].status, psnr(results[1].images, image) > 40) == ("ok", True)


def test_every_single_digit_is_exact_however_much_of_it_is_black() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    images, labels = torch.tensor(load_digits().images[:40]).float()[:, None] / 16, load_digits().target[:40]
    seen = [observe(model, image[None], torch.tensor([label])) for image, label in zip(images, labels, strict=True)]
    found = Analytic().reconstruct(seen, model, seeded(*range(40)))
    assert min(psnr(result.images, image) for result, image in zip(found, images, strict=True)) > 100


@pytest.mark.parametrize("seed", [71, 72, 73])
def test_a_random_share_of_the_gradient_tells_every_pixel(seed: int) -> None:
    torch.manual_seed(seed)
    images, labels = digits(1, seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    seen = observe(model, images, labels, False)
    sent = {name: torch.where(torch.rand(tensor.shape) < 0.5, tensor, 0) for name, tensor in seen.update.items()}
    (result,) = Analytic().reconstruct([replace(seen, update=sent)], model, seeded(0))
    assert psnr(result.images, images) > 100


def test_guides_leave_out_rows_whose_bias_was_pruned() -> None:
    left = torch.rand(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
    right = torch.tensor([[0.5, 0.2, 1.0], [0.1, 0.9, -1.0]], dtype=torch.float64)
    whole, _ = Factors(left, torch.ones(2).double(), right, 0.0).guides(biased=True)
    left[2] = torch.tensor([0.3, 0.3])  # whose bias has no gradient
    some, _ = Factors(left, torch.ones(2).double(), right, 0.0).guides(biased=True)
    assert len(whole) > 0
    assert some.isfinite().all()
    nothing, _ = Factors(left[2:3], torch.ones(2).double(), right, 0.0).guides(biased=True)
    assert nothing.shape == (0, 2)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_agrees_with_nothing(value: float) -> None:
    """An answer that is far out overflows a model: another one counts."""
    model, labels = build_model("mlp", {"hidden": [4]}, (1, 8, 8), 10, 0), torch.tensor([3])
    seen = observe(model, digit(0), labels)
    assert agreement(probe(model, seen), seen, torch.full((1, 1, 8, 8), value), labels) == (0.0, 1.0)
