"""Asynchronous rules in virtual time: who arrives when, what weighs how much, the same bits however it is played."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfed import scenario as scenarios
from rayfed.aggregation.asynchronous import Model
from rayfed.aggregation.fedasync import FedAsync
from rayfed.aggregation.fedbuff import FedBuff
from rayfed.aggregation.weighted_sum import WeightedSum
from rayfed.errors import ScenarioError, UserError
from rayfed.runs import runner
from rayfed.scenario import Scenario
from rayfed.simulation.client import plan
from rayfed.simulation.client.devices import devices
from rayfed.simulation.executors.local import local
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress
from rayfed.simulation.virtual_time.clock import Clock
from rayfed.simulation.virtual_time.flights import InFlightUpdates
from rayfed.simulation.virtual_time.work import Work
from rayfed.store import checkpoint
from rayfed.store.folder import RunFolder
from tests.helpers.progress_fixtures import Interrupted
from tests.helpers.run_fixtures import arm_weights, assert_same_bits, rows

TEXT = """
name: t
data: {name: digits, size: 8, train_samples: 200, test_samples: 20}
model: {name: mlp, hidden: [4]}
training: {batch_size: 5}
federation:
  rounds: 6
  clients: 20
  clients_per_round: 3
  aggregation: fedbuff
  system:
    reference: 1.0e6
    concurrency: 6
    devices: {fast: {share: 1}, slow: {share: 1, compute: 0.1}}
"""


def parsed(*changes: str, text: str = TEXT) -> Scenario:
    return scenarios.parse(text, changes=[f"federation.{change}" for change in changes])


def played(folder: Path, *changes: str, text: str = TEXT) -> RunFolder:
    return runner.launch(parsed(*changes, text=text), str(folder), local, Progress())


# Rules


def test_fedbuff_divides_by_the_buffer_and_not_by_the_weights() -> None:
    rule, now = FedBuff(exponent=0.5), Model({"w": torch.zeros(1)}, {})
    arrived = [(torch.tensor([8.0]), 0), (torch.tensor([6.0]), 3)]
    first, second = (rule.aged(WeightedSum({"w": t}, {}, 1.0), age, {}, now) for t, age in arrived)
    step, _ = rule.combine(rule.merge(first, second), torch.Generator())
    assert step["w"].item() == (8 / 1 + 6 / 2) / 2


@given(
    st.floats(0.1, 1),
    st.sampled_from(["constant", "hinge", "polynomial"]),
    st.integers(0, 30),
    st.lists(st.floats(-5, 5), min_size=4, max_size=4),
)
def test_fedasync_mixes_models(mixing: float, staleness: Any, age: int, values: list[float]) -> None:
    sent, now, own, buffer = (torch.tensor([value], dtype=torch.float64) for value in values)
    rule = FedAsync(mixing=mixing, staleness=staleness, a=0.5, b=4.0)
    shares = {"constant": 1.0, "hinge": 1 / (0.5 * (age - 4) + 1) if age > 4 else 1.0, "polynomial": (1 + age) ** -0.5}
    share = mixing * shares[staleness]
    update = WeightedSum({"w": sent - own}, {"b": own}, 1.0)
    total = rule.aged(update, age, {"w": sent}, Model({"w": now}, {"b": buffer}))
    step, buffers = rule.combine(total, torch.Generator())
    torch.testing.assert_close(now - step["w"], (1 - share) * now + share * own)
    torch.testing.assert_close(buffers["b"], (1 - share) * buffer + share * own)


@pytest.mark.parametrize("rule", ["fedbuff", "{name: fedasync, mixing: 1}"])
def test_one_device_at_a_time_is_fedavg_one_client_after_another(rule: str, tmp_path: Path) -> None:
    alone = ("clients_per_round=1", "system.concurrency=1", "rounds=4")
    waits = played(
        tmp_path / "a", *alone[::2], "system.concurrency=null", "aggregation={name: fedavg, weights: uniform}"
    )
    one = played(tmp_path / "b", *alone, f"aggregation={rule}")
    torch.testing.assert_close(arm_weights(one), arm_weights(waits), rtol=0, atol=1e-6)
    assert {row["staleness"] for row in rows(one, "clients")} == {0}
    for column in ("simulated_seconds", "train_loss", "bytes_up"):
        found, expected = ([row[column] for row in rows(folder, "rounds")] for folder in (one, waits))
        assert found == pytest.approx(expected)


# InFlightUpdates


def flown(s: Scenario, rounds: int, work: float = 1e5) -> list[InFlightUpdates]:
    """The flights of so many rounds, on devices alone: no model is trained."""
    assert s.federation.system is not None
    arm = scenarios.resolve(s)["none"]
    clock = Clock(s, s.federation.system, np.full(s.federation.clients, 10), {"none": Work(work, 0.0, 0, 0.0)})
    saved: dict[str, Any] = {}
    found = []
    for round in range(rounds):
        clients = plan.started(s, round)
        flights = InFlightUpdates.from_state(round, clock.begin(arm, round, clients, 0), s.clients_per_round, saved, {})
        for client in clients:
            flights.add([{"client": client, "sent_bytes": 0}], None)
        flights.advance(clients)
        saved = {"flying": flights.kept, "ended": flights.landed[-1].arrival}
        found.append(flights)
    return found


@pytest.mark.parametrize(
    ("clients", "concurrency", "least", "most"), [(20, 1, 1, 1), (20, 3, 2, 2.9), (20, 6, 3, 5), (10_000, 6, 5.9, 6)]
)
def test_as_many_tasks_are_in_flight_as_are_to(clients: int, concurrency: int, least: float, most: float) -> None:
    """Devices that are drawn while they have a task do it afterwards: so many are at work on average."""
    s = parsed(f"system.concurrency={concurrency}", "system.compute_spread=1", f"clients={clients}")
    found = flown(s, 40)
    everybody = [one for flights in found for one in flights.landed] + found[-1].flying
    assert len(everybody) == concurrency + 40 * 3 - 1, "the last to arrive is not replaced before the step"
    arrivals = [one.arrival for flights in found for one in flights.landed]
    assert arrivals == sorted(arrivals)
    ends = [0.0, *(flights.landed[-1].arrival for flights in found)]
    for one in everybody[: 40 * 3]:
        begun = one.arrival - one.seconds
        assert ends[one.round] - 1e-9 <= begun <= ends[one.round + 1] + 1e-9, "on the newest weights of when it began"
    moments = np.random.default_rng(0).uniform(0, ends[-1], (200, 1))
    ended = np.array([one.arrival for one in everybody])
    given_out = ended - [one.seconds for one in everybody]
    assert set(((given_out <= moments) & (moments < ended)).sum(1).tolist()) == {concurrency}
    begun = ended - [1e5 / next(devices(s, [one.client])).speed for one in everybody]
    at_work = ((begun <= moments) & (moments < ended)).sum(1)
    assert at_work.max() <= concurrency
    assert least <= at_work.mean() <= most


def test_a_device_does_its_tasks_one_after_another() -> None:
    found = flown(parsed("system.compute_spread=1", "clients=8"), 60)
    tasks: dict[int, list[tuple[float, float]]] = {}
    own = {one.client: one.seconds for flights in found for one in flights.landed if one.seconds}
    for one in [one for flights in found for one in flights.landed]:
        own[one.client] = min(own[one.client], one.seconds)  # without the time that it waited for its device
        tasks.setdefault(one.client, []).append((one.round, one.arrival))
    for client, done in tasks.items():
        gaps = np.diff([arrival for _, arrival in sorted(done)])
        assert (gaps >= own[client] - 1e-9).all()


@pytest.mark.engine
def test_two_classes_arrive_at_the_rate_of_renewal_theory() -> None:
    """Each of M places takes one device after another, of mean time E T: updates arrive at the rate M / E T.

    A synchronous round of M waits for the slowest, so async is ahead by E max / E T: the shape of Nguyen et al. 2022.
    """
    concurrency, fast, slow = 10, 0.1, 1.0
    s = parsed("clients=100000", "clients_per_round=5", f"system.concurrency={concurrency}")
    found = flown(s, 1200)
    rate = 1200 * 5 / found[-1].landed[-1].arrival
    assert rate == pytest.approx(concurrency / ((fast + slow) / 2), rel=0.03)
    ahead = []
    for spread in (0.0, 0.5, 1.0, 1.5):
        changes = (
            f"system.compute_spread={spread}",
            "system.devices={d: {}}",
            "clients=100000",
            "clients_per_round=10",
        )
        own = flown(parsed(*changes, "system.concurrency=10"), 300)
        clock = [flights.clock for flights in own[1:]]
        waited = [max(one.arrival(client, 0) for client in one.ready) for one in clock]
        ahead.append(np.mean(waited) / np.mean(np.diff([flights.landed[-1].arrival for flights in own])))
    assert ahead[0] == pytest.approx(1, rel=0.01)
    assert all(later > 1.3 * sooner for sooner, later in pairwise(ahead))


# Runs


@pytest.mark.engine
def test_a_step_is_made_of_what_arrived_with_its_staleness(tmp_path: Path) -> None:
    """Each update is made again here, from the weights that the run had when its client began."""
    versions, arm = [], prepare_inputs(parsed()).accounts[0].arm
    versions.append(arm.weights)
    for rounds in range(1, 5):
        versions.append(arm_weights(played(tmp_path / str(rounds), f"rounds={rounds}")))
    folder = played(tmp_path / "all", "rounds=4")
    from rayfed.simulation.client.server_message import Sent
    from rayfed.simulation.executors.local import LocalExecutor

    worker = LocalExecutor(prepare_inputs(parsed()))._client
    ages = set()
    for round in range(4):
        landed = [row for row in rows(folder, "clients") if row["round"] == round]
        assert len(landed) == 3
        total = {name: torch.zeros_like(w) for name, w in arm.weights.items()}
        for row in landed:
            begun = round - row["staleness"]
            one, _ = worker.cohort("none", Sent(begun, versions[begun], {}), [row["client"]], {})
            total = {name: t + one.tensors[name] * (1 + row["staleness"]) ** -0.5 for name, t in total.items()}
            ages.add(row["staleness"])
        expected = {name: w - total[name] / 3 for name, w in versions[round].items()}
        torch.testing.assert_close(versions[round + 1], expected, rtol=1e-5, atol=1e-6)
    assert len(ages) > 1


def test_clients_of_unlike_sizes_train_each_by_itself(tmp_path: Path) -> None:
    text = TEXT.replace("train_samples: 200", "train_samples: 600") + "partition: {name: quantity, alpha: 0.3}\n"
    folder = played(tmp_path, text=text)
    assert [row["clients"] for row in rows(folder, "rounds")] == [3] * 6
    sizes = {row["client"]: row["samples"] for row in rows(folder, "clients")}
    assert len(set(sizes.values())) > 3


@pytest.mark.engine
@pytest.mark.parametrize("changes", [(), ("aggregation=fedasync", "clients_per_round=1", "rounds=12")])
def test_a_run_that_is_resumed_makes_updates_on_their_way_again(changes: tuple[str, ...], tmp_path: Path) -> None:
    whole = played(tmp_path / "a", *changes)
    assert max(row["staleness"] for row in rows(whole, "clients")) > 1
    with pytest.raises(KeyboardInterrupt):
        runner.launch(parsed(*changes), str(tmp_path / "b"), local, Interrupted(2))
    [folder] = (tmp_path / "b").iterdir()
    resumed = runner.resume(str(folder), local, Progress())
    assert_same_bits(arm_weights(resumed), arm_weights(whole))
    timed = ("arm", "round", "client", "simulated_seconds", "staleness", "sent_bytes", "loss")
    assert [[row[name] for name in timed] for row in rows(resumed, "clients")] == [
        [row[name] for name in timed] for row in rows(whole, "clients")
    ]


def test_what_is_on_its_way_is_not_kept_but_its_weights_are(tmp_path: Path) -> None:
    saved = checkpoint.load(played(tmp_path))
    assert saved is not None
    state = saved.server["none"]
    assert len(state["flying"]) == 6 - 1
    assert state["earlier"].keys() == {one["round"] for one in state["flying"]}


@pytest.mark.engine
def test_its_figures_are_not_those_of_a_rule_that_waits(tmp_path: Path) -> None:
    arms = "arms:\n  waits: {aggregation: fedavg}\n  buffered: {aggregation: fedbuff}\n"
    folder = played(tmp_path, text=TEXT + arms)
    found = {arm: [row for row in rows(folder, "rounds") if row["arm"] == arm] for arm in ("waits", "buffered")}
    alone = played(tmp_path / "alone", "aggregation=fedavg", "system.concurrency=null")
    assert [row["simulated_seconds"] for row in found["waits"]] == [
        row["simulated_seconds"] for row in rows(alone, "rounds")
    ]
    assert all(row["idle"] is None and row["dropped"] == 0 for row in found["buffered"])
    assert sum(row["simulated_seconds"] for row in found["buffered"]) < sum(
        row["simulated_seconds"] for row in found["waits"]
    )
    assert {row["staleness"] for row in rows(folder, "clients") if row["arm"] == "waits"} == {None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["system=null"], r"federation\.system: required by fedbuff"),
        (["system.deadline=5"], r"system\.deadline: not used by fedbuff"),
        (["system.over_selection=2"], r"system\.over_selection: not used by fedbuff"),
        (["sampling=poisson"], r"federation\.sampling: fedbuff"),
        (["protection=secure_aggregation"], r"federation\.protection: fedbuff"),
        (["failures.then=drop"], r"federation\.failures\.then: fedbuff"),
        (["system.concurrency=19"], r"system\.concurrency: .*21 clients.* 20"),
        (["aggregation=fedavg"], r"system\.concurrency: only for asynchronous rules"),
        (["system.devices.slow.failure=0.1"], "may drop out"),
        (["aggregation=fedasync", "clients_per_round=1"], "mixes locally trained models"),
    ],
)
def test_what_does_not_go_with_an_asynchronous_rule_is_refused(changes: list[str], message: str) -> None:
    text = TEXT.replace("{batch_size: 5}", "{batch_size: 5, algorithm: fedsgd}") if "models" in message else TEXT
    with pytest.raises(ScenarioError, match=message):
        parsed(*changes, text=text)


def test_what_keeps_a_state_is_refused() -> None:
    text = TEXT + "defences: [{name: top_k, k: 10, error_feedback: true}]\n"
    with pytest.raises(ScenarioError, match="fedbuff is not possible in arm 'top_k': clients keep a state"):
        prepare_inputs(parsed(text=text))


def test_fedasync_mixes_one_model_at_a_time() -> None:
    with pytest.raises(UserError, match=r"set federation\.clients_per_round to 1, not 3"):
        prepare_inputs(parsed("aggregation=fedasync"))


@pytest.mark.parametrize("server", ["{optimiser: adam}", "{lr: 0.5}", "{momentum: 0.9}"])
def test_fedasync_is_not_for_another_server_optimiser(server: str) -> None:
    rule = "aggregation=fedasync", "clients_per_round=1"
    with pytest.raises(ScenarioError, match=r"federation\.server: fedasync"):
        parsed(*rule, f"server={server}")
    parsed(*rule, "server={lr: 1}")
    parsed(f"server={server}")  # fedbuff, whose step any optimiser takes


@pytest.mark.parametrize("defence", ["dp_sgd", "dp_fedavg"])
def test_there_is_no_account(defence: str) -> None:
    text = TEXT + f"defences: [{{name: {defence}, clip: 1, noise_multiplier: 1, delta: 0.001}}]\n"
    if defence == "dp_fedavg":
        with pytest.raises(UserError, match=r"dp_fedavg .* FedBuff"):
            prepare_inputs(parsed(text=text))
        return
    [row] = prepare_inputs(parsed(text=text)).privacy
    assert row.get("epsilon") is None
    assert "there is no account for fedbuff" in row["note"]


def test_attacks_meet_clients_that_begin_in_the_round(tmp_path: Path) -> None:
    text = TEXT + "attacks: [{name: analytic, rounds: [0, 3], victims: 3, observes: gradient}]\n"
    folder = played(tmp_path, text=text)
    for round in (0, 3):
        met = {row["victim"] for row in rows(folder, "attacks") if row["round"] == round}
        assert met == set(plan.drawn_clients(parsed(), round))
        assert met <= set(plan.started(parsed(), round))
