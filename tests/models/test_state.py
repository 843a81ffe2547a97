"""Checkpoints of training scripts: the tensors that a model takes from them, and the files that are refused."""

from __future__ import annotations

import argparse
import enum
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from torch.optim.swa_utils import AveragedModel

from rayfed.errors import UserError
from rayfed.models.build import build_model
from rayfed.models.notes import notes_of
from rayfed.models.state import load_state

State = dict[str, Tensor]


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU())
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))


class Phase(enum.Enum):
    LAST = 2


class Settings(dict[str, Any]):
    """A dictionary of a library's, as configurations are."""


def stage(seed: int) -> Stage:
    torch.manual_seed(seed)
    made = Stage()
    for tensor in made.state_dict().values():  # gains, biases and statistics differ, too
        if tensor.is_floating_point():
            tensor.uniform_(0.1, 1)
    return made


def loaded(contents: Any, path: Path, model: nn.Module | None = None) -> nn.Module:
    torch.save(contents, path)
    model = model or stage(1)
    load_state(model, path)
    return model


def after(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def within(prefix: str, state: State) -> State:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def optimiser(model: nn.Module) -> dict[str, Any]:
    chosen = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 6)).sum().backward()
    chosen.step()
    return chosen.state_dict()


FORMS: dict[str, Callable[[State], Any]] = {
    "key": lambda s: {"net": s, "loss": 0.3, "step": 900},
    "deep": lambda s: {"last": {"trainer": {"weights": s}, "time": "noon"}},
    "parallel in a key": lambda s: {"network": after("module.", s), "accuracy": np.float64(0.9)},
    "compiled and parallel": lambda s: after("_orig_mod.module.", s),
    "lightning": lambda s: {
        "state_dict": after("net.", s),
        "pytorch-lightning_version": "2",
        "loops": {"fit": [1]},
        "optimizer_states": [optimiser(stage(3))],
    },
    "a part is wrapped": lambda s: {n.replace("body.", "body.module."): t for n, t in s.items()},
    "arrays": lambda s: {"model": {n: t.numpy() for n, t in s.items()}},
    "nested by layer": lambda s: {"weights": {"body": within("body.", s), "out": within("out.", s)}},
    "ordered": lambda s: OrderedDict(s),
    "foreign objects": lambda s: {"model": s, "args": argparse.Namespace(lr=0.1), "phase": Phase.LAST},
    "numbers in between": lambda s: {"epoch": 3, **s},
    "optimiser first": lambda s: {"optimizer": optimiser(stage(2)), "weights": s},
    "twice": lambda s: {"student": s, "teacher": {n: t.clone() for n, t in s.items()}},
}


@pytest.mark.parametrize("form", list(FORMS))
def test_weights_are_found_in_what_training_scripts_save(form: str, tmp_path: Path) -> None:
    state = stage(0).state_dict()
    found = loaded(FORMS[form](state), tmp_path / "c.pt")
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.state_dict().items())
    assert notes_of(found) == ()


@pytest.mark.parametrize("file", ["c.npz", "c.safetensors", "old.pt"])
def test_other_formats_have_prefixes_too(file: str, tmp_path: Path) -> None:
    state = stage(0).state_dict()
    if file == "c.npz":
        np.savez(tmp_path / file, **{n: t.numpy() for n, t in after("backbone.", state).items()})
    elif file == "c.safetensors":
        pytest.importorskip("safetensors.torch").save_file(after("model.module.", state), tmp_path / file)
    else:
        torch.save({"net": state, "args": argparse.Namespace()}, tmp_path / file, _use_new_zipfile_serialization=False)
    found = stage(1)
    load_state(found, tmp_path / file)
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.state_dict().items())


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, lambda m: {"model": m, "epoch": 1}])
def test_a_whole_module_is_read_without_its_code(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    own = stage(0)
    found = loaded(wrap(own), tmp_path / "c.pt")
    assert all(torch.equal(tensor, own.state_dict()[name]) for name, tensor in found.state_dict().items())


def test_arrays_without_names_go_by_their_order_and_the_note_says_so(tmp_path: Path) -> None:
    state = stage(0).state_dict()
    np.savez(tmp_path / "round-3.npz", *[tensor.numpy() for tensor in state.values()])
    found = stage(1)
    load_state(found, tmp_path / "round-3.npz")
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.state_dict().items())
    assert len(notes_of(found)) == 1
    with pytest.raises(UserError):
        loaded([*state.values()][1:], tmp_path / "c.pt")


def test_of_several_sets_one_is_taken_by_its_key_and_the_note_names_all(tmp_path: Path) -> None:
    raw, averaged = stage(0).state_dict(), stage(2).state_dict()
    for contents in (
        {"ema": averaged, "model": raw},
        {"state_dict": {**after("ema_model.", averaged), **after("model.", raw)}},
    ):
        found = loaded(contents, tmp_path / "c.pt")
        assert all(torch.equal(tensor, raw[name]) for name, tensor in found.state_dict().items())
        assert any("'ema" in said or "ema_model'" in said for said in notes_of(found))


@pytest.mark.parametrize("keys", [("student", "teacher"), ("generator", "critic"), ("first", "second")])
def test_sets_that_nothing_tells_apart_are_refused(keys: tuple[str, str], tmp_path: Path) -> None:
    states = (stage(seed).state_dict() for seed in (0, 2))
    with pytest.raises(UserError) as error:
        loaded(dict(zip(keys, states, strict=True)), tmp_path / "c.pt")
    assert all(f"'{key}'" in str(error.value) for key in keys)


def test_a_set_with_the_models_head_comes_before_one_of_other_classes(tmp_path: Path) -> None:
    state, other = stage(0).state_dict(), {**stage(2).state_dict(), "out.weight": torch.ones(7, 5)}
    found = loaded({"model": {**other, "out.bias": torch.ones(7)}, "finetuned": state}, tmp_path / "c.pt")
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.state_dict().items())


def test_what_does_not_fit_names_keys_and_tensors(tmp_path: Path) -> None:
    state = stage(0).state_dict()
    short = {name: tensor for name, tensor in state.items() if name != "body.1.running_var"}
    wide = {**state, "body.0.weight": torch.ones(9, 6), "spare": torch.ones(1)}
    for contents, named in (
        ({"net": short, "seconds": 4.5}, ("'net'", "seconds", "body.1.running_var")),
        ({"best": after("module.", wide), "seconds": 4}, ("'best", "seconds", "body.0.weight", "(9, 6)", "spare")),
        ({"unet": {"up.weight": torch.ones(3)}, "seconds": 4}, ("unet", "seconds", "up.weight")),
        ({"seconds": 4, "args": argparse.Namespace()}, ("seconds", "args")),
    ):
        before = {name: tensor.clone() for name, tensor in stage(1).state_dict().items()}
        model = stage(1)
        with pytest.raises(UserError) as error:
            loaded(contents, tmp_path / "c.pt", model)
        assert all(key in str(error.value) for key in named)
        if "up.weight" in named:
            assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    torch.jit.trace(stage(0).eval(), torch.rand(2, 6)).save(str(tmp_path / "script.pt"))
    torch.save({"model": stage(0).state_dict(), "config": Settings(lr=1)}, tmp_path / "settings.pt")
    (tmp_path / "text.pt").write_text("no weights")
    (tmp_path / "folder.pt").mkdir()
    for file, named in (
        ("script.pt", "jit"),
        ("settings.pt", "Settings"),
        ("text.pt", "text.pt"),
        ("folder.pt", "folder"),
    ):
        with pytest.raises(UserError, match=named):
            load_state(stage(1), tmp_path / file)


def test_a_counter_and_tied_weights_may_be_missing_and_nothing_else(tmp_path: Path) -> None:
    state = stage(0).state_dict()
    found = loaded({n: t for n, t in state.items() if "num_batches" not in n}, tmp_path / "c.pt")
    assert (notes_of(found), int(found.get_buffer("body.1.num_batches_tracked"))) == ((), 0)

    def tied() -> nn.ModuleDict:
        made = nn.ModuleDict({"table": nn.Embedding(4, 3), "mid": nn.Linear(3, 3), "out": nn.Linear(3, 4, bias=False)})
        made["out"].weight = made["table"].weight
        return made

    own = tied().state_dict()
    found = loaded({name: t for name, t in own.items() if name != "out.weight"}, tmp_path / "t.pt", tied())
    assert notes_of(found) == ()
    assert torch.equal(found.get_parameter("out.weight"), own["table.weight"])


def test_names_of_earlier_versions_are_those_that_the_module_knows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    old = nn.Sequential(weight_norm(nn.Linear(4, 3)), nn.ReLU(), nn.Linear(3, 2))
    new = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.ReLU(), nn.Linear(3, 2))
    found, inputs = loaded({"net": old.state_dict()}, tmp_path / "c.pt", new), torch.rand(5, 4)
    torch.testing.assert_close(found(inputs), old(inputs))


def test_an_average_of_models_leaves_its_counter_out_and_says_so(tmp_path: Path) -> None:
    found = loaded(AveragedModel(own := stage(0)).state_dict(), tmp_path / "c.pt")
    assert all(torch.equal(tensor, own.state_dict()[name]) for name, tensor in found.state_dict().items())
    assert "n_averaged" in notes_of(found)[0]


def test_a_child_that_is_called_module_stays_what_it_is(tmp_path: Path) -> None:
    def made() -> nn.Module:
        return nn.ModuleDict({"module": nn.Linear(2, 2), "net": nn.Linear(2, 2)})

    state = (own := made()).state_dict()
    for contents in (state, {"model": after("module.", state)}, {"model": own}):
        found = loaded(contents, tmp_path / "c.pt", made())
        assert all(torch.equal(tensor, state[name]) for name, tensor in found.state_dict().items())


def lazy(image_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(classes))


def test_lazy_layers_take_weights(tmp_path: Path) -> None:
    (own := lazy((1, 3, 2), 5))(torch.rand(1, 1, 3, 2))
    torch.save({"net": own.state_dict()}, tmp_path / "c.pt")
    found = build_model("tests.models.test_state:lazy", {}, (1, 3, 2), 5, seed=0, state=tmp_path / "c.pt")
    assert all(torch.equal(tensor, own.state_dict()[name]) for name, tensor in found.state_dict().items())
