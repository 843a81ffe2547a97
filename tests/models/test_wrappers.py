"""Wrapped and compiled models are used without their wrappers, and left as they were where they are the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import weight_norm

import rayfed
from rayfed.attacks.closed_form.analytic import Analytic
from rayfed.attacks.external_update import observe
from rayfed.core import losses
from rayfed.errors import UserError
from rayfed.models.build import build_model
from rayfed.models.notes import notes_of
from rayfed.models.state import load_state
from rayfed.models.wrappers import bare_name, is_wrapped, unwrap, unwrapped
from rayfed.recording import Recording
from rayfed.samples import Pixels
from rayfed.update import LocalTraining
from tests.helpers.loop_fixtures import DP_SGD, GAUSSIAN, LOOP

SHAPE, CLASSES = (1, 5, 3), 4
Wrap = Callable[[nn.Module], nn.Module]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(15, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def compiled(model: nn.Module) -> nn.Module:
    """Compiled by a backend that fails, so that a test fails if anything is compiled."""
    wrapped: nn.Module = torch.compile(model, backend=_refuse)
    return wrapped


def _refuse(*_: object) -> None:
    raise AssertionError("nothing is to be compiled")


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=_refuse)
    return model


def by_method(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend=_refuse)  # type: ignore[method-assign]
    return model


class OtherDataParallel(nn.Module):
    """As other libraries have it; PyTorch's needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Tensor:
        outputs: Tensor = self.module(*inputs)
        return outputs


class CompiledClass(nn.Linear):
    @torch.compile(backend=_refuse)
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs)


def inside(wrap: Wrap) -> Wrap:
    def wrapped(model: nn.Module) -> nn.Module:
        assert isinstance(model, nn.Sequential)
        model[1] = wrap(model[1])
        return model

    return wrapped


def both(outer: Wrap, inner: Wrap) -> Wrap:
    return lambda model: outer(inner(model))


WRAPS: dict[str, Wrap] = {
    "parallel": nn.DataParallel,
    "other": OtherDataParallel,
    "compiled": compiled,
    "in place": in_place,
    "method": by_method,
    "parallel compiled": both(nn.DataParallel, compiled),
    "compiled parallel": both(compiled, nn.DataParallel),
    "parallel inside": inside(nn.DataParallel),
    "compiled inside": inside(compiled),
    "inside and outside": both(nn.DataParallel, inside(both(compiled, nn.DataParallel))),
}
every = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def factory(image_shape: tuple[int, ...], classes: int, kind: str = "parallel") -> nn.Module:
    return WRAPS[kind](net())


def of_class(image_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), CompiledClass(15, classes))


def data(count: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, *SHAPE, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


@every
def test_a_model_is_itself_inside_and_has_its_wrappers_afterwards(wrap: Wrap) -> None:
    plain, model = net(), wrap(net())
    names, parameters = list(model.state_dict()), {id(p) for p in model.parameters()}
    images, _ = data()
    with unwrapped(model) as bare:
        assert list(bare.state_dict()) == list(plain.state_dict())
        assert torch.equal(bare(images), plain(images))
        assert {id(p) for p in bare.parameters()} == parameters
    assert list(model.state_dict()) == names
    assert is_wrapped(model)
    assert not is_wrapped(unwrap(model))


@pytest.mark.parametrize("kind", WRAPS)
def test_a_built_model_has_no_wrappers_and_says_so(kind: str) -> None:
    built = build_model("tests.models.test_wrappers:factory", {"kind": kind}, SHAPE, CLASSES, seed=0)
    assert list(built.state_dict()) == list(net().state_dict())
    assert len(notes_of(built)) == 1
    assert torch.equal(built(data()[0]), net()(data()[0]))


def test_a_compiled_method_of_a_class_is_not_compiled() -> None:
    built = build_model("tests.models.test_wrappers:of_class", {}, SHAPE, CLASSES, seed=0)
    assert built(data()[0]).shape == (6, CLASSES)
    assert len(notes_of(built)) == 1
    own = CompiledClass(15, CLASSES)
    with unwrapped(own) as bare:
        bare(data()[0].flatten(1))
    assert "forward" not in vars(own)


def test_a_method_that_overrides_a_compiled_one_stays() -> None:
    class Doubled(CompiledClass):
        def forward(self, inputs: Tensor) -> Tensor:
            return 2 * F.linear(inputs, self.weight)

    model = Doubled(2, 2)
    assert torch.equal(unwrap(model)(torch.ones(1, 2)), 2 * model.weight.sum(1)[None])


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_distributed_data_parallel_is_unwrapped(tmp_path: Path) -> None:
    with process_group(tmp_path):
        model = unwrap(nn.parallel.DistributedDataParallel(net()))
    assert list(model.state_dict()) == list(net().state_dict())


def test_a_child_called_module_is_no_wrapper() -> None:
    owner = nn.Sequential()
    owner.add_module("module", nn.Linear(2, 2))
    assert unwrap(owner) is owner
    assert not is_wrapped(owner)
    assert bare_name("module.weight", owner.state_dict()) == "module.weight"


def test_hooks_of_a_wrapper_are_not_lost_silently() -> None:
    model = nn.DataParallel(net())
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(UserError, match="DataParallel"):
        unwrap(model)
    with pytest.raises(UserError, match="DataParallel"):
        rayfed.defend([GAUSSIAN], nn.Sequential(nn.Linear(2, 2), model), rounds=1)


def test_the_loss_of_a_wrapper_is_that_of_the_module() -> None:
    model = nn.DataParallel(net())
    losses.attach_loss(model, losses.make_loss("mean_squared_error", {}))
    assert isinstance(losses.get_loss(unwrap(model)), losses.MeanSquaredError)


@every
def test_a_guard_sets_the_gradients_of_the_users_own_model(wrap: Wrap) -> None:
    found = []
    for model in (net(), wrap(net())):
        guard = rayfed.defend([DP_SGD, {"name": "prune", "ratio": 0.5}], model, seed=3, **LOOP)
        sent = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        guard.backward(model, *(part[:4] for part in data()))
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
        answer = guard.answer(sent, model.state_dict())
        assert list(answer) == list(model.state_dict())
        found.append(list(answer.values()))
    assert all(map(torch.equal, *found))


def test_a_guard_takes_states_with_and_without_prefixes() -> None:
    model = nn.DataParallel(net())
    guards = [rayfed.defend([GAUSSIAN], model, rounds=1, seed=0) for _ in range(2)]
    plain, own = unwrap(model).state_dict(), model.state_dict()
    of_plain, of_own = (guard.answer(state, state) for guard, state in zip(guards, (plain, own), strict=True))
    assert list(of_plain) == list(plain)
    assert list(of_own) == list(own)
    assert all(map(torch.equal, of_plain.values(), of_own.values()))


@every
def test_a_recording_of_a_wrapped_model_is_that_of_the_module(wrap: Wrap, tmp_path: Path) -> None:
    images, labels = data()
    for name, model in (("plain", net()), ("wrapped", wrap(net()))):
        sent = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        with unwrapped(model) as bare:
            F.cross_entropy(bare(images), labels).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        with rayfed.record(model, tmp_path / name, LocalTraining(steps=1, lr=0.1)) as recorder:
            recorder.round(sent, model.state_dict(), (images, labels))
    plain, wrapped = (Recording(tmp_path / name) for name in ("plain", "wrapped"))
    assert plain.header == wrapped.header
    [one], [other] = plain.updates, wrapped.updates
    assert one.files == other.files
    for what in ("sent", "returned"):
        tensors = [load_file(update.folder / str(update.files[what])) for update in (one, other)]
        assert tensors[0].keys() == tensors[1].keys()
        assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())


@every
def test_an_observation_of_a_wrapped_model_is_attacked(wrap: Wrap) -> None:
    model, (image, label) = wrap(net()), data(1)
    with unwrapped(model) as bare:
        F.cross_entropy(bare(image), label).backward()
    update = {name: parameter.grad for name, parameter in model.named_parameters()}
    given = observe(model, model.state_dict(), Pixels(*SHAPE), CLASSES, 1, gradient=update)  # type: ignore[arg-type]
    assert given.remarks == ()
    [found] = Analytic().reconstruct([given.observation], unwrap(model), [torch.Generator()])
    torch.testing.assert_close(found.images, image, atol=1e-4, rtol=0)


def test_files_of_wrapped_models_are_read(tmp_path: Path) -> None:
    for kind, wrap in WRAPS.items():
        other = wrap(net())
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.normal_()
        torch.save(other.state_dict(), tmp_path / "state.pt")
        model = net()
        load_state(model, tmp_path / "state.pt")
        assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values())), kind
        assert notes_of(model) == ()


def test_weight_norm_in_a_wrapper_is_built() -> None:
    built = build_model("tests.models.test_wrappers:normed", {}, SHAPE, CLASSES, seed=0)
    assert {"1.weight_g", "1.weight_v"} < built.state_dict().keys()


def normed(image_shape: tuple[int, ...], classes: int) -> nn.Module:
    return compiled(nn.DataParallel(nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(15, classes)))))
