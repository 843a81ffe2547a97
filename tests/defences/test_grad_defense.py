"""GradDefense: sensitivities against full Jacobians, the band of pure noise, noise where it should fall."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from rayfed.defences.base import Batch, Task
from rayfed.defences.grad_defense import GradDefense, compensated, root_sensitivity, root_set, sensitivity
from rayfed.errors import UserError
from rayfed.gradients import batch_loss, buffers_of, flatten, gradient, weights_of
from rayfed.models.build import build_model
from rayfed.scenario import Training, parse
from rayfed.simulation.client.local import update_method
from rayfed.simulation.inputs import prepare_inputs
from rayfed.update import Named
from tests.helpers.attack_fixtures import digit


def digits(*indices: int) -> Batch:
    return Batch(torch.cat([digit(i) for i in indices]), torch.tensor(indices) % 10)


def built(name: str = "lenet", **parameters: object) -> nn.Module:
    return build_model(name, parameters, (1, 8, 8), 10, seed=4)


def task_of(model: nn.Module, public: Batch | None, seed: int = 0, data: Batch | None = None) -> Task:
    generator = torch.Generator().manual_seed(seed)
    weights, buffers = weights_of(model), buffers_of(model)
    return Task(0, 0, model, weights, buffers, data or digits(3), generator, order=0, public=public)


def sent(defence: GradDefense, task: Task) -> Named:
    return update_method(Training(algorithm="fedsgd", batch_size=None), [defence])(task).tensors


def test_sensitivity_is_the_norm_of_the_jacobian() -> None:
    model = built("mlp", hidden=[6], activation="sigmoid")
    weights, root = weights_of(model), digits(2, 7)

    def jacobian(name: str, image: Tensor, label: Tensor) -> Tensor:
        def own_gradient(x: Tensor) -> Tensor:
            leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
            loss = batch_loss(model, leaves, {}, x[None], label[None])
            return torch.autograd.grad(loss, leaves[name], create_graph=True)[0]

        return torch.autograd.functional.jacobian(own_gradient, image)

    many = Batch(root.inputs.repeat(3000, 1, 1, 1), root.labels.repeat(3000))  # so many directions
    found = sensitivity(model, weights, {}, many, torch.Generator().manual_seed(0))
    for name in weights:
        norms = torch.stack([jacobian(name, x, y).norm() for x, y in zip(*root[:2], strict=True)])
        assert found[name].item() == pytest.approx(norms.square().mean().sqrt().item(), rel=0.05)


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


def test_the_band_of_pure_noise_is_projected_out() -> None:
    noise = 0.3 * torch.randn(40_000, generator=torch.Generator().manual_seed(1))
    left = compensated(noise, 0.3, q=10)
    assert left.square().sum() < 0.1 * noise.square().sum()  # the edges of a finite matrix fluctuate
    assert compensated(noise, 0.03, q=10).dist(noise) < 1e-3 * noise.norm()  # not noise of that scale


def test_a_low_rank_signal_stays_and_most_noise_goes() -> None:
    g = torch.Generator().manual_seed(2)
    columns, rows = 60, 600
    signal = torch.randn(rows, 1, generator=g) @ torch.randn(1, columns, generator=g)
    noisy = signal + 0.5 * torch.randn(rows, columns, generator=g)
    left = compensated(noisy.flatten(), 0.5, q=10).view_as(signal)
    # one direction of sixty is kept, and with it that share of the noise; a few more at the band's edges
    assert (left - signal).square().sum() < 0.1 * (noisy - signal).square().sum()
    assert ((left * signal).sum() / signal.square().sum()).item() == pytest.approx(1, abs=0.02)


def test_without_noise_the_gradient_is_sent_as_it_is() -> None:
    model = built(activation="sigmoid")
    task = task_of(model, digits(*range(20)))
    true, _ = gradient(model, task.weights, task.buffers, *task.data[:3])
    found = sent(GradDefense(scale=0), task)
    for name, t in true.items():
        torch.testing.assert_close(found[name], t, rtol=1e-4, atol=1e-6)


def test_noise_falls_on_every_layer_by_its_sensitivity() -> None:
    model = built(activation="sigmoid", init="uniform")
    task = task_of(model, digits(*range(20)))
    true, _ = gradient(model, task.weights, task.buffers, *task.data[:3])
    expected = root_sensitivity(task)
    unit = flatten({name: expected[name].expand(t.shape) for name, t in true.items()}).square().mean().sqrt()
    # one slice, whose only eigenvalue the gradient lifts out of the band: nothing is projected out
    draws = [
        sent(GradDefense(scale=0.3, q=1e9), replace(task, generator=torch.Generator().manual_seed(i))) for i in range(9)
    ]
    for name, t in true.items():
        noise = torch.stack([d[name] - t for d in draws])
        error = 5 / (2 * noise.numel()) ** 0.5  # of a deviation, five times its own
        assert noise.std().item() == pytest.approx(float(0.3 * expected[name] / unit), rel=error)


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
