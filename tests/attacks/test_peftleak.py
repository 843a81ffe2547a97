"""PEFTLeak: a patch that is alone in its bin is exact, no other is called so, and models without adapters are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayfed import registry
from rayfed import scenario as scenarios
from rayfed.attacks.base import MaliciousServer, Reconstruction
from rayfed.attacks.server import peftleak
from rayfed.attacks.server.peftleak import PeftLeak
from rayfed.core.shipped import find_shipped
from rayfed.defences.base import Batch, Task
from rayfed.gradients import buffers_of, weights_of
from rayfed.models.build import build_model
from rayfed.models.lora import add_lora
from rayfed.models.trained import choose
from rayfed.samples import Pixels
from rayfed.scenario import AttackSpec, Training
from rayfed.simulation.client.local import local_training, update_method
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.client.visit import ClientVisit, ObservedClient
from rayfed.simulation.inputs import prepare_inputs
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.update import Observation
from tests.helpers.images import large_digits

ADAPTED = registry.dotted(find_shipped("scenarios") / "adapters.py", "AdaptedVit")
AdaptedVit: Any = registry.find("models", ADAPTED)
SMALL = {"patch": 7, "width": 96, "blocks": 4, "bottleneck": 32}
SHAPE = (1, 28, 28)
SGD = Training(algorithm="fedsgd", batch_size=None)
PATCHES = 16
ALL = "16 of 16 patches"


class OwnVit(nn.Module):
    """Another form of vision transformer: no class token, separate maps of attention, adapters on the stream."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, smooth: bool, width: int = 96) -> None:
        super().__init__()
        self.patches = nn.Conv2d(image_shape[0], width, 7, 7, bias=False)
        self.register_buffer("places", torch.randn(PATCHES, width))
        self.layers = nn.ModuleList(OwnBlock(width, smooth) for _ in range(3))
        self.out = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            tokens = layer(tokens)
        return self.out(tokens.mean(1))


class OwnBlock(nn.Module):
    def __init__(self, width: int, smooth: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value, self.dense = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.adapter = nn.ModuleDict({"down": nn.Linear(width, 48), "up": nn.Linear(48, width)})
        self.act = nn.GELU() if smooth else nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        weights = (self.query(n) @ self.key(n).transpose(1, 2) / n.shape[-1] ** 0.5).softmax(-1)
        x = x + self.dense(weights @ self.value(n))
        x = x + self.narrow(torch.nn.functional.silu(self.wide(self.norm(x))))
        return x + self.adapter["up"](self.act(self.adapter["down"](x)))


class Unused(AdaptedVit):  # type: ignore[misc, valid-type]
    """Convolutions in front that could cut patches as well, and cut none."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, **options: Any) -> None:
        super().__init__(image_shape, classes, **options)
        used = self._modules.pop("embed")
        self.other, self.like, self.embed = nn.Conv2d(1, 8, 2, 2), nn.Conv2d(1, 96, 7, 7), used


class PrivateEmbedding(AdaptedVit):  # type: ignore[misc, valid-type]
    """The convolution that cuts patches stays with the client."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, **options: Any) -> None:
        super().__init__(image_shape, classes, **options)
        self.embed.private = True


class PrivateNorm(AdaptedVit):  # type: ignore[misc, valid-type]
    """Norms in front of MLPs stay with the client, who has long trained them."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, **options: Any) -> None:
        super().__init__(image_shape, classes, **options)
        for block in self.blocks:
            block.norm2.private = True
            nn.init.normal_(block.norm2.weight)
            nn.init.normal_(block.norm2.bias)


class Registers(AdaptedVit):  # type: ignore[misc, valid-type]
    """Four more tokens in front, which have no position. Darcet et al. 2023, "Vision Transformers Need Registers"."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, **options: Any) -> None:
        super().__init__(image_shape, classes, **options)
        self.registers = nn.Parameter(torch.randn(1, 4, self.token.shape[-1]))

    def forward(self, images: Tensor) -> Tensor:
        vectors = self.embed(images).flatten(2).transpose(1, 2)
        vectors = torch.cat([self.token.expand(len(vectors), -1, -1), vectors], 1) + self.positions
        vectors = torch.cat([self.registers.expand(len(vectors), -1, -1), vectors], 1)
        for block in self.blocks:
            vectors = block(vectors)
        return self.head(self.norm(vectors)[:, 0])


class Cast(AdaptedVit):  # type: ignore[misc, valid-type]
    """Images in the weights' precision."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.to(self.embed.weight.dtype))


def adapted(normalise: Any = None, kind: str = ADAPTED, **options: Any) -> nn.Module:
    net = build_model(kind, SMALL | options, SHAPE, 10, seed=3, normalise=normalise)
    choose(net, ["*adapter*", "head"])
    return net


def own(smooth: bool) -> nn.Module:
    torch.manual_seed(2)
    net = OwnVit(SHAPE, 10, smooth)
    choose(net, ["*adapter*", "out"])
    return net


def victim(net: nn.Module, images: Tensor, labels: Tensor, training: Training = SGD, **options: Any) -> Observation:
    """What the server sees of a client that it sent the tampered model."""
    state = weights_of(net), buffers_of(net)
    attack = PeftLeak(brightness=(0.3, 0.2), **options)
    model, weights, buffers = attack.tamper(net, *state, SHAPE, {}, torch.Generator())
    task = Task(0, 0, model, weights, buffers, Batch(images, labels), torch.Generator(), order=0)
    sent = update_method(training, [])(task)
    scale = local_training(len(labels), training).scale
    return Observation(0, 0, weights, buffers, sent.tensors, scale, len(labels), Pixels(*SHAPE), 10)


def rebuilt(net: nn.Module, seen: Observation) -> Reconstruction:
    [found] = PeftLeak().reconstruct([seen], net, [torch.Generator()])
    return found


def textures(count: int) -> tuple[Tensor, Tensor]:
    """Images whose patches differ in brightness, as `victim` tells the attack, and labels."""
    generator = torch.Generator().manual_seed(7)
    bright = torch.empty(count, 1, 4, 4).normal_(0.3, 0.2, generator=generator).clamp(0.15, 0.85)
    grain = 0.3 * torch.rand((count, *SHAPE), generator=generator) - 0.15
    return bright.repeat_interleave(7, 2).repeat_interleave(7, 3) + grain, torch.arange(count) % 10


def read(net: nn.Module, seen: Observation) -> tuple[Tensor, Tensor]:
    """Patches that were recovered with certainty, and their positions."""
    parts = peftleak._Transformer.found_in(net, list(seen.weights), SHAPE)[0]
    patches, places, _, errors, _ = peftleak._patches(parts, parts.shown(seen.weights | seen.buffers), seen)
    return patches[errors < peftleak._SURE], places[errors < peftleak._SURE]


def alone(net: nn.Module, seen: Observation, images: Tensor) -> Tensor:
    """Whether a patch is alone in its bin, by how many rows answer to it: (N, positions)."""
    parts = peftleak._Transformer.found_in(net, list(seen.weights), SHAPE)[0]
    state = seen.weights | seen.buffers
    entering = parts.look(state, images)
    single = torch.zeros(len(images), PATCHES, dtype=torch.bool)
    for aim in parts.aims(list(parts.shown(state))):
        adapter = parts.adapters[aim.adapter]
        weight, bias = (state[f"{adapter.down}.{kind}"][aim.rows].double() for kind in ("weight", "bias"))
        rows = (entering[aim.adapter].tokens[:, aim.position - PATCHES] @ weight.T + bias > 0).sum(1)
        single[:, aim.position] = rows.bincount(minlength=len(bias) + 1)[rows] == 1
    return single


def quality(true: Tensor, found: Tensor) -> Tensor:
    """PSNR of the nearest reconstruction to each image (dB), (N,)."""
    return -10 * (true[:, None] - found[None]).square().flatten(2).mean(2).amin(1).log10()


def cut(images: Tensor) -> Tensor:
    return nn.functional.unfold(images, 7, stride=7).transpose(1, 2)


@pytest.mark.parametrize(
    "net",
    [
        pytest.param(lambda: adapted(), id="class token"),
        pytest.param(lambda: adapted(([0.5], [0.25])), id="normalised"),
        pytest.param(lambda: own(smooth=False), id="on the stream"),
        pytest.param(lambda: own(smooth=True), id="GELU"),
        pytest.param(lambda: _dropping(), id="dropout"),
        pytest.param(lambda: adapted(kind=f"{__name__}:Unused"), id="unused convolutions"),
        pytest.param(lambda: adapted(kind=f"{__name__}:Registers"), id="registers"),
    ],
)
def test_a_single_image_is_exact(net: Any) -> None:
    model, (images, labels) = net(), large_digits(1, seed=4)
    found = rebuilt(model, victim(model, images, labels))
    assert found.status == "ok"
    assert ALL in str(found.message)
    assert quality(images, found.images) > 60
    assert found.labels.equal(labels)


def test_what_is_called_alone_is_alone_and_exact() -> None:
    net, (images, labels) = adapted(), textures(8)
    seen = victim(net, images, labels)
    patches, places = read(net, seen)
    single = alone(net, seen, images)
    assert 10 < single.sum() < 100
    assert places.bincount(minlength=PATCHES).equal(single.sum(0))
    for patch, place in zip(patches, places.tolist(), strict=True):
        true = cut(images)[single[:, place], place]
        assert (true - patch).abs().amax(1).min() < 1e-3


def test_without_a_norm_before_adapters_nothing_is_called_alone() -> None:
    net, (images, labels) = own(smooth=False), textures(4)
    seen = victim(net, images, labels)
    found = rebuilt(net, seen)
    assert found.message == peftleak._NO_LENGTH
    assert (quality(cut(images).flatten(0, 1)[:, None], cut(found.images).flatten(0, 1)[:, None]) > 50).sum() > 10


@pytest.mark.engine
def test_patches_of_one_image_are_put_together() -> None:
    net, (images, labels) = adapted(bottleneck=90), textures(4)
    seen = victim(net, images, labels)
    single, found = alone(net, seen, images), rebuilt(net, seen)
    made = cut(found.images)
    for image, whole in zip(cut(images), single, strict=True):
        if whole.sum() > 1:
            exact = (made - image).abs().amax(2) < 1e-3
            assert (exact.sum(1) >= whole.sum()).any()


def test_two_images_that_share_bins_are_not_read_for_sure() -> None:
    net, (images, labels) = adapted(), textures(1)
    patches = cut(images.expand(2, -1, -1, -1)).clone()
    patches[1] = patches[1].flip(1)  # as bright
    pair = nn.functional.fold(patches.transpose(1, 2), (28, 28), 7, stride=7)
    seen = victim(net, pair, labels.repeat(2))
    assert not alone(net, seen, pair).any()
    parts = peftleak._Transformer.found_in(net, list(seen.weights), SHAPE)[0]
    found, places, _, errors, _ = peftleak._patches(parts, parts.shown(seen.weights | seen.buffers), seen)
    assert places.unique().numel() == PATCHES
    assert (found - patches.mean(0)[places]).abs().amax() < 0.1  # what the bins have is a mean of both
    assert (errors > peftleak._SURE).all()


def test_the_gain_lifts_adapters_above_noise() -> None:
    net, (images, labels) = adapted(), large_digits(1, seed=4)
    found = {}
    for gain in (1.0, 1e6):
        seen = victim(net, images, labels, gain=gain)
        generator = torch.Generator().manual_seed(0)
        noisy = {n: t + 1e-3 * torch.randn(t.shape, generator=generator) for n, t in seen.update.items()}
        found[gain] = quality(images, rebuilt(net, replace(seen, update=noisy)).images)
    assert found[1e6] > 40 > 15 > found[1.0]


def test_what_a_client_was_sent_stays_as_it_was() -> None:
    net = adapted()
    weights, buffers = weights_of(net), buffers_of(net)
    kept = {name: tensor.clone() for name, tensor in (weights | buffers).items()}
    _, sent, frozen = PeftLeak().tamper(net, weights, buffers, SHAPE, {}, torch.Generator())
    assert all(torch.equal(tensor, kept[name]) for name, tensor in (weights | buffers).items())
    assert sent.keys() == weights.keys()
    assert frozen.keys() == buffers.keys()
    # the last block and all behind it are left alone, for the loss to depend on all tokens
    assert all(torch.equal(frozen[n], kept[n]) for n in frozen if n.startswith(("blocks.3", "norm")))


@pytest.mark.parametrize(
    ("net", "why"),
    [
        pytest.param(lambda: build_model("lenet", {}, SHAPE, 10, seed=0), "not a vision transformer", id="lenet"),
        pytest.param(lambda: _without_adapters(), "no adapter with a bias", id="no adapters"),
        pytest.param(lambda: _with_lora(), "LoRA", id="lora"),
        pytest.param(lambda: adapted(blocks=1), "no adapter with a bias|fewer than two blocks", id="one block"),
        pytest.param(lambda: adapted(width=40), "too narrow", id="narrow"),
    ],
)
def test_other_models_are_not_applicable(net: Any, why: str) -> None:
    model, (images, labels) = net(), large_digits(1, seed=4)
    seen = victim(model, images, labels)
    found = rebuilt(model, seen)
    assert found.status == "not applicable"
    assert found.inherent
    assert any(part in found.message for part in why.split("|"))
    assert all(torch.equal(tensor, seen.weights[name]) for name, tensor in weights_of(model).items())


def _without_adapters() -> nn.Module:
    net = adapted()
    choose(net, ["head"])
    return net


def _dropping() -> nn.Module:
    torch.manual_seed(0)
    net = adapted()
    for block in net.blocks:  # type: ignore[union-attr, operator]
        block.attention.dropout = 0.0
        block.adapter1 = nn.Sequential(nn.Dropout(0.1), block.adapter1)
    return net


def _with_lora() -> nn.Module:
    pytest.importorskip("peft")
    net = build_model(ADAPTED, SMALL, SHAPE, 10, seed=3)
    choose(net, ["head"], [lambda model: add_lora(model, 4, 8, ["mlp.0"], 0.0)])
    return net


@pytest.mark.parametrize(
    ("kind", "dtype", "why"),
    [
        ("Cast", torch.float64, ALL),
        ("AdaptedVit", torch.float64, "float64"),
        ("Cast", torch.bfloat16, "bfloat16"),
    ],
)
def test_weights_of_other_precision_are_read_or_it_is_said_why_not(kind: str, dtype: torch.dtype, why: str) -> None:
    (images, labels), cast = large_digits(1, seed=4), kind == "Cast"
    net = adapted(kind=f"{__name__}:{kind}").to(dtype)
    found = rebuilt(net, victim(net, images if cast else images.to(dtype), labels))
    assert why in str(found.message)
    assert not found.inherent


def test_a_model_that_no_weights_make_pass_patches_on_stays_as_it_is() -> None:
    net = adapted()
    net.embed.register_forward_hook(lambda _, entered, left: left.square())  # type: ignore[union-attr, operator]
    state = weights_of(net), buffers_of(net)
    _, weights, buffers = PeftLeak().tamper(net, *state, SHAPE, {}, torch.Generator())
    assert all(tensor is (state[0] | state[1])[name] for name, tensor in (weights | buffers).items())


def test_an_honest_server_reads_nothing() -> None:
    net, (images, labels) = adapted(), large_digits(1, seed=4)
    task = Task(0, 0, net, weights_of(net), buffers_of(net), Batch(images, labels), torch.Generator(), order=0)
    sent = update_method(SGD, [])(task)
    found = rebuilt(net, Observation(0, 0, task.weights, task.buffers, sent.tensors, 1.0, 1, Pixels(*SHAPE), 10))
    assert found.status == "not applicable"
    assert not found.inherent
    assert "tamper" in found.message


def test_victims_run_the_frozen_weights_that_the_server_made() -> None:
    """The observation alone is enough for an attacker with another process's architecture; the run's own is intact."""
    runtime, arm, sent, spec = hosted(ADAPTED)
    assert isinstance(spec.build(), MaliciousServer)
    before, _ = runtime.cohort(arm, sent, [3], {})
    seen, truth = ObservationBuilder(runtime).observe(ClientVisit(arm, sent, 3), spec)
    after, _ = runtime.cohort(arm, sent, [3], {})
    assert all(torch.equal(t, after.tensors[name]) for name, t in before.tensors.items())
    assert not torch.equal(seen.buffers["embed.weight"], buffers_of(runtime.arm(arm).model)["embed.weight"])
    elsewhere = adapted(blocks=3, bottleneck=64)
    assert quality(truth.inputs, rebuilt(elsewhere, seen).images) > 60


@pytest.mark.parametrize("part", ["PrivateEmbedding", "PrivateNorm"])
def test_no_server_writes_on_what_stays_with_the_client(part: str) -> None:
    runtime, arm, sent, spec = hosted(f"{__name__}:{part}")
    visit = ObservedClient(runtime, ClientVisit(arm, sent, 3), spec)
    asked, own = visit.asked(), runtime.drawn_privately(arm, 3)
    assert own.keys() == asked.private
    assert all(torch.equal((asked.weights | asked.buffers)[name], tensor) for name, tensor in own.items())
    seen, _ = ObservationBuilder(runtime).observe(visit.visit, spec)
    found = rebuilt(runtime.arm(arm).model, seen)
    assert found.status == "not applicable"
    assert "private parts" in str(found.message)


def hosted(model: str) -> tuple[ClientRuntime, str, Sent, AttackSpec]:
    """What hosts clients with a model of three blocks, its arm, what they are sent, and the attack."""
    scenario = scenarios.parse(
        "{name: t, data: {name: digits, size: 28, train_samples: 200}, federation: {rounds: 1, clients: 10},"
        f" model: {{name: '{model}', patch: 7, width: 96, blocks: 3,"
        " train: {layers: ['*adapter*', head]}}, training: {epochs: 1, batch_size: 10}}"
    )
    inputs = prepare_inputs(scenario)
    runtime = ClientRuntime(scenario, inputs.data, inputs.parts, torch.device("cpu"))
    [name] = scenario.arms or ["none"]
    arm = runtime.arm(name)
    sent = Sent(0, arm.weights, arm.buffers)
    return runtime, name, sent, AttackSpec(name="peftleak", observes="gradient", batch_size=1)
