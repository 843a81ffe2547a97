"""Updates given from outside a run: what is wrong with them is named, what is right is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rayfed.attacks.closed_form.analytic import Analytic
from rayfed.attacks.external_update import Given, observe
from rayfed.errors import UserError
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.models.build import build_model
from rayfed.samples import Pixels
from rayfed.update import LocalTraining, Named

CLASSES, SHAPE = 10, (1, 8, 8)
MODEL = build_model("mlp", {"hidden": [16]}, SHAPE, CLASSES, seed=0)
STATE = dict(MODEL.state_dict())
IMAGES, LABELS = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(1)), torch.tensor([3, 5])
ONE = LocalTraining(steps=1, lr=0.1)


def of_batch(state: Named = STATE, images: Tensor = IMAGES) -> Named:
    return gradient(MODEL, state, buffers_of(MODEL), images, LABELS)[0]


def stepped(lr: float = 0.1, steps: int = 1) -> Named:
    state = STATE
    for _ in range(steps):
        state = {name: state[name] - lr * g for name, g in of_batch(state).items()}
    return state


def given(sent: Named = STATE, model: nn.Module = MODEL, **given: object) -> Given:
    return observe(model, sent, Pixels(*SHAPE), CLASSES, len(LABELS), **given)  # type: ignore[arg-type]


def remark(**of: object) -> str:
    [remark] = given(**of).remarks  # type: ignore[arg-type]
    return remark


def test_a_right_update_is_left_alone_and_attacked() -> None:
    for right in (given(gradient=of_batch()), given(returned=stepped(), local=ONE)):
        assert right.remarks == ()
        estimated = right.observation.gradient
        assert all(torch.allclose(estimated[n], g, atol=1e-5) for n, g in of_batch().items())
    assert given(returned=stepped(steps=5), local=LocalTraining(steps=5, lr=0.1)).remarks == ()
    one = observe(
        MODEL, STATE, Pixels(*SHAPE), CLASSES, 1, gradient=gradient(MODEL, STATE, {}, IMAGES[:1], LABELS[:1])[0]
    )
    [found] = Analytic().reconstruct([one.observation], MODEL, [torch.Generator()])
    assert torch.allclose(found.images, IMAGES[:1], atol=1e-4)


def test_prefixes_of_wrappers_are_taken_off() -> None:
    for prefix, wrapper in (("module.", "DataParallel"), ("_orig_mod.", "torch.compile")):
        wrapped = {prefix + name: tensor for name, tensor in STATE.items()}
        assert wrapper in remark(sent=wrapped, gradient=of_batch())
    both = given(sent={f"module._orig_mod.{n}": t for n, t in STATE.items()}, gradient=of_batch())
    assert len(both.remarks) == 2
    assert both.observation.weights.keys() == weights_of(MODEL).keys()
    owner = nn.Sequential()
    owner.add_module("module", nn.Linear(64, CLASSES))  # a name of the model's own
    own = observe(owner, owner.state_dict(), Pixels(*SHAPE), CLASSES, 1, gradient=dict(owner.named_parameters()))
    assert not any("prefix" in line for line in own.remarks)


def test_what_attacks_cannot_be_given_is_refused() -> None:
    first, *rest = STATE
    with pytest.raises(UserError, match=rf"returned: {first} of the model's tensors are missing"):
        given(returned={name: STATE[name] for name in rest}, local=ONE)
    with pytest.raises(UserError, match=rf"gradient: {first} has shape \(3,\).*\(16, 64\)"):
        given(gradient=of_batch() | {first: torch.zeros(3)})
    with pytest.raises(UserError, match=rf"gradient: {first} has values that are not finite"):
        given(gradient=of_batch() | {first: torch.full((16, 64), torch.nan)})
    with pytest.raises(UserError, match="gradient: 'state_dict'"):
        given(gradient={"state_dict": of_batch()})
    with pytest.raises(UserError, match="`local` training: give local="):
        given(returned=stepped())
    with pytest.raises(UserError, match="give either"):
        given()


def test_the_wrong_sign() -> None:
    negative = remark(gradient={name: -g for name, g in of_batch().items()})
    assert "wrong sign" in negative
    assert "8 entries" in negative
    assert "swapped" not in negative
    assert "swapped" in remark(sent=stepped(), returned=STATE, local=ONE)


@pytest.mark.parametrize("factor", [0.1, 2.5, 30.0])
def test_the_wrong_scale(factor: float) -> None:
    scaled = {name: factor * g for name, g in of_batch().items()}
    told = remark(gradient=scaled)
    assert float(told.split("is ")[1].split(" times")[0]) == pytest.approx(factor, rel=0.3)
    assert all(part in told for part in ("lr (1)", "steps (1)", "2 samples"))


def test_a_learning_rate_that_was_not_said() -> None:
    assert "lr (1)" in remark(returned=stepped(), local=LocalTraining(steps=1, lr=1.0))


def test_nothing_is_said_where_nothing_is_known() -> None:
    """Noise, pruning, a trained model that is sure of its answers, and another loss are no mistakes."""
    generator = torch.Generator().manual_seed(2)
    noisy = {name: g + 0.1 * torch.randn(g.shape, generator=generator) for name, g in of_batch().items()}
    pruned = {name: g * (g.abs() > 0.05) for name, g in of_batch().items()}
    assert given(gradient=noisy).remarks == given(gradient=pruned).remarks == ()
    sure = {name: 20 * tensor for name, tensor in STATE.items()}
    assert given(sent=sure, gradient=of_batch(sure)).remarks == ()
    assert given(sent=sure, gradient={name: 0.5 * g for name, g in of_batch(sure).items()}).remarks == ()


def test_an_update_of_nothing() -> None:
    assert "zero" in remark(returned=STATE, local=ONE)
