"""Gradients of single samples: one vmap call, or a loop with the same values for models that vmap refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import rayfed
from rayfed.core.vectorised import find_refusal, map_in_turn
from rayfed.defences import dcs2, dp_sgd
from rayfed.defences.base import Batch, Defence, Task
from rayfed.defences.dp_sgd import DpSgd
from rayfed.defences.fed_cdp import FedCdp
from rayfed.defences.grad_defense import sensitivity
from rayfed.defences.soteria import estimated_norms, jacobian_norms
from rayfed.errors import UserError
from rayfed.gradients import buffers_of, gradient, per_sample_gradients, vmap_refusal, weights_of
from rayfed.models.build import build_model
from rayfed.runs.api_args import read_source
from rayfed.scenario import Training
from rayfed.simulation.client.cohort import cohort_updates
from rayfed.simulation.client.local import gradient_method
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.virtual_time.work import _Counter

SHAPE = (1, 8, 8)
HERE = "tests.core.test_vectorised"
LABELS = torch.tensor([3, 0, 3, 1])


class Reader(nn.Module):
    """A recurrent layer over the columns of an image."""

    def __init__(self, kind: str = "GRU") -> None:
        super().__init__()
        self.columns = getattr(nn, kind)(8, 5, batch_first=True)
        self.leave = nn.Linear(5, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.leave(self.columns(images.squeeze(1).mT)[0].mean(1))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 6)
        self.leave = nn.Linear(6, 4)

    def hidden(self, images: Tensor) -> Tensor:
        return torch.tanh(self.enter(images.flatten(1)))

    def forward(self, images: Tensor) -> Tensor:
        return self.leave(self.hidden(images))


class Branching(Dense):
    """Takes another way for bright images."""

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.hidden(images)
        return self.leave(hidden if images.mean() > 0.5 else 2 * hidden)


class Reading(Dense):
    """Reads a number out of a tensor."""

    def forward(self, images: Tensor) -> Tensor:
        return self.leave(self.hidden(images) / (1 + images.amax().item()))


class Filling(Dense):
    """Writes into a tensor that it made."""

    def forward(self, images: Tensor) -> Tensor:
        sums = torch.zeros(len(images), 6)
        for part in self.hidden(images).split(3, 1):
            sums[:, :3] += part
        return self.leave(sums)


class _Old(torch.autograd.Function):
    """The cube, as autograd functions were written before `torch.func`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values**3

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        return 3 * values**2 * slope


class Cubing(Dense):
    def forward(self, images: Tensor) -> Tensor:
        return self.leave(_Old.apply(self.hidden(images)))


class Instances(nn.Module):
    """Keeps running statistics of its instances."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 2, 3)
        self.norm = nn.InstanceNorm2d(2, affine=True, track_running_stats=True)
        self.leave = nn.Linear(72, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.norm(self.enter(images))).flatten(1))


class Comparing(Dense):
    """Compares each sample with the second one, so it needs two."""

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.hidden(images)
        return self.leave(hidden - hidden[1:2])


class Dropping(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def hidden(self, images: Tensor) -> Tensor:
        return self.dropout(super().hidden(images))


REFUSED = [Reader, Branching, Reading, Filling, Cubing, Instances]


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def images(count: int = 4, seed: int = 0) -> Tensor:
    return torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(seed))


def task_of(model: nn.Module, client: int = 0, **changes: Any) -> Task:
    data = Batch(images(seed=client), LABELS, places=torch.arange(4))
    task = Task(
        client=client,
        round=0,
        model=model,
        weights=weights_of(model),
        buffers=buffers_of(model),
        data=data,
        generator=torch.Generator().manual_seed(client),
        order=client,
        batch_size=4,
        classes=4,
    )
    return task.replace(**changes)


def alone(model: nn.Module, place: int, weights: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The gradient of one sample, by PyTorch alone."""
    own = {name: w.clone().requires_grad_() for name, w in (weights or weights_of(model)).items()}
    state = own | {name: b.clone() for name, b in model.named_buffers()}
    rows = slice(place, place + 1)
    nn.functional.cross_entropy(functional_call(model, state, (images()[rows],)), LABELS[rows]).backward()
    return {name: w.grad for name, w in own.items()}


@pytest.mark.parametrize("kind", REFUSED)
def test_gradients_of_models_that_vmap_refuses_are_those_of_each_sample(kind: type[nn.Module]) -> None:
    model = model_of(kind)
    weights, buffers = weights_of(model), buffers_of(model)
    assert vmap_refusal(model, weights, buffers, images()[:1], LABELS[:1])
    each = per_sample_gradients(model, weights, buffers, images(), LABELS)
    for place in range(4):
        for name, expected in alone(model, place).items():
            torch.testing.assert_close(each[name][place], expected)


@pytest.mark.parametrize("kind", [Dense, Reader])
def test_gradients_of_samples_do_not_depend_on_the_callers_mode(kind: type[nn.Module]) -> None:
    model = model_of(kind)
    expected = per_sample_gradients(model, weights_of(model), {}, images(), LABELS)
    with torch.no_grad():
        found = per_sample_gradients(model, weights_of(model), {}, images(), LABELS)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("defence", [DpSgd, FedCdp])
def test_samples_of_models_that_vmap_refuses_are_clipped_one_by_one(
    defence: type[DpSgd], kind: type[nn.Module]
) -> None:
    model, clip = model_of(kind), 0.05
    task = task_of(model)
    sent, _ = gradient_method([defence(clip=clip, noise_multiplier=0.0)])(task, task.weights, task.data)
    expected = {name: torch.zeros_like(w) for name, w in task.weights.items()}
    for place in range(4):
        found = alone(model, place)
        length = torch.cat([g.flatten() for g in found.values()]).norm()
        for name, g in found.items():
            bound = length if defence is DpSgd else g.norm()
            expected[name] += g * min(1.0, clip / float(bound)) / 4
    for name, g in expected.items():
        torch.testing.assert_close(sent[name], g)


@pytest.mark.parametrize("parameters", [{"hidden": [5]}, {"hidden": [5, 4], "activation": "sigmoid"}])
def test_loop_and_vmap_send_the_same(monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any]) -> None:
    model = build_model("mlp", parameters, SHAPE, 4, seed=1)
    task, sent = task_of(model), []
    for refused in ("", "refused"):
        monkeypatch.setattr(dp_sgd, "vmap_refusal", lambda *_, refused=refused: refused)
        defence = DpSgd(clip=0.1, noise_multiplier=1.0)
        again = task.replace(generator=torch.Generator().manual_seed(5))
        sent.append(gradient_method([defence])(again, task.weights, task.data))
    (one, loss), (other, other_loss) = sent
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(loss, other_loss)


@pytest.mark.parametrize("defence", [DpSgd(noise_multiplier=1.0), FedCdp(noise_multiplier=1.0, rounds=1)])
def test_updates_are_the_same_bits_in_any_cohort(defence: Defence) -> None:
    training = Training(epochs=2, batch_size=2, lr=0.1)
    together = list(cohort_updates([task_of(model_of(Reader), c) for c in range(3)], training, [defence]))
    for client in (2, 1, 0):
        [made] = cohort_updates([task_of(model_of(Reader), client)], training, [defence])
        assert all(torch.equal(t, together[client].tensors[name]) for name, t in made.tensors.items())


def test_a_trial_moves_no_generator_and_no_buffer_and_is_not_counted() -> None:
    model = model_of(Dropping).train()
    before = torch.get_rng_state()
    with _Counter() as counter:
        vmap_refusal(model, weights_of(model), {}, images()[:1], LABELS[:1])
    assert torch.equal(before, torch.get_rng_state())
    assert counter.flops == 0
    model = model_of(Instances).train()
    buffers = buffers_of(model)
    vmap_refusal(model, weights_of(model), buffers, images()[:1], LABELS[:1])
    assert torch.equal(buffers["norm.running_mean"], torch.zeros(2))


def test_a_model_is_tried_once_in_its_modes() -> None:
    model, tried = model_of(Dense), []
    for _ in range(3):
        assert not find_refusal(model, "case", lambda: tried.append(1))
    assert len(tried) == 1
    model.eval()
    assert not find_refusal(model, "case", lambda: tried.append(2))
    assert len(tried) == 2


def test_memory_that_runs_out_is_no_refusal() -> None:
    def trial() -> None:
        raise torch.OutOfMemoryError("none left")

    with pytest.raises(torch.OutOfMemoryError):
        find_refusal(model_of(Dense), "case", trial)


def test_rows_of_dictionaries_and_tuples_are_stacked() -> None:
    doubled = map_in_turn(lambda own, row: ({"sum": own["a"] + row.sum()}, row[0]))
    sums, first = doubled({"a": torch.tensor([10.0, 20.0])}, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert sums["sum"].tolist() == [13.0, 27.0]
    assert first.tolist() == [1.0, 3.0]


def scenario(model: str, defence: dict[str, Any] | None = None, **training: Any) -> Any:
    document = {
        "name": "loops",
        "data": {"name": "digits", "size": 8, "train_samples": 20, "test_samples": 10, "public": 0.2},
        "model": {"name": f"{HERE}:{model}"},
        "training": {"epochs": 1, "batch_size": 5, "lr": 0.1} | training,
        "federation": {"rounds": 1, "clients": 2},
        "defences": [defence] if defence else [],
    }
    return read_source(document, ())


class TenReader(Reader):
    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(5, 10)


class TenDense(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(6, 10)


class TenComparing(Comparing):
    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(6, 10)


class TenBranching(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(6, 10)


class TenInstances(Instances):
    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(72, 10)


PRIVATE = [{"name": "dp_sgd", "noise_multiplier": 1.0}, {"name": "fed_cdp", "noise_multiplier": 1.0}]


@pytest.mark.parametrize("defence", PRIVATE)
def test_the_account_does_not_depend_on_the_way(defence: dict[str, Any]) -> None:
    loop, together = (prepare_inputs(scenario(model, defence)) for model in ("TenReader", "TenDense"))
    assert any("vmap" in remark for remark in loop.remarks)
    assert not together.remarks
    if defence["name"] == "dp_sgd":  # of fed_cdp it depends on the number of layers
        assert loop.privacy[0]["epsilon"] == together.privacy[0]["epsilon"]
    assert loop.privacy[0]["epsilon"] > 0


def test_running_statistics_of_instances_leave_no_guarantee() -> None:
    inputs = prepare_inputs(scenario("TenInstances", PRIVATE[0]))
    assert inputs.privacy[0].get("epsilon") is None


@pytest.mark.parametrize("defence", [*PRIVATE, {"name": "dcs2"}])
def test_a_model_without_gradients_of_single_samples_is_refused_before_the_first_round(
    defence: dict[str, Any],
) -> None:
    with pytest.raises(UserError, match=defence["name"]):
        prepare_inputs(scenario("TenComparing", defence))


def test_in_a_loop_of_ones_own_the_defence_is_named_too() -> None:
    model = model_of(Comparing)
    guard = rayfed.defend([PRIVATE[0]], model, rounds=1, samples=4, batch_size=4, steps=1, seed=0)
    with pytest.raises(UserError, match="dp_sgd"):
        guard.backward(model, images(), LABELS)


def test_in_a_loop_of_ones_own_recurrent_models_are_defended() -> None:
    model = model_of(Reader)
    defence = {"name": "dp_sgd", "clip": 100.0, "noise_multiplier": 0.0}
    guard = rayfed.defend([defence], model, rounds=1, samples=4, batch_size=4, steps=1, seed=0)
    guard.backward(model, images(), LABELS)
    expected, _ = gradient(model, weights_of(model), {}, images(), LABELS)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


@pytest.mark.parametrize("vectorise", ["vmap", "fused"])
def test_clients_are_not_trained_together_where_vmap_refuses(vectorise: str) -> None:
    prepare_inputs(scenario("TenDense", vectorise=vectorise))
    with pytest.raises(UserError, match=vectorise):
        prepare_inputs(scenario("TenBranching", vectorise=vectorise))


def test_concealing_takes_the_same_slopes_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    task, slopes = task_of(model_of(Dense)), []
    for refused in (False, True):
        monkeypatch.setattr(dcs2, "_vmap_refused", lambda *_, refused=refused: refused)
        points = images(seed=1).requires_grad_()
        found, logits = dcs2._sample_gradients(task, task.weights, points, LABELS)
        slopes.append((found, logits, torch.autograd.grad(found.square().sum() + logits.sum(), points)[0]))
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", [Reader, Branching])
def test_images_are_concealed_for_models_that_vmap_refuses(kind: type[nn.Module]) -> None:
    task = task_of(model_of(kind))
    sent, _ = gradient_method([dcs2.Dcs2(iterations=2)])(task, task.weights, task.data)
    own, _ = gradient_method([])(task, task.weights, task.data)
    assert not all(torch.equal(sent[name], g) for name, g in own.items())
    assert all(t.isfinite().all() for t in sent.values())


def test_the_sensitivity_of_a_recurrent_model_is_that_of_differences() -> None:
    model = model_of(Reader).double()
    weights, image = weights_of(model), images()[:1].double()
    found = sensitivity(model, weights, {}, Batch(image, LABELS[:1]))
    slopes: dict[str, list[Tensor]] = {name: [] for name in weights}
    for step in 1e-5 * torch.eye(image.numel(), dtype=torch.float64):
        ahead, behind = (
            gradient(model, weights, {}, image + side * step.view_as(image), LABELS[:1])[0] for side in (1, -1)
        )
        for name in weights:
            slopes[name].append((ahead[name] - behind[name]).sum() / 2e-5)
    for name, values in slopes.items():
        torch.testing.assert_close(found[name], torch.stack(values).norm(), rtol=1e-6, atol=1e-9)


def test_norms_of_features_are_the_same_either_way() -> None:
    model = model_of(Dense)
    for norms, more in ((jacobian_norms, ()), (estimated_norms, (8, torch.Generator()))):
        for argument in more:
            if isinstance(argument, torch.Generator):
                argument.manual_seed(3)
        one = norms(model.hidden, images(), *more)
        for argument in more:
            if isinstance(argument, torch.Generator):
                argument.manual_seed(3)
        torch.testing.assert_close(norms(model.hidden, images(), *more, in_turn=True), one)


def test_norms_of_a_recurrent_models_features_are_those_of_the_jacobian() -> None:
    model = model_of(Reader)

    def features(batch: Tensor) -> Tensor:
        return model.columns(batch.squeeze(1).mT)[0].mean(1)

    found = jacobian_norms(features, images(), in_turn=True)
    for place in range(4):
        jacobian = torch.autograd.functional.jacobian(lambda one: features(one[None])[0], images()[place])
        torch.testing.assert_close(found[place], jacobian.flatten(1).norm(dim=1))
