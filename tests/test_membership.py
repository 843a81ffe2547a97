"""Membership inference: right about an overfitted client, a coin about samples that nobody trained on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rayfed import scenario as scenarios
from rayfed.attacks.inference.membership import Membership
from rayfed.client.observations import ObservationBuilder
from rayfed.client.runtime import ClientRuntime, Sent
from rayfed.client.visit import ClientVisit, Truth
from rayfed.engine.inputs import prepare
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.metrics.inference import auc
from rayfed.scenario import AttackSpec
from rayfed.store.schemas import TABLES
from rayfed.update import Observation

SCORES = ["loss", "norm", "cosine"]
VICTIMS = (2, 5, 7, 11)


def runtime(epochs: int) -> ClientRuntime:
    scenario = scenarios.parse(
        "{name: t, seed: 8, data: {name: digits, train_samples: 400}, model: mlp, federation: {rounds: 1, clients: 20},"
        f" training: {{epochs: {epochs}, batch_size: 10, lr: 0.1}}}}"
    )
    inputs = prepare(scenario)
    return ClientRuntime(scenario, inputs.data, inputs.parts, torch.device("cpu"))


def observed(h: ClientRuntime, victim: int, score: str = "loss") -> tuple[Observation, Truth]:
    net = h.arm("none").model
    spec = AttackSpec(name="membership", knowledge=["candidates"], score=score)  # type: ignore[call-arg]
    return ObservationBuilder(h).observe(ClientVisit("none", Sent(0, weights_of(net), buffers_of(net)), victim), spec)


@pytest.fixture(scope="module")
def overfitted() -> tuple[ClientRuntime, list[tuple[Observation, Truth]]]:
    h = runtime(epochs=40)
    return h, [observed(h, victim) for victim in VICTIMS]


def scores_of(score: str, h: ClientRuntime, seen: Observation) -> torch.Tensor:
    [found] = Membership(score=score).infer([seen], h.arm("none").model, [torch.Generator()])  # type: ignore[arg-type]
    assert found.status == "ok"
    return found.scores


@pytest.mark.parametrize("score", SCORES)
def test_members_of_an_overfitted_client_stand_out(score: str, overfitted) -> None:  # type: ignore[no-untyped-def]
    h, clients = overfitted
    values = []
    for seen, truth in clients:
        row, images = ObservationBuilder(h).judge(
            truth, Membership(score=score).infer([seen], h.arm("none").model, [torch.Generator()])[0]
        )
        assert row["metric"] == "auc"
        assert row["candidates"] == 40
        assert images == []
        values.append(row["value"])
    assert np.mean(values) > 0.65


@pytest.mark.parametrize("score", SCORES)
def test_samples_that_nobody_trained_on_are_a_coin_toss(score: str, overfitted) -> None:  # type: ignore[no-untyped-def]
    h, clients = overfitted
    images, labels = h._tensors(h.data.test_images, h.data.test_labels, np.arange(340))
    claimed = torch.arange(340) % 2 == 0
    scores = scores_of(score, h, replace(clients[0][0], extra={"candidates": (images, labels)}))
    assert auc(scores, claimed) == pytest.approx(0.5, abs=4 * (341 / (12 * 170 * 170)) ** 0.5)


def test_the_loss_is_that_of_the_local_model(overfitted) -> None:  # type: ignore[no-untyped-def]
    h, clients = overfitted
    seen, _ = clients[1]
    images, labels = seen.extra["candidates"]
    local = {name: w - seen.update[name] for name, w in seen.weights.items()}
    logits = torch.func.functional_call(h.arm("none").model, local, (images,))
    expected = -F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(scores_of("loss", h, seen), expected)


def test_the_gradient_of_a_lone_sample_has_cosine_one() -> None:
    h = runtime(epochs=1)
    seen, _ = observed(h, 3)
    image, label = (t[:1] for t in seen.extra["candidates"])
    update, _ = gradient(h.arm("none").model, seen.weights, {}, image, label)
    alone = replace(seen, update=update)
    scores = scores_of("cosine", h, alone)
    assert scores[0].item() == pytest.approx(1, abs=1e-5)
    assert (scores[1:] < 1 - 1e-4).all()


def test_the_host_asks_about_as_many_members_as_others() -> None:
    h = runtime(epochs=1)
    seen, truth = observed(h, 3)
    images, labels = seen.extra["candidates"]
    assert truth.members is not None
    assert truth.members.sum() * 2 == len(images) == len(labels)
    own = {image.numpy().tobytes() for image in truth.inputs}
    tests, _ = h.test_data()
    others = {image.numpy().tobytes() for image in tests}
    assert all(image.numpy().tobytes() in own for image in images[truth.members])
    assert all(image.numpy().tobytes() in others for image in images[~truth.members])
    again, _ = observed(h, 3)
    assert torch.equal(again.extra["candidates"][0], images)
    assert not truth.members[: len(images) // 2].all()


def test_without_candidates_or_with_a_broken_update_it_says_so() -> None:
    h = runtime(epochs=1)
    seen, truth = observed(h, 3)
    broken = replace(seen, update={name: t * torch.nan for name, t in seen.update.items()})
    nobody, bad = Membership().infer([replace(seen, extra={}), broken], h.arm("none").model, [torch.Generator()] * 2)
    assert (nobody.status, bad.status) == ("not applicable", "diverged")
    assert "candidates" in nobody.message
    assert ObservationBuilder(h).judge(truth, bad)[0]["value"] is None


def test_auc_of_known_orders() -> None:
    members = torch.tensor([True, True, False, False])
    assert auc(torch.tensor([4.0, 3.0, 2.0, 1.0]), members) == 1
    assert auc(torch.tensor([1.0, 1.0, 1.0, 1.0]), members) == 0.5
    assert auc(torch.tensor([4.0, 1.0, 3.0, 2.0]), members) == 0.5


def test_inferences_pass_through_the_workers_into_their_own_table() -> None:
    from rayfed.engine.attacker import Attacker
    from rayfed.engine.attacking import AttackCall, _note_attack
    from rayfed.engine.tables import RoundTables
    from rayfed.engine.worker import ClientWorker

    scenario = scenarios.parse(
        "{name: t, data: {name: digits, public: 0.2}, model: lenet, federation: {rounds: 1, clients: 40}, attacks: ["
        "{name: membership, knowledge: [candidates]},"
        "{name: property_inference, knowledge: [public], target_class: 8, batches: 10},"
        "{name: gan, target_class: 3, iterations: 2, images: 2},"
        "{name: imprint, observes: gradient, batch_size: 4}]}"
    )
    inputs = prepare(scenario)
    client = ClientWorker(scenario, inputs.data, inputs.parts, torch.device("cpu"))
    attacker = Attacker(inputs.data.sample, 10, torch.device("cpu"))
    net = client.arm("none").model
    sent, tables = Sent(0, weights_of(net), buffers_of(net)), RoundTables()
    for attack in scenario.attacks:
        _, seen, truths = client.observe("none", sent, [2, 3], attack, {}, 0)
        bare, found = attacker.attack(attack, client.specs["none"], seen, [b"0", b"1"])
        assert all(len(guess.images) == 0 for guess in bare)
        scored = client.score(truths, found, strip=True)
        _note_attack(tables, AttackCall(client.specs["none"], attack, (2, 3), 0, strip=True), 0, bare, scored)
    names = [row["attack"] for row in tables.inferences]
    assert names == ["membership"] * 2 + ["property_inference"] * 2 + ["gan"] * 2
    assert {row["status"] for row in tables.inferences} == {"ok"}
    assert all(0 <= row["value"] <= 1 for row in tables.inferences)
    assert {row["attack"] for row in tables.attacks} == {"imprint"}
    assert {row["attack"] for row in tables.images} == {"gan", "imprint"}
    columns = set(TABLES["inferences"].names)
    assert all(set(row) == columns for row in tables.inferences)
