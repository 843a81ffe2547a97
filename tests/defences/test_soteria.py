"""Soteria: which columns it prunes, against plain Jacobians; what its estimate is worth; who it stops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rayfed.defences.base import Batch, Task
from rayfed.defences.soteria import Soteria, displacement, estimated_norms, jacobian_norms
from rayfed.errors import UserError
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.models.build import build_model
from rayfed.models.front import Front
from rayfed.scenario import Training
from rayfed.simulation.client.local import update_method
from rayfed.update import Named, Update
from tests.helpers.attack_fixtures import LENET, digit, images_of, leaky_lenet

MLP = ("mlp", {"hidden": [40, 30], "activation": "sigmoid"})


def built(model: tuple[str, dict[str, object]], images: Tensor, seed: int = 3) -> nn.Module:
    return build_model(*model, (images.shape[1], images.shape[2], images.shape[3]), 10, seed)


def task_of(model: nn.Module, images: Tensor, seed: int = 0) -> Task:
    labels = torch.arange(len(images))
    generator = torch.Generator().manual_seed(seed)
    return Task(0, 0, model, weights_of(model), buffers_of(model), Batch(images, labels), generator, order=0)


def sent(defence: Soteria, model: nn.Module, images: Tensor, seed: int = 0) -> Update:
    defence.check(model)
    return update_method(Training(algorithm="fedsgd", batch_size=None), [defence])(task_of(model, images, seed))


def plain(model: nn.Module, images: Tensor) -> Named:
    return gradient(model, weights_of(model), buffers_of(model), images, torch.arange(len(images)))[0]


def features(model: nn.Module, layer: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """What enters a layer, and the norms of its rows' slopes by one backward pass each: (N, F) twice."""
    front, norms = Front(model, layer, before=True), []
    for image in images:
        x = image[None].clone().requires_grad_()
        r = front({}, x)[0]
        norms.append(torch.stack([torch.autograd.grad(f, x, retain_graph=True)[0].norm() for f in r]))
    return front({}, images).detach(), torch.stack(norms)


def pruned_columns(update: Update, name: str) -> set[int]:
    return set((update.tensors[name] == 0).all(dim=0).nonzero().flatten().tolist())


def test_norms_of_the_jacobian_match_one_backward_pass_each() -> None:
    images = torch.cat([digit(i) for i in range(3)])
    for activation in ("sigmoid", "relu"):
        model = built(("lenet", {"activation": activation}), images)
        r, norms = features(model, "fc", images)
        front = Front(model, "fc", before=True)
        torch.testing.assert_close(jacobian_norms(lambda x, f=front: f({}, x), images), norms, rtol=1e-4, atol=1e-7)
        assert norms.shape == r.shape == (3, 48)


@pytest.mark.parametrize(("layer", "name"), [(None, "fc3.weight"), ("fc2", "fc2.weight")])
def test_the_smallest_scores_are_pruned_and_nothing_else_changes(layer: str | None, name: str) -> None:
    images = digit(4)
    model = built(MLP, images)
    r, norms = features(model, name.partition(".")[0], images)
    scores = (norms / r.abs())[0]  # the paper's
    out, true = sent(Soteria(ratio=0.3, layer=layer), model, images), plain(model, images)
    pruned = pruned_columns(out, name)
    assert pruned == set(scores.argsort()[: int(0.3 * len(scores))].tolist())
    kept = [i for i in range(len(scores)) if i not in pruned]
    torch.testing.assert_close(out.tensors[name][:, kept], true[name][:, kept])
    for other in true.keys() - {name}:
        torch.testing.assert_close(out.tensors[other], true[other])


def test_the_samples_of_a_batch_add_their_displacements() -> None:
    images = torch.cat([digit(i) for i in range(5)])
    model = built(MLP, images)
    r, norms = features(model, "fc3", images)
    largest = (r.abs() / norms).sum(0).argsort(descending=True)[:15]
    assert pruned_columns(sent(Soteria(ratio=0.5), model, images), "fc3.weight") == set(largest.tolist())


def test_features_that_are_off_displace_nothing() -> None:
    r, norms = torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, 3.0]]), torch.tensor([[0.0, 1.0, 0.0], [4.0, 0.0, 1.0]])
    assert displacement(r, norms).tolist() == [0, 2, float("inf")]


def test_the_estimate_has_no_bias_in_the_square_and_the_deviation_of_its_probes() -> None:
    g = torch.Generator().manual_seed(5)
    matrix, image = torch.randn(50, 64, generator=g), torch.zeros(1, 1, 8, 8)

    def linear(x: Tensor) -> Tensor:
        return x.flatten(1) @ matrix.T

    true = matrix.square().sum(1)
    # E[(Jv)^4] for random signs: the variance of the square is 2 (|J|^4 - sum J^4)
    deviation = (2 * (true.square() - matrix.pow(4).sum(1)) / 4000).sqrt()
    found = estimated_norms(linear, image, 4000, g)[0].square()
    assert ((found - true).abs() < 5 * deviation).all()
    assert (found - true).square().mean().sqrt() == pytest.approx(deviation.mean().item(), rel=0.4)


def test_the_estimate_errs_only_near_the_threshold() -> None:
    images, probes = digit(4), 128
    model = built(LENET, images)
    r, norms = features(model, "fc", images)
    exact = displacement(r, norms)
    threshold = exact.sort(descending=True).values[int(0.4 * len(exact)) - 1]
    error = 5 * (1 / (2 * probes)) ** 0.5  # five deviations of a norm's relative error
    estimated = sent(Soteria(ratio=0.4, jacobian="estimated", probes=probes), model, images)
    pruned = sorted(pruned_columns(estimated, "fc.weight"))
    assert len(pruned) == int(0.4 * len(exact))
    assert exact[pruned].min() > threshold * (1 - error) / (1 + error)


def test_the_estimate_follows_the_clients_generator() -> None:
    images = digit(4)
    model, defence = built(LENET, images), Soteria(ratio=0.4, jacobian="estimated", probes=2)
    first, again, other = (sent(defence, model, images, seed).tensors["fc.weight"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_dropout_passes_while_features_are_scored() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Dropout(0.5), nn.Sigmoid(), nn.Linear(20, 10)).train()
    images, masks = digit(4), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        masks.append(pruned_columns(sent(Soteria(ratio=0.5), model, images), "4.weight"))
    assert masks[0] == masks[1]
    assert model[2].training


def test_what_does_not_fit_is_said() -> None:
    images, _ = images_of("photos", 1)
    model, defence = built(MLP, images), Soteria(ratio=0.5, layer="fc22")
    with pytest.raises(UserError, match="did you mean 'fc2'"):
        defence.check(model)
    with pytest.raises(UserError, match=r"nn\.Linear"):
        Soteria(ratio=0.5, layer="act1").check(model)
    with pytest.raises(UserError, match=r"nn\.Linear"):
        Soteria(ratio=0.5).check(nn.Conv2d(3, 3, 3))
    net = built(("convnet", {"width": 4}), images).train()
    with pytest.raises(UserError, match="batch_norm: eval"):
        Soteria(ratio=0.5).check(net)
    Soteria(ratio=0.5).check(net.eval())


def test_batch_norm_in_evaluation_mode_works() -> None:
    images, _ = images_of("photos", 2)
    model = built(("resnet10", {}), images).eval()
    defence = Soteria(ratio=0.5, jacobian="estimated", probes=2)
    out, true = sent(defence, model, images, seed=1), plain(model, images)
    front = Front(model, "fc", before=True)
    norms = estimated_norms(lambda x: front({}, x), images, 2, torch.Generator().manual_seed(1))
    pruned = displacement(front({}, images), norms).topk(256).indices.tolist()
    expected = true["fc.weight"].clone()
    expected[:, pruned] = 0
    torch.testing.assert_close(out.tensors, true | {"fc.weight": expected})
    torch.testing.assert_close(out.buffers, {n: b for n, b in buffers_of(model).items() if n in out.buffers})
    assert out.buffers


@pytest.mark.parametrize("layer", [None, "fc"])
def test_an_attacker_who_knows_of_it_leaves_the_pruned_columns_out(layer: str | None) -> None:
    defence = Soteria(ratio=0.4, layer=layer)
    out = sent(defence, leaky_lenet((1, 8, 8)), digit(4))
    masks = defence.exposed(out)
    assert list(masks) == ["fc.weight"]
    assert masks["fc.weight"].shape == out.tensors["fc.weight"].shape
    assert set((~masks["fc.weight"][0]).nonzero().flatten().tolist()) == pruned_columns(out, "fc.weight")
