"""Fused cohorts against the loop, in double precision: models, settings, defences, and what they cannot do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rayfed.core import losses
from rayfed.defences.base import Batch, Defence, GradientMethod, Task
from rayfed.defences.dp_sgd import DpSgd
from rayfed.errors import UserError
from rayfed.gradients import Penalised, buffers_of, gradient, weights_of
from rayfed.scenario import Training
from rayfed.simulation.client.cohort import cohort_updates
from rayfed.simulation.client.fused import _FORMS, Stacked, fused_gradient
from rayfed.update import Named, Update

CLIENTS = 3


class Residual(nn.Module):
    """Not one after the other, with layers that have a form of their own and layers that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=3)
        self.norm, self.group = nn.BatchNorm2d(6), nn.GroupNorm(2, 6)
        self.act, self.head = nn.ReLU(inplace=True), nn.Linear(24, 10)
        self.scale = nn.Parameter(torch.ones(6, 1, 1))
        self.register_buffer("mean", torch.full((1, 1, 1), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1:] != (1, 8, 8) or x.dim() != 4:
            raise ValueError(x.shape)
        x = self.first(x - self.mean)
        y = self.norm(self.second(x))
        y += x * self.scale
        y = self.act(y)
        y = torch.cat([F.max_pool2d(self.group(y), 2), 1 - F.avg_pool2d(y, 2)], dim=1)
        return self.head(F.adaptive_avg_pool2d(y, (1, 2)).view(x.size(0), 24))


class Places(nn.Module):
    """Linear layers in three dimensions, a convolution in one, an einsum, and a head whose weights are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.conv = nn.Linear(8, 8), nn.Conv1d(8, 8, 3, padding=1, groups=2)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = F.gelu(self.mix(x.squeeze(1)))
        seen = torch.einsum("nij,nkj->nik", rows, rows).softmax(-1) @ rows
        found = self.norm(self.conv(seen.transpose(1, 2)).transpose(1, 2))
        return cast("Tensor", self.head(found.mean(1)) + F.leaky_relu(self.head(rows[:, 0])))


class Frozen(nn.Sequential):
    """A frozen convolution below, and a frozen bias."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(32, 10))
        for tensor in (self[0].weight, self[0].bias, self[2].bias, self[4].bias):
            tensor.requires_grad_(False)


class Charged(nn.Linear, Penalised):
    """Pays for large outputs."""

    def penalty(self, output: Tensor) -> Tensor:
        return 0.1 * output.square().mean(1)


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Sequential(nn.Linear(24, 12), nn.Identity(), nn.ELU()),
        Charged(12, 10),
    )


class Viewed(nn.Sequential):
    """A convolution whose result is flattened by `view`, as it often is."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(36, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self)[:3]:
            x = layer(x)
        return self.head(x.view(-1, 36))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lenet,
    "viewed": Viewed,
    "residual": Residual,
    "places": Places,
    "frozen": Frozen,
}


def drawn(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double().eval()


def task(model: nn.Module, client: int = 0, samples: int = 8) -> Task:
    generator = torch.Generator().manual_seed(client)
    inputs = torch.rand((samples, 1, 8, 8), generator=generator, dtype=torch.float64)
    return Task(
        client=client,
        round=0,
        model=model,
        weights=weights_of(model),
        buffers=buffers_of(model),
        data=Batch(inputs, torch.randint(10, (samples,), generator=generator)),
        generator=generator,
        order=client,
    )


def trained(way: str, model: nn.Module, *defences: Defence, **settings: Any) -> list[Update]:
    tasks = [task(model, client, samples) for client, samples in enumerate((21, 5, 16))]  # unlike steps and batches
    training = Training.model_validate({"vectorise": way, "batch_size": 8, "lr": 0.05, **settings})
    return cast("list[Update]", list(cohort_updates(tasks, training, defences)))


def assert_close(some: list[Update], others: list[Update], atol: float) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one.client, one.samples) == (other.client, other.samples)
        assert one.loss == pytest.approx(other.loss, abs=atol)
        assert one.tensors.keys() == other.tensors.keys()
        for name, tensor in one.tensors.items():
            torch.testing.assert_close(tensor, other.tensors[name], atol=atol, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 2, "momentum": 0.9, "weight_decay": 0.1},
        {"algorithm": "fedsgd"},
        {"optimiser": "adamw", "weight_decay": 0.1, "clip_norm": 0.5, "lr": 0.001},
        {"steps": 3, "sampling": "poisson", "batch_size": 3},
    ],
    ids=lambda settings: "-".join(settings),
)
@pytest.mark.parametrize("model", MODELS)
def test_updates_are_the_loops(model: str, settings: dict[str, Any]) -> None:
    net = drawn(MODELS[model])
    # Adam divides by the gradient, however small: rounding is not as small as it
    atol = 1e-8 if "optimiser" in settings else 1e-10
    assert_close(trained("fused", net, **settings), trained("loop", net, **settings), atol)


@pytest.mark.parametrize("name", ["binary_cross_entropy", "mean_squared_error", "smoothed", "mixed"])
def test_losses_are_the_loops(name: str) -> None:
    net = drawn(lenet)
    if name == "smoothed":
        losses.attach_loss(net, losses.CrossEntropy(label_smoothing=0.2))
    elif name == "binary_cross_entropy":
        losses.attach_loss(net, losses.BinaryCrossEntropy())
    elif name == "mean_squared_error":
        losses.attach_loss(net, losses.MeanSquaredError())
    tasks = [task(net, client) for client in range(CLIENTS)]
    if name != "smoothed":
        tasks = [t.replace(data=t.data._replace(labels=F.one_hot(t.data.labels, 10).double() * 0.9)) for t in tasks]
    made = {
        way: cast("list[Update]", list(cohort_updates(tasks, Training(vectorise=way, steps=2), [])))  # type: ignore[arg-type]
        for way in ("loop", "fused")
    }
    assert_close(made["fused"], made["loop"], 1e-10)


def test_mixed_precision_is_the_loops_up_to_the_rounding_of_bfloat16() -> None:
    net = drawn(lenet).float()
    tasks = [task(net, client) for client in range(CLIENTS)]
    tasks = [t.replace(data=t.data._replace(inputs=t.data.inputs.float())) for t in tasks]
    exact, loop, fused = (
        cast("list[Update]", list(cohort_updates(tasks, Training(vectorise=way, steps=1, precision=precision), [])))  # type: ignore[arg-type]
        for way, precision in (("loop", "float32"), ("loop", "bf16"), ("fused", "bf16"))
    )
    for true, one, other in zip(exact, loop, fused, strict=True):
        rounded = sum(float((one.tensors[n] - t).square().sum()) for n, t in true.tensors.items())
        assert rounded > 0
        assert sum(float((other.tensors[n] - t).square().sum()) for n, t in true.tensors.items()) < 4 * rounded


class Recurrent(nn.Module):
    """Reads the rows of an image one after the other."""

    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.rows = kind(8, 6, batch_first=True, **settings)
        self.head = nn.LazyLinear(10)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.head(self.rows(x.squeeze(1))[0][:, -1]))


class Cell(nn.Module):
    """The same, a row at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.head = nn.LSTMCell(8, 6), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for row in x.squeeze(1).unbind(1):
            state = self.row(row, state)
        assert state is not None
        return cast("Tensor", self.head(state[0]))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Recurrent(nn.LSTM),
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, proj_size=3),
        lambda: Recurrent(nn.GRU),
        lambda: Recurrent(nn.GRU, num_layers=2, bias=False),
        lambda: Recurrent(nn.RNN),
        lambda: Recurrent(nn.RNN, nonlinearity="relu", bidirectional=True),
        Cell,
    ],
    ids=["lstm", "lstm-proj", "gru", "gru-deep", "rnn", "rnn-relu", "lstm-cell"],
)
def test_recurrent_layers_are_the_loops(build: Callable[[], nn.Module]) -> None:
    net = build().double()
    with torch.no_grad():
        net(torch.zeros(1, 1, 8, 8).double())  # the head's size
    assert_close(trained("fused", net), trained("loop", net), 1e-10)


def per_client(function: Callable[..., Tensor], *stacked: Tensor | float) -> Tensor:
    return torch.stack([function(*(s[k] if isinstance(s, Tensor) else s for s in stacked)) for k in range(CLIENTS)])


X, Y = (torch.randn((CLIENTS, 4, 3, 6, 6), generator=torch.Generator().manual_seed(k)).double() for k in (0, 1))


@pytest.mark.parametrize(
    ("function", "operands"),
    [
        (torch.add, (X, Y)),
        (torch.sub, (X, Y[:, 0, :, :1, :1])),
        (torch.mul, (Y[:, 0, 0, 0], X)),
        (torch.div, (Y[:, 0, 0, 0, 0], X)),
        (lambda x, y: x + y, (X, 2.0)),
        (lambda x, y: 2 - x * y, (X, Y)),
        (lambda x: x + torch.arange(12.0).view(2, 1, 1, 1, 6), (X,)),
        (lambda x: torch.arange(6.0) * x[0, 0, 0, 0], (X,)),  # float32, as a number has no say
        (lambda x: x.clone().add_(1).relu_(), (X,)),
        (lambda x: F.max_pool2d(x, 3, 2, 1), (X,)),
        (lambda x: F.max_pool2d(x, 2, return_indices=True)[1], (X,)),
        (lambda x: F.max_pool2d(x[0], 2), (X,)),
        (lambda x: F.avg_pool2d(x, 2, count_include_pad=False, padding=1), (X,)),
        (lambda x: x.flatten(1), (X,)),
        (lambda x: x.flatten(0, 1), (X,)),
        (lambda x: x.flatten(-2), (X,)),
        (lambda x, w: F.linear(x, w), (X, Y[:, :, 0, 0])),
        (lambda x, w: F.linear(x, w, w[:, 0]), (X[:, 0, 0], Y[:, 0, 0])),
        (lambda x, w: F.linear(x[0, 0, 0], w), (X, Y[:, 0, 0])),
        (lambda x, w: F.linear(input=x, weight=w, bias=w[:, 0]), (X, Y[:, 0, 0])),
        (lambda x, w: F.conv2d(x, w, stride=(1, 2), padding=1), (X, Y)),
        (lambda x, w: F.conv2d(x[0], w, torch.ones(4).double()), (X, Y)),
        (lambda x: x[0].new_tensor([x.shape[1], x.size(-1), x.ndim, len(x)]), (X,)),
        (lambda x: torch.stack(x.unbind()[::-1]) + torch.where(x > 0, x, x.exp()), (X,)),
    ],
)
def test_operations_are_those_of_each_client(function: Callable[..., Tensor], operands: tuple[Any, ...]) -> None:
    found = function(*(Stacked(o) if isinstance(o, Tensor) else o for o in operands))
    assert isinstance(found, Stacked)
    expected = per_client(function, *operands)
    assert found.shape == expected.shape[1:]
    torch.testing.assert_close(found.every, expected, atol=1e-12, rtol=0)


def test_functions_by_elements_are_those_of_each_client() -> None:
    """All that are listed, by name, so that none is listed that mixes elements."""
    unary = [
        f for f, form in _FORMS.items() if form.__name__ == "_pointwise" and "add sub mul div".find(f.__name__[:3]) < 0
    ]
    assert len(unary) >= 12
    for function in unary:
        torch.testing.assert_close(
            cast("Stacked", function(Stacked(X.clone()))).every, per_client(function, X.clone()), atol=1e-12, rtol=0
        )


def test_a_gradient_is_that_of_finite_differences_at_each_clients_own_weights() -> None:
    net = drawn(Residual)
    one, names = task(net), list(weights_of(net))
    generator = torch.Generator().manual_seed(1)

    def noise(t: Tensor) -> Tensor:
        return 0.1 * torch.randn((CLIENTS, *t.shape), generator=generator, dtype=t.dtype)

    weights = {name: w + noise(w) for name, w in one.weights.items()}
    inputs, labels = torch.rand(CLIENTS, 4, 1, 8, 8).double(), torch.randint(10, (CLIENTS, 4))
    batch = Batch(inputs, labels, torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]))
    slopes, loss = fused_gradient(one, weights, batch)
    direction, step = {name: noise(w) for name, w in one.weights.items()}, 1e-6

    def loss_at(shift: float) -> Tensor:
        return fused_gradient(one, {n: w + shift * direction[n] for n, w in weights.items()}, batch)[1]

    ahead, behind = loss_at(step), loss_at(-step)
    along = torch.stack([(slopes[n] * direction[n]).flatten(1).sum(1) for n in names]).sum(0)
    torch.testing.assert_close(along, (ahead - behind) / (2 * step), atol=1e-7, rtol=1e-6)
    for k in range(CLIENTS):
        own = {name: w[k] for name, w in weights.items()}
        assert batch.mask is not None
        _, alone = gradient(net, own, one.buffers, inputs[k], labels[k], batch.mask[k])
        assert float(loss[k]) == pytest.approx(float(alone), abs=1e-12)


class Leaning(Defence):
    """Asks twice for the gradient of a batch, at other weights and at weights that all clients share."""

    vectorises: ClassVar[bool] = True

    def __init__(self, masked: bool) -> None:
        self.masked = masked

    def wrap_gradient(self, next: GradientMethod) -> GradientMethod:
        def gradient(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
            batch = batch if self.masked else batch._replace(mask=None)
            here, loss = next(task, {name: 0.5 * w for name, w in weights.items()}, batch)
            shared, _ = next(task, task.weights, batch)
            return {name: g.sign() * g.abs().sqrt() - shared[name] for name, g in here.items()}, loss

        return gradient


@pytest.mark.parametrize(("masked", "way"), [(True, "loop"), (False, "vmap")])  # unmasked, padding counts
def test_a_defence_around_the_gradient_gives_the_same_numbers(masked: bool, way: str) -> None:
    net, defence = drawn(Residual), Leaning(masked)
    # a root magnifies what rounding leaves of a zero
    assert_close(trained("fused", net, defence), trained(way, net, defence), 1e-7)


class Nested(Defence):
    """Asks for the gradient of each sample, or for a derivative of the gradient."""

    vectorises: ClassVar[bool] = True
    samplewise: ClassVar[bool] = True

    def __init__(self, how: str) -> None:
        self.how = how

    def wrap_gradient(self, next: GradientMethod) -> GradientMethod:
        def of_sample(task: Task, weights: Named, inputs: Tensor, labels: Tensor) -> tuple[Named, Tensor]:
            return next(task, weights, Batch(inputs[None], labels[None], torch.ones(1)))

        def gradient(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
            if self.how == "samples":
                slopes, loss = vmap(lambda x, y: of_sample(task, weights, x, y))(batch.inputs, batch.labels)
                return {name: g.mean(0) for name, g in slopes.items()}, loss.mean()
            shifted = grad(lambda w: sum(g.square().sum() for g in next(task, w, batch)[0].values()))(weights)
            return shifted, torch.zeros(())

        return gradient


@pytest.mark.parametrize("how", ["samples", "derivative"])
def test_a_defence_that_needs_more_than_the_gradient_is_told_so(how: str) -> None:
    net = drawn(lenet)
    assert all(torch.isfinite(update.tensors["0.weight"]).all() for update in trained("vmap", net, Nested(how)))
    with pytest.raises(UserError, match=r"fused is not possible: a defence .* each sample; use auto or loop"):
        trained("fused", net, Nested(how))


class Doubling(torch.autograd.Function):
    """A function with a slope of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        return 3 * slope


class Applied(nn.Linear):
    """Ends in a function of its own, or in a checkpoint."""

    def __init__(self, how: str) -> None:
        super().__init__(64, 10)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x.flatten(1))
        if self.how == "function":
            return cast("Tensor", Doubling.apply(found))
        return cast("Tensor", checkpoint(self.again, found, use_reentrant=self.how == "reentrant"))

    def again(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight[:, :10]).relu()


@pytest.mark.parametrize("how", ["function", "reentrant"])
def test_an_autograd_function_that_would_lose_the_gradient_is_refused(how: str) -> None:
    net = drawn(lambda: Applied(how))
    with pytest.raises(UserError, match=r"fused is not possible: the model has a custom autograd function \(.*; use"):
        trained("fused", net)
    assert float(trained("loop", net)[0].tensors["weight"].abs().max()) > 0


def test_a_checkpoint_gives_the_loops_numbers() -> None:
    net = drawn(lambda: Applied("checkpoint"))
    assert_close(trained("fused", net), trained("loop", net), 1e-10)


def test_refusals_are_those_of_vmap() -> None:
    private = DpSgd(noise_multiplier=1.0)
    for model, defences, reason in (
        (lenet, [private], "the defence DpSgd"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 10)).train(), [], "dropout"),
        (lambda: Residual().train(), [], "batch norm in training mode"),
    ):
        net = model().double()
        for way in ("vmap", "fused"):
            with pytest.raises(
                UserError, match=f"training.vectorise: {way} is not possible: .*{reason}.*use auto or loop"
            ):
                trained(way, net, *defences)
