"""Private layers and passports: what they compute, what stays at home, the two stages, and attackers who face them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayfed.attacks.base import Attack, Reconstruction
from rayfed.defences.passport import Passport
from rayfed.defences.split import Split
from rayfed.errors import UserError
from rayfed.gradients import batch_loss, buffers_of, gradient, weights_of
from rayfed.metrics import private as metrics
from rayfed.models.build import build_model
from rayfed.models.dcgan import Generator
from rayfed.models.front import Front
from rayfed.models.passport import Distribution, PassportShape, PenalisedPassport
from rayfed.models.passport import Passport as PassportConv
from rayfed.models.pretrained import Origin, save_generator
from rayfed.models.private import common_names, freeze, key_names, private_names
from rayfed.models.private_conv import PrivateConv, private_convs
from rayfed.samples import Pixels
from rayfed.scenario import Scenario, parse
from rayfed.simulation.client.arm import build_arm
from rayfed.simulation.client.local import PRIVATE
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.client.visit import ClientVisit
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.inputs import prepare_inputs
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.update import Observation
from tests.helpers.attack_fixtures import generators

MODELS = [
    ("lenet", {}, (1, 16, 16)),
    ("lenet", {"norm": "group"}, (1, 16, 16)),
    ("lenet5", {}, (1, 28, 28)),
    ("lenet5", {"norm": "batch"}, (1, 28, 28)),
    ("alexnet", {}, (3, 16, 16)),
    ("resnet18", {}, (3, 16, 16)),
    ("torchvision", {"arch": "resnet18"}, (3, 32, 32)),
    ("torchvision", {"arch": "squeezenet1_1"}, (3, 32, 32)),
]


LINEAR = PassportShape(5, 0.0, 8.0, "normal", "linear")


def passport(norm: nn.Module | None = None, shape: PassportShape = LINEAR, price: float | None = None) -> PassportConv:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3, stride=2, padding=1)
    if price:
        return PenalisedPassport(conv, norm, True, shape, price)
    return PassportConv(conv, norm, True, shape)


def by_hand(block: PassportConv) -> Tensor:
    """Equation 13, place by place: (2, C'), gamma and beta."""
    found = []
    for one in block.passports:
        maps = F.conv2d(one[None], block.conv.weight, stride=2, padding=1)[0]
        places = [
            block.decode.weight @ (block.encode.weight @ maps[:, y, x])
            for y in range(maps.shape[1])
            for x in range(maps.shape[2])
        ]
        found.append(sum(places) / len(places))
    return torch.stack(found)


def test_scale_and_shift_are_what_the_equation_says() -> None:
    block, images = passport(), torch.rand(2, 3, 8, 8)
    gamma, beta = by_hand(block)
    torch.testing.assert_close(torch.stack(block.derived()), torch.stack([gamma, beta]))
    plain = F.conv2d(images, block.conv.weight, stride=2, padding=1)
    expected = gamma.view(-1, 1, 1) * plain + beta.view(-1, 1, 1)
    torch.testing.assert_close(block(images), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(block.matrix(), gamma[:, None] * block.conv.weight.flatten(1))


def test_a_norm_stands_before_the_passports_scale() -> None:
    block, images = passport(nn.BatchNorm2d(4)), torch.rand(2, 3, 8, 8)
    normal = F.batch_norm(F.conv2d(images, block.conv.weight, stride=2, padding=1), None, None, training=True)
    gamma, beta = (t.view(-1, 1, 1) for t in by_hand(block))
    torch.testing.assert_close(block(images), gamma * normal + beta, atol=1e-5, rtol=1e-4)
    assert not any(name.startswith("norm.") for name, _ in block.named_parameters())


def test_the_published_block_has_an_activation_and_a_norm_of_its_own() -> None:
    """As Passport-aware Normalization computes it: mean over positions, o to o/4, LeakyReLU of slope 0.01, and back."""
    block, images = passport(shape=PassportShape(5, 0.0, 1.0, "uniform", "published")), torch.rand(2, 3, 8, 8)
    gamma, beta = _published(block, 0), _published(block, 1)
    torch.testing.assert_close(torch.stack(block.derived()), torch.stack([gamma, beta]))
    normal = F.batch_norm(F.conv2d(images, block.conv.weight, stride=2, padding=1), None, None, training=True)
    expected = gamma.view(-1, 1, 1) * normal + beta.view(-1, 1, 1)
    torch.testing.assert_close(block(images), expected, atol=1e-5, rtol=1e-4)
    assert block.encode.weight.shape == (1, 4)
    assert {name for name, _ in block.named_parameters()} == {"conv.weight", "encode.weight", "decode.weight"}


def _published(block: PassportConv, which: int) -> Tensor:
    mean = F.conv2d(block.passports[which], block.conv.weight, stride=2, padding=1).mean((1, 2))
    code = block.encode.weight @ mean
    return block.decode.weight @ torch.where(code > 0, code, 0.01 * code)


@pytest.mark.parametrize(("distribution", "deviation"), [("normal", 2.0), ("uniform", 2 / 3**0.5)])
def test_passports_have_their_distribution(distribution: Distribution, deviation: float) -> None:
    sampled = PassportShape(100, 3.0, 2.0, distribution, "linear").sample(3)
    assert sampled.mean().item() == pytest.approx(3, abs=0.05)
    assert sampled.std().item() == pytest.approx(deviation, rel=0.02)
    if distribution == "uniform":
        assert (sampled - 3).abs().max() <= 2


def test_the_consistency_term_is_the_two_distances() -> None:
    block = passport(price=0.5)
    with torch.no_grad():
        block.gamma.copy_(torch.arange(4.0))
        block.beta.copy_(torch.tensor([2.0, 0.0, 1.0, 3.0]))
    model = nn.Sequential(block, nn.Flatten(), nn.Linear(64, 3))
    images, labels = torch.rand(2, 3, 8, 8), torch.tensor([0, 2])
    gamma, beta = by_hand(block)
    term = 0.5 * ((block.gamma - gamma).square().sum().sqrt() + (block.beta - beta).square().sum().sqrt())
    expected = F.cross_entropy(model(images), labels) + term
    torch.testing.assert_close(batch_loss(model, weights_of(model), buffers_of(model), images, labels), expected)
    assert not hasattr(Passport(), "penalty")
    torch.testing.assert_close(block.matrix(), block.gamma[:, None] * block.conv.weight.flatten(1))


def test_the_gradient_of_the_penalised_loss_agrees_with_finite_differences() -> None:
    model = nn.Sequential(passport(price=0.5), nn.Flatten(), nn.Linear(64, 3)).double()
    images, labels = torch.rand(2, 3, 8, 8, dtype=torch.double), torch.tensor([0, 2])
    weights, buffers = weights_of(model), buffers_of(model)
    found, _ = gradient(model, weights, buffers, images, labels)
    for name, slope in found.items():
        index = tuple(int(i) for i in torch.unravel_index(slope.abs().argmax(), slope.shape))
        values = []
        for step in (1e-6, -1e-6):
            moved = {n: w.clone() for n, w in weights.items()}
            moved[name][index] += step
            values.append(float(batch_loss(model, moved, buffers, images, labels)))
        assert slope[index] == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5), name


@pytest.mark.parametrize(("name", "parameters", "shape"), MODELS)
@pytest.mark.parametrize("defence", [Split(), Passport(), Passport(consistency=1.0), Passport(block="published")])
def test_the_front_alone_is_private(
    name: str, parameters: dict[str, str], shape: tuple[int, int, int], defence: Split
) -> None:
    plain = build_model(name, parameters, shape, 10, seed=0)
    model = defence.adapt_model(copy.deepcopy(plain))
    [(path, block)] = private_convs(model).items()
    assert private_names(model) == {
        n for n in [*dict(model.named_parameters()), *dict(model.named_buffers())] if n.startswith(f"{path}.")
    }
    assert common_names(model) == {f"{path}.{n}" for n, _ in block.named_parameters()}
    assert key_names(model) == ({f"{path}.passports"} if isinstance(defence, Passport) else frozenset())
    images = torch.rand(2, *shape)
    if type(defence) is Split:
        torch.testing.assert_close(model.eval()(images), plain.eval()(images))
    assert model(images).shape == (2, 10)
    assert set(Front(model, path).names(Pixels(*shape))) == private_names(model)


def test_more_layers_and_those_that_cannot_be_kept() -> None:
    model = Split(layers=2).adapt_model(build_model("resnet10", {}, (3, 16, 16), 10, seed=0))
    assert list(private_convs(model)) == ["conv1", "stages.0.0.conv1"]
    assert not any("bn1" in name for name in private_names(model))
    with pytest.raises(UserError, match="only 0 are"):
        Split().adapt_model(build_model("mlp", {}, (1, 8, 8), 10, seed=0))
    with pytest.raises(UserError, match=r"first 4 layers .* only 3 are"):
        Passport(layers=4).adapt_model(build_model("lenet", {}, (1, 16, 16), 10, seed=0))
    with pytest.raises(UserError, match="smaller than the kernel"):
        Passport(size=3).adapt_model(build_model("lenet", {}, (1, 16, 16), 10, seed=0))


def scenario(defence: str, attack: str = "dlg", **options: str) -> Scenario:
    extra = "".join(f", {name}: {value}" for name, value in options.items())
    return parse(f"""
name: t
seed: 5
data: {{name: digits, size: 16, train_samples: 60, test_samples: 20}}
model: {{name: lenet, activation: sigmoid, init: uniform}}
training: {{epochs: 1, batch_size: 10, lr: 0.05, momentum: 0.9}}
federation: {{rounds: 2, clients: 3}}
defences: [{defence}]
attacks: [{{name: {attack}, observes: gradient{extra}}}]
""")


def hosted(s: Scenario) -> tuple[ClientWorker, str, Sent]:
    inputs = prepare_inputs(s)
    runtime, [arm] = ClientWorker(s, inputs.data, inputs.parts, torch.device("cpu")), list(s.played)
    return runtime, arm, Sent(0, runtime.arm(arm).weights, runtime.arm(arm).buffers)


def test_clients_begin_alike_or_not_as_asked_but_never_with_one_passport() -> None:
    for start in ("common", "own"):
        runtime, arm, _ = hosted(scenario(f"{{name: passport, start: {start}}}"))
        ones, others = runtime.drawn_privately(arm, 0), runtime.drawn_privately(arm, 1)
        alike = {name for name, tensor in ones.items() if torch.equal(tensor, others[name])}
        assert alike == (common_names(runtime.arm(arm).model) if start == "common" else set())


@pytest.mark.parametrize("defence", ["split", "passport"])
def test_the_second_stage_moves_the_private_part_alone(defence: str) -> None:
    runtime, arm, sent = hosted(scenario(defence))
    _, report = runtime.cohort(arm, sent, [0, 1, 2], {})
    state, names = report.states[1][PRIVATE], runtime.arm(arm).trained_privately
    later = Sent(1, {n: w + 0.01 for n, w in sent.weights.items()}, sent.buffers)
    task = runtime.task(arm, later, 1, runtime.parts[1], report.states[1])
    for name, tensor in later.weights.items():
        assert torch.equal(task.weights[name], tensor)
    assert names
    assert not any(torch.equal(task.weights[name], state[name]) for name in names)
    for name in runtime.arm(arm).keys:
        assert torch.equal(task.buffers[name], state[name])
    still = hosted(scenario(f"{{name: {defence}, private_epochs: 0}}"))[0]
    kept = still.task(arm, later, 1, runtime.parts[1], report.states[1])
    assert all(torch.equal(kept.weights[name], state[name]) for name in names)


def struck(s: Scenario, round: int = 0) -> tuple[ClientWorker, Observation, Reconstruction]:
    """An attack on client 0 in a round, as an attacker's actor does it."""
    runtime, arm, sent = hosted(s)
    states = runtime.cohort(arm, sent, [0, 1, 2], {})[1].states if round else {}
    observation, _ = ObservationBuilder(runtime).observe(
        ClientVisit(arm, Sent(round, sent.weights, sent.buffers), 0, states), s.attacks[0]
    )
    built = build_arm(runtime.specs[arm], runtime.data.sample, 10, seed=0)
    freeze(built.model, built.private - observation.weights.keys())
    method: Attack = s.attacks[0].build()
    [found] = method.reconstruct([observation], built.model, generators(1))
    return runtime, observation, found


def leaked(runtime: ClientWorker, observation: Observation) -> set[str]:
    """The victim's private tensors that its own values are seen of."""
    own = runtime.drawn_privately(next(iter(runtime.specs)), 0)
    seen = {**observation.buffers, **observation.weights, **observation.update}
    return {name for name, tensor in own.items() if name in seen and torch.equal(seen[name], tensor)}


@pytest.mark.parametrize("defence", ["{name: split, start: own}", "{name: passport, start: own}"])
@pytest.mark.parametrize("knowledge", ["[labels]", "[labels, colluder]"])
@pytest.mark.parametrize(
    ("attack", "options"),
    [
        ("dlg", {"iterations": "2", "restarts": "1"}),
        ("grnn", {"iterations": "2"}),
        ("inverting_gradients", {"iterations": "3"}),
    ],
)
def test_gradient_matching_meets_them(defence: str, knowledge: str, attack: str, options: dict[str, str]) -> None:
    runtime, observation, found = struck(scenario(defence, attack, knowledge=knowledge, **options))
    assert found.status == "ok", found.message
    arm = runtime.arm(next(iter(runtime.specs)))
    assert not arm.private & (observation.weights.keys() | observation.update.keys())
    assert not leaked(runtime, observation)


@pytest.mark.parametrize("defence", ["split", "passport"])
def test_a_generators_latents_meet_them(defence: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_generator(tmp_path / "g.pt", Generator((1, 16, 16), 10, latent=4, width=8), Origin({}, "", 0, 0))
    options = {"generator": str(tmp_path / "g.pt"), "iterations": "3", "population": "4"}
    _, observation, found = struck(scenario(defence, "ggl", **options))
    assert found.status == "ok", found.message
    assert observation.buffers.keys() >= {"conv1.conv.weight"}


@pytest.mark.engine
def test_who_is_given_passport_and_layers_sees_the_bare_gradient() -> None:
    options = {"knowledge": "[labels, key, lock]", "iterations": "60", "restarts": "2"}
    runtime, observation, found = struck(scenario("{name: passport, start: own}", "dlg", **options))
    assert "conv1.passports" in leaked(runtime, observation)
    assert found.loss < 1e-6


@pytest.mark.engine
@pytest.mark.parametrize("defence", ["split", "passport", "{name: passport, consistency: 1}"])
def test_model_inversion_goes_through_a_colluders_layers(defence: str) -> None:
    s = scenario(defence, "model_inversion", knowledge="[activations, colluder]", cut="act1", iterations="200")
    for round in (0, 1):
        runtime, observation, found = struck(s, round)
        assert found.status == "ok"
        arm = runtime.arm(next(iter(s.played)))
        assert observation.extra["colluder"].keys() == arm.private
        assert all(torch.equal(observation.buffers[n], t) for n, t in observation.extra["colluder"].items())
        assert not leaked(runtime, observation) & arm.keys


@pytest.mark.parametrize(("name", "side"), [("lenet5", 27), ("alexnet", 7)])
def test_images_that_are_too_small_are_refused(name: str, side: int) -> None:
    with pytest.raises(UserError, match=f"{name} .*needs images of at least"):
        build_model(name, {}, (1, side, side), 10, seed=0)


def test_layers_that_are_sent_out_are_not_private_but_compared() -> None:
    runtime, arm, sent = hosted(scenario("{name: split, sent_out: true}"))
    assert not runtime.arm(arm).private
    _, report = runtime.cohort(arm, sent, [0, 1, 2], {})
    [row] = runtime.private_layers(arm, list(report.states.values()))
    plain, arm, sent = hosted(scenario("{name: dldp_a, sigma: 0}"))
    trained = [
        sent.weights["conv1.weight"] - u.tensors["conv1.weight"] for u in plain.updates(arm, sent, [0, 1, 2], {})
    ]
    assert row["distance"] == pytest.approx(metrics.distance(trained), rel=1e-4)


def test_a_host_describes_its_clients_private_layers() -> None:
    runtime, arm, sent = hosted(scenario("passport"))
    states = runtime.cohort(arm, sent, [0, 1, 2], {})[1].states
    [row] = runtime.private_layers(arm, list(states.values()))
    assert row["layer"] == "conv1"
    assert row["distance"] == pytest.approx(
        metrics.distance([state[PRIVATE]["conv1.conv.weight"] for state in states.values()])
    )
    assert row["distance"] > 0
    assert 1 <= row["rank"] <= 12


def test_distance_and_rank() -> None:
    weights = [torch.randn(4, 5) for _ in range(3)]
    pairs = [float((a - b).square().sum()) for a in weights for b in weights]
    assert metrics.distance(weights) == pytest.approx(sum(pairs) / 9)
    assert metrics.distance(weights[:1]) == pytest.approx(0)
    assert metrics.rank(torch.diag(torch.tensor([1.0, 1.0, 1e-4, 0.0]))) == 2
    assert metrics.rank(torch.eye(7)) == 7
    assert metrics.rank(torch.zeros(3, 3)) == 0


def test_the_bounds_of_theorem_1_hold_for_pseudo_inverses() -> None:
    wide, narrow = torch.diag(torch.tensor([2.0, 1.0])), torch.diag(torch.tensor([1.0, 2.0]))
    assert metrics.compute_upper_bound([wide, narrow]) == pytest.approx(1)
    assert metrics.compute_lower_bound([wide, narrow]) == pytest.approx(1 / 4)
    assert metrics.compute_upper_bound([wide]) is metrics.compute_lower_bound([wide]) is None
    torch.manual_seed(0)
    for _ in range(20):
        own, others = torch.randn(2, 8, 5, dtype=torch.double)
        output = F.normalize(torch.randn(8, dtype=torch.double), dim=0)
        error = (torch.linalg.pinv(own) @ output - torch.linalg.pinv(others) @ output).norm()
        upper = metrics.compute_upper_bound([own, others])
        assert upper is not None
        assert error <= 2**0.5 * upper  # Wedin 1973: the constant is the root of 2 for full rank
        others[:, 0] = others[:, 1]  # a lower rank
        inside = torch.linalg.svd(others.T @ own).Vh[-1]
        output = F.normalize(own @ inside, dim=0)  # in the range of W, orthogonal to the columns of W'
        error = (torch.linalg.pinv(own) @ output - torch.linalg.pinv(others) @ output).norm()
        lower = metrics.compute_lower_bound([own, others])
        assert lower is not None
        assert error >= lower


def test_the_scale_without_passports_is_the_norms() -> None:
    conv = nn.Conv2d(1, 4, 3)
    assert torch.equal(PrivateConv(conv, None, True).scale(), torch.ones(4))
    norm = nn.GroupNorm(2, 4)
    nn.init.uniform_(norm.weight)
    assert torch.equal(PrivateConv(conv, norm, True).scale(), norm.weight)
