"""Models that draw random numbers: the variational bottleneck, dropout, and attackers that face them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn import functional as F

from rayfed import gradients
from rayfed.attacks.base import Attack
from rayfed.attacks.closed_form.analytic import Analytic
from rayfed.attacks.forward_probe import without_tracking
from rayfed.attacks.matching.dlg import Dlg
from rayfed.attacks.matching.gradinversion import GradInversion
from rayfed.attacks.matching.grnn import Grnn
from rayfed.attacks.matching.idlg import Idlg
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.defences.base import Batch, Defence, Task
from rayfed.defences.dropout import Dropout
from rayfed.defences.precode import Precode
from rayfed.errors import UserError
from rayfed.gradients import batch_loss, buffers_of, weights_of
from rayfed.models.bottleneck import Encoder, VariationalBottleneck
from rayfed.models.build import build_model, is_stochastic
from rayfed.models.lenet import LeNet
from rayfed.scenario import Training
from rayfed.simulation.client.local import update_method
from rayfed.update import Update
from tests.helpers.attack_fixtures import digit, generators, leaky_lenet, observed, psnr

LABELS = torch.tensor([3, 5])
MATCHING: list[Attack] = [
    Dlg(iterations=2, restarts=1),
    Idlg(iterations=2, restarts=1),
    InvertingGradients(iterations=3, local_steps="simulated"),
    GradInversion(iterations=3, seeds=2),
    Grnn(iterations=2),
]


def digits() -> Tensor:
    return torch.cat([digit(3), digit(5)])


def defended(defence: Defence, seed: int = 0) -> nn.Module:
    return defence.adapt_model(leaky_lenet((1, 8, 8), seed)).train()


def test_the_bottleneck_stands_before_the_last_linear_layer() -> None:
    model = defended(Precode(bottleneck=7))
    names = {name: tuple(p.shape) for name, p in model.named_parameters() if name.startswith("fc.")}
    assert names == {
        "fc.precode.encode.weight": (14, 48),
        "fc.precode.encode.bias": (14,),
        "fc.precode.decode.weight": (48, 7),
        "fc.precode.decode.bias": (48,),
        "fc.head.weight": (10, 48),
        "fc.head.bias": (10,),
    }
    inner = defended(Dropout(rate=0.5)).get_submodule("fc")
    assert isinstance(inner, nn.Sequential)
    assert [type(module) for module in inner] == [nn.Dropout, nn.Linear]


def test_a_model_without_a_linear_layer_is_refused() -> None:
    with pytest.raises(UserError, match="precode"):
        Precode().adapt_model(nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten()))


def test_the_penalty_is_the_divergence_of_the_distribution() -> None:
    output = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    mean, deviation = output[:, :3], (output[:, 3:] / 2).exp()
    expected = kl_divergence(Normal(mean, deviation), Normal(0.0, 1.0)).sum(1)
    torch.testing.assert_close(Encoder(4, 3, beta=0.25).penalty(output), 0.25 * expected)


def test_what_passes_is_drawn_from_that_distribution_and_its_mean_in_evaluation_mode() -> None:
    torch.manual_seed(0)
    block = VariationalBottleneck(features=3, units=4, beta=1.0)
    block.decode = nn.Identity()  # type: ignore[assignment]
    one = torch.randn(1, 3)
    mean, log_variance = block.encode(one).detach().chunk(2, 1)
    drawn = block(one.expand(20_000, 3)).detach()
    torch.testing.assert_close(drawn.mean(0), mean[0], atol=0.05, rtol=0)
    torch.testing.assert_close(drawn.std(0), (log_variance / 2).exp()[0], atol=0.05, rtol=0)
    torch.testing.assert_close(block.eval()(one), mean)


def test_the_loss_is_cross_entropy_and_penalty() -> None:
    model = defended(Precode(bottleneck=7, beta=0.3)).eval()
    weights, buffers = weights_of(model), buffers_of(model)
    with torch.no_grad():
        features = nn.Sequential(*list(model.children())[:-1])(digits())
        block = model.get_submodule("fc.precode")
        penalties = block.encode.penalty(block.encode(features))  # type: ignore[union-attr, operator]
        losses = F.cross_entropy(model(digits()), LABELS, reduction="none") + penalties
    assert penalties.min() > 0
    loss = batch_loss(model, weights, buffers, digits(), LABELS)
    torch.testing.assert_close(loss, losses.mean())
    masked = batch_loss(model, weights, buffers, digits(), LABELS, mask=torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(masked, losses[1])


def test_the_gradient_is_that_of_the_whole_loss_and_nothing_stays_with_the_model() -> None:
    model = defended(Precode(bottleneck=4, beta=0.5)).eval().double()
    weights, buffers = weights_of(model), buffers_of(model)
    images = digits().double()
    slopes, _ = gradients.gradient(model, weights, buffers, images, LABELS)
    many = gradients.many_gradients(model, weights, buffers, images[None], LABELS[None])
    for name in ("conv1.weight", "fc.precode.encode.weight", "fc.precode.encode.bias", "fc.head.weight"):
        torch.testing.assert_close(many[name][0], slopes[name])
        step = torch.zeros_like(weights[name])
        step.view(-1)[1] = 1e-6
        up, down = (
            batch_loss(model, weights | {name: weights[name] + way * step}, buffers, images, LABELS) for way in (1, -1)
        )
        assert slopes[name].view(-1)[1].item() == pytest.approx((up - down).item() / 2e-6, rel=1e-5, abs=1e-9)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("defence", [Precode(bottleneck=8), Dropout(rate=0.5)])
def test_what_a_client_draws_follows_from_its_generator(defence: Defence) -> None:
    model = defended(defence)
    assert is_stochastic(model)

    def sent(seed: int) -> Update:
        generator = torch.Generator().manual_seed(seed)
        batch = Batch(digits(), LABELS)
        task = Task(0, 0, model, weights_of(model), buffers_of(model), batch, generator, order=0)
        return update_method(Training(algorithm="fedsgd"), [defence])(task)

    first, again, other = (sent(seed).tensors["conv1.weight"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)  # a client that answers twice draws twice


@pytest.mark.parametrize(("defence", "block"), [(Precode(bottleneck=8), ".precode."), (Dropout(rate=0.5), "-")])
def test_an_informed_attacker_leaves_out_the_block_and_what_is_behind(defence: Defence, block: str) -> None:
    model = defended(defence)
    exposed = defence.exposed(Update(0, 0, weights_of(model), {}, 1, 0.0))
    assert exposed is not None
    kept = {name for name, mask in exposed.items() if mask.all()}
    assert kept == {name for name in exposed if block not in name and not name.startswith("fc.head.")}
    assert not any(mask.any() for name, mask in exposed.items() if name not in kept)


class Forgetful(nn.Module):
    """A user's model: dropout without a dropout layer, and batch norm."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten())
        self.fc, self.always = nn.Linear(36, 10), always

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(F.dropout(self.body(images), 0.5, self.training or self.always))


def users_model() -> nn.Module:
    return build_model(f"{__name__}:Forgetful", {}, (1, 8, 8), 10, 0).train()


STOCHASTIC = {"precode": lambda: defended(Precode(bottleneck=8)), "dropout": lambda: defended(Dropout(rate=0.5))}
STOCHASTIC["users"] = users_model


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_an_attackers_model_draws_nothing_and_keeps_batch_statistics(kind: str) -> None:
    model = STOCHASTIC[kind]()
    probe = without_tracking(model)
    assert is_stochastic(model)
    assert not is_stochastic(probe)
    norms = [module.training for module in probe.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms == [True] * (kind == "users")
    state = {**weights_of(probe), **buffers_of(probe)}
    first, again = (functional_call(probe, state, (digits(),)) for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.engine
@pytest.mark.parametrize("kind", STOCHASTIC)
@pytest.mark.parametrize("attack", MATCHING, ids=lambda attack: type(attack).__name__)
def test_every_matching_attack_runs_on_a_model_that_draws(kind: str, attack: Attack) -> None:
    model = STOCHASTIC[kind]()
    seen = [observed(model, digits(), LABELS, seed=seed) for seed in (1, 2)]
    together = attack.reconstruct(seen, model, generators(2))
    assert [result.status for result in together] == ["ok", "ok"]
    before = torch.get_rng_state()
    torch.manual_seed(99)
    again = attack.reconstruct(seen, model, generators(2))
    torch.set_rng_state(before)
    for first, second in zip(together, again, strict=True):
        assert torch.equal(first.images, second.images)


def test_a_model_that_draws_in_evaluation_mode_is_refused() -> None:
    with pytest.raises(UserError, match="random numbers in evaluation mode"):
        build_model(f"{__name__}:Forgetful", {"always": True}, (1, 8, 8), 10, 0)


def test_precode_does_not_hide_the_input_of_a_first_linear_layer() -> None:
    model = Precode().adapt_model(build_model("mlp", {"hidden": [16]}, (1, 8, 8), 10, 0)).train()
    seen = observed(model, digit(7), torch.tensor([7]))
    [found] = Analytic().reconstruct([seen], model, generators(1))
    assert psnr(found.images, digit(7)) > 60


@pytest.mark.engine
def test_precode_stops_what_reads_an_undefended_lenet() -> None:
    label, attack = torch.tensor([3]), Dlg(iterations=40, restarts=1)
    torch.manual_seed(5)
    plain = LeNet(activation="sigmoid", init="uniform").build((1, 8, 8), 10)
    scores = []
    for model in (plain, Precode().adapt_model(leaky_lenet((1, 8, 8), 5)).train()):
        seen = replace(observed(model, digit(3), label), labels=label)
        scores.append(psnr(attack.reconstruct([seen], model, generators(1))[0].images, digit(3)))
    assert scores[0] > 60
    assert scores[1] < 15
