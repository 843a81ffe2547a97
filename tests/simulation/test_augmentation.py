"""Crops and flips of clients' images: against torchvision, and what attackers, accounts and scores make of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as V

from rayfed import scenario as scenarios
from rayfed.errors import ScenarioError, UserError
from rayfed.gradients import buffers_of, weights_of
from rayfed.scenario import Augment, Scenario, Training
from rayfed.simulation.client.augmentation import area_box, augmented
from rayfed.simulation.client.cohort import cohort_updates
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.client.visit import ClientVisit
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.inputs import prepare_inputs
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.update import Update

CPU = torch.device("cpu")
BOTH = "training: {batch_size: 8, augment: {crop: 2, flip: true}}\n"


def images(count: int, size: int = 12) -> Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def moved(before: Tensor, augment: Augment, generator: np.random.Generator) -> Tensor:
    after, labels = augmented(before, classes := torch.arange(len(before)), augment, generator)
    assert labels is classes
    return after


def draw(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_each_image_is_a_crop_of_torchvision_s_and_all_are_drawn() -> None:
    before = images(1).expand(4000, 3, 12, 12)
    after = moved(before, Augment(crop=1, flip=True), draw())
    padded = V.pad(before[0], [1])
    whole = [(top, left, flip) for top in range(3) for left in range(3) for flip in (False, True)]
    cut = [V.crop(padded, top, left, 12, 12) for top, left, _ in whole]
    made = torch.stack([V.horizontal_flip(c) if flip else c for c, (*_, flip) in zip(cut, whole, strict=True)])
    which = [(made == one).flatten(1).all(1).nonzero().flatten().tolist() for one in after]
    assert all(len(one) == 1 for one in which)
    counts = np.bincount([one[0] for one in which], minlength=18)
    assert abs(counts - 4000 / 18).max() < 5 * (4000 / 18) ** 0.5


def test_enlarged_parts_are_torchvision_s() -> None:
    before, numbers = images(20, 24), draw(1).random((20, 25))
    after = moved(before, Augment(scale=0.3), draw(1))
    for image, found, own in zip(before, after, numbers, strict=True):
        expected = V.resized_crop(image, *area_box(own[2:-1], 0.3, 24, 24), size=[24, 24], antialias=True)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.engine
@pytest.mark.parametrize(("height", "width"), [(32, 32), (20, 60)])
def test_parts_are_drawn_as_torchvision_draws_them(height: int, width: int) -> None:
    from scipy.stats import ks_2samp

    ours = np.array([area_box(numbers, 0.2, height, width) for numbers in draw().random((3000, 22))])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        crop = v2.RandomResizedCrop((height, width), scale=(0.2, 1.0))
        drawn = [crop.make_params([torch.zeros(1, height, width)]) for _ in range(1500)]
    theirs = np.array([[one["top"], one["left"], one["height"], one["width"]] for one in drawn])
    for i in range(4):
        assert ks_2samp(ours[:, i], theirs[:, i]).pvalue > 1e-3
    assert (ours[:, 0] + ours[:, 2] <= height).all()
    assert (ours[:, 1] + ours[:, 3] <= width).all()


def test_one_field_does_not_change_what_another_draws() -> None:
    before = images(30)
    both, crop = (moved(before, augment, draw()) for augment in (Augment(crop=2, flip=True), Augment(crop=2)))
    turned = (both != crop).flatten(1).any(1)
    assert 5 < turned.sum() < 25
    assert torch.equal(both[turned], crop[turned].flip(-1))


def scenario(extra: str = "", training: str = BOTH) -> Scenario:
    text = """
name: t
data: {name: digits, size: 8, train_samples: 200, test_samples: 100}
model: {name: mlp, hidden: [16]}
federation: {rounds: 3, clients: 8, clients_per_round: 5, cohort_size: 2}
"""
    return scenarios.parse(text + training + extra)


def runtime(s: Scenario) -> tuple[ClientWorker, Sent]:
    inputs = prepare_inputs(s)
    found = ClientWorker(s, inputs.data, inputs.parts, CPU)
    model = found.arm(next(iter(s.played))).model
    return found, Sent(0, weights_of(model), buffers_of(model))


def test_a_sample_has_one_version_in_a_round_and_another_in_the_next() -> None:
    (own, sent), (again, _), (plain, _) = runtime(scenario()), runtime(scenario()), runtime(scenario(training=""))

    def inputs(worker: ClientWorker, round: int, rows: slice = slice(None)) -> Tensor:
        return worker.task("none", Sent(round, sent.weights, sent.buffers), 3, worker.parts[3][rows], {}).data.inputs

    assert torch.equal(inputs(own, 0), inputs(again, 0))
    assert not torch.equal(inputs(own, 0), inputs(own, 1))
    assert not torch.equal(inputs(own, 0), inputs(plain, 0))
    part = own.task("none", sent, 3, own.parts[3][4:6], {})
    assert torch.equal(part.data.inputs, inputs(own, 0)[4:6])
    assert torch.equal(part.everything.inputs, inputs(own, 0))  # what a defence mixes in is augmented, too


@pytest.mark.parametrize("how", ["update", "gradient"])
def test_what_is_scored_is_what_the_gradient_is_of(how: str) -> None:
    training = "training: {algorithm: fedsgd, batch_size: null, augment: {crop: 2, scale: 0.5, flip: true}}\n"
    attack = f"attacks: [{{name: idlg, observes: {how}}}]\n"
    s = scenario(attack, training)
    own, sent = runtime(s)
    seen, truth = ObservationBuilder(own).observe(ClientVisit("none", sent, 2), s.attacks[0])
    model = own.arm("none").model
    loss = torch.nn.functional.cross_entropy(model(truth.inputs), truth.labels)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
        torch.testing.assert_close(seen.update[name], grad, atol=1e-6, rtol=1e-5)
    stored = own.samples("train", truth.indices)[0]
    assert not torch.equal(truth.inputs, stored)


def test_a_cohort_in_one_call_trains_on_the_same_images() -> None:
    own, sent = runtime(scenario())
    sent_by: dict[str, list[Any]] = {}
    for how in ("loop", "vmap"):
        tasks = [own.task("none", sent, client, own.parts[client], {}) for client in range(3)]
        training = Training(vectorise=how, batch_size=8)  # type: ignore[arg-type]
        sent_by[how] = list(cohort_updates(tasks, training, []))
    for one, other in zip(*sent_by.values(), strict=True):
        assert isinstance(one, Update)
        torch.testing.assert_close(one.tensors, other.tensors, atol=1e-6, rtol=1e-5)


def test_an_epsilon_is_what_it_is_without() -> None:
    private = "defences: [{name: dp_sgd, noise_multiplier: 1, clip: 1, delta: 1e-5}]\n"
    plain = "training: {batch_size: 8}\n"
    one, other = (prepare_inputs(scenario(private, training)).accounts[0].epsilon(3) for training in (BOTH, plain))
    assert one == other


def test_sums_of_clipped_gradients_are_of_the_augmented_samples() -> None:
    private = "defences: [{name: dp_sgd, noise_multiplier: 1e-9, clip: 1, delta: 1e-5}]\n"
    training = "training: {algorithm: fedsgd, batch_size: null, augment: {crop: 2, flip: true}}\n"
    own, sent = runtime(scenario(private, training))
    [update] = own.updates("dp_sgd", sent, [1], {})
    data, model = own.task("dp_sgd", sent, 1, own.parts[1], {}).data, own.arm("dp_sgd").model
    total = torch.zeros(sum(p.numel() for p in model.parameters()))
    for image, label in zip(data.inputs, data.labels, strict=True):
        loss = torch.nn.functional.cross_entropy(model(image[None]), label[None])
        each = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        total += each * min(1, 1 / float(each.norm()))
    found = torch.cat([update.tensors[name].flatten() for name, _ in model.named_parameters()])
    torch.testing.assert_close(found, total / len(data.labels), atol=1e-6, rtol=1e-4)


def test_candidates_for_membership_all_look_as_if_trained_on() -> None:
    attack = "attacks: [{name: membership, knowledge: [candidates]}]\n"
    training = "training: {batch_size: 8, augment: {crop: 6}}\n"
    s = scenario(attack, training)
    own, sent = runtime(s)
    seen, truth = ObservationBuilder(own).observe(ClientVisit("none", sent, 2), s.attacks[0])
    candidates, _ = seen.extra["candidates"]
    for kind in ("member", "non-member"):
        rows = torch.tensor([one.kind == kind for one in truth.candidates])
        shares = (candidates[rows] == 0).float().mean((1, 2, 3))
        assert shares.mean() > 0.6, kind  # digits are half black without a border
    for image, candidate in zip(candidates, truth.candidates, strict=True):
        if candidate.kind == "member":
            place = truth.indices.tolist().index(candidate.sample)
            assert torch.equal(image, truth.inputs[place])


def test_what_cannot_be_augmented() -> None:
    looking_back = "attacks: [{name: idlg, rounds: [2], earlier: 1, observes: gradient}]\n"
    with pytest.raises(ScenarioError, match=r"training\.augment.*`earlier`"):
        prepare_inputs(scenario(looking_back))
    with pytest.raises(ScenarioError, match="augment: has no effect"):
        scenario(training="training: {augment: {}}\n")
    texts = """
name: t
data: {name: text, length: 8}
model: {name: text_rnn}
training: {augment: {flip: true}}
federation: {rounds: 1, clients: 2}
"""
    with pytest.raises(UserError, match=r"training\.augment crops and flips images, but data 'text' has no images"):
        prepare_inputs(scenarios.parse(texts))
    arms = "arms: {none: [], augmented: {training: {augment: {flip: true}}}}\n"
    own, sent = runtime(scenario(arms, ""))
    none, flipped = (own.task(arm, sent, 0, own.parts[0], {}).data.inputs for arm in ("none", "augmented"))
    turned = (none != flipped).flatten(1).any(1)
    assert 0 < turned.sum() < len(turned)
    assert torch.equal(flipped[turned], none[turned].flip(-1))
