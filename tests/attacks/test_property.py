"""Property inference: whether a class is in the batch shows in the update, and not in noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rayfed import scenario as scenarios
from rayfed.attacks.inference.property_inference import PropertyInference
from rayfed.attacks.inference.shadows import shadow_updates, spread_as
from rayfed.attacks.matching.local_steps import local_update
from rayfed.core import seeds
from rayfed.defences.base import Batch, Task
from rayfed.defences.gaussian import Gaussian
from rayfed.defences.prune import Prune
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.models.build import build_model
from rayfed.registry import build
from rayfed.samples import Pixels
from rayfed.scenario import Training
from rayfed.simulation.client.local import update_method
from rayfed.simulation.client.runtime import ClientRuntime
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.client.visit import ClientVisit
from rayfed.simulation.inputs import prepare_inputs
from rayfed.threat_model.grants.defence import DefendedClient
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.update import LocalTraining, Observation, Update

SIZE = 8


def samples(name: str, split: str) -> tuple[Tensor, Tensor]:
    data = build("datasets", name, {"size": 16}).load()
    images, labels = getattr(data, f"{split}_images"), getattr(data, f"{split}_labels")
    return torch.from_numpy(images).float() / 255, torch.from_numpy(labels)


def victims(name: str, net: nn.Module, target: int, count: int) -> list[tuple[Observation, bool]]:
    """Batches of the test split, one half with the class, and the public images of an attacker."""
    public, (images, labels) = samples(name, "train"), samples(name, "test")
    draw = np.random.default_rng(17)
    weights, buffers = weights_of(net), buffers_of(net)
    found = []
    for i in range(count):
        rows = torch.from_numpy(draw.choice(np.flatnonzero(labels != target), SIZE, replace=False))
        if i % 2:
            rows[0] = int(draw.choice(np.flatnonzero(labels == target)))
        update, _ = gradient(net, weights, buffers, images[rows], labels[rows])
        shape = (images.shape[1], images.shape[2], images.shape[3])
        classes = int(labels.max()) + 1
        seen = Observation(i, 0, weights, buffers, update, 1.0, SIZE, Pixels(*shape), classes, extra={"public": public})
        found.append((seen, bool(i % 2)))
    return found


def accuracy(attack: PropertyInference, net: nn.Module, seen: list[tuple[Observation, bool]]) -> float:
    found = attack.infer([o for o, _ in seen], net, [torch.Generator().manual_seed(i) for i in range(len(seen))])
    assert {f.status for f in found} == {"ok"}
    return float(np.mean([(f.scores.item() > 0.5) == answer for f, (_, answer) in zip(found, seen, strict=True)]))


@pytest.mark.engine
@pytest.mark.parametrize(("name", "target"), [("digits", 8), ("photos", 2)])
def test_a_class_shows_in_the_gradient_and_not_in_noise(name: str, target: int) -> None:
    images, labels = samples(name, "test")
    net = build_model("lenet", {}, (images.shape[1], 16, 16), int(labels.max()) + 1, seed=6)
    attack = PropertyInference(target_class=target, batches=100)
    seen = victims(name, net, target, 16)
    assert accuracy(attack, net, seen) >= 0.8  # by chance once in a hundred
    generator = torch.Generator().manual_seed(3)
    drowned = [
        (replace(o, update={n: 10 * torch.randn(t.shape, generator=generator) for n, t in o.update.items()}), answer)
        for o, answer in seen
    ]
    assert 0.1 < accuracy(attack, net, drowned) < 0.9


def small_net() -> nn.Module:
    return build_model("mlp", {"hidden": [16]}, (1, 16, 16), 10, seed=6)


def pruned(seen: Observation) -> Observation:
    """The update with a tenth of each tensor's values left, the largest."""
    kept = {n: t * (t.abs() >= t.abs().flatten().quantile(0.9)) for n, t in seen.update.items()}
    return replace(seen, update=kept)


@pytest.mark.engine
def test_a_pruned_update_shows_by_its_zeros_what_shadows_have_to_look_like() -> None:
    net = small_net()
    seen = [(pruned(o), answer) for o, answer in victims("digits", net, 8, 16)]
    assert accuracy(PropertyInference(target_class=8, batches=100), net, seen) >= 0.9


@pytest.mark.engine
def test_who_knows_the_defence_defends_its_shadows() -> None:
    net, pipeline = small_net(), (Prune(ratio=0.9),)
    played = DefendedClient(Training(algorithm="fedsgd", batch_size=None), pipeline, clients_per_round=1, answers=1)
    seen = []
    for o, answer in victims("digits", net, 8, 16):
        sent = pipeline[0].wrap_update(lambda _, o=o: Update(0, 0, o.update, {}, SIZE, 0.0))  # type: ignore[misc]
        seen.append((replace(o, update=sent(None).tensors, extra={**o.extra, "defended": played}), answer))
    assert accuracy(PropertyInference(target_class=8, batches=100), net, seen) >= 0.9


def test_a_defended_client_sends_what_a_client_with_the_defences_does() -> None:
    net = small_net()
    [(seen, _)] = victims("digits", net, 8, 1)
    images, labels = (t[:SIZE] for t in seen.extra["public"])
    training = Training(algorithm="fedavg", epochs=2, batch_size=4, lr=0.1)
    generator = torch.Generator().manual_seed(5)
    found = DefendedClient(training, (Gaussian(sigma=0.1),), 1, 2).update(seen, net, images, labels, generator)
    generator, answers = torch.Generator().manual_seed(5), []
    for _ in range(2):
        order = int.from_bytes(seeds.sample_key(generator))
        batch = Batch(images, labels, places=torch.arange(SIZE))
        task = Task(0, 0, net, seen.weights, seen.buffers, batch, generator, order, classes=10)
        answers.append(update_method(training, (Gaussian(sigma=0.1),))(task).tensors)
    for name, mean in found.items():
        torch.testing.assert_close(mean, (answers[0][name] + answers[1][name]) / 2)


def test_shadows_are_spread_as_the_update_is_in_their_own_order() -> None:
    values = torch.tensor([[3.0, -1.0, 0.5, 2.0], [0.0, 9.0, -9.0, 1.0]])
    found = spread_as(values, torch.tensor([0.0, 7.0, 0.0, -5.0]))
    assert found.tolist() == [[7, -5, 0, 0], [0, 7, -5, 0]]


def test_shadows_take_the_victims_local_steps() -> None:
    net = small_net()
    [(seen, _)] = victims("digits", net, 8, 1)
    images, labels = (t[: 2 * SIZE] for t in seen.extra["public"])
    local = LocalTraining(steps=3, batch_size=4, lr=0.1)
    grid = replace(seen, local=local)
    inputs = images.unflatten(0, (2, SIZE)), labels.unflatten(0, (2, SIZE))
    found = torch.cat(list(shadow_updates(grid, net, *inputs, torch.Generator())))
    alone = local_update(net, seen.weights, {}, inputs[0][1], inputs[1][1], local)
    expected = torch.cat([spread_as(t.flatten()[None], seen.update[n].flatten())[0] for n, t in alone.items()])
    torch.testing.assert_close(found[1].sort().values, expected.sort().values)
    assert torch.corrcoef(torch.stack([found[1], expected]))[0, 1] > 0.99  # but for ties and rounding


@pytest.mark.parametrize("observes", ["gradient", "update"])
def test_chance_is_that_of_the_batches_that_the_victims_could_have_drawn(observes: str) -> None:
    """One class or two a client: most victims have no 8, and none of all clients' shares is that of one victim."""
    size = "batch_size: 4, " if observes == "gradient" else ""
    scenario = scenarios.parse(
        "{name: t, data: {name: digits, size: 8, train_samples: 300, public: 0.2}, partition: shards,"
        " federation: {rounds: 1, clients: 12}, training: {algorithm: fedsgd, batch_size: 10}, attacks: ["
        f"{{name: property_inference, knowledge: [public], target_class: 8, victims: 10, observes: {observes}, {size}"
        "batches: 10}]}"
    )
    inputs = prepare_inputs(scenario)
    h = ClientRuntime(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"))
    arm = h.arm("none")
    visit = ClientVisit("none", Sent(0, arm.weights, arm.buffers), 2)
    seen, truth = ObservationBuilder(h).observe(visit, scenario.attacks[0])
    found = scenario.attacks[0].build().infer([seen], arm.model, [torch.Generator()])[0]
    row, _ = ObservationBuilder(h).judge(truth, found)
    draw, holds = np.random.default_rng(0), []
    batch = 4 if observes == "gradient" else 10
    for victim in range(10):
        labels = inputs.data.train_labels[inputs.parts[victim]]
        holds += [8 in draw.choice(labels, min(batch, len(labels)), replace=False) for _ in range(1000)]
    assert row["chance"] == pytest.approx(max(np.mean(holds), 1 - np.mean(holds)), abs=0.03)
    assert found.label == 8


def test_a_result_depends_on_its_own_generator_alone() -> None:
    net = build_model("lenet", {}, (1, 16, 16), 10, seed=6)
    (first, _), (second, _) = victims("digits", net, 8, 2)
    attack = PropertyInference(target_class=8, batches=20)
    together = attack.infer([first, second], net, [torch.Generator().manual_seed(i) for i in (1, 2)])
    [alone] = attack.infer([second], net, [torch.Generator().manual_seed(2)])
    assert torch.equal(together[1].scores, alone.scores)


def test_it_says_what_it_lacks() -> None:
    net = build_model("mlp", {"hidden": [8]}, (1, 16, 16), 10, seed=6)
    [(seen, _)] = victims("digits", net, 8, 1)
    broken = replace(seen, update={n: t * torch.nan for n, t in seen.update.items()})
    attack = PropertyInference(target_class=8)
    nothing, bad = attack.infer([replace(seen, extra={}), broken], net, [torch.Generator()] * 2)
    [absent] = PropertyInference(target_class=11).infer([seen], net, [torch.Generator()])
    assert (nothing.status, bad.status, absent.status) == ("not applicable", "diverged", "not applicable")
    assert "public" in nothing.message
