"""Number types: complex, half, double and whole-number tensors are handled or refused wherever a model enters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayfed
from rayfed.attacks.external_update import observe
from rayfed.core.number_types import check_model
from rayfed.crypto.layout import flatten_update
from rayfed.defences.noise import clipped, sample_norms
from rayfed.errors import UserError
from rayfed.gradients import clipped as clipped_gradient
from rayfed.gradients import norm
from rayfed.models.build import build_model
from rayfed.models.notes import notes_of
from rayfed.poisoning.base import Insight
from rayfed.poisoning.gaussian_update import GaussianUpdate
from rayfed.privacy.sampling import add_noise, sample_gaussian
from rayfed.recording import Recorder
from rayfed.runs.api_args import read_source
from rayfed.samples import Pixels
from rayfed.simulation.inputs import prepare_inputs
from rayfed.update import LocalTraining, Update
from tests.helpers.attack_fixtures import seeded

SHAPE = (1, 8, 8)
HERE = "tests.core.test_number_types"


class Dense(nn.Module):
    """Base of the models here: a hidden layer and a head."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 6)
        self.leave = nn.Linear(6, 10)
        if dtype is not None:
            self.to(dtype)

    def forward(self, images: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(images.flatten(1))))


class Waves(nn.Module):
    """Complex amplitudes of the columns' Fourier transform."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.amplitude = nn.Parameter(torch.full((5,), 0.5 + 0.5j), requires_grad=trained)
        self.leave = nn.Linear(40, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.leave((torch.fft.rfft(images) * self.amplitude).abs().flatten(1))


class Phase(Dense):
    """One complex number, without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.tensor(1j))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * (1 + self.phase.real)


class RealPairs(nn.Module):
    """`Waves` as its message advises."""

    def __init__(self) -> None:
        super().__init__()
        self.amplitude = nn.Parameter(torch.full((5, 2), 0.5))
        self.leave = nn.Linear(40, 10)

    def forward(self, images: Tensor) -> Tensor:
        waves = torch.fft.rfft(images) * torch.view_as_complex(self.amplitude)
        return self.leave(waves.abs().square().flatten(1))


class Rotation(Dense):
    """A fixed table of complex numbers, such as rotary positions."""

    def __init__(self, moves: bool = False) -> None:
        super().__init__()
        self.moves = moves
        self.register_buffer("table", torch.polar(torch.ones(5), torch.arange(5.0)))

    def forward(self, images: Tensor) -> Tensor:
        if self.training and self.moves:
            self.table = self.table * 0.5
        turned = torch.fft.irfft(torch.fft.rfft(images) * self.table, n=8)
        return super().forward(turned)


class OwnType(Dense):
    """Converts inputs to the type of its weights."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.to(self.enter.weight.dtype))


class FixedType(Dense):
    """Converts inputs to one type, whatever its weights have."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.to(self.dtype)).float()


class HalfHead(Dense):
    """The last layer alone is in half precision."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own
        self.leave.half()

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.enter(images.flatten(1)))
        return self.leave(hidden.to(self.leave.weight.dtype if self.own else torch.float16)).float()


class PreciseMean(Dense):
    """A statistic that NumPy computed, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(0.1, dtype=torch.float64))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward((images - self.mean).float())


class Whole(Dense):
    """Frozen parameters of whole numbers: an order, a mask, and packed weights, the first of all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(5, -1, -1), requires_grad=False)
        self.kept = nn.Parameter(torch.tensor([True] * 5 + [False]), requires_grad=False)
        self.packed = nn.Parameter(torch.full((6,), 3, dtype=torch.int8), requires_grad=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.enter(images.flatten(1)))
        return self.leave(hidden[:, self.order] * self.kept * self.packed / 3)


class Predicted(Dense):
    """Gives classes in place of logits."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).long()


class Setting(Dense):
    """Changes PyTorch's default type as it is made."""

    def __init__(self) -> None:
        torch.set_default_dtype(torch.float64)
        super().__init__()


@pytest.fixture
def default_type() -> Iterator[None]:
    """Restore PyTorch's default type after the test."""
    yield
    torch.set_default_dtype(torch.float32)


def built(kind: type[nn.Module], **parameters: Any) -> nn.Module:
    return build_model(f"{HERE}:{kind.__name__}", parameters, SHAPE, 10, seed=0)


def scenario(model: str, *defences: Any, **fields: Any) -> dict[str, Any]:
    return {
        "name": "types",
        "data": {"name": "digits", "size": 8, "train_samples": 20, "test_samples": 10},
        "model": {"name": f"{HERE}:{model}"},
        "training": {"epochs": 1, "batch_size": 5, "lr": 0.1},
        "federation": {"rounds": 1, "clients": 2},
        "defences": list(defences),
        **fields,
    }


def gradient_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}


ENTRIES: dict[str, Callable[[nn.Module, Path], object]] = {
    "build": lambda model, _: built(type(model)),
    "launch": lambda model, folder: rayfed.launch(scenario(type(model).__name__), out=folder),
    "audit": lambda model, folder: rayfed.audit(
        f"{HERE}:{type(model).__name__}", rayfed.UserData("digits", size=8), out=folder,
        options=rayfed.AuditOptions(batches=[1], images=1, iterations=1),
    ),
    "defend": lambda model, _: rayfed.defend([{"name": "gaussian", "sigma": 1.0}], model, rounds=1),
    "record": lambda model, folder: Recorder(model, folder),
    "observe": lambda model, _: observe(
        model, model.state_dict(), Pixels(*SHAPE), 10, 1, gradient=gradient_of(model)
    ),
}  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("kind", "name"), [(Waves, "amplitude"), (Phase, "phase")])
def test_complex_parameters_are_refused_wherever_a_model_enters(
    entry: str, kind: type[nn.Module], name: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=name):
        ENTRIES[entry](kind(), tmp_path)


def test_frozen_complex_parameters_are_refused() -> None:
    with pytest.raises(UserError, match="amplitude"):
        built(Waves, trained=False)


@pytest.mark.parametrize("entry", ["defend", "record", "observe"])
def test_a_trained_parameter_in_half_precision_is_refused_where_it_cannot_be_converted(
    entry: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="bfloat16"):
        ENTRIES[entry](Dense(torch.bfloat16), tmp_path)


def test_frozen_parameters_may_have_any_real_type() -> None:
    model = Whole()
    model.enter.half().requires_grad_(False)
    check_model(model, "Whole")


def test_as_pairs_of_real_numbers_both_parts_get_noise() -> None:
    model, steps = built(RealPairs), 30
    guard = rayfed.defend(
        [{"name": "dp_sgd", "clip": 1.0, "noise_multiplier": 50.0}],
        model,
        rounds=1,
        samples=4,
        batch_size=4,
        steps=steps,
        seed=0,
    )
    parts = []
    for _ in range(steps):
        guard.backward(model, torch.rand(4, *SHAPE), torch.tensor([0, 1, 2, 3]))
        parts.append(model.amplitude.grad.clone())
    real, imaginary = torch.cat(parts).unbind(1)  # 150 numbers each, of deviation 50 / 4
    assert 10 < real.std() < 15
    assert 10 < imaginary.std() < 15


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool, torch.bfloat16, torch.float16])
def test_noise_and_guaranteed_norms_take_real_floats_only(dtype: torch.dtype) -> None:
    tensors = {"weight": torch.ones(3), "odd": torch.ones(2, 2).to(dtype)}
    update = Update(0, 0, tensors, {}, 1, 0.0)
    insight = Insight(clients=1, honest=(), generator=torch.Generator())
    for act in (
        lambda: add_noise(tensors, 1.0, sample_gaussian, torch.Generator()),
        lambda: clipped(tensors, 1.0, 2),
        lambda: sample_norms(tensors["odd"]),
        lambda: flatten_update(update),
        lambda: GaussianUpdate().poison_update(update, insight),
    ):
        with pytest.raises(UserError):
            act()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
def test_norms_take_no_complex_and_no_whole_numbers(dtype: torch.dtype) -> None:
    tensors = {"weight": torch.ones(3), "odd": torch.ones(2).to(dtype)}
    for act in (norm, lambda tensors: clipped_gradient(tensors, 1.0)):
        with pytest.raises(UserError, match="odd"):
            act(tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_in_another_precision_runs_in_float32_with_a_note(dtype: torch.dtype) -> None:
    model = built(OwnType, dtype=dtype)
    reference = built(Dense)
    assert len(notes_of(model)) == 1
    assert not notes_of(reference)
    for name, tensor in model.named_parameters():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, reference.get_parameter(name).to(dtype).float(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "parameters", "tensor"), [(HalfHead, {"own": True}, "leave.weight"), (PreciseMean, {}, "mean")]
)
def test_a_part_in_another_precision_is_converted(
    kind: type[nn.Module], parameters: dict[str, Any], tensor: str
) -> None:
    model = built(kind, **parameters)
    state = model.state_dict()
    assert {t.dtype for t in state.values()} == {torch.float32}
    assert any(tensor in note for note in notes_of(model))


@pytest.mark.parametrize(
    ("kind", "parameters", "named"),
    [
        (FixedType, {"dtype": torch.bfloat16}, "bfloat16"),
        (FixedType, {"dtype": torch.float64}, "float64"),
        (HalfHead, {"own": False}, "float16"),
    ],
)
def test_a_model_that_needs_another_precision_is_refused_by_its_name(
    kind: type[nn.Module], parameters: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        built(kind, **parameters)


@pytest.mark.usefixtures("default_type")
def test_another_default_type_is_refused() -> None:
    with pytest.raises(UserError, match="float64"):
        built(Setting)
    with pytest.raises(UserError, match="float64"):  # it is in force still
        built(Dense)


def test_outputs_that_are_no_logits_are_refused() -> None:
    with pytest.raises(UserError, match="int64"):
        built(Predicted)


def test_constant_complex_buffers_stay_and_moving_ones_are_refused() -> None:
    assert built(Rotation).table.dtype == torch.complex64
    with pytest.raises(UserError, match="table"):
        built(Rotation, moves=True)


def test_frozen_parameters_of_whole_numbers_are_neither_trained_nor_sent(tmp_path: Path) -> None:
    run = rayfed.launch(scenario("Whole", {"name": "dp_sgd", "noise_multiplier": 1.0}), out=tmp_path)
    assert run.rounds["clients"].to_pylist() == [2]
    values = 64 * 6 + 6 + 6 * 10 + 10
    assert run.clients["sent_bytes"].to_pylist() == [4 * values] * 2


def test_a_model_whose_first_parameter_is_of_whole_numbers_is_recorded(tmp_path: Path) -> None:
    model = Whole()
    model._parameters = dict(reversed(model._parameters.items()))
    images, labels = torch.rand(3, *SHAPE, generator=seeded(0)[0]), torch.tensor([1, 2, 3])
    sent = {name: t.clone() for name, t in model.state_dict().items()}
    nn.functional.cross_entropy(model(images), labels).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
    with Recorder(model, tmp_path, LocalTraining()) as recorder:
        recorder.round(sent, model.state_dict(), (images, labels))
    assert (tmp_path / "recording.json").exists()


def test_a_complex_state_is_not_taken_for_a_real_model() -> None:
    model = Dense()
    state = {name: t.to(torch.complex64) for name, t in model.state_dict().items()}
    with pytest.raises(UserError, match="complex64"):
        observe(model, state, Pixels(*SHAPE), 10, 1, gradient=gradient_of(model))


def test_notes_on_conversions_are_shown_once_for_a_run() -> None:
    inputs = prepare_inputs(read_source(scenario("OwnBfloat16"), ()))
    assert sum("bfloat16" in remark for remark in inputs.remarks) == 1


class OwnBfloat16(OwnType):
    """Half precision throughout, without parameters to give."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)
