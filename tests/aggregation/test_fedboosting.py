"""FedBoosting: its weights against the formulas worked by hand, its matrix against direct evaluation, poison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import exp, inf, log, nan
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

from benchmarks.fedboosting import FLIPPERS, POISON, play, prepared, shares
from rayfed import scenario as scenarios
from rayfed.aggregation.fedboosting import Evaluation, FedBoosting, Score
from rayfed.aggregation.server import TreeFold
from rayfed.core.questions import Memory
from rayfed.data.partitions.base import hold_out
from rayfed.errors import ScenarioError, UserError
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.inputs import prepare_inputs
from rayfed.update import Named, Update

CPU = torch.device("cpu")
LOSSES = {4: 0.5, 7: 1.25, 9: 0.25}
LOSS = {4: (0.6, 0.9, 0.4), 7: (2.0, 1.5, 3.0), 9: (0.3, 0.8, 1.3)}
ACCURACY = {4: (0.75, 0.5, 1.0), 7: (0.25, 0.5, 0.25), 9: (1.0, 0.75, 0.5)}
FIT = {4: 0.8, 7: 0.5, 9: 0.9}
"""Of three clients: training losses, and by model what clients 4, 7 and 9 say of it."""


def evaluations() -> dict[int, Evaluation]:
    return {
        judge: Evaluation({model: (LOSS[model][place], ACCURACY[model][place]) for model in LOSSES}, FIT[judge])
        for place, judge in enumerate(LOSSES)
    }


def softmax(values: Mapping[int, float]) -> dict[int, float]:
    powers = {key: exp(value) for key, value in values.items()}
    return {key: power / sum(powers.values()) for key, power in powers.items()}


def proportional(values: Mapping[int, float]) -> dict[int, float]:
    return {key: value / sum(values.values()) for key, value in values.items()}


def weights_of(rule: FedBoosting, said: Mapping[int, Evaluation] | None = None) -> dict[int, float]:
    return rule.weigh(LOSSES, said or evaluations(), {})[0]


def test_the_papers_weights_are_equation_4_2() -> None:
    share = softmax(LOSSES)
    found = weights_of(FedBoosting())
    assert found == pytest.approx(softmax({c: share[c] * sum(ACCURACY[c]) for c in LOSSES}))
    found = weights_of(FedBoosting(score="loss"))
    assert found == pytest.approx(softmax({c: share[c] * sum(exp(-x) for x in LOSS[c]) for c in LOSSES}))


def test_without_training_losses_all_count_as_equal() -> None:
    expected = softmax({c: fmean(ACCURACY[c]) for c in LOSSES})
    assert weights_of(FedBoosting(training_loss=False)) == pytest.approx(expected)
    equal = FedBoosting().weigh(dict.fromkeys(LOSSES, 0.7), evaluations(), {})[0]
    assert equal == pytest.approx(expected)


def test_the_published_codes_weights_are_products() -> None:
    found = weights_of(FedBoosting(rule="code"))
    assert found == pytest.approx(proportional({c: fmean(ACCURACY[c]) * FIT[c] for c in LOSSES}))
    found = weights_of(FedBoosting(rule="code", training_loss=False))
    assert found == pytest.approx(proportional({c: fmean(ACCURACY[c]) for c in LOSSES}))
    found = weights_of(FedBoosting(rule="code", score="loss"))
    assert found == pytest.approx(proportional({c: 1 / fmean(LOSS[c]) / LOSSES[c] for c in LOSSES}))
    found = weights_of(FedBoosting(rule="code", score="loss", training_loss=False))
    assert found == pytest.approx(proportional({c: 1 / fmean(LOSS[c]) for c in LOSSES}))


@pytest.mark.parametrize("rule", ["paper", "code"])
def test_sharpness_is_a_power_of_the_weights(rule: Any) -> None:
    plain = weights_of(FedBoosting(rule=rule))
    sharp = weights_of(FedBoosting(rule=rule, sharpness=3))
    assert sharp == pytest.approx(proportional({c: p**3 for c, p in plain.items()}))


@pytest.mark.parametrize("rule", ["paper", "code"])
@pytest.mark.parametrize("score", ["accuracy", "loss"])
def test_what_has_diverged_weighs_least(rule: Any, score: Any) -> None:
    said = {j: replace(judgement, validation=judgement.validation | {7: (nan, 0.0)}, training_accuracy=0.5)
            for j, judgement in evaluations().items()}  # fmt: skip
    found = weights_of(FedBoosting(rule=rule, score=score, training_loss=False), said)
    assert sum(found.values()) == pytest.approx(1)
    assert found[7] == min(found.values())


@pytest.mark.parametrize("rule", ["paper", "code"])
@pytest.mark.parametrize("score", ["accuracy", "loss"])
@pytest.mark.parametrize("value", [(nan, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("loss", [nan, 0.0])
def test_models_that_are_all_alike_weigh_alike(rule: Any, score: Any, value: tuple[float, float], loss: float) -> None:
    said = {judge: Evaluation(dict.fromkeys(LOSSES, value), value[1]) for judge in LOSSES}
    found, _ = FedBoosting(rule=rule, score=score).weigh(dict.fromkeys(LOSSES, loss), said, {})
    assert found == pytest.approx(dict.fromkeys(LOSSES, 1 / 3))


def test_a_client_that_drew_no_sample_has_the_others_mean_training_loss() -> None:
    some, _ = FedBoosting().weigh(LOSSES | {7: nan}, evaluations(), {})
    mean, _ = FedBoosting().weigh(LOSSES | {7: fmean([LOSSES[4], LOSSES[9]])}, evaluations(), {})
    assert some == mean


def smoothed(rule: FedBoosting, rounds: list[list[int]]) -> tuple[list[dict[int, float]], Memory]:
    """Rounds with some of the clients each, in which client 7 does better every time."""
    found, memory = [], Memory()
    for number, clients in enumerate(rounds):
        said = {j: Evaluation({c: (1.0, 0.1 * number if c == 7 else 0.3) for c in clients}) for j in clients}
        weights, memory = rule.weigh(dict.fromkeys(clients, 1.0), said, memory)
        found.append(weights)
    return found, memory


def test_smoothed_weights_are_those_of_torchs_adam_on_their_logits() -> None:
    everybody = [4, 7, 9]
    raw, _ = smoothed(FedBoosting(sharpness=5), [everybody] * 6)
    found, _ = smoothed(FedBoosting(sharpness=5, smoothing=0.2), [everybody] * 6)
    targets = torch.tensor([[w[c] for c in everybody] for w in raw]).double()
    logits = (3 * targets[0]).log().requires_grad_()
    adam = torch.optim.Adam([logits], lr=0.2)
    for target, weights in zip(targets, found, strict=True):
        adam.zero_grad()
        F.cross_entropy(logits, target).backward()
        adam.step()
        expected = torch.softmax(logits.detach(), dim=0)
        torch.testing.assert_close(torch.tensor([weights[c] for c in everybody]).double(), expected)


def test_smoothing_leaves_who_is_absent_as_it_was_and_starts_who_is_new_at_its_own_weight() -> None:
    rule = FedBoosting(sharpness=5, smoothing=0.2)
    _, before = smoothed(rule, [[4, 7]] * 2)
    _, after = smoothed(rule, [[4, 7]] * 2 + [[4, 9]])
    assert torch.equal(after[7], before[7])
    assert not torch.equal(after[4], before[4])
    assert after[4][3] == 3
    assert after[9][3] == 1
    first, memory = smoothed(rule, [[4, 7]])
    raw, _ = smoothed(FedBoosting(sharpness=5), [[4, 7]])
    assert first[0] == pytest.approx(raw[0])
    assert float(memory[4][0]) == pytest.approx(log(2 * raw[0][4]))


def sent_updates(count: int) -> list[Update]:
    g = torch.Generator().manual_seed(count)
    return [Update(c, 0, {"w": torch.randn(3, generator=g)}, {"m": torch.randn(2, generator=g)}, 1 + c, 0.5 * c)
            for c in range(count)]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_step_is_the_weighted_sum_whatever_the_cohorts(size: int) -> None:
    sent, rule = sent_updates(5), FedBoosting()
    cohorts = [sent[i : i + size] for i in range(0, 5, size)]
    fold = TreeFold(rule, len(cohorts))
    for i in reversed(range(len(cohorts))):
        fold.add(i, rule.partial(cohorts[i]))
    total = rule.begin_round(range(5), {}).finalise(fold.total())
    assert list(total.candidates) == list(range(5))
    question = total.request()
    assert question is not None
    assert question.of == "all"
    assert torch.equal(question.payload.models[3][0]["w"], sent[3].tensors["w"])
    said = {j: Evaluation({m: (1.0, (m + j) / 10) for m in range(5)}) for j in range(5)}
    total = total.receive(said)
    assert total.request() is None
    step, buffers = rule.combine(total, torch.Generator())
    share = softmax({c: 0.5 * c for c in range(5)})
    weights = list(softmax({m: share[m] * sum((m + j) / 10 for j in range(5)) for m in range(5)}).values())
    for name, found, of in (("w", step, "tensors"), ("m", buffers, "buffers")):
        expected = np.average([getattr(u, of)[name].numpy() for u in sent], axis=0, weights=weights)
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-5, atol=1e-6)
    rows = total.rows()
    assert [row["weight"] for row in rows["weights"]] == pytest.approx(weights)
    assert [row["accuracy"] for row in rows["weights"]] == pytest.approx([(m + 2) / 10 for m in range(5)])
    assert {(r["model"], r["validator"]): r["accuracy"] for r in rows["scores"]} == {
        (m, j): (m + j) / 10 for m in range(5) for j in range(5)
    }


class Fixed:
    """A client that finds what it is told to."""

    client, round = 0, 0

    def __init__(self, loss: float) -> None:
        self.loss = loss

    def evaluate(self, update: Named, buffers: Named, split: str = "validation") -> tuple[float, float]:
        return (self.loss, 0.25) if split == "validation" else (0.1, 0.875)


def test_a_loss_that_is_not_finite_counts_as_nothing_right() -> None:
    said = FedBoosting().answer(Score({0: ({}, {}), 1: ({}, {})}), Fixed(inf))
    assert [accuracy for _, accuracy in said.validation.values()] == [0.0, 0.0]
    assert FedBoosting().answer(Score({0: ({}, {})}), Fixed(2.0)).validation == {0: (2.0, 0.25)}


def test_the_codes_rule_has_a_client_tell_its_training_accuracy() -> None:
    assert FedBoosting(rule="code").answer(Score({0: ({}, {})}), Fixed(2.0)).training_accuracy == 0.875


def test_a_share_of_every_class_is_held_out_and_nothing_lost() -> None:
    labels = np.repeat(np.arange(4), [40, 20, 60, 30])
    part = np.random.default_rng(0).permutation(150)[:100]
    trained, held = hold_out(part, labels, 0.2)
    assert sorted([*trained, *held]) == sorted(part)
    counts = np.bincount(labels[part], minlength=4)
    assert np.abs(np.bincount(labels[held], minlength=4) - 0.2 * counts).max() < 1
    assert len(hold_out(part[:2], labels, 0.1)[1]) == 1
    with pytest.raises(UserError, match="leaves no training sample"):
        hold_out(part[:1], labels, 0.1)


TEXT = """
name: t
seed: 3
data: {name: digits, size: 8}
partition: {name: dirichlet, alpha: 1}
model: {name: mlp, hidden: [32]}
training: {batch_size: 8, lr: 0.1}
federation: {rounds: 2, clients: 5, clients_per_round: 4, cohort_size: 1, validation: 0.25}
arms:
  fedavg: []
  boosted: {aggregation: fedboosting}
"""


def test_a_rule_that_validates_wants_a_validation_share() -> None:
    with pytest.raises(ScenarioError, match=r"federation.validation: fedboosting"):
        scenarios.parse(TEXT, changes=["federation.validation=0"])
    scenarios.parse(TEXT, changes=["federation.validation=0", "arms.boosted={}"])


def test_clients_train_on_what_they_have_not_held_out_in_all_arms() -> None:
    whole = prepare_inputs(scenarios.parse(TEXT, changes=["federation.validation=0", "arms.boosted={}"]))
    split = prepare_inputs(scenarios.parse(TEXT))
    assert not len(whole.validation)
    for everything, trained, held in zip(whole.parts, split.parts, split.validation, strict=True):
        assert len(held) == round(0.25 * len(everything))
        assert sorted([*trained, *held]) == sorted(everything)
    runtime = runtime_of(split)
    for arm in runtime.specs:
        built = runtime.arm(arm)
        _, report = runtime.cohort(arm, Sent(0, built.weights, built.buffers), [1, 2], {})
        assert [row["samples"] for row in report.rows] == [len(split.parts[c]) for c in (1, 2)]
    assert list(split.accounts[0].samples) == [len(part) for part in split.parts]


def runtime_of(inputs: Any) -> ClientRuntime:
    return ClientRuntime(inputs.scenario, inputs.data, inputs.parts, CPU, inputs.validation)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedsgd"])
def test_the_matrix_is_what_the_clients_models_get_on_held_out_samples(algorithm: str) -> None:
    inputs = prepare_inputs(
        scenarios.parse(TEXT, changes=[f"training.algorithm={algorithm}", "federation.server.lr=0.3"])
    )
    runtime, rule = runtime_of(inputs), FedBoosting()
    built = runtime.arm("boosted")
    sent = Sent(0, built.weights, built.buffers)
    partials = [runtime.cohort("boosted", sent, [c], {})[0] for c in range(3)]
    total = rule.begin_round(range(3), {}).finalise(rule.merge(rule.merge(partials[0], partials[1]), partials[2]))
    question = total.request()
    assert question is not None
    said = {c: runtime.answer("boosted", sent, question.payload, c, {}, {})[1] for c in range(3)}
    scale = 1.0 if algorithm == "fedavg" else 0.1  # the model that a client had, not what the server makes of it
    for model, candidate in total.candidates.items():
        local = {name: w - scale * candidate.model[0][name] for name, w in sent.weights.items()}
        for judge in range(3):
            rows = inputs.validation[judge]
            images = torch.from_numpy(inputs.data.train_images[rows]).float() / 255
            labels = torch.from_numpy(inputs.data.train_labels[rows])
            logits = functional_call(built.model, local, (images,))
            loss, accuracy = said[judge].validation[model]
            assert loss == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)
            assert accuracy == pytest.approx(float((logits.argmax(1) == labels).float().mean()))


def test_what_clients_tell_beside_their_updates_breaks_a_guarantee() -> None:
    noise = "[{name: dp_sgd, noise_multiplier: 1.0, clip: 1.0}]"
    changes = [f"arms.fedavg={noise}", f"arms.boosted={{aggregation: fedboosting, defences: {noise}}}"]
    rows = {row["arm"]: row for row in prepare_inputs(scenarios.parse(TEXT, changes=changes)).privacy}
    assert rows["fedavg"]["epsilon"] > 0
    assert rows["boosted"].get("epsilon") is None
    assert "FedBoosting" in rows["boosted"]["note"]


@pytest.mark.engine
def test_clients_that_flip_labels_lose_weight_and_accuracy_is_kept() -> None:
    """They flip those of their validation samples, too."""
    runs = {arm: list(play(prepared(POISON, 11, ["federation.rounds=5"], [arm]), arm)) for arm in ("fedavg", "sharp")}
    assert max(map(shares, runs["sharp"])) < 0.5
    weights = list(runs["sharp"][-1].weights.values())
    assert max(weights[:FLIPPERS]) < 0.5 * fmean(weights[FLIPPERS:])
    assert runs["sharp"][-1].accuracy > runs["fedavg"][-1].accuracy
