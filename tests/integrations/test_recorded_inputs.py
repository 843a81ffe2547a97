"""Recordings take labels and states as users have them, or refuse them; all that was recorded is replayed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayfed import record
from rayfed.audits import replay
from rayfed.core.arrays import name_arrays
from rayfed.core.losses import BinaryCrossEntropy, CausalLM, CrossEntropy, MeanSquaredError
from rayfed.core.recording_checks import Normalisation, check_round
from rayfed.core.targets import to_targets
from rayfed.errors import UserError
from rayfed.evidence.methods import Method
from rayfed.integrations.flower import _in_order
from rayfed.integrations.nvflare import _moved
from rayfed.integrations.watch import Watch
from rayfed.recording import Recording
from rayfed.update import LocalTraining
from tests.helpers.command import run

ONE = LocalTraining(steps=1, lr=0.1)
CLASSES = torch.tensor([2, 0, 4, 4])


class Small(nn.Module):
    """A network with counters, statistics, a mask of infinities and a buffer that no state dict has."""

    def __init__(self, image_shape: tuple[int, ...] = (2, 4, 4), classes: int = 5) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(image_shape[0], 3, 3), nn.BatchNorm2d(3)
        self.head = nn.Linear(12, classes)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("places", torch.arange(3), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.norm(self.conv(images))).flatten(1))
        return logits


def images(count: int = 4) -> Tensor:
    return torch.randint(0, 256, (count, 2, 4, 4), generator=torch.Generator().manual_seed(3)) / 255


def model(classes: int = 5) -> Small:
    torch.manual_seed(1)
    return Small(classes=classes)


def trained(
    net: nn.Module, targets: Tensor, loss: Callable[..., Tensor] = F.cross_entropy
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a client is sent, and what it returns after a step of PyTorch's SGD."""
    own = copy.deepcopy(net)
    loss(own(images(len(targets))), targets).backward()
    torch.optim.SGD(own.parameters(), lr=0.1).step()
    return copy.deepcopy(net.state_dict()), own.state_dict()


def replayed(folder: Path, *options: str) -> int:
    arguments = ("--model", f"{__name__}:Small", "--iterations", "2", "--executor", "local")
    code, output = run("replay", str(folder), *arguments, "--out", str(folder.parent / "runs"), *options)
    assert "rror" not in output, output
    return code


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "METHODS", (Method("analytic"),))


TAKEN: dict[str, Any] = {
    "int64": CLASSES,
    "a column": CLASSES[:, None],
    "a column of bytes": CLASSES.to(torch.uint8)[:, None],
    "one-hot": F.one_hot(CLASSES, 5),
    "one-hot floats": F.one_hot(CLASSES, 5).double(),
    "whole floats": CLASSES.half(),
    "a list": CLASSES.tolist(),
    "a nested list": [[int(label)] for label in CLASSES],
    "tensors in a list": list(CLASSES),
    "int32 of NumPy": CLASSES.numpy().astype(np.int32),
    "uint16 of NumPy": CLASSES.numpy().astype(np.uint16),
    "another byte order": CLASSES.numpy().astype(">i8"),
}


@pytest.mark.parametrize("how", TAKEN)
def test_class_labels_of_any_form_become_indices(how: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = to_targets(TAKEN[how], CrossEntropy(), 4, 5)
    assert (found.dtype, found.tolist()) == (torch.int64, CLASSES.tolist())


REFUSED: dict[str, Any] = {
    "too many": torch.zeros(5, dtype=torch.int64),
    "too few": torch.zeros(3, dtype=torch.int64),
    "none": None,
    "one number": 3,
    "a row": CLASSES[None],
    "negative": torch.tensor([2, 0, -1, 4]),
    "out of range": torch.tensor([2, 0, 5, 4]),
    "ignored": torch.tensor([2, 0, -100, 4]),
    "fractions": CLASSES + 0.5,
    "NaN": torch.tensor([2.0, 0.0, torch.nan, 4.0]),
    "infinite": torch.tensor([2.0, 0.0, torch.inf, 4.0]),
    "soft": torch.full((4, 5), 0.2),
    "no class": torch.zeros(4, 5),
    "three axes": CLASSES[:, None, None],
    "complex": CLASSES.to(torch.complex64),
    "names": ["cat", "dog", "cat", "cow"],
    "ragged": [[1], [2, 3], [1], [0]],
}


@pytest.mark.parametrize("how", REFUSED)
def test_other_labels_are_refused_before_anything_is_written(how: str, tmp_path: Path) -> None:
    net = model()
    sent, returned = trained(net, CLASSES)
    with pytest.raises(UserError), record(net, tmp_path / "u", ONE, truth=True) as recorder:
        recorder.round(sent, returned, (images(), REFUSED[how]))
    assert not (tmp_path / "u").exists()


NUMBERS = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])


def test_numbers_have_one_for_each_output() -> None:
    for loss in (MeanSquaredError(), BinaryCrossEntropy()):
        for given in (NUMBERS, NUMBERS.long(), NUMBERS.double().numpy(), NUMBERS.tolist()):
            found = to_targets(given, loss, 3, 2)
            assert (found.dtype, found.tolist()) == (torch.float32, NUMBERS.tolist())
        assert to_targets(NUMBERS[:, 0], loss, 3, 1).shape == (3, 1)
        for wrong in (NUMBERS[:, 0], NUMBERS[:2], NUMBERS * torch.nan, NUMBERS.double() * 1e300, NUMBERS.T):
            with pytest.raises(UserError):
                to_targets(wrong, loss, 3, 2)
    with pytest.raises(UserError):
        to_targets(NUMBERS * 2, BinaryCrossEntropy(), 3, 2)
    assert to_targets(NUMBERS * -7, MeanSquaredError(), 3, 2).min() == -7
    with pytest.raises(UserError):
        to_targets(torch.zeros(3, 4, dtype=torch.int64), CausalLM(), 3, 2)


@pytest.mark.engine
@pytest.mark.parametrize("how", ["a column of bytes", "one-hot", "whole floats", "a nested list"])
def test_recorded_classes_are_replayed(how: str, tmp_path: Path) -> None:
    net = model()
    sent, returned = trained(net, CLASSES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with record(net, tmp_path / "u", ONE, truth=True) as recorder:
            recorder.round(sent, returned, (images(), TAKEN[how]))
    [update] = Recording(tmp_path / "u").updates
    assert torch.equal(update.truth[1], CLASSES)
    assert replayed(tmp_path / "u") == 0


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "function"),
    [("mean_squared_error", F.mse_loss), ("binary_cross_entropy", F.binary_cross_entropy_with_logits)],
)
def test_recorded_numbers_are_replayed_with_the_recorded_loss(
    name: str, function: Callable[..., Tensor], tmp_path: Path
) -> None:
    net = model(2)
    sent, returned = trained(net, NUMBERS, function)
    with record(net, tmp_path / "u", ONE, truth=True, loss=name) as recorder:
        recorder.round(sent, returned, (images(3), NUMBERS.numpy()))
    recording = Recording(tmp_path / "u")
    assert recording.header.loss == {"name": name}
    assert torch.equal(recording.updates[0].truth[1], NUMBERS)
    assert replayed(tmp_path / "u") == 0


def test_a_recording_without_a_loss_is_written_as_before(tmp_path: Path) -> None:
    net = model()
    with record(net, tmp_path, ONE) as recorder:
        recorder.round(*trained(net, CLASSES), (images(), CLASSES))
    assert "loss" not in (tmp_path / "recording.json").read_text()


@pytest.mark.parametrize("loss", ["crossentropy", {"label_smoothing": 0.1}, {"name": "cross_entropy", "x": 1}, 3])
def test_an_unknown_loss_is_refused(loss: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        record(model(), tmp_path, ONE, loss=loss)


INPUTS: dict[str, Any] = {
    "NaN": images() * torch.nan,
    "bytes": (images() * 255).byte(),
    "another size": torch.rand(4, 2, 5, 5),
    "other channels": torch.rand(4, 1, 4, 4),
    "no batch": images()[0],
    "none": images()[:0],
    "fewer than labels": images()[:3],
    "no array": None,
}


@pytest.mark.parametrize("how", INPUTS)
def test_inputs_that_the_model_does_not_take_are_refused(how: str, tmp_path: Path) -> None:
    net = model()
    recorder = record(net, tmp_path / "u", ONE, truth=True)
    sent, returned = trained(net, CLASSES)
    with pytest.raises(UserError):
        recorder.round(sent, returned, (INPUTS[how], CLASSES))
    recorder.round(sent, returned, (images().numpy(), CLASSES))  # what was refused leaves no trace
    assert [update.name for update in Recording(tmp_path / "u").updates] == ["round 0, client 0"]


def arrays(state: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in state.items()}


FORMS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "arrays by name": arrays,
    "arrays in a list": lambda state: list(arrays(state).values()),
    "arrays in an array": lambda state: np.array([*arrays(state).values(), None], dtype=object)[:-1],
    "a generator": lambda state: (tensor.numpy() for tensor in state.values()),
    "float64": lambda state: [value.astype(np.float64) for value in arrays(state).values()],
    "floats of torch.Tensor": lambda state: {name: torch.Tensor(value) for name, value in arrays(state).items()},
    "floats in a list": lambda state: [torch.Tensor(value) for value in arrays(state).values()],
    "numbers": lambda state: [tensor.tolist() for tensor in state.values()],
    "without counters": lambda state: [t.numpy() for name, t in state.items() if "tracked" not in name],
    "another byte order": lambda state: {n: v.astype(v.dtype.newbyteorder(">")) for n, v in arrays(state).items()},
}


@pytest.mark.parametrize("form", FORMS)
def test_states_of_any_form_are_recorded_as_the_state_dict_is(form: str, tmp_path: Path) -> None:
    net = model()
    sent, returned = trained(net, CLASSES)
    with record(net, tmp_path, ONE) as recorder:
        recorder.round(FORMS[form](sent), FORMS[form](returned), (images(), CLASSES))
    [update] = Recording(tmp_path).updates
    for found, state in ((update.sent, sent), (update.returned, returned)):
        for name, tensor in state.items():
            if "tracked" not in name:
                assert torch.equal(found[name].to(tensor.dtype), tensor), name
    assert not update.sent.get("norm.num_batches_tracked", torch.zeros(())).ndim


def test_gradients_may_be_arrays_in_the_order_of_the_parameters(tmp_path: Path) -> None:
    net = model()
    F.cross_entropy(net(images()), CLASSES).backward()
    gradient = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    with record(net, tmp_path) as recorder:
        recorder.round(net.state_dict(), [g.numpy() for g in gradient.values()], (images(), CLASSES))
    [update] = Recording(tmp_path).updates
    assert all(torch.equal(update.returned[name], g) for name, g in gradient.items())


@pytest.mark.engine
def test_recorded_arrays_are_replayed(tmp_path: Path) -> None:
    net = model()
    sent, returned = trained(net, CLASSES)
    with record(net, tmp_path / "u", ONE, truth=True) as recorder:
        for form in (FORMS["arrays in a list"], FORMS["floats of torch.Tensor"]):
            recorder.round(form(sent), form(returned), (images(), CLASSES))
    assert [(u.round, u.client) for u in Recording(tmp_path / "u").updates] == [(0, 0), (0, 1)]
    assert replayed(tmp_path / "u") == 0


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda values: values[:-2], ["head.weight", "(5, 12)"]),
        (lambda values: [*values, np.zeros((7, 2))], ["(7, 2)"]),
        (lambda values: [values[1], values[0], *values[2:]], ["'mask'", "(2, 2)", "(3, 2, 3, 3)"]),
        (lambda values: [*values[:-1], np.zeros(6)], ["head.bias", "(6,)", "(5,)"]),
        (lambda values: [*values[:-1], "five"], []),
        (lambda values: [], ["mask"]),
        (lambda values: np.concatenate([value.ravel() for value in values]), []),
        (lambda values: model(), []),
        (lambda values: None, []),
    ],
)
def test_lists_that_are_not_the_models_are_refused(
    change: Callable[[Any], Any], names: list[str], tmp_path: Path
) -> None:
    net = model()
    sent, returned = trained(net, CLASSES)
    before, after = ([tensor.numpy() for tensor in state.values()] for state in (sent, returned))
    for given in ((change(before), returned), (sent, change(after))):
        with pytest.raises(UserError) as error, record(net, tmp_path / "u", ONE) as recorder:
            recorder.round(*given, (images(), CLASSES))
        assert all(name in str(error.value) for name in names), error.value


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["head.weight", "norm.running_var"])
def test_states_that_are_not_finite_are_refused_by_name(value: float, name: str, tmp_path: Path) -> None:
    net = model()
    sent, returned = trained(net, CLASSES)
    for state in (sent, returned):
        kept = state[name].clone()
        state[name].view(-1)[1] = value
        with pytest.raises(UserError, match=name), record(net, tmp_path / "u", ONE) as recorder:
            recorder.round(sent, returned, (images(), CLASSES))
        state[name] = kept
    with record(net, tmp_path / "u", ONE) as recorder:  # its mask has infinities of its own
        recorder.round(sent, returned, (images(), CLASSES))


def test_numbers_beyond_the_models_type_are_refused() -> None:
    net = model()
    sent, returned = trained(net, CLASSES)
    sent["head.bias"] = sent["head.bias"].double() * 1e300
    with pytest.raises(UserError, match=r"head\.bias"), record(net, "unused", ONE) as recorder:
        recorder.round(sent, returned, (images(), CLASSES))


@pytest.mark.parametrize(
    "local",
    [
        LocalTraining(1, lr=torch.inf),
        LocalTraining(1, lr=torch.nan),
        LocalTraining(1, lr=0.0),
        LocalTraining(0),
        LocalTraining(1, 0),
        LocalTraining(1, momentum=1.0),
        LocalTraining(1, weight_decay=-torch.inf),
        LocalTraining(1, clip_norm=0.0),
        LocalTraining(1, lr="0.1"),  # type: ignore[arg-type]
    ],
)
def test_steps_that_cannot_be_repeated_are_refused(local: LocalTraining, tmp_path: Path) -> None:
    net = model()
    with pytest.raises(UserError), record(net, tmp_path / "u", local) as recorder:
        recorder.round(*trained(net, CLASSES), (images(), CLASSES))
    assert not (tmp_path / "u").exists()


def test_updates_that_cannot_be_replayed_together_are_refused(tmp_path: Path) -> None:
    net = model()
    sent, returned = trained(net, CLASSES)
    other = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in sent.items()}
    batch = images(), CLASSES
    with record(net, tmp_path, ONE, truth=True) as recorder:
        recorder.round(sent, returned, batch, round=4, client=0)
    for process in (recorder, record(net, tmp_path, ONE, truth=True)):  # another one finds the first's update
        for given, options in (
            ((other, returned), {}),
            ((sent, returned), {"local": LocalTraining(1, lr=0.2)}),
        ):
            with pytest.raises(UserError):
                process.round(*given, batch, round=4, client=1, **options)
    with pytest.raises(UserError):
        record(net, tmp_path, ONE).round(sent, returned, batch, round=4, client=1)  # without the truth
    for wrong in ({"round": -1}, {"client": -1}, {"round": 0.5}):
        with pytest.raises(UserError):
            recorder.round(sent, returned, batch, **wrong)
    counted = sent | {"norm.num_batches_tracked": torch.tensor(9)}
    recorder.round(counted, returned, batch, round=4, client=1)
    assert [(u.round, u.client) for u in Recording(tmp_path).updates] == [(4, 0), (4, 1)]


def rows(*clients: tuple[int, LocalTraining]) -> list[dict[str, Any]]:
    return [{"kind": "state", "samples": n, "sent": "a", "truth": None, **vars(local)} for n, local in clients]


def test_clients_with_fewer_samples_than_a_batch_share_its_size() -> None:
    shared = check_round(rows((8, LocalTraining(2, 4)), (3, LocalTraining(2, 3))), "w")
    assert shared == (LocalTraining(2, 4), None)
    assert check_round(rows((8, LocalTraining(2)), (3, LocalTraining(2))), "w") == (LocalTraining(2), None)
    assert check_round(rows((4, LocalTraining(4, 2)), (7, LocalTraining(8, 2))), "w")[1] == 2
    with pytest.raises(UserError):
        check_round(rows((8, LocalTraining(2, 4)), (8, LocalTraining(2, 2))), "w")


def test_settings_of_a_recording_are_checked_at_its_beginning(tmp_path: Path) -> None:
    for mean, std in (([0.5, 0.5], [0.0, 1.0]), ([torch.nan, 0.5], [1.0, 1.0]), (["a"], [1.0])):
        with pytest.raises(UserError):
            Normalisation(mean, std)  # type: ignore[arg-type]
    net = model()
    for wrong in (
        {"normalise": ([0.5], [1.0])},
        {"shape": (4, 4)},
        {"shape": (2, 4, 0)},
        {"shape": (2, 4.5, 4)},
    ):
        with pytest.raises(UserError):
            record(net, tmp_path, ONE, **wrong)  # type: ignore[arg-type]
    sent, returned = trained(net, CLASSES)
    for classes in (3, 0, 5.5):
        with pytest.raises(UserError):
            record(net, tmp_path, ONE, classes=classes).round(sent, returned, (images(), CLASSES))  # type: ignore[arg-type]
    for batch in (images(), {"inputs": images()}, (images(),), "four"):
        with pytest.raises(UserError):
            record(net, tmp_path, ONE).round(sent, returned, batch)  # type: ignore[arg-type]


def test_names_of_a_flower_client_of_arrays_are_its_order() -> None:
    numbered = {str(place): torch.zeros(place) for place in range(12)}
    assert isinstance(_in_order(numbered), list)
    named = {"1": torch.zeros(1), "0": torch.zeros(1)}
    assert _in_order(named) is named


def test_differences_that_do_not_fit_what_was_sent_are_refused() -> None:
    sent = {"a": torch.ones(2), "n.num_batches_tracked": torch.tensor(1)}
    moved = _moved(sent, {"a": torch.ones(2), "n.num_batches_tracked": torch.zeros(3)})
    assert torch.equal(moved["a"], torch.full((2,), 2.0))
    for wrong in ({"b": torch.ones(2)}, {"a": torch.ones(1)}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            _moved(sent, wrong)


def test_a_watched_model_is_called_on_one_tensor() -> None:
    class Two(nn.Module):
        def forward(self, first: Tensor, second: Tensor | None = None) -> Tensor:
            return first

    with Watch(Two), pytest.raises(UserError):
        Two()(first=torch.rand(2, requires_grad=True))
    with Watch(Two), pytest.raises(UserError):
        Two()(torch.rand(2), torch.rand(2))
    with Watch(Two) as watch:
        Two()(torch.rand(2, 3, requires_grad=True))
        Two()(torch.rand(2, 4, requires_grad=True))
    with pytest.raises(UserError):
        watch.seen(ONE)


def test_samples_in_half_precision_are_told_apart() -> None:
    net, inputs = nn.Linear(3, 2).bfloat16(), torch.rand(2, 3).bfloat16()
    with Watch(nn.Linear) as watch:
        net(torch.cat([inputs, inputs]))
    assert len(watch.seen(ONE).inputs) == 2


def test_arrays_by_name_leave_out_what_is_no_tensor() -> None:
    net = nn.Linear(2, 1)
    found = name_arrays("sent", {**net.state_dict(), "head._extra_state": {"step": 3}}, net)
    assert sorted(found) == ["bias", "weight"]
    with pytest.raises(UserError, match="weight"):
        name_arrays("sent", {"weight": None}, net)
