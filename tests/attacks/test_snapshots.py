"""Snapshots: the strips of what attacks held on their way, and that looking changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from rayfed import scenario as scenarios
from rayfed.attacks.adaptive.two_images import TwoImages
from rayfed.attacks.base import Reconstruction
from rayfed.attacks.closed_form.analytic import Analytic
from rayfed.attacks.matching.dlg import Dlg
from rayfed.attacks.matching.gradinversion import GradInversion
from rayfed.attacks.matching.grnn import Grnn
from rayfed.attacks.matching.idlg import Idlg
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.attacks.matching.snapshots import Snapshots
from rayfed.gradients import buffers_of, weights_of
from rayfed.simulation.client.runtime import Sent
from rayfed.simulation.client.visit import ObservationRequest
from rayfed.simulation.inputs import prepare_inputs
from rayfed.store.schemas import TABLES
from rayfed.update import Observation
from tests.helpers.attack_fixtures import digit, leaky_lenet, observe, seeded, two_digits

ATTACKS = {
    "dlg": Dlg(iterations=2, restarts=2),
    "idlg": Idlg(iterations=2, restarts=1),
    "inverting_gradients": InvertingGradients(iterations=12, restarts=2),
    "gradinversion": GradInversion(iterations=12, seeds=2),
    "two_images": TwoImages(iterations=12),
    "grnn": Grnn(iterations=12),
}


def six_digits() -> tuple[nn.Module, list[Observation]]:
    model = leaky_lenet((1, 8, 8))
    return model, [observe(model, torch.cat([digit(i) for i in range(6)]), torch.arange(6))]


def assert_a_strip(found: Reconstruction) -> None:
    iterations = [iteration for iteration, _ in found.snapshots]
    assert iterations == [*(i for i in (0, 10, 100, 1000) if i < found.iterations), found.iterations]
    assert torch.equal(found.snapshots[-1][1], found.images[:4])
    for _, images in found.snapshots:
        assert images.shape == found.images[:4].shape
        assert images.dtype == torch.float32
        assert 0 <= images.min() <= images.max() <= 1


@pytest.mark.engine
def test_snapshots_come_at_powers_of_ten_and_at_the_end() -> None:
    model, observations = two_digits()
    [found] = InvertingGradients(iterations=150).reconstruct(observations[:1], model, seeded(1))
    assert [iteration for iteration, _ in found.snapshots] == [0, 10, 100, 150]
    assert_a_strip(found)


@pytest.mark.engine
@pytest.mark.parametrize("name", ATTACKS)
def test_every_observation_has_its_own_strip(name: str) -> None:
    model, observations = two_digits()
    together = ATTACKS[name].reconstruct(observations, model, seeded(1, 2))
    [alone] = ATTACKS[name].reconstruct(observations[1:], model, seeded(2))
    for found in together:
        assert_a_strip(found)
    torch.testing.assert_close(together[1].snapshots[0][1], alone.snapshots[0][1])
    assert not torch.equal(together[0].snapshots[0][1], together[1].snapshots[0][1])


@pytest.mark.engine
@pytest.mark.parametrize("name", ATTACKS)
def test_looking_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, observations = two_digits()
    watched = ATTACKS[name].reconstruct(observations, model, seeded(1, 2))
    monkeypatch.setattr(Snapshots, "note", lambda *_: None)
    for one, other in zip(watched, ATTACKS[name].reconstruct(observations, model, seeded(1, 2)), strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
        assert (one.loss, one.trace, one.iterations) == (other.loss, other.trace, other.iterations)


@pytest.mark.engine
@pytest.mark.parametrize("attack", [Dlg(iterations=12, restarts=1), Grnn(iterations=12)])
def test_a_snapshot_is_what_a_shorter_attack_returns(attack: Dlg | Grnn) -> None:
    """Of attacks whose steps do not depend on the budget."""
    model, observations = six_digits()
    [found] = attack.reconstruct(observations, model, seeded(1))
    [shorter] = replace(attack, iterations=10).reconstruct(observations, model, seeded(1))
    assert found.iterations == 12
    assert torch.equal(dict(found.snapshots)[10], shorter.images[:4])


def test_strips_do_not_grow_with_the_batch() -> None:
    model, observations = six_digits()
    for name in ("inverting_gradients", "two_images"):
        [found] = ATTACKS[name].reconstruct(observations, model, seeded(1))
        assert found.images.shape == (6, 1, 8, 8)
        assert_a_strip(found)


def test_a_problem_that_ends_early_has_its_end_last() -> None:
    snapshots, points = Snapshots(lambda points: points.reshape(-1, 1, 1, 1, 1), steps=2), torch.zeros(2, 1)
    for step in range(41):
        points[1] = min(step, 6) / 100  # a row of the same tensor, as the optimisers write it
        snapshots.note(step, points)
    end = torch.full((1, 1, 1, 1), 0.06)
    early, late = snapshots.until(3, end, row=1), snapshots.until(20, end, row=1)
    assert [(i, round(image.item(), 2)) for i, image in early] == [(0, 0), (3, 0.06)]
    assert [(i, round(image.item(), 2)) for i, image in late] == [(0, 0), (10, 0.06), (20, 0.06)]


def test_a_closed_form_has_no_strip() -> None:
    model, observations = two_digits()
    assert all(found.snapshots == () for found in Analytic().reconstruct(observations, model, seeded(1, 2)))


def test_the_first_victims_strip_stands_beside_its_true_images() -> None:
    """Rows of the table, matched as the reconstruction is in the end."""
    from rayfed.simulation.executors.attacker import AttackWorker
    from rayfed.simulation.executors.worker import ClientWorker
    from rayfed.simulation.rounds.attacks import AttackCall, note_attack
    from rayfed.simulation.tables import RoundTables

    scenario = scenarios.parse(
        "{name: t, data: digits, model: lenet, federation: {rounds: 1, clients: 40}, attacks: ["
        "{name: inverting_gradients, iterations: 12, victims: [2, 3], observes: gradient, batch_size: 6}]}"
    )
    inputs, cpu = prepare_inputs(scenario), torch.device("cpu")
    [attack] = scenario.attacks
    client = ClientWorker(scenario, inputs.data, inputs.parts, cpu)
    net = client.arm("none").model
    sent = Sent(0, weights_of(net), buffers_of(net))
    _, seen, truths = client.observe(sent, ObservationRequest("none", [2, 3], attack))
    attacker = AttackWorker(inputs.data.sample, 10, cpu)
    bare, found = attacker.attack(attack, client.specs["none"], seen, [b"0", b"1"])
    assert all(guess.snapshots == () for guess in bare)  # the driver holds no images

    tables, without = RoundTables(), RoundTables()
    call = AttackCall(client.specs["none"], attack, (2, 3), 0, strip=True)
    note_attack(tables, call, 0, bare, client.score(truths, found, strip=True))
    note_attack(without, call, 0, bare, client.score(truths, found, strip=False))
    assert without.snapshots == []
    assert without.images == tables.images
    assert all(set(row) == set(TABLES["snapshots"].names) for row in tables.snapshots)
    assert {(row["victim"], row["repeat"]) for row in tables.snapshots} == {(2, 0)}
    assert {row["iteration"] for row in tables.snapshots} == {0, 10, 12}
    last = [row["mse"] for row in tables.snapshots if row["iteration"] == 12]
    scored = {row["sample"]: row["mse"] for row in tables.attacks if row["victim"] == 2}
    assert last == pytest.approx([scored[row["sample"]] for row in tables.snapshots if row["iteration"] == 12])
    ends = {row["sample"]: row["image"] for row in tables.snapshots if row["iteration"] == 12}
    matched = {row["sample"]: row["reconstructed"] for row in tables.images if row["victim"] == 2}
    assert len(ends) == 4
    assert all(matched[sample] == image for sample, image in ends.items())
