"""GradDefense: sensitivities against full Jacobians, slices of equal sensitivity, noise where it should fall."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from rayfed.defences.base import Batch, Task
from rayfed.defences.grad_defense import (
    GradDefense,
    root_sensitivity,
    root_set,
    sensitivity,
    slices_of_equal_sensitivity,
)
from rayfed.errors import UserError
from rayfed.gradients import batch_loss, flatten, gradient, weights_of
from rayfed.models.build import build_model
from rayfed.scenario import Training, parse
from rayfed.simulation.client.local import update_method
from rayfed.simulation.inputs import prepare_inputs
from rayfed.update import Named, Update
from tests.helpers.defence_fixtures import digits, task_of


def built(name: str = "lenet", **parameters: object) -> nn.Module:
    return build_model(name, parameters, (1, 8, 8), 10, seed=4)


def sent(defence: GradDefense, task: Task) -> Named:
    return update_method(Training(algorithm="fedsgd", batch_size=None), [defence])(task).tensors


def test_sensitivity_is_the_mean_norm_of_the_derivative_of_the_summed_gradient() -> None:
    model = built("mlp", hidden=[6], activation="sigmoid")
    weights, root = weights_of(model), digits(2, 7)

    def derivative(name: str, image: Tensor, label: Tensor) -> Tensor:
        def summed_gradient(x: Tensor) -> Tensor:
            leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
            loss = batch_loss(model, leaves, {}, x[None], label[None])
            return torch.autograd.grad(loss, leaves[name], create_graph=True)[0].sum()

        return torch.autograd.functional.jacobian(summed_gradient, image)

    for name, value in sensitivity(model, weights, {}, root).items():
        norms = [derivative(name, x, y).norm() for x, y in zip(*root[:2], strict=True)]
        torch.testing.assert_close(value, torch.stack(norms).mean())


def test_slices_have_the_same_sensitivity() -> None:
    sizes = {"a": 100, "b": 50, "c": 7, "d": 30}
    share = {"a": torch.tensor(3.0), "b": torch.tensor(6.0), "c": torch.tensor(1.0), "d": torch.tensor(0.0)}
    slices = slices_of_equal_sensitivity(sizes, share, 10)
    assert torch.equal(slices, slices.sort().values)
    # 0.03 and 0.12 per value: three slices of `a`, six of `b`, and the rest
    assert slices.bincount().tolist() == [33, 34, 33, 8, 9, 8, 8, 9, 8, 37]
    silent = slices_of_equal_sensitivity(sizes, dict.fromkeys(sizes, torch.tensor(0.0)), 11)
    assert silent.bincount().tolist() == [17] * 11


def test_the_root_set_has_five_samples_a_class() -> None:
    public = Batch(torch.rand(40, 1, 8, 8), torch.tensor([0] * 20 + [1] * 17 + [2] * 3))
    root = root_set(public)
    assert torch.bincount(root.labels).tolist() == [5, 5, 3]
    assert torch.equal(root.inputs[:5], public.inputs[:5])


@pytest.mark.parametrize("model", [("resnet10", {}), ("convnet", {"width": 4}), ("lenet", {"activation": "relu"})])
def test_it_works_on_networks_with_batch_norm(model: tuple[str, dict[str, object]]) -> None:
    net = build_model(*model, (1, 16, 16), 10, seed=4).train()
    public = Batch(torch.rand(4, 1, 16, 16), torch.arange(4))
    task = task_of(net, public, data=Batch(torch.rand(2, 1, 16, 16), torch.arange(2)))
    assert all(t.isfinite().all() for t in sent(GradDefense(scale=0.1), task).values())
    assert all(module.training for module in net.modules())


def test_without_noise_the_gradient_is_sent_as_it_is() -> None:
    model = built(activation="sigmoid")
    task = task_of(model, digits(*range(20)))
    true, _ = gradient(model, task.weights, task.buffers, *task.data[:3])
    found = sent(GradDefense(scale=0), task)
    for name, t in true.items():
        torch.testing.assert_close(found[name], t, rtol=1e-4, atol=1e-6)


def test_half_of_the_slices_have_noise_of_one_scale() -> None:
    task = task_of(built(activation="sigmoid", init="uniform"), digits(*range(20)))
    true, _ = gradient(task.model, task.weights, task.buffers, *task.data[:3])
    slices = slices_of_equal_sensitivity({name: t.numel() for name, t in true.items()}, root_sensitivity(task), 10)
    chosen = []
    for seed in range(20):
        own = replace(task, generator=torch.Generator().manual_seed(seed))
        noise = flatten(sent(GradDefense(scale=0.3), own)) - flatten(true)
        noisy = slices[noise != 0].unique().tolist()
        values = noise[torch.isin(slices, torch.tensor(noisy))]
        assert len(noisy) == 5
        assert values.std().item() == pytest.approx(0.3, rel=5 / (2 * len(values)) ** 0.5)
        chosen += noisy
    assert set(chosen) == set(range(10))
    every = sent(GradDefense(scale=0.3, slices=4, perturbed=4), task)
    assert bool((flatten(every) != flatten(true)).all())


def test_an_attacker_sees_most_slices_without_noise_and_none_with_it() -> None:
    model, defence = built(), GradDefense(scale=0.1)
    task = task_of(model, digits(*range(20)))
    true, _ = gradient(model, task.weights, task.buffers, *task.data[:3])
    found = sent(defence, task)
    masks = defence.exposed(Update(0, 0, found, {}, 1, loss=0.0))
    assert masks is not None
    seen = flatten(masks)
    assert torch.equal(flatten(found)[seen], flatten(true)[seen])
    assert seen.sum() > 0.7 * (flatten(found) == flatten(true)).sum()
    # noise that is small beside the gradient hides nothing
    assert GradDefense(scale=1e-6).exposed(Update(0, 0, true, {}, 1, loss=0.0)) is None


def test_no_more_slices_have_noise_than_there_are() -> None:
    with pytest.raises(ValueError, match="perturbed"):
        GradDefense(scale=0.1, slices=3, perturbed=4)


def test_noise_follows_the_clients_generator() -> None:
    model, public = built(), digits(*range(20))
    first, again, other = (flatten(sent(GradDefense(scale=0.1), task_of(model, public, seed))) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_it_says_that_it_needs_public_data() -> None:
    with pytest.raises(UserError, match=r"`data\.public`"):
        sent(GradDefense(scale=0.1), task_of(built(), None))


@pytest.mark.parametrize("defence", ["{name: grad_defense, scale: 0.1}", "{name: instahide, public: true}"])
def test_a_scenario_without_public_data_is_refused_before_it_runs(defence: str) -> None:
    text = f"{{name: t, data: digits, model: lenet, federation: {{rounds: 1, clients: 2}}, defences: [{defence}]}}"
    with pytest.raises(UserError, match=r"arm '.*': (grad_defense|instahide) needs public samples"):
        prepare_inputs(parse(text))
