"""Membership inference: right about a client's own samples, a coin about samples that nobody trained on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch.nn import functional as F

from rayfed import scenario as scenarios
from rayfed.attacks.inference.membership import Membership, log_ratios, ridge
from rayfed.attacks.sealed import attempt
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.scenario import AttackSpec
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.client.visit import ClientVisit, ObservationRequest, Truth
from rayfed.simulation.inputs import prepare_inputs
from rayfed.store.schemas import TABLES
from rayfed.threat_model.observations import ObservationBuilder
from rayfed.update import Observation

SCORES = ["loss", "norm", "cosine", "regression", "lira"]
VICTIMS = (2, 5, 7, 11)
SKEWED = "{name: shards, shards_per_client: 2}"


def runtime(
    epochs: int, partition: str = "iid", validation: float = 0.5, seed: int = 8, arms: str = "{none: []}"
) -> ClientRuntime:
    scenario = scenarios.parse(
        f"{{name: t, seed: {seed}, "
        "data: {name: digits, size: 8, train_samples: 900, public: 0.1}, model: {name: mlp,"
        f" hidden: [32]}}, partition: {partition}, federation: {{rounds: 1, clients: 20, validation: {validation}}},"
        f" arms: {arms}, training: {{epochs: {epochs}, batch_size: 10, lr: 0.1}}}}"
    )
    inputs = prepare_inputs(scenario)
    return ClientRuntime(scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)


def observed(h: ClientRuntime, victim: int, arm: str = "none", **settings: object) -> tuple[Observation, Truth]:
    net = h.arm(arm).model
    raw = {"name": "membership", "knowledge": ["candidates", "public"], **settings}
    visit = ClientVisit(arm, Sent(0, weights_of(net), buffers_of(net)), victim)
    return ObservationBuilder(h).observe(visit, AttackSpec.model_validate(raw))


@pytest.fixture(scope="module")
def overfitted() -> tuple[ClientRuntime, list[tuple[Observation, Truth]]]:
    h = runtime(epochs=40)
    return h, [observed(h, victim) for victim in VICTIMS]


def scores_of(score: str, h: ClientRuntime, seen: Observation) -> torch.Tensor:
    [found] = Membership(score=score).infer([seen], h.arm("none").model, [torch.Generator()])  # type: ignore[arg-type]
    assert found.status == "ok"
    return found.scores


def judged(score: str, h: ClientRuntime, seen: Observation, truth: Truth) -> dict[str, float]:
    attack = Membership(score=score)  # type: ignore[arg-type]
    row, images = ObservationBuilder(h).judge(truth, attack.infer([seen], h.arm("none").model, [torch.Generator()])[0])
    assert (row["metric"], images) == ("auc", [])
    return row


@pytest.mark.engine
@pytest.mark.parametrize("score", SCORES)
def test_members_of_an_overfitted_client_stand_out_and_controls_do_not(score: str, overfitted) -> None:  # type: ignore[no-untyped-def]
    h, clients = overfitted
    rows = [judged(score, h, *client) for client in clients]
    assert fmean(row["value"] for row in rows) > 0.6
    assert fmean(row["control"] for row in rows) == pytest.approx(0.5, abs=4 * by_chance(rows))


def by_chance(rows: list[dict[str, float]]) -> float:
    """Return the deviation of the AUC of as many scores that say nothing."""
    among = sum(row["candidates"] for row in rows) / 2
    return ((2 * among + 1) / (12 * among**2)) ** 0.5


@pytest.mark.engine
@pytest.mark.parametrize("score", SCORES)
def test_the_control_is_a_coin_where_members_differ_in_nothing_else(score: str) -> None:
    rows = []
    for seed in range(5):
        h = runtime(1, seed=seed)
        rows += [judged(score, h, *observed(h, victim, shadows=8)) for victim in VICTIMS]
    assert fmean(row["control"] for row in rows) == pytest.approx(0.5, abs=4 * by_chance(rows))


def test_who_has_the_defences_code_finds_members_that_others_do_not() -> None:
    """On which gates on membership rest: noise drawn from a client's number hides members from the blind alone."""
    h = runtime(1, arms="{none: [], x: [{name: 'tests.helpers.planted.defences:KnownNoise'}]}")

    def scores(arm: str, *knowledge: str) -> torch.Tensor:
        seen, _ = observed(h, 3, arm, knowledge=["candidates", *knowledge])
        [guess] = attempt(Membership(), [seen], h.arm(arm).model, [torch.Generator()], False)
        return guess.scores  # type: ignore[union-attr]

    bare, blind, informed = scores("none"), scores("x"), scores("x", "defence", "code")
    assert float((informed - bare).norm()) < 0.01 * float(bare.norm()) < float((blind - bare).norm())


def test_lira_trains_its_shadows_behind_the_defence_that_it_knows() -> None:
    h = runtime(1, arms="{none: [], x: [{name: prune, ratio: 0.9}]}")
    seen, _ = observed(h, 3, "x", knowledge=["candidates", "public", "defence"], shadows=4)
    defended, made = seen.extra["defended"], []

    class Spy:
        def update(self, *given: Any) -> Any:
            made.append(defended.update(*given))
            return made[-1]

    spied = replace(seen, extra={**seen.extra, "defended": Spy()})
    [found] = Membership(score="lira", shadows=4).infer([spied], h.arm("x").model, [torch.Generator()])
    assert found.status == "ok"
    assert len(made) == 2 * 4, "for the update, and for the control"
    zeros = [float(torch.cat([t.flatten() for t in one.values()]).eq(0).double().mean()) for one in made]
    assert zeros == pytest.approx([0.9] * 8, abs=0.01)


@pytest.mark.parametrize("of", ["all clients", "the victim"])
def test_the_control_shows_a_bias_of_where_members_are_from(of: str) -> None:
    """Training images are darker than those of the test split, and nothing of a member is in the update."""
    h, rows = runtime(1, validation=0), []
    bright, dark = h.data.train_images, (h.data.train_images * 0.6).astype(h.data.train_images.dtype)
    for victim in VICTIMS:
        images = dark if of == "all clients" else bright.copy()
        images[h.parts[victim]] = dark[h.parts[victim]]
        h.data = replace(h.data, train_images=images)
        seen, truth = observed(h, victim)
        silent = {name: torch.zeros_like(t) for name, t in seen.update.items()}
        rows.append(judged("norm", h, replace(seen, update=silent), truth))
    assert abs(fmean(row["control"] for row in rows) - 0.5) > 8 * by_chance(rows)


@pytest.mark.parametrize("validation", [0.0, 0.5])
def test_label_skew_makes_no_members(validation: float) -> None:
    """Clients hold one class or two: who knows labels alone tells nobody apart, whatever the update."""
    h = runtime(1, SKEWED, validation)
    for victim in VICTIMS:
        seen, truth = observed(h, victim)
        kinds = {kind: [] for kind in ("member", "non-member")}
        for candidate, label in zip(truth.candidates, seen.extra["candidates"][1].tolist(), strict=True):
            kinds[candidate.kind].append(label)
        assert Counter(kinds["member"]) == Counter(kinds["non-member"]) == Counter(seen.extra["control"][1].tolist())
        assert kinds["member"]
        assert set(kinds["member"]) <= set(h.data.train_labels[h.parts[victim]].tolist())


def test_non_members_and_the_controls_samples_are_the_clients_own_and_trained_nobody() -> None:
    h = runtime(1, SKEWED)
    seen, truth = observed(h, 3)
    numbers = {kind: [c.sample for c in truth.candidates if c.kind == kind] for kind in ("member", "non-member")}
    assert set(numbers["member"]) <= set(h.parts[3].tolist())
    assert set(numbers["non-member"]) <= set(h.validation[3].tolist())
    held, _ = h.samples("train", h.validation[3])
    of_control = {tuple(image.flatten().tolist()) for image in seen.extra["control"][0]}
    assert of_control <= {tuple(image.flatten().tolist()) for image in held}
    assert not of_control & {tuple(image.flatten().tolist()) for image in seen.extra["candidates"][0]}
    every, labels = h.samples("train", np.array([c.sample for c in truth.candidates]))
    assert torch.equal(seen.extra["candidates"][0], every)
    assert torch.equal(seen.extra["candidates"][1], labels)


def test_without_held_out_samples_others_are_of_the_test_split() -> None:
    h = runtime(1, validation=0)
    seen, truth = observed(h, 3)
    unseen = [(c.sample, i) for i, c in enumerate(truth.candidates) if c.kind != "member"]
    images, _ = h.test_data(np.array([sample for sample, _ in unseen]))
    assert torch.equal(seen.extra["candidates"][0][[i for _, i in unseen]], images)


def test_a_held_out_sample_that_another_client_trains_on_is_no_candidate() -> None:
    h = runtime(1)
    _, before = observed(h, 3)
    shared = next(c.sample for c in before.candidates if c.kind == "non-member")
    h.parts = type(h.parts).from_indices([*h.parts[:4], np.append(h.parts[4], shared), *h.parts[5:]])
    _, after = observed(h, 3)
    assert shared not in [c.sample for c in after.candidates]


def test_a_run_without_such_an_attack_trains_on_the_same_samples() -> None:
    text = (
        "{name: t, data: {name: digits, size: 8, train_samples: 200}, federation: {rounds: 1, clients: 4}, attacks: %s}"
    )
    parts = [
        prepare_inputs(scenarios.parse(text % a)).parts for a in ("[]", "[{name: membership, knowledge: [candidates]}]")
    ]
    assert all(np.array_equal(one, other) for one, other in zip(*parts, strict=True))


def test_the_regression_reads_the_members_of_one_gradient() -> None:
    """The update is the mean of eight gradients out of 16: nothing else is one."""
    h = runtime(epochs=1)
    values = []
    for victim in VICTIMS:
        seen, truth = observed(h, victim, observes="gradient", batch_size=8)
        row = judged("regression", h, seen, truth)
        assert row["value"] > judged("cosine", h, seen, truth)["value"]
        values.append(row["value"])
    assert fmean(values) > 0.95


def test_ridge_is_scikit_learns_at_the_penalty_of_the_least_score() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, noise = (torch.randn(n, generator=generator, dtype=torch.float64) for n in ((12, 60), (60,)))
    seen = rows[0] + rows[3] + 0.5 * noise
    largest = torch.linalg.eigvalsh(rows @ rows.T)[-1]
    scores = {}
    for penalty in (largest * torch.logspace(-10, 1, 23, dtype=torch.float64)).tolist():
        fitted = Ridge(alpha=penalty, fit_intercept=False).fit(rows.T.numpy(), seen.numpy())
        hat = rows.T @ torch.linalg.inv(rows @ rows.T + penalty * torch.eye(12)) @ rows
        left = np.square(seen.numpy() - fitted.predict(rows.T.numpy())).sum()
        scores[left / (60 - float(hat.trace())) ** 2] = fitted.coef_
    np.testing.assert_allclose(ridge(rows, seen).numpy(), scores[min(scores)], rtol=1e-6)


def test_log_ratios_are_those_of_two_normals() -> None:
    shadows = torch.tensor([[1.0, 5.0], [3.0, 7.0], [0.0, 1.0], [-2.0, 3.0]], dtype=torch.float64)
    trained = torch.tensor([[True, True], [True, True], [False, False], [False, False]])
    found = log_ratios(torch.tensor([2.0, 2.0], dtype=torch.float64), shadows, trained)
    inside = torch.distributions.Normal(torch.tensor([2.0, 6.0]), 2**0.5)
    outside = torch.distributions.Normal(torch.tensor([-1.0, 2.0]), 2**0.5)
    two = torch.tensor([2.0, 2.0])
    torch.testing.assert_close(found.float(), inside.log_prob(two) - outside.log_prob(two))


def test_entries_that_a_defence_has_cut_off_do_not_hide_members() -> None:
    h = runtime(epochs=1)
    values = []
    for victim in VICTIMS:
        seen, truth = observed(h, victim, observes="gradient", batch_size=8)
        kept = {n: t * (t.abs() >= t.abs().flatten().quantile(0.7)) for n, t in seen.update.items()}
        values.append(judged("regression", h, replace(seen, update=kept), truth)["value"])
    assert fmean(values) > 0.95


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
    scores = scores_of("cosine", h, replace(seen, update=update))
    assert scores[0].item() == pytest.approx(1, abs=1e-5)
    assert (scores[1:] < 1 - 1e-4).all()


def test_what_it_lacks_is_said() -> None:
    h = runtime(epochs=1)
    seen, truth = observed(h, 3)
    broken = replace(seen, update={name: t * torch.nan for name, t in seen.update.items()})
    nobody = replace(seen, extra={name: tuple(t[:0] for t in seen.extra[name]) for name in ("candidates", "control")})
    cases = [replace(seen, extra={}), nobody, broken]
    found = Membership().infer(cases, h.arm("none").model, [torch.Generator()] * 3)
    assert [f.status for f in found] == ["not applicable", "not applicable", "diverged"]
    assert "candidates" in found[0].message
    assert "federation.validation" in found[1].message
    row, _ = ObservationBuilder(h).judge(truth, found[2])
    assert (row["value"], row["control"], row["scores"]) == (None, None, None)
    alone = replace(seen, extra={"candidates": seen.extra["candidates"]})
    [found] = Membership(score="lira").infer([alone], h.arm("none").model, [torch.Generator()])
    assert (found.status, "public" in found.message) == ("not applicable", True)


def test_the_candidates_of_an_update_are_the_same_in_every_round() -> None:
    h = runtime(epochs=1)
    net = h.arm("none").model
    spec = AttackSpec.model_validate({"name": "membership", "knowledge": ["candidates"]})
    first, second = (
        ObservationBuilder(h).observe(ClientVisit("none", Sent(r, weights_of(net), buffers_of(net)), 3), spec)[1]
        for r in (0, 1)
    )
    assert first.candidates == second.candidates
    assert [c.kind for c in first.candidates] != sorted(c.kind for c in first.candidates)


def test_inferences_pass_through_the_workers_into_their_own_table() -> None:
    from rayfed.simulation.executors.attacker import AttackWorker
    from rayfed.simulation.executors.worker import ClientWorker
    from rayfed.simulation.rounds.attacks import AttackCall, note_attack
    from rayfed.simulation.tables import RoundTables

    scenario = scenarios.parse(
        "{name: t, data: {name: digits, public: 0.2}, model: lenet, federation: {rounds: 1, clients: 40}, attacks: ["
        "{name: membership, knowledge: [candidates]},"
        "{name: property_inference, knowledge: [public], target_class: 8, batches: 10},"
        "{name: gan, target_class: 3, iterations: 2, images: 2},"
        "{name: imprint, observes: gradient, batch_size: 4}]}"
    )
    inputs = prepare_inputs(scenario)
    client = ClientWorker(scenario, inputs.data, inputs.parts, torch.device("cpu"))
    attacker = AttackWorker(inputs.data.sample, 10, torch.device("cpu"))
    net = client.arm("none").model
    sent, tables = Sent(0, weights_of(net), buffers_of(net)), RoundTables()
    for attack in scenario.attacks:
        _, seen, truths = client.observe(sent, ObservationRequest("none", [2, 3], attack))
        bare, found = attacker.attack(attack, client.specs["none"], seen, [b"0", b"1"])
        assert all(len(guess.images) == 0 for guess in bare)
        scored = client.score(truths, found, strip=True)
        note_attack(tables, AttackCall(client.specs["none"], attack, (2, 3), 0, strip=True), 0, bare, scored)
    names = [row["attack"] for row in tables.inferences]
    assert names == ["membership"] * 2 + ["property_inference"] * 2 + ["gan"] * 2
    assert {row["status"] for row in tables.inferences} == {"ok"}
    assert all(0 <= row["value"] <= 1 for row in tables.inferences)
    assert {row["attack"] for row in tables.attacks} == {"imprint"}
    assert {row["attack"] for row in tables.images} == {"gan", "imprint"}
    columns = set(TABLES["inferences"].names)
    assert all(set(row) == columns for row in tables.inferences)
