"""Virtual time: devices by number, counted work, closed forms of a round, the same figures whoever plays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, kstest, norm

import rayfed
from rayfed import registry
from rayfed import scenario as scenarios
from rayfed.errors import RunError, ScenarioError, UserError
from rayfed.evidence.recommend import COSTS, default_costs, parse_bound, recommend_setting
from rayfed.evidence.training import add_virtual_time
from rayfed.runs import runner
from rayfed.scenario import Scenario, Training
from rayfed.simulation.client import devices as drawn_devices
from rayfed.simulation.client import plan
from rayfed.simulation.client.devices import devices
from rayfed.simulation.executors.base import Call, Crashed, Done, Overdue
from rayfed.simulation.executors.local import LocalExecution, LocalExecutor, local
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress
from rayfed.simulation.virtual_time.clock import LATE, LOST, SMALL, SURPLUS, Clock, RoundClock
from rayfed.simulation.virtual_time.work import Work, _Counter, count_processed, count_work
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
  rounds: 2
  clients: 20
  clients_per_round: 4
  system: {devices: {fast: {share: 3, compute: 10}, slow: {share: 1}}, reference: 1.0e5}
"""


def parsed(*changes: str, text: str = TEXT) -> Scenario:
    return scenarios.parse(text, changes=changes)


def played(folder: Path, *changes: str, text: str = TEXT) -> RunFolder:
    return runner.launch(parsed(*changes, text=text), str(folder), local, Progress())


# Devices


def test_a_device_is_the_same_alone_and_among_a_million() -> None:
    s = parsed("federation.clients=1000000", "federation.system.compute_spread=0.5")
    some = [999_999, 3, 500_000]
    together = list(devices(s, some))
    assert together == [next(devices(s, [client])) for client in some]
    kinds = drawn_devices._rows(s.seed, s.federation.system.model_dump_json(), 1_000_000, None)  # type: ignore[union-attr]
    plain = list(devices(parsed("federation.clients=1000000"), some))
    assert [device.speed for device in plain] == [(1e6, 1e5)[kind] for kind in kinds[some]]


@pytest.mark.engine
def test_classes_have_their_shares_and_spreads_are_log_normal() -> None:
    s = parsed(
        "federation.clients=20000", "federation.system.network_spread=0.8", "federation.system.devices.fast.up=8"
    )
    found = list(devices(s, range(20_000)))
    fast = [device for device in found if device.speed == 1e6]
    assert binom.interval(1 - 1e-9, 20_000, 0.75)[0] <= len(fast) <= binom.interval(1 - 1e-9, 20_000, 0.75)[1]
    logs = np.log([device.up / 1e6 for device in fast]) / 0.8
    assert kstest(logs, norm.cdf).pvalue > 1e-9
    assert {device.down for device in found} == {np.inf}


def test_who_is_there_follows_the_hour_and_only_they_are_drawn() -> None:
    by_hour = "[" + ", ".join(["0.5"] * 12 + ["0"] * 12) + "]"
    changes = (
        "federation.clients=4000",
        "federation.rounds=24",
        f"federation.system.devices.fast.available={by_hour}",
        "federation.system.devices.slow.available=0.25",
        "federation.system.every=3600",
        "federation.system.deadline=3600",
    )
    s = parsed(*changes)
    written = s.federation.system.model_dump_json()  # type: ignore[union-attr]
    slow = drawn_devices._rows(s.seed, written, 4000, None) == 1
    for round in (0, 5, 23):
        there = drawn_devices.there(s.seed, written, None, round, 4000)
        assert set(plan.drawn_clients(s, round)) <= set(np.flatnonzero(there).tolist())
        expected = 0.25 * slow.sum() + (0.5 if round < 12 else 0.0) * (~slow).sum()
        assert abs(there.sum() - expected) < 6 * np.sqrt(expected)
    assert all(slow[client] for client in plan.drawn_clients(s, 23))
    assert len({tuple(plan.drawn_clients(s, round)) for round in range(24)}) == 24


def test_a_round_takes_all_who_are_there_where_these_are_fewer() -> None:
    s = parsed(
        "federation.system.devices={a: {available: 0.1}}", "federation.system.every=9", "federation.system.deadline=9"
    )
    written = s.federation.system.model_dump_json()  # type: ignore[union-attr]
    for round in range(2):
        there = np.flatnonzero(drawn_devices.there(s.seed, written, None, round, 20)).tolist()
        assert len(there) < 4
        assert plan.drawn_clients(s, round) == there


def test_a_scenario_without_devices_draws_as_one_whose_devices_are_always_there() -> None:
    for round in range(5):
        assert plan.drawn_clients(parsed(), round) == plan.drawn_clients(parsed("federation.system=null"), round)


def test_a_file_of_devices(tmp_path: Path) -> None:
    file = tmp_path / "devices.parquet"
    pq.write_table(pa.table({"compute": [1.0, 2.0, 4.0], "up": [8.0, None, 16.0]}), file)
    text = TEXT.replace("devices: {fast: {share: 3, compute: 10}, slow: {share: 1}}", f"file: {file}")
    exact = list(devices(parsed("federation.clients=3", "federation.clients_per_round=3", text=text), range(3)))
    assert [(d.speed, d.up) for d in exact] == [(1e5, 1e6), (2e5, np.inf), (4e5, 2e6)]
    drawn = [d.speed for d in devices(parsed("federation.clients=3000", text=text), range(3000))]
    for speed in (1e5, 2e5, 4e5):
        assert abs(drawn.count(speed) - 1000) < 6 * np.sqrt(1000 * 2 / 3)


def with_file(tmp_path: Path) -> tuple[Path, str]:
    """A file of two devices, and a scenario that has it."""
    file = tmp_path / "devices.parquet"
    pq.write_table(pa.table({"compute": [1.0, 2.0]}), file)
    return file, TEXT.replace("devices: {fast: {share: 3, compute: 10}, slow: {share: 1}}", f"file: {file}")


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    file, text = with_file(tmp_path)
    s = parsed("federation.clients=2", "federation.clients_per_round=1", text=text)
    assert [d.speed for d in devices(s, range(2))] == [1e5, 2e5]
    pq.write_table(pa.table({"compute": [3.0, 4.0], "latency": [0.0, 0.0]}), file)
    assert [d.speed for d in devices(s, range(2))] == pytest.approx([3e5, 4e5])


def test_a_scenario_with_a_file_of_devices_can_be_written_out(tmp_path: Path) -> None:
    s = parsed(text=with_file(tmp_path)[1])
    assert scenarios.parse(s.dump()) == s


@pytest.mark.engine
def test_a_run_with_a_file_of_devices_goes_on_with_the_same_alone(tmp_path: Path) -> None:
    file, text = with_file(tmp_path)
    whole = played(tmp_path / "a", "federation.rounds=3", text=text)
    folders = []
    for name in ("b", "c"):
        with pytest.raises(KeyboardInterrupt):
            runner.launch(parsed("federation.rounds=3", text=text), str(tmp_path / name), local, Interrupted(0))
        folders += (tmp_path / name).iterdir()
    assert figures(runner.resume(str(folders[0]), local, Progress())) == figures(whole)
    pq.write_table(pa.table({"compute": [0.01, 0.02]}), file)
    with pytest.raises(RunError, match=r"its file of devices was edited after round 0.*federation\.system\.file was"):
        runner.resume(str(folders[1]), local, Progress())
    slower = played(tmp_path / "d", "federation.rounds=3", text=text)
    assert figures(slower)[0][0] == pytest.approx(100 * figures(whole)[0][0])
    first, other = (one.read_mapping("environment.json")["hashes"]["data"] for one in (whole, slower))
    assert {name for name in first if first[name] != other[name]} == {"devices"}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"computes": [1.0]}, "has a column 'computes'.*compute"),
        ({"compute": [1.0, -1.0]}, "has -1 for 'compute' in row 1"),
        ({"failure": [0.5]}, "deadline: required"),
        ({"available": [0.5]}, "every: required"),
        ({"available": [[0.5, 0.5]]}, "24 numbers in each row of the column 'available'"),
        ({"compute": ["x"]}, "the column 'compute' that are not numbers"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(table: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "devices.parquet"
    pq.write_table(pa.table(table), file)
    text = TEXT.replace("devices: {fast: {share: 3, compute: 10}, slow: {share: 1}}", f"file: {file}")
    with pytest.raises(ScenarioError, match=message):
        prepare_inputs(parsed(text=text))


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    text = TEXT.replace("devices: {fast: {share: 3, compute: 10}, slow: {share: 1}}", f"file: {tmp_path}/no.parquet")
    with pytest.raises(ScenarioError, match=r"no\.parquet' not found"):
        prepare_inputs(parsed(text=text))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["system.devices.slow.failure=0.1"], "devices of class 'slow' may drop out"),
        (["system.devices.slow.memory=1"], "devices of class 'slow' may drop out"),
        (["system.devices.slow.available=0.5"], "every: required, because .* class 'slow'"),
        (["system.devices.slow.available=[0.5]"], r"devices\.slow\.available: found 1 numbers"),
        (["system.every=60"], r"system\.every: .*`deadline`"),
        (["system.every=60", "system.deadline=61"], r"system\.every: .*`deadline`"),
        (["system.over_selection=2", "sampling=poisson"], r"over_selection: cannot be combined with sampling: poisson"),
        (["system.over_selection=6"], "over_selection: samples 24 clients, but the federation has 20"),
        (["aggregation=fedboosting", "validation=0.2"], "system: fedboosting has clients score models"),
        (["system.file=x.parquet"], "file: cannot be combined with `devices`"),
        (["system.devices.slow.speed=1"], "unknown key; valid are available, compute"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        parsed(*(f"federation.{change}" for change in changes))


@pytest.mark.parametrize(
    ("wanted", "factor", "drawn"),
    [(100, 1.1, 110), (50, 1.1, 55), (10, 1.1, 11), (1000, 1.1, 1100), (7, 1.3, 10), (100, 1.0, 100), (1, 1.001, 2)],
)
def test_over_selection_draws_as_many_more_as_decimals_say(wanted: int, factor: float, drawn: int) -> None:
    sizes = f"federation.clients_per_round={wanted}", "federation.clients=2000"
    assert parsed(*sizes, f"federation.system.over_selection={factor}").drawn_per_round == drawn


# Work


def model_flops(batch: int) -> int:
    """The products of an MLP of 64, 4 and 10: forward, gradients of both weights, gradient of the hidden layer."""
    return batch * 2 * (2 * 64 * 4 + 3 * 4 * 10)


def test_the_work_of_a_step_is_that_of_its_products() -> None:
    inputs = prepare_inputs(parsed())
    work = count_work(inputs)["none"]
    assert work.fixed == 0
    # the first layer's own input gradient is nobody's
    assert work.per_sample == model_flops(1)
    sizes = inputs.parts.sizes
    assert work.flops(int(sizes[0]), Training(epochs=2, batch_size=5), 0) == model_flops(2 * int(sizes[0]))


def test_noise_on_the_update_is_no_counted_work_and_per_sample_gradients_are_as_many_products() -> None:
    text = TEXT.replace("mlp, hidden: [4]", "lenet") + "arms:\n  none: []\n  noise: [{name: gaussian, sigma: 0.1}]\n"
    text += "  dp: [{name: dp_sgd, clip: 1, noise_multiplier: 1, delta: 0.001}]\n"
    work = count_work(prepare_inputs(parsed(text=text)))
    assert work["noise"] == work["none"]
    assert 1 <= work["dp"].per_sample / work["none"].per_sample < 1.2  # grouped convolutions, counted once


@pytest.mark.parametrize("sampling", ["shuffle", "poisson"])
def test_private_training_is_counted_from_the_second_round_on(sampling: str) -> None:
    text = TEXT.replace("mlp, hidden: [4]", "lenet") + "arms:\n  none: []\n"
    text += "".join(f"  split{n}: [{{name: split, private_epochs: {n}}}]\n" for n in (0, 3))
    work = count_work(prepare_inputs(parsed(text=text)))
    training = Training(batch_size=5, epochs=2, sampling=sampling)
    plain, shared, split = (work[name] for name in ("none", "split0", "split3"))
    first = [one.flops(10, training, 0) for one in (plain, shared, split)]
    assert first[0] == first[1] == first[2]
    assert shared.flops(10, training, 1) == first[0]
    # LeNet's first gradients need all layers of the backward pass, so a private step costs hardly less than a whole one
    extra = split.flops(10, training, 1) - first[0]
    assert 0.5 < extra / (3 * 10 * plain.per_sample) <= 1


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_are_counted_with_their_groups(groups: int, transposed: bool) -> None:
    kind = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
    layer = kind(4, 6, 3, groups=groups, stride=2)
    inputs = torch.randn(5, 4, 9, 9, requires_grad=True)
    with _Counter() as counter:
        layer(inputs).sum().backward()
    places = 9 * 9 if transposed else 4 * 4
    assert counter.flops == 3 * 2 * 5 * places * 4 * 6 * 9 // groups


def recurrent(tmp_path: Path) -> str:
    """Changes to a scenario, and a defence: an LSTM that reads the rows of an image."""
    (tmp_path / "recurrent_model.py").write_text(
        "from torch import nn\n\n\n"
        "class Reader(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.reader, self.head = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 10)\n\n"
        "    def forward(self, images):\n"
        "        return self.head(self.reader(images.squeeze(1))[0][:, -1])\n\n\n"
        "def build():\n"
        "    return Reader()\n"
    )
    registry.search(str(tmp_path))
    return "model=recurrent_model:build"


def test_recurrent_layers_are_counted_the_same_with_onednn_and_without(tmp_path: Path) -> None:
    inputs = prepare_inputs(parsed(recurrent(tmp_path)))
    work = count_work(inputs)["none"]
    gates, steps = 4 * 32, 8
    forward = 2 * steps * gates * (8 + 32)
    # nobody asks for the gradients of the image's rows and of the state before the first of them
    backward = forward + 2 * (steps - 1) * gates * 32
    assert work.per_sample == forward + backward + 3 * 2 * 32 * 10
    with torch.backends.mkldnn.flags(enabled=False):
        assert count_work(inputs)["none"] == work


def test_per_sample_gradients_of_recurrent_layers_are_counted(tmp_path: Path) -> None:
    arms = "arms:\n  none: []\n  dp: [{name: dp_sgd, clip: 1, noise_multiplier: 1, delta: 0.001}]\n"
    work = count_work(prepare_inputs(parsed(recurrent(tmp_path), text=TEXT + arms)))
    assert 1 <= work["dp"].per_sample / work["none"].per_sample < 1.5


def some(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize(
    ("product", "flops"),
    [
        (lambda: some(4, 16) @ some(16), 2 * 2 * 4 * 16),
        (lambda: some(16) @ some(16), 2 * 16),
        (lambda: torch.addmv(some(4), some(4, 16), some(16)), 2 * 2 * 4 * 16),
        (lambda: torch.addbmm(some(3, 5), some(2, 3, 4), some(2, 4, 5)), 3 * 2 * 2 * 3 * 4 * 5),
        (lambda: torch.baddbmm(some(2, 3, 5), some(2, 3, 4), some(2, 4, 5)), 3 * 2 * 2 * 3 * 4 * 5),
        (lambda: torch.nn.Bilinear(16, 15, 8)(some(4, 16), some(4, 15)), 4 * 3 * 4 * 8 * 16 * 15),
    ],
)
def test_products_of_vectors_batches_and_three_tensors_are_counted(product: Any, flops: int) -> None:
    """With their gradients, but for the outer products that a matrix times a vector has as one: no sum is in these."""
    with _Counter() as counter:
        product().sum().backward()
    assert counter.flops == flops


def test_memory_is_what_autograd_keeps_and_three_times_the_weights() -> None:
    work = count_work(prepare_inputs(parsed()))["none"]
    assert work.weights == 3 * 4 * (64 * 4 + 4 + 4 * 10 + 10)
    # float32 inputs (flattened), the hidden layer's output, the log-probabilities; int64 labels
    assert 4 * (64 + 4 + 10) <= work.activations <= 4 * (2 * 64 + 3 * 4 + 3 * 10) + 16
    assert work.memory(10, Training(batch_size=5)) == work.weights + 5 * work.activations


@pytest.mark.parametrize(
    ("training", "copies"),
    [("{momentum: 0.9}", 4), ("{optimiser: adam}", 5), ("{optimiser: adamw}", 5), ("{algorithm: fedsgd}", 3)],
)
def test_memory_has_the_optimisers_state(training: str, copies: int) -> None:
    work = count_work(prepare_inputs(parsed(f"training={training}")))["none"]
    assert work.weights == copies * 4 * (64 * 4 + 4 + 4 * 10 + 10)


def test_memory_has_what_is_frozen_and_the_buffers_once(tmp_path: Path) -> None:
    (tmp_path / "mostly_frozen.py").write_text(
        "from torch import nn\n\n\n"
        "def build():\n"
        "    body = nn.Linear(64, 1000).requires_grad_(False)\n"
        "    return nn.Sequential(nn.Flatten(), body, nn.Linear(1000, 10), nn.BatchNorm1d(10))\n"
    )
    registry.search(str(tmp_path))
    work = count_work(prepare_inputs(parsed("model=mostly_frozen:build")))["none"]
    frozen, trained, statistics = 64 * 1000 + 1000, 1000 * 10 + 10 + 10 + 10, 10 + 10
    assert work.weights == 4 * (frozen + 3 * trained + statistics) + 8  # a count of batches, int64


@given(st.integers(1, 50), st.integers(1, 12), st.integers(1, 20))
def test_samples_are_counted_as_often_as_they_are_in_a_batch(samples: int, size: int, steps: int) -> None:
    from rayfed.simulation.client.local import batches

    training = Training(batch_size=size, steps=steps)
    assert count_processed(samples, training) == sum(map(len, batches(samples, training, 0)))
    poisson = Training(batch_size=size, steps=steps, sampling="poisson")
    assert count_processed(samples, poisson) == steps * min(size, samples)


# Rounds


def round_clock(times: dict[int, float], goal: int, deadline: float | None, waits: bool) -> RoundClock:
    return RoundClock(times, dict.fromkeys(times, (0.0, np.inf)), {}, goal, deadline, waits)


def test_a_round_waits_for_its_slowest_or_for_its_deadline_or_for_as_many_as_it_wants() -> None:
    times = {1: 3.0, 2: 5.0, 3: 4.0, 4: 20.0}
    closing = round_clock(times, 4, None, False).close(times)
    assert (closing.seconds, closing.idle, closing.admitted) == (20.0, (17 + 15 + 16 + 0) / 4, {1, 2, 3, 4})
    closing = round_clock(times, 4, 10.0, False).close(times)
    assert (closing.seconds, closing.idle, closing.admitted) == (10.0, (7 + 5 + 6) / 3, {1, 2, 3})
    closing = round_clock(times, 2, 10.0, True).close(times)
    assert (closing.seconds, closing.idle, closing.admitted) == (4.0, 0.5, {1, 3})
    closing = round_clock(times, 4, 1.0, False).close(times)
    assert (closing.seconds, closing.idle, closing.admitted) == (1.0, None, set())


@given(
    st.dictionaries(st.integers(0, 99), st.floats(0.1, 100), min_size=1),
    st.integers(1, 20),
    st.none() | st.floats(0.1, 100),
)
def test_a_round_takes_the_first_and_nobody_late(times: dict[int, float], goal: int, deadline: float | None) -> None:
    goal = min(goal, len(times))
    closing = round_clock(times, goal, deadline, True).close(times)
    taken = [times[client] for client in closing.admitted]
    others = [seconds for client, seconds in times.items() if client not in closing.admitted]
    assert len(taken) <= goal
    assert all(seconds <= closing.seconds for seconds in taken)
    assert deadline is None or closing.seconds <= deadline
    if len(taken) == goal:
        assert all(seconds >= max(taken) for seconds in others)
    else:
        assert deadline is not None
        assert closing.seconds == deadline
        assert all(seconds > deadline for seconds in others)


def the_clock(s: Scenario, work: Work, samples: int = 10) -> Clock:
    assert s.federation.system is not None
    return Clock(s, s.federation.system, np.full(s.federation.clients, samples), {"none": work})


@pytest.mark.engine
def test_two_classes_have_the_expected_maximum_and_share_of_dropped() -> None:
    """With a share p of slow devices, E max of n draws is slow - (slow - fast) (1 - p)^n, and late are p of all."""
    s = parsed("federation.clients=100000", "federation.rounds=1500", "federation.clients_per_round=6")
    arm, p, n, rounds = scenarios.resolve(s)["none"], 0.25, 6, 1500
    clock = the_clock(s, Work(0.0, 1000.0, 0, 0.0))
    fast, slow = 10 * 1000 / 1e6, 10 * 1000 / 1e5
    seconds = []
    for round in range(rounds):
        begun = clock.begin(arm, round, plan.drawn_clients(s, round), 0)
        arrivals = {client: begun.arrival(client, 0) for client in begun.ready}
        seconds.append(begun.close(arrivals).seconds)
    assert set(seconds) == {fast, slow}
    expected = slow - (slow - fast) * (1 - p) ** n
    spread = (slow - fast) * np.sqrt((1 - p) ** n * (1 - (1 - p) ** n) / rounds)
    assert abs(np.mean(seconds) - expected) < 5 * spread

    late = 0
    dropping = the_clock(parsed("federation.system.deadline=0.05", "federation.clients=100000"), clock.work["none"])
    for round in range(rounds):
        begun = dropping.begin(arm, round, plan.drawn_clients(s, round), 0)
        arrivals = {client: begun.arrival(client, 0) for client in begun.ready}
        closing = begun.close(arrivals)
        late += n - len(closing.admitted)
        assert closing.seconds == (fast if len(closing.admitted) == n else 0.05)
    assert abs(late / (n * rounds) - p) < 5 * np.sqrt(p * (1 - p) / (n * rounds))


def test_a_clients_time_is_transfer_work_and_transfer(tmp_path: Path) -> None:
    system = "{reference: 1.0e6, devices: {d: {compute: 2, down: 4, up: 1, latency: 0.25}}}"
    folder = played(tmp_path, f"federation.system={system}")
    inputs = prepare_inputs(parsed())
    values = 64 * 4 + 4 + 4 * 10 + 10
    for row in rows(folder, "clients"):
        work = model_flops(int(inputs.parts.sizes[row["client"]])) / 2e6
        expected = 0.25 + 4 * values * 8 / 4e6 + work + 0.25 + row["sent_bytes"] * 8 / 1e6
        assert row["simulated_seconds"] == pytest.approx(expected, rel=1e-12)
    for row in rows(folder, "rounds"):
        own = [r["simulated_seconds"] for r in rows(folder, "clients") if r["round"] == row["round"]]
        assert row["simulated_seconds"] == max(own)
        assert row["idle"] == pytest.approx(max(own) - np.mean(own))
        assert row["dropped"] == 0


def test_a_defence_that_sends_less_is_sooner_by_the_bytes_it_saves(tmp_path: Path) -> None:
    system = "federation.system.devices={d: {up: 0.01}}"
    arms = "arms:\n  none: []\n  prune: [{name: prune, ratio: 0.9}]\n"
    folder = played(tmp_path, system, text=TEXT + arms)
    found = {row["arm"]: row for row in rows(folder, "rounds") if row["round"] == 0}
    sent = {row["arm"]: {} for row in rows(folder, "clients")}
    for row in rows(folder, "clients"):
        if row["round"] == 0:
            sent[row["arm"]][row["client"]] = row["sent_bytes"], row["simulated_seconds"]
    for client, (size, seconds) in sent["none"].items():
        less, sooner = sent["prune"][client]
        assert seconds - sooner == pytest.approx((size - less) * 8 / 1e4)
    assert found["prune"]["simulated_seconds"] < 0.5 * found["none"]["simulated_seconds"]


OVER = (
    "federation.system.over_selection=2",
    "federation.system.compute_spread=1",
    "federation.system.devices.slow.up=1",
)
LATE_ONES = ("federation.system.deadline=0.05", "federation.system.devices.fast.failure=0.2")


UNLIKE = ("partition={name: quantity, alpha: 0.3}", "data.train_samples=600")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("changes", "status"),
    [(OVER, SURPLUS), (LATE_ONES, LATE), ((*UNLIKE, *OVER), SURPLUS), ((*UNLIKE, *LATE_ONES), LATE)],
)
def test_who_is_left_out_is_in_no_sum(changes: tuple[str, ...], status: str, tmp_path: Path) -> None:
    """The weights are those of a round in which only the others were drawn."""
    folder = played(tmp_path, "federation.rounds=1", *changes)
    clients = rows(folder, "clients")
    left = [row["client"] for row in clients if row["status"] == "ok"]
    assert {row["status"] for row in clients} >= {"ok", status}
    assert 0 < len(left) < len(clients)
    assert UNLIKE[0] not in changes or len({row["samples"] for row in clients}) > 1
    [round] = rows(folder, "rounds")
    assert (round["clients"], round["dropped"]) == (len(left), len(clients) - len(left))
    assert round["bytes_up"] == sum(row["sent_bytes"] or 0 for row in clients)
    saved = checkpoint.load(folder)
    assert saved is not None

    s = parsed("federation.system=null", *(UNLIKE if UNLIKE[0] in changes else ()))
    inputs = prepare_inputs(s)
    from rayfed.simulation.client.server_message import Sent

    worker = LocalExecutor(inputs)._client
    arm = inputs.accounts[0].arm
    total, _ = worker.cohort("none", Sent(0, arm.weights, arm.buffers), left, {})
    for name, weight in arm.weights.items():
        expected = weight - total.tensors[name] / total.weight
        torch.testing.assert_close(saved.server["none"]["weights"][name], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("unfinished", [Overdue(), Crashed(memory=False)])
def test_an_over_selected_round_goes_on_without_a_client_that_never_answers(
    unfinished: Overdue | Crashed, tmp_path: Path
) -> None:
    s = parsed(*OVER, "federation.rounds=1", "federation.failures={timeout: 5, then: drop}")
    bad = plan.drawn_clients(s, 0)[0]

    class Failing(LocalExecutor):
        def run_clients(self, calls: Sequence[Call]) -> Iterator[Done]:
            for call in calls:
                never = call.method == "cohorts" and call.args[3] == [(bad,)]
                yield from [Done(call, unfinished, [])] if never else super().run_clients([call])

    folder = runner.launch(s, str(tmp_path), LocalExecution(Failing), Progress())
    told = {row["client"]: row["status"] for row in rows(folder, "clients")}
    assert len(told) == 8
    assert "times" in told.pop(bad)
    assert sorted(told.values()) == ["ok"] * 4 + [SURPLUS] * 3


def test_a_device_that_drops_out_makes_a_round_wait_for_its_deadline(tmp_path: Path) -> None:
    folder = played(tmp_path, "federation.system={deadline: 3, devices: {d: {failure: 0.5}}}", "federation.rounds=8")
    for row in rows(folder, "rounds"):
        own = [r for r in rows(folder, "clients") if r["round"] == row["round"]]
        lost = [r for r in own if r["status"] == LOST]
        assert all(r["sent_bytes"] is None and r["simulated_seconds"] is None for r in lost)
        assert row["dropped"] == len(lost)
        assert (row["simulated_seconds"] == 3) == bool(lost)
    assert 0 < sum(row["dropped"] for row in rows(folder, "rounds")) < 32


def test_a_device_without_the_memory_sends_nothing(tmp_path: Path) -> None:
    devices = "{deadline: 9, devices: {small: {memory: 0.0001}, big: {memory: 1}}}"
    folder = played(tmp_path, f"federation.system={devices}", "federation.clients_per_round=20")
    told = {row["status"] for row in rows(folder, "clients")}
    assert told == {"ok", SMALL}


def test_rounds_begin_at_their_hour(tmp_path: Path) -> None:
    every = ("federation.system.every=100", "federation.system.deadline=50", "federation.rounds=3")
    plain = [r["simulated_seconds"] for r in rows(played(tmp_path / "a", "federation.rounds=3"), "rounds")]
    paced = [r["simulated_seconds"] for r in rows(played(tmp_path / "b", *every), "rounds")]
    ends = [100 * round + seconds for round, seconds in enumerate(plain)]
    assert np.cumsum(paced) == pytest.approx(ends)


def test_a_round_without_anybody_there_takes_no_time_and_changes_nothing(tmp_path: Path) -> None:
    devices = "{a: {available: [" + ", ".join(["1", *["0"] * 23]) + "]}}"
    every = ("federation.system.every=3600", "federation.system.deadline=60", "federation.rounds=3")
    folder = played(tmp_path, f"federation.system.devices={devices}", *every)
    found = rows(folder, "rounds")
    assert [row["clients"] for row in found] == [4, 0, 0]
    assert [(row["idle"], row["dropped"]) for row in found[1:]] == [(None, 0)] * 2
    assert found[0]["simulated_seconds"] + found[1]["simulated_seconds"] == 3600
    assert found[1]["test_loss"] == found[0]["test_loss"]


COLUMNS = ("simulated_seconds", "idle", "dropped", "clients", "bytes_up", "test_accuracy")


def figures(folder: RunFolder) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in COLUMNS) for row in rows(folder, "rounds")]


@pytest.mark.engine
@pytest.mark.parametrize(
    "changes", [(), OVER, LATE_ONES, ("federation.system.every=5", "federation.system.deadline=5")]
)
def test_times_are_the_same_with_other_cohorts_and_all_bits_after_a_resume(
    changes: tuple[str, ...], tmp_path: Path
) -> None:
    whole = played(tmp_path / "a", *changes, "federation.rounds=3")
    cohorts = played(tmp_path / "b", *changes, "federation.rounds=3", "federation.cohort_size=3")
    timed = ("client", "status", "simulated_seconds", "sent_bytes")
    assert [[row[name] for name in timed] for row in rows(cohorts, "clients")] == [
        [row[name] for name in timed] for row in rows(whole, "clients")
    ]
    if changes:  # each client is a cohort then, whatever size is asked for
        assert figures(cohorts) == figures(whole)
        assert_same_bits(arm_weights(cohorts), arm_weights(whole))
    else:
        torch.testing.assert_close(arm_weights(cohorts), arm_weights(whole))
    with pytest.raises(KeyboardInterrupt):
        runner.launch(parsed(*changes, "federation.rounds=3"), str(tmp_path / "c"), local, Interrupted(0))
    [folder] = (tmp_path / "c").iterdir()
    resumed = runner.resume(str(folder), local, Progress())
    assert figures(resumed) == figures(whole)
    assert_same_bits(arm_weights(resumed), arm_weights(whole))


def test_devices_change_no_bits_of_a_round_that_drops_nobody(tmp_path: Path) -> None:
    with_devices, without = played(tmp_path / "a"), played(tmp_path / "b", "federation.system=null")
    assert all(torch.equal(w, arm_weights(without)[name]) for name, w in arm_weights(with_devices).items())
    assert all(row[name] is None for row in rows(without, "rounds") for name in COLUMNS[:3])


# Privacy


DP = "defences: [{name: dp_fedavg, clip: 1, noise_multiplier: 1, delta: 0.001}]\n"
LOCAL_DP = "defences: [{name: dp_sgd, clip: 1, noise_multiplier: 1, delta: 0.001}]\n"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["system.over_selection=2"], "over_selection"),
        (["system.deadline=5"], "deadline"),
        (["system.deadline=5", "sampling=poisson"], "deadline"),
        (["system.devices.slow.available=0.5", "system.every=5", "system.deadline=5"], "available"),
        (["system.devices.slow.available=0.5", "system.every=5", "system.deadline=5", "sampling=poisson"], "available"),
    ],
)
def test_no_epsilon_where_devices_choose_the_clients(changes: list[str], why: str) -> None:
    s = parsed(*(f"federation.{c}" for c in changes), text=TEXT + DP)
    [row] = prepare_inputs(s).privacy
    assert row.get("epsilon") is None
    assert "no guarantee" in row["note"]
    assert why in row["note"]


@pytest.mark.engine
def test_an_epsilon_stays_where_devices_do_not_choose() -> None:
    plain = prepare_inputs(parsed("federation.system=null", text=TEXT + DP)).privacy
    assert prepare_inputs(parsed(text=TEXT + DP)).privacy == plain
    assert plain[0]["epsilon"] is not None
    local_ones = prepare_inputs(parsed("federation.system.over_selection=2", text=TEXT + LOCAL_DP)).privacy
    assert local_ones[0]["epsilon"] is not None


def test_a_budget_is_refused_where_there_is_no_account() -> None:
    inputs = prepare_inputs(parsed("federation.system.deadline=5", "privacy.budget=100", text=TEXT + DP))
    with pytest.raises(UserError, match=r"privacy\.budget: .*there is no account"):
        _ = inputs.limits


def test_masks_are_not_for_rounds_that_leave_clients_out() -> None:
    masks = "federation.protection=secure_aggregation"
    for change in ("federation.system.deadline=5", "federation.system.over_selection=2"):
        with pytest.raises(ScenarioError, match=r"federation\.system .* arm 'none'"):
            prepare_inputs(parsed(masks, change))
    prepare_inputs(parsed(masks))  # where a round waits for all


def test_a_client_that_was_late_is_attacked_all_the_same(tmp_path: Path) -> None:
    """Its update arrives, and the server may look at it."""
    attack = "attacks: [{name: analytic, rounds: [0], victims: 4, observes: gradient}]\n"
    folder = played(tmp_path, "federation.system.deadline=0.05", "federation.rounds=1", text=TEXT + attack)
    late = {row["client"] for row in rows(folder, "clients") if row["status"] == LATE}
    assert late
    assert late <= {row["victim"] for row in rows(folder, "attacks")}


# Results


@pytest.mark.engine
def test_simulated_time_stands_in_outcomes_report_and_recommendation(tmp_path: Path) -> None:
    arms = "arms:\n  none: []\n  prune: [{name: prune, ratio: 0.9}]\n"
    learns = ("federation.rounds=6", "training.epochs=10", "model.hidden=[16]", "data.test_samples=200")
    folder = played(tmp_path, "federation.system.devices={d: {up: 0.01}}", *learns, text=TEXT + arms)
    run = rayfed.load(folder.url)
    found = {row["arm"]: row for row in run.outcomes().to_pylist()}
    for arm in ("none", "prune"):
        own = [row["simulated_seconds"] for row in rows(folder, "rounds") if row["arm"] == arm]
        assert found[arm]["simulated_seconds"] == pytest.approx(sum(own))
    chosen = recommend_setting(run.settings(), [parse_bound("test_accuracy>=0")])
    assert chosen.costs == ("simulated_seconds", "bytes_up")
    assert chosen.chosen.title == "prune"
    last = add_virtual_time([row for row in rows(folder, "rounds") if row["arm"] == "prune"])[-1]
    assert last["simulated_minutes"] == pytest.approx(found["prune"]["simulated_seconds"] / 60)


@pytest.mark.engine
@pytest.mark.usefixtures("reports")
def test_a_run_without_devices_says_nothing_of_virtual_time(tmp_path: Path) -> None:
    folder = played(tmp_path, "federation.system=null", "federation.rounds=3")
    page = folder.read_text("report.html")
    assert "Simulated time is the time of the rounds" not in page
    assert "simulated time (min)" not in page
    assert default_costs(rayfed.load(folder.url).settings()) == COSTS
