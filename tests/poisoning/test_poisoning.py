"""What malicious clients do, who they are, and that a run with them does not depend on how its work is shared out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import norm

from rayfed import scenario as scenarios
from rayfed.aggregation.base import Aggregation
from rayfed.defences.base import Batch
from rayfed.errors import ScenarioError, UserError
from rayfed.poisoning.a_little_is_enough import ALittleIsEnough, deviations
from rayfed.poisoning.backdoor import Backdoor
from rayfed.poisoning.base import Insight, Poisoning
from rayfed.poisoning.gaussian_update import GaussianUpdate
from rayfed.poisoning.label_flip import LabelFlip
from rayfed.poisoning.scaled_update import ScaledUpdate
from rayfed.poisoning.sign_flip import SignFlip
from rayfed.scenario import Scenario, resolve
from rayfed.simulation.client import plan
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.inputs import prepare_inputs
from rayfed.store.folder import RunFolder
from rayfed.update import Update

CPU = torch.device("cpu")


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def update(client: int = 0) -> Update:
    g = draw(client)
    return Update(client, 0, {"w": torch.randn(40, 50, generator=g)}, {"mean": torch.ones(2)}, samples=7, loss=0.5)


def insight(*honest: Update, clients: int = 10) -> Insight:
    return Insight(clients, honest, draw())


def batch(count: int = 40) -> Batch:
    return Batch(torch.rand(count, 1, 8, 8, generator=draw()), torch.arange(count) % 10, places=torch.arange(count))


def scenario(malicious: str, *changes: str) -> Scenario:
    text = f"""
name: t
data: {{name: digits, size: 8}}
model: {{name: mlp, hidden: [16]}}
training: {{batch_size: 16, lr: 0.05, momentum: 0.9}}
federation: {{rounds: 2, clients: 6, cohort_size: 2, malicious: {malicious}}}
"""
    return scenarios.parse(text, changes=changes)


def hosted(s: Scenario) -> tuple[ClientRuntime, Sent]:
    inputs = prepare_inputs(s)
    runtime = ClientRuntime(inputs.scenario, inputs.data, inputs.parts, CPU)
    built = runtime.arm("none")
    return runtime, Sent(1, built.weights, built.buffers)


def sent_by(
    runtime: ClientRuntime, sent: Sent, clients: list[int], states: dict[int, Any] | None = None
) -> list[Update]:
    """The updates of a cohort as the server would get them, caught in a rule that only lists them."""
    caught: list[Update] = []

    class Catching(Aggregation):
        def partial(self, updates: Any) -> None:
            caught.extend(updates)

    runtime._aggregations["none"] = Catching()
    runtime.cohort("none", sent, clients, states or {})
    return caught


def test_labels_are_flipped_end_to_end_or_one_by_another() -> None:
    assert LabelFlip().poison_data(batch(), 10, draw()).labels[:3].tolist() == [9, 8, 7]
    flipped = LabelFlip(pair=(7, 1)).poison_data(batch(), 10, draw()).labels
    assert (flipped[batch().labels == 7] == 1).all()
    assert (flipped == batch().labels)[batch().labels != 7].all()


def test_a_flipped_sign_and_a_scale_are_multiples_of_the_update() -> None:
    w = update().tensors["w"]
    assert torch.equal(SignFlip(factor=4).poison_update(update(), insight()).tensors["w"], -4 * w)
    assert torch.equal(ScaledUpdate(factor=3).poison_update(update(), insight()).tensors["w"], 3 * w)
    assert torch.equal(Backdoor(scale=5).poison_update(update(), insight()).tensors["w"], 5 * w)


def test_a_scaled_update_replaces_the_model_in_a_mean() -> None:
    """Bagdasaryan 2020: where the others have converged the mean is the attacker's own update."""
    sent = ScaledUpdate().poison_update(update(), insight(clients=8)).tensors["w"]
    torch.testing.assert_close(sent / 8, update().tensors["w"])


def test_gaussian_updates_have_the_deviation_and_nothing_of_the_update() -> None:
    first, again = (GaussianUpdate(deviation=0.3).poison_update(update(c), insight()).tensors["w"] for c in (0, 1))
    assert torch.equal(first, again)
    assert first.std().item() == pytest.approx(0.3, rel=0.05)
    assert abs(first.mean().item()) < 0.03


@pytest.mark.parametrize(("clients", "malicious"), [(50, 24), (51, 12), (10, 3), (20, 8), (3, 1), (1000, 499)])
def test_deviations_are_those_of_the_papers_algorithm(clients: int, malicious: int) -> None:
    supporters = clients // 2 + 1 - malicious
    expected = norm.ppf((clients - malicious - supporters) / (clients - malicious))
    assert deviations(clients, malicious) == pytest.approx(max(expected, 0), abs=1e-9)


def test_a_little_is_the_mean_of_the_colluders_less_z_deviations() -> None:
    honest = [update(c) for c in range(4)]
    rows = torch.stack([u.tensors["w"] for u in honest]).numpy()
    for lie in (ALittleIsEnough(z=1.5).poison_update(u, insight(*honest)) for u in honest):
        torch.testing.assert_close(lie.tensors["w"], torch.from_numpy(rows.mean(0) - 1.5 * rows.std(0)))
    alone = ALittleIsEnough(z=1.5).poison_update(honest[0], insight(honest[0]))
    assert torch.equal(alone.tensors["w"], honest[0].tensors["w"])


def test_a_backdoor_stamps_its_share_and_is_tried_on_other_classes() -> None:
    backdoor = Backdoor(target=3, size=2, share=0.25)
    poisoned = backdoor.poison_data(batch(), 10, draw())
    changed = (poisoned.inputs != batch().inputs).flatten(1).any(dim=1)
    assert int(changed.sum()) == 10
    assert (poisoned.labels[changed] == 3).all()
    assert torch.equal(poisoned.labels[~changed], batch().labels[~changed])
    assert (poisoned.inputs[changed][..., -2:, -2:] == 1).all()
    assert torch.equal(poisoned.inputs[..., :-2, :], batch().inputs[..., :-2, :])
    tried = backdoor.triggered(batch())
    assert tried.labels.tolist() == [3] * 36
    assert torch.equal(tried.inputs[..., :-2], batch().inputs[batch().labels != 3][..., :-2])


def test_who_is_malicious_is_drawn_once_and_alike_in_all_arms() -> None:
    s = scenario("{name: label_flip, clients: 2}", "arms.a={}", "arms.b.malicious={name: sign_flip, clients: 3}")
    two, three = (plan.malicious_clients(s, resolve(s)[arm]) for arm in "ab")
    assert (len(two), len(three)) == (2, 3)
    assert two < three
    drawn = {plan.malicious_clients(s.model_copy(update={"seed": seed}), resolve(s)["a"]) for seed in range(20)}
    assert len(drawn) > 5
    listed = scenario("{name: label_flip, clients: [1, 4]}")
    assert plan.malicious_clients(listed, resolve(listed)["none"]) == {1, 4}


def test_the_others_pass_and_the_tables_know_who_is_malicious() -> None:
    runtime, sent = hosted(scenario("{name: sign_flip, clients: [1]}"))
    honest, _ = hosted(scenario("null"))
    for poisoned, plain in zip(sent_by(runtime, sent, [0, 1]), sent_by(honest, sent, [0, 1]), strict=True):
        sign = -1 if plain.client == 1 else 1
        assert all(torch.equal(t, sign * plain.tensors[name]) for name, t in poisoned.tensors.items())
    assert [row["malicious"] for row in runtime.cohort("none", sent, [0, 1], {})[1].rows] == [False, True]


def test_poisoned_data_reach_training_and_stay_the_same_from_round_to_round() -> None:
    runtime, sent = hosted(scenario("{name: backdoor, clients: [1], target: 3, size: 2}"))
    first, later = (runtime.task("none", replace(sent, round=r), 1, runtime.parts[1], {}).data for r in (0, 1))
    clean = runtime.task("none", sent, 0, runtime.parts[0], {}).data
    assert torch.equal(first.labels, later.labels)
    assert (first.labels == 3).float().mean() > 0.5
    assert (clean.labels == 3).float().mean() < 0.25
    part = runtime.task("none", sent, 1, runtime.parts[1][5:9], {})
    assert torch.equal(part.data.inputs, first.inputs[5:9])
    assert torch.equal(part.everything.labels, first.labels)


@pytest.mark.parametrize("defence", ["[]", "[{name: gaussian, sigma: 0.01}]", "[{name: top_k, k: 0.1}]"])
def test_colluders_send_the_same_in_whatever_cohort_they_are(defence: str) -> None:
    s = scenario("{name: a_little_is_enough, clients: [0, 3, 5], z: 1.5}", f"arms.none={defence}")
    runtime, sent = hosted(s)
    honest, _ = hosted(scenario("null", f"arms.none={defence}"))
    own = [u.tensors for u in sent_by(honest, sent, [0, 3, 5])]
    together, apart = sent_by(runtime, sent, [0, 3, 5]), [u for c in (5, 3, 0) for u in sent_by(runtime, sent, [c])]
    for name in own[0]:
        rows = torch.stack([tensors[name] for tensors in own])
        expected = rows.mean(0) - 1.5 * rows.std(0, correction=0)
        assert all(torch.equal(u.tensors[name], expected) for u in [*together, *apart])


def test_colluding_leaves_no_trace_in_a_clients_memory() -> None:
    defence = "arms.none=[{name: top_k, k: 0.1, error_feedback: true}]"
    runtime, sent = hosted(scenario("{name: a_little_is_enough, clients: [0, 3], z: 1.5}", defence))
    honest, _ = hosted(scenario("null", defence))
    for clients in ([0, 3], [0]):
        kept = runtime.cohort("none", sent, clients, {})[1].states
        expected = honest.cohort("none", sent, clients, {})[1].states
        assert kept.keys() == expected.keys() == set(clients)
        torch.testing.assert_close(kept, expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    "poisoning", ["name: label_flip", "name: sign_flip", "name: a_little_is_enough", "name: backdoor, size: 2"]
)
def test_one_vmap_call_for_a_cohort_sends_the_same(poisoning: str) -> None:
    malicious = f"{{{poisoning}, clients: [1, 2]}}"
    (loop, sent), (vmapped, _) = (hosted(scenario(malicious, f"training.vectorise={way}")) for way in ("loop", "vmap"))
    for one, other in zip(sent_by(loop, sent, [0, 1, 2]), sent_by(vmapped, sent, [0, 1, 2]), strict=True):
        for name, tensor in one.tensors.items():
            torch.testing.assert_close(other.tensors[name], tensor, atol=1e-5, rtol=1e-4)


def test_attacks_observe_honest_clients() -> None:
    attack = "attacks=[{name: dlg, victims: 3}]"
    s = scenario("{name: label_flip, clients: [0, 2]}", attack)
    assert plan.victims(s, s.attacks[0], 0, [50] * 6) == [1, 3, 4]
    with pytest.raises(ScenarioError, match="client 2 as a victim, which is malicious"):
        prepare_inputs(scenario("{name: label_flip, clients: [0, 2]}", "attacks=[{name: dlg, victims: [2]}]"))


def test_every_arm_meets_every_opponent() -> None:
    s = scenario(
        "null", "arms={mean: {}, median: {aggregation: median}}",
        "opponents={nobody: null, flip: {name: label_flip, clients: 2}}",
    )  # fmt: skip
    assert list(s.played) == ["mean vs nobody", "mean vs flip", "median vs nobody", "median vs flip"]
    arms = resolve(s)
    assert arms["median vs flip"].aggregation.name == "median"
    assert arms["median vs nobody"].malicious is None
    again = resolve(scenarios.parse(prepare_inputs(s).scenario.dump()))
    assert {name: arm.malicious for name, arm in again.items()} == {name: arm.malicious for name, arm in arms.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("federation.malicious={name: label_flip, clients: 7}", "found 7, but the federation has 6 clients"),
        ("federation.malicious={name: label_flip, clients: [6]}", "malicious.clients: found 6"),
        ("federation.malicious={name: label_flip, clients: []}", "is empty"),
        ("federation.malicious={name: label_flip}", "federation.malicious.clients: required"),
        ("arms.a.malicious={name: label_flop, clients: 1}", "arms.a.malicious.name: unknown poisoning 'label_flop'"),
        (
            "opponents.x={name: sign_flip, clients: 1, factr: 1}",
            "opponents.x.factr: unknown key; did you mean 'factor'",
        ),
        ("opponents.x={name: sign_flip, clients: 1, factor: 0}", "opponents.x.factor: found 0"),
        ("opponents.x=null", "opponents: every arm is run against each opponent"),
    ],
)
def test_mistakes_are_told_with_their_place(change: str, message: str) -> None:
    with pytest.raises(ScenarioError) as error:
        scenario("{name: gaussian_update, clients: 1}", change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("malicious", "message"),
    [
        ("{name: label_flip, clients: 1, pair: [3, 10]}", "from 0 to 9"),
        ("{name: backdoor, clients: 1, target: 10}", "from 0 to 9"),
        ("{name: backdoor, clients: 1, size: 8}", "8 x 8 pixels"),
        ("{name: a_little_is_enough, clients: 3}", "3 of the 6 clients of a round are malicious"),
    ],
)
def test_what_fits_neither_data_nor_rounds_is_told_before_the_first_one(malicious: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare_inputs(scenario(malicious))


def test_a_poisoning_that_overrides_nothing_does_nothing() -> None:
    assert Poisoning().poison_data(batch(), 10, draw()).labels.tolist() == batch().labels.tolist()
    assert Poisoning().poison_update(sent := update(), insight()) is sent


@pytest.mark.engine
@pytest.mark.usefixtures("reports")
def test_a_run_with_opponents_ends_with_a_table_of_who_stands_whom(tmp_path: Path) -> None:
    from rayfed.runs.runner import launch
    from rayfed.simulation.executors.local import local
    from rayfed.simulation.progress import Progress

    s = scenario(
        "null",
        "arms={mean: {}, krum: {aggregation: {name: krum, malicious: 1}}}",
        "opponents={little: {name: a_little_is_enough, clients: 2, z: 1}, "
        "door: {name: backdoor, clients: [0], size: 2, scale: 6}}",
    )
    run = launch(s, str(tmp_path), local, Progress())
    first = {(row["arm"], row["round"]): row for row in rows_of(run, "rounds")}
    assert first["mean vs door", 1]["backdoor_accuracy"] > 0.5
    assert first["mean vs little", 1]["backdoor_accuracy"] is None
    lying = {(row["arm"], row["client"]) for row in rows_of(run, "clients") if row["malicious"]}
    assert {client for arm, client in lying if arm == "krum vs door"} == {0}
    assert len(lying) == 2 * (1 + 2)
    assert 'id="robustness"' in run.read_text("report.html")


def rows_of(folder: RunFolder, table: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = folder.read_table(table).to_pylist()
    return rows
