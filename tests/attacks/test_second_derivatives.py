"""Second derivatives of models that lack them, hide that they lack them, or are not taken by vmap."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rayfed.attacks.matching.distances import squared_l2
from rayfed.attacks.matching.idlg import Idlg
from rayfed.attacks.matching.problem import Matching
from rayfed.attacks.matching.second_derivatives import DIFFERENCED, IN_TURN, TOGETHER, Way, _without_tf32, fitting_way
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.runs import runner
from rayfed.scenario import parse
from rayfed.simulation.executors.local import local
from rayfed.simulation.progress import Progress
from tests.helpers.attack_fixtures import digit, observe, seeded


class Rows(nn.Module):
    """A network on the rows of an image 8x8, each a vector."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.first, self.core, self.fc = nn.Linear(8, 8), core, nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        found = self.core(self.first(images[:, 0]))
        return self.fc((found[0] if isinstance(found, tuple) else found).flatten(1))


class Own(nn.Module):
    """A function as a layer."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Once(torch.autograd.Function):
    """x^2 with a backward pass of its own that autograd cannot see through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * slope


class Hiding(Once):
    """The same, whose second derivative is a wrong one and no error."""

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0].detach() * slope


class Steps(torch.autograd.Function):
    """Signs, with the slope of the identity: its gradient has no slope that could be followed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def branching(x: Tensor) -> Tensor:
    return 2 * x.tanh() if x.sum().item() > 0 else x.tanh()


def in_place(x: Tensor) -> Tensor:
    return F.relu_(torch.zeros(x.shape, dtype=x.dtype).add_(x))


MODELS: dict[str, tuple[nn.Module, Way]] = {
    "attention": (Own(attention), TOGETHER),
    "multihead": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), IN_TURN),
    "layer norm": (nn.LayerNorm(8), IN_TURN),
    "gru": (nn.GRU(8, 8, batch_first=True), IN_TURN),
    "lstm": (nn.LSTM(8, 8, batch_first=True), IN_TURN),
    "branch": (Own(branching), IN_TURN),
    "in place": (Own(in_place), IN_TURN),
    "once": (Own(Once.apply), DIFFERENCED),
    "hiding": (Own(Hiding.apply), DIFFERENCED),
    "checkpoint": (Checkpointed(False), DIFFERENCED),
    "reentrant": (Checkpointed(True), DIFFERENCED),
}


def problem(model: nn.Module) -> Matching:
    """Two victims of a model whose own weights are other ones than those that they were sent."""
    model = model.eval()
    seen = [observe(model, digit(i), torch.tensor([i])) for i in (3, 5)]
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    return Matching.of(seen, other, None, squared_l2, dtype=torch.float64)


@pytest.mark.parametrize("name", MODELS)
def test_slopes_of_the_objective_are_its_differences(name: str) -> None:
    torch.manual_seed(0)
    core, way = MODELS[name]
    matching = problem(Rows(core))
    assert matching.way is way
    generator = torch.Generator().manual_seed(1)
    points = torch.rand(2, matching.dimension, generator=generator, dtype=torch.float64)
    ahead = torch.randn(points.shape, generator=generator, dtype=torch.float64)
    victims, step = torch.arange(2), 1e-6
    _, slopes = matching.value_and_gradient(points, victims)
    there, back = (matching.values(points + s * ahead, victims) for s in (step, -step))
    torch.testing.assert_close((slopes * ahead).sum(1), (there - back) / (2 * step), rtol=1e-4, atol=1e-9)


class Gated(nn.Module):
    """A block behind a factor that begins at zero, as in ReZero."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * Hiding.apply(x)


def test_a_block_that_is_switched_off_at_first_hides_nothing() -> None:
    """The way is found once for a model: it has to hold at the weights of later rounds, too."""
    assert problem(Rows(Gated())).way is DIFFERENCED


def test_dropouts_within_layers_pass_though_rayfed_did_not_build_the_model() -> None:
    model = Rows(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)).train()
    seen = [observe(model, digit(3), torch.tensor([3]))]
    assert Matching.of(seen, model, None, squared_l2, dtype=torch.float64).way is IN_TURN


class Moving(nn.Module):
    """A mean of the weights' own, kept by every pass in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(0.5 * self.fc.weight.mean(0))
        hidden: Tensor = self.fc(x - self.mean)
        return hidden


@pytest.mark.parametrize(
    "core",
    [Moving(), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))],
    ids=["moving mean", "spectral norm"],
)
def test_every_pass_begins_with_the_buffers_that_were_sent(core: nn.Module) -> None:
    """Two steps of a search see one function, whose value at the true image is that of the client's gradient."""
    torch.manual_seed(0)
    model = Rows(core).train()
    image, label = digit(3), torch.tensor([3])
    matching = Matching.of([observe(model, image, label)], model, None, squared_l2, dtype=torch.float64)
    assert matching.way is not DIFFERENCED
    point, victim = image.flatten()[None].double(), torch.arange(1)
    first, again = matching.values(point, victim), matching.values(point, victim)
    assert torch.equal(first, again)
    assert float(first) < 1e-10


def test_what_vmap_takes_is_still_computed_together() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10))
    assert problem(model).way is TOGETHER


class Kinked(nn.Module):
    """A layer that float32 takes for twice as steep about one input, as a unit that rounding turns on."""

    def __init__(self, about: Tensor) -> None:
        super().__init__()
        self.about = about

    def forward(self, x: Tensor) -> Tensor:
        near = x.dtype == torch.float32 and bool((x == self.about).any())
        return torch.tanh(2 * x if near else x)


def test_a_unit_that_rounding_turns_in_one_trial_refuses_nothing() -> None:
    """One in thirty untrained ConvNets lost every search to such a unit, and was not attacked at all."""
    first = torch.rand(2, 1, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    torch.manual_seed(0)
    model = nn.Sequential(Kinked(first[0, 0]), nn.Flatten(), nn.Linear(64, 10))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    assert fitting_way(model, weights, {}, (1, 1, 8, 8), torch.tensor([3])) is IN_TURN


def test_tf32_is_off_within_and_as_before_behind() -> None:
    """On an H200 an untrained ResNet-18 was refused: in TF32 its slopes are several per cent off."""
    kinds: list[Any] = [torch.backends.cudnn, torch.backends.cuda.matmul]
    before = [kind.allow_tf32 for kind in kinds]
    try:
        for kind in kinds:
            kind.allow_tf32 = True
        with _without_tf32():
            assert not any(kind.allow_tf32 for kind in kinds)
        assert all(kind.allow_tf32 for kind in kinds)
    finally:
        for kind, allowed in zip(kinds, before, strict=True):
            kind.allow_tf32 = allowed


class Misled(torch.autograd.Function):
    """Squares whose double backward may be wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_right: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.is_right = is_right
        return x**2

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * (x if ctx.is_right else x.detach()) * slope, None


class Scaled(nn.Module):
    """Squares of scaled inputs, whose slopes are right in double precision, about one input, alone."""

    def __init__(self, about: Tensor) -> None:
        super().__init__()
        self.about, self.scale = about, nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Misled.apply(
            self.scale * x, x.dtype == torch.float64 and bool(((x - self.about).abs() < 1e-6).any())
        )
        return found


def test_right_in_one_trial_and_close_in_another_is_wrong() -> None:
    """Where the precisions agree the slope is wrong, and where it is right they do not."""
    first = torch.rand(2, 1, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(first[0, 0]), nn.Flatten(), nn.Linear(64, 10))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    assert fitting_way(model, weights, {}, (1, 1, 8, 8), torch.tensor([3])) is DIFFERENCED


def test_a_gradient_in_steps_is_refused() -> None:
    torch.manual_seed(0)
    model = Rows(Own(Steps.apply))
    seen = observe(model, digit(3), torch.tensor([3]))
    [found] = Idlg(iterations=1).reconstruct([seen], model, seeded(0))
    assert found.status == "not applicable"
    assert "cannot be differentiated with respect to the inputs" in found.message


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_again_at_the_weights_that_were_sent(reentrant: bool) -> None:
    torch.manual_seed(0)
    model, plain = (nn.Sequential(nn.Flatten(), nn.Linear(64, 8), c, nn.Linear(8, 10)) for c in (
        Checkpointed(reentrant), Checkpointed(reentrant).inner
    ))  # fmt: skip
    weights = weights_of(plain)
    named = dict(zip(weights_of(model), weights.values(), strict=True))
    found, _ = gradient(model, named, buffers_of(model), digit(3), torch.tensor([3]))
    true, _ = gradient(plain, weights, buffers_of(plain), digit(3), torch.tensor([3]))
    for one, other in zip(found.values(), true.values(), strict=True):
        torch.testing.assert_close(one, other)


def network(core: str) -> nn.Module:
    """What the whole runs train; `core` names it in `MODELS`."""
    return Rows(copy.deepcopy(MODELS[core][0]))


@pytest.mark.engine
@pytest.mark.parametrize("core", ["multihead", "gru", "once", "checkpoint", "reentrant"])
def test_whole_runs_train_and_attack_such_models(core: str, tmp_path: Path) -> None:
    scenario = {
        "name": "second",
        "data": {"name": "digits", "size": 8, "train_samples": 100, "test_samples": 20},
        "model": {"name": "tests.attacks.test_second_derivatives:network", "core": core},
        "federation": {"rounds": 2, "clients": 4},
        "training": {"epochs": 1, "batch_size": 10, "lr": 0.1},
        "attacks": [{"name": "idlg", "iterations": 8, "restarts": 1, "observes": "gradient", "batch_size": 1}],
    }
    run = runner.launch(parse(yaml.safe_dump(scenario)), str(tmp_path), local, Progress())
    rounds, attacks = (run.read_table(table).to_pylist() for table in ("rounds", "attacks"))
    assert rounds[1]["test_loss"] != rounds[0]["test_loss"]
    assert attacks
    assert all(row["status"] == "ok" for row in attacks)
