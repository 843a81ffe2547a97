"""Copies of models that `copy.deepcopy` refuses, or copies in part: values, gradients, and what is shared."""

from __future__ import annotations

import ast
import functools
import itertools
import queue
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from rayfed.errors import UserError
from rayfed.gradients import buffers_of, gradient, many_gradients, weights_of
from rayfed.models.build import build_model
from rayfed.models.copying import copy_model, shared_parts
from tests.conftest import REPOSITORY

SHAPE, CLASSES = (1, 4, 6), 3


class Plain(nn.Module):
    """The model that the other models compute, too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(24, 7), nn.Linear(7, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.body(images.flatten(1))))
        return logits


class CachesOutput(Plain):
    def forward(self, images: Tensor) -> Tensor:
        self.last = super().forward(images)
        return self.last


class ListsActivations(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.kept.append(torch.tanh(self.body(images.flatten(1))))
        logits: Tensor = self.head(self.kept[-1])
        return logits


class ReadsHook(Plain):
    """Its head reads a tensor that a hook stored, so a hook of another model gives wrong outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[str, Tensor] = {}
        self.attach()

    def attach(self) -> None:
        self.body.register_forward_hook(lambda module, inputs, output: self.stored.update(body=output))

    def forward(self, images: Tensor) -> Tensor:
        self.body(images.flatten(1))
        logits: Tensor = self.head(torch.tanh(self.stored["body"]))
        return logits


class ByMethod(ReadsHook):
    def attach(self) -> None:
        self.handle = self.body.register_forward_hook(self.store)

    def store(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.stored["body"] = output


class Store:
    def __init__(self, owner: ReadsHook) -> None:
        self.owner, self.lock = owner, threading.Lock()

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        with self.lock:
            self.owner.stored["body"] = output


class ByObject(ReadsHook):
    def attach(self) -> None:
        self.body.register_forward_hook(Store(self))


class ByDefault(ReadsHook):
    def attach(self) -> None:
        self.body.register_forward_hook(lambda module, inputs, output, net=self: net.stored.update(body=output))


class ByPartial(ReadsHook):
    def attach(self) -> None:
        def store(net: ReadsHook, module: nn.Module, inputs: Any, output: Tensor) -> None:
            net.stored["body"] = output

        self.body.register_forward_hook(functools.partial(store, self))


class ByReference(ReadsHook):
    def attach(self) -> None:
        self.body.owner = weakref.ref(self)  # type: ignore[assignment]
        self.body.register_forward_hook(lambda module, inputs, output: module.owner().stored.update(body=output))


class ByBuiltin(ListsActivations):
    """A method of a list is a function to `copy.deepcopy`, and would write to the original's list."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = self.kept.append

    def forward(self, images: Tensor) -> Tensor:
        self.keep(torch.tanh(self.body(images.flatten(1))))
        logits: Tensor = self.head(self.kept.pop())
        return logits


class Patched(Plain):
    """A forward pass that a function replaced, with the original method in its closure."""

    def __init__(self) -> None:
        super().__init__()
        inner = self.body.forward
        self.body.forward = lambda rows: inner(rows)  # type: ignore[method-assign]


class Locked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.lock, self.changed = threading.RLock(), threading.Condition()
        self.queue: queue.Queue[int] = queue.Queue()

    def forward(self, images: Tensor) -> Tensor:
        with self.lock, self.changed:
            return super().forward(images)


class Counts(Plain):
    """A generator that changes no output."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = (number for number in itertools.count())

    def forward(self, images: Tensor) -> Tensor:
        next(self.numbers)
        return super().forward(images)


class Drifts(Counts):
    """A generator that changes the outputs, of every second pass."""

    def forward(self, images: Tensor) -> Tensor:
        return Plain.forward(self, images) + (next(self.numbers) % 2) * torch.arange(CLASSES)


class Owns(Plain):
    """A generator over its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = self.parameters()


class Logs(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.log = Path("/dev/null").open("a")  # noqa: SIM115

    def forward(self, images: Tensor) -> Tensor:
        self.log.write(f"{len(images)}\n")
        return super().forward(images)


KINDS: list[type[Plain]] = [
    Plain, CachesOutput, ListsActivations, ReadsHook, ByMethod, ByObject, ByDefault, ByPartial, ByReference, ByBuiltin,
    Patched, Locked, Counts, Logs,
]  # fmt: skip


def batch(count: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.rand(count, *SHAPE, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def used(model: nn.Module) -> None:
    """Make a model keep computed tensors: of a plain pass, of `vmap`, and of forward derivatives."""
    images, labels = batch()
    F.cross_entropy(model(images), labels).backward()
    weights = weights_of(model)

    def loss(w: dict[str, Tensor], image: Tensor) -> Tensor:
        total: Tensor = functional_call(model, w, (image[None],)).sum()
        return total

    vmap(grad(loss), (None, 0))(weights, images)
    jvp(lambda x: functional_call(model, weights, (x,)), (images,), (images,))


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_computes_with_its_own_tensors(kind: type[Plain]) -> None:
    """The oracle is the same model without anything that cannot be copied, at the copy's weights."""
    torch.manual_seed(0)
    model, plain, (images, labels) = kind(), Plain(), batch()
    used(model)
    copied = copy_model(copy_model(model))
    copied.load_state_dict(plain.state_dict())
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    assert torch.equal(copied(images), plain(images))
    expected = gradient(plain, weights_of(plain), {}, images, labels)[0]
    F.cross_entropy(copied(images), labels).backward()
    found = gradient(copied, weights_of(plain), {}, images, labels)[0]
    each = many_gradients(copied, weights_of(plain), {}, images[:, None], labels[:, None])
    for name, parameter in copied.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
        torch.testing.assert_close(found[name], expected[name])
        torch.testing.assert_close(each[name].mean(0), expected[name])


@pytest.mark.parametrize("kind", [ReadsHook, ByMethod, ByObject, ByDefault, ByPartial, ByReference])
def test_hooks_of_a_copy_write_to_the_copy(kind: type[ReadsHook]) -> None:
    model = kind()
    model(batch()[0])
    before = model.stored["body"]
    copied = copy_model(model)
    assert copied.stored is not model.stored
    copied(batch(2)[0])
    assert model.stored["body"] is before
    assert len(copied.stored["body"]) == 2


def test_computed_tensors_are_copied_by_value_and_without_a_graph() -> None:
    model = CachesOutput()
    model(batch()[0])
    copied = copy_model(model)
    assert copied.last.grad_fn is None
    assert torch.equal(copied.last, model.last)
    assert copied.last.data_ptr() != model.last.data_ptr()


def test_functions_that_call_each_other_do_so_in_the_copy() -> None:
    class Counter(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.seen = 0

            def count(times: int) -> None:
                self.seen += 1
                if times > 1:
                    count(times - 1)

            self.count = count
            self.again = [lambda: count(1)]

    model = Counter()
    copied = copy_model(model)
    copied.count(2)
    copied.again[0]()
    assert (copied.seen, model.seen) == (3, 0)


def test_locks_are_new_and_conditions_work() -> None:
    model = Locked()
    copied = copy_model(model)
    assert copied.lock is not model.lock
    with model.changed:
        assert copied.changed.acquire(blocking=False)
        copied.changed.notify_all()
    copied.queue.put(1)
    assert model.queue.empty()


@pytest.mark.parametrize(("kind", "shared"), [(Counts, "numbers"), (Logs, "log")])
def test_what_holds_no_tensor_and_cannot_be_copied_is_shared(kind: type[Plain], shared: str) -> None:
    model = kind()
    copied = copy_model(model)
    assert getattr(copied, shared) is getattr(model, shared)
    assert [part.partition(" ")[0] for part in shared_parts(model)] == [shared]
    assert shared_parts(Plain()) == []


def test_an_object_with_a_thread_is_shared_as_a_whole() -> None:
    class Writer:
        def __init__(self) -> None:
            self.queue: queue.Queue[int] = queue.Queue()
            self.thread = threading.Thread(target=print)

    model = Plain()
    model.outputs = [Writer()]  # type: ignore[assignment]
    copied: Any = copy_model(model)
    assert copied.outputs is not model.outputs
    assert copied.outputs[0] is model.outputs[0]  # type: ignore[index]


@pytest.mark.parametrize("kind", [Drifts, Owns])
def test_a_model_whose_copies_would_differ_is_refused_at_build(kind: type[Plain]) -> None:
    name = {"Drifts": "numbers", "Owns": "stream"}[kind.__name__]
    with pytest.raises(UserError, match=f"{kind.__name__}.*{name}"):
        build_model(f"tests.models.test_copying:{kind.__name__}", {}, SHAPE, CLASSES, seed=0)


def test_a_module_that_refuses_to_be_copied_is_named() -> None:
    class Single(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise NotImplementedError("there is only one")

    with pytest.raises(UserError, match=r"'1'.*Single.*there is only one"):
        copy_model(nn.Sequential(nn.ReLU(), Single(2, 2)))


NORMS: list[Callable[[nn.Linear], nn.Module]] = [
    lambda layer: weight_norm(layer),
    lambda layer: weight_norm(layer, dim=1),
    lambda layer: weight_norm(layer, dim=None),
]


@pytest.mark.parametrize("place", range(len(NORMS)))
def test_the_older_weight_norm_of_a_copy_computes_its_weight_anew(place: int) -> None:
    """The oracle is PyTorch's newer one, whose copies hold no computed tensor."""
    torch.manual_seed(0)
    older = NORMS[place](nn.Linear(24, CLASSES))
    newer = parametrizations.weight_norm(nn.Linear(24, CLASSES), dim=[0, 1, None][place])
    images, labels = batch()
    F.cross_entropy(older(images.flatten(1)), labels).backward()
    copied = copy_model(older)
    state = {name: torch.randn_like(tensor) for name, tensor in older.state_dict().items()}
    copied.load_state_dict(state)
    newer.load_state_dict(
        {
            "bias": state["bias"],
            "parametrizations.weight.original0": state["weight_g"],
            "parametrizations.weight.original1": state["weight_v"],
        }
    )
    pairs = [("bias", "bias"), ("weight_g", "original0"), ("weight_v", "original1")]
    losses = [F.cross_entropy(model(images.flatten(1)), labels) for model in (copied, newer)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    expected = {name.rpartition(".")[2]: parameter.grad for name, parameter in newer.named_parameters()}
    for name, other in pairs:
        torch.testing.assert_close(copied.get_parameter(name).grad, expected[other])
    found = gradient(copied, state, {}, images.flatten(1), labels)[0]
    for name, other in pairs:
        torch.testing.assert_close(found[name], expected[other])


def test_the_older_spectral_norm_of_a_copy_keeps_its_own_iteration() -> None:
    torch.manual_seed(0)
    model = spectral_norm(nn.Linear(24, CLASSES))
    model(batch()[0].flatten(1))
    copied, before = copy_model(model), {name: b.clone() for name, b in buffers_of(model).items()}
    copied(batch()[0].flatten(1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in buffers_of(model).items())
    assert not torch.equal(copied.weight_u, model.weight_u)
    model(batch()[0].flatten(1))
    assert torch.equal(copied.weight_u, model.weight_u)


NO_MODELS = {
    ("rayfed/attacks/sealed.py", "[(one.weights, one.buffers, one.update) for one in observations]"),
    ("rayfed/simulation/client/cohort.py", "task.state"),
    ("rayfed/simulation/client/runtime.py", "states.get(c, {})"),
    ("rayfed/simulation/client/visit.py", "self.visit.states.get(client, {})"),
    ("rayfed/runs/api_args.py", "dict(source)"),
    ("rayfed/reproductions/reading.py", "self.scenario or {}"),
    ("rayfed/scenario/inputs.py", "document"),
}
"""Arguments of `deepcopy` that are no models, with their files."""


def test_models_are_copied_in_one_place() -> None:
    found = set()
    for path in [*(REPOSITORY / "rayfed").rglob("*.py"), *(REPOSITORY / "actors").rglob("*.py")]:
        text = path.read_text()
        if "deepcopy" not in text or path.name == "copying.py":
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("deepcopy"):
                found.add((path.relative_to(REPOSITORY).as_posix(), ast.unparse(node.args[0])))
    assert found == NO_MODELS
